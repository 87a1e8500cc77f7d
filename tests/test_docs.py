"""Documentation that is run: every Python block of every page, every docstring's example, every key and link."""

import doctest
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import metamd
from tests import processes

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(m.name for m in pkgutil.walk_packages(metamd.__path__, "metamd.") if not m.name.endswith("__main__"))
CITATION = re.compile(r"\[([A-Z][A-Za-z]+\d{4}[a-z]?)\]")


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def sources():
    return [p for folder in ("src", "docs") for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md", ".c"}]


def run_program(program):
    """Run a file as a script in its own folder, with warnings as errors."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"})
    os.chdir(program.parent)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    sys.argv = [str(program)]
    runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path):
    """All blocks of a page, in order, as one program in an empty folder."""
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(blocks(page)))
    ended = processes.run(run_program, program)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    names = {"torch": importlib.import_module("torch"), **vars(module)}
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, globs=names)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in tests:
        assert runner.run(test).failed == 0, test.name


def arguments_documented(function):
    """The names under `Args:` of a docstring that the signature does not have."""
    text = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n|\n)+)", text + "\n", re.MULTILINE)
    named = re.findall(r"^ {4}(\w+):", section[1], re.MULTILINE) if section else []
    known = set(inspect.signature(function).parameters) if named else set()
    return [n for n in named if n not in known]


def public_functions():
    for name in MODULES:
        module = importlib.import_module(name)
        for label, thing in vars(module).items():
            if label.startswith("_") or getattr(thing, "__module__", None) != name:
                continue
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield f"{name}.{label}", thing
            if inspect.isclass(thing):
                for attribute, method in vars(thing).items():
                    if inspect.isfunction(method) and not attribute.startswith("_"):
                        yield f"{name}.{label}.{attribute}", method


def test_documented_arguments_exist():
    wrong = {label: extra for label, thing in public_functions() if (extra := arguments_documented(thing))}
    assert not wrong


def test_documented_arguments_check_rejects_a_ghost():
    def example(a):
        """Do it.

        Args:
            a: there.
            ghost: not there.
        """

    assert arguments_documented(example) == ["ghost"]


def test_every_public_name_is_documented():
    api = set(re.findall(r"`(\w+)", (ROOT / "docs" / "api.md").read_text()))
    modules = {n: getattr(metamd, n) for n in metamd._SUBMODULES}
    listed = {n for module in modules.values() for n in getattr(module, "__all__", ())}
    assert not {*metamd.__all__, *metamd._HOME, *listed} - api
    assert not [n for n in metamd.__all__ if not inspect.getdoc(getattr(metamd, n))]


def test_the_api_page_is_what_the_package_says():
    module = benchmark("api", "scripts")
    assert module.PAGE.read_text() == module.page(), "run scripts/api.py"
    assert module.signature(metamd.load) == "(path_or_name)"


def test_pages_do_not_mention_what_is_kept_for_earlier_programs():
    """`prepare` is an alias, and belongs to the API reference alone."""
    found = [p.name for p in PAGES if re.search(r"metamd\.prepare|`prepare[`(]", p.read_text())]
    assert found == ["api.md"]


def test_every_guarantee_says_for_which_runs_it_is_and_where_it_fails():
    """In tables before any mathematics: nobody is to find out elsewhere that a statement is not about their run."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    tables = [line for line in page.splitlines() if line.startswith("| statement")]
    assert tables == ["| statement | which runs | assumes | probability | where it fails |"] * 2
    rows = [line for line in page.partition("## Where")[0].splitlines() if line.startswith("| ") and line not in tables]
    assert len(rows) == 7
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 800


def test_every_page_is_in_the_navigation_of_the_site():
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


def test_the_public_names_are_few_and_resolve():
    assert len(metamd.__all__) <= 39
    assert set(metamd.__all__) == {n for names in metamd._PUBLIC.values() for n in names} | set(metamd._SUBMODULES)
    assert all(getattr(metamd, n) is not None for n in dir(metamd))
    with pytest.raises(AttributeError, match="no attribute 'Adam'"):
        metamd.Adam  # noqa: B018


def test_citations_have_a_reference():
    known = set(re.findall(r"^- \*\*\[(\w+)\]\*\*", (ROOT / "docs" / "references.md").read_text(), re.MULTILINE))
    used = {key for path in sources() for key in CITATION.findall(path.read_text())}
    assert used <= known, f"no entry in docs/references.md for {sorted(used - known)}"
    assert len(known) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


PACKAGES = "|".join(p.name for p in (ROOT / "src" / "metamd").iterdir() if p.is_dir())


@pytest.mark.parametrize("page", ["paper.md", "architecture.md"])
def test_functions_named_by_a_page_exist(page):
    """Both map ideas to functions: each `metamd.x.y`, or `x.y` of a package x, is real."""
    named = re.findall(rf"`(?:metamd\.)?((?:{PACKAGES}|mirror_step|MetaMD)(?:\.\w+)*)", (ROOT / "docs" / page).read_text())
    assert len(named) > 10
    for path in named:
        thing = metamd
        for part in path.split("."):
            try:
                thing = getattr(thing, part)
            except AttributeError:
                thing = importlib.import_module(f"{thing.__name__}.{part}")


def benchmark(name, folder="benchmarks"):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_results_page_are_those_of_the_records():
    module = benchmark("results_page")
    page = "\n".join(path.read_text() for path in module.PAGES)
    costs = module.COSTS.read_text()
    assert module.written(costs) == costs, "run benchmarks/results_page.py"
    guarantees = module.GUARANTEES.read_text()
    assert module.certificates() in guarantees
    assert module.silent() in page
    assert module.written(guarantees.replace("| nothing |\n", "| something |\n")) == guarantees, (
        "run benchmarks/results_page.py"
    )
    sensitivity = benchmark("sensitivity")
    assert sensitivity.table(sensitivity.read()) in costs
    for name in ("aims", "published"):
        table = getattr(module, name)()
        assert table in page
        assert module.written(page.replace(table, table.replace("| ", "| 1", 1))) == page
    coordinates = benchmark("coordinates")
    assert coordinates.table(json.loads(coordinates.OUT.read_text())) in page
    assert module.written(page) == page, "run benchmarks/results_page.py"
    changed = page
    for name in module.MARKS.findall(page):
        changed = changed.replace(module.shown(name), module.shown(name).replace("0.", "1.", 1))
    assert module.written(changed) == page, "a figure that differs from the records goes unnoticed"
    readme = module.README.read_text()
    assert module.overview() in readme, "run benchmarks/results_page.py"
    assert module.written(readme.replace(" x, ahead", " times, ahead", 1)) == readme
