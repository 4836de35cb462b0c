"""The structure of the package: allowed imports, public names, and that every test file has tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pfedlms

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pfedlms"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

# From the ground up; a module imports from its own level and those below.
LEVELS = (
    {"errors", "rng", "settings", "train_settings", "checks", "files", "backend"},
    {"cohort", "data", "models", "sketch", "pull", "step", "quantise", "aggregate", "wire"},
    {"methods"},
    {"engine"},
    {"report"},
    {"experiment"},
    {"deploy", "tracking"},
    {"flower"},
    {"cli"},
    {"__init__", "__main__"},
)
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}


ALLOWED = {
    "plugins.py": {"import_module"},  # modules of the user's own, by --import
    "launcher.py": {"import_module"},  # Flower's own, whose names it has to follow
    "superlink.py": {"import_module"},
    "supernode.py": {"import_module"},
}


def part(file: Path) -> str:
    """The part of the package a file belongs to: `methods` for methods/fedavg.py, `rng` for rng.py."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[str]:
    """Full names of all modules imported anywhere in a file, also inside functions; `from a import b` gives a.b too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            found += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def parts_imported(file: Path) -> set[str]:
    names = imports(TREES[file])
    inside = [name.split(".")[1] for name in names if name.startswith("pfedlms.")]
    return {name for name in inside if name in LEVEL or (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()}


def relative_path(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_every_part_has_a_level() -> None:
    assert {part(file) for file in FILES} == set(LEVEL)


def test_imports_point_to_the_same_or_a_lower_level() -> None:
    for file in FILES:
        upwards = {name for name in parts_imported(file) if LEVEL[name] > LEVEL[part(file)]}
        assert not upwards, f"{relative_path(file)} imports {sorted(upwards)}"


def test_no_module_is_loaded_by_a_string() -> None:
    """The check above would not find such imports."""
    for file in FILES:
        named = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(TREES[file])}
        loaded = named & {"import_module", "__import__", "exec", "find_spec"} - ALLOWED.get(file.name, set())
        assert not loaded, relative_path(file)


def test_the_import_check_finds_known_imports() -> None:
    assert {"methods", "data"} <= parts_imported(PACKAGE / "engine" / "client.py")
    assert "report" in parts_imported(PACKAGE / "cli" / "train.py")  # imported where it is needed


def test_methods_do_not_import_flower_or_triton() -> None:
    for file in (PACKAGE / "methods").glob("*.py"):
        named = {name.split(".")[0] for name in imports(TREES[file])}
        assert not named & {"flwr", "triton"}, relative_path(file)


def test_public_names_are_pinned() -> None:
    assert sorted(pfedlms.__all__) == [
        "Callback", "Config", "PfedlmsError", "Problem", "Run", "RunInfo", "Study", "__version__", "aggregate",
        "bits_table", "check_method", "compare", "data", "export", "load", "load_config", "load_dataset",
        "method_of", "methods", "models", "prepare", "pull", "quantise", "resume", "run", "same_run", "sketch",
        "step", "study", "sweep", "tracking", "variant", "wire",
    ]  # fmt: skip
    assert all(hasattr(pfedlms, name) for name in pfedlms.__all__)


PAPERS = sorted((ROOT / "papers").rglob("*.py"))
PIECES = {"aggregate", "data", "engine", "errors", "methods", "models", "pull", "quantise", "report", "settings",
          "sketch", "step", "train_settings", "wire"}  # fmt: skip
"""Parts of the package that others may build on module by module; all else is public by its name in `pfedlms` alone."""


@pytest.mark.parametrize("file", PAPERS, ids=relative_path)
def test_papers_use_only_public_names(file: Path) -> None:
    """Names of `pfedlms`, or names without underscore of the pieces; and no private attribute of anything."""
    private = re.compile("_[^_]")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("pfedlms.")]
        elif isinstance(node, ast.ImportFrom) and node.module == "pfedlms":
            assert {alias.name for alias in node.names} <= set(pfedlms.__all__)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("pfedlms."):
            assert str(node.module).split(".")[1] in PIECES, node.module
            assert not [alias.name for alias in node.names if private.match(alias.name)]
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", "")
            assert owner == "self" or not private.match(node.attr), node.attr
            assert owner != "pfedlms" or node.attr in pfedlms.__all__, node.attr


def test_importing_the_package_loads_no_extra() -> None:
    """In a fresh interpreter: neither plots nor Flower nor a GPU's compiler are loaded."""

    def loaded_by(work: str) -> set[str]:
        script = f"import sys, {work}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
        return set(done.stdout.split())

    assert "torch" not in loaded_by("pfedlms, pfedlms.cli"), "help must not wait for PyTorch"
    everything = loaded_by("pfedlms.experiment.api, pfedlms.cli.lists, pfedlms.report.figures, pfedlms.report.page")
    assert {"pfedlms", "torch", "numpy"} <= everything
    extras = "altair vl_convert jinja2 pyarrow PIL flwr sklearn pandas pytest triton"
    assert not everything & set(extras.split())


ABSOLUTE = re.compile(r"(?<![\w.:/<])/(?:home|root|work|usr|tmp|opt|mnt|data|Users|var|private)/\w|\b[A-Za-z]:\\\\?\w")


def test_no_file_has_a_path_of_one_machine() -> None:
    for file in FILES:
        texts = [node.value for node in ast.walk(TREES[file]) if isinstance(node, ast.Constant)]
        found = [text for text in texts if isinstance(text, str) and ABSOLUTE.search(text)]
        assert not found, relative_path(file)


def test_the_path_check_finds_known_paths() -> None:
    for path in ("/home/me/data", f"see /{'work'}/shared", "C:\\Users\\me", "/tmp/x"):
        assert ABSOLUTE.search(path), path
    for harmless in ("a/b", "https://example.org/data/x", "m / N", "../shared/data", "train/test", "1/√m"):
        assert not ABSOLUTE.search(harmless), harmless


def test_every_module_has_a_docstring() -> None:
    assert [relative_path(file) for file in FILES if not ast.get_docstring(TREES[file])] == []


def test_every_test_file_has_tests_with_unique_names() -> None:
    """By its names, so that it takes no import: functions test_… at the top. pytest imports files by name alone."""
    assert len({file.name for file in TESTS}) == len(TESTS)
    for file in TESTS:
        body = ast.parse(file.read_text(encoding="utf-8")).body
        names = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert names, relative_path(file)
        assert len(set(names)) == len(names), relative_path(file)  # a second one of that name would hide the first
