"""Safety off the family: a warning when a run leaves what a geometry was learned for, and smaller steps when it blows up."""

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metamd.potentials.base import Active, Params, Potential
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import combine
from metamd.potentials.tying import Slot

# Chosen by hand: a loss that is summed over a batch instead of averaged is off by more than the first, and a run that is
# longer than the second has left what its schedule and steps were learned for.
_SCALE_FACTOR = 5.0
_HORIZON_FACTOR = 2


class OffFamilyWarning(UserWarning):
    """A run has left what its learned geometry was made for."""


@dataclass
class FamilyWatch:
    """Compares a run with the family its geometry was learned on, and warns once for each way it leaves it."""

    horizon: int | None  # the number of steps T that the geometry was learned for
    gradient_scale: Mapping[str, float]  # root mean square of the gradients at the start of a run, by metric key
    _late: bool = False

    def observe(self, step: int, grads: Params, slots: Mapping[str, Slot], *, online: bool = False) -> None:
        """Look at one step, counted from 1; only the first one's gradients are compared, before the steps shape them."""
        if self.horizon is not None and step > _HORIZON_FACTOR * self.horizon and not self._late:
            self._late = True
            _warn(
                f"this run is at step {step}, but its geometry was learned for runs of {self.horizon} steps. "
                "Learn it again with the longer horizon, or lower lr as the run goes on."
            )

        if step > 1:
            return
        logs = []
        for name, grad in grads.items():
            expected = self.gradient_scale.get(slots[name].key, 0.0)
            seen = float(grad.float().square().mean().sqrt()) if grad.numel() else 0.0
            if expected > 0 and seen > 0:
                logs.append(math.log(seen / expected))
        ratio = math.exp(statistics.median(logs)) if logs else 1.0
        if not 1 / _SCALE_FACTOR <= ratio <= _SCALE_FACTOR:
            advice = (
                "Steps of an online metric do not depend on that: a loss that is merely scaled needs nothing, a task of "
                "another kind another geometry."
                if online
                else f"Scale the loss back, multiply lr by {1 / ratio:.2g}, or use safeguard=True."
            )
            _warn(
                f"the first gradients of this run are {ratio:.2g} times those of the family its geometry was learned on "
                f"(median over tensors). Is the loss summed instead of averaged, or the task of another kind? {advice}"
            )


def _warn(sentence: str) -> None:
    warnings.warn(sentence, OffFamilyWarning, stacklevel=6)


@dataclass
class Safeguard:
    """Halves the step while a run blows up, and lets it grow back while it is calm.

    The signal is the energy g'D^-1 g, the squared length of the gradient that the step itself sees; a loss, when the
    closure returned one, is a second. An ordinary batch varies by a few times, a diverging run multiplies every step.
    """

    damping: float = 1.0  # the factor on lr, at most 1
    log_reference: float = math.nan  # a slow average of the log energy; NaN before the first step

    def update(self, energy: float, loss: float | None) -> float:
        """The factor for this step, from the energy g'D^-1 g at the present point and the loss there, if it is known."""
        log_energy = math.log(max(energy, 1e-300)) if math.isfinite(energy) else math.inf
        if math.isnan(self.log_reference):
            self.log_reference = log_energy
            return self.damping
        excess = log_energy - self.log_reference
        # Chosen by hand: ten times the usual energy is no ordinary batch, and 35 calm steps make up for one halving.
        blown = excess > math.log(10.0) or (loss is not None and not math.isfinite(loss))
        self.damping = self.damping / 2 if blown else min(1.0, self.damping * 1.02)
        self.log_reference += 0.05 * min(excess, math.log(10.0))
        return self.damping


def energy(potential: Potential, active: Active | None, grads: Params) -> float:
    """g'D^-1 g; |g|^2 without metrics."""
    if not isinstance(potential, MaxDiagonal):
        return float(sum(g.double().square().sum() for g in grads.values()))
    weights = active.weights if active is not None else np.eye(potential.pieces)[0]
    turned = {n: potential.basis.into(n, g) for n, g in grads.items()}
    parts = {n: (g.square() / combine(potential.metric(n), weights)).sum().double().reshape(1) for n, g in turned.items()}
    return float(potential.add_up(parts)[0])
