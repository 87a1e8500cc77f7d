"""certify and `metamd certify`, end to end: what is said, what is refused, what is written."""

import json
import math
import shlex
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import metamd
from metamd import Diagonal, Kronecker, LearnedOptimiser, MaxDiagonal, certify, load, meta_train, tasks
from metamd.certification.certification import _radius, across_domains, distances, recommended, run_task, steps_to
from metamd.certification.generalisation import displacements, measure, size_of, training_tasks
from metamd.certification.statements import HeldOutCertificate, Stated
from metamd.cli import main as cli
from metamd.cli.certify import command_line
from metamd.cli.main import parse
from metamd.cli.options import Certify
from metamd.comparison.training import Measuring, train_contender
from metamd.files.usage import Usage
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.inner.run import train as inner_train
from metamd.learning.first_look import draw_config, draw_task
from metamd.rivals import learned_rival
from metamd.tasks import FAMILIES, Drawn, config_hash
from tests.helpers import draws
from tests.meta_families import poisoned

FAMILY = tasks.quadratic(steps=60)


@pytest.fixture(scope="module")
def learned():
    return meta_train(FAMILY, Diagonal(), outer_steps=4, tasks_per_step=4)


@pytest.fixture(scope="module")
def certificate(learned):
    return certify(learned, FAMILY, held_out_tasks=40, stated=Stated(regret_cap=2000.0))


def held_out(family, count, seed=0):
    return [draw_task(family, seed, "certify", i) for i in range(count)]


def test_statements_are_those_of_the_runs(learned, certificate):
    """Against scores found by hand: theta <- theta - g/D in a loop."""
    target, d = learned.header.target_loss, learned.potential.log_d["theta"].detach()[0].exp()
    ends, distances, counts, regrets = [], [], [], []
    for task in held_out(FAMILY, 40):
        theta, u, losses, regret = task.start.clone(), torch.linalg.solve(2 * task.whole["Q"], task.whole["b"]), [], 0.0
        distances.append(float((d * (u - theta) ** 2).sum().sqrt()))
        for _ in range(60):
            losses.append(float(theta @ task.whole["Q"] @ theta - task.whole["b"] @ theta))
            g = 2 * task.whole["Q"] @ theta - task.whole["b"]
            regret += float(g @ (theta - u))
            theta = theta - g / d
        losses.append(float(theta @ task.whole["Q"] @ theta - task.whole["b"] @ theta))
        ends.append(losses[-1])
        counts.append(next((t for t in range(60) if max(losses[t : t + 2]) <= target), math.inf))
        regrets.append(regret)
    rank = math.ceil(0.95 * 41) - 1
    for quantity, scores in (("steps", counts), ("training loss", ends), ("distance sqrt", distances)):
        found = certificate.of("next task", quantity)
        assert found.bound == pytest.approx(sorted(scores)[rank], rel=1e-9)
        assert (found.verdict, found.confidence) == ("holds", 0.95)
    assert certificate.of("mean", "min(regret").numbers["mean"] == pytest.approx(sum(regrets) / 40)
    assert certificate.of("share").numbers == {"above": 0, "tasks": 40}


def test_what_it_says(certificate):
    text = str(certificate)
    for words in (
        "40 tasks, T = 60, each statement at 95 %",
        "0 of 40 diverged",
        "0 % clipped",
        "as printed; not a valid bound",
        "symmetrisation costs a factor 2",
        "domain: a quadratic with Q and b drawn anew",
        "initialisation: the same for all tasks",
        "used in learning, or to choose what to keep (checked by their hashes)",
        "no guarantee for tasks that are drawn in another way",
    ):
        assert words in " ".join(text.split()), words
    plain = json.loads(certificate.to_json())
    assert plain["tasks"] == 40
    assert plain["statements"][0]["verdict"] == "holds"


