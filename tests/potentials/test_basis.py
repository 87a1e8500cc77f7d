"""Learned coordinates: the matrix geometric mean, the closed form, and the basis in steps, runs, files and optimisers."""

import copy
import io
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metamd
from metamd import Direct, Kronecker, MaxDiagonal, MetaMD, Regret, Reverse, meta_train, mirror_step
from metamd.cli import main as cli
from metamd.cli.inspect import distributions
from metamd.files.header import SCHEMA_VERSIONS
from metamd.files.usage import Usage
from metamd.inner.closed_form import (
    Iterate,
    learn_factors,
    moments_of,
)
from metamd.inner.objectives import Reference
from metamd.inner.run import run_inner
from metamd.potentials.basis import Basis, Orthogonal
from metamd.potentials.online import Online
from metamd.tasks import TaskFamily
from tests.helpers import random_basis
from tests.learned_files import SHAPES, learned, same, turned
from tests.small_tasks import F64, Regression, Small

FILES = Path(__file__).parents[1] / "frozen"


class Regressions(TaskFamily):
    """Regressions that share the distribution of their inputs."""

    def __init__(self) -> None:
        super().__init__("regressions", 30)

    def sample(self, generator):
        return {"seed": int(torch.randint(10**6, (), generator=generator))}

    def build(self, config):
        task = Regression(config["seed"], self.steps, inputs=10, spread=1.0)
        task.config = config
        return task

    def describe(self):
        return {"inputs": 10}


class Convolution(Small):
    """A convolution with a quadratic loss."""

    def __init__(self, seed=0, steps=8) -> None:
        super().__init__(seed, steps)
        self.x, self.target = self.normal(4, 2, 6, 6), self.normal(4, 3, 4, 4)
        self.start = {"conv.weight": self.normal(3, 2, 3, 3), "conv.bias": self.normal(3)}

    def loss(self, params, batch):
        out = nn.functional.conv2d(self.x, params["conv.weight"], params["conv.bias"])
        return 0.05 * (out - self.target).square().sum(dim=(1, 2, 3)).mean()


def dense(potential: MaxDiagonal, name: str) -> list[Tensor]:
    """D_j of one tensor as matrices that act on the flattened tensor, built by hand."""
    basis, slot = potential.basis, potential.slots[name]
    place = basis.places[name]
    rows, columns = place.sizes["left"], place.sizes["right"]
    found = []
    for logs in potential.log_d[slot.key].detach():
        sides, taken = [], 0
        for side, n in (("left", rows), ("right", columns)):
            factor = basis.factors.get(f"{side}/{slot.key}")
            if factor is None and (basis.kind == "right" and side == "left"):
                sides.append(torch.eye(n, dtype=F64))
                continue
            count = n if factor is None else min(factor.shape[1] + 1, n)
            d, taken = logs[taken : taken + count].exp(), taken + count
            u = torch.eye(n, dtype=F64) if factor is None else factor.double()
            rest = torch.eye(n, dtype=F64) - u @ u.T
            sides.append((u * d[: u.shape[1]]) @ u.T + d[-1] * rest)
        found.append(torch.kron(sides[0], sides[1]))
    return found


# matrices


@pytest.mark.parametrize(("n", "r"), [(7, 7), (7, 3), (4, 3), (5, 1)])
def test_columns_are_completed_to_an_orthogonal_matrix(n, r):
    columns = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=F64))[0][:, :r]
    q, eye = Orthogonal(columns), torch.eye(n, dtype=F64)
    whole = q.into(eye)
    assert torch.allclose(whole.T @ whole, eye)
    assert torch.allclose(q.into(whole, back=True), eye)
    assert torch.allclose(whole[:, :r].abs(), columns.abs())
    d = torch.cat([torch.rand(r, dtype=F64) + 0.5, torch.full((n - r,), 2.0, dtype=F64)])
    assert torch.allclose(q.divide(eye, d), (whole / d) @ whole.T)
    assert torch.allclose(Orthogonal(eye[:, :r]).into(eye), eye)


# steps


SETTINGS = [
    (task, sides, rank, pieces)
    for task in (Regression, Convolution)
    for sides in ("right", "both")
    for rank in (None, 2)
    for pieces in (1, 3)
]


