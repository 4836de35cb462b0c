"""Real processes: attacks that worked before there were gate, signatures and allow-list, and their result now. Each
test says what the attacker gets and what the log says. All attacks are on loopback, and bounded."""

from __future__ import annotations

import contextlib
import json
import re
import select
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import false_replies as lies
import pytest
from attacker import Attacker
from false_replies import Lie
from flotilla import Flotilla, Memory, check, long, needs_flower, processes_of, run_config, wait_until

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import Envelope, Kind, decode
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import RunDirectory
from pfedlms.flower import approval, audit
from pfedlms.flower.check import check as check_folder
from pfedlms.flower.gate import key_header
from pfedlms.flower.signing import unseal

pytestmark = [needs_flower, long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ONLINE = "SuperNode ID: "
LIAR, RIVAL = 2, 3
"""Places with the attackers' keys. The second is not a place of the federation, which has three."""
GROWTH = 192.0
"""MiB by which a process may grow during all attacks; docs/security.md names it."""


@pytest.fixture(scope="module")
def flotilla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flotilla]:
    """Nodes 0 and 1 are honest."""
    with Flotilla(tmp_path_factory.mktemp("attacks") / "three", 4) as made:
        text = (made.app / "pfedlms.toml").read_text().replace("clients = 4", "clients = 3")
        (made.app / "pfedlms.toml").write_text(text)
        made.environment["MAX_BODY"] = str(8 << 20)  # so that 300,000 records pass the gate
        made.open(nodes=2)
        for number in range(2):
            wait_until(lambda number=number: ONLINE in made.log_text(f"node-{number}"), 200, "a node")
        yield made


