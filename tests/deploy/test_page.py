"""docs/deploy.md: its example runs, and its tables match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pfedlms.deploy.envelope import ENVELOPE_BYTES, RECORD_BYTES, Reason

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    command = [sys.executable, "-c", block.replace("tempfile.mkdtemp()", repr(str(tmp_path)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-0", "node-1", "node-2", "node-3", "server"]


def test_the_page_lists_every_reason_and_the_right_sizes() -> None:
    assert re.findall(r"^\| `(\w+)` \| ", PAGE.split("| a node refuses |")[1], re.MULTILINE) == [
        each.name.lower() for each in Reason
    ]
    assert f"adds {ENVELOPE_BYTES} bytes and {RECORD_BYTES} for each" in PAGE