@pytest.mark.parametrize(("task", "sides", "rank", "pieces"), SETTINGS)
def test_everything_equals_the_dense_matrices_it_stands_for(task, sides, rank, pieces):
    problem = task()
    start = problem.init()
    phi = random_basis(start, sides=sides, rank=rank, pieces=pieces, centre="origin")
    name = next(n for n in start if n.endswith("weight"))
    only = {name: start[name]}
    matrices = dense(phi, name)
    flat = start[name].reshape(-1)
    forms = torch.stack([0.5 * flat @ m @ flat for m in matrices]) + phi.offsets.detach()
    assert torch.allclose(phi.forms(only).detach(), forms)
    j = int(forms.argmax())
    assert torch.allclose(phi.mirror(only)[name].detach().reshape(-1), matrices[j] @ flat)
    assert torch.allclose(phi.inverse(phi.mirror(only))[name].detach(), start[name])
    grad = problem.normal(*start[name].shape) * 1e-3
    with torch.no_grad():
        stepped = mirror_step(only, {name: grad}, phi, 0.5).params[name]
    expected = start[name].reshape(-1) - 0.5 * torch.linalg.solve(matrices[j], grad.reshape(-1))
    assert torch.allclose(stepped.reshape(-1), expected)
    smallest = min(float(torch.linalg.eigvalsh(m)[0]) for m in matrices)
    assert phi.strong_convexity().constant <= smallest * (1 + 1e-9), "the bias may have a smaller one"
    assert float(phi.metric(name).detach().min()) == pytest.approx(smallest)
    u = {name: problem.normal(*start[name].shape)}
    y = matrices[j] @ flat
    values = torch.stack([0.5 * u[name].reshape(-1) @ m @ u[name].reshape(-1) for m in matrices]) + phi.offsets.detach()
    divergence = values.max() - forms.max() - y @ (u[name].reshape(-1) - flat)
    assert torch.allclose(metamd.bregman(phi, u, only).detach(), divergence)


def test_a_convolution_steps_as_its_unfolded_matrix():
    problem = Convolution()
    start = problem.init()
    phi = random_basis(start)
    grads = {n: problem.normal(*x.shape) for n, x in start.items()}
    with torch.no_grad():
        stepped = mirror_step(start, grads, phi, 0.3).params
    v, d = phi.basis.factors["right/conv.weight"], phi.log_d["conv.weight"][0].detach().exp()
    # the loss sees W only through W @ unfold(x): its rows are those of the unfolded input
    unfolded = nn.functional.unfold(problem.x, 3)
    flat = start["conv.weight"].reshape(3, -1) - 0.3 * (grads["conv.weight"].reshape(3, -1) @ v / d) @ v.T
    out = flat @ unfolded + stepped["conv.bias"][:, None]
    convolved = nn.functional.conv2d(problem.x, stepped["conv.weight"], stepped["conv.bias"])
    assert torch.allclose(convolved, out.reshape(convolved.shape))
    assert torch.allclose(stepped["conv.bias"], start["conv.bias"] - 0.3 * grads["conv.bias"] / phi.metric("conv.bias")[0])


