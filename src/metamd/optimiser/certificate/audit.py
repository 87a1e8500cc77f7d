"""What an optimiser hands to its ledger before and after every step, if it was asked for certificates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metamd.optimiser.averaging import AveragingName
from metamd.optimiser.certificate.accounts import Evidence, certify_run
from metamd.optimiser.certificate.certificate import Certificate, Reference
from metamd.optimiser.certificate.growing import Growth, check_rule
from metamd.optimiser.certificate.ledger import Ledger, Stores, needs_sum
from metamd.potentials.base import Active, Move, Params, Potential
from metamd.potentials.classical import Euclidean
from metamd.potentials.diagonal import Diagonal, MaxDiagonal
from metamd.potentials.online import Online, Watch
from metamd.potentials.simplex import Array


class Audit:
    """Watches an optimiser's steps for its certificate.

    Args:
        ledger: where the sums are kept.
        online: the rule of a metric that follows the run.
    """

    def __init__(self, ledger: Ledger, online: Online | None = None) -> None:
        if online is not None:
            ledger = Ledger(rule=check_rule(online))
        self.ledger, self.online = ledger, online
        self._growth: Growth | None = None
        self._potential: MaxDiagonal | None = None
        self._weights: Array = np.ones(1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_potential": None, "_growth": None}  # bound anew, with the optimiser

    def bind(self, bound: Potential, named: Params) -> None:
        """Take the optimiser's potential, whenever that has been bound."""
        self._potential = quadratic(bound, named)
        if self.online is not None and any(needs_sum(p) for p in named.values()):
            raise ValueError(
                "certify=True with an online metric needs parameters in float32 or float64: half precision rounds them as "
                "coarsely as steps move them. Keep the parameters in float32, under torch.autocast, or leave certify=False."
            )

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
        if self.online is not None:
            self._growth = Growth(self.ledger, self._potential, self.online, moves, rates, named, stores)
            return
        self._weights = np.ones(1) if active is None else active.weights
        if active is not None and self.ledger.paper:
            self._weights = np.eye(len(active.forms))[int(np.argmax(active.forms))]
        self.ledger.observe(self._potential, self._weights, moves, rates, named, stores)

    def watch(self, name: str, move: Move, param: Tensor, store: dict[str, Any]) -> Watch | None:
        """What an online step of a tensor is told to."""
        return None if self._growth is None else self._growth.watch(name, move, param, store)

    def after(self, active: Active | None, moves: Mapping[str, Move]) -> None:
        """Look at the pieces after the step."""
        if self._growth is not None:
            self._growth.close()
            self._growth = None
            return
        self.ledger.close(self._weights, active, moves)

    def resume(self, saved: str | None, steps: int) -> None:
        """Go on with the ledger of a state_dict.

        Args:
            saved: the encoded ledger; None if the run was not accounted for so far.
            steps: how many steps it had taken.
        """
        own = self.ledger
        if saved is not None:
            self.ledger = Ledger.decode(saved)
            if self.ledger.paper != own.paper:
                self.ledger.restart(f"the run was continued with exact={not own.paper}")
            if self.ledger.rule != own.rule:
                self.ledger.restart("the run was continued with another metric")
            self.ledger.paper, self.ledger.rule = own.paper, own.rule
        else:
            reason = "the run was continued from a state_dict without certify=True"
            self.ledger = Ledger(own.paper, restarts=min(steps, 1), reason=reason if steps else "", rule=own.rule)

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
        evidence = Evidence(self.ledger, self._potential, named, stores, weights, *average, online=self.online)
        return certify_run(evidence, reference, radius)


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
