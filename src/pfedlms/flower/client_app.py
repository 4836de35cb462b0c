"""A node as a Flower ClientApp: bytes in, bytes out. Every message opens the node from its disk and closes it again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import flwr
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pfedlms import __version__
from pfedlms.deploy import Node
from pfedlms.deploy.envelope import decode, reason
from pfedlms.engine.transport import Code
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.flower import audit
from pfedlms.flower.carrier import CHECK, REQUEST, WHO
from pfedlms.flower.keys import NodeSection, configured, seated
from pfedlms.flower.signing import SealedNode, check_query, public_key


def client_app(file: Path, problem: Problem = NAMED) -> Any:
    """See `flower.client`. What a handler raises reaches the server as the reason why this node is left out."""

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

    app = ClientApp()
    app.query(WHO.partition(".")[2])(_carried(who))
    app.query(CHECK.partition(".")[2])(_carried(check))
    app.train(REQUEST.partition(".")[2])(_carried(request))
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


def versions() -> dict[str, str]:
    """What both ends should have alike."""
    return {"pfedlms": __version__, "torch": torch.__version__.partition("+")[0], "flwr": flwr.__version__}


def record(data: bytes) -> RecordDict:
    """Bytes as Flower carries them."""
    return RecordDict({"pfedlms": ConfigRecord({"bytes": data})})


def _carried(handler: Any) -> Any:
    def handle(message: Message, context: Context) -> Message:
        said = handler(message.content["pfedlms"]["bytes"], context)
        return Message(record(said), reply_to=message)

    return handle
