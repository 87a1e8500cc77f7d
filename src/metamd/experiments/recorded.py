"""Optimisers that a comparison has trained already: where their learned files are gone they need not be learned again."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from metamd.comparison.comparison import Comparison
from metamd.experiments.declare import Geometry
from metamd.files.store import Result
from metamd.rivals.base import Contender, Named, Rival, Setting


def recorded(comparison: Comparison, label: str) -> Contender:
    """An optimiser of a comparison, as its record describes it: its runs can be read, and no others made.

    Args:
        comparison: of one domain.
        label: of an optimiser without a choice of settings.
    """
    (fold,) = comparison.folds
    about = fold.entrants[label][0].contender
    rival = Rival(
        about["rival"],
        label,
        _gone,
        {},
        dict(about["setting"]),
        schedules=(about["schedule"],),
        identity=about.get("identity", ""),
        cost=dict(fold.costs.get(label, {})),
        domains=(fold.group,) if label in fold.trained else (),
        recorded=True,
    )
    return Contender(rival, dict(about["setting"]), about["schedule"])


def _gone(named: Named, setting: Setting) -> NoReturn:
    raise ValueError(
        "this optimiser is known from records alone, and its learned file is gone. Delete comparison.json beside the "
        "records, and it is learned again."
    )


def unlearned(label: str, name: str, reason: str) -> Contender:
    """An optimiser whose training failed: nobody can run it, so all its runs count as failed.

    Args:
        label: in tables.
        name: in records.
        reason: why it could not be learned.
    """
    return Rival(name, label, _gone, {}, {}, identity="unlearned", unlearned=reason).untuned()


def failures(geometries: Mapping[str, Geometry], taught: Mapping[str, Result], domains: Sequence[str]) -> dict[str, str]:
    """By label what could not be learned on some domain, with the reason.

    Args:
        geometries: by name.
        taught: what the records say of every lesson.
        domains: that were held out.
    """
    failed: dict[str, str] = {}
    for name, geometry in geometries.items():
        reasons = [taught.get(f"learn-{domain}-{name}", {}).get("failed", "") for domain in domains]
        if missing := list(filter(None, reasons)):
            reason = f"{missing[0].rstrip('.')} ({len(missing)} of {len(reasons)} trainings)"
            failed |= dict.fromkeys(geometry.entries, reason)
    return failed


def standing(
    geometries: Mapping[str, Geometry], taught: Mapping[str, Result], comparisons: Iterable[Comparison], seeds: int
) -> set[str]:
    """Geometries all of whose entries have run in full in each of the comparisons, with what the last lesson made.

    Args:
        geometries: by name.
        taught: what the records say of the lesson of each.
        comparisons: of one domain each; none, and nothing stands.
        seeds: runs that each entry is to have.
    """
    found = list(comparisons)
    return {
        name
        for name, geometry in geometries.items()
        if found and name in taught and all(_complete(c, list(geometry.entries), taught[name], seeds) for c in found)
    }


def _complete(comparison: Comparison, labels: Sequence[str], lesson: Result, seeds: int) -> bool:
    if len(comparison.folds) != 1 or "fingerprint" not in lesson:
        return False
    fold = comparison.folds[0]
    for label in labels:
        candidates = fold.entrants.get(label, ())
        if len(candidates) != 1 or len(candidates[0].outcomes) != seeds:
            return False
        if not str(candidates[0].contender.get("identity", "")).startswith(lesson["fingerprint"]):
            return False
    return True