def test_target_comes_from_the_training_tasks_and_must_come_from_somewhere(learned):
    first = [draw_task(FAMILY, 0, "train", 4, i) for i in range(4)]
    starts = sorted(float(t.loss(t.init(), t.batch(0))) for t in first)
    assert learned.header.target_loss < starts[0]
    nothing = replace(learned, header=replace(learned.header, target_loss=None))
    with pytest.raises(ValueError, match=r"a loss to count steps to.*State one: stated=Stated.target=0.1"):
        certify(nothing, FAMILY)
    assert certify(nothing, FAMILY, held_out_tasks=1, stated=Stated(target=1.0)).target == 1.0


def test_all_tasks_of_meta_training_are_in_the_header_and_can_be_drawn_again():
    """Those to learn from, to judge, and for the pieces: every config that was built is accounted for."""
    built = set()
    family = tasks.quadratic(steps=30)
    build = family.build
    family.build = lambda config: built.add(config_hash(config)) or build(config)
    learned = meta_train(family, MaxDiagonal(2), outer_steps=3, tasks_per_step=3, refine=metamd.Refine(1))
    used = set(built)
    assert used == set(learned.header.task_hashes)
    again, share = training_tasks(learned.header, family)
    assert {config_hash(t.config) for t in again} == used
    steps = learned.header.cost["outer_steps"]
    assert len(again) == 3 * steps
    assert share == 1 / (steps * (steps + 1))


@pytest.mark.parametrize("purpose", ["train", "judge"])
def test_a_task_that_was_used_is_refused(learned, purpose):
    step = 1 if purpose == "train" else int(learned.header.cost["outer_steps"])
    used = draw_task(FAMILY, 0, purpose, step, 2).config

    class Repeating(type(FAMILY)):
        def __init__(self):
            self.__dict__.update(FAMILY.__dict__)
            self.count = 0

        def sample(self, generator):
            self.count += 1
            return used if self.count == 7 else super().sample(generator)

    with pytest.raises(ValueError, match=r"1 of the 20 tasks drawn were used in learning.*Pass another seed"):
        certify(learned, Repeating(), held_out_tasks=20)
    stripped = replace(learned, header=replace(learned.header, task_hashes=()))
    found = certify(stripped, Repeating(), held_out_tasks=20, stated=Stated(theory=True))
    assert any("not checked" in text for text in found.assumptions)
    assert found.of("training tasks").basis == "the file does not say which tasks it was learned on."


def test_tasks_that_are_all_the_same_cannot_be_held_out():
    family = tasks.rosenbrock(steps=20)
    learned = meta_train(family, Diagonal(), outer_steps=2, tasks_per_step=2)
    with pytest.raises(ValueError, match="were used in learning"):
        certify(learned, family)


def test_tasks_that_diverge_count_as_infinite(learned):
    found = certify(learned, poisoned(FAMILY, share=200), held_out_tasks=40, stated=Stated(target=10.0))
    assert found.diverged > 3
    for quantity in ("steps", "training loss"):
        statement = found.of("next task", quantity)
        assert (statement.bound, statement.verdict) == (None, "no bound")
        assert statement.numbers["infinite"] == found.diverged
    assert found.of("mean", "min(steps").numbers["clipped"] == found.diverged / 40
    rare = certify(learned, poisoned(FAMILY, share=15), held_out_tasks=40, stated=Stated(target=10.0))
    assert rare.diverged == 1
    assert rare.reason in " ".join(str(rare).split())
    assert rare.reason.startswith("The ")
    assert rare.of("next task", "training loss").bound is not None


def test_too_few_tasks_are_no_bound(learned):
    found = certify(learned, FAMILY, held_out_tasks=1, stated=Stated(theory=True))
    assert found.radius is None
    assert found.of("next task", "training loss").verdict == "no bound"
    assert found.of("mean", "min(steps").verdict == "vacuous"
    assert "regret_cap=b" in found.of("mean", "regret").basis


def data(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 4, generator=g)
    return x, (x[:, 0] > 0).long()


