"""Real processes: nodes that leave, come back or join late, and a server that is stopped."""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import Fleet, comparable, same, serve_run
from flotilla import Flotilla, check, long, needs_flower, run_config, wait_until

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import decode
from pfedlms.experiment.store import RunDirectory

pytestmark = [needs_flower, long]
ABSENT, LATE = 2, 3


@pytest.fixture(scope="module")
def flotilla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flotilla]:
    with Flotilla(tmp_path_factory.mktemp("dropouts") / "four", 4) as made:
        yield made.open(nodes=3)


def rounds(out: Path) -> list[dict[str, Any]]:
    return RunDirectory(out).read_metrics()


def rounds_missed(metrics: list[dict[str, Any]], client: int) -> list[int]:
    """Rounds, from 1, at whose end this client did not train."""
    return [each["round"] for each in metrics if client not in each.get("clients", range(4))]


def test_an_absent_node_and_a_late_one_catch_up(flotilla: Flotilla, tmp_path: Path) -> None:
    """Both have the bits of the other nodes; the run equals one on nodes in this process that miss the same trips."""
    out = flotilla.folder / "absent"
    chosen = {"method.name": "sketchvote", "run.out": str(out), "train.rounds": 10, "flower.wait": 20.0}
    flotilla.run(run_config(chosen), name="absent")
    wait_until(lambda: len(rounds(out)) >= 1, 240, "a round")
    flotilla.end(f"node-{ABSENT}")
    config = flotilla.config(**chosen)
    with Node(config, ABSENT, flotilla.folder / "state") as node:
        done = node.state.trip
    wait_until(lambda: len(rounds(out)) >= 2, 240, "a round without it")
    flotilla.node(LATE)
    wait_until(lambda: len(rounds_missed(rounds(out), ABSENT)) >= 5, 400, "five rounds without it")
    flotilla.node(ABSENT)
    log = flotilla.wait_for_end("absent")
    metrics = rounds(out)

    missed, before = rounds_missed(metrics, ABSENT), rounds_missed(metrics, LATE)
    assert len(missed) >= 5
    assert missed == list(range(missed[0], missed[-1] + 1))
    assert missed[-1] < 10  # it came back
    assert before == list(range(1, len(before) + 1))
    assert 2 <= len(before) < missed[-1]  # it joined while the other was absent
    reason = "no reply: its node is offline"
    for client, trips in [(ABSENT, missed), (LATE, before)]:
        named = {each["round"]: each["left_out"].get(str(client), "") for each in metrics}
        assert all(reason in named[number] for number in trips[1:])
        # A node that misses the end of a round has no message in the next one.
        assert [number for number, text in named.items() if text] == [*trips, trips[-1] + 1]
        assert f"client {client} is left out: {reason}" in log

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | str:
        trip = decode(request).trip  # trip t ends round t; trip 0 is the start
        if trip in {ABSENT: missed, LATE: [0, *before]}.get(client, []):
            if client == ABSENT and trip <= done:
                handle(request)  # it stopped before it sent its reply
            return "its node is offline"
        return handle(request)

    here = config.with_run(out=str(tmp_path / "here"))
    fleet = Fleet(here, tmp_path / "nodes", route)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, expected = serve_run(here, fleet)
    assert [comparable(each) for each in metrics] == [comparable(each) for each in expected]
    tracked = []
    for client in range(4):
        with Node(config, client, flotilla.folder / "state") as node:
            own, other = node.state, fleet.node(client).state
        assert own.answers_known == other.answers_known == 10
        for name in ("params", "momentum", "buffers", "state"):
            assert same(getattr(own.cohort, name), getattr(other.cohort, name))
        tracked.append(own.cohort.state["model"])
    assert all(torch.equal(model, tracked[0]) for model in tracked)


@pytest.mark.parametrize("way", ["SIGTERM", "flwr stop"])
def test_a_stopped_server_resumes(flotilla: Flotilla, way: str) -> None:
    """Its summary says `interrupted`; started again, it ends with the results of an uninterrupted run."""
    name = way.replace(" ", "-")
    # Two of the four nodes have no place in this run. A seed of its own: nodes remember the runs they took part in.
    chosen = {"method.name": "pfedlms", "run.out": str(flotilla.folder / name), "data.clients": 2}
    chosen["run.seed"] = 11 + len(name)
    directory = RunDirectory(Path(str(chosen["run.out"])))
    flotilla.run(run_config(chosen), name=name)
    wait_until(lambda: directory.read_metrics(), 240, "a round")
    if way == "SIGTERM":
        flotilla.end("superlink")
        flotilla.kill(name)
        flotilla.server()
    else:
        (run,) = re.findall(r"started run (\d+)", flotilla.log_text(name))
        flotilla.call("flwr", "stop", run, "federation")
        flotilla.wait_for_end(name)
    wait_until(lambda: directory.read_summary(), 60, "a summary")
    summary = directory.read_summary()
    assert summary is not None
    assert (summary["status"], summary["rounds"], summary["everyone"]) == ("interrupted", 1, None)
    flotilla.run(run_config(chosen), name=f"{name}-again")
    assert "resumed after round 1" in flotilla.wait_for_end(f"{name}-again")
    check(flotilla, chosen)


class Refusal(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1 << 12)
        self.request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


class Plain(socketserver.ThreadingTCPServer):
    """Answers without TLS, as a proxy or a captive portal does."""

    allow_reuse_address = True


def online(flotilla: Flotilla) -> int:
    nodes = json.loads(flotilla.call("flwr", "supernode", "list", "federation", "--format", "json"))["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def test_nodes_are_back_after_another_program_was_at_the_gates_port(flotilla: Flotilla) -> None:
    """Flower's own node stays alive without a connection for ever."""
    wait_until(lambda: online(flotilla) >= 3, 120, "the nodes are online")
    there = online(flotilla)
    flotilla.end("gate")
    with Plain(("127.0.0.1", flotilla.port), Refusal) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        wait_until(lambda: "no TLS connection to the server" in flotilla.log_text("node-0"), 120, "an error of TLS")
        plain.shutdown()
    flotilla.start("gate", "./gate.sh")
    wait_until(lambda: "started again in 5 s" in flotilla.log_text("node-0"), 60, "a new start")
    time.sleep(60)  # by then the server would know that nodes are gone
    wait_until(lambda: online(flotilla) == there, 120, "the nodes are back")
