"""The metric that follows a run in learned coordinates, how a geometry is used, and the learned start."""

import copy
import io
import math
import pickle
from dataclasses import replace

import pytest
import torch
from scipy.optimize import minimize_scalar

import metamd
from metamd import (
    Diagonal,
    Euclidean,
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
from metamd.comparison.training import train as train_rival
from metamd.files.learned import LearnedStart
from metamd.inner.objectives import Reference
from metamd.inner.run import gradient
from metamd.learning import reference as following
from metamd.learning.parts import Parts
from metamd.learning.reference import draw_tasks, learn_from_reference, learn_start, solved, tuned_reference
from metamd.learning.trials import Tally, learn_scale, run_usage
from metamd.learning.usage import learn_usage, tried_line
from metamd.optimiser.optimiser import takes_polar_steps
from metamd.potentials.online import KEPT
from metamd.tasks import quadratic, starting_at, tabular
from metamd.tasks.wrapped import Counted
from tests.helpers import equal_parameters, losses_of, small_model
from tests.helpers import train as fit


def scales(model, rate):
    return {n: 1 / rate for n, _ in model.named_parameters()}


def distance(a, b):
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("online", "theirs"),
    [
        (Online("average", 0.99, 1e-8), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.99), eps=1e-8)),
        (Online("sum", epsilon=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-10)),
    ],
)
def test_in_the_parameters_own_coordinates_the_rules_are_torchs(online, theirs):
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    rule = Online(online.rule, online.beta, online.epsilon, scales(model, 0.01))
    fit(model, MetaMD(model.named_parameters(), Diagonal(), metric=rule), 40)
    fit(other, theirs(other.parameters()), 40)
    assert distance(model, other) < 1e-12
    fit(model, MetaMD(model.named_parameters(), Diagonal(), metric=rule), 3)
    assert distance(model, other) > 1e-4, "a run that went on agrees with one that did not"


def turned(model, seed=0):
    """A Kronecker potential with a random orthogonal basis for every weight."""
    g = torch.Generator().manual_seed(seed)
    shapes = {n: p.shape for n, p in model.named_parameters() if p.ndim == 2}
    factors = {f"right/{n}": torch.linalg.qr(torch.randn(s[1], s[1], generator=g).double())[0] for n, s in shapes.items()}
    fresh = Kronecker().bind(list(model.named_parameters()))
    log_d = {k: torch.zeros_like(v) for k, v in fresh.log_d.items()}
    potential = MaxDiagonal(1, tying="tensor", basis=fresh.basis.with_factors(factors)).with_metrics(log_d)
    return potential, factors