def test_all_directions_but_one_are_all_of_them():
    """The number of all that is left is then that of one: low rank says the same as no rank, and one less does not."""
    task = Regression(outputs=5)
    start = task.init()
    full = random_basis(start)
    generator = torch.Generator().manual_seed(1)
    grads = {n: torch.randn(x.shape, generator=generator, dtype=F64) for n, x in start.items()}

    def stepped(phi):
        with torch.no_grad():
            return mirror_step(start, grads, phi).params["fc.weight"]

    basis = full.basis.with_factors({k: v[:, :-1] for k, v in full.basis.factors.items()})
    assert not any(Orthogonal(v).full for v in basis.factors.values())
    again = MaxDiagonal(1, tying="tensor", basis=basis).with_metrics(full.log_d).bind(start)
    torch.testing.assert_close(stepped(again), stepped(full))
    blank = Kronecker().bind(start)
    moments = moments_of(run_inner(task, blank, lr=0.2, products=True), blank, Regret())
    results = {}
    for rank in (None, 4, 3, 5, 50):
        now = Iterate.of(Kronecker(rank=rank).bind(start))
        found = learn_factors(now, moments, 100.0)
        results[rank] = stepped(now.moved(dict(now.log_d) | found.log_d, basis=found.basis).apply(blank).bind(start))
        assert {v.shape[1] for v in found.basis.factors.values()} == {min(rank or 5, 5)}
    torch.testing.assert_close(results[4], results[None], rtol=1e-5, atol=1e-6)  # factors are kept in float32
    assert not torch.allclose(results[3], results[None], rtol=1e-3)
    assert torch.equal(results[5], results[None])
    assert torch.equal(results[50], results[None])


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("rank", [None, 2])
def test_the_bound_on_the_regret_holds(rank, pieces):
    switches = 0
    for seed in range(6):
        task = Regression(seed, steps=40)
        phi = random_basis(task.init(), rank=rank, pieces=pieces, seed=seed)
        run = run_inner(task, phi, lr=0.3, certify=True)
        assert not run.diverged
        u = {n: x + 0.5 for n, x in run.end.items()}
        comparator = replace(run, reference=u)
        value = Regret(comparator=Reference()).value(comparator, phi).detach()
        bound = float(value) + float(run.gaps.sum()) / run.lr
        assert run.regret(u) <= bound * (1 + 1e-9)
        switches += run.switches
    assert pieces == 1 or switches > 0, "no run changed its piece"


class Sheared(Basis):
    """A basis whose way back is not the inverse of its way in."""

    def out_of(self, name, x):
        return super().out_of(name, torch.roll(x, 1, -1) if name in self.places else x)

    def descend(self, name, x, grad, d, lr, out):
        return x - lr * self.out_of(name, self.into(name, grad) / d)


def worst_comparator(run, phi) -> dict[str, Tensor]:
    """The point whose regret comes closest to its bound: theta_1 - lr D^-1 sum_t g_t."""
    basis = phi.basis.with_factors(phi.basis.factors)
    moved = {n: basis.out_of(n, basis.into(n, g) / phi.metric(n)[0].detach()) for n, g in run.gradient_sum.items()}
    return {n: x - run.lr * moved[n] for n, x in run.start.items()}


@pytest.mark.parametrize("kind", [Basis, Sheared])
def test_the_bound_is_tight_and_steps_in_a_basis_that_is_not_orthogonal_break_it(kind):
    violated = 0
    for seed in range(6):
        task = Regression(seed, steps=40)
        phi = random_basis(task.init(), seed=seed)
        phi.basis.prepared = lambda metrics, basis=phi.basis: basis
        phi.basis.__class__ = kind
        run = run_inner(task, phi, lr=0.1, certify=True)
        u = worst_comparator(run, phi)
        with torch.no_grad():
            bound = float(Regret(comparator=Reference()).value(replace(run, reference=u), phi))
        assert kind is Sheared or run.regret(u) == pytest.approx(bound, rel=1e-9)
        violated += run.regret(u) > bound * (1 + 1e-6)
    assert (violated > 0) == (kind is Sheared)


# learning


@pytest.mark.parametrize("shrinkage", [(0.1, 0.001), "auto"])
def test_meta_training_finds_the_inputs_of_the_family_and_beats_the_diagonal(shrinkage):
    options = {"objective": Regret(comparator=Reference(lr=0.05)), "outer_steps": 5, "tasks_per_step": 4}
    turned_file = meta_train(Regressions(), Kronecker(shrinkage=shrinkage), **options)
    plain = meta_train(Regressions(), metamd.Diagonal(), **options)
    fresh = [Regressions().build({"seed": seed}) for seed in range(10**6, 10**6 + 5)]
    losses = [sum(float(run_inner(task, f.potential).losses.mean()) for task in fresh) for f in (turned_file, plain)]
    assert losses[0] < 0.9 * losses[1]
    assert turned_file.header.basis == "right"
    assert turned_file.header.factors == {"right/fc.weight": (10, 10)}


QUICK = {"objective": Regret(comparator=Reference(lr=0.05, factor=1.0)), "outer_steps": 2, "tasks_per_step": 2}


