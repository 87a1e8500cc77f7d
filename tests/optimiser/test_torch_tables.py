"""The tables with which torch tests its own optimisers, run on MetaMD."""

import copy
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from metamd import Diagonal, Euclidean, MaxDiagonal, MetaMD, Online
from tests.helpers import random_geometry, small_model, train

common = pytest.importorskip("torch.testing._internal.common_optimizers", reason="torch's test tables need expecttest")
OURS = {"lr", "weight_decay", "maximize"}


def geometry_for(kind):
    return Euclidean() if kind == "euclidean" else MaxDiagonal(3)


@pytest.mark.parametrize("kind", ["euclidean", "mixture"])
def test_torchs_inputs_decrease_the_loss(kind):
    """Each of SGD's configurations in torch's tables that MetaMD has, on the problem torch uses: |Ax - b| falls."""
    ran = 0
    for config in common.optim_inputs_func_sgd("cpu"):
        if not set(config.kwargs) <= OURS:
            continue
        weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
        x = torch.randn(5)
        optimiser = MetaMD([weight, bias], geometry_for(kind), **{"lr": 1e-3, **config.kwargs})
        sign = -1 if config.kwargs.get("maximize") else 1

        def closure(optimiser=optimiser, weight=weight, bias=bias, x=x):
            optimiser.zero_grad()
            loss = (weight.mv(x) + bias).pow(2).sum()
            loss.backward()
            return loss

        first = closure().item()
        for _ in range(20):
            optimiser.step(closure)
        assert sign * closure().item() < sign * first, config.desc
        ran += 1
    assert ran >= 5


def test_torchs_error_inputs_are_refused_as_torch_refuses_them():
    ran = 0
    for case in common.optim_error_inputs_func_sgd("cpu", torch.float32):
        config = case.optimizer_error_input
        if not set(config.kwargs) <= OURS:
            continue
        params = config.params if config.params is not None else [nn.Parameter(torch.zeros(1))]
        catch = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
        with catch(case.error_type, match=case.error_regex.partition(":")[0]):
            MetaMD(params, Euclidean(), **config.kwargs)
        ran += 1
    assert ran >= 6


@pytest.mark.parametrize(
    "build", [s for info in common.optim_db if info.optim_cls is torch.optim.SGD for s in info.scheduler_inputs]
)
def test_torchs_scheduler_inputs_run(build):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), random_geometry(model), lr=0.02)
    schedulers = [make(optimiser) for make in build]
    for t in range(5):
        loss = train(model, optimiser, 1, first=t)[0]
        for s in schedulers:
            s.step(*([loss] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else []))
    assert all(torch.isfinite(p).all() for p in model.parameters())


# MetaMD as torch describes its own optimisers, and a test for each behaviour that torch tests of those. docs/promises.md
# lists them, with what does not apply.


def inputs(device, dtype=None):
    """The configurations of MetaMD, as torch's table has those of its optimisers."""
    described = {
        "default": {},
        "another lr": {"lr": 1e-2},
        "tensor lr": {"lr": torch.tensor(1e-3)},
        "weight decay": {"weight_decay": 0.5},
        "momentum": {"momentum": 0.9},
        "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.1},
        "maximize": {"maximize": True, "weight_decay": 1e-3},
        "tail average": {"averaging": "tail"},
    }
    return [common.OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in described.items()]


def info(geometry):
    """A geometry as torch describes an optimiser."""

    def build(params, **options):
        return MetaMD(params, geometry(), **{"lr": 1e-3, **options})

    return common.OptimizerInfo(
        build,
        optim_inputs_func=inputs,
        scheduler_inputs=next(i for i in common.optim_db if i.optim_cls is torch.optim.SGD).scheduler_inputs,
        supported_impls=(),
        not_og_supported_flags=("maximize", "weight_decay", "momentum"),
        supports_complex=False,
        optim_error_inputs_func=common.optim_error_inputs_func_sgd,
    )


