"""What a learned file recommends is what its optimiser does; geometries, scales and usages from reference runs."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import minimize_scalar

import metamd
from metamd import (
    Diagonal,
    Kronecker,
    LearnedOptimiser,
    MaxDiagonal,
    MetaMD,
    Online,
    Usage,
    meta_train,
    prepare,
)
from metamd.cli import compare as compare_command
from metamd.cli import main as cli
from metamd.cli.options import Compare
from metamd.comparison.training import Measuring
from metamd.comparison.training import train_contender as train_rival
from metamd.inner.objectives import Reference
from metamd.inner.run import gradient
from metamd.learning import reference as by_reference
from metamd.learning.parts import Parts
from metamd.learning.reference import draw_tasks, learn_from_reference, solved, tuned_reference
from metamd.learning.usage import Tally, learn_scale, learn_usage, run_usage, tried_line
from metamd.optimiser.optimiser import takes_polar_steps
from metamd.tasks import quadratic, tabular
from metamd.tasks.wrapped import Counted
from tests.helpers import judged_run, losses_of


@pytest.fixture(scope="module")
def learned():
    return meta_train(tabular(steps=30), Kronecker(), outer_steps=2, tasks_per_step=3, seed=0)


@pytest.mark.parametrize(
    ("usage", "rule"),
    [
        (Usage(), "average"),
        (Usage("online", 0.8, "linear", 1.4), "average"),
        (Usage("online", 0.0, "linear", 0.7), "polar"),
        (Usage("online", 0.0, "quadratic", 0.7), "polar"),
        (Usage("learned", 0.9, "linear", 0.5), "average"),
    ],
)
def test_what_is_chosen_is_what_the_optimiser_does(learned, usage, rule):
    """`train`, by which usages are compared, gives the numbers of `prepare` in an ordinary loop."""
    family = tabular(steps=30)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    potential = learned.potential.bind(task.init())
    online = Online(rule, scale={slot.key: 100.0 for slot in potential.slots.values()})
    outcome = run_usage(task, potential, usage, online=online)
    header = replace(learned.header, usage=usage.to_dict(), online=online.to_dict())
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    optimiser, schedule = prepare(params.items(), LearnedOptimiser(header, learned.potential), steps=30)
    losses = losses_of(task, params, optimiser, schedule, 30)
    assert sum(losses) / 30 == pytest.approx(outcome.loss, rel=1e-5)
    for n, p in params.items():
        # whitening in float32 magnifies rounding, which differs between processors
        torch.testing.assert_close(p.detach(), outcome.end[n], rtol=1e-3, atol=3e-4)


def test_what_is_chosen_with_a_tail_average_is_what_the_optimiser_does(learned):
    """The losses that count are those of the average, at every step of a short run."""
    family = tabular(steps=30)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    potential = learned.potential.bind(task.init())
    online = Online("polar", beta=0.7, signal=0.95, scale={slot.key: 100.0 for slot in potential.slots.values()})
    usage = Usage("online", 0.0, "linear", 0.7, averaging="tail")
    outcome = run_usage(task, potential, usage, online=online)
    header = replace(learned.header, usage=usage.to_dict(), online=online.to_dict())
    found = LearnedOptimiser(header, learned.potential)
    assert found.usage == usage
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    optimiser, schedule = prepare(params.items(), found, steps=30)
    losses = judged_run(task, params, optimiser, 30, schedule)
    assert sum(losses) / 30 == pytest.approx(outcome.loss, rel=1e-5)
    for n, p in params.items():
        # whitening in float32 magnifies rounding, which differs between processors
        torch.testing.assert_close(p.detach(), outcome.end[n], rtol=1e-3, atol=3e-4)
    assert run_usage(task, potential, replace(usage, averaging="constant"), online=online).loss != outcome.loss


def test_a_momentum_of_ones_own_takes_the_place_of_a_tail_average(learned):
    header = replace(learned.header, usage=Usage(factor=1.4, averaging="tail").to_dict())
    found = LearnedOptimiser(header, learned.potential)
    named = list(tabular(steps=30).example().items())
    params = [(n, torch.nn.Parameter(x)) for n, x in named]
    for options in ({}, {"momentum": 0.0}):
        optimiser, _ = prepare(params, found, steps=30, **options)
        assert (optimiser.averaging, optimiser.param_groups[0]["lr"]) == ("tail", 1.4)
    optimiser, _ = prepare(params, found, steps=30, momentum=0.9)
    assert (optimiser.averaging, optimiser.param_groups[0]["lr"]) == ("constant", 0.14)
    optimiser, _ = prepare([{"params": params, "momentum": 0.5}], found, steps=30)
    assert (optimiser.averaging, optimiser.param_groups[0]["lr"]) == ("constant", 0.7)


@pytest.mark.parametrize(
    ("options", "lr"),
    [
        ({}, 0.14),
        ({"momentum": 0.0}, 1.4),
        ({"momentum": 0.5}, 0.7),
        ({"averaging": "tail", "momentum": 0.0}, 1.4),
        ({"momentum": 0.5, "lr": 3.0}, 3.0),
    ],
)
def test_the_learned_steps_are_taken_whatever_the_momentum(learned, options, lr):
    header = replace(learned.header, usage=Usage("learned", 0.9, "linear", 1.4).to_dict())
    used = LearnedOptimiser(header, learned.potential)
    family = tabular(steps=30)
    params = [(n, torch.nn.Parameter(x)) for n, x in family.build(family.sample(torch.Generator())).init().items()]
    optimiser, _ = prepare(params, used, steps=10, **options)
    assert optimiser.param_groups[0]["lr"] == pytest.approx(lr)
    if "averaging" not in options and "lr" not in options:
        groups = [{"params": params[:1]}, {"params": params[1:2], "momentum": 0.2}, {"params": params[2:], "lr": 0.3}]
        optimiser, _ = prepare(groups, used, steps=10, **options)
        assert [g["lr"] for g in optimiser.param_groups] == pytest.approx([lr, 1.12, 0.3])


def test_the_scale_minimises_the_bound_of_the_run(learned):
    family = tabular(steps=30)
    reference = Reference(lr=0.01, factor=1)
    parts = Parts(Counted(family))
    ends = solved(draw_tasks(family, 0, "scale", 2), reference, parts)
    online = learn_scale(learned, ends, Online(), reference.lr, parts, rounds=1)
    # by hand, from the definition, with the scale the round began with
    seeds = [metamd.tasks.base.derive_seed(0, "usage", "scale", i) for i in range(2)]
    built = [family.build(family.sample(torch.Generator().manual_seed(s))) for s in seeds]
    phi = learned.potential.bind(built[0].init())
    first = Online(scale={slot.key: 100.0 for slot in phi.slots.values()})
    usage = Usage("online", 0.8, "linear")
    tallies: list[Tally] = []
    for task in built:
        u, _ = reference.run(task, task.init(), 30)
        tallies.append(run_usage(task, phi, usage, online=first, comparator=u).tally)
    for key, scale in online.scale.items():
        x, y = (sum(getattr(t, side)[key] for t in tallies) for side in ("x", "y"))
        bound = lambda s, x=x, y=y: (math.exp(s) * x + y / math.exp(s)) / 2  # noqa: E731
        best = minimize_scalar(bound, bounds=(-20, 20), method="bounded")
        assert math.exp(best.x) == pytest.approx(scale, rel=1e-3)


def test_the_tally_is_that_of_the_definition():
    """One step of a one-tensor run: y = g'a^-1 g, x = |u - theta_1|^2 in a, a = |g|."""
    family = quadratic(steps=1)
    task = family.build(family.sample(torch.Generator().manual_seed(2)))
    start = task.init()["theta"]
    g = gradient(task, {"theta": start}, task.batch(0))[1]["theta"]
    u = torch.tensor([1.0, 2.0], dtype=torch.float64)
    online = Online("sum", epsilon=1e-12, scale={"theta": 50.0})
    outcome = run_usage(task, Diagonal().bind(task.init()), Usage("online"), online=online, comparator={"theta": u})
    assert outcome.tally.y["theta"] == pytest.approx(float(g.abs().sum()))
    assert outcome.tally.x["theta"] == pytest.approx(float(((u - start) ** 2 * g.abs()).sum()))


