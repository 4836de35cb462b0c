"""What a server writes: its log, and its run directory, read by the commands that read those of simulations."""

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


def broken_off(config: Config, folder: Path, trips: int, data: dict[int, Any] | None = None) -> Fleet:
    """A run of which so many trips are kept."""

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if len(fleet.trips) == trips:
            raise Killed
        return handle(request)

    fleet = Fleet(config, folder, route, data=data or {})
    with pytest.raises(Killed):
        serve(config, fleet)
    return fleet


@pytest.fixture(params=[("pfedlms", False), ("fedavg", True)], ids=["dealt", "own"])
def begun(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    """Three trips of a run in `run`."""
    method, own = request.param
    data, held, _ = own_data() if own else ({}, {}, ())
    return broken_off(make_config(method, tmp_path / "run", data=data), tmp_path / "nodes", 3, held)


def test_a_run_that_goes_on_is_shown_so_far(begun: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert not (out / "summary.json").exists()
    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr()
    assert f"{PARAMETERS} parameters" in shown.out
    assert AGAIN in shown.err
    assert "resume" not in shown.err
    assert main(["show", str(out), "--json"]) == 0
    told, last = json.loads(capsys.readouterr().out), RunDirectory(out).read_metrics()[-1]
    assert (told["rounds"], told["accuracy"]["final"]) == (last["round"], last["p_acc"])
    assert (told["parameters"], told["transport"]) == (PARAMETERS, last["transport"])
    assert main(["report", str(out), "-o", str(tmp_path / "r.html")]) == 0
    assert begun.config.method in (tmp_path / "r.html").read_text()


def test_a_run_that_failed_before_its_first_round_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run.sh` exits with 0 however a run ended."""
    config = make_config("fedavg", tmp_path / "run")
    with pytest.warns(UserWarning, match="left out"), pytest.raises(QuorumError):
        serve(config, Fleet(config, tmp_path / "nodes", lambda *_: None))
    capsys.readouterr()
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "0 rounds (failed): nothing measured" in capsys.readouterr().err


@pytest.mark.parametrize("own", [False, True], ids=["dealt", "own"])
def test_before_the_first_trip(own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that waits for its nodes has no checkpoint, and no column of samples where no node has said anything;
    nobody goes on with it as with a simulation."""
    out = tmp_path / "run"
    data, held, _ = own_data() if own else ({}, {}, ())
    broken_off(make_config("pfedlms", out, data=data), tmp_path / "nodes", 0, held)
    assert not (out / "checkpoint.pt").exists()
    assert main(["show", str(out), "--clients", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert AGAIN in said.err
    assert not own or "train samples" not in said.out
    assert main(["resume", str(out)]) == 2
    assert AGAIN in capsys.readouterr().err


def test_models_are_not_exported(begun: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither while the run goes on nor after it."""
    out, file = tmp_path / "run", str(tmp_path / "m")
    for _ in range(2):
        for which in (["--all", file], ["--client", "0", "-o", file], ["--global", "-o", file]):
            assert main(["export", str(out), *which]) == 2
            said = capsys.readouterr().err
            assert "models are on the nodes" in said
            assert "Node.model()" in said
            assert len(said.splitlines()) == 1
        with pytest.raises(UsageError, match="models are on the nodes"):
            pfedlms.export(out, file)
        begun.route = lambda client, request, handle: handle(request)
        assert serve_run(begun.config, begun)[0]["status"] == "finished"


def test_only_its_server_goes_on(
    begun: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    kept = (out / "checkpoint.pt").read_bytes()
    assert main(["resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert "this is a run on nodes" in said
    assert AGAIN in said
    with pytest.raises(UsageError, match="this is a run on nodes"):
        pfedlms.resume(out, begun.data or None)
    with pytest.raises(RunDirectoryError, match="holds a run already; start the server again"):
        RunDirectory(out).create("")
    assert (out / "checkpoint.pt").read_bytes() == kept

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pfedlms.experiment.store.write_atomically", full)
    with pytest.raises(pfedlms.PfedlmsError, match="make room, then repeat the same command"):
        RunDirectory(out).save_checkpoint({})


def test_samples_are_what_nodes_reported_and_none_of_who_was_never_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, held, samples = own_data()
    out = tmp_path / "run"
    config = make_config("fedavg", out, data=data, train={"participation": 0.25, "rounds": 2})
    fleet = Fleet(config, tmp_path / "nodes", data=held)
    serve_run(config, fleet)
    # The last trip asks how those do who were away, and is no part of the run.
    asked = {client for trip in fleet.trips[:-1] for client in trip}
    assert len(asked) < CLIENTS
    assert main(["show", str(out), "--clients", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["per_client"]
    assert [row["train samples"] for row in rows] == [samples[k] if k in asked else None for k in range(CLIENTS)]


def test_a_finished_run_has_a_page_and_its_best_models_are_not_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("fedavg", tmp_path / "run", data={"validation": 0.2}, train={"patience": 3})
    serve_run(config, Fleet(config, tmp_path / "nodes"))
    assert main(["show", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "V-acc was highest" in said
    assert "export" not in said
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")]) == 0
    assert "Accuracy against bytes" in (tmp_path / "r.html").read_text()


def test_a_simulation_is_none(tmp_path: Path) -> None:
    """And stays one, though a server tries to go on with it."""
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
def test_a_log_has_a_line_a_round(every: int, tmp_path: Path) -> None:
    """Client 2 is away in the trip of round 2."""

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
