"""Nodes and servers that are killed, at every moment that matters, and started again: the same run."""

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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", ["request", "write", "fsync", "replace", "reply"])
def test_a_node_killed_in_every_request(
    method: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Client 1 dies once in each of its requests, is started again and sent the request again."""
    armed = {"now": False}

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if armed["now"]:
                armed["now"] = False
                raise Killed
            return operation(*given, **named)

        return run

    kills = []

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client != 1:
            return handle(request)
        armed["now"] = at in ("write", "fsync", "replace")
        try:
            if at == "request":
                raise Killed
            said = handle(request)
            if at == "reply":
                raise Killed
        except Killed:
            armed["now"] = False
            kills.append(request)
            fleet.close(1)
            again = handle(request)
            assert at != "reply" or again == said
            return again
        return said

    config = make_config(method, tmp_path / "run")
    fleet = Fleet(config, tmp_path / "nodes", route)
    monkeypatch.setattr(files.os, "fsync", dying(os.fsync) if at == "fsync" else os.fsync)
    monkeypatch.setattr(files.os, "replace", dying(os.replace) if at == "replace" else os.replace)
    if at == "write":
        monkeypatch.setattr(torch, "save", dying(torch.save))
    serve_run(config, fleet)
    assert len(kills) == len(fleet.trips)
    check_same_run(fleet)


def test_kill_9_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """A process of its own that ends itself at each file operation of the handler: what is left is the state before the
    request or the one after it, and the answer to the request is the same."""
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
                _handle_and_die(config, folder, request, moment)
            ends.add(os.waitpid(child, 0)[1])
            with Node(config, 2, folder) as node:
                assert node.state.trip in (number - 1, number)
                assert node.handle(request) == reply
    assert ends == {signal.SIGKILL, 0}


def _handle_and_die(config: Config, folder: Path, request: bytes, moment: int) -> None:
    left = [moment]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return operation(*given, **named)

        return run

    try:
        for name in ("fsync", "replace", "open", "close"):
            setattr(files.os, name, counted(getattr(os, name)))
        files._RawFile.write = counted(files._RawFile.write)  # type: ignore[method-assign]
        Node(config, 2, folder).handle(request)
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_in_the_last_trip_and_prolonged(tmp_path: Path) -> None:
    """What nodes have done is asked for again as it was, and only then the rounds that were added."""

    def after(requests: dict[int, bytes]) -> None:
        if len(fleet.trips) == 4:
            raise Killed

    fleet = Fleet(make_config("sketchvote", tmp_path / "run"), tmp_path / "nodes", after=after)
    with pytest.raises(Killed):
        serve(fleet.config, fleet)
    longer = make_config("sketchvote", tmp_path / "run", train={"rounds": 5})
    serve_run(longer, fleet)
    assert fleet.trips[3] == fleet.trips[4]
    check_same_run(fleet, longer)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", ["before", "after", "checkpoint", "checkpointed"])
def test_a_server_killed_in_every_trip(
    method: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Before requests leave, after replies came, while a checkpoint is written, and once it is: started again, it sends
    what it had sent, nodes reply what they had replied, and nothing counts twice."""
    config = make_config(method, tmp_path / "run", train={"participation": 0.75})
    seen: set[Any] = set()
    saves: list[Any] = []
    replace = os.replace

    def once(requests: dict[int, bytes]) -> None:
        if tuple(requests.items()) not in seen:
            seen.add(tuple(requests.items()))
            raise Killed

    fleet = Fleet(config, tmp_path / "nodes", **({at: once} if at in ("before", "after") else {}))

    def replaced(source: Any, target: Any) -> None:
        if Path(target).name != "checkpoint.pt" or not at.startswith("checkpoint"):
            replace(source, target)
            return
        saves.append(target)
        if at == "checkpointed" or len(saves) % 2 == 0:  # else it would never go on
            replace(source, target)
        if at == "checkpointed" or len(saves) % 2 == 1:
            raise Killed

    monkeypatch.setattr(files.os, "replace", replaced)
    lives = 1
    while True:
        try:
            serve(config, fleet)
            break
        except Killed:
            lives += 1
            assert lives < 100
    assert lives > 4
    check_same_run(fleet)


@pytest.mark.parametrize(
    ("number", "end", "code"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_a_server_asked_to_stop(number: int, end: type[BaseException], code: int | None, tmp_path: Path) -> None:
    """In the middle of each trip, and twice in the second: its summary says so, and it goes on."""
    config = make_config("pfedlms", tmp_path / "run")
    said: list[str] = []

    def after(requests: dict[int, bytes]) -> None:
        if len(fleet.trips) % 2:
            signal.raise_signal(number)

    fleet = Fleet(config, tmp_path / "nodes", after=after)

    class Told(Callback):
        def on_end(self, run: Any, summary: Any) -> None:
            said.append(summary["status"])
            if len(said) == 2:
                signal.raise_signal(number)  # as engines do that lose patience

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    for trip in range(7):
        with pytest.raises(end) as raised:
            serve(config, fleet, [Told()])
        assert getattr(raised.value, "code", None) == code
        summary = RunDirectory(Path(config.run.out)).read_summary()
        assert summary is not None
        rounds = (trip - 1) // 2 * (trip > 0)  # two trips a round after the first
        assert (summary["status"], summary["rounds"], summary["everyone"]) == ("interrupted", rounds, None)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert said == ["interrupted"] * 7
    assert serve(config, fleet, [Told()])["status"] == "finished"
    check_same_run(fleet)


def test_who_handles_signals_is_still_asked(tmp_path: Path) -> None:
    config = make_config("fedavg", tmp_path / "run")
    asked: list[int] = []
    fleet = Fleet(config, tmp_path / "nodes", before=lambda requests: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        with pytest.raises(SystemExit):
            serve(config, fleet)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM]
    assert fleet.trips == []
