"""The server and a node of a run as Flower's ServerApp and ClientApp. For every message, the node is opened from its
disk and closed again."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from functools import partial
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
from pfedlms.deploy.coordinator import RoundLog, serve_with_retries
from pfedlms.deploy.envelope import decode, refusal_text
from pfedlms.deploy.nodes import message_bytes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.errors import ConfigError, DataError, RunDirectoryError, UsageError, printable
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED_PROBLEM
from pfedlms.experiment.problem import Problem
from pfedlms.flower import audit
from pfedlms.flower.carrier import CHECK, CHECK_RECORD, REQUEST, WHO, Carrier, Failure
from pfedlms.flower.config import FlowerSection, NodeSection, node_settings, run_settings
from pfedlms.flower.signing import SealedNode, SigningTransport, check_query, private_key, public_key, sign_query

_LONGEST_CHECK = 4096
"""Most bytes that are read of a node's answer to a check."""
_PULL_SECONDS = 1.0
"""How long a look for replies waits for one that is still being uploaded."""
_NODE_GONE = 5
"""Flower's error code for a node that is offline."""
say = logging.getLogger("flwr").info


def to_record(data: bytes) -> RecordDict:
    """Bytes as Flower carries them."""
    return RecordDict({"pfedlms": ConfigRecord({"bytes": data})})


def versions() -> dict[str, str]:
    """Versions that the server and all nodes should have in common."""
    return {"pfedlms": __version__, "torch": torch.__version__.partition("+")[0], "flwr": flwr.__version__}


# --- a node


def client_app(file: Path, custom: Problem | None) -> Any:
    """See `flower.client`. If a handler raises, the server gets the text as the reason why it leaves this node out."""
    problem = custom or NAMED_PROBLEM

    def settings(context: Context) -> tuple[Config, NodeSection, Path, Ed25519PublicKey | None]:
        config, section, folder = node_settings(*run_settings(file, context.run_config), context.node_config)
        return config, section, folder, public_key(Path(section.server_key)) if section.server_key else None

    def name_place(data: bytes, context: Context) -> bytes:
        _, section, _, key = settings(context)
        check_query(data, key, context.run_id, WHO, context.node_id)
        return str(section.partition_id).encode()

    def describe_node(data: bytes, context: Context) -> bytes:
        config, section, folder, key = settings(context)
        check_query(data, key, context.run_id, CHECK, context.node_id)
        with open_node(config, section, folder, problem) as node:
            return json.dumps({**versions(), "digest": node.run.hex(), "place": str(section.partition_id)}).encode()

    def execute(data: bytes, context: Context) -> bytes:
        config, section, folder, key = settings(context)
        with open_node(config, section, folder, problem) as node:
            reply = SealedNode(node, key).handle(data)
            remove_old_states(folder, node.path, section.keep)
        audit.append(folder / "audit.jsonl", **audit_fields(context.run_id, data, reply))
        return reply

    def on_messages(handler: Any) -> Any:
        def handle(message: Message, context: Context) -> Message:
            return Message(to_record(handler(message.content["pfedlms"]["bytes"], context)), reply_to=message)

        return handle

    app = ClientApp()
    app.query(WHO.partition(".")[2])(on_messages(name_place))
    app.query(CHECK.partition(".")[2])(on_messages(describe_node))
    app.train(REQUEST.partition(".")[2])(on_messages(execute))
    return app


def open_node(config: Config, section: NodeSection, folder: Path, problem: Problem) -> Node:
    """Open the node. The text of an error goes to the server, and one about the node's own data may quote them (a cell
    of a table): then the text stays in this node's log."""
    try:
        return Node(config, section.partition_id, folder, section.data or None, problem)
    except Exception as error:
        if not section.data or isinstance(error, (ConfigError, RunDirectoryError)):
            raise
        logging.getLogger("flwr").exception("pfedlms: this node cannot be opened with its own data")
        text = f"it cannot be opened with its own data ({type(error).__name__}); the log of that node says why"
    raise DataError(text)


