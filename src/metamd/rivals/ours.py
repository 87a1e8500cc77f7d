"""MetaMD as one more contender, so that it goes through the same loop and the same search as its rivals."""

import json
from typing import Any

from metamd.files.learned import LearnedOptimiser
from metamd.files.store import SETTING_DIGITS, shortened
from metamd.files.usage import SCHEDULES, Average, Usage
from metamd.optimiser.optimiser import MetaMD, refreshed
from metamd.rivals.base import NamedParameters, Range, Rival, Setting
from metamd.rivals.table import DECAY

LR_FACTORS = (1.0, 0.1, 0.3, 3.0, 10.0)
"""On the recommended factor, where the protocol `paper` tunes MetaMD too: as many values as its grids have for a rate."""

COSTS = ("gradient_evaluations", "hessian_vector_products", "seconds")


def learned_rival(
    learned: LearnedOptimiser,
    *,
    name: str = "metamd",
    title: str = "MetaMD",
    usage: Usage | None = None,
    exact: bool = True,
    averaging: Average | None = None,
    refresh: int | None = None,
) -> Rival:
    """A learned geometry behind the interface of the rivals; by default as its file says, with nothing tuned.

    Its `lr` is the factor on the learned steps, whatever the momentum: 1 takes them as they are. `MetaMD` is given
    lr (1 - momentum). Where it is tuned, a decade on either side of the factor of its usage is searched, as wide as the
    published grids of the rivals are.

    Args:
        learned: the geometry.
        name: in records.
        title: in tables.
        usage: metric, momentum, schedule and factor; those of the file if not given.
        exact: False takes the paper's step.
        averaging: as for `MetaMD`; that of the usage if not given.
        refresh: as for `prepare`.
    """
    learned = learned if refresh is None else refreshed(learned, refresh)
    used = usage or learned.usage
    averaging = used.averaging if averaging is None else averaging

    def make(named: NamedParameters, setting: Setting) -> MetaMD:
        options: dict[str, Any] = dict(setting)
        if averaging == "constant":
            options["lr"] *= 1 - options["momentum"]
        options |= {"metric": used.metric, "exact": exact, "averaging": averaging}
        return MetaMD(named, learned, **options, check_finite=False)

    how: dict[str, Any] = {"metric": used.metric, "online": learned.header.online if used.metric == "online" else None}
    how |= {"exact": exact, "averaging": averaging} | ({"knots": used.knots} if used.knots else {})
    return Rival(
        name,
        title,
        make,
        {"lr": Range(*shortened([0.1 * used.factor, 10 * used.factor], SETTING_DIGITS)), "weight_decay": DECAY},
        {"lr": used.factor, "weight_decay": 0.0, "momentum": used.momentum},
        {
            "lr": tuple(shortened([x * used.factor for x in LR_FACTORS], SETTING_DIGITS)),
            "weight_decay": (0.001, 0.0001, 0.0005),
        },
        schedules=(used.schedule, *(s for s in SCHEDULES if s != used.schedule)),
        identity=f"{learned.fingerprint()} {json.dumps(how, sort_keys=True)}",
        cost={k: v for k, v in learned.header.cost.items() if k in COSTS},
        knots=used.knots,
        domains=learned.domains,
        tasks=learned.header.task_hashes,
    )
