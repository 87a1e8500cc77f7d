import math
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from metamd import (
    ClosedForm,
    Diagonal,
    Euclidean,
    Forward,
    LogGap,
    MaxDiagonal,
    Method,
    NotConvergedWarning,
    PaperBound,
    Refine,
    Regret,
    Reverse,
    Stopping,
    TrainingLoss,
    TrustRegion,
    meta_train,
    paper,
    tasks,
)
from metamd.inner.closed_form import Iterate
from metamd.inner.objectives import PRIOR
from metamd.inner.run import run_inner
from metamd.learning.first_look import draw_task, largest_curvature
from metamd.learning.outer import Adam, GradientDescent, OuterUpdate
from tests.helpers import closed_form
from tests.meta_families import Mixed, Noisy, jealous, poisoned, small

SMALL = {"outer_steps": 6, "tasks_per_step": 4, "seed": 0}


def metrics(learned, piece=0):
    return {k: v.detach()[piece].exp() for k, v in learned.potential.log_d.items()}


def iterations(potential, family, count=200, tolerance=1e-6, limit=1000):
    """Mean number of steps until the gradient is small, on test tasks that no meta-training saw, all at once."""
    d = potential if isinstance(potential, torch.Tensor) else metrics_of(potential)
    problems = [draw_task(family, "test", i) for i in range(count)]
    q, b = (torch.stack([p.whole[n] for p in problems]) for n in ("Q", "b"))
    x = torch.stack([p.start for p in problems])
    steps = torch.full((count,), limit)
    for t in range(limit):
        g = 2 * torch.einsum("nij,nj->ni", q, x) - b
        steps = torch.where((g.norm(dim=1) < tolerance) & (steps == limit), t, steps)
        if int(steps.max()) < limit:
            break
        x = x - g / d
    return float(steps.double().mean())


def metrics_of(potential):
    return potential.log_d["theta"].detach()[0].exp()


@pytest.fixture(scope="module")
def learned():
    records = []
    result = meta_train(tasks.quadratic(), Diagonal(), log=lambda r, s: records.append(r))
    return result, records


# the closed form


def test_closed_form_comes_near_the_best_diagonal(learned):
    """Oracle: all diagonals of a grid, on the test tasks themselves. Issue 3 asks for 1.3."""
    family = tasks.quadratic()
    grid = [torch.tensor([a, b]).double() for a in (0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2) for b in (22, 25, 28, 31, 35)]
    best = min(iterations(d, family) for d in grid)
    ours = iterations(learned[0].potential, family)
    plain = iterations(torch.full((2,), 32.0).double(), family)
    assert best <= ours <= 1.3 * best
    assert plain > 15 * ours, "the Euclidean geometry with the best power of two as rate"


def test_a_separable_family_leads_to_newtons_metric():
    family = tasks.quadratic((0.5, 8.0, 2.0), coupling=0.0, spread=0.0, steps=40)
    method = Method(TrustRegion(memory=0.0), stopping=Stopping(0.0))
    found = metrics(meta_train(family, Diagonal(), outer_steps=8, tasks_per_step=3, method=method))["theta"]
    torch.testing.assert_close(found, torch.tensor([1.0, 16.0, 4.0]).double(), rtol=1e-3, atol=0)


def test_records_say_what_happened(learned):
    result, records = learned
    steps = [r["step"] for r in records]
    assert steps == list(range(1, len(steps) + 1))
    assert [r["stage"] for r in records] == ["learn"] * (len(steps) - 1) + ["judge"]
    assert records[0]["objective"] > 1.5 * records[-2]["objective"]
    assert records[0]["bound"] < records[0]["objective"] < 1.001 * records[0]["bound"], "the certified bound, and the prior"
    assert "converged" in records[-2]["note"]
    assert "kept" in records[-1]["note"]
    cost = result.header.cost
    assert cost["gradient_evaluations"] == sum(r["gradients"] for r in records) + 8
    assert cost["outer_steps"] == len(steps)


def test_the_limit_of_outer_steps_is_told_from_convergence():
    records = []
    meta_train(small(), Diagonal(), outer_steps=2, tasks_per_step=2, log=lambda r, s: records.append(r))
    assert "limit of 2" in records[1]["note"]


def test_the_header_says_where_from(learned):
    header = learned[0].header
    family = tasks.quadratic()
    assert header.horizon == 200
    assert header.family["means"] == [0.3, 14.0]
    assert header.objective == repr(Regret(prior=PRIOR))
    assert header.estimator == "ClosedForm()"
    assert header.seeds == (0,)
    assert header.model == {"theta": (2,)}
    first = tasks.config_hash(draw_task(family, 0, "train", 1, 0).config)
    assert first in header.task_hashes
    judged = tasks.config_hash(draw_task(family, 0, "judge", header.cost["outer_steps"], 0).config)
    assert judged in header.task_hashes
    unseen = tasks.config_hash(draw_task(family, 0, "test", 0).config)
    assert unseen not in header.task_hashes


