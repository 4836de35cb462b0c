"""Nodes in this process behind a transport, and the run in one process to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import same
from pfedlms.deploy import Node, serve
from pfedlms.engine import Federation
from pfedlms.experiment.config import Config, load_config
from pfedlms.experiment.loop import ActiveRun, run_rounds
from pfedlms.experiment.prepare import prepare
from pfedlms.experiment.runs import Run, start_run
from pfedlms.experiment.store import RunDirectory

CLIENTS = 4


class Killed(BaseException):
    """Stands for a kill: no handler catches it, so memory is lost and the disk remains."""


def make_config(method: str, out: Path | str = "", /, *, clients: int = CLIENTS, **chosen: Any) -> Config:
    """Few steps on digits; settings are given by section, as `train={"rounds": 3}`."""
    tables = {
        "data": {"clients": clients},
        "model": {"hidden": 12},
        "train": {"rounds": 3, "local_steps": 3, "batch_size": 16, "learning_rate": 0.1},
        "method": {"name": method},
        "run": {"seed": 3, "device": "cpu", "threads": 1, "cohort_size": 1, "out": str(out)},
    }
    for section, values in chosen.items():
        tables[section] |= values
    return load_config(None, tables)


Route = Callable[[int, bytes, Callable[[bytes], bytes]], bytes | str | None]
"""(client, request, handler) to the reply that arrives at the server, None for no reply, a text that says why."""


FLEETS: list[Fleet] = []
"""All fleets of a test, to be closed after it."""


@dataclass
class Fleet:
    """One node for each client."""

    config: Config
    folder: Path
    route: Route = lambda client, request, handle: handle(request)
    before_trip: Callable[[dict[int, bytes]], None] = lambda requests: None
    after_trip: Callable[[dict[int, bytes]], None] = lambda requests: None
    """Called with the requests of each trip."""
    handler: Callable[[Node], Callable[[bytes], bytes]] = lambda node: node.handle
    """The function that handles the requests to a node."""
    trips: list[dict[int, tuple[bytes, Any]]] = field(default_factory=list)
    """Requests and the replies that arrived, by client, for each trip."""
    data: dict[int, Any] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        FLEETS.append(self)

    def node(self, client: int) -> Node:
        if client not in self.nodes:
            self.nodes[client] = Node(self.config, client, self.folder, self.data.get(client))
        return self.nodes[client]

    def close(self, client: int) -> None:
        if client in self.nodes:
            self.nodes.pop(client).close()

    def delete_state(self, client: int) -> None:
        """As after the loss of a node's disk."""
        path = self.node(client).path
        self.close(client)
        path.unlink()

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes | str]:
        self.before_trip(requests)
        replies = {
            client: self.route(client, data, lambda given, client=client: self.handler(self.node(client))(given))
            for client, data in requests.items()
        }
        self.trips.append({client: (data, replies[client]) for client, data in requests.items()})
        self.after_trip(requests)
        return {client: data for client, data in replies.items() if data is not None}

    def transport_bytes(self, client: int = -1, missed: range = range(0)) -> dict[str, int]:
        """Bytes of all envelopes, except those of a client in the trips that it missed."""
        pairs = [
            pair
            for number, trip in enumerate(self.trips)
            for k, pair in trip.items()
            if k != client or number not in missed
        ]
        return {"down": sum(len(down) for down, _ in pairs), "up": sum(len(up or b"") for _, up in pairs)}


def serve_run(config: Config, fleet: Fleet) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run on nodes; summary and metrics."""
    summary = serve(config, fleet)
    return summary, RunDirectory(Path(config.run.out)).read_metrics()


def own_data() -> tuple[dict[str, str], dict[int, Any], tuple[int, ...]]:
    """For nodes with data of their own: settings of the section [data], those data, and N_k, which the server does not
    know."""
    source = prepare(make_config("local")).data
    named = {"dataset": "custom", "class_names": ",".join(map(str, range(10))), "sample_shape": "1x8x8"}
    halves = [source.train, source.test]
    own = {k: tuple((source.x[held[k]].numpy(), source.y[held[k]].numpy()) for held in halves) for k in range(CLIENTS)}
    return named, own, source.samples


def simulate(config: Config) -> Run:
    """The same run in one process, one cohort for each client."""
    return start_run(config.with_run(out=""))


class _AllExcept:
    """All clients take part, except one in some phases, or in all of them."""

    count = CLIENTS

    def __init__(self, client: int, phases: range | None) -> None:
        self._client, self._phases = client, phases

    def of(self, phase: int) -> tuple[int, ...]:
        absent = self._phases is None or phase in self._phases
        return tuple(k for k in range(CLIENTS) if k != self._client or not absent)


def simulate_without(
    config: Config, client: int, phases: range | None = None
) -> tuple[list[dict[str, Any]], Federation]:  # fmt: skip
    """The run in one process in which a client takes no part; metrics and federation."""
    federation = prepare(config)
    federation._terms.participation = _AllExcept(client, phases)  # type: ignore[assignment]
    running = ActiveRun(config, federation)
    run_rounds(running, ())
    return running.metrics, federation


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Without the duration and the values that only a run on nodes, or with a folder, has."""
    omitted = ("seconds", "transport", "left_out", "weakened", "digests")
    return {key: value for key, value in record.items() if key not in omitted}


def check_same_run(fleet: Fleet, config: Config | None = None) -> None:
    """Metrics, summary, models, and states of optimisers and methods equal those of the run in one process."""
    config = config or fleet.config
    directory, expected = RunDirectory(Path(config.run.out)), simulate(config)
    assert [comparable(each) for each in directory.read_metrics()] == [comparable(each) for each in expected.metrics]
    assert comparable(directory.read_summary() or {}) == comparable(expected.summary)
    check_states(fleet, expected.federation)


def check_states(fleet: Fleet, federation: Federation, skip: int | None = None) -> None:
    """Model and states of optimiser, statistics and method, bit for bit, of every client that took part, except `skip`;
    of an absent client, what a federation keeps of it."""
    expected = federation.state()
    for row, client in enumerate(expected["trained"]):
        if client == skip:
            continue
        own = fleet.node(client).state.cohort
        assert torch.equal(own.params[0], expected["params"][row])
        assert torch.equal(own.momentum[0], expected["momentum"][row])
        for name in ("buffers", "state"):
            assert same(getattr(own, name), {key: value[row : row + 1] for key, value in expected[name].items()})
    absent = expected["away"]
    for row, client in enumerate(absent["ids"].tolist() if absent else ()):
        own = fleet.node(client).state.cohort
        if absent["params"].shape[1]:
            assert torch.equal(own.params[0], absent["params"][row])
        for name, value in absent["state"].items():
            assert torch.equal(own.state[name][0], value[row])


@pytest.fixture(autouse=True)
def close_nodes() -> Iterator[None]:
    """Nodes lock their directories until they are closed."""
    yield
    while FLEETS:
        fleet = FLEETS.pop()
        for client in list(fleet.nodes):
            fleet.close(client)