def post(port: int, path: str, tls: bool = True) -> int:
    """The status of a request without credentials, whose sender does not check the certificate."""
    context = ssl._create_unverified_context() if tls else None
    request = urllib.request.Request(
        f"http{'s' * tls}://127.0.0.1:{port}{path}", data=b"", headers={"Content-Type": "application/protobuf"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_control_and_runtime_apis_are_not_at_the_nodes_address(flotilla: Flotilla) -> None:
    """Before: code on all machines within 19 s. Now: 401, and a line in the gate's log."""
    for path in ("/v1/control/start-run", "/v1/control/list-runs", "/v1/runtime/acquire-task"):
        assert post(flotilla.port, path) == 401
    lines = [json.loads(line) for line in (flotilla.folder / "gate" / "access.log").read_text().splitlines()]
    refused = [(each["path"], each["status"], each["node"]) for each in lines if each["path"].startswith("/v1/control")]
    assert refused == [("/v1/control/start-run", 401, ""), ("/v1/control/list-runs", 401, "")]


def test_a_task_is_not_given_out_without_the_secret(flotilla: Flotilla) -> None:
    """Before: 200 and the task's token. Now: 401, at the SuperLink's own port and at a node's, on loopback."""
    ports = re.findall(r"running on http://127\.0\.0\.1:(\d+)", flotilla.log_text("node-0"))
    assert post(int(ports[-1]), "/v1/runtime/acquire-task", tls=False) in (401, 403)
    assert post(flotilla.link_port, "/v1/runtime/acquire-task") in (401, 403)


def hostile_app(flotilla: Flotilla, marker: Path) -> Path:
    """An app that writes a file where it is executed."""
    folder = flotilla.folder.parent / "evil"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(flotilla.app, folder / "app")
    mark = f"import sys\nopen({str(marker)!r} + sys.argv[0].rpartition('/')[2], 'w').close()\n"
    (folder / "app" / "app.py").write_text(mark + (flotilla.app / "app.py").read_text())
    return folder


def test_code_without_approval_is_not_executed(flotilla: Flotilla, tmp_path: Path) -> None:
    """Before: anyone who reached the control API ran code on server and nodes. Now the server's launcher refuses, even
    on loopback; where the server is hostile, each node's launcher does. Nothing of the app is unpacked."""
    marker = tmp_path / "ran-"
    folder = hostile_app(flotilla, marker)
    flotilla.start("evil", "flwr", "run", str(folder / "app"), "federation", "--stream")
    assert "this machine has not approved app" in flotilla.wait_for_end("evil", 200)
    assert list(tmp_path.iterdir()) == []
    # The server is hostile.
    entry = approval.approve(folder, {}, approval.SERVER)
    audit.append(flotilla.folder / approval.SERVER, "approved", **entry)
    settings = f'flower.wait=25.0 flower.attempts=1 run.timeout=60.0 run.out="{flotilla.folder / "evil-run"}"'
    command = ["flwr", "run", str(folder / "app"), "federation", "--stream", "--run-config", settings]
    flotilla.start("evil-2", *command)
    log = flotilla.wait_for_end("evil-2", 400)
    assert [path.name for path in tmp_path.iterdir()] == ["ran-flwr-serverapp"]
    assert "has not approved app" in log
    lines = [json.loads(line) for line in (flotilla.folder / "audit" / "launcher.jsonl").read_text().splitlines()]
    assert {(each["role"], each["event"]) for each in lines if each["app"] == entry["app"]} == {
        ("server", "refused"), ("server", "started"), ("node", "refused"),
    }  # fmt: skip
    assert audit.verify(flotilla.folder / "audit" / "launcher.jsonl") == len(lines)


LIES: list[tuple[Lie, str]] = [
    (lies.garbage, "MagicError: envelope: got magic"),
    (lies.enormous, r"TruncatedError: envelope: got \d+ bytes, expected 1152921504606846976"),
    (lies.with_fields(trip=0), r"RoundError: reply: got one to round \d+, trip 0, expected "),
    (lies.with_fields(run=bytes(8)), "DigestError: reply: got one of run 0000000000000000"),
    (lies.not_a_number, r"field 'model': got nan at position \d+, expected a finite number"),
    (lies.many_claimed, r"samples: got 4294967295, expected \d+"),
    (lies.escapes, r"refused, failed: \\x1b\[2Jround 9/9: 3 trained\\nround 9/9"),
    (lies.two_answers_known, "reply: got more than one ANSWERS_KNOWN"),
    (lies.many_records, r"got more than \d records, as follows from the request"),
    (lies.very_many_records, r"reply: got 4[.\d]* ?\d* bytes, expected at most \d+, as follows from the request"),
    (lies.records_of_flower, "its reply has 21 records, expected one"),
    (lies.most_samples, r"measured: got 4294967295 samples of \w+, expected \d+ as before"),
    (lies.large_loss, r"a loss of 1e\+308, expected some and a loss of at most 1e\+12"),
    (lies.large_test_loss, r"with a loss of 1e\+308, expected a count of at most as many"),
    (lies.large_model, "model is more than train.max_scale = 100 times the others'"),
    (lies.too_large, r"no reply within \d+ s"),
]
"""The liar's replies, one for each trip, and the reasons for which it is left out."""


class Liar:
    """Executes requests as an honest node does, and changes the reply. In the first trip it also sends node 0 two
    requests, one without a signature and one with that of its own request, and a reply in the name of node 0."""

    def __init__(self, node: Node, victim: int) -> None:
        self._node, self._victim, self._trip = node, victim, -1

    def __call__(self, attacker: Attacker, kind: str, data: bytes) -> Any:
        if kind != "train.request":
            return None
        request = decode(unseal(data, None)[1])
        if request.trip == self._trip:
            return None  # repeated, because the reply was not accepted
        if self._trip < 0:
            forged = Envelope(Kind.REQUEST, request.run, 0, request.round, 2**63 - 1, ()).encode()
            signed = data[:40] + len(forged).to_bytes(8, "little") + data[48:112] + forged
            for attempt in (
                lambda: attacker.forge(self._victim, forged),
                lambda: attacker.forge(self._victim, signed),
                lambda: attacker.reply(attacker.about, bytes(100), sender=self._victim),
            ):
                try:
                    attempt()
                except Exception as error:
                    attacker.failed.append(f"forged: {error}")
        self._trip = request.trip
        honest = decode(self._node.handle(unseal(data, None)[1]))
        return LIES[request.trip][0](honest, self._node) if request.trip < len(LIES) else honest.encode()


@pytest.fixture(scope="module")
def attacked(flotilla: Flotilla, tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    """A run in which the liar sends one false reply per trip, while others send bodies of 1.5 GiB."""
    out = flotilla.folder / "run"
    chosen: dict[str, Any] = {
        "run.out": str(out), "train.rounds": len(LIES), "run.quorum": 0.5, "run.timeout": 120.0, "flower.wait": 90.0,
        "train.max_scale": 100.0,
    }  # fmt: skip
    places = json.loads((flotilla.folder / "places.json").read_text())
    config = flotilla.config(**chosen)
    with (
        Node(config, LIAR, tmp_path_factory.mktemp("liar")) as node,
        Attacker(f"127.0.0.1:{flotilla.port}", flotilla.folder, LIAR, Liar(node, places["0"]["node"])) as liar,
    ):
        flotilla.run(run_config(chosen))
        wait_until(lambda: len(liar.received) >= 1, 300, "a trip")
        tokens = _tokens(flotilla.home)
        with Memory(flotilla) as memory:
            floods = {name: flood(flotilla, path, key) for name, (path, key) in FLOODS.items()}
            log = flotilla.wait_for_end(seconds=1500)
    return Attacked(log, RunDirectory(out).read_metrics(), liar, tokens, floods, memory.seen, config)


@dataclass(frozen=True)
class Attacked:
    log: str
    metrics: list[dict[str, Any]]
    liar: Attacker
    tokens: list[str]
    floods: dict[str, tuple[int, int]]
    memory: dict[str, list[float]]
    config: Config


FLOODS = {
    "no key": ("/v1/fleet/push-object", False),
    "a registered key": ("/v1/fleet/push-object", True),
    "a registered key, many messages": ("/v1/fleet/push-messages", True),
    "the control API": ("/v1/control/start-run", False),
}
FLOOD = 3 << 29
"""1.5 GiB."""


def flood(flotilla: Flotilla, path: str, key: bool) -> tuple[int, int]:
    """The status of a request with a body of 1.5 GiB, and how many MiB of it were read."""
    context = ssl._create_unverified_context()
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/protobuf", f"Content-Length: {FLOOD}"]
    if key:
        head.append(f"flwr-public-key: {key_header((flotilla.folder / 'keys' / f'node-{LIAR}.pub').read_text())}")
    sent, zeros, answer = 0, bytes(1 << 20), b""
    with (
        socket.create_connection(("127.0.0.1", flotilla.port), timeout=60) as plain,
        context.wrap_socket(plain) as safe,
    ):
        safe.sendall("\r\n".join([*head, "", ""]).encode())
        try:
            while sent < FLOOD and not select.select([safe], [], [], 0.05)[0]:
                safe.sendall(zeros)
                sent += len(zeros)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            answer = safe.recv(4096)
    return int(answer[9:12] or 0), sent >> 20


@pytest.mark.parametrize(("lie", "reason"), LIES)
def test_a_false_reply_leaves_its_sender_out(attacked: Attacked, lie: Lie, reason: str) -> None:
    """Before: most of them were accepted. Now: the log and the metrics say why the liar is left out."""
    assert re.search(f"client {LIAR} is left out(?: of this exchange)?: .*{reason}", attacked.log)


def test_honest_nodes_are_not_disturbed(attacked: Attacked, flotilla: Flotilla) -> None:
    """Before: node 0 refused every later round, the metrics had Infinity, the operator saw forged lines."""
    metrics = attacked.metrics
    assert [each["round"] for each in metrics] == list(range(1, len(LIES) + 1))
    for each in metrics:
        assert {0, 1} <= set(each.get("clients", range(3)))
        assert set(each["left_out"]) <= {str(LIAR)}
        assert 0 < each["loss"] < 10
    assert metrics[-1]["p_acc"] > metrics[0]["p_acc"]
    for name in ("metrics.jsonl", "summary.json"):
        assert "Infinity" not in (flotilla.folder / "run" / name).read_text()
    assert "\x1b[2J" not in attacked.log
    assert "\nround 9/9" not in attacked.log
    assert attacked.tokens == []
    with Node(attacked.config, 0, flotilla.folder / "state") as node:
        assert node.state.trip == len(LIES)


def test_forged_messages_do_not_pass_the_superlink(attacked: Attacked, flotilla: Flotilla) -> None:
    """`test_signing` tests a node that receives one."""
    assert sum("forged: " in each and "400" in each for each in attacked.liar.failed) == 3
    lines = [json.loads(line) for line in (flotilla.folder / "state" / "audit.jsonl").read_text().splitlines()]
    assert [each["refused"] for each in lines if each["client"] == 0 and each["refused"]] == []
    log, node = flotilla.log_text("superlink"), attacked.liar.node
    assert f"pfedlms: node {node} is refused: got a message of node 1, expected one of its own" in log


def test_large_bodies_are_refused_before_they_are_read(attacked: Attacked, flotilla: Flotilla) -> None:
    """A reply twice the gate's limit, and 1.5 GiB. Before: server and SuperLink grew by gigabytes for good."""
    assert any("413" in each for each in attacked.liar.failed)
    assert {name: status for name, (status, _) in attacked.floods.items()} == {
        "no key": 401, "a registered key": 413, "a registered key, many messages": 413, "the control API": 401,
    }  # fmt: skip
    assert all(read <= 16 for _, read in attacked.floods.values()), attacked.floods
    assert sorted(attacked.memory) == ["gate", "server", "superlink"]
    assert all(most - first < GROWTH for first, most in attacked.memory.values()), attacked.memory


def _tokens(home: str) -> list[str]:
    """Command lines of the federation's processes that show a token."""
    found = []
    for pid in processes_of(home):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found += [line] if re.search(r"--token [0-9a-f]{16}", line) else []
    return found


def test_files_are_readable_by_their_owner_only(flotilla: Flotilla) -> None:
    """Before: models, runs and the SuperLink's data base could be read by all users of the machine."""
    assert flotilla.folder.stat().st_mode & 0o077 == 0
    inside = [path for name in ("state", "run", "keys", "audit") for path in (flotilla.folder / name).rglob("*")]
    inside.append(flotilla.folder / "superlink.db")
    assert len(inside) > 8
    assert [path for path in inside if path.stat().st_mode & 0o077 and path.suffix != ".pub"] == []


def test_a_node_that_claims_a_taken_place_is_named(flotilla: Flotilla) -> None:
    """The owner of place 0 is online. Before: the rival got its place, and a check did not find it. A node of another
    version is named, too."""
    address, other = f"127.0.0.1:{flotilla.port}", json.dumps({"pfedlms": "0.0.9", "place": "0"}).encode()

    def answer(own: Attacker, kind: str, data: bytes) -> bytes | None:
        return other if "check" in kind else None

    with (
        Attacker(address, flotilla.folder, RIVAL, answer) as rival,
        Attacker(address, flotilla.folder, LIAR, answer) as old,
    ):
        flotilla.approve()
        wrong = {each.said: each.wrong for each in check_folder(flotilla.folder)}
        owner = json.loads((flotilla.folder / "places.json").read_text())["0"]["node"]
        assert wrong[f"client 0, node {owner}: as the server"] is False
        named = [text for text, is_wrong in wrong.items() if is_wrong]
        assert [
            text for text in named if text.startswith(f"node {rival.node}: it has no place here: pfedlms: got 0.0.9")
        ]
        assert [text for text in named if text.startswith(f"client 2, node {old.node}: pfedlms: got 0.0.9, ")]
        assert [kind for kind, _ in rival.received] == ["query.check"]


def test_a_revoked_key_is_refused(flotilla: Flotilla) -> None:
    """One command ends a registration; the gate refuses the key from then on, and others are not disturbed."""
    flotilla.call("./revoke.sh", str(RIVAL))
    places = json.loads((flotilla.folder / "places.json").read_text())
    assert sorted(places) == ["0", "1", "2"]
    key = (flotilla.folder / "gate" / "keys.conf").read_text()
    assert len(key.splitlines()) == 3
    chosen = {"run.out": str(flotilla.folder / "after"), "data.clients": 2, "train.rounds": 1, "run.seed": 5}
    flotilla.run(run_config(chosen), name="after")
    flotilla.wait_for_end("after")
    check(flotilla, chosen)