@pytest.mark.parametrize(("rank", "tying"), [(3, "role"), (None, "tensor"), ("auto", "tensor")])
def test_an_interrupted_meta_training_continues_to_the_very_same_file(tmp_path, rank, tying):
    def stop(record, step):
        if step == 1:
            raise KeyboardInterrupt

    phi = Kronecker(rank=rank, tying=tying)
    whole = meta_train(Regressions(), phi, **QUICK)
    with pytest.raises(KeyboardInterrupt):
        meta_train(Regressions(), phi, **QUICK, journal=metamd.Journal(tmp_path), log=stop)
    again = meta_train(Regressions(), phi, **QUICK, journal=metamd.Journal(tmp_path))
    assert again.fingerprint() == whole.fingerprint()
    assert "right/fc.weight" in whole.header.factors or tying == "role"
    other = Kronecker(rank=rank, tying=tying, shrinkage=(0.2, 0.2))
    with pytest.raises(ValueError, match="other settings: basis is"):
        meta_train(Regressions(), other, **QUICK, journal=metamd.Journal(tmp_path))


class Explosive(Regressions):
    """Every third task has inputs that are larger, so many times."""

    def __init__(self, times) -> None:
        super().__init__()
        self.times = times

    def build(self, config):
        task = super().build(config)
        if config["seed"] % 3 == 0:
            task.x = self.times * task.x
        return task


@pytest.mark.parametrize(("times", "finished_before"), [(100, False), (2, True)])
def test_tasks_that_diverge_are_left_out_and_the_metrics_retreat(monkeypatch, times, finished_before):
    """They retreat if the tasks finish under the metrics before; with others, the task itself is to blame."""
    records, retreats, halfway = [], [], Iterate.halfway
    monkeypatch.setattr(Iterate, "halfway", lambda now, good: retreats.append(now) or halfway(now, good))
    found = meta_train(
        Explosive(times),
        Kronecker(),
        **(QUICK | {"outer_steps": 4, "tasks_per_step": 6}),
        log=lambda r, _: records.append(r),
    )
    assert all(bool(v.isfinite().all()) for v in (*found.potential.log_d.values(), *found.potential.basis.factors.values()))
    assert run_inner(Regressions().build({"seed": 1}), found.potential).diverged == ""
    lost = [len(record["diverged"]) for record in records if record["stage"] != "judge"]
    assert 0 < max(lost) < 6, "no task diverged, or all did"
    assert bool(retreats) == finished_before


def test_the_estimators_differentiate_in_the_basis():
    """Against finite differences of the objective itself."""
    task, objective = Regression(steps=6), metamd.TrainingLoss()
    for rank in (None, 2):
        phi = random_basis(task.init(), rank=rank)
        found = Reverse()(task, phi, objective, lr=0.3).grads["fc.weight"]
        forward = metamd.Forward()(task, phi, objective, lr=0.3).grads["fc.weight"]
        assert torch.allclose(found, forward)
        differences = torch.zeros_like(found)
        for i in range(found.shape[1]):
            values = []
            for sign in (1, -1):
                logs = {k: v.detach().clone() for k, v in phi.log_d.items()}
                logs["fc.weight"][0, i] += sign * 1e-5
                run = run_inner(task, phi.with_metrics(logs).bind(task.init()), lr=0.3)
                values.append(float(run.losses.mean()))
            differences[0, i] = (values[0] - values[1]) / 2e-5
        assert torch.allclose(found, differences, atol=1e-7, rtol=1e-5)
        direct = Direct()(task, phi, Regret(), lr=0.3)
        assert np.isfinite(direct.value)


# optimiser and file


