"""A report page: one HTML file with its figures inside, that needs nothing beside it. Nothing is computed here."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill

from metamd.files.container import write_atomically

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
tr.ours { background: #fdf0ee; font-weight: 600; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: .9rem; }
code { background: #f4f4f4; padding: .1rem .3rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% for text in section.texts %}<p>{{ text }}</p>
{% endfor %}
{% if section.rows %}<table>
<tr>{% for head in section.heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in section.rows %}<tr{% if row[0].startswith("MetaMD") %} class="ours"{% endif %}>
{%- for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endif %}
{% for image, caption in section.images %}<figure>
<img src="data:image/png;base64,{{ image }}" alt="{{ caption }}"><figcaption>{{ caption }}</figcaption>
</figure>
{% endfor %}
{% endfor %}
<p>Made by <code>{{ command }}</code></p>
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Args:
        title: its heading.
        texts: its paragraphs.
        heads: the table's header.
        rows: the table's rows, as text; rows whose first field begins with MetaMD stand out.
        figures: the images, PNG, each with its caption.
    """

    title: str
    texts: Sequence[str] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Sequence[tuple[Path, str]] = field(default_factory=tuple)


def as_text(sections: Sequence[Section]) -> str:
    """The same page for a terminal, without its figures and without what would be empty then; only printable characters.

    Args:
        sections: its parts.
    """
    lines: list[str] = []
    for section in sections:
        if not section.rows and not section.texts:
            continue
        title = _printable(section.title)
        lines += ["", title, "-" * len(title), *(fill(_printable(text), 110) for text in section.texts), ""]
        if not section.rows:
            continue
        table = [[_printable(f) for f in row] for row in (section.heads, *section.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        for row in table:
            first, rest = row[0].ljust(widths[0]), [v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("   ".join([first, *rest]))
    return "\n".join(lines).strip()


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_markdown(title: str, sections: Sequence[Section], *, command: str) -> str:
    """The same page as Markdown, with the captions of its figures.

    Args:
        title: of the page.
        sections: its parts.
        command: what made it, for the last line.
    """
    lines = [f"# {escaped(title)}", ""]
    for section in sections:
        lines += [f"## {escaped(section.title)}", ""]
        for text in section.texts:
            lines += [escaped(text), ""]
        if section.rows:
            lines += [_row(section.heads), "|---" * len(section.heads) + "|", *map(_row, section.rows), ""]
        for _, caption in section.figures:
            lines += [f"In report.html: {escaped(caption)}", ""]
    return "\n".join([*lines, f"Made by {escaped(command)}", ""])


def _row(fields: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(f) for f in fields) + " |"


def escaped(text: str) -> str:
    """A text from a record that Markdown shows as it is: no markup, no links, no HTML, one line.

    Args:
        text: anything.

    Example:
        >>> escaped("a|b <script>")
        'a\\\\|b &lt;script&gt;'
    """
    plain = "".join(c if c.isprintable() else " " for c in text)
    plain = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\\\`*_\[\]|#!])", r"\\\1", plain)


def table_sections(text: str) -> list[Section]:
    """The tables of a Markdown page as parts of a report; a line in bold is the heading of what follows.

    Args:
        text: tables with their headings, and paragraphs.

    Example:
        >>> table_sections("**Times**\\n\\n| who | s |\\n|---|---|\\n| a | 1 |\\n")[0].rows
        [['a', '1']]
    """
    parts: list[Section] = []
    for block in filter(None, (b.strip() for b in text.split("\n\n"))):
        if block.startswith("**") and block.endswith("**"):
            parts.append(Section(block.strip("*")))
            continue
        if not parts or (parts[-1].rows and block.startswith("|")):
            parts.append(Section("Results"))
        heads, *rows = ([field.strip() for field in line.strip("|").split(" | ")] for line in block.splitlines())
        if block.startswith("|") and all(len(row) == len(heads) for row in rows[1:]):  # rows[0] is the rule below the heads
            parts[-1] = replace(parts[-1], heads=heads, rows=rows[1:])
        else:
            parts[-1] = replace(parts[-1], texts=[*parts[-1].texts, " ".join(block.split())])
    return parts


def write_page(path: Path, title: str, sections: Sequence[Section], *, command: str) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        title: of the page.
        sections: its parts.
        command: what made it, for the last line.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError:
        raise ValueError("a report page needs jinja2, which is not installed. Run: pip install 'metamd[demo]'") from None
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE)
    parts = [
        {
            "title": _printable(s.title),
            "texts": [_printable(text) for text in s.texts],
            "heads": [_printable(head) for head in s.heads],
            "rows": [[_printable(value) for value in row] for row in s.rows],
            "images": [(base64.b64encode(image.read_bytes()).decode(), _printable(caption)) for image, caption in s.figures],
        }
        for s in sections
    ]
    write_atomically(path, template.render(title=_printable(title), sections=parts, command=_printable(command)).encode())
