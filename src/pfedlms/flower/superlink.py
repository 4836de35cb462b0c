"""Flower's SuperLink with a check that flwr 1.41 lacks: a node pushes one reply, from its own id, to the server.

    python -m pfedlms.flower.superlink OPTIONS      as flower-superlink takes them

Without it, a registered node can send messages to other nodes. They refuse what is not signed, but each message costs
them a process and its seconds.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

SUPERLINK = 1
"""The id that Flower gives to its server."""


def objection(request: Any) -> str:
    """What is wrong with what a node pushes; empty: nothing."""
    if len(request.messages_list) != 1:
        return f"got {len(request.messages_list)} messages, expected one"
    about = request.messages_list[0].metadata
    if about.src_node_id != request.node.node_id:
        return f"got a message of node {about.src_node_id}, expected one of its own"
    if not about.reply_to_message_id or about.dst_node_id != SUPERLINK:
        return f"got a message to node {about.dst_node_id}, expected a reply to the server"
    return ""


def guard(handlers: Any) -> None:
    """Make Flower's module ask before it stores what a node pushes."""
    push, refuse = handlers.push_messages, import_module("starlette.exceptions").HTTPException

    def push_messages(request: Any, state: Any) -> Any:
        if found := objection(request):
            logging.getLogger("flwr").warning("pfedlms: node %s is refused: %s", request.node.node_id, found)
            raise refuse(400, found)
        return push(request=request, state=state)

    handlers.push_messages = push_messages


if __name__ == "__main__":
    guard(import_module("flwr.superlink.servicer.fleet.fleet_handlers"))
    import_module("flwr.superlink.cli").flower_superlink()
