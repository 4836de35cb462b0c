"""Nodes and servers that are killed at any moment and started again: the run is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import Fleet, Killed, check_same_run, make_config, serve_run

from pfedlms import files
from pfedlms.deploy import Node, serve
from pfedlms.experiment.callbacks import Callback
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import RunDirectory

METHODS = ("pfedlms", "sketchvote", "fedavg", "obda")


def call_before(act: Callable[[], None], operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with a call before it."""

    def run(*given: Any, **named: Any) -> Any:
        act()
        return operation(*given, **named)

    return run


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", ["request", "write", "fsync", "replace", "reply"])
def test_a_node_killed_in_every_request_continues(
    method: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Client 1 is killed once in each of its requests, started again and sent the request again."""
    armed, kills = {"now": False}, list[bytes]()

    def kill_once() -> None:
        if armed["now"]:
            armed["now"] = False
            raise Killed

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client != 1:
            return handle(request)
        armed["now"] = at in ("write", "fsync", "replace")
        try:
            if at == "request":
                raise Killed
            reply = handle(request)
            if at == "reply":
                raise Killed
        except Killed:
            armed["now"] = False
            kills.append(request)
            fleet.close(1)
            again = handle(request)
            assert at != "reply" or again == reply
            return again
        return reply

    config = make_config(method, tmp_path / "run", data={"validation": 0.2})
    fleet = Fleet(config, tmp_path / "nodes", route)
    monkeypatch.setattr(files.os, "fsync", call_before(kill_once, os.fsync) if at == "fsync" else os.fsync)
    monkeypatch.setattr(files.os, "replace", call_before(kill_once, os.replace) if at == "replace" else os.replace)
    if at == "write":
        monkeypatch.setattr(torch, "save", call_before(kill_once, torch.save))
    serve_run(config, fleet)
    assert len(kills) == len(fleet.trips)
    check_same_run(fleet)


def test_a_node_killed_during_a_write_has_the_state_before_or_after_the_request(tmp_path: Path) -> None:
    """A process kills itself at a file operation of the handler; afterwards the reply to the request is the same."""
    config = make_config("sketchvote", tmp_path / "run")
    fleet = Fleet(config, tmp_path / "nodes")
    serve_run(config, fleet)
    requests = [trip[2] for trip in fleet.trips]
    ends = set()
    for moment in range(0, 60, 9):
        folder = tmp_path / str(moment)
        for number, (request, reply) in enumerate(requests):
            child = os.fork()
            if not child:
                _handle_and_kill(config, folder, request, moment)
            ends.add(os.waitpid(child, 0)[1])
            with Node(config, 2, folder) as node:
                assert node.state.trip in (number - 1, number)
                assert node.handle(request) == reply
    assert ends == {signal.SIGKILL, 0}


def _handle_and_kill(config: Config, folder: Path, request: bytes, moment: int) -> None:
    left = [moment]

    def count() -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    try:
        for name in ("fsync", "replace", "open", "close"):
            setattr(files.os, name, call_before(count, getattr(os, name)))
        files._RawFile.write = call_before(count, files._RawFile.write)  # type: ignore[method-assign]
        Node(config, 2, folder).handle(request)
        os._exit(0)
    finally:
        os._exit(1)


def test_a_server_killed_in_the_last_trip_can_extend_the_run(tmp_path: Path) -> None:
    """It repeats the requests of that trip, then plays the added rounds."""

    def kill(requests: dict[int, bytes]) -> None:
        if len(fleet.trips) == 4:
            raise Killed

    fleet = Fleet(make_config("sketchvote", tmp_path / "run"), tmp_path / "nodes", after_trip=kill)
    with pytest.raises(Killed):
        serve(fleet.config, fleet)
    extended = make_config("sketchvote", tmp_path / "run", train={"rounds": 5})
    serve_run(extended, fleet)
    assert fleet.trips[3] == fleet.trips[4]
    check_same_run(fleet, extended)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", ["before_trip", "after_trip", "checkpoint", "checkpointed"])
def test_a_server_killed_in_every_trip_continues(
    method: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Killed before requests are sent, after replies arrive, during the write of a checkpoint, and after it: started
    again, it repeats its requests, nodes repeat their replies, and nothing is counted twice."""
    config = make_config(method, tmp_path / "run", train={"participation": 0.75})
    seen: set[Any] = set()
    saves: list[Any] = []
    replace = os.replace

    def once(requests: dict[int, bytes]) -> None:
        if tuple(requests.items()) not in seen:
            seen.add(tuple(requests.items()))
            raise Killed

    fleet = Fleet(config, tmp_path / "nodes", **({at: once} if at.endswith("trip") else {}))

    def replaced(source: Any, target: Any) -> None:
        if Path(target).name != "checkpoint.pt" or not at.startswith("checkpoint"):
            replace(source, target)
            return
        saves.append(target)
        if at == "checkpointed" or len(saves) % 2 == 0:  # every other one, so that the run continues
            replace(source, target)
        if at == "checkpointed" or len(saves) % 2 == 1:
            raise Killed

    monkeypatch.setattr(files.os, "replace", replaced)
    starts = 1
    while True:
        try:
            serve(config, fleet)
            break
        except Killed:
            starts += 1
            assert starts < 100
    assert starts > 4
    check_same_run(fleet)


@pytest.mark.parametrize(
    ("number", "end", "code"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_a_server_stopped_by_a_signal_resumes(
    number: int, end: type[BaseException], code: int | None, tmp_path: Path
) -> None:
    """A signal in each trip, and two in the second: the summary says `interrupted`, and the run resumes."""
    config = make_config("pfedlms", tmp_path / "run")
    statuses: list[str] = []

    def stop(requests: dict[int, bytes]) -> None:
        if len(fleet.trips) % 2:
            signal.raise_signal(number)

    fleet = Fleet(config, tmp_path / "nodes", after_trip=stop)

    class RecordStatus(Callback):
        def on_end(self, run: Any, summary: Any) -> None:
            statuses.append(summary["status"])
            if len(statuses) == 2:
                signal.raise_signal(number)  # as engines that do not wait send a second signal

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    for trip in range(7):
        with pytest.raises(end) as raised:
            serve(config, fleet, [RecordStatus()])
        assert getattr(raised.value, "code", None) == code
        summary = RunDirectory(Path(config.run.out)).read_summary()
        assert summary is not None
        rounds = (trip - 1) // 2 * (trip > 0)  # two trips for each round after the first
        assert (summary["status"], summary["rounds"], summary["everyone"]) == ("interrupted", rounds, None)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert statuses == ["interrupted"] * 7
    assert serve(config, fleet, [RecordStatus()])["status"] == "finished"
    check_same_run(fleet)


def test_an_earlier_signal_handler_is_still_called(tmp_path: Path) -> None:
    config = make_config("fedavg", tmp_path / "run")
    handled: list[int] = []
    fleet = Fleet(config, tmp_path / "nodes", before_trip=lambda requests: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        with pytest.raises(SystemExit):
            serve(config, fleet)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [signal.SIGTERM]
    assert fleet.trips == []
