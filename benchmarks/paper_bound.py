"""Where the paper's objective comes to rest on its quadratics, and what that costs in iterations.

    python benchmarks/paper_bound.py

For one piece and runs that converge, E = 1/2 sum_i M_i^2 delta_i^2 + k / min_i M_i. Every entry but the smallest falls, at
the rate M_i delta_i^2, and the smallest rests where M^3 = k / delta^2: the coordinate with the longest way to go comes down
first. For every k the table has that metric, D = M^2, and the iterations with it and with the curvature in the other
coordinate. Where all have come down, M is the same everywhere. Runs converge while D_i is above half the curvature.
"""

import torch

from metamd.experiments.quadratic import STARTS, family
from metamd.experiments.synthetic import Problems
from metamd.tasks.base import derive_seed

MANY, TESTED, TOLERANCE, LIMIT = 4000, 50, 1e-6, 2000


def iterations(problems: Problems, d: torch.Tensor) -> float:
    """The median number of steps theta - g / D until the gradient is small."""
    theta, counts = problems.start.clone(), torch.full((len(problems),), LIMIT)
    for step in range(LIMIT):
        g = problems.gradient(theta, problems.batch)
        counts[(g.norm(dim=1) < TOLERANCE) & (counts == LIMIT)] = step
        if (counts < LIMIT).all():
            break
        theta = theta - g / d
    return float(counts.double().quantile(0.5))


def main() -> None:
    for start, place in STARTS.items():
        many = Problems.draw(family("published", start), MANY, derive_seed(1, "closed analysis"))
        tested = Problems.draw(family("published", start), TESTED, derive_seed(0, "test problems"))
        curvature = 2 * many.batch["Q"].diagonal(dim1=1, dim2=2).mean(0)
        way = (torch.linalg.solve(2 * many.batch["Q"], many.batch["b"]) - many.start).square().mean(0)
        print(
            f"start ({place:g}, {place:g}): E delta^2 = ({way[0]:.3g}, {way[1]:.3g}), steps are stable for D above ", end=""
        )
        print(f"({curvature[0] / 2:.2g}, {curvature[1] / 2:.3g})\n")
        print("| k | flat D at rest | iterations with it | D where both have come down |\n|---|---|---|---|")
        for k in (3, 5, 7, 10, 20):
            flat, both = (k / float(way[0])) ** (2 / 3), (k / float(way.sum())) ** (2 / 3)
            needed = iterations(tested, torch.stack([torch.tensor(flat, dtype=torch.float64), curvature[1]]))
            print(f"| {k} | {flat:.2f} | {needed:g} | {both:.2f} |")
        print()


if __name__ == "__main__":
    main()
