"""Code of the documentation, examples and benchmarks runs; links and settings in the documentation exist."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from pfedlms.cli.lists import settings

ROOT = Path(__file__).parent.parent


def test_pages_name_tests_that_exist() -> None:
    """`test_a_false_reply…` is the beginning of a name."""
    there = {file.stem for file in (ROOT / "tests").rglob("test_*.py")}
    for file in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"\b(test_[a-z_]+)\b", page.read_text(encoding="utf-8")):
            assert any(each.startswith(name) for each in there), f"{page.name}: {name}"


def python_block(page: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return block


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a script in an empty folder, for four rounds, and returns its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])

    def run(script: str) -> str:
        few = re.sub(r"""(\brounds(?: |=|: int = |": ))\d+""", r"\g<1>4", script)
        assert few != script or "rounds" not in script
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a sweep whose best cell is after so few rounds at an edge
            exec(compile(few, "a page", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(("page", "lines"), [("README.md", 10), ("docs/data.md", 14)])
def test_the_example_of_a_page_is_short_and_runs(page: str, lines: int, tmp_path: Path, run_script: Any) -> None:
    block = python_block(page)
    assert len([line for line in block.splitlines() if line.strip()]) <= lines
    assert run_script(block).strip(), "an example prints its results"
    assert not list(tmp_path.iterdir()), "examples leave nothing behind"


def test_the_method_of_the_methods_page_is_short_and_learns() -> None:
    """In a separate process, because the method registers itself."""
    block = python_block("docs/methods.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 50
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"'max': ([\d.]+)", done.stdout)[0]) > 90, done.stdout


def test_the_blocks_of_the_study_page_run_in_order(tmp_path: Path, run_script: Any) -> None:
    """Commands are called by `pfedlms.cli.main`."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "docs" / "study.md").read_text(encoding="utf-8"), re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    script = []
    for kind, block in blocks:
        lines = [] if kind == "python" else block.strip().splitlines()
        script += [block] if kind == "python" else []
        script += [f"assert main(shlex.split({line.removeprefix('pfedlms ')!r})) == 0" for line in lines]
        assert all(line.startswith("pfedlms ") for line in lines)
    run_script("\n".join(["import shlex\nfrom pfedlms.cli import main", *script]))
    assert {path.name for path in tmp_path.iterdir()} == {
        "weather.npz", "runs", "models", "station-3.pt", "station-3.json", "shared.pt", "shared.json",
    }  # fmt: skip


def test_the_blocks_of_the_api_page_print_their_comments(run_script: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL)
    shown = run_script("\n".join(blocks)).splitlines()
    assert shown == ["[136, 136, 136]", "Vote(size 256, thresholds 7, 3 clients of weight 300)"]


def test_the_api_page_has_the_right_signatures() -> None:
    calls = re.findall(
        r"^\| `([\w.]+)(\(.*?\))` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert calls
    for name, shown in calls:
        kinds = inspect.signature(resolve_name(f"pfedlms.{name}")).parameters.values()
        own = [kind.replace(annotation=kind.empty) for kind in kinds if kind.name != "self"]
        assert str(inspect.Signature(own)) == shown, name


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_scripts_in_examples_run(script: str, run_script: Any) -> None:
    shown = run_script((ROOT / "examples" / script).read_text(encoding="utf-8"))
    assert re.search("%|metric", shown), "each script prints its results"


def test_every_link_has_a_target() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_named_in_the_pages_exists() -> None:
    known = {row["setting"] for row in settings()} | {"method.name"}
    sections = {name.split(".")[0] for name in known}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for section, key in re.findall(
            r"\b(data|model|train|method|run)\.([a-z_]+)=", page.read_text(encoding="utf-8")
        ):
            assert section in sections
            assert f"{section}.{key}" in known, f"{page.name}: {section}.{key}"
    study = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:data|model|train|method|run)\.[a-z_]+)`", study))
    assert named
    assert named <= known


BENCHMARKS = ROOT / "benchmarks"
SEPARATE = {"peers", "soak", "soak_checks", "soak_samples", "doors", "doors_end_to_end", "gate_cost", "mutations"}
"""Benchmarks that need another environment."""


def test_benchmarks_import() -> None:
    """In a separate process, because some benchmarks register methods."""
    names = sorted({file.stem for file in BENCHMARKS.glob("*.py")} - SEPARATE)
    assert len(names) > 20
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "engine.py --model dnn --clients 3 --samples 40 --steps 2 --batch 8 --repeats 1 --device cpu --methods zsign",
        "growth.py --method local --clients 4 --participants 2 --steps 2 --batch 8 --rounds 1 --warm-up 1 "
        "--per-client 20 --shape 1,8,8 --device cpu",
    ],
)
def test_a_small_benchmark_runs(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
