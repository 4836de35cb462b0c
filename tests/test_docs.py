"""What the pages show runs as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("page", "lines", "reached"), [("README.md", 10, 0), ("docs/methods.md", 50, 90), ("docs/data.md", 14, 0)]
)
def test_the_example_of_a_page_is_short_and_runs(page: str, lines: int, reached: float, tmp_path: Path) -> None:
    """And, where it is a method, learns."""
    (block,) = python_blocks(page)
    assert len([line for line in block.splitlines() if line.strip()]) <= lines
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example that prints nothing shows nothing"
    assert not list(tmp_path.iterdir()), "examples leave nothing behind"
    if reached:
        assert float(re.findall(r"'max': ([\d.]+)", done.stdout)[0]) > reached, done.stdout


def test_the_blocks_of_your_own_study_run_one_after_the_other(tmp_path: Path) -> None:
    """In one process: Python as it stands, commands through the command line's own entry."""
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    script = ["from pfedlms.cli import main"]
    blocks = re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    for kind, block in blocks:
        if kind == "python":
            script.append(block)
            continue
        for line in block.strip().splitlines():
            program, *arguments = shlex.split(line)
            assert program == "pfedlms", line
            script.append(f"assert main({arguments!r}) == 0, {line!r}")
    command = [sys.executable, "-c", "\n".join(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "weather.npz",
        "runs",
        "models",
        "station-3.pt",
        "station-3.json",
        "shared.pt",
        "shared.json",
    }


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_scripts_in_examples_run(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search("%|metric", done.stdout), "each script prints what it reached"


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_named_in_the_pages_exists() -> None:
    from pfedlms.cli.lists import settings

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
