"""The log and the run directory of a server; commands for simulations read them, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet import CLIENTS, Fleet, Killed, make_config, own_data, serve_run

import pfedlms
from pfedlms.cli import main
from pfedlms.deploy import serve
from pfedlms.deploy.coordinator import RoundLog
from pfedlms.errors import QuorumError, RunDirectoryError, UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.runs import start_run
from pfedlms.experiment.store import RunDirectory

PARAMETERS = 64 * 12 + 12 + 12 * 10 + 10
AGAIN = "start the server again (./run.sh)"


def kill_after(config: Config, folder: Path, trips: int, data: dict[int, Any] | None = None) -> Fleet:
    """A run whose server is killed after so many trips."""

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if len(fleet.trips) == trips:
            raise Killed
        return handle(request)

    fleet = Fleet(config, folder, route, data=data or {})
    with pytest.raises(Killed):
        serve(config, fleet)
    return fleet


@pytest.fixture(params=[("pfedlms", False), ("fedavg", True)], ids=["partitioned", "own-data"])
def interrupted(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    """A run in `run` whose server was killed after three trips."""
    method, own = request.param
    data, node_data, _ = own_data() if own else ({}, {}, ())
    return kill_after(make_config(method, tmp_path / "run", data=data), tmp_path / "nodes", 3, node_data)


def test_an_unfinished_run_is_shown(interrupted: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert not (out / "summary.json").exists()
    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr()
    assert f"{PARAMETERS} parameters" in shown.out
    assert AGAIN in shown.err
    assert "resume" not in shown.err
    assert main(["show", str(out), "--json"]) == 0
    summary, last = json.loads(capsys.readouterr().out), RunDirectory(out).read_metrics()[-1]
    assert (summary["rounds"], summary["accuracy"]["final"]) == (last["round"], last["p_acc"])
    assert (summary["parameters"], summary["transport"]) == (PARAMETERS, last["transport"])
    assert main(["report", str(out), "-o", str(tmp_path / "r.html")]) == 0
    assert interrupted.config.method in (tmp_path / "r.html").read_text()


def test_a_run_that_failed_before_its_first_round_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run.sh` exits with 0 however a run ended."""
    config = make_config("fedavg", tmp_path / "run")
    with pytest.warns(UserWarning, match="left out"), pytest.raises(QuorumError):
        serve(config, Fleet(config, tmp_path / "nodes", lambda *_: None))
    capsys.readouterr()
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "0 rounds (failed): nothing measured" in capsys.readouterr().err


