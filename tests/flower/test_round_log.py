"""A log has a line a round, with all one wants to know of it; and the extra is named where it is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import Fleet, configured

from pfedlms.deploy import serve
from pfedlms.deploy.coordinator import RoundLog
from pfedlms.experiment.store import RunDirectory


@pytest.mark.filterwarnings("ignore:.*is left out")
@pytest.mark.parametrize("every", [1, 2])
def test_a_line_a_round(every: int, tmp_path: Path) -> None:
    """Client 2 is away in the trips of round 2."""
    trips = 0

    def way(client: int, request: bytes, handle: object) -> bytes | None:
        return None if client == 2 and trips == 2 else handle(request)  # type: ignore[operator]

    config = configured("sketchvote", tmp_path / "run", run={"evaluate_every": every, "timeout": 7.0})
    fleet = Fleet(config, tmp_path / "nodes", way=way)
    send = fleet.send

    def counted(requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        nonlocal trips
        replies = send(requests, timeout)
        trips += 1
        return replies

    fleet.send = counted  # type: ignore[method-assign]
    lines: list[str] = []
    summary = serve(config, fleet, [RoundLog(lines.append)])
    assert lines[0] == "pfedlms: sketchvote on digits, 3 rounds"
    assert lines[-1].startswith("pfedlms: sketchvote on digits, 4 clients, 3 rounds: P-acc ")
    rounds = lines[1:-1]
    assert [line.partition(":")[0] for line in rounds] == ["round 1/3", "round 2/3", "round 3/3"]
    assert [re.findall(r"(\d) trained", line) for line in rounds] == [["4"], ["3"], ["4"]]
    metrics = RunDirectory(tmp_path / "run").read_metrics()
    for record in metrics:
        assert f"P-acc {record['p_acc']:5.2f} %" in rounds[record["round"] - 1]
    assert ["P-acc" in line for line in rounds] == [every == 1, True, True]
    assert "left out" not in rounds[0]
    assert rounds[1].endswith("; left out: 2: no reply within 7 s")
    counted_up = [int(found.replace(",", "")) for line in rounds for found in re.findall(r"([\d,]+) bytes up", line)]
    per_round = summary["bytes_per_round"]
    assert sum(counted_up) == round(3 * (per_round["up_payload"] + per_round["up_framing"]))


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['flwr'] = None\n"
        "import pfedlms.flower as flower\n"
        "for app in (flower.server, flower.client):\n"
        "    try: app('pfedlms.toml')\n"
        "    except flower.UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("pip install 'pfedlms[flower]'") == 2