def test_leaving_one_domain_out_gives_no_guarantee_across_domains():
    def family(*names):
        sources = {n: data(i) for i, n in enumerate(names)}
        return tasks.supervised(lambda: nn.Linear(4, 2), sources, batch_size=10, steps=20)

    seen, new = family("a", "b"), family("c")
    learned = meta_train(seen, Diagonal(), outer_steps=2, tasks_per_step=4, objective=metamd.Regret(prior=0.01))
    found = certify(learned, new, held_out_tasks=20, stated=Stated(theory=True))
    assert "no guarantee across domains" in str(found)
    assert "m = 1 held-out domain: c" in found.across_domains
    assert found.of("next task", "training loss").verdict == "holds"  # about seeds within the domain, as it says
    assert "m = 0 held-out domains" in across_domains(learned, seen)
    assert any("not the one of learning: datasets differ" in text for text in found.assumptions)
    assert found.of("training tasks").verdict == "does not apply"
    assert "not drawn from this family" in found.of("training tasks").basis


def test_without_a_solution_a_comparator_is_needed():
    family = tasks.tabular(features=3, width=4, examples=60, batch_size=20, steps=10)
    learned = meta_train(family, Diagonal(), outer_steps=2, tasks_per_step=2, objective=metamd.Regret(prior=0.01))
    found = certify(learned, family, held_out_tasks=19, stated=Stated(theory=True))
    assert "Pass comparator=Reference" in found.of("next task", "distance sqrt").basis
    assert "theta_* of these tasks is not known" in found.of("training tasks").basis
    better = certify(learned, family, held_out_tasks=19, comparator=Reference(lr=0.01), stated=Stated(regret_cap=100.0))
    assert better.of("next task", "distance sqrt").bound > 0
    assert better.of("mean", "min(regret").verdict in ("holds", "vacuous")
    assert better.of("training tasks", "B(").bound > 0
    turned = meta_train(family, Kronecker(), outer_steps=2, tasks_per_step=2, objective=metamd.Regret(prior=0.01))
    third = certify(turned, family, held_out_tasks=1, comparator=Reference(lr=0.01), stated=Stated(theory=True))
    assert "from a grid (l2)" in third.of("training tasks", "B(").basis


def test_a_task_without_an_optimum_has_no_distance(learned):
    family = tasks.logistic(2, examples=4, batch_size=4, l2=0.0, steps=5)
    made = meta_train(family, Diagonal(), outer_steps=1, tasks_per_step=2, method=metamd.Method(keep="last"))
    found = certify(made, family, held_out_tasks=20, stated=Stated(theory=True))
    assert "theta_* of these tasks is not known" in found.of("next task", "distance sqrt").basis
    assert found.of("next task", "training loss").verdict == "holds"


def test_the_training_bound_with_everything_stated_beforehand():
    family = tasks.quadratic((1.0, 1.0), spread=0.0, coupling=0.0, start=1.0, steps=20)
    learned = meta_train(
        family, Diagonal(), outer_steps=3, tasks_per_step=40, max_norm=2.5, method=metamd.Method(keep="last")
    )
    found = certify(learned, family, held_out_tasks=20, stated=Stated(radius=5.0)).of("training tasks", "B(")
    again, _ = training_tasks(learned.header, family)
    seen, size = displacements(learned, [t.init() for t in again], [t.optimum() for t in again])
    assert found.numbers["max_norm"] == 2.5
    assert size.norm <= 2.5
    d = learned.potential.log_d["theta"].detach()[0].exp()
    moved = torch.stack([t.optimum()["theta"] - t.init()["theta"] for t in again])
    assert found.numbers["mean"] == pytest.approx(float((0.5 * d * moved**2).sum(1).mean()))
    assert found.bound == pytest.approx(sum(found.numbers[k] for k in ("mean", "complexity", "concentration")))
    assert "C = 2.5 stated beforehand" in found.basis
    assert "(l2)" in found.basis
    assert len(seen.lengths) == len(learned.header.task_hashes)
    wide = certify(learned, family, held_out_tasks=1, stated=Stated(reach=5.0)).of("training tasks", "B(")
    assert "(l_inf)" in wide.basis
    assert wide.numbers["complexity"] == pytest.approx(found.numbers["complexity"] * math.sqrt(2 * math.log(3)))