@pytest.mark.parametrize("own", [False, True], ids=["partitioned", "own-data"])
def test_a_run_before_its_first_trip_is_shown_and_cannot_be_resumed(
    own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that waits for its nodes has no checkpoint, and no column of samples before a node reported any."""
    out = tmp_path / "run"
    data, node_data, _ = own_data() if own else ({}, {}, ())
    kill_after(make_config("pfedlms", out, data=data), tmp_path / "nodes", 0, node_data)
    assert not (out / "checkpoint.pt").exists()
    assert main(["show", str(out), "--clients", "--data-dir", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert AGAIN in output.err
    assert not own or "train samples" not in output.out
    assert main(["resume", str(out)]) == 2
    assert AGAIN in capsys.readouterr().err


def test_models_are_not_exported(interrupted: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither during the run nor after it."""
    out, file = tmp_path / "run", str(tmp_path / "m")
    for _ in range(2):
        for which in (["--all", file], ["--client", "0", "-o", file], ["--global", "-o", file]):
            assert main(["export", str(out), *which]) == 2
            output = capsys.readouterr().err
            assert "models are on the nodes" in output
            assert "Node.model()" in output
            assert len(output.splitlines()) == 1
        with pytest.raises(UsageError, match="models are on the nodes"):
            pfedlms.export(out, file)
        interrupted.route = lambda client, request, handle: handle(request)
        assert serve_run(interrupted.config, interrupted)[0]["status"] == "finished"


def test_only_the_server_resumes_its_run(
    interrupted: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    checkpoint = (out / "checkpoint.pt").read_bytes()
    assert main(["resume", str(out)]) == 2
    output = capsys.readouterr().err
    assert "this is a run on nodes" in output
    assert AGAIN in output
    with pytest.raises(UsageError, match="this is a run on nodes"):
        pfedlms.resume(out, interrupted.data or None)
    with pytest.raises(RunDirectoryError, match="holds a run already; start the server again"):
        RunDirectory(out).create("")
    assert (out / "checkpoint.pt").read_bytes() == checkpoint

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pfedlms.experiment.store.write_atomically", fail)
    with pytest.raises(pfedlms.PfedlmsError, match="make room, then repeat the same command"):
        RunDirectory(out).save_checkpoint({})


def test_numbers_of_samples_are_those_reported_by_participants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, node_data, samples = own_data()
    out = tmp_path / "run"
    config = make_config("fedavg", out, data=data, train={"participation": 0.25, "rounds": 2})
    fleet = Fleet(config, tmp_path / "nodes", data=node_data)
    serve_run(config, fleet)
    # The last trip measures absent clients and is not part of the run.
    participants = {client for trip in fleet.trips[:-1] for client in trip}
    assert len(participants) < CLIENTS
    assert main(["show", str(out), "--clients", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["per_client"]
    assert [row["train samples"] for row in rows] == [samples[k] if k in participants else None for k in range(CLIENTS)]


def test_a_finished_run_has_a_report_and_offers_no_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("fedavg", tmp_path / "run", data={"validation": 0.2}, train={"patience": 3})
    serve_run(config, Fleet(config, tmp_path / "nodes"))
    assert main(["show", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().err
    assert "V-acc was highest" in output
    assert "export" not in output
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")]) == 0
    assert "Accuracy against bytes" in (tmp_path / "r.html").read_text()


def test_a_server_does_not_resume_a_simulation(tmp_path: Path) -> None:
    config = make_config("fedavg", tmp_path / "run")
    start_run(config)
    with pytest.raises(RunDirectoryError, match="does not fit"):
        serve(config, Fleet(config, tmp_path / "nodes"))
    assert not RunDirectory(tmp_path / "run").on_nodes
    (tmp_path / "run" / "summary.json").unlink()
    assert not RunDirectory(tmp_path / "run").on_nodes
    pfedlms.export(tmp_path / "run", tmp_path / "all")


def test_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "init", str(tmp_path / "f"), "--nodes", "2"]) == 0
    file = tmp_path / "f" / "app" / "pfedlms.toml"
    file.write_text(file.read_text() + "\n[trian]\nrounds = 3\n")
    assert main(["deploy", "check", str(tmp_path / "f"), "--server", "127.0.0.1:1"]) == 1
    assert "[trian]" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*is left out")
@pytest.mark.parametrize("every", [1, 2])
def test_the_log_has_one_line_for_each_round(every: int, tmp_path: Path) -> None:
    """Client 2 does not reply in the trip of round 2."""

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        return None if client == 2 and len(fleet.trips) == 2 else handle(request)

    config = make_config("sketchvote", tmp_path / "run", run={"evaluate_every": every, "timeout": 7.0})
    fleet, lines = Fleet(config, tmp_path / "nodes", route), list[str]()
    summary = serve(config, fleet, [RoundLog(lines.append)])
    assert lines[0] == "pfedlms: sketchvote on digits, 3 rounds"
    assert lines[-1].startswith("pfedlms: sketchvote on digits, 4 clients, 3 rounds: P-acc ")
    rounds = lines[1:-1]
    assert [line.partition(":")[0] for line in rounds] == ["round 1/3", "round 2/3", "round 3/3"]
    assert [re.findall(r"(\d) trained", line) for line in rounds] == [["4"], ["3"], ["4"]]
    for record in RunDirectory(tmp_path / "run").read_metrics():
        assert f"P-acc {record['p_acc']:5.2f} %" in rounds[record["round"] - 1]
    assert ["P-acc" in line for line in rounds] == [every == 1, True, True]
    assert "left out" not in rounds[0]
    assert rounds[1].endswith("; left out: 2: no reply within 7 s")
    counted_up = [int(found.replace(",", "")) for line in rounds for found in re.findall(r"([\d,]+) bytes up", line)]
    per_round = summary["bytes_per_round"]
    assert sum(counted_up) == round(3 * (per_round["up_payload"] + per_round["up_framing"]))