def test_gradient_scale_is_that_of_the_first_gradients():
    found = meta_train(small(), Diagonal(), **SMALL).header.gradient_scale["theta"]
    squares = []
    for i in range(4):
        task = draw_task(small(), 0, "train", 1, i)
        squares.append((2 * task.whole["Q"] @ task.start - task.whole["b"]).square())
    assert found == pytest.approx(float(torch.cat(squares).mean().sqrt()))


def test_one_update_is_the_closed_form_of_its_runs():
    """A second way to the same number: run the tasks by hand and compute the closed form."""
    start = Diagonal().bind({"theta": torch.zeros(2).double()}).with_metrics({"theta": torch.tensor([[0.0, 3.0]]).double()})
    method = Method(TrustRegion(radius=50.0), keep="last")
    found = meta_train(small(), start, outer_steps=1, tasks_per_step=3, method=method).potential.log_d["theta"]
    runs = [run_inner(draw_task(small(), 0, "train", 1, i), start) for i in range(3)]
    assert not any(run.diverged for run in runs)
    bound = start.bind(runs[0].start)
    torch.testing.assert_close(found.detach(), closed_form(runs, bound, Regret(prior=PRIOR))["theta"], rtol=1e-12, atol=0)


def test_the_trust_region_bounds_a_step():
    start = Diagonal().with_metrics({"theta": torch.tensor([[9.0, 9.0]]).double()})
    method = Method(TrustRegion(radius=0.25), keep="last")
    found = meta_train(small(), start, outer_steps=1, tasks_per_step=2, method=method).potential.log_d["theta"]
    torch.testing.assert_close(found.detach(), torch.tensor([[8.75, 8.75]]).double())


def test_memory_averages_the_runs_of_earlier_steps():
    potential = Diagonal().bind({"x": torch.zeros(1).double()})
    now = Iterate.of(potential)
    rule = TrustRegion(radius=50.0, memory=0.5)
    one = {"x/x": torch.tensor([1.0]).double(), "y/x": torch.tensor([4.0]).double(), "tasks": torch.ones(())}
    two = {"x/x": torch.tensor([1.0]).double(), "y/x": torch.tensor([16.0]).double(), "tasks": torch.ones(())}
    still = replace(now, log_d={"x": torch.full((1, 1), 2.0).double().log()})
    first = rule.update(still, one, {}, 1.0)
    assert float(first.iterate.log_d["x"].exp()) == pytest.approx(2), "nothing moved, so nothing is stale"
    second = rule.update(first.iterate, two, first.carried, 1.0)
    assert float(second.iterate.log_d["x"].exp()) == pytest.approx(((16 + 2) / 1.5) ** 0.5)
    stale = rule.update(now, one, {}, 1.0)
    assert float(stale.carried["x/x"]) == 0, "the metric has doubled"
    assert not replace(rule, memory=0.0).update(still, one, {}, 1.0).carried


# randomness


def test_the_seed_alone_decides():
    torch.manual_seed(1)
    one = meta_train(small(), Diagonal(), **SMALL)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = meta_train(small(), Diagonal(), **SMALL)
    other = meta_train(small(), Diagonal(), **(SMALL | {"seed": 1}))
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    assert torch.equal(before, torch.get_rng_state())
    assert one.header.task_hashes == two.header.task_hashes
    assert not set(one.header.task_hashes) & set(other.header.task_hashes)


def test_tasks_are_new_in_every_outer_step():
    found = meta_train(small(), Diagonal(), outer_steps=3, tasks_per_step=4, method=Method(stopping=Stopping(0.0)))
    assert len(found.header.task_hashes) == 4 * 3 + 4


# what is kept


@dataclass(frozen=True)
class Spoiling(TrustRegion):
    """From the third update on, metrics under which nothing moves."""

    def update(self, now, sums, carried, factor):
        found = super().update(now, sums, carried, factor)
        count = carried.get("count", torch.zeros(()).double()) + 1
        iterate = found.iterate.shifted(9.0) if count > 2 else found.iterate
        return OuterUpdate(iterate, {"count": count}, 1.0)


