"""The paper's method made stable: normalised steps by hand, steps taken back, and what is chosen on training tasks."""

import math
from dataclasses import replace

import pytest
import torch

from metamd import Diagonal, Forward, Journal, Method, PaperBound, Regret, Reverse, load, meta_train, paper, tasks
from metamd.files.header import Header
from metamd.inner.closed_form import Iterate
from metamd.inner.run import run_inner
from metamd.learning import Normalised, Stopping, Unpublished
from metamd.learning.first_look import draw_config
from metamd.learning.paper import climb
from metamd.learning.reference import draw_tasks
from metamd.tasks import config_hash
from metamd.tasks.base import derive_seed
from tests.meta_families import Wrapped, jealous, small

pytestmark = pytest.mark.filterwarnings("ignore::metamd.NotConvergedWarning")

F64 = torch.float64


def step(rule, gradient, log_d=None, factor=1.0, tasks=2.0):
    """What the rule does to log M, from a sum of gradients by log D."""
    g = torch.tensor(gradient, dtype=F64)
    now = Iterate({"x": torch.zeros_like(g) if log_d is None else log_d}, torch.zeros(len(g), dtype=F64))
    sums = {"gradient/log_d/x": g, "tasks": torch.tensor(tasks, dtype=F64)}
    return (rule.update(now, sums, {}, factor).iterate.log_d["x"] - now.log_d["x"]) / 2


def test_a_normalised_step_by_hand():
    moved = step(Normalised(pace=0.1, clip=1.5), [[4.0, -1.0, 1.0, 0.0]])
    # the mean of |g| over the three that are felt is 2; the first would move by 0.2 and is clipped
    torch.testing.assert_close(moved, torch.tensor([[-0.15, 0.05, -0.05, 0.0]], dtype=F64))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_length_of_a_step_does_not_depend_on_that_of_the_gradient(scale):
    rule, g = Normalised(pace=0.03), torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=F64)
    moved = step(rule, (scale * g).tolist())
    torch.testing.assert_close(moved, step(rule, g.tolist()))
    assert float(moved.abs().mean()) == pytest.approx(0.03, rel=0.05)
    assert float(moved.abs().max()) <= 0.09 + 1e-12
    assert bool((moved * g <= 0).all()), "downhill in every coordinate"


def test_one_huge_coordinate_moves_no_further_than_the_box():
    moved = step(Normalised(pace=0.02), [[1e9, *[1.0] * 99]])
    assert float(moved.abs().max()) == pytest.approx(0.06)
    assert float(moved[0, 1:].abs().max()) < 1e-6, "the mean is that of the huge one: the others wait"