def test_a_usage_is_chosen_on_training_tasks_alone_and_kept_in_the_file(learned, tmp_path):
    tried = {}
    choices = {"momenta": (0.0, 0.9), "factors": (0.5, 1.0, 2.0)}
    found = learn_usage(learned, tabular(steps=30), tasks=2, watch=lambda u, _, v: tried.update({u: v}), **choices)
    assert tried[found.usage] == min(tried.values())
    assert {u.metric for u in tried} == {"learned", "online"}
    assert {u.factor for u in tried} <= {0.5, 1.0, 2.0}
    assert len({u.factor for u in tried if u == replace(found.usage, factor=u.factor)}) > 1, "its neighbours are tried"
    found.save(tmp_path / "used.safetensors")
    again = metamd.load(tmp_path / "used.safetensors")
    assert again.usage == found.usage
    assert again.online == found.online
    assert set(learned.header.task_hashes) < set(again.header.task_hashes)


def test_followed_metrics_whose_plain_runs_diverge_are_doubled_until_they_finish():
    """Adam's steps are bounded whatever the rate, so that a plain run with the metrics of its run need not be."""
    family = tabular(steps=30)
    for potential in (Diagonal(), Kronecker()):
        learned = learn_from_reference(family, potential, reference=Reference(lr=2.0, factor=1), tasks=2)
        built = [family.build(family.sample(torch.Generator().manual_seed(s))) for s in range(3)]
        phi = learned.potential.bind(built[0].init())
        assert all(math.isfinite(run_usage(task, phi, Usage()).loss) for task in built[:2])
        wild = {k: v.detach() - math.log(1e3) for k, v in phi.log_d.items()}
        assert not math.isfinite(run_usage(built[0], phi.with_metrics(wild).bind(built[0].init()), Usage()).loss)
        tame = by_reference._steady(phi.with_metrics(wild), built[:2], Parts(Counted(family))).bind(built[0].init())
        assert all(math.isfinite(run_usage(task, tame, Usage()).loss) for task in built[:2])


