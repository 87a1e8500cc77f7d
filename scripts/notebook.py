"""The notebook of an example: its program in cells, run once, with what it showed.

    python scripts/notebook.py [examples/photograph.py]

Needs `pip install nbclient ipykernel`. A comment between two empty parts of the program is the heading of a cell. A test
keeps the notebook equal to the program.
"""

import ast
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def cells(program: str) -> list[tuple[str, str]]:
    """The program as (kind, text) of cells: its docstring, and what follows in paragraphs that begin with a comment."""
    docstring = ast.get_docstring(ast.parse(program)) or ""
    rest = program.split('"""', 2)[2]
    first, *parts = re.split(r"^# (.+)\n", rest, flags=re.MULTILINE)
    found = [("markdown", docstring), ("code", first)]
    for heading, code in zip(parts[::2], parts[1::2], strict=True):
        found += [("markdown", heading), ("code", code)]
    return [(kind, text.strip()) for kind, text in found]


def main() -> None:
    """Write the notebook beside its program."""
    import nbclient
    from nbformat import v4, write

    path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/photograph.py")
    make = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    notebook = v4.new_notebook(cells=[make[kind](text) for kind, text in cells(path.read_text())])
    with TemporaryDirectory() as folder:  # for what the program writes
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate(notebook.cells):  # neither times nor names that are drawn anew in every run
        cell["id"], cell["metadata"] = str(number), {}
    notebook["metadata"] = {"language_info": {"name": "python"}}
    write(notebook, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
