"""Real processes: what was done to a federation before there were gate, signatures and allow-list, and what comes of
it now. Each test says what the attacker gets and what the log says. All of it is on loopback, and bounded."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from attacker import Attacker
from flotilla import Flotilla, belonging, check, long, needs_flower, run_config, until

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import Code, Envelope, Kind, Record, Why, decode, refusal
from pfedlms.experiment.store import RunDirectory
from pfedlms.flower import approval, audit
from pfedlms.flower.check import check as check_folder
from pfedlms.flower.seal import content_of

pytestmark = [needs_flower, long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ONLINE = "SuperNode ID: "
LIAR, RIVAL = 2, 3
"""Places whose keys are the attackers'. The second is not a place of the federation, which has three."""
FORGED = "\x1b[2Jround 9/9: 3 trained\nround 9/9: P-acc 100.00 %"


@pytest.fixture(scope="module")
def flotilla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flotilla]:
    """Nodes 0 and 1 are honest."""
    with closing(Flotilla(tmp_path_factory.mktemp("attacks") / "three", 4)) as made:
        text = (made.app / "pfedlms.toml").read_text().replace("clients = 4", "clients = 3")
        (made.app / "pfedlms.toml").write_text(text)
        made.open()
        for number in range(2):
            made.node(number)
        for number in range(2):
            until(lambda number=number: ONLINE in made.said(f"node-{number}"), 200, "a node")
        yield made


def posted(port: int, path: str, tls: bool = True) -> int:
    """The status of a request without any credentials, whose sender does not even look at the certificate."""
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
        assert posted(flotilla.port, path) == 401
    lines = [json.loads(line) for line in (flotilla.folder / "gate" / "access.log").read_text().splitlines()]
    refused = [(each["path"], each["status"], each["node"]) for each in lines if each["path"].startswith("/v1/control")]
    assert refused == [("/v1/control/start-run", 401, ""), ("/v1/control/list-runs", 401, "")]


def test_a_task_is_not_handed_out_without_the_secret(flotilla: Flotilla) -> None:
    """Before: 200 and the task's token. Now: 401, at the SuperLink's own port and at a node's, on loopback."""
    ports = re.findall(r"running on http://127\.0\.0\.1:(\d+)", flotilla.said("node-0"))
    assert posted(int(ports[-1]), "/v1/runtime/acquire-task", tls=False) in (401, 403)
    assert posted(flotilla.link_port, "/v1/runtime/acquire-task") in (401, 403)


def evil(flotilla: Flotilla, marker: Path) -> Path:
    """An app that writes down where it was executed."""
    folder = flotilla.folder.parent / "evil"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(flotilla.app, folder / "app")
    mark = f"import sys\nopen({str(marker)!r} + sys.argv[0].rpartition('/')[2], 'w').close()\n"
    (folder / "app" / "app.py").write_text(mark + (flotilla.app / "app.py").read_text())
    return folder


def test_code_that_nobody_approved_is_not_executed(flotilla: Flotilla, tmp_path: Path) -> None:
    """Before: whoever reached the control API ran code on server and nodes. Now, even from the server's own loopback:
    the server's launcher refuses; and where the server is hostile, each node's does. Nothing of the app is unpacked."""
    marker = tmp_path / "ran-"
    folder = evil(flotilla, marker)
    flotilla.start("evil", "flwr", "run", str(folder / "app"), "federation", "--stream")
    assert "this machine has not approved app" in flotilla.finished("evil", 200)
    assert list(tmp_path.iterdir()) == []
    # The server is hostile.
    entry = approval.approve(folder, {}, approval.SERVER)
    audit.append(flotilla.folder / approval.SERVER, "approved", **entry)
    settings = f'flower.wait=25.0 flower.attempts=1 run.timeout=60.0 run.out="{flotilla.folder / "evil-run"}"'
    command = ["flwr", "run", str(folder / "app"), "federation", "--stream", "--run-config", settings]
    flotilla.start("evil-2", *command)
    said = flotilla.finished("evil-2", 400)
    assert [path.name for path in tmp_path.iterdir()] == ["ran-flwr-serverapp"]
    assert "has not approved app" in said
    lines = [json.loads(line) for line in (flotilla.folder / "audit" / "launcher.jsonl").read_text().splitlines()]
    assert {(each["role"], each["event"]) for each in lines if each["app"] == entry["app"]} == {
        ("server", "refused"), ("server", "started"), ("node", "refused"),
    }  # fmt: skip
    assert audit.verify(flotilla.folder / "audit" / "launcher.jsonl") == len(lines)


def attack(attacker: Attacker, kind: str, data: bytes) -> bytes | None:
    """What the liar does in each trip: forged requests to node 0, and a reply that it should not send."""
    if kind != "train.request":
        return None
    asked, heard = decode(content_of(data)), Record(Code.ANSWERS_KNOWN, 0)
    forged = Envelope(Kind.REQUEST, asked.run, 0, asked.round, 2**63 - 1, ()).encode()
    for content in (forged, data[:40] + len(forged).to_bytes(8, "little") + data[48:112] + forged):
        try:
            attacker.forge(attacker.victim, content)  # type: ignore[attr-defined]
        except Exception as error:
            attacker.failed.append(f"forged: {error}")
    if asked.trip == 0:
        return refusal(asked, Why.FAILED, FORGED, 0)
    return asked.reply(heard, heard).encode() if asked.trip == 1 else bytes(8 << 20)


