"""The tables with which torch tests its own optimisers, run on MetaMD."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from metamd import Euclidean, MaxDiagonal, MetaMD
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