class Weights(nn.Module):
    """The parameters of a `Regression` or a small convolutional model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.conv(x)).flatten(1))


def train_some(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        x = torch.randn(16, 1, 4, 4, generator=torch.Generator().manual_seed(t))
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()


def weights(seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    return Weights()


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_run_resumes_bit_by_bit_and_survives_copies(pieces, rank):
    model = weights()
    named = {n: p.detach().double() for n, p in model.named_parameters()}
    phi = random_basis(named, pieces=pieces, rank=rank)
    optimiser = MetaMD(model.named_parameters(), phi, lr=0.05)
    train_some(model, optimiser, 5)
    again = weights(1)
    other = MetaMD(again.named_parameters(), phi, lr=0.05)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimiser"])
    pair = pickle.loads(pickle.dumps((model, optimiser)))
    twin = copy.deepcopy((model, optimiser))
    for m, o in ((model, optimiser), (again, other), pair, twin):
        train_some(m, o, 5, first=5)
        assert all(torch.equal(a, b) for a, b in zip(m.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("factors", [True, False])
def test_the_memory_layout_of_a_convolution_does_not_matter(factors):
    """In place, where a view of a channels-last tensor as a matrix would be a copy."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = weights().to(memory_format=layout)
        named = {n: p.detach().double() for n, p in model.named_parameters()}
        phi = random_basis(named, pieces=2) if factors else Kronecker(2)
        optimiser = MetaMD(model.named_parameters(), phi, lr=0.05)
        train_some(model, optimiser, 5)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ends, strict=True))
    assert not torch.allclose(ends[0][0], next(weights().parameters()))


@pytest.mark.parametrize("tying", ["tensor", "role"])
@pytest.mark.parametrize(("sides", "rank"), [("right", None), ("right", 2), ("both", None), ("both", 2)])
def test_files_round_trip(tmp_path, sides, rank, tying):
    file = turned(sides=sides, rank=rank, tying=tying)
    file.save(tmp_path / "a.safetensors")
    again = metamd.load(tmp_path / "a.safetensors")
    assert same(file, again)
    assert again.fingerprint() == file.fingerprint()
    assert again.header.schema_version == 3


@pytest.mark.parametrize(("version", "made"), [(2, learned), (3, partial(turned, rank=2))])
def test_committed_files_load_and_are_written_back_as_they_were(tmp_path, version, made):
    file = FILES / f"version-{version}.safetensors"
    found = metamd.load(file)
    assert found.header.schema_version == version
    assert same(found, replace(made(), header=found.header))
    found.save(tmp_path / "x.safetensors")
    # the last version may gain fields until it is released
    assert version == SCHEMA_VERSIONS[-1] or (tmp_path / "x.safetensors").read_bytes() == file.read_bytes()


def recommended():
    """A file with all that version 3 has beside the basis: a usage with knots and an average, an online metric, a start."""
    file = turned(rank=2, model=SHAPES)
    usage = Usage("online", schedule="learned", knots=(1.0, 0.5, 0.0), factor=0.7, averaging="tail")
    online = Online("polar", beta=0.7, signal=0.95, refresh=4, scale=dict.fromkeys(file.potential.log_d, 50.0))
    start = {n: torch.full(shape, 0.5) for n, shape in SHAPES.items()}
    header = replace(file.header, usage=usage.to_dict(), online=online.to_dict())
    return replace(file, header=header).with_start(start), usage, online, start


def test_the_committed_file_with_a_usage_and_a_start_loads_as_it_was_made(tmp_path):
    found = metamd.load(FILES / "version-3-usage.safetensors")
    made, usage, online, start = recommended()
    assert (found.usage, found.online) == (usage, online)
    assert found.fingerprint() == made.fingerprint()
    assert all(torch.equal(found.start[n], x) for n, x in start.items())
    found.save(tmp_path / "x.safetensors")
    assert same(metamd.load(tmp_path / "x.safetensors"), found)
    other = replace(made, header=replace(made.header, usage=replace(usage, knots=(1.0, 0.0)).to_dict()))
    assert found.usage != other.usage
    params = {n: nn.Parameter(x.clone()) for n, x in start.items()}
    optimiser, schedule = metamd.prepare(params.items(), found, steps=10)
    assert optimiser.averaging == "tail"
    assert schedule.get_last_lr()[0] == pytest.approx(0.7)


