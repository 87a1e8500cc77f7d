"""Sections as text, as Markdown, and as one HTML file with its figures inside. Nothing is computed here."""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from metamd.comparison.figures import NARROW
from metamd.comparison.sections import Section
from metamd.files.container import write_atomically
from metamd.files.text import install, one_line

WIDTH = 110
"""Characters in a line of a terminal that text and tables keep to."""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2, summary { font-size: 1.2rem; font-weight: 700; margin-top: 2rem; }
p.headline { font-size: 1.25rem; }
details { border-top: 1px solid #ddd; } summary { margin: .6rem 0; cursor: pointer; }
p, td, h1, h2, summary, code { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; }
tr.ours { background: #fdf0ee; font-weight: 600; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: .9rem; }
code { background: #f4f4f4; padding: .1rem .3rem; }
@media (max-width: 40rem) {
th, td { padding: .25rem .4rem; font-size: .85rem; } body { margin: 1rem auto; } img.whole { max-width: none; }
}
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for section in sections %}
{% if section.folded %}<details><summary>{{ section.title }}</summary>
{% elif section.title %}<h2>{{ section.title }}</h2>{% endif %}
{% if section.headline %}<p class="headline">{{ section.headline }}</p>
{% endif %}
{% for path, caption in section.figures %}<figure>
{% if path in narrow %}<picture>
<source media="(max-width: 40rem)" srcset="data:image/png;base64,{{ narrow[path] }}">
<img src="data:image/png;base64,{{ images[path] }}" alt="{{ caption }}"></picture>
{% else %}<div class="wide"><img class="whole" src="data:image/png;base64,{{ images[path] }}" alt="{{ caption }}"></div>
{% endif %}<figcaption>{{ caption }}</figcaption>
</figure>
{% endfor %}
{% for text in section.texts %}<p>{{ text }}</p>
{% endfor %}
{% if section.rows %}<div class="wide"><table>
<tr>{% for column in section.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in section.cells() %}<tr{% if row[0].startswith("MetaMD") %} class="ours"{% endif %}>
{%- for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
{% if section.folded %}</details>
{% endif %}
{% endfor %}
<p>Made by <code>{{ command }}</code></p>
</body>
</html>
"""


def as_text(sections: Sequence[Section]) -> str:
    """The page for a terminal: what is not folded, without figures and empty sections; only printable characters."""
    lines: list[str] = []
    for section in (s for s in sections if (s.rows or s.texts or s.headline) and not s.folded):
        if title := one_line(section.title):
            lines += ["", title, "-" * len(title)]
        texts = [text for text in (section.headline, *section.texts) if text]
        lines += [*(fill(one_line(text), WIDTH) for text in texts), ""]
        table = [[one_line(cell) for cell in row] for row in (section.columns, *section.cells())] if section.rows else []
        lines += _columns([list(column) for column in zip(*table, strict=True)])
    return "\n".join(lines).strip()


def _columns(columns: list[list[str]]) -> list[str]:
    """The lines of a table; what is wider than a terminal continues below, behind the same first column."""
    names = [name.ljust(max(map(len, columns[0]))) for name in columns[0]] if columns else []
    lines, block = list[str](), list(names)
    for column in columns[1:]:
        wide = max(map(len, column))
        if block != names and len(block[0]) + 3 + wide > WIDTH:
            lines, block = [*lines, *block, ""], list(names)
        block = [f"{row}   {cell.rjust(wide)}" for row, cell in zip(block, column, strict=True)]
    return lines + block


def as_markdown(sections: Iterable[Section], *, title: str = "", command: str = "") -> str:
    """The same page as Markdown, with the captions of its figures; without a title, a fragment whose heads are bold."""
    blocks = [f"# {escaped(title)}"] if title else []
    for section in sections:
        if section.title:
            blocks.append(f"## {escaped(section.title)}" if title else f"**{escaped(section.title)}**")
        blocks += [f"**{escaped(section.headline)}**"] if section.headline else []
        blocks += [escaped(text) for text in section.texts]
        if section.rows:
            cells = [[escaped(cell) for cell in row] for row in (section.columns, *section.cells())]
            blocks.append(markdown_table(cells[0], cells[1:]).rstrip())
        blocks += [f"In report.html: {escaped(caption)}" for _, caption in section.figures]
    if command:
        blocks.append(f"Made by {escaped(command)}")
    return "\n\n".join(blocks) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown whose cells are Markdown already."""
    lines = ["|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"| {' | '.join(columns)} |", *lines]) + "\n"


def escaped(text: str) -> str:
    """A text from a record that Markdown shows as it is: no markup, no links, no HTML, one line."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    plain = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\\\`*_\[\]|#!])", r"\\\1", plain)


def write_page(path: Path, title: str, sections: Sequence[Section], *, command: str) -> None:
    """Write the page as one HTML file; the command that made it is its last line."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError:
        raise ValueError(f"a report page needs jinja2, which is not installed. {install('demo')}") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=one_line)
    images = {image: _encoded(image) for part in sections for image, _ in part.figures}
    below = {image: image.with_stem(image.stem + NARROW) for image in images}
    shown = {"images": images, "narrow": {image: _encoded(path) for image, path in below.items() if path.exists()}}
    page = environment.from_string(TEMPLATE).render(title=title, sections=sections, command=command, **shown)
    write_atomically(path, page.encode())


def _encoded(image: Path) -> str:
    return base64.b64encode(image.read_bytes()).decode()