def test_a_family_on_which_everything_diverges_is_said(learned):
    steep = learned.potential.with_metrics({k: v.detach() - math.log(1e12) for k, v in learned.potential.log_d.items()})
    broken = LearnedOptimiser(learned.header, steep)
    with pytest.raises(ValueError, match="every usage of this geometry diverged"):
        learn_usage(broken, tabular(steps=30), metrics=("learned",), momenta=(0.0,), factors=(1.0,), tasks=1)


def test_the_reference_rate_is_the_best_of_those_given():
    family = tabular(steps=30)
    assert tuned_reference(family, rates=(1e-6, 1e-2), tasks=1).lr == 1e-2
    assert tuned_reference(family, rates=(1e-2, 1e6), tasks=1).lr == 1e-2


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("usage", {"metric": "learned"}, "usage must have metric, momentum, schedule, factor"),
        ("usage", {**Usage().to_dict(), "momentum": "0.9"}, "the momentum of usage must be a finite number"),
        ("usage", {**Usage().to_dict(), "momentum": 1.5}, "Invalid momentum value"),
        ("online", {**Online().to_dict(), "scale": {"nowhere": 1.0}}, "the scale of online has 'nowhere'"),
        ("online", {**Online().to_dict(), "scale": {"x": "1"}}, "the scale of online must map names to numbers"),
        ("online", {**Online().to_dict(), "scale": {"x": 0.0}}, "the scale of 'x' must be positive"),
    ],
)
def test_a_header_with_a_broken_usage_is_refused(field, value, sentence):
    potential = Diagonal().bind({"x": torch.zeros(2)})
    with pytest.raises(ValueError, match=sentence):
        LearnedOptimiser.from_potential(potential, **{field: value})


