"""The regret certificate of a run: the record, how it prints, and what may be given as its comparator."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from metamd.files.usage import Metric
from metamd.optimiser.averaging import AveragingName
from metamd.potentials.base import Params
from metamd.potentials.tying import Rename, clean_name, some

Reference = Mapping[str, Tensor] | nn.Module | Iterable[Tensor]

SHARED = "(shared)"
"""The row of `Certificate.per_layer` for what belongs to no tensor: offsets, tensors that never moved, rounding."""


WORDS: dict[Metric, tuple[str, str, str, str, str, str]] = {
    "learned": (
        "B(u || start)/lr + lr/2 sum |g_t|^2_(t,*)",
        "realised + B(u || end)/lr",
        *("Theorem 1", "as published, |g_t|^2 / min D"),
        *("Lipschitz", "the same with max |g_t|"),
    ),
    "online": (
        "sum |u-z_t|^2_(dH_t)/2lr + lr/2 sum |g_t|^2",
        "realised + |u - end|^2_(H_T)/2lr",
        *("AdaGrad", "the largest |u - z_t| of a tensor, tr H_T"),
        *("diameter", "the same with one for all tensors"),
    ),
}
"""What the lines of a printed certificate are, by metric, for gradients that are taken at the iterates."""


@dataclass(frozen=True)
class Layer:
    """One tensor's share of a certificate; the shares add up to the whole.

    Args:
        bound: its share of the bound.
        realised: its share of the regret.
        distance: of the bound, the part of B(u || start), or of the distances that take its place.
        gradients: of the bound, the part of the gradients.
    """

    bound: float
    realised: float
    distance: float
    gradients: float


@dataclass(frozen=True)
class Certificate:
    """What is guaranteed for a run of mirror descent against a comparator u, and what happened.

    Args:
        steps: T, since the last restart.
        bound: B(u || start)/lr + lr/2 sum |g_t|^2 in the local dual norms; it holds if `guaranteed`. For a metric H_t that
            grows with the run, 1/2 sum |u - z_t|^2/lr in H_t - H_{t-1} takes the place of B. For averages, `lag` is added,
            and under constant momentum eta = lr/(1 - momentum), the rate of the iterates, takes the place of lr.
        realised: sum <g_t, x_t - u>; with a radius, the largest that any u within it could give.
        identity: realised + B(u || end)/lr, which is B(u || start)/lr + sum B(z_t || z_{t+1})/lr; None with a radius.
        published: Theorem 1 as printed, with the Euclidean norm and lambda = min D; for a growing metric, AdaGrad's bound
            with the largest coordinate of u - z_t that each tensor can have had.
        lipschitz: the same with the largest gradient norm L of the run for every gradient; for a growing metric, with the
            largest of those coordinates for every tensor.
        last: a bound on l(x_T) - l(u) for the average x_T, convex l; None where no theorem gives one.
        guaranteed: whether the theorem covers this run.
        form: which variant of the theorem it is.
        holds: what the bound is about, or why there is none.
        uncovered: steps in which the piece changed under the paper's step.
        restarts: how often the parameters were changed from outside, the certificate beginning again.
        restarted: why it last did.
        per_layer: the shares of the tensors.
        metric: "online" for one that grew with the run.
        averaging: the weights of the averages that gradients were taken at; None where it was at the iterates.
        lag: sum <g_t, x_t - z_t>, which is what that changes.
    """

    steps: int
    bound: float
    realised: float
    identity: float | None
    published: float
    lipschitz: float
    last: float | None
    guaranteed: bool
    form: str
    holds: str
    uncovered: int
    restarts: int
    restarted: str
    per_layer: dict[str, Layer]
    metric: Metric = "learned"
    averaging: AveragingName | None = None
    lag: float = 0.0

    @property
    def ratio(self) -> float:
        """Realised over bound; NaN where the bound is not positive."""
        return self.realised / self.bound if self.bound > 0 else math.nan

    def __str__(self) -> str:
        """The certificate in a few lines."""
        ball = self.identity is None
        u, words = "every u within the radius" if ball else "u", self._words()
        rows: list[tuple[str, str, float | None]] = [
            ("bound", words[0], self.bound),
            ("realised", "sum <g_t, x_t - u>" + (", the largest" if ball else ""), self.realised),
            ("identity", words[1], self.identity),
            (words[2], words[3], self.published),
            (words[4], words[5], self.lipschitz),
            ("lag", "sum <g_t, x_t - z_t>, x_t the average", None if self.averaging is None else self.lag),
            ("last", "l(x_T) - l(u) at most, if l is convex", self.last),
        ]
        width = max(44, *(len(formula) for _, formula, _ in rows))
        lines = [f"  {name:<10} {formula:<{width}} = {value:>10.5g}" for name, formula, value in rows if value is not None]
        lines[1] += "" if math.isnan(self.ratio) else f"     ratio {self.ratio:.2f}"
        lines.insert(0, f"regret certificate ({self.form}, T = {self.steps})")
        if self.averaging == "constant":
            lines.append("  eta = lr/(1 - momentum), the rate of the iterates z_t")
        if self.metric == "learned":
            lines.append(f"  steps not covered (piece changed under the paper's step): {self.uncovered}")
        if self.restarts:
            lines.append(f"  restarted {self.restarts} times, last because {self.restarted}: earlier steps do not count")
        lines.append(f"  holds for {u}, {self.holds}" if self.guaranteed else f"  no guarantee: {self.holds}")
        return "\n".join(lines)

    def _words(self) -> tuple[str, ...]:
        """What the lines are: of averages, with the lag, and with the rate that the iterates had."""
        words = WORDS[self.metric]
        if self.averaging is None:
            return words
        rate = "eta" if self.averaging == "constant" else "lr"
        bound, identity, name, published, *rest = (word.replace("lr", rate) for word in words)
        return (f"{bound} + lag", identity, name, f"{published}, + lag", *rest)


def reference_tensors(reference: Reference, named: Params, rename: Rename | None = None) -> dict[str, Tensor]:
    """The comparator u by the names of the optimiser's parameters.

    Args:
        reference: a state_dict or another mapping, a module, or tensors in the order of the optimiser's parameters.
        named: the optimiser's parameters.
        rename: how its names differ from those of the model.
    """
    if isinstance(reference, nn.Module):
        reference = dict(reference.named_parameters())
    if isinstance(reference, Mapping):
        found = {clean_name(n, rename): x for n, x in reference.items()}
    else:
        tensors = list(reference) if isinstance(reference, Iterable) else [reference]
        if not all(isinstance(x, Tensor) for x in tensors):
            raise TypeError(
                "a reference must be a state_dict, a module, or tensors in the order of the parameters, got "
                f"{type(reference).__name__}. Pass reference=model.state_dict()."
            )
        if len(tensors) != len(named):
            raise ValueError(
                f"the reference has {len(tensors)} tensors, but the optimiser has {len(named)} parameters. Pass one for "
                "each, in their order, or a state_dict."
            )
        found = dict(zip(named, tensors, strict=True))
    for n, p in named.items():
        if n not in found:
            raise ValueError(
                f"the reference has no tensor {n!r}; it has {some(found)}. Pass the state_dict of a model with the "
                "parameters of this one."
            )
        if found[n].shape != p.shape:
            raise ValueError(
                f"the reference has {n!r} in shape {tuple(found[n].shape)}, but the parameter has {tuple(p.shape)}. Pass "
                "the state_dict of the same model."
            )
    return {n: found[n].detach() for n in named}
