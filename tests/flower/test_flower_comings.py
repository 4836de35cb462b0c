"""Real processes: nodes that leave, come back and come late, and a server that is asked to stop."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import Fleet, comparable, same, serve_run
from flotilla import Flotilla, check, long, needs_flower, run_config, wait_until

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import Reason, decode, refusal
from pfedlms.experiment.store import RunDirectory

pytestmark = [needs_flower, long]
AWAY, LATE = 2, 3


@pytest.fixture(scope="module")
def flotilla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flotilla]:
    with Flotilla(tmp_path_factory.mktemp("comings") / "four", 4) as made:
        yield made.open(nodes=3)


def rounds(out: Path) -> list[dict[str, Any]]:
    return RunDirectory(out).read_metrics()


def absent(metrics: list[dict[str, Any]], client: int) -> list[int]:
    """Rounds, from 1, at whose end this client did not train."""
    return [each["round"] for each in metrics if client not in each.get("clients", range(4))]


def test_a_node_away_for_five_rounds_and_one_that_comes_late(flotilla: Flotilla, tmp_path: Path) -> None:
    """Both have the bits of those who stayed, and all is as with nodes in this process that miss the same trips."""
    out = flotilla.folder / "away"
    chosen = {"method.name": "sketchvote", "run.out": str(out), "train.rounds": 10, "flower.wait": 20.0}
    flotilla.run(run_config(chosen), name="away")
    wait_until(lambda: len(rounds(out)) >= 1, 240, "a round")
    flotilla.end(f"node-{AWAY}")
    config = flotilla.config(**chosen)
    with Node(config, AWAY, flotilla.folder / "state") as node:
        done = node.state.trip
    wait_until(lambda: len(rounds(out)) >= 2, 240, "a round without it")
    flotilla.node(LATE)
    wait_until(lambda: len(absent(rounds(out), AWAY)) >= 5, 400, "five rounds without it")
    flotilla.node(AWAY)
    said = flotilla.wait_for_end("away")
    metrics = rounds(out)

    missed, before = absent(metrics, AWAY), absent(metrics, LATE)
    assert len(missed) >= 5
    assert missed == list(range(missed[0], missed[-1] + 1))
    assert missed[-1] < 10  # it came back
    assert before == list(range(1, len(before) + 1))
    assert 2 <= len(before) < missed[-1]  # it came while the other was away
    for client, trips, why in [(AWAY, missed, "its node is gone"), (LATE, before, "its node was not online yet")]:
        named = {each["round"]: each["left_out"].get(str(client), "") for each in metrics}
        assert all(why in named[number] for number in trips[1:])
        # Who misses the end of a round has no message in the next one.
        assert [number for number, text in named.items() if text] == [*trips, trips[-1] + 1]
        assert f"client {client} is left out: refused, failed: {why}" in said

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        trip = decode(request).trip  # trip t ends round t; trip 0 is the start
        if trip in {AWAY: missed, LATE: [0, *before]}.get(client, []):
            if client == AWAY and trip <= done:
                handle(request)  # it was ended before its reply left
            return refusal(decode(request), Reason.FAILED, "as a carrier says that nobody is there")
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
def test_the_server_asked_to_stop(flotilla: Flotilla, way: str) -> None:
    """Its summary says `interrupted`; told to run again, it goes on, and ends as if nothing had happened."""
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