def test_a_geometry_from_reference_runs_is_the_closed_form_of_them():
    """D_i = sqrt(sum_t g_ti^2 / delta_i^2), from Adam runs written out here."""
    family, reference = tabular(steps=20), Reference(lr=0.01, factor=1)
    learned = learn_from_reference(family, Diagonal(), reference=reference, tasks=2, seed=4)
    x, y, first, last = {}, {}, [], []
    for i in range(2):
        losses = []
        seed = metamd.tasks.base.derive_seed(4, "usage", "follow", i)
        task = family.build(family.sample(torch.Generator().manual_seed(seed)))
        params = {n: v.clone().requires_grad_() for n, v in task.init().items()}
        adam = torch.optim.Adam(params.values(), lr=0.01)
        for t in range(20):
            adam.param_groups[0]["lr"] = 0.01 * (1 - t / 20)
            adam.zero_grad()
            loss = task.loss(params, task.batch(t))
            losses.append(float(loss.detach()))
            loss.backward()
            for n, p in params.items():
                y[n] = y.get(n, 0) + p.grad.double() ** 2
            adam.step()
        for n, p in params.items():
            x[n] = x.get(n, 0) + (p.detach() - task.init()[n]).double() ** 2
        first.append(losses[0])
        last.append(sum(losses[-2:]) / 2)
    for n, log_d in learned.potential.log_d.items():
        torch.testing.assert_close(log_d.detach()[0].double().exp(), (y[n] / x[n]).sqrt(), rtol=1e-3, atol=0.0)
    assert len(learned.header.task_hashes) == 2
    reached = 0.9 * max(last) + 0.1 * sum(first) / 2  # the median of two is their mean
    assert learned.header.target_loss == pytest.approx(reached, rel=1e-5)
    assert metamd.certify(learned, family, held_out_tasks=2).target == learned.header.target_loss
    with pytest.raises(ValueError, match="says nothing about 3 pieces"):
        learn_from_reference(family, MaxDiagonal(3), reference=reference)
    with pytest.raises(ValueError, match="all 1 reference runs diverged"):
        learn_from_reference(family, Diagonal(), reference=Reference(torch.optim.SGD, lr=1e30), tasks=1)


def test_a_geometry_from_reference_runs_knows_the_first_gradients_of_its_family():
    """The root mean square over the tasks, written out; a run that is a thousand times steeper is warned of."""
    family, reference = tabular(steps=10), Reference(lr=0.01, factor=1)
    learned = learn_from_reference(family, Diagonal(), reference=reference, tasks=2, seed=4)
    drawn = draw_tasks(family, 4, "follow", 2)
    grads = [torch.func.grad(task.loss)(task.init(), task.batch(0)) for task in drawn]
    for name, scale in learned.header.gradient_scale.items():
        both = torch.stack([g[name].double() for g in grads])
        assert scale == pytest.approx(float(both.square().mean().sqrt()), rel=1e-5)
    assert learned.header.gradient_scale.keys() == drawn[0].init().keys()
    params = {n: torch.nn.Parameter(x) for n, x in drawn[0].init().items()}
    optimiser = MetaMD(params.items(), learned)
    (1000 * drawn[0].loss(params, drawn[0].batch(0))).backward()
    with pytest.warns(metamd.OffFamilyWarning):
        optimiser.step()


def test_every_task_that_was_used_is_in_the_file():
    """Also those that the reference's rate and the online scales were found on: none may be held out later."""
    family = tabular(steps=10)
    built = []
    real = family.build
    family.build = lambda config: built.append(metamd.tasks.config_hash(config)) or real(config)
    learned = learn_from_reference(family, Kronecker(), tasks=2, seed=5)
    found = learn_usage(learned, family, momenta=(0.0,), schedules=("linear",), factors=(1.0,), tasks=1, seed=5)
    assert set(found.header.task_hashes) == set(built)
    assert found.header.cost["gradient_evaluations"] > learned.header.cost["gradient_evaluations"] > 0