def test_in_a_learned_basis_it_is_the_rule_on_the_turned_problem():
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    potential, factors = turned(model)
    rule = Online("average", 0.9, scale=scales(model, 0.02))
    fit(model, MetaMD(model.named_parameters(), potential, metric=rule), 25)

    class Turned(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for n, p in other.named_parameters():
                v = factors.get(f"right/{n}")
                state = self.state[p]
                c = p.grad if v is None else p.grad @ v
                state["t"] = state.get("t", 0) + 1
                state["s"] = 0.9 * state.get("s", 0) + 0.1 * c * c
                u = c / ((state["s"] / (1 - 0.9 ** state["t"])).sqrt() + 1e-8)
                p.sub_(0.02 * (u if v is None else u @ v.T))

    fit(other, Turned(other.parameters(), {}), 25)
    assert distance(model, other) < 1e-11


def test_momentum_schedules_and_weight_decay_work_with_it():
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    rule = Online(scale=scales(model, 0.01))
    optimiser = MetaMD(model.named_parameters(), Diagonal(), metric=rule, momentum=0.9, weight_decay=0.1, lr=0.1)
    fit(model, optimiser, 10)
    z = {n: p.detach().clone() for n, p in other.named_parameters()}
    x, states = dict(z), {n: {} for n in z}
    for t in range(10):
        g = torch.Generator().manual_seed(t)
        inputs = torch.randn(16, 5, generator=g).double()
        target = torch.stack([inputs[:, 0] + inputs[:, 1], inputs[:, 2] * inputs[:, 3], inputs[:, 4].sin()], 1)
        leaves = {n: v.clone().requires_grad_() for n, v in x.items()}
        loss = (torch.func.functional_call(other, leaves, (inputs,)) - target).square().mean()
        for n, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            a = rule.metric(grad, states[n])
            z[n] = 0.9 * z[n] - 0.01 * grad / a
            x[n] = 0.9 * x[n] + 0.1 * z[n]
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), x[n], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["average", "sum", "polar"])
def test_resume_and_copies_are_bit_exact(rule):
    model = small_model()
    potential, _ = turned(model)
    options = {"metric": Online(rule, scale=scales(model, 0.01)), "momentum": 0.8}
    optimiser = MetaMD(model.named_parameters(), potential, **options)
    fit(model, optimiser, 10)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=9)
    resumed = MetaMD(other.named_parameters(), potential, **options)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    twins = [(other, resumed), copy.deepcopy((model, optimiser)), pickle.loads(pickle.dumps((model, optimiser)))]
    for m, o in [(model, optimiser), *twins]:
        fit(m, o, 10, first=10)
    assert all(equal_parameters(model, m) for m, _ in twins)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rule",
    [
        Online("average"),
        Online("sum"),
        Online("polar"),
        Online("polar", signal=0.9),
        Online("polar", signal=0.9, refresh=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("basis", [False, True])
def test_half_precision_is_finite_and_resumes_bit_exactly(rule, dtype, basis):
    model = small_model(dtype=dtype)
    options = {"metric": replace(rule, scale=scales(model, 0.01)), "momentum": 0.8}
    geometry = turned(model)[0] if basis else Diagonal()
    optimiser = MetaMD(model.named_parameters(), geometry, **options)
    fit(model, optimiser, 10)
    assert all(p.isfinite().all() for p in model.parameters())
    for state in optimiser.state.values():
        assert {state[key].dtype for key in KEPT if key in state} == {torch.float32}
    other = copy.deepcopy(model)
    resumed = MetaMD(other.named_parameters(), geometry, **options)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    fit(model, optimiser, 10, first=10)
    fit(other, resumed, 10, first=10)
    assert equal_parameters(model, other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in KEPT:
            assert key not in optimiser.state[p] or torch.equal(optimiser.state[p][key], resumed.state[q][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_what_it_could_not_hold(dtype):
    x = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimiser = MetaMD([("x", x)], Diagonal(), metric=Online("sum", scale={"x": 1e4}))
    for _ in range(2000):
        x.grad = torch.ones_like(x)
        optimiser.step()
    assert torch.equal(optimiser.state[x]["squares"], torch.full((3,), 2000.0))


@pytest.mark.parametrize("rule", ["average", "sum"])
def test_coordinates_without_gradient_stay_where_they_are_in_half_precision(rule):
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    x.grad = torch.tensor([1e-4, 0.0, 1.0], dtype=torch.float16)
    MetaMD([("x", x)], Diagonal(), metric=Online(rule, scale={"x": 100.0})).step()
    torch.testing.assert_close(x.detach().float(), torch.tensor([-0.01, 0.0, -0.01]), rtol=1e-3, atol=0)


def test_the_identity_of_growing_metrics_holds_along_an_online_run():
    """Regret = 1/2 sum |u - theta_t|^2 in H_t - H_{t-1} + 1/2 sum g'H_t^-1 g - 1/2 |u - theta_{T+1}|^2 in H_T, any rule."""
    for rule in ("sum", "average"):
        task = quadratic().build(quadratic().sample(torch.Generator().manual_seed(1)))
        x, state, online = task.init()["theta"], {}, Online(rule, 0.9, scale={"theta": 1.0})
        u = torch.tensor([0.3, -0.2], dtype=torch.float64)
        before, regret, bound = torch.zeros(2).double(), 0.0, 0.0
        for t in range(30):
            g = gradient(task, {"theta": x}, task.batch(t))[1]["theta"]
            h = online.metric(g, state)
            regret += float(g @ (x - u))
            bound += 0.5 * float(((u - x) ** 2) @ (h - before)) + 0.5 * float((g * g / h).sum())
            x, before = x - g / h, h
        assert regret == pytest.approx(bound - 0.5 * float(((u - x) ** 2) @ before), rel=1e-9)
        if rule == "sum":
            assert regret <= bound


def test_a_missing_scale_is_said_before_anything_moves():
    model = small_model()
    online = Online("sum", scale={"0.weight": 100.0, "0.bias": 100.0})
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'.*; there are those of '0\.weight', '0\.bias'"):
        MetaMD(model.named_parameters(), Diagonal(), metric=online)
    known = Diagonal().bind(model[0].named_parameters("0"))
    lenient = known.with_metrics(known.log_d).bind(model.named_parameters(), missing="euclidean")
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'"):
        MetaMD(model.named_parameters(), lenient, metric=online)
    optimiser = MetaMD(model[0].named_parameters("0"), Diagonal(), metric=online)
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'"):
        optimiser.add_param_group({"params": list(model[2].named_parameters("2"))})
    fit(model, optimiser, 2)
    assert len(optimiser.param_groups) == 1


def test_a_frozen_tensor_needs_no_scale_until_it_is_trained():
    model = small_model()
    model[2].requires_grad_(False)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), metric=Online(scale={"0.weight": 100.0, "0.bias": 100.0}))
    fit(model, optimiser, 2)
    model[2].requires_grad_(True)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"there is none for '2\.weight'"):
        fit(model, optimiser, 1)
    assert equal_parameters(model, before)


# how a geometry is used


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
        torch.testing.assert_close(p.detach(), outcome.end[n], rtol=1e-4, atol=1e-5)


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
    losses = []
    for t in range(30):
        optimiser.eval()
        losses.append(float(task.loss(params, task.batch(t)).detach()))
        optimiser.train()
        optimiser.zero_grad()
        task.loss(params, task.batch(t)).backward()
        optimiser.step()
        schedule.step()
    optimiser.eval()
    assert sum(losses) / 30 == pytest.approx(outcome.loss, rel=1e-5)
    for n, p in params.items():
        torch.testing.assert_close(p.detach(), outcome.end[n], rtol=1e-4, atol=1e-5)
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
    task = quadratic().build(quadratic().sample(torch.Generator().manual_seed(2)))
    start = task.init()["theta"]
    g = gradient(task, {"theta": start}, task.batch(0))[1]["theta"]
    u = torch.tensor([1.0, 2.0], dtype=torch.float64)
    online = Online("sum", epsilon=1e-12, scale={"theta": 50.0})
    outcome = run_usage(task, Diagonal().bind(task.init()), Usage("online"), online=online, comparator={"theta": u}, steps=1)
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
        tame = following._steady(phi.with_metrics(wild), built[:2], Parts(Counted(family))).bind(built[0].init())
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
    ("call", "sentence"),
    [
        (lambda: Online("mean"), 'rule must be "sum", "average" or "polar", got'),
        (lambda: Online("polar", refresh=-1), "refresh must be a number of steps, or 0 for every one; got -1"),
        (lambda: Online(beta=1.0), "beta must lie between 0 and 1, got 1.0"),
        (lambda: Online(epsilon=0.0), "epsilon must be positive"),
        (lambda: Online(scale={"a": -1.0}), "the scale of 'a' must be positive and finite, got -1.0"),
        (lambda: Online().step_size("a"), "there is no online scale for 'a'"),
        (lambda: Usage("other"), 'metric must be "learned" or "online"'),
        (lambda: Usage(schedule="cosine"), 'schedule must be "constant" or "linear" or "quadratic" or "learned"'),
        (lambda: Usage(factor=0.0), "factor must be positive"),
        (lambda: Usage(averaging="anytime"), 'averaging must be "constant" or "tail", got \'anytime\''),
        (lambda: Usage(averaging="tail", momentum=0.9), "has no momentum"),
        (lambda: MetaMD(small_model().named_parameters(), Diagonal(), metric="online"), "learns the scales"),
        (
            lambda: MetaMD(small_model().named_parameters(), Euclidean(), metric=Online()),
            "an online metric needs a potential with coordinates",
        ),
        (lambda: prepare([], "quadratic", steps=0), "steps must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


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


# the learned start


def test_the_mean_of_the_solutions_minimises_the_expected_divergence():
    g = torch.Generator().manual_seed(0)
    solutions = [{"x": torch.randn(4, generator=g, dtype=torch.float64)} for _ in range(5)]
    mean = {"x": torch.stack([u["x"] for u in solutions]).mean(0)}
    fresh = MaxDiagonal(3, centre="origin").bind(mean)
    phi = fresh.with_metrics({"x": torch.randn(3, 4, generator=g, dtype=torch.float64)}).bind(mean)

    def expected(v):
        return sum(float(phi.divergence(u, v).detach()) for u in solutions) / 5

    others = [{"x": mean["x"] + 0.3 * torch.randn(4, generator=g, dtype=torch.float64)} for _ in range(50)]
    assert all(expected(mean) <= expected(v) + 1e-12 for v in others)
    median = {"x": torch.stack([u["x"] for u in solutions]).median(0).values}
    assert expected(median) > expected(mean)


def test_a_learned_start_is_the_mean_of_reference_ends_and_travels_with_the_file(tmp_path):
    family = starting_at(quadratic(steps=20), {"theta": torch.tensor([1.0, 1.0], dtype=torch.float64)})
    reference = Reference(lr=0.05, factor=2)
    start = learn_start(family, reference=reference, tasks=3, seed=1)
    seeds = [metamd.tasks.base.derive_seed(1, "usage", "start", i) for i in range(3)]
    drawn = [family.build(family.sample(torch.Generator().manual_seed(s))) for s in seeds]
    ends = [reference.run(t, t.init(), 20)[0]["theta"] for t in drawn]
    torch.testing.assert_close(start["theta"], torch.stack(ends).mean(0))
    learned = meta_train(starting_at(family, start), Diagonal(), outer_steps=1, tasks_per_step=2).with_start(start)
    learned.save(tmp_path / "started.safetensors")
    again = metamd.load(tmp_path / "started.safetensors")
    assert torch.equal(again.start["theta"], start["theta"])
    assert again.header.start == {"theta": (2,)}
    damaged = (tmp_path / "started.safetensors").read_bytes()
    at = damaged.rindex(start["theta"].numpy().tobytes())
    (tmp_path / "damaged.safetensors").write_bytes(damaged[:at] + b"\x01" + damaged[at + 1 :])
    with pytest.raises(ValueError, match="does not match its checksum"):
        metamd.load(tmp_path / "damaged.safetensors")


def test_a_learned_start_knows_its_tasks_and_its_cost(tmp_path):
    family = starting_at(quadratic(steps=10), {"theta": torch.tensor([1.0, 1.0], dtype=torch.float64)})
    used, batches, build = set(), [], family.build

    def spied(config):
        task = build(config)
        used.add(metamd.tasks.config_hash(config))
        batch = task.batch
        task.batch = lambda step: (batches.append(step), batch(step))[1]
        return task

    family.build = spied
    start = learn_start(family, tasks=4)
    assert set(start.tasks) == used
    assert start.cost["gradient_evaluations"] == len(batches)
    learned = meta_train(starting_at(family, start), Diagonal(), outer_steps=1, tasks_per_step=2)
    with_it, plain = learned.with_start(start), learned.with_start(dict(start), tasks=["a" * 32])
    assert set(with_it.header.task_hashes) == {*learned.header.task_hashes, *start.tasks}
    both = learned.header.cost["gradient_evaluations"] + len(batches)
    assert with_it.header.cost["gradient_evaluations"] == both
    assert with_it.header.cost["outer_steps"] == learned.header.cost["outer_steps"]
    assert plain.header.cost == learned.header.cost
    assert "a" * 32 in plain.header.task_hashes
    start.save(tmp_path / "start.safetensors")
    again = LearnedStart.load(tmp_path / "start.safetensors")
    assert (again.tasks, again.cost, list(again)) == (start.tasks, start.cost, list(start))
    data = bytearray((tmp_path / "start.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "start.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="does not match its checksum"):
        LearnedStart.load(tmp_path / "start.safetensors")


def test_a_learned_start_needs_tasks_that_share_one():
    with pytest.raises(ValueError, match="needs tasks that begin at one model"):
        learn_start(tabular(steps=5))
    learned = meta_train(quadratic(), Diagonal(), outer_steps=1, tasks_per_step=1)
    with pytest.raises(ValueError, match="the header must announce the learned start"):
        LearnedOptimiser(learned.header, learned.potential, start={"theta": torch.zeros(2)})
    with pytest.raises(ValueError, match="must be finite"):
        learned.with_start({"theta": torch.tensor([math.nan, 0.0])}).save("never.safetensors")


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
        first = said[
            : said.index("online metric, tail average, linear schedule, factor 0.5 (polar rule, beta 0.9, signal 0.95)") + 1
        ]
        later = said[len(first) :]  # the best of the first is tried again, on more tasks
        assert len(first) == len(set(first)) > 4, "two usages are called the same"
        assert max(map(later.count, later)) <= 2 < len(set(later)), "on two tasks and on all, or two are called the same"
        assert all(any(line.endswith(f"(polar rule, beta {b}, signal 0.95)") for line in said) for b in (0.7, 0.9))
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


def test_a_certificate_says_that_the_recommended_usage_is_another():
    family = tabular(steps=5)
    learned = learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)
    used = replace(learned, header=replace(learned.header, usage=Usage(momentum=0.9).to_dict()))
    plain, other = (
        str(metamd.certify(x, family, held_out_tasks=1, stated=metamd.Stated(target=1.0))) for x in (learned, used)
    )
    assert "learned from reference runs" in plain
    assert "is not certified" not in plain
    assert "(learned metric, momentum 0.9, constant schedule, factor 1) is not certified" in " ".join(other.split())


def test_what_a_file_recommends_is_said_and_left_to_prepare(tmp_path, capsys):
    """MetaMD keeps its defaults, as a torch optimiser does, and says in its repr what the file would have."""
    family = tabular(steps=5)
    learned = learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)
    used = replace(learned, header=replace(learned.header, usage=Usage("learned", 0.9, "linear", 1.4).to_dict()))
    named = [(n, torch.nn.Parameter(x)) for n, x in family.example().items()]
    words = "learned metric, momentum 0.9, linear schedule, factor 1.4"
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
    assert f"{words}; MetaMD(params, learned, steps=T) does so, MetaMD(params, learned) does not" in said


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
    asked_for = [compare_command._ours(learned, Compare("x", "tabular", refresh=k)).describe() for k in (None, 4)]
    assert asked_for == [one.untuned().describe(), four.untuned().describe()]
