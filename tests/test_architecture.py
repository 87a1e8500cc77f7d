"""The twelve packages: each imports only from those before it, and the optimiser needs three of them alone."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = importlib.util.spec_from_file_location("architecture", ROOT / "scripts" / "architecture.py")
architecture = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(architecture)
SOURCE, ORDER = architecture.SOURCE, architecture.ORDER


def upward(source: Path) -> set[str]:
    """The imports from later packages, also those inside functions, as "file -> package"."""
    # `import metamd` and its public names are refused too: they could come from any package.
    return {
        f"{file} -> {target}"
        for file, package, target in architecture.edges(source)
        if target not in ORDER[: ORDER.index(package)]
    }


def test_packages_import_only_from_those_before_them():
    assert upward(SOURCE) == set()


def test_the_figure_shows_the_imports_as_they_are():
    assert architecture.TEXT.read_text() == architecture.as_text(), "run scripts/architecture.py"


def test_the_law_rejects_upward_imports(tmp_path):
    for package in ORDER:
        (tmp_path / package).mkdir()
    (tmp_path / "__init__.py").write_text("from metamd.cli import main\n")
    (tmp_path / "optimiser" / "fine.py").write_text("import torch\nfrom metamd.files import learned\nfrom . import other\n")
    assert upward(tmp_path) == set()
    broken = {
        "potentials/direct.py": ("from metamd.files.learned import load\n", "files"),
        "inner/hidden.py": ("def f():\n    from metamd.learning import meta\n    return meta\n", "learning"),
        "rivals/whole.py": ("import metamd.comparison.compare\n", "comparison"),
        "tasks/relative.py": ("from ..experiments import pieces\n", "experiments"),
        "data/public.py": ("from metamd import meta_train\n", "meta_train"),
        "comparison/everything.py": ("import metamd\n", "metamd"),
    }
    for file, (text, _) in broken.items():
        (tmp_path / file).write_text(text)
    assert upward(tmp_path) == {f"{file} -> {package}" for file, (_, package) in broken.items()}


def test_only_the_packages_lie_directly_under_the_source_folder():
    files = {"__init__.py", "__main__.py", "_version.py", "py.typed"}
    assert {p.name for p in SOURCE.iterdir() if p.name != "__pycache__"} == files | set(ORDER)


def test_the_optimiser_reaches_potentials_files_and_optimiser_alone():
    program = (
        "import importlib, pkgutil, sys, metamd.optimiser as package\n"
        "for m in pkgutil.walk_packages(package.__path__, 'metamd.optimiser.'): importlib.import_module(m.name)\n"
        "print(*{m.split('.')[1] for m in sys.modules if m.startswith('metamd.')})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"_version"} == {"potentials", "files", "optimiser"}
