"""Nodes in this process, as whoever carries messages sees them; and what a run in one process says beside them."""

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
from pfedlms.experiment.loop import Running, execute
from pfedlms.experiment.prepare import prepare
from pfedlms.experiment.runs import Run, begin
from pfedlms.experiment.store import RunDirectory

CLIENTS = 4


class Killed(BaseException):
    """Nothing catches it: what is in memory is gone, what is on the disk stays."""


def configured(method: str, out: Path | str = "", /, *, clients: int = CLIENTS, **chosen: Any) -> Config:
    """Few steps on digits; keys by section, as `train={"rounds": 3}`."""
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


Way = Callable[[int, bytes, Callable[[bytes], bytes]], bytes | None]
"""A client, a request to it, and what handles it; what arrives at the server."""


FLEETS: list[Fleet] = []
"""Those made in a test, to be closed after it."""


@dataclass
class Fleet:
    """A node a client. With `fresh`, one is opened for every message, as an engine that starts processes does it."""

    config: Config
    folder: Path
    way: Way = lambda client, request, handle: handle(request)
    fresh: bool = False
    before: Callable[[dict[int, bytes]], None] = lambda requests: None
    after: Callable[[dict[int, bytes]], None] = lambda requests: None
    """Called with the requests of a trip before it, and after it."""
    handler: Callable[[Node], Callable[[bytes], bytes]] = lambda node: node.handle
    """What of a node handles requests."""
    trips: list[dict[int, tuple[bytes, bytes | None]]] = field(default_factory=list)
    """Requests and what arrived."""
    data: dict[int, Any] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        FLEETS.append(self)

    def node(self, client: int) -> Node:
        if self.fresh:
            self.close(client)
        if client not in self.nodes:
            self.nodes[client] = Node(self.config, client, self.folder, self.data.get(client))
        return self.nodes[client]

    def close(self, client: int) -> None:
        if client in self.nodes:
            self.nodes.pop(client).close()

    def lose(self, client: int) -> None:
        """The disk of a node."""
        path = self.node(client).path
        self.close(client)
        path.unlink()

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        self.before(requests)
        came = {
            client: self.way(client, data, lambda given, client=client: self.handler(self.node(client))(given))
            for client, data in requests.items()
        }
        self.trips.append({client: (data, came[client]) for client, data in requests.items()})
        self.after(requests)
        return {client: data for client, data in came.items() if data is not None}

    def carried(self, client: int = -1, away: range = range(0)) -> dict[str, int]:
        """Bytes of all envelopes, without those of a client in the trips in which it was away."""
        pairs = [
            pair
            for number, trip in enumerate(self.trips)
            for k, pair in trip.items()
            if k != client or number not in away
        ]
        return {"down": sum(len(down) for down, _ in pairs), "up": sum(len(up or b"") for _, up in pairs)}


def served(config: Config, fleet: Fleet) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and metrics of a run on nodes."""
    summary = serve(config, fleet)
    return summary, RunDirectory(Path(config.run.out)).read_metrics()


def own_data() -> tuple[dict[str, str], dict[int, Any], tuple[int, ...]]:
    """Settings of the section [data] for nodes with data of their own, those data, and N_k, which the server does not
    know."""
    source = prepare(configured("local")).data
    named = {"dataset": "custom", "class_names": ",".join(map(str, range(10))), "sample_shape": "1x8x8"}
    halves = [source.train, source.test]
    own = {k: tuple((source.x[held[k]].numpy(), source.y[held[k]].numpy()) for held in halves) for k in range(CLIENTS)}
    return named, own, source.samples


def alone(config: Config) -> Run:
    """The same run in one process: a cohort a client."""
    return begin(config.with_run(out=""))


class _Without:
    """All take part but one client, or in some phases only."""

    count = CLIENTS

    def __init__(self, client: int, phases: range | None) -> None:
        self._client, self._phases = client, phases

    def of(self, phase: int) -> tuple[int, ...]:
        away = self._phases is None or phase in self._phases
        return tuple(k for k in range(CLIENTS) if k != self._client or not away)


def alone_without(
    config: Config, client: int, phases: range | None = None
) -> tuple[list[dict[str, Any]], Federation]:  # fmt: skip
    """The run in one process in which a client takes no part."""
    federation = prepare(config)
    federation.participation = _Without(client, phases)  # type: ignore[assignment]
    running = Running(config, federation)
    execute(running, ())
    return running.metrics, federation


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Without the time it took, and what only a run on nodes has."""
    return {key: value for key, value in record.items() if key not in ("seconds", "transport", "left_out", "weakened")}


def check_same_run(fleet: Fleet, config: Config | None = None) -> None:
    """Metrics and summary, and models, optimisers and what the method keeps: those of the run in one process."""
    config = config or fleet.config
    directory, expected = RunDirectory(Path(config.run.out)), alone(config)
    assert [plain(each) for each in directory.read_metrics()] == [plain(each) for each in expected.metrics]
    assert plain(directory.read_summary() or {}) == plain(expected.summary)
    check_states(fleet, expected.federation)


def check_states(fleet: Fleet, federation: Federation, but: int | None = None) -> None:
    """Every client that ever took part, `but` one: model, optimiser, statistics and what the method keeps, bit for bit;
    of one that is away, as far as a federation keeps it."""
    kept = federation.state()
    for row, client in enumerate(kept["trained"]):
        if client == but:
            continue
        own = fleet.node(client).state.cohort
        assert torch.equal(own.params[0], kept["params"][row])
        assert torch.equal(own.momentum[0], kept["momentum"][row])
        for name in ("buffers", "state"):
            assert same(getattr(own, name), {key: value[row : row + 1] for key, value in kept[name].items()})
    away = kept["away"]
    for row, client in enumerate(away["ids"].tolist() if away else ()):
        own = fleet.node(client).state.cohort
        if away["params"].shape[1]:
            assert torch.equal(own.params[0], away["params"][row])
        for name, value in away["state"].items():
            assert torch.equal(own.state[name][0], value[row])


@pytest.fixture(autouse=True)
def closed_nodes() -> Iterator[None]:
    """Nodes hold their directories until they are closed."""
    yield
    while FLEETS:
        fleet = FLEETS.pop()
        for client in list(fleet.nodes):
            fleet.close(client)