def test_a_file_says_its_basis(tmp_path, capsys):
    turned(rank=2).save(tmp_path / "x.safetensors")
    assert cli.run(["inspect", str(tmp_path / "x.safetensors")]) == 0
    assert "right/fc1.weight 3 x 2, right/fc2.weight 4 x 2" in capsys.readouterr().out
    file = turned(1, sides="both")
    logs = {k: v.detach() for k, v in file.potential.log_d.items()}
    rates = {row.key: 10**row.log_steps for row in distributions(file)}
    expected = (-(logs["fc1.weight"][0, :4, None] + logs["fc1.weight"][0, None, 4:])).exp().flatten().sort().values
    assert np.allclose(rates["fc1.weight"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"basis": "identity"}, r"the basis 'identity' .* cannot have the factor 'right/fc1\.weight'"),
        ({"factors": {"right/fc1.weight": (3, 4)}}, "at most as many columns as rows"),
        ({"factors": {"right/other": (3, 2)}}, "cannot have the factor 'right/other'"),
        ({"factors": {"right/fc1.weight": (3, 1)}}, "does not fit its basis, for which each piece needs 2 numbers"),
    ],
)
def test_a_header_with_a_wrong_basis_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(turned(rank=2).header, **change)


def test_a_basis_that_is_not_orthonormal_is_refused(tmp_path):
    file = turned()
    file.potential.basis.factors["right/fc1.weight"].mul_(2.0)
    with pytest.raises(ValueError, match=r"columns of the basis .* must be orthonormal"):
        file.save(tmp_path / "a.safetensors")


def test_what_a_basis_cannot_do_is_refused():
    with pytest.raises(ValueError, match="fused=True is for diagonal metrics"):
        MetaMD(weights().named_parameters(), Kronecker(), fused=True)
    with pytest.raises(ValueError, match='tying must be "tensor" or "role"'):
        Kronecker(tying="parameter").bind(Regression().init())
    for wrong, sentence in (
        ({"rank": 0}, "rank must be"),
        ({"shrinkage": (0.1, 0.0)}, "shrinkage must be"),
        ({"limit": 0}, "limit must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Kronecker(**wrong)


def test_a_file_by_role_fits_another_width_with_the_same_inputs():
    small = {
        "a.weight": torch.zeros(4, 6),
        "a.bias": torch.zeros(4),
        "b.weight": torch.zeros(2, 4),
        "b.bias": torch.zeros(2),
    }
    wide = {"a.weight": torch.zeros(9, 6), "a.bias": torch.zeros(9), "b.weight": torch.zeros(3, 4), "b.bias": torch.zeros(3)}
    phi = Kronecker(tying="role").bind(small)
    assert set(phi.log_d) == {"first.weight/6", "first.bias", "last.weight/4", "last.bias"}
    assert phi.bind(wide).metric("a.weight").shape == (1, 1, 6)
    with pytest.raises(ValueError, match=r"has the role 'first\.weight/5', for which nothing was learned"):
        phi.bind({**wide, "a.weight": torch.zeros(9, 5)})


def test_without_factors_it_is_the_column_metric():
    """The identity as a learned basis gives what `MaxDiagonal` gives in the parameters' own coordinates."""
    start = Regression().init()
    phi = Kronecker(3, centre="origin").bind(start)
    plain = MaxDiagonal(3, tying="column", centre="origin").bind(start)
    generator = torch.Generator().manual_seed(0)
    logs = {"fc.weight": torch.randn(3, 5, generator=generator, dtype=F64), "fc.bias": torch.zeros(3, dtype=F64)}
    a, b = (p.with_metrics(logs).bind(start) for p in (phi, plain))
    runs = [run_inner(Regression(steps=20), p, lr=0.1) for p in (a, b)]
    assert all(torch.equal(runs[0].end[n], runs[1].end[n]) for n in start)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_model_that_turns_double_after_the_optimiser_was_built_goes_on(rank):
    """As it does with a diagonal, and with the steps of a model that was double from the start."""
    model = nn.Linear(5, 3)
    geometry = random_basis({n: p.detach() for n, p in model.named_parameters()}, rank=rank)
    geometry = geometry.with_metrics({k: v.detach().float() for k, v in geometry.log_d.items()})
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        twin = copy.deepcopy(model).double()
        for one, of in ((model, optimiser), (twin, MetaMD(twin.named_parameters(), geometry, lr=0.1))):
            of.zero_grad()
            one(x.to(one.weight.dtype)).square().sum().backward()
            of.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.detach().double(), q.detach(), rtol=1e-5, atol=1e-6)
        model.double()