def test_a_mixture_that_is_not_centred_has_no_training_bound(learned):
    two = MaxDiagonal(2, centre="origin").with_metrics(
        {"theta": torch.tensor([[0.0, 3.5], [1.0, 3.0]], dtype=torch.float64)}
    )
    provenance = {"task_hashes": learned.header.task_hashes, "seeds": (0,), "cost": learned.header.cost, "target_loss": 10.0}
    found = certify(LearnedOptimiser.from_potential(two, **provenance), FAMILY, held_out_tasks=2, stated=Stated(theory=True))
    assert "not centred at the start" in found.of("training tasks", "B(").basis


def test_widths_and_lengths_of_tied_metrics():
    start = {"w": torch.zeros(2, 3, dtype=torch.float64)}
    solution = {"w": torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 3.0]], dtype=torch.float64)}
    tied = MaxDiagonal(1, tying="channel").bind(start)
    # both rows have a mean square of 3
    assert measure(tied, start, solution) == pytest.approx((9.0, math.sqrt(18), math.sqrt(3)))
    size = size_of(tied, {"w": (2, 3)})
    assert (size.numbers, size.norm) == (2, pytest.approx(math.sqrt(6)))


def test_a_shared_start_is_said():
    shared = tasks.starting_at(FAMILY, FAMILY.example())
    assert shared.drawn().initialisation == "the same model for all tasks"
    assert shared.drawn().domain == FAMILY.drawn().domain


# as the file recommends


def network_family(steps=20):
    return tasks.tabular(features=3, width=4, examples=60, batch_size=20, steps=steps)


@pytest.fixture(scope="module")
def used():
    """A file that recommends momentum and a schedule, with a factor of its own."""
    learned = meta_train(network_family(), Diagonal(), outer_steps=2, tasks_per_step=2, objective=metamd.Regret(prior=0.01))
    usage = Usage(momentum=0.5, schedule="linear", factor=0.7)
    return replace(learned, header=replace(learned.header, usage=usage.to_dict(), target_loss=0.5))


def test_held_out_tasks_are_trained_as_a_comparison_trains_them(used):
    family = network_family()
    for task in held_out(family, 3):
        score = run_task(task, used, 0.5)
        measured = train_contender(task, learned_rival(used).untuned(), measuring=Measuring(every=1))
        assert score.losses["training"] == pytest.approx(measured.final_loss, rel=5e-5)
        assert score.losses["validation"] == pytest.approx(measured.ends["validation"][0], rel=5e-5)
        assert score.losses["test"] == pytest.approx(measured.ends["test"][0], rel=5e-5)
        assert score.steps == measured.steps_to(0.5)
    plain = run_task(task, replace(used, header=replace(used.header, usage=None)), 0.5)
    assert plain.losses["training"] != pytest.approx(score.losses["training"], rel=1e-3), "a wrong usage would be seen"


def test_a_network_has_statements_about_every_split_and_a_radius(used):
    found = certify(used, network_family(), held_out_tasks=19)
    for quantity in ("steps to", "training loss", "validation loss", "test loss", "distance of the solution"):
        assert found.of("next task", quantity).numbers["tasks"] == 19
    assert found.of("next task", "test loss").bound == max(found.scores["test loss"])
    assert found.radius.reference == "the end of a run as recommended, twice as long"
    assert found.radius.confidence == 0.95
    assert "as the file recommends for 20 steps (learned metric, momentum 0.5, linear schedule, factor 0.7)" in " ".join(
        str(found).split()
    )
    again = HeldOutCertificate.from_dict(json.loads(found.to_json()))
    assert again == found
    by_adam = certify(used, network_family(), held_out_tasks=19, comparator=Reference(lr=0.01)).radius
    assert by_adam.reference == "the end of a run of Reference(Adam, lr=0.01, factor=2)"


