"""The table of an experiment that is not about domains: losses, accuracy and what learning cost, with intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from metamd.comparison.sections import Section
from metamd.files.store import Result


def standings(rows: Sequence[Result]) -> list[Section]:
    """One line per optimiser: means with their 95 % intervals; below, what could not be learned, with the reason."""
    found = []
    for row in rows:
        cost = row["learning"]
        spent = [f"{cost['gradients']:,.0f}", f"{cost['seconds']:,.0f}"] if cost["gradients"] else ["", ""]
        found.append(
            [row["label"], interval(row["mean_loss"]), interval(row["final_loss"]), accuracy(row["test_error"]), *spent]
        )
    columns = ["", "mean loss", "final loss", "test accuracy, %", "learning: gradients", "learning: s"]
    return [Section(columns=columns, rows=found), *unlearned_section(rows)]


def unlearned_section(rows: Sequence[Result]) -> list[Section]:
    """What could not be learned on some domain, and why."""
    failed = rows[0].get("failed", {}).items()
    said = "could not be learned everywhere, and its runs count as diverged there"
    return [Section(texts=[f"{label} {said}: {reason}." for label, reason in failed])] if failed else []


def interval(found: Mapping[str, Any]) -> str:
    """A mean and its interval.

    Args:
        found: `value`, `low` and `high`, None for what is infinite.

    Example:
        >>> interval({"value": 0.5, "low": 0.4, "high": None})
        '0.5 (0.4 to diverged)'
    """
    value, low, high = ("diverged" if found[k] is None else f"{found[k]:.3g}" for k in ("value", "low", "high"))
    return value if found["value"] is None else f"{value} ({low} to {high})"


def accuracy(error: Mapping[str, Any]) -> str:
    """The accuracy in per cent from the error, with its interval.

    Args:
        error: `value`, `low` and `high`.

    Example:
        >>> accuracy({"value": 0.1, "low": 0.09, "high": 0.12})
        '90.00 (88.00 to 91.00)'
    """
    value, low, high = (100 * (1 - error[k]) for k in ("value", "high", "low"))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"
