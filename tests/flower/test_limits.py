"""Replies are bounded before they are parsed, delay no other reply, and cannot act on a terminal or a log."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import time
import warnings
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import false_replies
import pytest
from false_replies import lying_route
from fleet import Fleet, make_config
from flotilla import needs_flower, wait_until
from test_signing import signed_handler, signing_transport

from pfedlms.deploy import Node, serve
from pfedlms.deploy.coordinator import RoundLog
from pfedlms.deploy.envelope import Code, Envelope, Reason, Record, decode, largest_reply
from pfedlms.deploy.nodes import message_bytes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.errors import ConfigError, DataError, UsageError, printable
from pfedlms.experiment.config import load_config
from pfedlms.experiment.prepare import NAMED_PROBLEM
from pfedlms.flower import audit
from pfedlms.flower.config import NodeSection
from pfedlms.flower.launcher import Launcher
from pfedlms.flower.signing import unseal
from pfedlms.flower.superlink import describe_violation
from pfedlms.flower.supernode import end_after_tls_error


def long_text(reply: Envelope, node: Node) -> bytes:
    return reply.reply(Record(Code.REFUSED, flags=Reason.FAILED, data=b"x" * 1500), Record(Code.ANSWERS_KNOWN)).encode()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (false_replies.very_many_records, "reply: got 48"),
        (false_replies.too_large, "reply: got 16777216 bytes"),
        (false_replies.many_records, " records, as follows from the request"),
        (false_replies.one_record_more, "got 1 records that the server did not ask for"),
        (false_replies.two_answers_known, "than one ANSWERS_KNOWN"),
        (false_replies.escapes, r"\x1b[2Jround 9/9: 3 trained\nround 9/9: P-acc 100.00 %"),
        (long_text, "x" * 300 + "…"),
    ],
)
def test_a_node_that_breaks_a_limit_is_left_out_and_named(lie: false_replies.Lie, reason: str, tmp_path: Path) -> None:
    """Its text is cut, and cannot begin a line of the log."""
    config = make_config("sketchvote", tmp_path / "run")
    lines, notes, sizes = list[str](), list[dict[str, object]](), message_bytes(RunSetup(config))

    def check_limits(requests: dict[int, bytes]) -> None:
        for each in requests.values():
            assert largest_reply(decode(unseal(each, None)[1]), sizes)[0] < 4096 + sum(sizes)

    fleet = Fleet(
        config, tmp_path / "nodes", lying_route(lie, lambda: fleet), before_trip=check_limits, handler=signed_handler
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        serve(config, signing_transport(fleet, notes.append), [RoundLog(lines.append)])
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    metrics = [json.loads(line) for line in text.splitlines()]
    assert all(reason in each["left_out"]["2"] for each in metrics), metrics[0]["left_out"]
    assert all(set(each["client_acc"]) and len(each["clients"]) == 3 for each in metrics)
    assert len(text) < 20_000
    everything = [*lines, *(str(each.message) for each in caught), *(str(each["result"]) for each in notes)]
    assert not [line for line in everything if any(ord(each) < 32 or 127 <= ord(each) < 160 for each in line)]
    assert sum(line.startswith("round 9/9") for line in lines) == 0
    assert len(lines) == 3 + 2


def test_text_of_others_is_made_printable() -> None:
    assert printable("a b é 漢") == "a b é 漢"
    assert printable("a\nb\tc\x00\x7f\x85\u2028\u200f\ud800") == r"a\nb\tc\x00\x7f\x85\u2028\u200f\ud800"
    assert printable("x" * 301) == "x" * 300 + "…"


def test_a_changed_audit_log_is_detected(tmp_path: Path) -> None:
    log = tmp_path / "audit" / "log.jsonl"
    for number in range(20):
        audit.append(log, "reply", number=number, text="x" * 5000 * (number % 3) + false_replies.FORGED)
    assert audit.verify(str(log)) == audit.verify(log) == 20
    assert log.stat().st_mode & 0o077 == 0
    lines = log.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(20))
    for changed in (lines[:5] + lines[6:], [*lines[:7], lines[7].replace('"number": 7', '"number": 8'), *lines[8:]]):
        log.write_text("\n".join(changed) + "\n")
        with pytest.raises(UsageError, match=r"names '.*' as the line before it"):
            audit.verify(log)


def test_a_line_whose_write_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for number in range(3):
        audit.append(log, "reply", number=number)
        with open(log, "ab") as file:
            file.write(b'{"time": "2026-01-01", "ev' * number)
    audit.append(log, "reply", number=3)
    assert audit.verify(log) == 4
    log.write_bytes(log.read_bytes().removesuffix(b"\n"))  # as some editors leave a file
    audit.append(log, "reply", number=4)
    assert audit.verify(log) == 5


def test_a_node_ends_where_flower_would_stay_without_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    """After an error of TLS; of a server that does not know its key, the log says so."""
    ended: list[int] = []
    made = end_after_tls_error(
        lambda: SimpleNamespace(should_giveup=lambda error: "gave up" in str(error)), ended.append
    )()
    logging.getLogger("flwr").propagate = True
    for text, gives_up in (("connection refused", False), ("gave up", True)):
        assert made.should_giveup(OSError(text)) == gives_up
    assert not ended
    made.should_giveup(OSError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired"))
    busy = RuntimeError("503 Service Unavailable for url https://fl.tls.example/v1/fleet")
    busy.response = SimpleNamespace(status_code=503)  # type: ignore[attr-defined]
    made.should_giveup(busy)
    assert ended == [3]
    unknown = RuntimeError("refused")
    unknown.response = SimpleNamespace(status_code=401)  # type: ignore[attr-defined]
    made.should_giveup(unknown)
    assert ended == [3]
    assert ["no TLS connection" in text or "not registered" in text for text in caplog.messages] == [True, True]


def test_a_node_that_ends_leaves_no_app_behind(tmp_path: Path) -> None:
    launcher = Launcher("node", tmp_path, None)
    (token := tmp_path / "token").touch()
    process = subprocess.Popen(["sleep", "60"])
    launcher._running[process] = token
    launcher.reconcile()
    assert token.exists()
    launcher.close()
    assert process.wait(10) == -signal.SIGTERM
    launcher.reconcile()  # the app did not come as far as to remove its token
    assert not token.exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"src_node_id": 6}, "got a message of node 6, expected one of its own"),
        ({"src_node_id": 1, "dst_node_id": 6, "reply_to_message_id": ""}, "got a message of node 1"),
        ({"reply_to_message_id": ""}, "expected a reply to the server"),
        ({"dst_node_id": 6}, "got a message to node 6, expected a reply to the server"),
    ],
)
def test_a_node_may_push_only_its_own_replies(changes: dict[str, object], expected: str) -> None:
    metadata = SimpleNamespace(**{"src_node_id": 5, "dst_node_id": 1, "reply_to_message_id": "x", **changes})
    request = SimpleNamespace(node=SimpleNamespace(node_id=5), messages_list=[SimpleNamespace(metadata=metadata)])
    found = describe_violation(request)
    assert (bool(found), expected in found) == (bool(expected), True)
    request.messages_list *= 2
    assert describe_violation(request) == "got 2 messages, expected one"


@needs_flower
def test_a_reply_that_is_not_uploaded_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's grid returns when all announced replies have arrived, or their upload has expired."""
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    from pfedlms.flower.apps import FlowerGrid, to_record

    slow = 7
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
            if any(each.metadata.dst_node_id == slow for each in found):
                uploaded.wait(30)
            return [Message(to_record(b"%d" % each.metadata.dst_node_id), reply_to=each) for each in found]

    post = FlowerGrid(Grid())  # type: ignore[arg-type]
    names = post.push("train.request", {slow: b"", 8: b"", 9: b""}, 60.0)
    start = time.monotonic()
    assert post.pull(names) == {"to-8": b"8", "to-9": b"9"}
    assert time.monotonic() - start < 10
    assert post.pull(names) == {}
    uploaded.set()
    late: dict[str, Any] = {}
    wait_until(lambda: late.update(post.pull(names)) or late, 10, "the late reply")
    assert late == {f"to-{slow}": b"7"}