def test_the_radius_is_that_of_the_tasks(used):
    """By hand: the largest over tensors of N_l/s_l, s_l the mean over three further tasks, and its largest of 19."""
    family, found = network_family(), certify(used, network_family(), held_out_tasks=19).radius
    configs = [draw_config(family, 0, "radius", i) for i in (1, 2, 3)]
    scales = [distances(family.build(c), used, None) for c in configs]
    tasks_ = held_out(family, 19)
    for n, s in found.scales.items():
        assert s == pytest.approx(sum(d[n] for d in scales) / 3)
    scores = [max(d[n] / found.scales[n] for n in d) for d in (distances(t, used, None) for t in tasks_)]
    assert found.quantile == pytest.approx(max(scores))
    task, phi = tasks_[0], used.potential.bind(tasks_[0].init())
    rule = recommended(task, used, 40)
    inner_train(task, rule, 40)
    moved = {n: x - task.init()[n] for n, x in rule.model().items()}
    name = next(iter(moved))
    by_hand = float((phi.metric(name)[0].detach() * moved[name] ** 2).sum().sqrt())
    assert distances(task, used, None)[name] == pytest.approx(by_hand, rel=1e-5)


def test_a_certified_file_bounds_its_own_runs(used, tmp_path):
    """The whole path: certify writes the radius, and a run takes it without being asked."""
    path = tmp_path / "used.safetensors"
    used.save(path)
    assert cli.run(["certify", str(path), "tabular", "--held-out-tasks", "19"]) == 0
    family = tasks.tabular(**{k: v for k, v in used.header.family.items() if k in ("features", "width", "examples")})
    model = {n: nn.Parameter(x) for n, x in network_family().example().items()}
    optimiser = metamd.MetaMD(list(model.items()), path, steps=5, certify=True)
    task = draw_task(network_family(), 7, "certify", 1)
    for t in range(5):
        optimiser.zero_grad()
        task.loss(model, task.batch(t)).backward()
        optimiser.step()
    said = str(optimiser.certificate())
    expected = said.splitlines()[1]
    assert "training on tabular as the file recommends, convex or not: steps to a training loss of 0.5 <= " in expected
    assert all(f"; {split} loss after 20 steps <= " in expected for split in ("training", "validation", "test"))
    assert "distance" not in expected
    assert "with probability 95 % over 19 held-out tasks and this one, its reference solution" in said
    assert family.name == "tabular"


def test_a_certificate_goes_into_the_file_without_the_command(used, tmp_path):
    found, path = certify(used, network_family(), held_out_tasks=19), tmp_path / "kept.safetensors"
    found.into(used).save(path)
    kept = load(path)
    assert kept.header.radius == found.radius
    assert HeldOutCertificate.from_dict(kept.header.held_out["certificates"]["tabular"]) == found
    assert found.into(kept).header == kept.header, "the same again replaces it"
    other = replace(found, task=Drawn(domains=("30",)))
    assert set(other.into(kept).header.held_out["certificates"]) == {"tabular", "tabular: 30"}
    with pytest.raises(ValueError, match="this certificate is of another learned optimiser"):
        found.into(meta_train(FAMILY, Diagonal(), outer_steps=1, tasks_per_step=2))


def test_the_bounds_of_the_paper_name_the_run_that_they_are_about(used):
    """The file recommends another one."""
    found = certify(used, network_family(), held_out_tasks=19, comparator=Reference(lr=0.01), stated=Stated(regret_cap=9.0))
    about = [s.quantity for s in found.statements if s.about in ("mean", "share") and "regret" in s.quantity]
    assert about == ["min(regret of plain mirror descent, 9)", "regret of plain mirror descent above 9"]