def test_a_piece_without_a_gradient_stays_and_does_not_lengthen_the_steps_of_the_others():
    alone, beside = step(Normalised(), [[3.0, 1.0]]), step(Normalised(), [[3.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(beside[:1], alone)
    assert not bool(beside[1].any())
    assert not bool(step(Normalised(), [[0.0, 0.0]]).any())


def test_a_smaller_factor_shortens_the_step_after_a_divergence():
    torch.testing.assert_close(step(Normalised(), [[3.0, 1.0]], factor=0.25), step(Normalised(), [[3.0, 1.0]]) / 4)


def test_common_factors_may_be_left_to_the_rate():
    moved = step(Normalised(common=False), [[5.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    assert moved.sum(1).abs().max() < 1e-15
    assert not bool(moved[1].any()), "a common factor is all that the second piece asks for"
    assert float(step(Normalised(), [[5.0, 1.0, 0.0], [1.0, 1.0, 1.0]])[1].sum()) < 0


@pytest.mark.parametrize(("options", "said"), [({"pace": 0.0}, "pace must be"), ({"clip": 0.5}, "clip must be")])
def test_steps_that_are_none_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Normalised(**options)


def test_a_step_after_which_tasks_diverge_is_taken_back():
    """With k = 0 nothing holds M up: steps of e^-1 lead to divergence, and the loop comes back."""
    records, family = [], tasks.quadratic((2.0, 2.0), steps=30)
    method = Method(Normalised(pace=1.0, clip=1.0), keep="last", stopping=Stopping(0.0), lr=0.1)
    options = {"objective": PaperBound(0.0), "estimator": Reverse(1), "outer_steps": 8, "tasks_per_step": 2}
    found = meta_train(family, Diagonal(), method=method, **options, log=lambda r, s: records.append(r))
    lost = [i for i, r in enumerate(records) if r["diverged"]]
    assert lost, "a step that was too long"
    assert lost[-1] < len(records) - 1, "and steps after it that finish"
    task = family.build(draw_config(family, 9, "other"))
    assert not run_inner(task, found.potential, lr=0.1).diverged


# the recipe

QUICK = {"k": 0.1, "rho": 0.1, "pieces": 1, "outer_steps": 8}
FAMILY = tasks.quadratic((1.0, 14.0), start=0.1, steps=25)


@pytest.fixture(scope="module")
def learned():
    """The preset on the paper's ill-conditioned quadratics, and the records of its outer steps."""
    records = []
    return meta_train(jealous(FAMILY), **paper(**QUICK), tasks_per_step=2, log=lambda r, s: records.append(r)), records


def means(found):
    return [float(v.detach().mean()) for v in found.potential.log_d.values()]


def test_the_preset_beats_tuned_sgd_on_a_small_family(learned):
    found, records = learned
    sgd, *rows = found.header.choice["tried"]
    best = min(rows, key=lambda row: row["loss"])
    assert (sgd["k"], sgd["outer_steps"]) == (0.0, 0)
    assert best["loss"] < 1.02 * sgd["loss"] < 0, "a loss below zero: lower is further"
    d = found.potential.log_d["theta"][0].detach()
    assert float(d[1] - d[0]) > 0.5, "the steep coordinate has the shorter steps"
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))


def test_the_file_has_geometric_mean_one_and_the_rate_that_goes_with_it(learned, tmp_path):
    found, _ = learned
    assert means(found) == [pytest.approx(0.0, abs=1e-12)]
    assert found.usage.factor == min(found.header.choice["tried"], key=lambda row: row["loss"])["rate"]
    assert "geometric mean 1" in found.header.choice["rule"]
    found.save(tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors").header == found.header


def test_what_is_chosen_is_chosen_on_training_tasks_that_no_outer_step_saw(learned):
    """`jealous` refuses validation and test data; nobody asks for a held-out side, which quadratics do not have."""
    found, _ = learned
    judges = {config_hash(t.config) for t in draw_tasks(jealous(FAMILY), 0, "published", 2)}
    stages = [(0, 3), (derive_seed(0, "continued", 3), 3), (derive_seed(0, "continued", 6), 2)]
    places = [(seed, s, i) for seed, n in stages for s in range(1, n + 1) for i in range(2)]
    steps = {config_hash(draw_config(jealous(FAMILY), seed, "train", s, i)) for seed, s, i in places}
    assert not judges & steps
    assert judges | steps == set(found.header.task_hashes)


def test_stages_go_on_from_where_the_one_before_ended(learned):
    """With two coordinates of one mean each step is of the same length: after n steps log M lies n - 2m steps from 1."""
    found, _ = learned
    sgd, *rows = found.header.choice["tried"]
    assert [row["outer_steps"] for row in rows] == [3, 6, 8]
    d = found.potential.log_d["theta"][0].detach()
    steps = float(d[1] - d[0]) / 4 / QUICK["rho"]
    assert steps == pytest.approx(2), "of six steps, two went back"
    # two steps back from there lead to M = 1, so that the last stage, which is not taken, is judged exactly as SGD is
    assert (rows[-1]["rate"], rows[-1]["loss"]) == (sgd["rate"], sgd["loss"])
    assert rows[1]["loss"] < rows[0]["loss"] < rows[2]["loss"]


def test_pieces_begin_apart_by_a_small_seeded_spread():
    def first(seed):
        options = paper(k=0.1, rho=1e-9, outer_steps=1)
        return meta_train(FAMILY, **options, tasks_per_step=1, seed=seed).potential.log_d["theta"].detach() / 2

    one, again, other = first(0), first(0), first(1)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert 0 < float(one.std(0).max()) < 0.1, "of log M"


def test_every_pair_is_tried_and_the_best_goes_on_while_it_gains():
    offered = Unpublished(shares=(0.5, 50.0), paces=(0.1,), first=2)
    options = paper(pieces=1, outer_steps=4)
    found = meta_train(FAMILY, **options | {"method": replace(options["method"], unpublished=offered)}, tasks_per_step=2)
    sgd, *rows = found.header.choice["tried"]
    assert rows[1]["k"] == pytest.approx(100 * rows[0]["k"], rel=1e-5)
    assert [r["outer_steps"] for r in rows[:3]] == [2, 2, 4]
    assert rows[2]["k"] == min(rows[:2], key=lambda r: r["loss"])["k"]
    assert found.header.cost["outer_steps"] == min(rows, key=lambda r: r["loss"])["outer_steps"]
    assert sgd["outer_steps"] == 0


def test_a_recipe_that_was_stopped_continues_to_the_same_file(learned, tmp_path):
    def interrupt(record, step):
        if step == 3:
            raise KeyboardInterrupt

    options = {**paper(**QUICK), "tasks_per_step": 2, "journal": Journal(tmp_path / "run")}
    with pytest.raises(KeyboardInterrupt):
        meta_train(jealous(FAMILY), **options, log=interrupt)
    seen = []
    again = meta_train(jealous(FAMILY), **options, log=lambda r, s: seen.append(r["objective"]))
    assert len(seen) == 5, "three of the eight are kept"
    assert again.fingerprint() == learned[0].fingerprint()


def test_a_family_on_which_sgd_diverges_is_said():
    def change(task, config):
        batch = task.batch
        task.batch = lambda step: {n: x * (math.nan if step > 2 else 1.0) for n, x in batch(step).items()}

    with pytest.raises(ValueError, match="SGD diverged on 'wrapped' at every rate"):
        meta_train(Wrapped(small(10), change), **paper(**QUICK), tasks_per_step=1)


@pytest.mark.parametrize(
    "other", [{"objective": Regret()}, {"outer": None}, {"estimator": Forward(), "objective": Regret()}], ids=str
)
def test_what_the_paper_leaves_open_is_for_its_objective_and_normalised_steps(other):
    options = paper()
    method = replace(options.pop("method"), **{n: v for n, v in other.items() if n == "outer"})
    with pytest.raises(ValueError, match=r"Pass \*\*metamd.paper\(\)"):
        meta_train(FAMILY, **options | {n: v for n, v in other.items() if n != "outer"}, method=method)


@pytest.mark.parametrize("options", [{"shares": ()}, {"paces": (0.0,)}, {"first": 0}, {"tasks": 0}, {"k": -1.0}], ids=str)
def test_choices_that_are_none_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        Unpublished(**options)


@pytest.mark.parametrize(("best", "first"), [(0.4, 0.1), (1e-3, 0.1), (30.0, 0.1)])
def test_the_climb_ends_at_the_best_rate_of_its_ladder(best, first):
    found = climb(lambda r: abs(math.log(r / best)), first, 2.0)
    assert abs(math.log2(found / best)) <= 0.5 + 1e-6
    assert climb(lambda r: math.inf if r > 1e-3 else -r, first, 2.0) <= 1e-3, "where all diverge, lower rates are tried"


@pytest.mark.parametrize("row", [{}, {"k": -1.0}, {"rate": 0.0}, {"loss": "low"}, {"outer_steps": 1.5}], ids=str)
def test_a_header_with_a_broken_table_is_refused(row):
    fine = {"k": 1.0, "pace": 0.1, "outer_steps": 2, "rate": 0.1, "loss": None}
    shape = {"pieces": 1, "tying": "parameter", "centre": "start", "tensors": {"x": (1, 2)}}
    about = {"score": "loss", "judged_on": "training", "rule": "lowest"}
    assert Header(**shape, choice={**about, "tried": [fine]}).choice["tried"] == [fine]
    with pytest.raises(ValueError, match="tried"):
        Header(**shape, choice={**about, "tried": [{**fine, **row} if row else {}]})