@needs_flower
def test_an_error_about_a_nodes_own_data_does_not_quote_them_to_the_server(tmp_path: Path) -> None:
    """Flower sends an error's text to the server. The node's own log has all of it."""
    from pfedlms.flower.apps import open_node

    table = tmp_path / "data.csv"
    table.write_text("patient,age,label\nJane Doe,70,yes\nJohn Doe,71,no\n")
    data = {"dataset": "custom", "class_names": "no,yes", "sample_shape": "2", "clients": 2}
    section, logged = NodeSection(partition_id=0, data=f"file:{table}"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    try:
        with pytest.raises(DataError) as caught:
            open_node(load_config(None, {"data": data}), section, tmp_path, NAMED_PROBLEM)
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    assert str(caught.value) == "it cannot be opened with its own data (DataError); the log of that node says why"
    assert caught.value.__context__ is None
    assert "Jane Doe" in "".join(str(record.exc_info) for record in logged)
    with pytest.raises(ConfigError, match=r"data\.sample_shape: got ''"):  # nothing of the data is in it
        open_node(load_config(None, {"data": data | {"sample_shape": ""}}), section, tmp_path, NAMED_PROBLEM)


@needs_flower
def test_a_check_names_free_places_and_nodes_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rival of node 70 is wrong, also if it claims that its place is none."""
    from pfedlms.flower import apps

    config, said = load_config(None, {"data": {"clients": 3}}), list[str]()
    monkeypatch.setattr(apps, "say", said.append)
    same = {**apps.versions(), "digest": bytes(8).hex()}
    other = {"torch": None, "digest": "\x1b[2J", "place": "2"}
    given = {70: {"place": "0"}, 71: {"place": "0"}, 72: {"place": "None"}, 73: other}
    answers = {node: json.dumps(same | each).encode() for node, each in given.items()} | {74: b"nothing"}
    with pytest.raises(UsageError, match="4 things are wrong"):
        apps.check_nodes(config, {0: 70, 1: 79, 2: 73}, answers, bytes(8))
    found = [json.loads(line.partition(": ")[2]) for line in said]
    assert [each["wrong"] for each in found] == [True] * 4 + [False] * 2
    texts = [each["text"] for each in found]
    assert texts[0] == "node 71: it has no place here: place: got 0, expected None"
    version, torch = same["digest"], same["torch"]
    assert texts[2] == rf"client 2, node 73: torch: got None, expected {torch}, digest: got \x1b[2J, expected {version}"
    assert texts[3] == "node 74: it has no place here: got no answer that can be read"
    assert texts[4] == "client 0, node 70: as the server"
    assert texts[5].startswith("2 of 3 places are taken, nobody is at 1; the server has ")