@pytest.mark.law
@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_the_radius_covers_the_next_task_as_often_as_it_says(tail):
    """Families of simulated distances of three tensors; 0.9 of 19 tasks. A quantile per tensor would cover too rarely."""
    rng, families = np.random.default_rng(0), draws(2000)
    covered = each = 0
    for _ in range(families):
        far = np.exp(rng.normal(size=(23, 3))) if tail == "normal" else 1 / rng.random((23, 3)) ** 2
        rows = [dict(zip("abc", map(float, row), strict=True)) for row in far * np.array([1.0, 10.0, 0.1])]
        radius, _ = _radius(rows[:19], rows[19:22], 0.1, "simulated")
        covered += all(rows[22][n] <= rho for n, rho in radius.by_tensor.items())
        each += all(rows[22][n] <= sorted(r[n] for r in rows[:19])[17] for n in "abc")
    # three standard deviations of a binomial: one false alarm in 700 runs
    slack = 3 * math.sqrt(0.9 * 0.1 / families)
    assert covered / families >= 0.9 - slack
    assert covered / families <= 0.9 + slack + 1 / 20
    assert each / families < 0.9 - slack


def test_two_looks_in_a_row():
    assert steps_to(1.0, [(0, 0.5), (5, 2.0), (10, 1.0)]) == math.inf
    assert steps_to(1.0, [(0, 0.5), (5, 1.0)]) == 0
    assert steps_to(1.0, [(0, 2.0), (5, math.nan), (10, 0.1), (15, 0.2)]) == 10


def test_runs_are_looked_at_at_equal_intervals(learned):
    family = tasks.quadratic(steps=230)
    task, seen = held_out(family, 1)[0], []
    evaluate = task.evaluate
    task.evaluate = lambda params, split: seen.append(1) or evaluate(params, split)
    score = run_task(task, learned, 10.0)
    assert len(seen) == 1 + 230 // 4 + 1  # at 0, 4, ..., 228 and 230
    assert score.losses.keys() == {"training"}
    assert score.steps % 4 == 0


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_says_what_a_task_is(name):
    said = FAMILIES[name]().drawn()
    assert "not said" not in f"{said}"
    assert "not said" in f"{Drawn()}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"held_out_tasks": 0}, "held_out_tasks must be at least 1, got 0"),
        ({"delta": 0.0}, "delta must lie between 0 and 1, got 0.0"),
    ],
)
def test_bad_input_is_a_sentence(learned, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        certify(learned, FAMILY, **options)


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        ({"target": math.nan}, "target must be a finite loss, got nan"),
        ({"regret_cap": -1.0}, "regret_cap must be positive and finite, got -1.0"),
        ({"radius": math.nan}, "radius must be positive and finite, got nan"),
        ({"radius": 1e308}, "radius must be at most 1e100, got 1e.308"),
        ({"reach": 0.0}, "reach must be positive and finite, got 0.0"),
    ],
)
def test_what_cannot_be_stated_is_a_sentence(stated, sentence):
    with pytest.raises(ValueError, match=sentence):
        Stated(**stated)


def test_processes_give_the_same_certificate(learned):
    alone, two = (certify(learned, FAMILY, held_out_tasks=4, executor=Executor(n)) for n in (1, 2))
    assert alone == two


def test_wrong_things_are_named(learned):
    with pytest.raises(TypeError, match=r"learned must be a LearnedOptimiser, got str. Pass metamd.load"):
        certify("file", FAMILY)
    with pytest.raises(TypeError, match="family must be a TaskFamily, got str"):
        certify(learned, "quadratic")


def test_certify_is_a_function_however_often_it_is_asked_for():
    assert callable(metamd.certify)
    assert metamd.certify is metamd.certify


# the command


