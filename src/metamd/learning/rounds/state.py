"""The state of a meta-training between two outer steps: all that the next one needs, as tensors and JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metamd.inner.closed_form import Iterate
from metamd.inner.run import Cost
from metamd.potentials.basis import Basis


@dataclass(frozen=True)
class State:
    """Where a meta-training is. Everything random in the next outer step follows from the seed and from `step`.

    Args:
        now: the metrics that the next outer step tries.
        stage: which part of the plan is next; its length when all is done.
        done: outer steps done in this stage.
        step: outer steps done altogether.
        good: the last metrics under which no task diverged that could be helped.
        carried: what the rule of the outer step remembers.
        factor: how much smaller its steps shall be.
        candidates: metrics that may turn out to be the best.
        values: the objective of every step of this stage.
        changes: its relative change, likewise.
        cost: of everything so far.
        tasks: the hashes of the tasks seen, in order.
        scale: root mean square of the first gradients, by key.
        shapes: names and shapes of the model's tensors.
        notes: why each stage ended.
        target: a loss that runs of the last outer step reach, see `within_reach`.
    """

    now: Iterate
    stage: int = 0
    done: int = 0
    step: int = 0
    good: Iterate | None = None
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    factor: float = 1.0
    candidates: tuple[Iterate, ...] = ()
    values: tuple[float, ...] = ()
    changes: tuple[float, ...] = ()
    cost: Cost = field(default_factory=Cost)
    tasks: tuple[str, ...] = ()
    scale: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target: float | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        found = _put("now", self.now) | {f"carried/{n}": v for n, v in self.carried.items()}
        if self.good is not None:
            found |= _put("good", self.good)
        for i, candidate in enumerate(self.candidates):
            found |= _put(f"candidate {i}", candidate)
        return {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in found.items()}

    def facts(self) -> dict[str, Any]:
        """All the rest, in JSON's types."""
        return {
            "stage": self.stage,
            "done": self.done,
            "step": self.step,
            "factor": self.factor,
            "iterates": {n: [i.step, _plain(i.loss)] for n, i in self._iterates().items()},
            "values": [_plain(v) for v in self.values],
            "changes": [_plain(v) for v in self.changes],
            "cost": [self.cost.gradients, self.cost.hvps, self.cost.seconds],
            "tasks": list(self.tasks),
            "scale": dict(self.scale),
            "shapes": [[n, list(s)] for n, s in self.shapes.items()],
            "notes": list(self.notes),
            "target": self.target,
        }

    def _iterates(self) -> dict[str, Iterate]:
        named = {"now": self.now} | {f"candidate {i}": c for i, c in enumerate(self.candidates)}
        return named if self.good is None else named | {"good": self.good}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], basis: Basis = Basis()) -> "State":  # noqa: B008
        """The state that was taken apart.

        Args:
            tensors: what `tensors` gave.
            facts: what `facts` gave.
            basis: that of the run, whose learned factors are among the tensors.
        """
        found = {n: _take(n, tensors, basis, *about) for n, about in facts["iterates"].items()}
        return cls(
            now=found["now"],
            stage=facts["stage"],
            done=facts["done"],
            step=facts["step"],
            good=found.get("good"),
            carried={n.removeprefix("carried/"): v for n, v in tensors.items() if n.startswith("carried/")},
            factor=facts["factor"],
            candidates=tuple(found[f"candidate {i}"] for i in range(sum(n.startswith("candidate") for n in found))),
            values=tuple(_number(v) for v in facts["values"]),
            changes=tuple(_number(v) for v in facts["changes"]),
            cost=Cost(*facts["cost"]),
            tasks=tuple(facts["tasks"]),
            scale=facts["scale"],
            shapes={n: tuple(s) for n, s in facts["shapes"]},
            notes=tuple(facts["notes"]),
            target=facts.get("target"),
        )


def _put(name: str, iterate: Iterate) -> dict[str, Tensor]:
    basis = {f"{name}/basis/{k}": v for k, v in iterate.basis.factors().items()}
    return {f"{name}/offsets": iterate.offsets} | {f"{name}/log_d/{k}": v for k, v in iterate.log_d.items()} | basis


def _take(name: str, tensors: Mapping[str, Tensor], basis: Basis, step: int, loss: float | None) -> Iterate:
    log_d, factors = (_under(f"{name}/{part}/", tensors) for part in ("log_d", "basis"))
    return Iterate(log_d, tensors[f"{name}/offsets"], step, _number(loss), basis.with_factors(factors))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def _plain(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value
