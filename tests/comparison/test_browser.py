"""The pages of reports in a browser as wide as a telephone; skipped where no Chromium is installed."""

import html
import re
import shutil
import subprocess

import pytest

from metamd.comparison.page import write_page
from metamd.comparison.sections import Section

pytest.importorskip("jinja2")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
FLAGS += ["disable-component-update", "disable-sync", "disable-dev-shm-usage"]
MEASURE = """<body><iframe id="page" width="{width}" height="800" srcdoc="{page}"></iframe><pre id="found"></pre><script>
page.onload = () => {{ const inside = page.contentDocument;
  found.textContent = inside.documentElement.scrollWidth + " " + inside.querySelectorAll("details:not([open])").length; }}
</script></body>"""


def measured(page, folder, width):
    """The width that a page takes in a window so wide, and how many parts are folded in it."""
    outer = folder / "outer.html"
    outer.write_text(MEASURE.format(width=width, page=html.escape(page)))
    command = [CHROMIUM, *(f"--{flag}" for flag in FLAGS), f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    ended = subprocess.run([*command, outer.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return tuple(map(int, re.search(r'<pre id="found">(\d+) (\d+)</pre>', ended.stdout).groups()))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_pages_fit_a_telephone_and_fold_all_but_their_opening(tmp_path):
    wide = [["MetaMD " + "x" * 80, *["0.123 (0.100 to 0.150)"] * 9]] * 3
    parts = [Section(headline="A sentence.", columns=[""] * 10, rows=wide), Section("More", ["y" * 300], folded=True)]
    write_page(tmp_path / "page.html", "A page", parts, command="metamd report " + "z" * 200)
    page = (tmp_path / "page.html").read_text()
    assert measured(page, tmp_path, 390) == (390, 1)
    broken = page.replace("overflow-x: auto", "overflow-x: visible")
    assert measured(broken, tmp_path, 390)[0] > 390, "a table that is too wide goes unnoticed"
