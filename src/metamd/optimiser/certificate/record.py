"""The regret certificate of a run: the record, how it prints, and the comparators it accepts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from metamd.optimiser.averaging import AveragingName
from metamd.potentials.base import Params
from metamd.potentials.tying import Rename, clean_name, some

Reference = Mapping[str, Tensor] | nn.Module | Iterable[Tensor]

SHARED = "(shared)"
"""The row of `Certificate.per_layer` for what belongs to no tensor: offsets, tensors that never moved, rounding."""


@dataclass(frozen=True)
class Layer:
    """One tensor's share of a certificate; the shares add up to the whole.

    Args:
        bound: its share of the bound.
        realised: its share of the regret.
        distance: the part of the bound that B(u || start) gives.
        gradients: the part of the bound that the gradients give.
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
        bound: B(u || start)/lr + lr/2 sum |g_t|^2 in the local dual norms; it holds if `guaranteed`. For averages, `lag`
            is added, and eta = lr/(1 - momentum), the rate of the iterates, takes the place of lr.
        realised: sum <g_t, x_t - u>; with a radius, the largest that any u within it could give.
        identity: realised + B(u || end)/lr, which is B(u || start)/lr + sum B(z_t || z_{t+1})/lr; None with a radius.
        published: Theorem 1 as printed, with the Euclidean norm and lambda = min D.
        lipschitz: the same with the largest gradient norm L of the run for every gradient.
        guaranteed: whether the theorem covers this run.
        form: which variant of the theorem it is.
        holds: what the bound is about, or why there is none.
        uncovered: steps in which the piece changed under the paper's step.
        restarts: how often the certificate began again because the parameters were changed from outside.
        restarted: why it last did.
        per_layer: the shares of the tensors.
        averaging: the weights of the average at which gradients were taken; None for gradients at the iterates.
        lag: sum <g_t, x_t - z_t>, for gradients at an average x_t of the iterates z_t.
    """

    steps: int
    bound: float
    realised: float
    identity: float | None
    published: float
    lipschitz: float
    guaranteed: bool
    form: str
    holds: str
    uncovered: int
    restarts: int
    restarted: str
    per_layer: dict[str, Layer]
    averaging: AveragingName | None = None
    lag: float = 0.0

    @property
    def ratio(self) -> float:
        """Realised over bound; NaN where the bound is not positive."""
        return self.realised / self.bound if self.bound > 0 else math.nan

    def __str__(self) -> str:
        """The certificate in a few lines."""
        ball = self.identity is None
        u, rate = "every u within the radius" if ball else "u", "lr" if self.averaging is None else "eta"
        lag = "" if self.averaging is None else " + lag"
        rows: list[tuple[str, str, float | None]] = [
            ("bound", f"B(u || start)/{rate} + {rate}/2 sum |g_t|^2_(t,*){lag}", self.bound),
            ("realised", "sum <g_t, x_t - u>" + (", the largest" if ball else ""), self.realised),
            ("identity", f"realised + B(u || end)/{rate}", self.identity),
            ("Theorem 1", f"as published, |g_t|^2 / min D{lag and ',' + lag}", self.published),
            ("Lipschitz", "the same with max |g_t|", self.lipschitz),
            ("lag", "sum <g_t, x_t - z_t>, x_t the average", self.lag if lag else None),
        ]
        width = max(44, *(len(formula) for _, formula, _ in rows))
        lines = [f"  {name:<10} {formula:<{width}} = {value:>10.5g}" for name, formula, value in rows if value is not None]
        lines[1] += "" if math.isnan(self.ratio) else f"     ratio {self.ratio:.2f}"
        lines.insert(0, f"regret certificate ({self.form}, T = {self.steps})")
        if self.averaging is not None:
            lines.append("  eta = lr/(1 - momentum), the rate of the iterates z_t")
        lines.append(f"  steps not covered (piece changed under the paper's step): {self.uncovered}")
        if self.restarts:
            lines.append(f"  restarted {self.restarts} times, last because {self.restarted}: earlier steps do not count")
        lines.append(f"  holds for {u}, {self.holds}" if self.guaranteed else f"  no guarantee: {self.holds}")
        return "\n".join(lines)


def reference_tensors(reference: Reference, named: Params, rename: Rename | None = None) -> dict[str, Tensor]:
    """The comparator u by the names of the optimiser's parameters; `rename` says how these differ from the model's."""
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
