"""The tables of the experiments that are no tables of a comparison: from the rows of a summary."""

from collections.abc import Sequence

from metamd.comparison.pace import geometric_mean, pace_section, unlearned_section
from metamd.comparison.sections import Section, formatted
from metamd.files.store import Result


def by_domain(rows: Sequence[Result]) -> list[Section]:
    """Test accuracies by domain with the paper's beside them, losses and steps to the target, and the pace of ours."""
    domains = list(rows[0]["accuracy"])
    accuracies, standing = [], []
    for row in rows:
        values = [row["accuracy"][d] for d in domains]
        accuracies.append([row["label"], *(f"{x:.2f}" for x in (*values, sum(values) / len(values)))])
        if row["published"]:
            paper = [row["published"].get(d) for d in domains]
            mean = None if None in paper else sum(x for x in paper if x is not None) / len(paper)
            accuracies.append([f"{row['label']}, in the paper", *(formatted(x, ".2f") for x in (*paper, mean))])
        steps = row["steps_to_target"]
        ratio = steps.get("ratio")
        losses = [formatted(row[m]["value"], missing="diverged") for m in ("mean_loss", "final_loss")]
        fields = [row["label"], *losses, formatted(steps["value"], missing="never"), f"{steps['arrived']:.0%}"]
        against = "" if ratio is None else f"ours takes {ratio:.2f} x, {steps['verdict']}"
        standing.append([*fields, against, f"{row['area']:.3f}"])
    columns = ["", "mean loss", "final loss", "steps to target", "arrived", "of ours", "area"]
    return [
        Section(columns=["test accuracy, %", *domains, "mean"], rows=accuracies),
        Section(columns=columns, rows=standing),
        *(pace_section(title, found, rows[0]["share"]) for title, found in rows[0].get("pace", {}).items()),
        *unlearned_section(rows),
    ]


def accuracy_and_losses(rows: Sequence[Result]) -> list[Section]:
    """One line for everybody: losses, steps to the target, and test accuracy on the mean of the domains."""
    found = []
    for row in rows:
        losses = [formatted(row[m]["value"], ".3g", "diverged") for m in ("mean_loss", "final_loss")]
        accuracy = sum(row["accuracy"].values()) / len(row["accuracy"])
        steps = formatted(row["steps_to_target"]["value"], missing="never")
        found.append([row["label"], *losses, steps, f"{accuracy:.2f}"])
    return [Section(columns=["", "mean loss", "final loss", "steps to target", "test accuracy, %"], rows=found)]


def by_the_clock(rows: Sequence[Result]) -> list[Section]:
    """One line for every way to use a file: ratios to the best rival of each domain, geometric means, and accuracy."""
    found = []
    for title, each in rows[0]["pace"].items():
        label = title.partition(", by ")[2] or rows[0]["label"]
        ratios = [geometric_mean([row[k] for row in each]) for k in ("mean_loss", "steps", "seconds")]
        ours, theirs = (sum(row[k] for row in each) / len(each) for k in ("accuracy", "best_accuracy"))
        ways = ["not in all runs" if x is None else f"{x:.2f} x" for x in ratios]
        found.append([label, *ways, f"{ours:.2f} (best rival {theirs:.2f})"])
    columns = ["", "mean loss", "steps to the final loss of the best rival", "seconds", "test accuracy, %"]
    return [Section(columns=columns, rows=found)]
