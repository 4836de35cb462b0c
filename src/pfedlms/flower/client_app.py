"""A node as a Flower ClientApp: bytes in, bytes out. Every message opens the node from its disk and closes it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pfedlms import __version__
from pfedlms.deploy import Node
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.flower.carrier import CHECK, REQUEST, WHO
from pfedlms.flower.keys import configured, seated


def client_app(file: Path, problem: Problem = NAMED) -> Any:
    """See `flower.client`. What a handler raises reaches the server as the reason why this node is left out."""

    def opened(context: Context) -> Node:
        config, seat, folder = seated(*configured(file, context.run_config), context.node_config)
        return Node(config, seat.partition_id, folder, seat.data or None, problem)

    def who(_: bytes, context: Context) -> bytes:
        _config, seat, _folder = seated(*configured(file, context.run_config), context.node_config)
        return str(seat.partition_id).encode()

    def check(_: bytes, context: Context) -> bytes:
        with opened(context) as node:
            return json.dumps({**versions(), "digest": node.run.hex()}).encode()

    def request(data: bytes, context: Context) -> bytes:
        with opened(context) as node:
            return node.handle(data)

    app = ClientApp()
    app.query(WHO.partition(".")[2])(_carried(who))
    app.query(CHECK.partition(".")[2])(_carried(check))
    app.train(REQUEST.partition(".")[2])(_carried(request))
    return app


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
