"""Fused passes against the plain operations, and the bounds against the forms they bound."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metamd import MaxDiagonal
from metamd.optimiser import fused as native
from metamd.optimiser.fused import CHUNK, MARGINS, FusedDiagonals, decided, drift, layout
from metamd.potentials.base import Active, Move, Params
from metamd.potentials.forms import Array

SHAPES = {"conv.weight": (6, 3, 5, 5), "conv.bias": (6,), "fc.weight": (2, 1100), "scale": ()}
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
TYINGS = ("parameter", "channel", "column", "tensor", "role")


@dataclass(frozen=True)
class Case:
    """A run: three pieces whose log-metrics have these means, so that one dominates (far apart) or none (close)."""

    tying: str = "parameter"
    centre: str = "start"
    dtype: torch.dtype = torch.float32
    means: tuple[float, ...] = (0.0, 1.0, 2.0)
    offsets: tuple[float, ...] = (0.0, 0.0, 0.0)
    decay: float = 0.0
    held: bool = False
    exact: bool = True
    seed: int = 0
    steps: int = 600
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def potential(self, generator: torch.Generator) -> tuple[MaxDiagonal, dict[str, Tensor]]:
        x = {n: 0.1 * self.draw(s, generator) for n, s in self.shapes.items()}
        bare = MaxDiagonal(len(self.means), tying=self.tying, centre=self.centre)
        means = torch.tensor(self.means, dtype=self.dtype)
        log_d = {
            k: 0.5 * self.draw(tuple(v.shape), generator) + means.reshape(-1, *[1] * (v.ndim - 1))
            for k, v in bare.bind(x).log_d.items()
        }
        return bare.with_metrics(log_d, torch.tensor(self.offsets, dtype=torch.float64)).bind(x), x


class Twin:
    """The same run by plain operations and by fused passes."""

    def __init__(self, case: Case) -> None:
        self.case, self.generator = case, torch.Generator().manual_seed(case.seed)
        phi, self.plain = case.potential(self.generator)
        self.fused, self.start = ({n: x.clone() for n, x in self.plain.items()} for _ in range(2))
        self.target = {n: 0.3 * case.draw(s, self.generator) for n, s in case.shapes.items()}
        with torch.no_grad():
            metrics = {n: phi.metric(n) for n in self.plain}
        offsets = phi.offsets.detach().numpy()
        self.passes = FusedDiagonals(metrics, phi.start, offsets)
        self.plain_phi = phi.fixed(metrics)
        self.fused_phi = phi.fixed(metrics, fused=self.passes)
        self.actives: tuple[Active | None, Active | None] = (None, None)
        self.count = 0

    def moves(self, params: dict[str, Tensor], noise: dict[str, Tensor]) -> dict[str, Move]:
        """Gradients of |theta - target|^2 / 2 with noise; the target goes back and forth between the start and elsewhere."""
        lr = 0.1 if self.count % 3 else torch.tensor(0.1)
        away = self.count // 150 % 2 == 0
        held = ("conv.weight",) if self.case.held and self.count % 5 < 2 else ()
        return {
            n: Move(x - (self.target if away else self.start)[n] + noise[n], lr, self.case.decay)
            for n, x in params.items()
            if n not in held
        }

    def step(self) -> None:
        with torch.no_grad():
            noise = {n: 0.1 * self.case.draw(s, self.generator) for n, s in self.case.shapes.items()}
            a, b = self.actives
            options = {"exact": self.case.exact}
            plain = self.plain_phi.step(self.plain, self.moves(self.plain, noise), active=a, into=self.plain, **options)
            fused = self.fused_phi.step(self.fused, self.moves(self.fused, noise), active=b, into=self.fused, **options)
            self.actives = plain.active, fused.active
            self.count += 1

    def distance(self) -> float:
        return max(float((self.plain[n] - self.fused[n]).abs().max()) for n in self.plain)


FAR, NEAR = (0.0, 0.7, 1.5), (0.0, 0.1, 0.2)  # one piece dominates; the run slides along a kink
TIERS = (100.0, 85.0, 0.0)  # the steep pieces are low: pieces change on the way out and back

LONG = [
    Case(means=FAR, offsets=TIERS, steps=2000),
    Case(means=FAR, offsets=TIERS, dtype=torch.float64, centre="origin", held=True),
    Case(means=FAR, offsets=TIERS, decay=1e-4, held=True, dtype=torch.float64, steps=2000),
    Case(means=NEAR),
    Case(means=NEAR, dtype=torch.float64, centre="origin", held=True),
    Case(tying="channel", means=FAR, offsets=TIERS, decay=1e-3, steps=2000),
    Case(tying="channel", means=NEAR[:2], offsets=(0.0, 0.1), dtype=torch.float64),
    Case(tying="column", means=FAR, offsets=TIERS, held=True, centre="origin"),
    Case(tying="column", means=FAR, offsets=TIERS, decay=1e-3, dtype=torch.float64),
    Case(tying="tensor", means=FAR, offsets=TIERS, held=True),
    Case(tying="role", means=FAR, offsets=TIERS, decay=1e-3, dtype=torch.float64),
    Case(means=(0.0, 0.6, 1.2, 1.8), offsets=(100.0, 90.0, 60.0, 0.0), dtype=torch.float64),
    Case(exact=False, means=FAR, offsets=TIERS, centre="origin"),
    Case(exact=False, means=NEAR, tying="channel", dtype=torch.float64),
    Case(means=(0.0,), offsets=(0.0,), decay=1e-3),
]


@pytest.mark.parametrize("case", LONG, ids=lambda c: f"{c.tying}-{c.centre}-{str(c.dtype)[-2:]}-{len(c.means)}")
def test_fused_and_plain_agree_step_by_step(case: Case) -> None:
    twin = Twin(case)
    changes = 0
    for _ in range(case.steps):
        before = twin.actives[0]
        twin.step()
        a, b = twin.actives
        assert a is not None
        assert b is not None
        # About one ulp of parameters near 1 per step of the longest run; on a kink, it is the solver's tolerance that shows.
        assert twin.distance() <= 2000 * EPS[case.dtype]
        assert np.abs(a.weights - b.weights).max() <= 2000 * EPS[case.dtype]
        assert a.piece == b.piece
        changes += before is not None and before.piece != a.piece
    assert changes > 2 or case.offsets != TIERS


def test_while_one_piece_stays_active_the_parameters_are_equal_bit_for_bit() -> None:
    twin = Twin(Case(means=(0.0, 1.0, 4.0), centre="origin", decay=1e-3))
    for _ in range(300):
        twin.step()
    assert twin.distance() == 0


# the bounds


class WithoutRatios(FusedDiagonals):
    """A broken double that takes all metrics for equal."""

    def _call(self, name: str, width: int, before: Array, after: Array, piece: int) -> Array:
        sums = super()._call(name, width, before, after, piece)
        if name == "ratios":
            self._ratios[piece][:] = 1
        return sums


def drift_without_cross_term(forms: Array, offsets: Array, piece: int, lengths: Array) -> Array:
    """A broken double: F + 1/2 |d|^2, as if moves were at right angles to where one is."""
    signs = np.where(np.arange(len(forms)) == piece, -1, 1)
    return forms + signs * lengths**2 / 2


def drift_not_accumulated(forms: Array, offsets: Array, piece: int, lengths: Array) -> Array:
    """A broken double that forgets the move."""
    return forms


def exact_forms(case: Case, params: Params, metrics: Params, start: Params) -> Array:
    total = np.array(case.offsets, dtype=np.float64)
    for name, x in params.items():
        centred = x.double() - (start[name].double() if start else 0)
        total = total + np.array([float((d.double() * centred**2).sum()) for d in metrics[name]]) / 2
    return total


def worst_violation(
    case: Case, steps: int, passes: type[FusedDiagonals] = FusedDiagonals, bound: Callable[..., Array] = drift
) -> float:
    """By how much bounds that accumulate over steps fail, relative to the forms; negative or zero while they hold."""
    generator = torch.Generator().manual_seed(case.seed)
    phi, params = case.potential(generator)
    with torch.no_grad():
        metrics = {n: phi.metric(n) for n in params}
    piece, offsets = case.seed % len(case.means), np.array(case.offsets)
    runner = passes(metrics, phi.start, offsets)
    forms, worst = exact_forms(case, params, metrics, phi.start), -np.inf
    drawn = {n: case.draw(s, generator) for n, s in case.shapes.items()}
    for _ in range(steps):
        moves = {n: Move(g, 0.01, case.decay) for n, g in drawn.items()}
        forms = bound(forms, offsets, piece, np.sqrt(runner.follow(params, moves, piece)))
        true = exact_forms(case, params, metrics, phi.start)
        missing = np.where(np.arange(len(forms)) == piece, forms - true, true - forms)
        worst = max(worst, float(missing.max() / np.abs(true).max()))
    return worst


@settings(max_examples=60)
@given(
    tying=st.sampled_from(TYINGS),
    centre=st.sampled_from(["start", "origin"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    spread=st.floats(0.0, 8.0),
    decay=st.sampled_from([0.0, 0.01]),
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_bounds_hold(
    tying: str, centre: str, dtype: torch.dtype, spread: float, decay: float, shape: list[int], seed: int
) -> None:
    shapes = {"w": tuple(shape), "long": (2, CHUNK + 3)}
    case = Case(tying, centre, dtype, (0.0, spread, -spread), (0.3, 0.0, 0.1), decay, seed=seed, shapes=shapes)
    assert worst_violation(case, 5) <= 1e-3 * MARGINS[dtype] ** 0.5


@pytest.mark.parametrize(
    "broken", [{"passes": WithoutRatios}, {"bound": drift_without_cross_term}, {"bound": drift_not_accumulated}]
)
def test_broken_bounds_are_caught(broken: dict[str, Any]) -> None:
    case = Case(means=(0.0, 2.0, -2.0), offsets=(0.3, 0.0, 0.1))
    assert worst_violation(case, 5, **broken) > 1e-3


def test_bounds_are_not_idle() -> None:
    """Bounds that hold by being huge would never decide: over metrics of e^(+-1) they stay within a factor of ten."""
    case = Case(means=(0.0, 0.0, 0.0), shapes={"w": (40, 1000)})
    phi, params = case.potential(torch.Generator().manual_seed(0))
    with torch.no_grad():
        metrics = {n: phi.metric(n) for n in params}
    before = params["w"].clone()
    bounds = FusedDiagonals(metrics, {}, np.zeros(3)).follow(params, {"w": Move(torch.ones_like(before), 0.01)}, 0)
    true = (metrics["w"] * (params["w"] - before) ** 2).sum((1, 2)).numpy()
    assert (bounds >= true).all()
    assert (bounds <= 10 * true).all()


def test_undecided_bounds() -> None:
    assert decided(np.array([1.0, 2.0, 1.5]), 1, 1e-5)
    assert not decided(np.array([1.0, 2.0, 2.0 - 1e-6]), 1, 1e-5)
    assert not decided(np.array([1.0, 2.0, np.nan]), 1, 1e-5)
    assert not decided(np.array([np.inf, np.inf]), 1, 1e-5)
    assert decided(np.array([0.0]), 0, 1e-5)


# what else an optimiser relies on


@pytest.mark.parametrize(
    ("shape", "metric", "cols", "period"),
    [
        ((4, 6), (4, 6), 1, 24),
        ((4, 6), (4, 1), 6, 24),
        ((4, 6), (1, 1), 24, 24),
        ((4, 6), (1, 6), 1, 24),
        ((4000, 6), (1, 6), 1, 6 * 171),
        ((4, 2000), (1, 2000), 1, 2000),
        ((2, 3, 4), (2, 1, 4), 1, 24),
        ((), (), 1, 1),
        ((0, 3), (0, 1), 1, 1),
        ((1, 1), (1, 1), 1, 1),
    ],
)
def test_layouts_cover_every_element_once(shape: tuple[int, ...], metric: tuple[int, ...], cols: int, period: int) -> None:
    d = torch.rand(2, *metric)
    found = layout(torch.Size(shape), d)
    assert (found.cols, found.period) == (cols, period)
    full = d.expand(2, *shape).reshape(2, -1)
    seen = []
    for _, start, length in found.chunks(0):
        assert 0 < length <= CHUNK
        for i in range(start, start + length):
            at = i // cols if cols > 1 else i % period
            assert torch.equal(found.metric[:, at], full[:, i])
            seen.append(i)
    assert seen == list(range(full.shape[1]))


def _fused(x: Params, pieces: int = 2) -> FusedDiagonals:
    metrics = {
        n: torch.ones(pieces, *v.shape, dtype=v.dtype) * (1 + torch.arange(pieces)).reshape(-1, *[1] * v.ndim)
        for n, v in x.items()
    }
    return FusedDiagonals({n: d.to(x[n].dtype) for n, d in metrics.items()}, {}, np.zeros(pieces))


def test_writes_are_seen_by_version_counters() -> None:
    x = {"moved": torch.ones(3), "held": torch.ones(3)}
    before = {n: v._version for n, v in x.items()}
    fused, vertex = _fused(x), np.array([0.0, 1.0])
    fused.advance(x, {"moved": Move(torch.ones(3))}, vertex, np.zeros(2))
    assert x["moved"]._version > before["moved"]
    assert x["held"]._version == before["held"]
    before = {n: v._version for n, v in x.items()}
    fused.rescale(x, ["moved"], vertex, vertex)
    assert x["moved"]._version > before["moved"]
    assert x["held"]._version == before["held"]


def test_sums_do_not_depend_on_threads() -> None:
    case = Case(shapes={"w": (300, 999)})
    phi, params = case.potential(torch.Generator().manual_seed(0))
    with torch.no_grad():
        metrics = {n: phi.metric(n) for n in params}
    fused, threads = FusedDiagonals(metrics, {}, np.zeros(3)), torch.get_num_threads()
    try:
        sums = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums.append(fused.forms(params, params))
    finally:
        torch.set_num_threads(threads)
    assert (sums[0] == sums[1]).all()
    assert (sums[0] == sums[2]).all()


def test_gradients_of_other_dtypes_and_strides_are_read_right() -> None:
    x, y = {"w": torch.ones(4, 6)}, {"w": torch.ones(4, 6)}
    g = torch.arange(24.0).reshape(6, 4)
    vertex = np.array([0.0, 1.0])
    _fused(x).advance(x, {"w": Move(g.T.double())}, vertex, np.zeros(2))
    _fused(y).advance(y, {"w": Move(g.T.contiguous())}, vertex, np.zeros(2))
    assert torch.equal(x["w"], y["w"])
    assert torch.equal(x["w"], 1 - g.T / 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite_decide_nothing(bad: float) -> None:
    x = {"w": torch.ones(5)}
    fused, vertex = _fused(x), np.array([0.0, 1.0])
    forms = fused.advance(x, {"w": Move(torch.zeros(5))}, vertex, np.zeros(2))
    forms = fused.advance(x, {"w": Move(torch.full((5,), bad))}, vertex, forms)
    assert not np.isfinite(forms).any()


# what is refused, and how


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    native.build.cache_clear()
    monkeypatch.setenv("CC", "/nowhere/cc -pipe")
    with pytest.raises(RuntimeError, match=r"needs a C compiler, and there is no /nowhere/cc to call\..* leave fused=False"):
        native.build()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="there is no cc or gcc or clang to call"):
        native.build()


def test_with_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.build.cache_clear()
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no room on the disk' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(RuntimeError, match=r"could not compile fused\.c: no room on the disk\."):
        native.build()


def test_with_a_compiler_that_knows_neither_openmp_nor_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.build.cache_clear()
    compiler = tmp_path / "cc"
    real = native.shutil.which("cc") or native.shutil.which("gcc")
    refuse = "for a; do case $a in -fopenmp|-march=native) exit 1;; esac; done"
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    twin = Twin(Case(means=FAR, offsets=TIERS))
    native.build.cache_clear()
    for _ in range(50):
        twin.step()
    assert twin.distance() <= 50 * EPS[torch.float32]


def _refused(x: Params, metrics: Params, start: Params | None = None, grad: Tensor | None = None) -> str:
    moves = {"w": Move(torch.ones(3, 4) if grad is None else grad)}
    with pytest.raises(ValueError) as error:
        FusedDiagonals(metrics, start or {}, np.zeros(2)).advance(x, moves, np.array([0.0, 1.0]), np.zeros(2))
    return str(error.value)


def test_refused_tensors() -> None:
    x, d = {"w": torch.ones(3, 4)}, {"w": torch.ones(2, 3, 4)}
    assert (
        "on the CPU, but the metric of 'w' is on meta. Leave fused=False; on CUDA, wrap opt.step in torch.compile."
        in _refused(x, {"w": d["w"].to("meta")})
    )
    assert "float32 or float64, but the metric of 'w' has torch.bfloat16" in _refused(x, {"w": d["w"].bfloat16()})
    assert "dtype of their tensor, torch.float32, but the tensor 'w' has torch.float64" in _refused(
        {"w": x["w"].double()}, d
    )
    assert "contiguous tensors, but the tensor 'w' of shape (3, 4) is not" in _refused({"w": torch.ones(4, 3).T}, d)
    assert "but the centre of 'w' has torch.float64" in _refused(x, d, {"w": x["w"].double()})
    assert "must have the shape of its tensor, (3, 4), got (12,)" in _refused(x, d, {"w": torch.ones(12)})
    assert "must be a dense tensor of shape (3, 4) on the CPU, got (4, 3)" in _refused(x, d, grad=torch.ones(4, 3))
    with pytest.raises(ValueError, match="up to 8 pieces, got 9"):
        _fused(x, 9)
