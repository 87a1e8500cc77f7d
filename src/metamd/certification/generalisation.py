"""Bounds for plain mirror descent on new tasks: the paper's as printed, corrected ones, and those of held-out runs.

The mean divergence of the tasks that a potential was learned on, (1/n) sum_i B(theta_*^i||theta_1^i), is too good,
since the metrics were chosen to make it so. These functions bound its expectation for all metrics that might have been
chosen.

Let n tasks be independent, delta_i = theta_* - theta_1 of task i, where theta_* does not depend on the potential, and
||delta||_2 <= r for every task that can be drawn.

One piece. B = 1/2 sum_k D_k delta_k^2 with sum_k D_k <= C^2. With probability 1 - delta, for all such D together,

    E B <= mean B + C^2 r^2/sqrt(n) + (C^2 r^2/2) sqrt(ln(1/delta)/(2n)).

Proof. 0 <= B <= C^2 max_k delta_k^2/2 <= C^2 r^2/2. Replacing one task changes sup_D (E B - mean B) by C^2 r^2/(2n) at
most; by McDiarmid's inequality it exceeds its expectation by the last term with probability delta at most. By
symmetrisation the expectation is at most 2 R_n, R_n = E sup_D (1/n) sum_i s_i B_i with random signs s_i [Bartlett2002].
The supremum of a linear function over D >= 0, sum_k D_k <= C^2 is at a corner:

    (C^2/2n) max(0, max_k sum_i s_i delta_ik^2) <= (C^2/2n) ||sum_i s_i delta_i^2||_2, squares by coordinate,

and the expectation of the norm is at most sqrt(sum_i ||delta_i^2||_2^2) <= sqrt(n) r^2. So R_n <= C^2 r^2/(2 sqrt n).

Many coordinates ("l_inf"). If |delta_k| <= r for each of kappa coordinates, the maximum is over kappa + 1 sums of n
signs times numbers in [0, r^2], at most r^2 sqrt(2 n ln(kappa + 1)) by Massart's lemma: 2 R_n <= C^2 r^2 sqrt(2
ln(kappa + 1)/n).

Tied metrics. If a number D_g stands for n_g coordinates, take n_g D_g for D_k and the mean of delta^2 over the group
for delta_k^2; kappa is then the number of groups.

Learned coordinates. B = 1/2 delta'D delta, trace D <= C^2: the supremum is (C^2/2n) max(0, lambda_max(sum_i s_i delta_i
delta_i')), at most the Frobenius norm of the sum, of expectation sqrt(sum_i ||delta_i||^4) <= sqrt(n) r^2. The form
"l2" holds, whatever basis was learned; "l_inf" does not, since its coordinates must be there beforehand.

Mixtures centred at the start. B = max_j (1/2 sum_k D_jk delta_k^2 + b_j) - max_j b_j. The complexity of a class of
maxima is at most the sum of those of its N classes, since max(f, g) = (f + g + |f - g|)/2 and the modulus is a
contraction. Only differences of the b_j matter, and one below -C^2 r^2/2 does as well as that number. A free number in
[-c, 0] has complexity c E|sum_i s_i|/(2n) <= c/(2 sqrt n), so offsets add (N - 1) C^2 r^2/(2 sqrt n) to 2 R_n at most.

Mixtures centred at the origin have no such bound: B contains the amount by which another piece takes over between
theta_1 and theta_*, which grows with the distance of both from the origin.

What was not stated beforehand costs a part of delta. C is taken from the grid 1.1^k, each point with a share 2/3/((|k|
+ 1)(|k| + 2)), which add up to one. So is r; no number of tasks shows that none lies beyond it, so the statement is on
E B 1{displacement <= r}, and the probability of a task beyond is at most 1 - delta'^(1/n), since none was seen. An n
that was decided by looking at s outer steps has a share 1/(s(s + 1)).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from metamd.certification.statements import Stated, Statement
from metamd.certification.statistics import clopper_pearson, mean_below, next_task
from metamd.files.header import Header
from metamd.files.learned import LearnedOptimiser
from metamd.inner.executor import Executor
from metamd.inner.objectives import Reference
from metamd.inner.run import MirrorDescent, all_finite
from metamd.learning.first_look import draw_config
from metamd.learning.outer import metric_norms
from metamd.potentials.base import Params
from metamd.potentials.diagonal import MaxDiagonal
from metamd.potentials.forms import Array, grouped_squares
from metamd.tasks.base import Config, SolvedTask, Task, TaskFamily, config_hash

PURPOSES = ("train", "judge", "pieces", "scale")
"""What `meta_train` draws tasks for, or drew in earlier versions."""

RATIO = 1.1
"""Neighbours on the grids of C and r."""

DIVERGENCE = "B(theta_*||theta_1)"
PLAIN_REGRET = "regret of plain mirror descent"

UNKNOWN = (
    "theta_* of these tasks is not known. Pass comparator=Reference(...), a longer run of another optimiser (--reference-lr)"
)

REASONS = (
    "symmetrisation costs a factor 2 that the third term lacks",
    "the last two terms bound B, and lack the 1/lr of the first",
    "the last term has C r where the range of B, C^2 r^2 / 2, belongs",
    "a maximum of signed terms is bounded by their sum, which it can exceed",
    "lambda is min M there; in the Euclidean norm it is min M^2",
    "C, r and L must be fixed before the tasks are seen, and theta_* must not depend on the potential",
)
"""Why the printed formula bounds nothing."""


@dataclass(frozen=True)
class Displacements:
    """How far the solutions of n independent tasks lie from their starts. theta_* must not depend on the potential."""

    divergences: Array  # B(theta_*||theta_1) under the learned potential
    lengths: Array  # ||theta_* - theta_1||_2
    # The largest root mean square of theta_* - theta_1 over coordinates that share a metric, which is the largest entry if
    # none do. Not used for a learned basis.
    reaches: Array


@dataclass(frozen=True)
class Size:
    """What the bounds need to know of a potential."""

    pieces: int  # N
    numbers: int  # kappa: how many numbers a metric has, tied coordinates counted once
    norm: float  # the largest ||m_j||_2, m_j = sqrt(D_j) over all coordinates
    largest: float  # the largest entry of any D_j
    smallest: float  # the smallest
    centred: bool  # whether distances are measured from the start, or there is one piece, for which it does not matter
    offsets: bool  # whether the pieces have offsets that differ
    turned: bool = False  # whether the basis was learned as well


def printed_bound(
    seen: Displacements, size: Size, stated: Stated, *, delta: float, lipschitz: float, steps: int, lr: float = 1.0
) -> float:
    """The generalisation theorem of the paper [GaoMetaMD2022], evaluated as it is printed; it is no bound, see `REASONS`.

    (1/n) sum_i B_i/eta + eta T L^2/(2 lambda) + N C^2 r^2/(2 sqrt n) + 3 sqrt(C r ln(2/delta)/(8n)), lambda = min M.
    The norm of the potential stands for C, and without a radius the largest displacement that was seen for r.
    """
    n, c = len(seen.lengths), size.norm
    r = float(seen.lengths.max()) if stated.radius is None else stated.radius
    steepness = lr * steps * lipschitz**2 / (2 * math.sqrt(size.smallest))
    chance = 3 * math.sqrt(c * r * math.log(2 / delta) / (8 * n))
    return float(seen.divergences.mean()) / lr + steepness + size.pieces * c**2 * r**2 / (2 * math.sqrt(n)) + chance


def corrected_bound(
    seen: Displacements, size: Size, stated: Stated, *, delta: float, max_norm: float | None = None
) -> Statement:
    """With probability 1 - delta, E B <= mean B + 2 R_n + C^2 r^2/2 sqrt(ln(1/delta)/(2n)), whatever metrics were chosen.

    2 R_n is N C^2 r^2/sqrt(n) with r on the Euclidean length of theta_* - theta_1 ("l2"), and with r on its largest entry
    N C^2 r^2 sqrt(2 ln(kappa + 1)/n) ("l_inf"); learned offsets add (N - 1) C^2 r^2/(2 sqrt n). If both r are stated, or
    none, it is the better of the two, at delta/2 each. A C or r that was not stated beforehand is taken from a grid, at the
    price of a union bound. `max_norm` is C (`meta_train(max_norm=C)`), `stated.radius` the r of "l2" and `stated.reach`
    that of "l_inf"; an r holds for every task that can be drawn. A `ValueError` says why a bound does not apply.
    """
    if size.turned and stated.reach is not None and stated.radius is None:
        raise ValueError("in a learned basis r is on the length of theta_* - theta_1: state radius=r, not reach=r.")
    if not size.centred:
        raise ValueError(
            "for several pieces that are not centred at the start, B is not bounded by the displacement: it grows with the "
            'distance from the origin too. Learn with MaxDiagonal(centre="start").'
        )
    if max_norm is not None and size.norm > max_norm * (1 + 1e-12):
        raise ValueError(f"||m|| is {size.norm:.6g}, above the C = {max_norm:.6g} that was stated beforehand.")
    forms = [("l2", seen.lengths, stated.radius)]
    if not size.turned:  # learned coordinates have no largest entry fixed beforehand; the length is the same in all
        forms.append(("l_inf", seen.reaches, stated.reach))
    forms = [row for row in forms if row[2] is not None] or forms
    found = [_bound(form, seen, size, sizes, delta / len(forms), max_norm, r) for form, sizes, r in forms]
    return replace(min(found, key=lambda s: math.inf if s.bound is None else s.bound), confidence=1 - delta)


def _bound(
    form: str, seen: Displacements, size: Size, sizes: Array, delta: float, max_norm: float | None, radius: float | None
) -> Statement:
    n = len(sizes)
    c, share = (max_norm, 1.0) if max_norm is not None else on_grid(size.norm)
    farthest, beyond, chance = float(sizes.max()), 0.0, delta
    if radius is None:
        r, weight = on_grid(farthest)
        # half of delta for the deviation of the mean, half for the share of tasks beyond r, none of which was seen
        chance, share = delta / 2, share * weight
        beyond = 1 - (delta / 2 * weight) ** (1 / n)
    elif farthest > radius:
        raise ValueError(
            f"a training task has a displacement of {farthest:.4g}, beyond the r = {radius:.4g} stated for all tasks."
        )
    else:
        r = radius
    unit = c**2 * r**2 / math.sqrt(n)
    each = 1.0 if form == "l2" else math.sqrt(2 * math.log(size.numbers + 1))
    complexity = unit * (size.pieces * each + 0.5 * (size.pieces - 1) * size.offsets)
    concentration = unit / 2 * math.sqrt(math.log(1 / (chance * share)) / 2)
    mean = float(seen.divergences.mean())
    bound = mean + complexity + concentration
    trivial = 0.5 * r**2 * (size.largest if form == "l2" else size.norm**2)  # what the radius alone says
    how = {True: "stated beforehand", False: "from a grid"}
    basis = f"{n} training tasks; C = {c:.4g} {how[max_norm is not None]}, r = {r:.4g} {how[radius is not None]} ({form}); "
    basis += f"mean {mean:.4g} + complexity {complexity:.4g} + chance {concentration:.4g}"
    quantity = DIVERGENCE
    if radius is None:
        quantity += f" over displacements up to {r:.4g}"
        basis += f"; at most {100 * beyond:.3g} % of tasks lie beyond"
    if vacuous := bound >= trivial:
        basis += f"; the radius alone gives {trivial:.4g}"
    numbers = {"mean": mean, "complexity": complexity, "concentration": concentration, "tasks": n}
    numbers |= {"max_norm": c, "radius": r, "beyond": beyond, "trivial": trivial}
    return Statement("training tasks", quantity, bound, "vacuous" if vacuous else "holds", basis, 1 - delta, numbers)


def on_grid(value: float) -> tuple[float, float]:
    """The next number above on the grid RATIO^k, k an integer, and its share of delta: the shares add up to one.

    Share k is 2/3 / ((|k| + 1)(|k| + 2)): numbers far from 1 cost more, but only in a logarithm.

    Example:
        >>> on_grid(1.0)
        (1.0, 0.3333333333333333)
    """
    k = math.ceil(math.log(max(value, 1e-300)) / math.log(RATIO) - 1e-9)
    k += RATIO**k < value
    return RATIO**k, 2 / 3 / ((abs(k) + 1) * (abs(k) + 2))


@dataclass(frozen=True)
class PlainScore:
    """What one held-out run of plain mirror descent came to. What is not known is None."""

    distance: float | None  # sqrt(2 B(theta_*||theta_1)), which is ||theta_* - theta_1||_D for one piece
    regret: float | None  # sum_t <g_t, theta_t - theta_*>
    largest_gradient: float  # max_t |g_t|


def theory(
    learned: LearnedOptimiser,
    family: TaskFamily,
    configs: Sequence[Config],
    delta: float,
    stated: Stated,
    comparator: Reference | None,
    executor: Executor,
) -> list[Statement]:
    """The bounds of the paper, for exact mirror descent at lr = 1, which need not be what the file recommends."""

    def run(config: Config) -> PlainScore:
        task = family.build(config)
        done = MirrorDescent(task, learned.potential.bind(task.init()), certify=True)
        record = done.run()
        solution = solve(task, comparator)
        if solution is None:
            return PlainScore(None, None, record.largest_gradient)
        far = math.sqrt(2 * max(measure(done.potential, record.start, solution)[0], 0.0))
        regret = record.regret(solution)
        failed = bool(record.diverged) or math.isnan(regret)
        return PlainScore(far, math.inf if failed else regret, record.largest_gradient)

    pieces = {f"plain {i}": partial(run, config) for i, config in enumerate(configs, 1)}
    scores = list(executor.all(pieces, "held-out tasks by plain mirror descent").values())
    found = [*_distance(scores, delta), *_regret(scores, delta, stated.regret_cap)]
    lipschitz = max(s.largest_gradient for s in scores)
    return [*found, *from_training_tasks(learned, family, delta, lipschitz, stated, comparator, executor)]


def _distance(scores: Sequence[PlainScore], delta: float) -> list[Statement]:
    quantity, known = "distance sqrt(2 B(theta_*||theta_1))", [s.distance for s in scores if s.distance is not None]
    if len(known) < len(scores):
        return [Statement("next task", quantity, None, "no bound", UNKNOWN, 1 - delta)]
    return [next_task(known, delta, quantity)]


def _regret(scores: Sequence[PlainScore], delta: float, cap: float | None) -> list[Statement]:
    """The mean of the regret of plain mirror descent below a cap, and the share of tasks above it."""
    regrets = [s.regret for s in scores if s.regret is not None]
    if cap is None or len(regrets) < len(scores):
        unstated = "the regret has no range of its own: state one beforehand with Stated(regret_cap=b) (--regret-cap)"
        why = unstated if len(regrets) == len(scores) else UNKNOWN
        return [Statement("mean", PLAIN_REGRET, None, "no bound", why, 1 - delta)]
    above, tasks = sum(r > cap for r in regrets), len(regrets)
    share, numbers = clopper_pearson(above, tasks, delta / 2), {"above": above, "tasks": tasks}
    quantity, basis = f"{PLAIN_REGRET} above {cap:.4g}", f"{above} of {tasks} were above; Clopper-Pearson"
    return [  # both together at 1 - delta
        mean_below(regrets, cap, delta / 2, f"min({PLAIN_REGRET}, {cap:.4g})"),
        Statement("share", quantity, share, "holds" if share < 1 else "vacuous", basis, 1 - delta / 2, numbers),
    ]


def from_training_tasks(
    learned: LearnedOptimiser,
    family: TaskFamily,
    delta: float,
    lipschitz: float,
    stated: Stated,
    comparator: Reference | None,
    executor: Executor,
) -> list[Statement]:
    """The bounds of the generalisation theorem, corrected and as printed."""
    found = []
    try:
        tasks, share = training_tasks(learned.header, family)
        pieces = {f"training task {i}": partial(solve, task, comparator) for i, task in enumerate(tasks, 1)}
        label = "" if comparator is None else "solutions of training tasks"  # optima that are known come at once
        solutions = list(executor.all(pieces, label).values())
        seen, size = displacements(learned, [task.init() for task in tasks], solutions)
        value = printed_bound(seen, size, stated, delta=delta, lipschitz=lipschitz, steps=family.steps)
        numbers = {"lipschitz": lipschitz, "max_norm": size.norm, "tasks": len(tasks)}
        what, why = "regret, the paper's formula", "; ".join(REASONS)
        found = [Statement("training tasks", what, value, "as printed; not a valid bound", why, 1 - delta, numbers)]
        corrected = corrected_bound(seen, size, stated, delta=share * delta, max_norm=learned.header.max_norm)
        corrected = replace(corrected, confidence=1 - delta)
    except ValueError as error:
        corrected = Statement("training tasks", DIVERGENCE, None, "does not apply", str(error), 1 - delta)
    return [corrected, *found]


# the training tasks, drawn again


def training_tasks(header: Header, family: TaskFamily) -> tuple[list[Task], float]:
    """Draw the training tasks again, each checked against its hash; a `ValueError` says why that cannot be done.

    The second value is the share of delta that is left. Looking at the tasks decided how many outer steps there were, so
    that step s may only use 1/(s(s + 1)).
    """
    known, steps = set(header.task_hashes), int(header.cost.get("outer_steps", 0))
    if known and not steps:
        raise ValueError("the file was learned from reference runs, not in outer steps whose tasks can be drawn again.")
    if not known or len(header.seeds) != 1:
        raise ValueError("the file does not say which tasks it was learned on.")
    if len(known) % steps:
        raise ValueError("its training tasks were not all different, so that they are not a sample of independent tasks.")
    places = product(range(1, steps + 1), PURPOSES, range(len(known) // steps))
    configs = (draw_config(family, header.seeds[0], purpose, step, i) for step, purpose, i in places)
    found = [family.build(config) for config in configs if config_hash(config) in known]
    if len(found) != len(known):
        raise ValueError(
            "the training tasks were not drawn from this family as it is here, and a bound from them says nothing about it."
        )
    return found, 1 / (steps * (steps + 1))


@torch.no_grad()
def measure(potential: MaxDiagonal, start: Params, solution: Params) -> tuple[float, float, float]:
    """Divergence, length and reach of theta_* - theta_1, as `Displacements` has them; infinite if theta_* is not finite."""
    if not all_finite(solution):
        return math.inf, math.inf, math.inf
    moved = {n: (solution[n] - start[n]).double() for n in start}
    length = math.sqrt(sum(float(x.square().sum()) for x in moved.values()))
    divergence, sums, counts = float(potential.divergence(solution, start)), dict[str, Tensor](), dict[str, float]()
    if potential.basis.factors:
        return divergence, length, length
    for n, slot in potential.slots.items():
        squares = slot.gather(grouped_squares(potential.basis.into(n, moved[n]), slot.shape))
        sums[slot.key] = sums.get(slot.key, 0) + squares
        counts[slot.key] = counts.get(slot.key, 0) + moved[n].numel() / max(squares.numel(), 1)
    return divergence, length, math.sqrt(max(float(s.max()) / counts[k] for k, s in sums.items() if s.numel()))


def displacements(
    learned: LearnedOptimiser, starts: Sequence[Params], solutions: Sequence[Params | None]
) -> tuple[Displacements, Size]:
    """The displacements of tasks from theta_1 and theta_*, which do not depend on the potential, and its size."""
    known = [solution for solution in solutions if solution is not None]
    if len(known) < len(solutions):
        raise ValueError(UNKNOWN)
    rows = [measure(learned.potential.bind(start), start, found) for start, found in zip(starts, known, strict=True)]
    if not all(math.isfinite(divergence) for divergence, _, _ in rows):
        raise ValueError("theta_* of some training task is not finite. Give the comparator a lower lr.")
    models = [{n: tuple(x.shape) for n, x in start.items()} for start in starts]
    if any(shapes != models[0] for shapes in models):
        raise ValueError("the training tasks have models of different shapes, so that there is no one norm ||m||.")
    seen = Displacements(*(np.array(column) for column in zip(*rows, strict=True)))
    return seen, size_of(learned.potential.bind(starts[0]), models[0])


def size_of(potential: MaxDiagonal, shapes: dict[str, tuple[int, ...]]) -> Size:
    """The size of a potential that is bound to a model with these shapes."""
    metrics = [d for n in potential.slots if (d := potential.metric(n).detach()).numel()]
    b = potential.offsets.detach()
    return Size(
        pieces=potential.pieces,
        numbers=sum(v[0].numel() for v in potential.log_d.values()),
        norm=float(metric_norms(potential, shapes).max()),
        largest=max(float(d.max()) for d in metrics),
        smallest=min(float(d.min()) for d in metrics),
        centred=potential.pieces == 1 or potential.centre == "start",
        offsets=bool((b != b[0]).any()),
        turned=bool(potential.basis.factors),
    )


def solve(task: Task, comparator: Reference | None) -> dict[str, Tensor] | None:
    """theta_*, which does not depend on the geometry: the task's optimum, else the comparator's, else None."""
    if isinstance(task, SolvedTask):
        with suppress(RuntimeError):  # a regression whose classes are separable has none
            return task.optimum()
    return None if comparator is None else comparator.run(task, task.init(), task.steps)[0]