def audit_fields(flower_run: int, request: bytes, data: bytes) -> dict[str, Any]:
    """A line of the node's audit log: what left the node in reply to a request."""
    reply, kinds = decode(data), Counter[str]()
    for record in reply.records:
        kinds[record.code.name.lower()] += len(record.data)
    return {
        "event": "reply", "flower_run": flower_run, "run": reply.run.hex(), "client": reply.client,
        "round": reply.round + 1, "trip": reply.trip, "received": len(request), "sent": len(data), "kinds": kinds,
        "refused": refusal_text(reply.refused) if reply.refused else "",
    }  # fmt: skip


def remove_old_states(folder: Path, current: Path, days: int) -> None:
    """Remove the states of other runs that did not change for so many days; 0: keep all."""
    for file in folder.glob("client-*.pt") if days else ():
        if file != current and time.time() - file.stat().st_mtime > days * 86400:
            file.unlink(missing_ok=True)
            file.with_suffix(".lock").unlink(missing_ok=True)


# --- the server


def server_app(file: Path, custom: Problem | None) -> Any:
    """See `flower.server`."""
    problem = custom or NAMED_PROBLEM

    def main(grid: Grid, context: Context) -> None:
        config, flower = run_settings(file, context.run_config)
        clients, key = config.data.clients, _signing_key(flower)
        setup = RunSetup(config, problem=problem)
        pinned = flower.pinned_nodes(clients)
        carrier = Carrier(FlowerGrid(grid), clients, pinned, say, partial(sign_query, key, context.run_id))

        def log_request(record: dict[str, Any]) -> None:
            """One line per trip and node."""
            if flower.audit:
                audit.append(Path(flower.audit), **record, node=carrier.places.get(record["client"]))
            where = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} round {record['round']}, client {record['client']}"
            traffic = f"{record['sent']} bytes sent, {record['received']} received"
            say(f"{where}: {record['result']}; {traffic}, {record['seconds']} s")

        def play() -> None:
            online = carrier.wait_for_nodes(flower.wait, config.run.timeout)
            say(f"pfedlms: {len(online)} of {clients} places are taken")
            transport = SigningTransport(carrier, key, message_bytes(setup), log_request)
            serve(config, transport, [RoundLog(say)], problem)

        if flower.audit:
            run = {"method": config.method, "digest": setup.run.hex(), "check": flower.check}
            audit.append(Path(flower.audit), "run", flower_run=context.run_id, **run)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: say(f"pfedlms: {printable(str(message), 1000)}")
            if flower.check:
                answers = carrier.survey(flower.wait, config.run.timeout)
                check_nodes(config, carrier.places, answers, setup.run)
            else:
                serve_with_retries(play, flower.attempts, say)

    app = ServerApp()
    app.main()(main)
    return app


def _signing_key(flower: FlowerSection) -> Ed25519PrivateKey:
    if flower.key:
        return private_key(Path(flower.key))
    say("pfedlms: flower.key is empty: requests are signed with a new key, which nodes with a server-key refuse")
    return Ed25519PrivateKey.generate()


def check_nodes(config: Config, places: Mapping[int, int], answers: Mapping[int, bytes | Failure], run: bytes) -> None:
    """Compare the nodes that are online with the server, and log the results. Raises UsageError if one is wrong."""
    if not answers:
        raise UsageError("check: no node is online; start node-K.sh on each, and look at what it prints")
    server, wrong, right = {**versions(), "digest": run.hex()}, list[str](), list[str]()
    place_of = {node: client for client, node in places.items()}
    for node, answer in sorted(answers.items()):
        place = place_of.get(node)
        name = f"node {node}: it has no place here" if place is None else f"client {place}, node {node}"
        expected = {**server, "place": str(place)}
        text = answer.text if isinstance(answer, Failure) else describe_differences(expected, answer)
        (wrong if text or place is None else right).append(f"{name}: {printable(text) or 'as the server'}")
    facts = ", ".join(f"{name} {value}" for name, value in server.items())
    empty = [str(client) for client in range(config.data.clients) if places.get(client) not in answers]
    nobody = f", nobody is at {', '.join(empty)}" if empty else ""
    taken = f"{config.data.clients - len(empty)} of {config.data.clients} places are taken{nobody}"
    right.append(f"{printable(taken)}; the server has {facts}")
    for text in wrong + right:
        say(CHECK_RECORD + json.dumps({"text": text, "wrong": text in wrong}))
    if wrong:
        raise UsageError(f"check: {len(wrong)} things are wrong; see the lines above")


