"""What an optimiser hands to its ledger before and after every step, if it was asked for certificates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from metamd.accounts import Evidence, certify_run
from metamd.averaging import AveragingName
from metamd.certificate import Certificate, Reference
from metamd.ledger import Ledger, Stores
from metamd.potentials.base import Active, Move, Params, Potential
from metamd.potentials.classical import Euclidean
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.potentials.simplex import Array


class Audit:
    """Watches an optimiser's steps for its certificate.

    Args:
        ledger: where the sums are kept.
        online: whether the metric follows the run, which no theorem here covers.
    """

    def __init__(self, ledger: Ledger, *, online: bool = False) -> None:
        if online:
            raise ValueError(
                "certify=True needs a metric that stays as it is: for one that follows the run the bound would need "
                'B(u || theta_t) at every step. Use metric="learned", or leave certify=False.'
            )
        self.ledger = ledger
        self._potential: MaxDiagonal | None = None
        self._weights: Array = np.ones(1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_potential": None}  # bound anew, with the optimiser

    def bind(self, bound: Potential, named: Params) -> None:
        """Take the optimiser's potential, whenever that has been bound."""
        self._potential = quadratic(bound, named)

    def before(
        self, active: Active | None, moves: Mapping[str, Move], rates: Mapping[str, float], named: Params, stores: Stores
    ) -> None:
        """Count a step that is about to be taken; see `Ledger.observe`.

        Args:
            active: the active pieces.
            moves: what the tensors with a gradient are asked to do.
            rates: their rates.
            named: the parameters.
            stores: the optimiser's state of each.
        """
        assert self._potential is not None
        self._weights = np.ones(1) if active is None else active.weights
        if active is not None and self.ledger.paper:
            self._weights = np.eye(len(active.forms))[int(np.argmax(active.forms))]
        self.ledger.observe(self._potential, self._weights, moves, rates, named, stores)

    def after(self, active: Active | None, moves: Mapping[str, Move]) -> None:
        """Look at the pieces after the step."""
        self.ledger.close(self._weights, active, moves)

    def resume(self, saved: str | None, steps: int) -> None:
        """Go on with the ledger of a state_dict.

        Args:
            saved: the encoded ledger; None if the run was not accounted for so far.
            steps: how many steps it had taken.
        """
        if saved is not None:
            paper, self.ledger = self.ledger.paper, Ledger.decode(saved)
            if self.ledger.paper != paper:
                self.ledger.restart(f"the run was continued with exact={not paper}")
                self.ledger.paper = paper
        else:
            reason = "the run was continued from a state_dict without certify=True"
            self.ledger = Ledger(self.ledger.paper, restarts=min(steps, 1), reason=reason if steps else "")

    def certificate(
        self,
        active: Active | None,
        average: tuple[AveragingName, int],
        named: Params,
        stores: Stores,
        *,
        reference: Reference | None,
        radius: float | None,
    ) -> Certificate:
        """The certificate of the run so far; see `certify_run`.

        Args:
            active: the active pieces now.
            average: the weights of the average, and the steps that it is over.
            named: the parameters.
            stores: the optimiser's state of each.
            reference: u.
            radius: rho.
        """
        assert self._potential is not None
        weights = np.ones(1) if active is None else active.weights
        return certify_run(Evidence(self.ledger, self._potential, named, stores, weights, *average), reference, radius)


def quadratic(bound: Potential, named: Params) -> MaxDiagonal:
    """The potential as one of quadratic forms, which the theorem's local norms need.

    Args:
        bound: phi, with its metrics evaluated.
        named: the parameters.
    """
    if isinstance(bound, MaxDiagonal):
        return bound
    if isinstance(bound, Euclidean):
        ones = {
            n: torch.ones((1,) * (1 + p.ndim), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            for n, p in named.items()
        }
        return Diagonal(tying="tensor").bind(named).fixed(ones)
    raise ValueError(
        f"certify=True needs a potential of quadratic forms (Diagonal, MaxDiagonal, Kronecker, Euclidean), got "
        f"{type(bound).__name__}. For others there is no guarantee to print: leave certify=False."
    )