INFOS = {
    "euclidean": info(Euclidean),
    "mixture": info(lambda: MaxDiagonal(3)),
    "online": info(Diagonal),
}
TABLE = [(name, i) for name in INFOS for i in range(len(inputs("cpu")))]


@pytest.fixture(params=TABLE, ids=lambda case: f"{case[0]}-{inputs('cpu')[case[1]].desc}")
def case(request):
    """A way to build an optimiser of these parameters, and the options that are given."""
    name, i = request.param
    table, options = INFOS[name], INFOS[name].optim_inputs_func("cpu")[i].kwargs
    scale = {"metric": Online("average", scale=dict.fromkeys(("weight", "bias"), 100.0))} if name == "online" else {}
    return lambda params, **more: table.optim_cls(params, **scale, **{**copy.deepcopy(options), **more}), options


def problem(seed=0, dtype=torch.float32):
    """Named parameters, and the closure that takes a gradient of |Ax - b|^2."""
    g = torch.Generator().manual_seed(seed)
    weight, bias = (nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in ((10, 5), (10,)))
    x = torch.randn(5, generator=g).to(dtype)

    def closure():
        weight.grad = bias.grad = None
        loss = (weight.mv(x) + bias).square().sum()
        loss.backward()
        return loss.detach()

    return [("weight", weight), ("bias", bias)], closure


def values(named):
    return [p.detach().clone() for _, p in named]


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def run(optimiser, closure, steps=4):
    for _ in range(steps):
        optimiser.step(closure)


def test_each_configuration_goes_the_right_way(case):
    build, options = case
    named, closure = problem()
    optimiser, first = build(named), float(closure())
    run(optimiser, closure, 10)
    sign = -1 if options.get("maximize") else 1
    assert sign * float(closure()) < sign * first


@pytest.mark.parametrize("build", INFOS["euclidean"].scheduler_inputs, ids=range(len(INFOS["euclidean"].scheduler_inputs)))
def test_groups_under_torchs_schedulers_go_the_right_way(build):
    (weight, bias), closure = problem()
    optimiser = MetaMD([{"params": [weight]}, {"params": [bias], "lr": 1e-3}], Euclidean(), lr=1e-2)
    schedulers, first = [make(optimiser) for make in build], float(closure())
    for _ in range(10):
        loss = optimiser.step(closure)
        for s in schedulers:
            s.step(*([loss] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else []))
    assert float(closure()) < first


def test_noncontiguous_parameters_take_the_same_steps(case):
    build, _ = case
    ends = []
    for contiguous in (True, False):
        named, closure = problem()
        if not contiguous:
            weight = named[0][1]
            weight.data = weight.data.t().contiguous().t()
            assert not weight.is_contiguous()
        run(build(named), closure)
        ends.append(values(named))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b)


def test_a_tensor_for_lr_is_the_number_it_holds(case):
    build, _ = case
    ends = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64), torch.tensor([0.01], dtype=torch.float64)):
        named, closure = problem()
        run(build(named, lr=lr), closure)
        ends.append(values(named))
    for end in ends[1:]:
        for a, b in zip(ends[0], end, strict=True):
            torch.testing.assert_close(a, b)


def test_a_closure_is_called_once_with_gradients_and_its_loss_is_returned(case):
    build, _ = case
    named, closure = problem()
    calls = []

    def counted():
        assert torch.is_grad_enabled()
        calls.append(float(closure()))
        return calls[-1]

    assert build(named).step(counted) == calls[0]
    assert len(calls) == 1


def test_without_gradients_nothing_happens(case):
    build, _ = case
    named, _ = problem()
    optimiser, before = build(named), values(named)
    optimiser.step()
    assert equal(values(named), before)
    assert not any(optimiser.state.values())


def test_gradients_of_zero_change_nothing_but_by_weight_decay(case):
    build, options = case
    named, _ = problem()
    optimiser, before = build(named), values(named)
    for _, p in named:
        p.grad = torch.zeros_like(p)
    optimiser.step()
    assert equal(values(named), before) != bool(options.get("weight_decay"))