def test_the_best_iterate_is_kept_not_the_last():
    records = []
    options = SMALL | {"outer_steps": 3, "log": lambda r, s: records.append(r)}
    best = meta_train(small(), Diagonal(), method=Method(Spoiling()), **options)
    last = meta_train(small(), Diagonal(), method=Method(Spoiling(), keep="last"), **options)
    assert metrics(best)["theta"][1] < 100
    assert metrics(last)["theta"][1] > 1000, "the double spoils nothing, so the test above says nothing"


def test_judging_by_the_bound_of_ones_own_end_would_keep_what_does_not_move():
    """Why the judge compares against one common point: the bound against one's own end is best for not moving."""
    task = draw_task(small(), 0, "judge", 1, 0)
    frozen = Diagonal().with_metrics({"theta": torch.tensor([[14.0, 14.0]]).double()}).bind(task.init())
    good = Diagonal().with_metrics({"theta": torch.tensor([[0.7, 28.0]]).double().log()}).bind(task.init())
    runs = {name: run_inner(task, phi) for name, phi in (("frozen", frozen), ("good", good))}
    own = {n: float(Regret().value(run, phi).detach()) for (n, run), phi in zip(runs.items(), (frozen, good), strict=True)}
    common = Regret().held(runs["good"])
    fair = {n: float(common.value(run, phi).detach()) for (n, run), phi in zip(runs.items(), (frozen, good), strict=True)}
    assert own["frozen"] < own["good"]
    assert fair["frozen"] > fair["good"]


# trouble


def test_a_poisoned_task_does_not_spoil_the_result():
    records = []
    clean = meta_train(small(), Diagonal(), **SMALL)
    family = poisoned(small())
    found = meta_train(family, Diagonal(), **SMALL, log=lambda r, s: records.append(r))
    sentences = [s for r in records for s in r["diverged"]]
    assert sentences, "no task was poisoned, so the test says nothing"
    assert all("nan" in s for s in sentences if s.startswith("task"))
    assert all(bool(v.isfinite().all()) for v in found.potential.log_d.values())
    assert iterations(found.potential, small()) <= 1.5 * iterations(clean.potential, small())


def test_metrics_that_make_tasks_diverge_are_taken_back_half_way():
    """A first step that goes much too far: the tasks diverge, finish under the metrics before, and the step is halved."""

    leaps = iter([-4.0])

    @dataclass(frozen=True)
    class Reckless(TrustRegion):
        def update(self, *arguments):
            found = super().update(*arguments)
            return replace(found, iterate=found.iterate.shifted(next(leaps, 0.0)))

    records = []
    options = SMALL | {"outer_steps": 9, "log": lambda r, s: records.append(r)}
    found = meta_train(small(), Diagonal(), method=Method(Reckless(), stopping=Stopping(0.0)), **options)
    assert records[1]["diverged"]
    learning = [bool(r["diverged"]) for r in records if r["stage"] == "learn"]
    assert learning[1:] == sorted(learning[1:], reverse=True), "first they diverge, then no more"
    assert not learning[-1]
    assert iterations(found.potential, small()) < 100


def test_all_tasks_diverging_is_a_sentence():
    with pytest.raises(ValueError, match="all 3 tasks of outer step 1 diverged"):
        meta_train(poisoned(small(), share=1000), Diagonal(), outer_steps=2, tasks_per_step=3)


def test_no_validation_data_is_touched():
    found = meta_train(jealous(small()), MaxDiagonal(2), **SMALL, refine=Refine(1))
    assert iterations(found.potential, small()) < 100
    with pytest.raises(AssertionError, match="validation"):
        draw_task(jealous(small()), 0).evaluate({}, "validation")


@pytest.mark.parametrize(
    ("family", "potential", "options", "message"),
    [
        (Mixed(), Diagonal(), {}, 'tying "parameter"'),
        (Mixed((2,), ignores=True), Diagonal(), {}, "ignores 'unused'"),
        (Mixed((2,), bad=True), Diagonal(), {}, "not finite"),
        (Mixed((0,)[:0]), Diagonal(), {}, "."),
        (Mixed((2,)), Diagonal(), {"outer_steps": 0}, "outer_steps must be at least 1, got 0"),
        (Mixed((2,)), Diagonal(), {"tasks_per_step": 0}, "tasks_per_step must be at least 1"),
        (Mixed((2,)), Euclidean(), {}, "got Euclidean"),
        (Mixed((2,)), Diagonal(), {"objective": TrainingLoss()}, "ClosedForm minimises Regret"),
        (Mixed((2,)), Diagonal(), {"method": Method(Adam())}, "does not go with"),
        (Mixed((2,)), Diagonal(), {"estimator": Forward(), "method": Method(TrustRegion())}, "does not go with"),
    ],
    ids=["shapes", "ignored", "nan", "empty", "no steps", "no tasks", "euclidean", "objective", "adam", "region"],
)
def test_bad_input_is_a_sentence(family, potential, options, message):
    with pytest.raises(ValueError, match=message):
        meta_train(family, potential, **options)


