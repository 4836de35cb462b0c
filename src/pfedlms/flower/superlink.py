"""Flower's SuperLink with a check that flwr 1.41 lacks: a node may only push one reply, from its own id, to the server.

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


def describe_violation(request: Any) -> str:
    """Why a node may not push these messages; empty if it may."""
    if len(request.messages_list) != 1:
        return f"got {len(request.messages_list)} messages, expected one"
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != request.node.node_id:
        return f"got a message of node {metadata.src_node_id}, expected one of its own"
    if not metadata.reply_to_message_id or metadata.dst_node_id != SUPERLINK:
        return f"got a message to node {metadata.dst_node_id}, expected a reply to the server"
    return ""


def guard(handlers: Any) -> None:
    """Make Flower's module check what a node pushes before it is stored."""
    push, http_error = handlers.push_messages, import_module("starlette.exceptions").HTTPException

    def push_messages(request: Any, state: Any) -> Any:
        if violation := describe_violation(request):
            logging.getLogger("flwr").warning("pfedlms: node %s is refused: %s", request.node.node_id, violation)
            raise http_error(400, violation)
        return push(request=request, state=state)

    handlers.push_messages = push_messages


if __name__ == "__main__":
    guard(import_module("flwr.superlink.servicer.fleet.fleet_handlers"))
    import_module("flwr.superlink.cli").flower_superlink()
