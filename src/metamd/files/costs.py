"""What learning costs, in the words of a header."""

from collections.abc import Mapping


def total_cost(*costs: Mapping[str, float]) -> dict[str, float]:
    """The sum of several costs, entry by entry.

    Args:
        costs: such as `header.cost`; an entry that one of them lacks is zero there.

    Example:
        >>> total_cost({"gradient_evaluations": 3, "outer_steps": 1}, {"gradient_evaluations": 4})
        {'gradient_evaluations': 7, 'outer_steps': 1}
    """
    names = dict.fromkeys(name for cost in costs for name in cost)
    return {name: sum(cost.get(name, 0) for cost in costs) for name in names}
