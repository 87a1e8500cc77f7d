"""Print the sentences of errors that the frozen version had and a source tree no longer has; used by hand.

    python tests/frozen/compare_sentences.py src/metamd

A sentence counts as present where any string of the tree contains it, in a `raise` or not. Placeholders are written {}.
"""

import ast
import difflib
import json
import sys
from pathlib import Path


class _Strings(ast.NodeVisitor):
    """All string literals below a node; those inside of the placeholders of an f-string are left out."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_JoinedStr(self, node):
        self.found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            self.found.append(node.value)

    def visit_BinOp(self, node):
        """Texts that are added to each other are one sentence."""
        if not isinstance(node.op, ast.Add):
            return self.generic_visit(node)
        sides = []
        for side in (node.left, node.right):
            inner = _Strings()
            inner.visit(side)
            sides.append(inner.found[0] if len(inner.found) == 1 else "{}")
            self.found += inner.found if len(inner.found) > 1 else []
        if sides != ["{}", "{}"]:
            self.found.append("".join(sides))
        return None


def strings(node):
    visitor = _Strings()
    visitor.visit(node)
    return visitor.found


def raised(src):
    """(module, sentence) of every string literal in a `raise` below a folder, sorted."""
    rows = set()
    for path in sorted(Path(src).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                rows |= {(str(path.relative_to(src)), text) for text in strings(node.exc) if " " in text.strip()}
    return sorted(rows)


def every(src):
    """Every string literal below a folder."""
    return sorted({text for path in Path(src).rglob("*.py") for text in strings(ast.parse(path.read_text()))})


def main(src):
    """Print what is gone, with the nearest sentence there is now."""
    old = json.loads((Path(__file__).parent / "sentences.json").read_text())
    present = every(src)
    now, near = "\0".join(present), [text for text in present if " " in text.strip()]
    gone = [(module, text) for module, text in old if text not in now]
    for module, text in gone:
        print(f"{module}\n  - {text}")
        for close in difflib.get_close_matches(text, near, 1, 0.6):
            print(f"  + {close}")
    print(f"{len(gone)} of {len(old)} sentences are gone.")


if __name__ == "__main__":
    main(sys.argv[1])
