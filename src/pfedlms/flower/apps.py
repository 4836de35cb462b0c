"""The server and a node of a run as Flower's ServerApp and ClientApp: bytes in, bytes out. Every message opens the node
from its disk and closes it again."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import flwr
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from pfedlms import __version__
from pfedlms.deploy import Node, serve
from pfedlms.deploy.coordinator import RoundLog, persist
from pfedlms.deploy.envelope import decode, reason
from pfedlms.deploy.ground import Ground
from pfedlms.deploy.nodes import message_bytes
from pfedlms.engine.transport import Code
from pfedlms.errors import UsageError, printable
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.flower import audit
from pfedlms.flower.carrier import CHECK, CHECK_RECORD, REQUEST, WHO, Carrier, Failure
from pfedlms.flower.config import FlowerSection, NodeSection, configured, seated
from pfedlms.flower.signing import SealedNode, SigningTransport, check_query, private_key, public_key, query

_LONGEST_CHECK = 4096
"""Bytes that a node may answer to a check."""
_PULL = 1.0
"""Seconds after which replies that are still being uploaded are left to the next look."""
_GONE = 5
"""Flower's code for a node that is not there any more."""
say = logging.getLogger("flwr").info


def record(data: bytes) -> RecordDict:
    """Bytes as Flower carries them."""
    return RecordDict({"pfedlms": ConfigRecord({"bytes": data})})


def versions() -> dict[str, str]:
    """What both ends should have alike."""
    return {"pfedlms": __version__, "torch": torch.__version__.partition("+")[0], "flwr": flwr.__version__}


# --- a node


def client_app(file: Path, given: Problem | None) -> Any:
    """See `flower.client`. What a handler raises reaches the server as the reason why this node is left out."""
    problem = given or NAMED

    def seat_of(context: Context) -> tuple[Config, NodeSection, Path, Ed25519PublicKey | None]:
        config, seat, folder = seated(*configured(file, context.run_config), context.node_config)
        return config, seat, folder, public_key(Path(seat.server_key)) if seat.server_key else None

    def who(data: bytes, context: Context) -> bytes:
        _, seat, _, key = seat_of(context)
        check_query(data, key, context.run_id, WHO, context.node_id)
        return str(seat.partition_id).encode()

    def check(data: bytes, context: Context) -> bytes:
        config, seat, folder, key = seat_of(context)
        check_query(data, key, context.run_id, CHECK, context.node_id)
        with Node(config, seat.partition_id, folder, seat.data or None, problem) as node:
            return json.dumps({**versions(), "digest": node.run.hex(), "place": str(seat.partition_id)}).encode()

    def request(data: bytes, context: Context) -> bytes:
        config, seat, folder, key = seat_of(context)
        with Node(config, seat.partition_id, folder, seat.data or None, problem) as node:
            reply = SealedNode(node, key).handle(data)
            remove_old(folder, node.path, seat.keep)
        audit.append(folder / "audit.jsonl", **left(context.run_id, data, reply))
        return reply

    def carried(handler: Any) -> Any:
        def handle(message: Message, context: Context) -> Message:
            return Message(record(handler(message.content["pfedlms"]["bytes"], context)), reply_to=message)

        return handle

    app = ClientApp()
    app.query(WHO.partition(".")[2])(carried(who))
    app.query(CHECK.partition(".")[2])(carried(check))
    app.train(REQUEST.partition(".")[2])(carried(request))
    return app


def left(flower_run: int, request: bytes, reply: bytes) -> dict[str, Any]:
    """What a request made leave this node, for its audit log."""
    said, kinds = decode(reply), dict[str, int]()
    for each in said.records:
        kinds[each.code.name.lower()] = kinds.get(each.code.name.lower(), 0) + len(each.data)
    refused = [reason(each) for each in said.records if each.code == Code.REFUSED]
    return {
        "event": "reply", "flower_run": flower_run, "run": said.run.hex(), "client": said.client,
        "round": said.round + 1, "trip": said.trip, "received": len(request), "sent": len(reply), "kinds": kinds,
        "refused": "".join(refused),
    }  # fmt: skip


def remove_old(folder: Path, own: Path, days: int) -> None:
    """Remove the state of other runs that was not touched for so many days; 0: keep all."""
    for file in folder.glob("client-*.pt") if days else ():
        if file != own and time.time() - file.stat().st_mtime > days * 86400:
            file.unlink(missing_ok=True)
            file.with_suffix(".lock").unlink(missing_ok=True)


# --- the server


def server_app(file: Path, given: Problem | None) -> Any:
    """See `flower.server`."""
    problem = given or NAMED

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
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest, **more: say(f"pfedlms: {printable(str(message), 1000)}")
            if flower.check:
                check_nodes(config, carrier, carrier.survey(flower.wait, config.run.timeout), ground.run)
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


def check_nodes(config: Config, carrier: Carrier, there: set[int], run: bytes) -> None:
    """Whether the nodes that are online run what the server runs, as records in the log; UsageError if not."""
    if not there:
        raise UsageError("check: no node is online; start node-K.sh on each, and look at what it prints")
    here, found = {**versions(), "digest": run.hex()}, list[tuple[str, bool]]()
    for client, said in sorted(carrier.ask(CHECK, config.run.timeout).items()):
        text = said.text if isinstance(said, Failure) else differing({**here, "place": str(client)}, said)
        found.append(
            (f"client {client}, node {carrier.places[client]}: {printable(text) or 'as the server'}", bool(text))
        )
    for client, nodes in sorted(carrier.rivals.items()):
        found.append((f"client {client}: nodes {', '.join(map(str, nodes))} all say that this is their place", True))
    found += [(f"node {node}: has no place among {config.data.clients}", True) for node in sorted(carrier.strangers)]
    same = ", ".join(f"{name} {value}" for name, value in here.items())
    found.append((f"{len(there)} of {config.data.clients} places are taken; the server has {same}", False))
    for text, wrong in found:
        say(CHECK_RECORD + json.dumps({"text": text, "wrong": wrong}))
    if count := sum(wrong for _, wrong in found):
        raise UsageError(f"check: {count} things are wrong; see the lines above")


def differing(here: Mapping[str, str], said: bytes) -> str:
    """What a node has that the server has not."""
    try:
        there = dict(json.loads(said[:_LONGEST_CHECK]))
    except (ValueError, TypeError):
        return "got no answer that can be read"
    return ", ".join(
        f"{name}: got {printable(str(there.get(name)), 80)}, expected {value}"
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
        return Failure(f"{printable(lines[-1])} (Flower's code {message.error.code})", message.error.code == _GONE)
    if message.metadata.src_node_id != node:
        return Failure(f"a reply names node {message.metadata.src_node_id} as its sender, expected {node}")
    if list(message.content) != ["pfedlms"]:
        return Failure(f"its reply has {len(message.content)} records, expected one")
    data = dict(message.content["pfedlms"]).get("bytes", None)
    return data if isinstance(data, bytes) else Failure(f"its reply has {type(data).__name__}, expected bytes")
