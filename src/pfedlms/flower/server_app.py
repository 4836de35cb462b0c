"""The server of a run as a Flower ServerApp: a post office over Flower's grid, and a line a round in Flower's log."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from pfedlms.deploy import serve
from pfedlms.deploy.coordinator import persist
from pfedlms.deploy.ground import Ground
from pfedlms.deploy.nodes import message_bytes
from pfedlms.errors import UsageError, shown
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.flower import audit
from pfedlms.flower.carrier import CHECK, Carrier, Failure
from pfedlms.flower.client_app import record, versions
from pfedlms.flower.keys import FlowerSection, configured
from pfedlms.flower.log import CHECK_RECORD, RoundLog
from pfedlms.flower.signing import SigningTransport, private_key, query

_LONGEST_CHECK = 4096
"""Bytes that a node may answer to a check."""
_PULL = 1.0
"""Seconds after which replies that are still being uploaded are left to the next look."""
_GONE = 5
"""Flower's code for a node that is not there any more."""
say = logging.getLogger("flwr").info


def server_app(file: Path, problem: Problem = NAMED) -> Any:
    """See `flower.server`."""

    def main(grid: Grid, context: Context) -> None:
        config, flower = configured(file, context.run_config)
        clients, key = config.data.clients, _key(flower)
        ground = Ground(config, problem=problem)
        carrier = Carrier(
            GridPost(grid), clients, flower.pinned(clients), say,
            query=lambda kind, node: query(key, context.run_id, kind, node),
        )  # fmt: skip

        def note(record: dict[str, Any]) -> None:
            """One line per round and node."""
            if flower.audit:
                audit.append(Path(flower.audit), **record, node=carrier.places.get(record["client"]))
            say(
                f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} round {record['round']}, client {record['client']}: "
                f"{record['result']}; {record['sent']} bytes sent, {record['received']} received, {record['seconds']} s"
            )

        def play() -> None:
            there = carrier.gather(flower.wait, config.run.timeout)
            say(f"pfedlms: {len(there)} of {clients} places are taken")
            signed = SigningTransport(carrier, key, message_bytes(ground), note)
            serve(config, signed, [RoundLog(say)], problem)

        if flower.audit:
            known = {"method": config.method, "digest": ground.run.hex(), "check": flower.check}
            audit.append(Path(flower.audit), "run", flower_run=context.run_id, **known)
        with _warnings_said():
            if flower.check:
                check(config, carrier, carrier.survey(flower.wait, config.run.timeout), ground.run)
            else:
                persist(play, flower.attempts, say)

    app = ServerApp()
    app.main()(main)
    return app


def _key(flower: FlowerSection) -> Ed25519PrivateKey:
    if flower.key:
        return private_key(Path(flower.key))
    say("pfedlms: flower.key is empty: requests are signed with a new key, which nodes with a server-key refuse")
    return Ed25519PrivateKey.generate()


def check(config: Config, carrier: Carrier, there: set[int], run: bytes) -> None:
    """Whether the nodes that are online run what the server runs, as records in the log; UsageError if not."""
    if not there:
        raise UsageError("check: no node is online; start node-K.sh on each, and look at what it prints")
    here = {**versions(), "digest": run.hex()}
    wrong = 0

    def record(text: str, bad: bool) -> None:
        nonlocal wrong
        wrong += bad
        say(CHECK_RECORD + json.dumps({"text": text, "wrong": bad}))

    for client, said in sorted(carrier.ask(CHECK, config.run.timeout).items()):
        expected = {**here, "place": str(client)}
        found = said.text if isinstance(said, Failure) else differing(expected, said)
        record(f"client {client}, node {carrier.places[client]}: {shown(found) or 'as the server'}", bool(found))
    for client, nodes in sorted(carrier.rivals.items()):
        record(f"client {client}: nodes {', '.join(map(str, nodes))} all say that this is their place", True)
    for node in sorted(carrier.strangers):
        record(f"node {node}: has no place among {config.data.clients}", True)
    same = ", ".join(f"{name} {value}" for name, value in here.items())
    record(f"{len(there)} of {config.data.clients} places are taken; the server has {same}", False)
    if wrong:
        raise UsageError(f"check: {wrong} things are wrong; see the lines above")