def describe_differences(server: Mapping[str, str], answer: bytes) -> str:
    """In which values a node's answer to a check differs from the server; empty: in none."""
    try:
        node = dict(json.loads(answer[:_LONGEST_CHECK]))
    except (ValueError, TypeError, RecursionError):
        return "got no answer that can be read"
    differing = [name for name, value in server.items() if node.get(name) != value]
    return ", ".join(f"{name}: got {printable(str(node.get(name)), 80)}, expected {server[name]}" for name in differing)


class FlowerGrid:
    """Flower's grid, as the carrier calls it: messages to nodes, which it knows by ids of its own."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sent: dict[str, int] = {}
        """Nodes by message id."""
        self._pulling: dict[int, Future[list[Message]]] = {}
        """Pulls that are under way, by node."""
        self._replies: dict[str, bytes | Failure] = {}
        """Replies that have come and were not returned yet, by message id."""

    def nodes(self) -> set[int]:
        """Ids of the nodes that are online."""
        return set(self._grid.get_node_ids())

    def push(self, kind: str, messages: Mapping[int, bytes], ttl: float) -> dict[str, int]:
        """Send one message to each node. Returns the nodes by message id; a message that was not sent has none."""
        message_ids = self._grid.push_messages([
            Message(to_record(data), dst_node_id=node, message_type=kind, ttl=ttl) for node, data in messages.items()
        ])  # fmt: skip
        # Flower gives no id to a message that it could not send.
        sent = {message_id: node for message_id, node in zip(message_ids, messages, strict=True) if message_id}
        self._sent |= sent
        return sent

    def pull(self, message_ids: Iterable[str]) -> dict[str, bytes | Failure]:
        """The replies that have come to these messages, each returned once; a Failure for a message that expired."""
        message_ids = list(message_ids)
        by_node: dict[int, list[str]] = {}
        for message_id in message_ids:
            by_node.setdefault(self._sent.get(message_id, 0), []).append(message_id)
        for node in by_node.keys() - self._pulling.keys():
            self._pulling[node] = future = Future[list[Message]]()
            Thread(target=self._pull, args=(by_node[node], future), daemon=True).start()
        done = wait([self._pulling[node] for node in by_node], _PULL_SECONDS).done
        for node in [node for node, future in self._pulling.items() if future in done]:
            for message in self._pulling.pop(node).result():
                message_id = message.metadata.reply_to_message_id
                self._replies[message_id] = _read(message, self._sent.pop(message_id, 0))
        return {message_id: self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies}

    def _pull(self, message_ids: list[str], future: Future[list[Message]]) -> None:
        """Pull the replies of one node. If a reply was announced but is not uploaded, Flower waits for minutes with all
        messages of the same call, so each node has a call of its own."""
        try:
            future.set_result(list(self._grid.pull_messages(message_ids)))
        except BaseException as error:
            future.set_exception(error)


def _read(message: Message, node: int) -> bytes | Failure:
    """The bytes of a reply to a message that was sent to `node`. Flower does not compare the sender's id in a reply
    with the key that sent it, so that is done here."""
    if message.has_error():
        lines = (message.error.reason or "").strip().splitlines() or ["no reason was given"]
        return Failure(f"{lines[-1]} (Flower's code {message.error.code})", message.error.code == _NODE_GONE)
    if message.metadata.src_node_id != node:
        return Failure(f"a reply names node {message.metadata.src_node_id} as its sender, expected {node}")
    if list(message.content) != ["pfedlms"]:
        return Failure(f"its reply has {len(message.content)} records, expected one")
    data = dict(message.content["pfedlms"]).get("bytes", None)
    return data if isinstance(data, bytes) else Failure(f"its reply has {type(data).__name__}, expected bytes")