@pytest.mark.parametrize("flags", [["--potential", "kronecker", "--rank", "all"], ["--learn-start"]])
def test_the_command_line_learns_usages_and_starts(flags, tmp_path, capsys):
    torch.save({"theta": torch.tensor([0.5, 0.5], dtype=torch.float64)}, tmp_path / "start.pt")
    family = (
        ["quadratic", "--start", str(tmp_path / "start.pt")] if flags == ["--learn-start"] else ["tabular", "--steps", "10"]
    )
    out = tmp_path / "learned.safetensors"
    rounds = ["--outer-steps", "1"] if flags == ["--learn-start"] else []
    assert cli.run(["train", *family, *flags, "--tasks", "1", *rounds, "--out", str(out)]) == 0
    learned = metamd.load(out)
    if flags == ["--learn-start"]:
        assert learned.start["theta"].shape == (2,)
        assert len(learned.header.task_hashes) >= 2
    else:
        assert learned.header.usage is not None
        said = [line.split(": score")[0] for line in capsys.readouterr().err.splitlines() if ": score " in line]
        rule = "polar rule, beta 0.9, signal 0.95, whitened 4 times"
        last = said.index(f"online metric, tail average, linear schedule, factor 0.5 ({rule})")
        first = said[: last + 1]
        later = said[len(first) :]  # the best of the first is tried again, on more tasks
        assert len(first) == len(set(first)) > 4, "two usages are called the same"
        assert max(map(later.count, later)) <= 2 < len(set(later)), "on two tasks and on all, or two are called the same"
        assert all(
            any(line.endswith(f"(polar rule, beta {b}, signal 0.95, whitened 4 times)") for line in said) for b in (0.7, 0.9)
        )
        rules = (None, Online(), Online("sum"), Online("polar"), Online("polar", signal=0.9))
        assert len({tried_line(Usage("online"), online, 0.5) for online in rules}) == len(rules)


def test_what_cannot_be_learned_from_or_prepared_is_said():
    family = tabular(steps=5)
    learned = learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)
    params = [(n, torch.nn.Parameter(torch.zeros(s))) for n, s in learned.header.model.items()]
    with pytest.raises(TypeError, match=r"got Kronecker|got MaxDiagonal\. Pass metamd\.load"):
        metamd.prepare(params, Kronecker(), steps=5)
    with pytest.raises(FileNotFoundError, match=r"there is no file 'learned\.safetensors'"):
        metamd.prepare(params, "learned.safetensors", steps=5)
    with pytest.raises(TypeError, match=r"got MaxDiagonal\. Pass metamd\.load"):
        learn_usage(Kronecker(), family)
    for name in ("metrics", "momenta", "schedules", "factors"):
        with pytest.raises(ValueError, match=f"{name} must have one to choose from"):
            learn_usage(learned, family, **{name: ()})
    with pytest.raises(TypeError, match=r"Diagonal\(\) or Kronecker\(\), got NegativeEntropy"):
        learn_from_reference(family, metamd.NegativeEntropy(), tasks=1)
    start = {n: p.detach() for n, p in params}
    assert set(learned.with_start(start).start) == set(start)
    for wrong in ({}, {**start, "0.weight": torch.zeros(3)}):
        with pytest.raises(ValueError, match=r"'0\.weight' is missing or has another shape"):
            learned.with_start(wrong)


def test_a_certificate_is_of_the_recommended_usage():
    family = tabular(steps=5)
    learned = learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)
    used = replace(learned, header=replace(learned.header, usage=Usage(momentum=0.9).to_dict()))
    found = metamd.certify(used, family, held_out_tasks=1, stated=metamd.Stated(target=1.0, theory=True))
    assert "learned from reference runs" in str(found)
    assert "as the file recommends for 5 steps (learned metric, momentum 0.9, constant schedule, factor 1)" in " ".join(
        str(found).split()
    )


