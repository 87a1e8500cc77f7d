"""What `mkdocs` does not do: figures in results/ join the site, links elsewhere become text, citations become links."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
CITATION = re.compile(r"(```.*?^```|`[^`]*`)|\[([A-Z][A-Za-z]+\d{4}[a-z]?)\](?!\()", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """The figures of the records, at the places they have in the repository."""
    for path in sorted((ROOT / "results").glob("*/*.png")):
        files.append(File.generated(config, f"records/{path.parent.name}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/: to a figure of the records, to its place in the site; to another file, its text alone.

    Figures lead to themselves, at their own size. Citations outside of code lead to the page of references.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        image, text, target, _ = found.groups()
        place = posixpath.normpath(posixpath.join("docs", folder, target))
        if "://" in target or place.startswith("docs/"):
            return f"[{found[0]}]({target})" if image else found[0]
        if image and place.startswith("results/"):
            target = posixpath.relpath(place.replace("results/", "records/", 1), folder or ".")
            return f"[![{text}]({target})]({target})"
        if not (ROOT / place).exists():
            raise ValueError(f"{page.file.src_uri} links to {target}, which does not exist.")
        return text

    def citation(found: re.Match[str]) -> str:
        code, key = found.groups()
        return code or f"[[{key}]]({posixpath.relpath('references.md', folder or '.')}#{key.lower()})"

    if page.file.src_uri == "references.md":
        return re.sub(r"\*\*\[(\w+)\]\*\*", lambda found: f'<a id="{found[1].lower()}"></a>{found[0]}', markdown)
    return CITATION.sub(citation, LINK.sub(link, markdown))
