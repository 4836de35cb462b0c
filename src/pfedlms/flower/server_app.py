"""The server of a run as a Flower ServerApp: a post office over Flower's grid, and a line a round in Flower's log."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from pfedlms.deploy import serve
from pfedlms.deploy.ground import Ground
from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.flower.carrier import CHECK, Carrier, Failure
from pfedlms.flower.client_app import record, versions
from pfedlms.flower.keys import configured
from pfedlms.flower.log import CHECKED, RoundLog
from pfedlms.flower.patience import persist

_GONE = 5
"""Flower's code for a node that is not there any more."""
say = logging.getLogger("flwr").info


def server_app(file: Path, problem: Problem = NAMED) -> Any:
    """See `flower.server`."""

    def main(grid: Grid, context: Context) -> None:
        config, flower = configured(file, context.run_config)
        clients = config.data.clients
        carrier = Carrier(GridPost(grid), clients, flower.pinned(clients), say)

        def gather() -> set[int]:
            there = carrier.gather(flower.wait, config.run.timeout)
            say(f"pfedlms: {len(there)} of {clients} places are taken")
            return there

        def play() -> None:
            gather()
            serve(config, carrier, [RoundLog(say)], problem)

        with _warnings_said():
            if flower.check:
                check(config, carrier, gather(), Ground(config, problem=problem).run)
            else:
                persist(play, flower.attempts, say)

    app = ServerApp()
    app.main()(main)
    return app


def check(config: Config, carrier: Carrier, there: set[int], run: bytes) -> None:
    """Whether the nodes that are there run what the server runs, in words; UsageError if not, or if nobody is."""
    if not there:
        raise UsageError("check: no node is there; start node-K.sh on each, and look at what it prints")
    here = {**versions(), "digest": run.hex()}
    wrong = 0
    for client, said in sorted(carrier.ask(CHECK, b"", config.run.timeout).items()):
        found = said.text if isinstance(said, Failure) else differing(here, said)
        wrong += bool(found)
        say(f"pfedlms: client {client}: {found or 'as the server'}")
    for client, nodes in sorted(carrier.rivals.items()):
        wrong += 1
        say(f"pfedlms: client {client}: nodes {', '.join(map(str, nodes))} all say that this is their place")
    said_of = ", ".join(f"{name} {value}" for name, value in here.items())
    if wrong:
        raise UsageError(f"check: {wrong} nodes differ from the server, which has {said_of}")
    if carrier.strangers:
        raise UsageError(f"check: {len(carrier.strangers)} nodes have no place among {config.data.clients}")
    say(f"{CHECKED}: {len(there)} of {config.data.clients} places, all with {said_of}")


def differing(here: Mapping[str, str], said: bytes) -> str:
    """What a node has that the server has not."""
    try:
        there = dict(json.loads(said))
    except (ValueError, TypeError):
        return "got no answer that can be read"
    return ", ".join(
        f"{name}: got {there.get(name)}, expected {value}" for name, value in here.items() if there.get(name) != value
    )


class GridPost:
    """Flower's grid as a `Post`."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> set[int]:
        return set(self._grid.get_node_ids())

    def push(self, kind: str, letters: Mapping[int, bytes], ttl: float) -> dict[str, int]:
        messages = [
            Message(record(data), dst_node_id=node, message_type=kind, ttl=ttl) for node, data in letters.items()
        ]
        # Flower gives no name to what it could not send.
        names = self._grid.push_messages(messages)
        return {name: node for name, node in zip(names, letters, strict=True) if name}

    def pull(self, names: Iterable[str]) -> dict[str, bytes | Failure]:
        names = list(names)
        if not names:
            return {}
        return {message.metadata.reply_to_message_id: _read(message) for message in self._grid.pull_messages(names)}


def _read(message: Message) -> bytes | Failure:
    if message.has_error():
        lines = (message.error.reason or "").strip().splitlines() or ["no reason was given"]
        return Failure(f"{lines[-1]} (Flower's code {message.error.code})", message.error.code == _GONE)
    try:
        data = message.content["pfedlms"]["bytes"]
    except KeyError:
        return Failure("its reply has no bytes")
    return data if isinstance(data, bytes) else Failure(f"its reply has {type(data).__name__}, expected bytes")


@contextmanager
def _warnings_said() -> Iterator[None]:
    """Warnings as lines of the log."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **more: say(f"pfedlms: {message}")
        yield