def test_bad_options_are_sentences():
    for make in (
        lambda: TrustRegion(0.0),
        lambda: TrustRegion(memory=1.0),
        lambda: Adam(lr=-1.0),
        lambda: GradientDescent(0.0),
        lambda: Stopping(window=0),
        lambda: Refine(0),
        lambda: Refine(estimator=ClosedForm()),
    ):
        with pytest.raises(ValueError, match=r"got|Refine"):
            make()
    with pytest.raises(TypeError, match="TaskFamily"):
        meta_train([], Diagonal())


def test_tasks_of_different_shapes_share_a_metric_by_tensor():
    method = Method(TrustRegion(memory=0.0), stopping=Stopping(0.0))
    found = meta_train(Mixed(steps=20), Diagonal(tying="tensor"), **SMALL, method=method)
    assert float(metrics(found)["theta"]) == pytest.approx(10.0, rel=1e-3), "Newton's metric: the curvature is 10"


# gradients


def test_hypergradients_with_adam_find_the_metric_too():
    """From four times Newton's metric, TrainingLoss by Forward and Adam: D falls to where the loss falls fastest."""
    start = Diagonal(tying="tensor").with_metrics({"theta": torch.tensor([40.0]).double().log()})
    options = {"objective": TrainingLoss(), "estimator": Forward(), "tasks_per_step": 2}
    found = meta_train(Mixed(steps=20), start, outer_steps=25, method=Method(Adam(0.15)), **options)
    assert float(metrics(found)["theta"]) == pytest.approx(10.0, rel=0.2)


def test_gradient_descent_moves_m_as_algorithm_1_says():
    """M - rho/n sum dE/dM, with dE/dM by finite differences of the objective in M."""
    phi = Diagonal(centre="origin").with_metrics({"theta": torch.tensor([[1.0, 30.0]]).double().log()})
    rho = 1e-3
    method = Method(GradientDescent(rho), exact=False, keep="last")
    objective = PaperBound(10.0)
    options = {"estimator": Forward(), "outer_steps": 1, "tasks_per_step": 2, "method": method}
    found = meta_train(small(20), phi, objective=objective, **options)
    m, h = torch.tensor([1.0, 30.0]).double().sqrt(), 1e-6

    def mean(m):
        phi = Diagonal(centre="origin").with_metrics({"theta": (2 * m.log())[None]})
        values = []
        for i in range(2):
            run = run_inner(draw_task(small(20), 0, "train", 1, i), phi, exact=False)
            values.append(float(objective.value(run, phi.bind(run.start)).detach()))
        return sum(values) / 2

    slopes = [(mean(m + h * e) - mean(m - h * e)) / (2 * h) for e in torch.eye(2).double()]
    expected = m - rho * torch.tensor(slopes).double()
    torch.testing.assert_close(metrics(found)["theta"].sqrt(), expected, rtol=1e-6, atol=0)


def test_the_plain_preset_runs_and_learns_on_the_quadratics():
    records = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        found = meta_train(
            tasks.quadratic(steps=100),
            **paper(k=10.0, rho=0.01, outer_steps=3, stable=False),
            tasks_per_step=2,
            log=lambda r, s: records.append(r),
        )
    assert found.header.pieces == 3
    assert found.header.centre == "origin"
    assert "PaperBound" in found.header.objective
    assert records[-1]["objective"] < records[0]["objective"]
    assert all(r["bound"] is None for r in records), "the paper's step certifies nothing"
    assert not bool((found.potential.log_d["theta"][0] == found.potential.log_d["theta"][1]).all())


@pytest.mark.filterwarnings("ignore::metamd.NotConvergedWarning")
def test_the_plain_preset_starts_where_no_step_is_too_long_and_scales_its_rate():
    family, records = tasks.quadratic(start=0.1, steps=200), []
    found = meta_train(family, **paper(outer_steps=2, stable=False), tasks_per_step=4, log=lambda r, s: records.append(r))
    hessians = [2 * torch.tensor(draw_task(family, 0, "train", 1, i).config["Q"]) for i in range(4)]
    largest = max(float(torch.linalg.eigvalsh(h).max()) for h in hessians)
    assert largest_curvature(draw_task(family, 0, "train", 1, 0), 0) == pytest.approx(
        float(torch.linalg.eigvalsh(hessians[0]).max()), rel=1e-6
    )
    m = metrics(found)["theta"].sqrt() / largest**0.5
    assert bool(((m > 0.6) & (m < 1.6)).all()), "the spread of the pieces, and two steps of a few per cent"
    assert not any(r["diverged"] for r in records)
    assert records[-1]["unsettled"] < 0.1