def test_gradients_are_left_as_they_are_and_zero_grad_clears_them(case):
    build, _ = case
    named, closure = problem()
    optimiser = build(named)
    closure()
    before = [p.grad.clone() for _, p in named]
    optimiser.step()
    assert equal([p.grad for _, p in named], before)
    optimiser.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for _, p in named)
    optimiser.zero_grad()
    assert all(p.grad is None for _, p in named)


def test_sparse_and_complex_gradients_are_refused(case):
    """`supports_sparse` and `supports_complex` are False in the table."""
    build, _ = case
    for name, grad in {"sparse": torch.zeros(10, 5).to_sparse(), "complex": None}.items():
        named, _ = problem(dtype=torch.complex64 if name == "complex" else torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metrics are real
            optimiser = build(named[:1])
        named[0][1].grad = torch.zeros_like(named[0][1]) if grad is None else grad
        with pytest.raises(RuntimeError, match=f"dense real gradients, but that of 'weight' is {name}"):
            optimiser.step()


def test_it_can_be_printed(case):
    build, options = case
    named, closure = problem()
    optimiser = build(named)
    run(optimiser, closure)
    assert "Parameter Group 0" in repr(optimiser)
    assert all(key in repr(optimiser) for key in options if key != "averaging")


def through(optimiser):
    """A state as a checkpoint of tensors alone brings it back."""
    kept = io.BytesIO()
    torch.save(optimiser.state_dict(), kept)
    kept.seek(0)
    return torch.load(kept, weights_only=True)


def alike(one, two):
    """Whether two states hold the same."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one.nan_to_num(1.5), two.nan_to_num(1.5))  # nothing seen yet is NaN
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(alike(one[k], two[k]) for k in one)
    return len(one) == len(two) and all(map(alike, one, two)) if isinstance(one, list) else one == two


def test_a_state_comes_back_equal_with_weights_only(case):
    build, _ = case
    named, closure = problem()
    optimiser = build(named)
    run(optimiser, closure)
    state = through(optimiser)
    again = build(named)
    again.load_state_dict(state)
    assert alike(again.state_dict(), state)


def test_a_loaded_run_is_the_run(case):
    build, _ = case
    named, closure = problem()
    optimiser = build(named)
    run(optimiser, closure)
    other, again = problem()
    resumed = build(other)
    resumed.load_state_dict(through(optimiser))
    for (_, p), (_, q) in zip(named, other, strict=True):
        q.data.copy_(p)
    run(optimiser, closure)
    run(resumed, again)
    for a, b in zip(values(named), values(other), strict=True):
        torch.testing.assert_close(a, b)


def test_two_equal_runs_have_equal_states(case):
    build, _ = case
    states = []
    for _ in range(2):
        named, closure = problem()
        optimiser = build(named)
        run(optimiser, closure)
        states.append(through(optimiser))
    assert alike(*states)


def test_a_state_from_before_an_option_existed_loads(case):
    """The flags that the table says were not there from the start."""
    build, options = case
    named, closure = problem()
    optimiser = build(named)
    run(optimiser, closure)
    for flag in INFOS["euclidean"].not_og_supported_flags:
        if not options.get(flag):
            state = through(optimiser)
            for group in state["param_groups"]:
                del group[flag]
            again = build(named)
            again.load_state_dict(state)
            run(again, closure, 1)


@pytest.mark.parametrize(("saved", "loads"), [(True, True), (True, False), (False, True), (False, False)])
def test_states_with_and_without_names_load_into_each_other(saved, loads):
    def built(names):
        named, closure = problem()
        return MetaMD(named if names else [p for _, p in named], Euclidean(), lr=0.01, momentum=0.5), closure

    (optimiser, closure), (other, again) = built(saved), built(loads)
    run(optimiser, closure)
    other.load_state_dict(through(optimiser))
    run(other, again, 1)
    assert other.param_groups[0].get("param_names") == (["weight", "bias"] if saved or loads else None)


def test_a_copy_has_all_public_attributes_and_takes_the_same_steps(case):
    build, _ = case
    named, closure = problem()
    optimiser = build(named)
    run(optimiser, closure)
    twin = copy.deepcopy(optimiser)
    public = {k for k in vars(optimiser) if not k.startswith("_")}
    assert public == {k for k in vars(twin) if not k.startswith("_")}
    for (_, p), q in zip(named, twin.param_groups[0]["params"], strict=True):
        closure()
        q.grad = p.grad.clone()
    optimiser.step()
    twin.step()
    assert equal(values(named), [q.detach() for q in twin.param_groups[0]["params"]])


def test_state_is_made_for_parameters_with_gradients_alone(case):
    build, _ = case
    named, closure = problem()
    optimiser = build(named)
    closure()
    named[1][1].grad = None
    optimiser.step()
    assert not optimiser.state.get(named[1][1])


HOOKS = ("step_pre_hook", "step_post_hook", "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook")


@pytest.mark.parametrize("hook", [*HOOKS, "load_state_dict_post_hook"])
def test_hooks_run_in_the_order_of_torch(case, hook):
    build, _ = case
    named, closure = problem()
    optimiser, order = build(named), []
    register = getattr(optimiser, f"register_{hook}")
    handles = [register(lambda *_: order.append(1))]
    if not hook.startswith("step"):
        handles.append(register(lambda *_: order.append(0), prepend=True))
    run(optimiser, closure, 1)
    optimiser.load_state_dict(optimiser.state_dict())
    assert order == ([1] if hook.startswith("step") else [0, 1])
    for handle in handles:
        handle.remove()
    run(optimiser, closure, 1)
    optimiser.load_state_dict(optimiser.state_dict())
    assert len(order) == (1 if hook.startswith("step") else 2)


def test_global_hooks_run(case):
    build, _ = case
    named, closure = problem()
    optimiser, order = build(named), []
    before = register_optimizer_step_pre_hook(lambda *_: order.append("before"))
    after = register_optimizer_step_post_hook(lambda *_: order.append("after"))
    try:
        run(optimiser, closure, 1)
    finally:
        before.remove()
        after.remove()
    assert order == ["before", "after"]


def test_groups_have_options_of_their_own(case):
    """A rate of zero holds a group where it is, and weight decay is a group's own."""
    build, _ = case
    named, closure = problem()
    (weight, bias), before = named, values(named)
    optimiser = build([{"params": [weight]}, {"params": [bias], "lr": 0.0, "weight_decay": 0.3}])
    run(optimiser, closure)
    assert torch.equal(bias[1], before[1])
    assert not torch.equal(weight[1], before[0])
    assert [g["weight_decay"] for g in optimiser.param_groups][1] == 0.3


def test_a_group_that_is_added_trains(case):
    build, _ = case
    named, closure = problem()
    optimiser = build(named[:1])
    run(optimiser, closure, 2)
    optimiser.add_param_group({"params": named[1:]})
    before = values(named)
    run(optimiser, closure, 2)
    assert not torch.equal(named[1][1], before[1])


@pytest.mark.parametrize("name", INFOS)
def test_torchs_error_inputs_are_refused_for_each_geometry(name):
    table = INFOS[name]
    for error in table.optim_error_inputs_func("cpu", torch.float32):
        config = error.optimizer_error_input
        params = config.params if config.params is not None else [nn.Parameter(torch.zeros(1, 1))]
        catch = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
        with catch(error.error_type, match=error.error_regex.partition(":")[0]):
            table.optim_cls(params, **config.kwargs)


@pytest.mark.parametrize(("page", "least"), [("promises.md", 20), ("limits.md", 5)])
def test_the_tests_that_a_page_names_exist(page, least):
    """A page names a test for each behaviour, or claim; a test that is renamed is renamed there."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    sources = "\n".join(p.read_text() for p in Path(__file__).parents[1].rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > least
    assert [n for n in named if f"def {n}(" not in sources] == []