def differing(here: Mapping[str, str], said: bytes) -> str:
    """What a node has that the server has not."""
    try:
        there = dict(json.loads(said[:_LONGEST_CHECK]))
    except (ValueError, TypeError):
        return "got no answer that can be read"
    return ", ".join(
        f"{name}: got {shown(str(there.get(name)), 80)}, expected {value}"
        for name, value in here.items()
        if there.get(name) != value
    )


class GridPost:
    """Flower's grid as a `Post`."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sent: dict[str, int] = {}
        """Nodes by the name of a message."""
        self._pulling: dict[int, Future[list[Message]]] = {}
        """What is being pulled, by node."""
        self._came: dict[str, bytes | Failure] = {}
        """Replies that nobody has asked for since they came."""

    def nodes(self) -> set[int]:
        return set(self._grid.get_node_ids())

    def push(self, kind: str, letters: Mapping[int, bytes], ttl: float) -> dict[str, int]:
        messages = [
            Message(record(data), dst_node_id=node, message_type=kind, ttl=ttl) for node, data in letters.items()
        ]
        # Flower gives no name to what it could not send.
        names = self._grid.push_messages(messages)
        sent = {name: node for name, node in zip(names, letters, strict=True) if name}
        self._sent |= sent
        return sent

    def pull(self, names: Iterable[str]) -> dict[str, bytes | Failure]:
        names = list(names)
        by_node: dict[int, list[str]] = {}
        for name in names:
            by_node.setdefault(self._sent.get(name, 0), []).append(name)
        for node in by_node.keys() - self._pulling.keys():
            self._pulling[node] = pulling = Future[list[Message]]()
            Thread(target=self._pull, args=(by_node[node], pulling), daemon=True).start()
        done = wait([self._pulling[node] for node in by_node], _PULL).done
        for node in [node for node, each in self._pulling.items() if each in done]:
            for message in self._pulling.pop(node).result():
                name = message.metadata.reply_to_message_id
                self._came[name] = _read(message, self._sent.pop(name, 0))
        return {name: self._came.pop(name) for name in names if name in self._came}

    def _pull(self, names: list[str], pulling: Future[list[Message]]) -> None:
        """Of one node. Flower waits for minutes for a reply that was announced and is not uploaded, with all that it
        pulls together; others must not wait with it."""
        try:
            pulling.set_result(list(self._grid.pull_messages(names)))
        except BaseException as error:
            pulling.set_exception(error)


def _read(message: Message, node: int) -> bytes | Failure:
    """The bytes of a reply. Flower does not compare the id that a reply names with the key that sent it. Who does not
    know a signed request cannot name the message it is in, and the id must be that of the node it was sent to."""
    if message.has_error():
        lines = (message.error.reason or "").strip().splitlines() or ["no reason was given"]
        return Failure(f"{shown(lines[-1])} (Flower's code {message.error.code})", message.error.code == _GONE)
    if message.metadata.src_node_id != node:
        return Failure(f"a reply names node {message.metadata.src_node_id} as its sender, expected {node}")
    if list(message.content) != ["pfedlms"]:
        return Failure(f"its reply has {len(message.content)} records, expected one")
    data = dict(message.content["pfedlms"]).get("bytes", None)
    return data if isinstance(data, bytes) else Failure(f"its reply has {type(data).__name__}, expected bytes")


@contextmanager
def _warnings_said() -> Iterator[None]:
    """Warnings as lines of the log."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **more: say(f"pfedlms: {shown(str(message), 1000)}")
        yield