def test_the_scaled_rate_of_plain_gradient_descent_by_hand():
    now = Iterate({"x": torch.tensor([[0.0, 2.0]]).double()}, torch.zeros(1).double())
    sums = {"gradient/log_d/x": torch.tensor([[3.0, -1.0]]).double(), "tasks": torch.tensor(2.0), "value": torch.tensor(8.0)}
    first = GradientDescent(pace=0.1).update(now, sums, {}, 1.0)
    m, rho = now.log_d["x"].div(2).exp(), 0.1 * (1 + math.exp(2)) / 2 / 4
    expected = m - rho * 2 / m * sums["gradient/log_d/x"] / 2
    torch.testing.assert_close(first.iterate.log_d["x"].div(2).exp(), expected)
    for value, share in ((800.0, 0.01), (0.8, 1.0)):  # a larger objective lowers the rate, a smaller does not raise it
        sums["value"] = torch.tensor(value)
        again = GradientDescent(pace=0.1).update(now, sums, first.carried, 1.0)
        torch.testing.assert_close(again.iterate.log_d["x"].div(2).exp(), m - share * (m - expected))


def test_the_paper_preset_warns_when_runs_have_not_converged():
    with pytest.warns(NotConvergedWarning, match="Give the tasks more steps"):
        meta_train(tasks.quadratic(steps=10), **paper(outer_steps=1, stable=False), tasks_per_step=2)


# several pieces


def test_several_pieces_are_learned_along_a_gradient_and_judged_against_the_one_before():
    records = []
    refine = Refine(2, Forward())
    found = meta_train(small(), MaxDiagonal(3), **SMALL, refine=refine, log=lambda r, s: records.append(r))
    assert [r["stage"] for r in records][-3:] == ["refine", "refine", "judge"]
    assert found.header.pieces in (1, 3)
    assert ("kept one piece" in found.header.estimator) == (found.header.pieces == 1)
    last = meta_train(small(), MaxDiagonal(3), **SMALL, refine=refine, method=Method(keep="last"))
    assert last.header.pieces == 3
    d = last.potential.log_d["theta"]
    assert bool((d[0] != d[1]).any())


def test_the_closed_form_alone_refuses_several_pieces():
    with pytest.raises(ValueError, match="ClosedForm learns one piece, got 3"):
        meta_train(small(), MaxDiagonal(3), **SMALL)


def test_refinement_is_judged_against_what_it_started_from():
    records = []
    found = meta_train(small(), Diagonal(), **SMALL, refine=Refine(2, Forward()), log=lambda r, s: records.append(r))
    assert [r["stage"] for r in records][-3:] == ["refine", "refine", "judge"]
    assert records[-2]["hvps"] > 0
    assert "Refine" in found.header.estimator
    assert records[-1]["objective"] > 1, "judged by the regret, as there is no other objective"
    assert found.header.cost["hessian_vector_products"] > 0


def test_refining_by_the_gap_is_judged_by_the_gap_and_saves_iterations():
    """Means (0.3, 14) from (3, 3): the bound asks for D_0 near 0.9, where 0.62 takes fewest iterations."""
    records, options = [], {"outer_steps": 6, "tasks_per_step": 8, "seed": 0}
    family = tasks.quadratic(steps=60)
    plain = meta_train(family, Diagonal(), **options)
    refine = Refine(8, Reverse(1), objective=LogGap(1e-12))
    found = meta_train(family, Diagonal(), **options, refine=refine, log=lambda r, s: records.append(r))
    assert float(metrics(found)["theta"][0]) < 0.9 * float(metrics(plain)["theta"][0])
    assert records[-1]["stage"] == "judge"
    assert records[-1]["objective"] < 30, "asinh of the gap, averaged; the regret would be in the hundreds"
    assert "LogGap(tolerance=1e-12)" in found.header.estimator


def test_coordinates_do_not_starve_by_default():
    method = Method(TrustRegion(memory=0), stopping=Stopping(0.0), keep="last")
    options = {"outer_steps": 16, "tasks_per_step": 2, "method": method}
    default, bare = (meta_train(Noisy(), Diagonal(), **options, **more) for more in ({}, {"objective": Regret()}))
    rates = [1 / metrics(found)["noise"] * metrics(found)["signal"] for found in (default, bare)]
    assert float(rates[0]) > 2e-5
    assert float(rates[1]) < 1e-3 * float(rates[0])
