"""One simulation in several processes: equal bits for any number of processes, and what happens when one dies. The
processes are real and take seconds to start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import stored_metrics

import pfedlms
from factories import same
from pfedlms.cli import main
from pfedlms.errors import UsageError

RUNS = """
import sys, pfedlms
from pfedlms.engine import participation
common = dict(clients=7, rounds=4, local_steps=3, evaluate_every=2, seed=3)
some = dict(participation=0.6, lost=0.1, quorum=0.1)
out = sys.argv[1]
done = [pfedlms.run(method="pfedlms", out=f"{out}/all", validation=0.2, **common)]
done.append(pfedlms.run(method="fedavg", out=f"{out}/fedavg", momentum=0.5, max_weight=0.6, **some, **common))
done.append(pfedlms.run(method="sketchvote", out=f"{out}/tracked", **some, **common))
participation.MAX_MEMORY_BYTES = 0
done.append(pfedlms.run(method="pfedlms", out=f"{out}/in_file", checkpoint_every=1, **some, **common))
assert [each.summary["rounds"] for each in done] == [4, 4, 4, 4]
print(len(done[2].models), "models")
"""
KILL_RANK_1 = """
import os, signal
from pfedlms.engine.client import LocalWorker
if os.environ.get("RANK") == "1" and "DIES" in os.environ:
    update = LocalWorker.local_update
    def local_update(self, method, cohort, phase):
        if phase == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, method, cohort, phase)
    LocalWorker.local_update = local_update
"""


def start_ranks(count: int, *command: str) -> list[subprocess.Popen[str]]:
    """Start processes with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if count > 1 else {}
    return [
        subprocess.Popen(
            [sys.executable, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **several, **({"RANK": str(rank)} if several else {})},
        )
        for rank in range(count)
    ]  # fmt: skip


def wait_for(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    found = [each.communicate(timeout=600) for each in processes]
    assert [each.returncode for each in processes] == [0] * len(found), found
    return found


def measurements(run: Path) -> list[dict[str, Any]]:
    summary = json.loads((run / "summary.json").read_text())
    ends = {key: summary[key] for key in ("everyone", "total_bytes", "rejected", "rounds", "status")}
    return [*stored_metrics(run), ends]


def federation_state(run: Path) -> dict[str, Any]:
    """State of server and clients in a checkpoint, without the places of states that are stored in a file."""
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)["federation"]
    return {key: value for key, value in state.items() if key != "away" or "places" not in value}


def test_any_number_of_processes_gives_equal_bits(tmp_path: Path) -> None:
    """All clients and some, with lost messages, a tracked model and limited weights; states in memory and in a file."""
    for count in (1, 2, 3):
        (output, _), *others = wait_for(start_ranks(count, "-c", RUNS, str(tmp_path / str(count))))
        assert output == "7 models\n"
        assert all(each[0] == output for each in others)  # every process has the results
    for name in ("all", "fedavg", "tracked", "in_file"):
        for count in ("2", "3"):
            assert measurements(tmp_path / count / name) == measurements(tmp_path / "1" / name)
            assert same(federation_state(tmp_path / count / name), federation_state(tmp_path / "1" / name))


def test_a_run_ends_when_a_process_dies_and_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(KILL_RANK_1)
    run = ["-m", "pfedlms", "run", "--method", "pfedlms", "--rounds", "8", "--clients", "6", "--local-steps", "2"]
    run += ["--set", "train.participation=0.5", "--set", "run.checkpoint_every=2", "--quiet"]
    expected, killed = tmp_path / "expected", tmp_path / "killed"
    wait_for(start_ranks(1, *run, "--out", str(expected)))
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*torchrun, *run, "--import", "dies", "--out", str(killed)],
        text=True, capture_output=True, timeout=600, env={**os.environ, **path, "DIES": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "error: rank 1 of 2 ended in the middle of the run" in done.stderr
    assert json.loads((killed / "summary.json").read_text())["status"] == "failed"
    assert federation_state(killed)["rounds_played"] in (2, 4)
    outputs = wait_for(start_ranks(3, "-m", "pfedlms", "resume", str(killed), "--quiet"))
    assert outputs[0][0]
    assert [output + errors for output, errors in outputs[1:]] == ["", ""]  # only the first prints
    assert measurements(killed) == measurements(expected)
    assert same(federation_state(killed), federation_state(expected))


@pytest.fixture
def second_process_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun gives a process."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)


def test_newcomers_are_refused_with_several_processes(second_process_of_two: None) -> None:
    with pytest.raises(UsageError, match=r"data\.newcomers: .* without torchrun"):
        pfedlms.run(method="fedavg", clients=10, rounds=1, newcomers=0.2)


def test_a_process_that_cannot_start_prints_its_error(second_process_of_two: None, capsys: Any) -> None:
    """Its data may be missing on its own machine; everything else is printed by the first process only."""
    assert main(["run", "--dataset", "file:missing.npz"]) == 2
    shown, err = capsys.readouterr()
    assert (shown, err.startswith("rank 1: error: "), "missing.npz" in err) == ("", True, True)
    assert main(["methods"]) == 0
    assert capsys.readouterr() == ("", "")
