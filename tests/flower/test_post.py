"""What the server's app makes of replies: one that is announced and not uploaded keeps nobody waiting but its sender;
what a node has that the server has not is named."""

from __future__ import annotations

import json
import time
from threading import Event
from typing import Any

import pytest
from flotilla import needs_flower, until

pytestmark = needs_flower
SLOW = 7


def test_a_reply_that_is_not_uploaded_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Flower's grid does it: it returns when all that was announced has come, or its upload has expired."""
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    from pfedlms.flower.apps import GridPost, record

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    uploaded = Event()

    class Grid:
        def __init__(self) -> None:
            self.sent: dict[str, Any] = {}

        def push_messages(self, messages: list[Message]) -> list[str]:
            for each in messages:
                each.metadata.__dict__["_message_id"] = f"to-{each.metadata.dst_node_id}"
                self.sent[each.metadata.message_id] = each
            return list(self.sent)

        def pull_messages(self, names: list[str]) -> list[Message]:
            found = [self.sent.pop(name) for name in names if name in self.sent]
            if any(each.metadata.dst_node_id == SLOW for each in found):
                uploaded.wait(30)
            return [Message(record(b"%d" % each.metadata.dst_node_id), reply_to=each) for each in found]

    post = GridPost(Grid())  # type: ignore[arg-type]
    names = post.push("train.request", {SLOW: b"", 8: b"", 9: b""}, 60.0)
    start = time.monotonic()
    assert post.pull(names) == {"to-8": b"8", "to-9": b"9"}
    assert time.monotonic() - start < 10
    assert post.pull(names) == {}
    uploaded.set()
    late: dict[str, Any] = {}
    until(lambda: late.update(post.pull(names)) or late, 10, "the late reply")
    assert late == {f"to-{SLOW}": b"7"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, ""),
        ({"pfedlms": "0.0.9"}, "pfedlms: got 0.0.9, expected 1.0"),
        ({"digest": "\x1b[2J", "torch": None}, r"torch: got None, expected 2.0, digest: got \x1b[2J, expected ab"),
    ],
)
def test_what_differs_between_a_node_and_the_server_is_named(changed: dict[str, Any], named: str) -> None:
    from pfedlms.flower.apps import differing

    here = {"pfedlms": "1.0", "torch": "2.0", "digest": "ab"}
    assert differing(here, json.dumps(here | changed).encode()) == named
    assert differing(here, b"nothing") == "got no answer that can be read"
