"""What `mkdocs` needs to know of files outside docs/: figures in results/ join the site, other links become text."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """The figures of the records, at the places they have in the repository."""
    for path in sorted((ROOT / "results").glob("*/*.png")):
        files.append(File.generated(config, f"records/{path.parent.name}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/: to a figure of the records, to its place in the site; to another file, its text alone."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        image, text, target, _ = found.groups()
        place = posixpath.normpath(posixpath.join("docs", folder, target))
        if "://" in target or place.startswith("docs/"):
            return found[0]
        if image and place.startswith("results/"):
            return f"![{text}]({posixpath.relpath(place.replace('results/', 'records/', 1), folder or '.')})"
        if not (ROOT / place).exists():
            raise ValueError(f"{page.file.src_uri} links to {target}, which does not exist.")
        return text

    return LINK.sub(link, markdown)
