"""`metamd reproduce out-of-distribution`: what was learned for one kind of run, on runs of another kind.

Rotated MNIST with a 3-layer MLP of width 128, batches of 100 and short runs, learned on five angles. Then the sixth angle,
45 degrees, with other initialisations, batch sizes, horizons and widths. A geometry that was learned tensor by tensor does
not fit another width: there the one that has a number for each role enters in its place. A rival is shown with the best
rate for the very runs; with the rate that was best for runs of the kind that was learned on, which is what one has who does
not tune again; and untuned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from metamd.comparison import figures
from metamd.comparison.comparison import Candidate, Comparison
from metamd.comparison.entrants import UNTUNED
from metamd.comparison.figures import best_schedules
from metamd.comparison.sections import Section, formatted
from metamd.experiments.declare import PLAIN, Entrant, Scale, coordinates
from metamd.experiments.experiment import Experiment
from metamd.experiments.paper_tables import HELD_OUT, ONE_ANGLE, rotated
from metamd.files.store import Result
from metamd.potentials import Diagonal
from metamd.tasks.base import TaskFamily
from metamd.tasks.vision import ImageFamily, ImageTraining
from metamd.tasks.wrapped import Variant

USUAL = "as learned"

SCALES = {
    "smoke": replace(ONE_ANGLE, images=100, budget=1, rivals=("sgdm", "adam"), batch_size=20),
    "cpu": Scale((HELD_OUT,), 1000, steps=200, outer_steps=4, tasks_per_step=4, budget=7, rivals=("sgdm", "adam")),
    "paper": Scale((HELD_OUT,), None, outer_steps=20, seeds=10, rivals=("sgdm", "adam")),
}


def _sides(scale: Scale, domain: str, family: TaskFamily) -> Mapping[str, TaskFamily]:
    """The held-out angle as it was learned for, and changed in one respect at a time."""
    assert isinstance(family, ImageFamily)

    def changed(name: str, options: dict[str, int] | None = None, **training: int) -> Variant:
        given = {"batch_size": scale.batch_size, "steps": scale.steps} | training
        how = ImageTraining("mlp", given["batch_size"], given["steps"], options or {})
        return Variant(ImageFamily(family.name, family.collection, how, family.how, hold_out=domain, held=True), name)

    usual = family.held_out()
    found = [Variant(usual, USUAL), *(Variant(usual, f"initialisation x {gain:g}", gain) for gain in (0.5, 2.0))]
    found += [changed(f"batches of {n}", batch_size=n) for n in (scale.batch_size // 4, 3 * scale.batch_size)]
    found += [changed(f"{n} steps", steps=n) for n in (scale.steps // 4, 2 * scale.steps)]
    found += [changed(f"width {n}", {"width": n}) for n in (32, 256)]
    return {variant.name: variant for variant in found}


def _summarise(found: list[Comparison], folder: Path) -> list[Result]:
    """A row for every variant and optimiser; the curves of all variants are drawn."""
    members = {c.folds[0].group: _shown_candidates(c, found[0]) for c in found}
    _draw_losses(members, folder / "curves.png")
    return [
        {"variant": variant, "label": label, **_summary(candidate)}
        for variant, here in members.items()
        for label, candidate in here.items()
    ]


def _shown_candidates(comparison: Comparison, usual: Comparison) -> dict[str, Candidate]:
    """What is shown, by label: ours, rivals tuned here, rivals tuned where ours was learned, and untuned ones."""
    fold = comparison.folds[0]
    names = {label: label.split(",")[0] for label in fold.entrants}
    best = {label: fold.best(label, "mean_loss", None) for label in names}
    tuned = best_schedules(comparison)
    shown = {label: c for label, c in best.items() if names[label] not in {names[t] for t in tuned}}
    shown |= {f"{names[label]} (tuned here)": best[label] for label in tuned}
    for label in best_schedules(usual):
        before = usual.folds[0].best(label, "mean_loss", None).contender
        shown[f"{names[label]} (carried over)"] = next(c for c in fold.entrants[label] if c.contender == before)
    return shown | {f"{names[label]} (untuned)": best[label] for label in names if label.endswith(UNTUNED)}


def _summary(candidate: Candidate) -> Result:
    runs = candidate.outcomes
    means, ends = np.array([o.mean_loss for o in runs]), np.array([o.final_loss for o in runs])
    losses = {"mean_loss": means.mean(), "lowest": means.min(), "highest": means.max(), "final_loss": ends.mean()}
    finite = np.isfinite(means).all()
    return {
        **{name: float(value) if finite else None for name, value in losses.items()},
        "accuracy": 100 * float(np.mean([o.accuracy("test") for o in runs])),
        "diverged": sum(bool(o.failed) for o in runs),
    }


def _draw_losses(variants: Mapping[str, Mapping[str, Candidate]], path: Path) -> None:
    panels: dict[str, list[figures.Curve]] = {variant: [] for variant in variants}
    for variant, members in variants.items():
        for label in (label for label in members if not label.endswith(("(untuned)", "plain"))):
            runs, dashed = members[label].outcomes, label.endswith(("(carried over)", "by role"))
            panels[variant] += figures.banded(label, runs[0].places, np.array([o.losses for o in runs]), dashed=dashed)
    figures.curves(panels, path, xlabel="step", ylabel="training loss")


def _loss_tables(rows: Sequence[Result]) -> list[Section]:
    labels, variants = (list(dict.fromkeys(r[k] for r in rows)) for k in ("label", "variant"))
    found = {(r["variant"], r["label"]): r for r in rows}
    return [
        Section(
            columns=[title, *variants],
            rows=[[label, *(formatted(found[v, label][key], spec, "diverged") for v in variants)] for label in labels],
        )
        for title, key, spec in (("mean training loss", "mean_loss", ".3f"), ("test accuracy, %", "accuracy", ".2f"))
    ]


EXPERIMENTS = (
    Experiment(
        "out-of-distribution",
        rotated,
        {
            "kronecker": coordinates({"MetaMD": Entrant(instead="role")}),
            "role": coordinates({"MetaMD, by role": Entrant(), "MetaMD, by role, plain": PLAIN}, Diagonal(tying="role")),
        },
        SCALES,
        sides=_sides,
        off_family=True,
        summarise=_summarise,
        sections=_loss_tables,
    ),
)