def test_a_registered_node_that_attacks(flotilla: Flotilla) -> None:
    """It sends node 0 forged requests, bare and under the signature of its own request. It replies with a refusal with
    escapes and lines of a log, with two ANSWERS_KNOWN, and with 8 MiB where 4 KiB were asked for.

    Before: node 0 refused every later round, the operator saw forged lines, server and SuperLink grew without limit.
    Now: the run of the two others is as without it."""
    out = flotilla.folder / "run"
    chosen: dict[str, Any] = {
        "run.out": str(out), "train.rounds": 2, "run.quorum": 0.5, "run.timeout": 60.0, "flower.wait": 60.0,
    }  # fmt: skip
    places = json.loads((flotilla.folder / "places.json").read_text())
    liar = Attacker(f"127.0.0.1:{flotilla.port}", flotilla.folder, LIAR, attack)
    liar.victim = places["0"]["node"]  # type: ignore[attr-defined]
    with liar:
        flotilla.run(run_config(chosen))
        until(lambda: not _tokens(flotilla.home) and len(liar.came) >= 1, 300, "a trip")
        assert not _tokens(flotilla.home)
        said = flotilla.finished(seconds=900)
    metrics = RunDirectory(out).read_metrics()
    assert [each["round"] for each in metrics] == [1, 2]
    assert all(each["clients"] == [0, 1] for each in metrics)
    assert all("0" not in each["left_out"] and "1" not in each["left_out"] for each in metrics)
    texts = " ".join(each["left_out"].get("2", "") for each in metrics)
    assert r"client 2 is left out: refused, failed: \x1b[2Jround 9/9: 3 trained\nround 9/9" in said
    assert "than one ANSWERS_KNOWN" in texts
    assert "\x1b[2J" not in said
    assert "\nround 9/9" not in said
    assert any("413" in each for each in liar.failed)  # what is too large does not pass the gate
    lines = [json.loads(line) for line in (flotilla.folder / "state" / "audit.jsonl").read_text().splitlines()]
    # Forged requests do not pass the SuperLink; what a node does with them, `test_signing` says.
    assert [each["refused"] for each in lines if each["client"] == 0 and each["refused"]] == []
    assert sum("forged: " in each and "400" in each for each in liar.failed) >= 6
    refused = f"pfedlms: node {liar.node} is refused: got a message of node 1, expected one of its own"
    assert refused in flotilla.said("superlink")
    with Node(flotilla.config(**chosen), 0, flotilla.folder / "state") as node:
        assert node.state.trip < 10


def _tokens(home: str) -> list[str]:
    """Command lines of the federation's processes that show a token."""
    found = []
    for pid in belonging(home):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found += [line] if re.search(r"--token [0-9a-f]{16}", line) else []
    return found


def test_what_lies_on_the_disk_is_the_owners(flotilla: Flotilla) -> None:
    """Before: models, runs and the SuperLink's data base could be read by all users of the machine."""
    assert flotilla.folder.stat().st_mode & 0o077 == 0
    inside = [path for name in ("state", "run", "keys", "audit") for path in (flotilla.folder / name).rglob("*")]
    inside.append(flotilla.folder / "superlink.db")
    assert len(inside) > 8
    assert [path for path in inside if path.stat().st_mode & 0o077 and path.suffix != ".pub"] == []


def test_a_rival_does_not_get_a_place_and_is_named(flotilla: Flotilla) -> None:
    """It says that place 0 is its own, whose owner is online. Before: it got it, and a check missed it."""
    with Attacker(
        f"127.0.0.1:{flotilla.port}", flotilla.folder, RIVAL, lambda own, kind, data: b"0" if "who" in kind else None
    ) as rival:
        flotilla.approve()
        found = check_folder(flotilla.folder)
        said = {each.said: each.wrong for each in found}
        owner = json.loads((flotilla.folder / "places.json").read_text())["0"]["node"]
        both = ", ".join(map(str, sorted((owner, rival.node))))
        assert said[f"client 0: nodes {both} all say that this is their place"] is True
        assert said[f"client 0, node {owner}: as the server"] is False
        assert [kind for kind, _ in rival.came] == ["query.who"]


def test_a_revoked_key_is_not_let_in(flotilla: Flotilla) -> None:
    """One command ends a registration; the gate refuses the key from then on, and others are not disturbed."""
    flotilla.call("./revoke.sh", str(RIVAL))
    places = json.loads((flotilla.folder / "places.json").read_text())
    assert sorted(places) == ["0", "1", "2"]
    key = (flotilla.folder / "gate" / "keys.conf").read_text()
    assert len(key.splitlines()) == 3
    chosen = {"run.out": str(flotilla.folder / "after"), "data.clients": 2, "train.rounds": 1, "run.seed": 5}
    flotilla.run(run_config(chosen), name="after")
    flotilla.finished("after")
    check(flotilla, chosen)
