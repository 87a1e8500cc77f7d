"""The pages of reports in a browser as wide as a telephone; skipped where no Chromium is installed."""

import html
import re
import shutil
import subprocess

import pytest

from metamd.comparison.figures import Curve, curves
from metamd.comparison.page import write_page
from metamd.comparison.sections import Section

pytest.importorskip("jinja2")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
FLAGS += ["disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars"]
pytest.importorskip("matplotlib")
MEASURE = """<body><iframe id="page" width="{width}" height="800" srcdoc="{page}"></iframe><pre id="found"></pre><script>
page.onload = () => {{ const inside = page.contentDocument;
  const shown = [...inside.images].map(x => x.naturalHeight > x.naturalWidth);
  found.textContent = [inside.documentElement.scrollWidth, inside.querySelectorAll("details:not([open])").length, ...shown]
    .join(" "); }}
</script></body>"""


def measured(page, folder, width):
    """The width that a page takes in a window so wide, how many parts are folded, and whether each figure is upright."""
    outer = folder / "outer.html"
    outer.write_text(MEASURE.format(width=width, page=html.escape(page)))
    command = [CHROMIUM, *(f"--{flag}" for flag in FLAGS), f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    ended = subprocess.run([*command, outer.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    width, folded, *upright = re.search(r'<pre id="found">([^<]+)</pre>', ended.stdout)[1].split()
    return int(width), int(folded), upright


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_pages_fit_a_telephone_and_fold_all_but_their_opening(tmp_path):
    wide = [["MetaMD " + "x" * 80, *["0.123 (0.100 to 0.150)"] * 9]] * 3
    lines = {title: [Curve("MetaMD", [0, 1], [1, 2])] for title in ("steps", "seconds")}
    for name, narrow in (("opening", True), ("curves", False)):
        curves(lines, tmp_path / f"{name}.png", xlabel="", ylabel="", narrow=narrow)
    drawn = [
        (tmp_path / "opening.png", "With panels below each other."),
        (tmp_path / "curves.png", "Whole, to be scrolled."),
    ]
    opening = Section(headline="A sentence.", columns=[""] * 10, rows=wide, figures=drawn)
    parts = [opening, Section("More", ["y" * 300], folded=True)]
    write_page(tmp_path / "page.html", "A page", parts, command="metamd report " + "z" * 200)
    page = (tmp_path / "page.html").read_text()
    assert measured(page, tmp_path, 390) == (390, 1, ["true", "false"])
    assert measured(page, tmp_path, 1280) == (1280, 1, ["false", "false"])
    broken = page.replace("overflow-x: auto", "overflow-x: visible")
    assert measured(broken, tmp_path, 390)[0] > 390, "a table that is too wide goes unnoticed"