@pytest.fixture
def file(tmp_path, learned):
    learned.save(tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_the_command_prints_and_writes_it(file, tmp_path, capsys):
    before = load(file)
    page = tmp_path / "page.html"
    assert cli.run(["certify", str(file), "quadratic", "--held-out-tasks", "20", "--theory", "--report", str(page)]) == 0
    said = capsys.readouterr()
    assert "held-out certificate: quadratic, 20 tasks, T = 60" in said.out  # the steps that the file records
    assert "Written into the header" in said.out
    assert "held-out tasks: 20 of 20" in said.err
    assert f"metamd certify {file} quadratic --held-out-tasks 20 --theory --report {page}" in page.read_text()
    assert "data:image/png" in page.read_text()
    after = load(file)
    assert after.fingerprint() == before.fingerprint()
    assert after.header.held_out["certificates"]["quadratic"]["tasks"] == 20
    assert replace(after.header, held_out={}) == before.header
    text = page.read_text()
    assert "Every statement, and what it rests on" in text
    assert "not a valid bound" in text
    assert cli.run(["inspect", str(file)]) == 0


def test_the_command_on_a_page_has_every_option():
    """Read again, it is the command that was given: one for each option, with a value that is not its default."""
    given = {
        "steps": 7,
        "model": "mlp",
        "hold_out": "30",
        "images": 5,
        "width": 3,
        "start": Path("a start.pt"),
        "workers": 2,
        "ray": "local",
        "seed": 4,
        "held_out_tasks": 20,
        "delta": 0.1,
        "target": -0.5,
        "theory": True,
        "regret_cap": 1e-7,
        "radius": 2.0,
        "reach": 3.0,
        "reference_lr": 0.01,
        "out": Path("out of here.safetensors"),
        "report": Path("page.html"),
    }
    assert given.keys() == {f.name for f in fields(Certify)} - {"file", "family", "json", "dry_run"}
    for some in (given, {"report": given["report"]}):
        options = Certify(file="x.safetensors", family="my families.py:digits", **some)
        assert parse(shlex.split(command_line(options))[1:]) == options


def test_inspect_prints_a_certificate_in_lines(file, capsys):
    assert cli.run(["certify", str(file), "quadratic", "--held-out-tasks", "20"]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", str(file)]) == 0
    said = capsys.readouterr().out
    assert "certificate from 20 tasks of quadratic" in said
    assert "next task: training loss after 60 steps <= " in said
    assert "times the scale of each tensor: with probability" in " ".join(said.split())
    assert "used in learning (--json lists them)" in said
    assert '"statements"' not in said


def test_the_command_in_json_and_elsewhere(file, tmp_path, capsys):
    content, out = file.read_bytes(), tmp_path / "new.safetensors"
    args = [
        "--held-out-tasks",
        "19",
        "--json",
        "--out",
        str(out),
        "--delta",
        "0.1",
        "--theory",
        "--regret-cap",
        "1000",
        "--seed",
        "3",
    ]
    assert cli.run(["certify", str(file), "quadratic", *args]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["file"] == str(out)
    assert record["certificate"] == load(out).header.held_out["certificates"]["quadratic"]
    assert (record["certificate"]["seed"], record["certificate"]["delta"]) == (3, 0.1)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "there is no family 'nothing'"),
        (["quadratic", "--model", "mlp"], "has no option --model"),
        (["quadratic", "--delta", "2"], "delta must lie between 0 and 1"),
        (["quadratic", "--held-out-tasks", "0"], "held_out_tasks must be at least 1"),
        (["logistic", "--held-out-tasks", "2"], "'theta'"),
    ],
)
def test_bad_commands_are_one_sentence_and_leave_the_file(file, args, message, capsys):
    content = file.read_bytes()
    assert cli.run(["certify", str(file), *args]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert file.read_bytes() == content


def test_a_file_of_the_package_is_not_changed_in_place(file, tmp_path, monkeypatch, capsys):
    from metamd.cli import certify as command
    from metamd.files import shipped as home

    monkeypatch.setattr(home, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    content = file.read_bytes()
    assert cli.run(["certify", "x", "quadratic", "--held-out-tasks", "1"]) == 2
    assert "'x' is shipped with the package and stays as it is. Pass --out FILE." in capsys.readouterr().err
    out = tmp_path / "elsewhere" / "y.safetensors"
    assert cli.run(["certify", "x", "quadratic", "--held-out-tasks", "1", "--out", str(out)]) == 0
    assert load(out).header.held_out["certificates"]["quadratic"]["tasks"] == 1
    assert file.read_bytes() == content


def test_a_file_that_changes_meanwhile_is_left_alone(file, learned, monkeypatch, capsys):
    from metamd.cli import certify as command

    def slow(*args, **options):
        another = Diagonal().with_metrics({"theta": torch.zeros(1, 2, dtype=torch.float64)})
        LearnedOptimiser.from_potential(another).save(file)
        return certify(*args, **options)

    monkeypatch.setattr(command, "certify", slow)
    assert cli.run(["certify", str(file), "quadratic", "--held-out-tasks", "2"]) == 2
    assert "was changed while its tasks ran" in capsys.readouterr().err
    assert load(file).header.held_out == {}


def test_a_page_has_what_is_printed(certificate):
    """Word for word, statement by statement, also after a file has carried it."""
    again = HeldOutCertificate.from_dict(json.loads(certificate.to_json()))
    texts = again.paragraphs()
    assert sum(f": {s}" in text for s in certificate.statements for text in texts) == len(certificate.statements)
    words = " ".join(str(certificate).split())
    for text in texts:
        assert " ".join(text.split(": ", 1)[-1].split("; ")[0].split()) in words


def test_what_is_no_certificate_is_refused(certificate):
    plain = certificate.to_dict()
    wrong = [[], {}, {**plain, "more": 1}, {**plain, "assumptions": [1]}, {**plain, "tasks": "<b>", "delta": "x"}]
    wrong += [{**plain, "statements": [{**plain["statements"][0], "about": "all"}]}, {**plain, "task": None}]
    wrong += [{**plain, "statements": [{**plain["statements"][0], "bound": "1"}]}]
    for other in wrong:
        with pytest.raises(ValueError, match="this is no held-out certificate"):
            HeldOutCertificate.from_dict(other)


def test_a_file_keeps_one_certificate_for_each_family_and_domain(file, capsys, monkeypatch):
    """Another family, or the same with another domain held out, is another statement; the same again replaces it."""
    from metamd.cli import certify as command

    few = ["--held-out-tasks", "2"]
    assert cli.run(["certify", str(file), "quadratic", *few]) == 0
    assert "for quadratic." in capsys.readouterr().out
    monkeypatch.setitem(FAMILIES, "other", lambda steps=60: other)
    other = tasks.quadratic((1.0, 2.0), steps=60)
    other.name = "other"
    assert cli.run(["certify", str(file), "other", *few]) == 0
    assert "for other, beside what it says of quadratic." in capsys.readouterr().out
    assert set(load(file).header.held_out["certificates"]) == {"quadratic", "other"}
    other.drawn = lambda: Drawn(domains=("30",))
    assert cli.run(["certify", str(file), "other", *few, "--seed", "1"]) == 0
    assert cli.run(["certify", str(file), "quadratic", *few, "--seed", "7"]) == 0
    kept = load(file).header.held_out["certificates"]
    assert {k: v["seed"] for k, v in kept.items()} == {"quadratic": 7, "other": 0, "other: 30": 1}
    capsys.readouterr()
    assert cli.run(["inspect", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(f"certificate from 2 tasks of {place}" in said for place in kept)
    old = replace(load(file).header, held_out={"certificate": kept["other"], "note": 1})
    replace(load(file), header=old).save(file)
    assert command.certificates(old.held_out) == {"other": kept["other"]}
    assert cli.run(["certify", str(file), "quadratic", *few]) == 0
    assert set(load(file).header.held_out) == {"note", "certificates"}
    assert set(load(file).header.held_out["certificates"]) == {"other", "quadratic"}
