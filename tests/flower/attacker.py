"""A registered node that is hostile: it calls Flower's fleet API directly, with a key that the server knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key

SUPERLINK = 1
Answer = Callable[["Attacker", str, bytes], Any]
"""(attacker, kind of a message, its bytes) to the reply: bytes, a RecordDict of Flower, or None."""


class Attacker:
    """Online inside `with`. `received` has the messages with their kinds, `failed` the errors of its own pushes."""

    def __init__(self, address: str, folder: Path, place: int, answer: Answer) -> None:
        self._address, self._folder, self._place, self.answer = address, folder, place, answer
        self.received: list[tuple[str, bytes]] = []
        self.failed: list[str] = []
        self.run = 0
        self.node = 0
        self.about: Any = None
        """Metadata of the last message."""
        self.ready, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> Attacker:
        self._thread.start()
        assert self.ready.wait(60), self.failed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(60)

    def _live(self) -> None:
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
        from flwr.supernode.fleet_http_connection import http_request_response

        private = load_ssh_private_key((self._folder / "keys" / f"node-{self._place}").read_bytes(), None)
        authority = (self._folder / "certificates" / "ca.crt").read_bytes()
        keys = (private, private.public_key())
        with http_request_response(self._address, False, authority, keys, 1, 20) as connection:  # type: ignore[arg-type]
            self.node, receive, self._send, _, _, pull, self._push, confirm = connection
            self.ready.set()
            while not self._ended.wait(1.0):
                try:
                    if (found := receive()) is None:
                        continue
                    about, tree = found
                    self.run = about.metadata.run_id
                    message = pull_and_inflate_object_from_tree(
                        tree,
                        lambda each: pull(self.run, each),
                        lambda each: confirm(self.run, each),
                        return_type=Message,
                    )
                    data = message.content["pfedlms"]["bytes"]
                    self.received.append((about.metadata.message_type, data))
                    self.about = about.metadata
                    reply = self.answer(self, about.metadata.message_type, data)
                    if reply is not None:
                        self.reply(about.metadata, reply)
                except BaseException as error:  # Flower raises such ones; the attack continues
                    self.failed.append(f"{type(error).__name__}: {error}")

    def reply(self, to: Any, data: Any, sender: int | None = None) -> None:
        """Reply to the message with these metadata, under its own id or another one."""
        left = to.created_at + to.ttl - time.time()  # Flower refuses a reply that outlives its message
        own = self.node if sender is None else sender
        self._pushed(data, own, to.src_node_id, to.message_id, to.message_type, to.src_task_id, left - 1)

    def forge(self, node: int, data: bytes) -> None:
        """Send a message to another node as if from the server: Flower checks the id in it, not the sender."""
        self._pushed(data, SUPERLINK, node, "", "train.request", None, 60.0)

    def _pushed(
        self, data: Any, sender: int, to: int, replied: str, kind: str, task: int | None, ttl: float
    ) -> None:  # fmt: skip
        from flwr.app import ConfigRecord, RecordDict
        from flwr.app.message import make_message
        from flwr.app.metadata import Metadata
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        about = Metadata(
            run_id=self.run, message_id="", src_node_id=sender, dst_node_id=to, reply_to_message_id=replied,
            group_id="", created_at=time.time(), ttl=ttl, message_type=kind, src_task_id=None, dst_task_id=task,
        )  # fmt: skip
        content = RecordDict({"pfedlms": ConfigRecord({"bytes": data})}) if isinstance(data, bytes) else data
        message = make_message(about, content)
        message.metadata.__dict__["_message_id"] = message.object_id
        wanted, session = self._send(message, get_object_tree(message), 0.0)
        for name, each in get_all_nested_objects(message).items():
            if name in wanted:
                self._push(self.run, session, name, each.deflate())
