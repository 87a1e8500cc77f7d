"""Draw docs/figures/architecture.png from the imports under src/metamd, and write them as text beside it.

    python scripts/architecture.py

A test compares the text with the imports, so that the figure cannot fall behind.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "metamd"
TEXT, FIGURE = (ROOT / "docs" / "figures" / f"architecture.{ending}" for ending in ("txt", "png"))

GROUPS = {
    "use": {
        "potentials": "the mathematics: potentials and the exact step",
        "files": "what lies on disk: learned optimisers, runs, results",
        "optimiser": "MetaMD (a torch optimiser), the certificate of a run",
    },
    "learn": {
        "data": "datasets by name",
        "tasks": "tasks, families of tasks, your own data, models",
        "inner": "the training loop, objectives, gradient estimators",
        "learning": "from training runs to a learned-optimiser file",
    },
    "guarantee": {"certification": "what to expect on the next task"},
    "compare": {
        "rivals": "the other optimisers",
        "comparison": "the same tasks for all: tuning, statistics, pages",
        "experiments": "the tables of the paper and ours, as declarations",
    },
    "run": {"cli": "the metamd command"},
}
COLOURS = {"use": "#2a6f97", "learn": "#2f7d4f", "guarantee": "#b06f00", "compare": "#8a3b6b", "run": "#555555"}
ORDER = [package for packages in GROUPS.values() for package in packages]


def imported(node: ast.AST, inside: tuple[str, ...]) -> list[str]:
    """The full names of the modules that one statement imports; `inside` is the package of the file."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        base = ".".join([*inside[: len(inside) - node.level + 1], *base.split(".")]).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]


def edges(source: Path) -> set[tuple[str, str, str]]:
    """Every import of one package from another, also inside functions: file, its package, the package it imports from."""
    found = set()
    for path in source.rglob("*.py"):
        place = path.relative_to(source)
        if len(place.parts) == 1:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported(node, ("metamd", *place.parts[:-1])):
                top, _, rest = name.partition(".")
                target = rest.split(".")[0] or "metamd"
                if top == "metamd" and target not in (place.parts[0], "_version"):
                    found.add((place.as_posix(), place.parts[0], target))
    return found


def as_text(source: Path = SOURCE) -> str:
    """One line for each package: those that it imports from, in order."""
    pairs = {(package, target) for _, package, target in edges(source)}
    lines = [f"{package}: {' '.join(t for t in ORDER if (package, t) in pairs)}".strip() for package in ORDER]
    return "\n".join(lines) + "\n"


def draw(text: str) -> None:
    """The packages from top to bottom, and a dot where one imports from another."""
    import matplotlib.pyplot as plt

    rows = {line.partition(":")[0]: line.partition(":")[2].split() for line in text.splitlines()}
    figure, axes = plt.subplots(figsize=(11.5, 5.4), dpi=110)
    left, cell = 9.7, 0.4
    for row, package in enumerate(ORDER):
        group = next(g for g, packages in GROUPS.items() if package in packages)
        colour, y = COLOURS[group], -row
        axes.add_patch(plt.Rectangle((0, y - 0.43), left - 0.25, 0.86, color=colour, alpha=0.13, lw=0))
        axes.add_patch(plt.Rectangle((0, y - 0.43), 0.09, 0.86, color=colour, lw=0))
        axes.text(0.25, y, package, va="center", fontsize=12, fontweight="bold", color=colour)
        axes.text(2.55, y, GROUPS[group][package], va="center", fontsize=10.5)
        if package == next(iter(GROUPS[group])):
            axes.text(-0.15, y, group, va="center", ha="right", fontsize=10.5, style="italic", color=colour)
        for column, target in enumerate(ORDER[: row + 1]):
            x = left + 0.2 + cell * column
            if target == package:
                axes.text(x, y, "\N{BLACK SQUARE}", ha="center", va="center", color=colour, fontsize=9)
            else:
                there = target in rows[package]
                axes.plot(x, y, "o", ms=7 if there else 2, color=colour if there else "#bbbbbb")
    for column, target in enumerate(ORDER):
        axes.text(left + 0.2 + cell * column, 0.6, target, rotation=55, ha="left", va="bottom", fontsize=9)
    axes.text(left + 0.2 + cell * 4.6, -1.5, "dot: the row's package\nimports from the column's", fontsize=9.5, va="center")
    axes.set_xlim(-1.1, left + 0.2 + cell * len(ORDER) + 0.5)
    axes.set_ylim(-len(ORDER) + 0.4, 2.2)
    axes.axis("off")
    figure.savefig(FIGURE, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    TEXT.write_text(as_text())
    draw(TEXT.read_text())