def test_what_a_file_recommends_is_said_and_needs_the_number_of_steps(tmp_path, capsys):
    """MetaMD keeps its defaults, as a torch optimiser does, and says what the file would have: once, and in its repr."""
    family = tabular(steps=5)
    learned = learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)
    used = replace(learned, header=replace(learned.header, usage=Usage("learned", 0.9, "linear", 1.4).to_dict()))
    named = [(n, torch.nn.Parameter(x)) for n, x in family.example().items()]
    words = "learned metric, momentum 0.9, linear schedule, factor 1.4"
    with pytest.warns(UserWarning, match=f"recommends more than its metric: {words}. Write .*, steps=N.*metric=.learned"):
        plain = MetaMD(named, used)
    assert (plain.param_groups[0]["momentum"], plain.param_groups[0]["lr"]) == (0.0, 1.0)
    assert f"The learned file recommends: {words}. MetaMD(params, learned, steps=T) uses it so." in repr(plain)
    assert repr(copy.deepcopy(plain)) == repr(plain)
    assert "recommends" not in repr(MetaMD(named, learned))
    assert f"recommended: {words}" in repr(used)
    used.save(tmp_path / "x.safetensors")
    optimiser, _ = metamd.prepare(named, tmp_path / "x.safetensors", steps=5)
    assert optimiser.param_groups[0]["momentum"] == 0.9
    assert cli.run(["inspect", str(tmp_path / "x.safetensors")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert words in said
    assert "MetaMD(model.named_parameters()," in said


def polar_file(family):
    """A learned file that recommends polar steps with a signal."""
    learned = learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)
    keys = {slot.key for slot in learned.potential.bind(family.example()).slots.values()}
    rule = Online("polar", scale=dict.fromkeys(keys, 50.0), signal=0.9)
    header = replace(learned.header, usage=Usage("online", schedule="linear").to_dict(), online=rule.to_dict())
    return replace(learned, header=header)


def test_how_often_directions_are_found_is_up_to_the_run(tmp_path):
    """prepare(refresh=), a rival and a file with the number in it are the same; what recommends other steps refuses it."""
    family = tabular(steps=40)
    learned, task = polar_file(family), family.build(family.sample(torch.Generator().manual_seed(3)))

    def end(given, **options):
        params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
        optimiser, schedule = prepare(params.items(), given, steps=40, **options)
        for t in range(40):
            optimiser.zero_grad()
            task.loss(params, task.batch(t)).backward()
            optimiser.step()
            schedule.step()
        return {n: p.detach() for n, p in params.items()}

    online = replace(learned.online, refresh=4)
    replace(learned, header=replace(learned.header, online=online.to_dict())).save(tmp_path / "x.safetensors")
    asked, kept, usual = end(learned, refresh=4), end(tmp_path / "x.safetensors"), end(learned)
    assert all(torch.equal(asked[n], kept[n]) for n in asked)
    assert any(not torch.equal(asked[n], usual[n]) for n in asked)
    assert all(torch.equal(x, usual[n]) for n, x in end(tmp_path / "x.safetensors", refresh=1).items())
    assert "direction found every 4 steps" in str(online)
    four, one = metamd.learned_rival(learned, refresh=4), metamd.learned_rival(learned)
    assert four.identity != one.identity
    outcomes = [train_rival(task, r.untuned(), measuring=Measuring(splits=())) for r in (four, one)]
    assert outcomes[0].final_loss == pytest.approx(float(task.monitor()(asked)), rel=1e-4)
    assert outcomes[1].final_loss != outcomes[0].final_loss
    with pytest.raises(ValueError, match="refresh must be a number of steps, 1 or more; got 0"):
        end(learned, refresh=0)
    plain = replace(learned, header=replace(learned.header, usage=Usage().to_dict()))
    with pytest.raises(ValueError, match=r"but this file recommends the learned metric, .*Leave refresh out"):
        end(plain, refresh=4)
    average = replace(learned, header=replace(learned.header, online=Online(scale=learned.online.scale).to_dict()))
    assert [takes_polar_steps(x) for x in (learned, plain, average)] == [True, False, False]
    asked_for = [compare_command._our_contender(learned, Compare("x", "tabular", refresh=k)).describe() for k in (None, 4)]
    assert asked_for == [one.untuned().describe(), four.untuned().describe()]
