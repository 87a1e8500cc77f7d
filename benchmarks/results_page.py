"""Put the tables of the experiments with networks into docs/results.md, between their marks, from results/NAME/tables.md.

    python benchmarks/results_page.py

Of a leave-one-out experiment the page shows what it is judged by, the tables of the pace; all others are beside the records.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
MARKS = re.compile(r"<!-- results/([\w-]+): begin -->\n.*?<!-- end -->\n", re.S)


def shown(name: str) -> str:
    """The tables of an experiment that the page has."""
    text = (ROOT / "results" / name / "tables.md").read_text()
    at = text.find("| against ")
    return text[at:] if at >= 0 else text


def written(page: str) -> str:
    """The page with the tables of the records in it."""
    return MARKS.sub(lambda m: f"<!-- results/{m[1]}: begin -->\n{shown(m[1])}<!-- end -->\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
