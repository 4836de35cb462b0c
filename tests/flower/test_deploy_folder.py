"""The folder of `pfedlms deploy init`: its settings, scripts, keys, approvals and upgrades."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
from base64 import b64decode
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from pfedlms.cli import main
from pfedlms.cli.lists import settings
from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment.config import load_config
from pfedlms.flower import approval, gate
from pfedlms.flower.check import check
from pfedlms.flower.config import FlowerSection, NodeSection, node_settings, run_settings
from pfedlms.flower.folder import upgrade, write_folder
from pfedlms.flower.signing import private_key, public_key
from pfedlms.methods import METHODS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for three nodes."""
    write_folder(tmp_path / "f", 3)
    return tmp_path / "f"


def call(folder: Path, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **more)


def declared_settings(folder: Path) -> dict[str, Any]:
    return approval.declared_settings((folder / "app" / "pyproject.toml").read_text())


def test_a_run_must_be_on_the_allow_list(tmp_path: Path) -> None:
    """An entry written by hand: an app that declares 3 rounds, approved with 5."""
    with ZipFile(made := BytesIO(), "w") as archive:
        archive.writestr("pyproject.toml", "[tool.flwr.app.config.train]\nrounds = 3\n")
    app, file = made.getvalue(), tmp_path / approval.NODE
    known, five = (hashlib.sha256(each).hexdigest() for each in (app, b'{"train.rounds": 5}'))
    with pytest.raises(approval.NotApprovedError, match=f"has not approved app {known[:16]};"):
        approval.check(file, app, {})
    file.write_text(json.dumps({"app": known, "configuration": five, "settings": {}}) + "\n\n")
    assert approval.check(file, app, {"train.rounds": 5}) == known
    assert approval.check(file, app, {"train.rounds": 5, "run.timeout": 9, "flower.wait": 1}) == known
    for content, override, expected in (
        (app, {}, "but not with its own settings;"),
        (app, {"train.rounds": 6}, "but not with train.rounds=6;"),
        (app, {"train.rounds": 5, "run.seed": 1}, "but not with run.seed=1, train.rounds=5;"),
        (app + b"x", {"train.rounds": 5}, "has not approved app"),
    ):
        with pytest.raises(approval.NotApprovedError, match=expected):
            approval.check(file, content, override)
    file.write_bytes((whole := file.read_bytes()) + b'{"app": "cut o')  # the disk was full
    assert approval.check(file, app, {"train.rounds": 5}) == known
    file.write_bytes(b"{}\n" + whole)
    with pytest.raises(UsageError, match=r"holds a line that is no entry \(.*\); delete"):
        approval.check(file, app, {"train.rounds": 5})


def test_a_setting_that_is_not_declared_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--run-config: got 'train\.rouns', .*did you mean train\.rounds\?"):
        approval.approve(folder, {"train.rouns": 3})
    assert not (folder / approval.NODE).exists()


def test_every_setting_is_declared_with_its_meaning(folder: Path) -> None:
    declared, own = declared_settings(folder), {f"flower.{each.name}" for each in fields(FlowerSection)}
    assert declared.keys() - own == {row["setting"] for row in settings()} | {"method.name"}
    assert own <= declared.keys()
    lines = (folder / "app" / "pyproject.toml").read_text().splitlines()
    start = lines.index("[tool.flwr.app.config.flower]")
    keys = [number for number, line in enumerate(lines) if number > start and " = " in line and line[0] not in "#["]
    assert len(keys) == len(declared)
    assert all(lines[number - 1].startswith("# ") for number in keys)


@pytest.mark.parametrize(("nodes", "weight"), [(1, 1.0), (2, 1.0), (3, 0.4), (5, 0.4)])
def test_the_folder_is_a_complete_configuration(nodes: int, weight: float, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    files = write_folder(folder, nodes, "sketchvote", server="example.org", port=8123)
    assert sorted(files) == sorted(path for path in folder.rglob("*") if path.is_file())
    assert not [path for path in files if re.search("@[A-Z]+@", path.read_text())]
    config, flower = run_settings(folder / "app" / "pfedlms.toml", declared_settings(folder))
    assert config == load_config(folder / "app" / "pfedlms.toml")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    assert (flower.key, flower.nodes) == (f"{folder}/keys/server-signing.key", f"{folder}/places.json")
    assert (config.method, config.data.clients, config.train.max_weight) == ("sketchvote", nodes, weight)
    assert config.train.max_scale == 100
    assert config.run.out == str(folder / "run")
    where = tomllib.loads((folder / "flwr" / "config.toml").read_text())["superlink"]["federation"]
    assert where == {"address": "127.0.0.1:8124", "root-certificates": str(folder / "certificates" / "ca.crt")}
    scripts = sorted(folder.glob("*.sh"))
    assert [f"node-{k}.sh" for k in range(nodes)] == [path.name for path in scripts if path.name.startswith("node-")]
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert (script.stat().st_mode & 0o100 != 0) == (script.name != "environment.sh")
    units = [path.read_text() for path in (folder / "systemd").iterdir()]
    assert len(units) == 2 * nodes + 2
    hardened = ("NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes", "UMask=0077", "MemoryMax=")
    for line in (*hardened, "User=pfedlms"):
        assert all(line in unit for unit in units), line
    if shutil.which("systemd-analyze"):
        names = [path.name for path in (folder / "systemd").iterdir()]
        verify = ["systemd-analyze", "verify", "--man=no", *names]
        done = subprocess.run(verify, cwd=folder / "systemd", capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("server", "option", "name"),
    [
        ("example.org", "-verify_hostname", "example.org"),
        ("192.168.0.10", "-verify_ip", "192.168.0.10"),
        ("[fd00::1]", "-verify_ip", "fd00::1"),
    ],
)
def test_certificates_and_keys_are_valid_and_private(server: str, option: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write_folder(folder, 2, server=server)
    secret = ("ca.key", "node-0", "server-signing.key", "launcher-secret")
    for script in (
        "./certificates.sh",
        "./keys.sh",
        "./certificates.sh",
        "./keys.sh",
    ):  # a second call keeps the secrets
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.name in secret}
        call(folder, script, check=True)
        assert all(path.read_bytes() == content for path, content in before.items())
    assert len(before) == 4
    made = folder / "certificates"
    shown = call(made, "openssl", "verify", "-CAfile", "ca.crt", option, name, "server.pem", check=True)
    assert shown.stdout == "server.pem: OK\n"
    secrets = [*made.glob("*.key"), *(path for path in (folder / "keys").iterdir() if path.suffix != ".pub")]
    assert len(secrets) == 6
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    key, other = private_key(folder / "keys" / "server-signing.key"), public_key(folder / "keys" / "server.pub")
    assert key.public_key() == other


def test_keys_and_authorities_can_be_rotated(folder: Path) -> None:
    """By one command each; the old ones are moved aside."""
    call(folder, "./certificates.sh", check=True)
    call(folder, "./keys.sh", check=True)
    names = ("keys/node-0.pub", "keys/node-1.pub", "keys/server.pub", "certificates/ca.crt")
    before = [(folder / name).read_bytes() for name in names]
    call(folder, "./keys.sh", "--rotate", "0", check=True)
    call(folder, "./keys.sh", "--rotate", "server", check=True)
    call(folder, "./certificates.sh", "--new-authority", check=True)
    after = [(folder / name).read_bytes() for name in names]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False, False]
    assert len(list((folder / "keys" / "old").iterdir())) == 4
    for which in ("x", "-h", "node-1"):
        done = call(folder, "./keys.sh", which)
        assert (done.returncode, f"got {which}, expected server or the number" in done.stderr) == (2, True)
    assert not list((folder / "keys").glob("node-[!0-9]*"))
    (folder / "keys" / "server-signing.key").unlink()  # this is a node, which has the server's public key
    (folder / "keys" / "node-1").unlink()
    for arguments, expected in (
        ((), "is that of the server"),
        (("--rotate", "1"), "keys/node-1 is not on this machine"),
    ):
        done = call(folder, "./keys.sh", *arguments)
        assert (done.returncode, expected in done.stderr) == (2, True)
    assert [(folder / name).read_bytes() for name in names] == after
    (folder / "certificates" / "ca.key").unlink()  # it is offline
    done = call(folder, "./certificates.sh")
    assert (done.returncode, "bring it back from where it is kept" in done.stderr) == (1, True)


PLACES = """#!/usr/bin/env bash
echo "$@" >> "$FLWR_HOME/calls"
case "$*" in
    *list*)
        [ ! -e "$FLWR_HOME/down" ] || exit 1
        echo "{\\"nodes\\": [$(sed 's/.*/{"node-id": "&", "status": "online"}/' "$FLWR_HOME/nodes" | paste -sd,)]}" ;;
    *register*node-2.pub*) echo "[code: 7] something else" >&2; exit 1 ;;
    *unregister*)
        if [ -e "$FLWR_HOME/failing" ]; then echo '{"success": false, "error-message": "not now"}'; exit 0; fi
        sed -i "/^$3\\$/d" "$FLWR_HOME/nodes"
        echo '{"success": true}' ;;
    *register*)
        if [ -e "$FLWR_HOME/known" ]; then echo "[code: 23] Public key already in use."; exit 1; fi
        echo "$(cat "$FLWR_HOME/next")" >> "$FLWR_HOME/nodes"
        echo "{\\"success\\": true, \\"node-id\\": $(cat "$FLWR_HOME/next")}" ;;
esac
"""
"""A command like `flwr supernode`, with the ids of registered nodes in a file."""


@pytest.fixture
def pretended_flower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Calls ./register.sh with a pretended `flwr`, which gives the next node this id."""
    beside = folder.parent / "bin"
    beside.mkdir()
    (beside / "flwr").write_text(PLACES)
    (beside / "flwr").chmod(0o755)
    (folder / "flwr" / "nodes").touch()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.delenv("FLWR_HOME", raising=False)

    def register(next_id: int) -> int:
        (folder / "flwr" / "next").write_text(str(next_id))
        return gate.main("register", folder)

    return register


def know_keys(folder: Path, node_by_place: dict[int, int]) -> None:
    """Flower knows the keys of these places already, and has the ids of their nodes in its database only."""
    (folder / "flwr" / "known").touch()
    with closing(sqlite3.connect(folder / "superlink.db")) as database, database:
        database.execute("CREATE TABLE node (node_id INTEGER, public_key BLOB)")
        for place, node in node_by_place.items():
            key = gate.key_header((folder / "keys" / f"node-{place}.pub").read_text())
            database.execute("INSERT INTO node VALUES (?, ?)", (node, b64decode(key)))


def registration_calls(folder: Path) -> list[str]:
    calls = [line.split()[1] for line in (folder / "flwr" / "calls").read_text().splitlines()]
    return [call for call in calls if call != "list"]


def test_registration_pins_places(folder: Path, pretended_flower: Callable[[int], int], capsys: Any) -> None:
    """A key has one place; a new key for a place revokes the old one; a failure is named and returns 2."""
    register, file = pretended_flower, folder / "places.json"
    assert register(1) == 2
    assert "./keys.sh K makes one" in capsys.readouterr().err
    subprocess.run(["./keys.sh", "0"], cwd=folder, check=True)
    assert register(2**64 - 5) == 0
    assert FlowerSection(nodes=str(file)).pinned_nodes(3) == {0: 2**64 - 5}
    with pytest.raises(ConfigError, match=r"flower\.nodes: got '7,8', expected the path of places\.json"):
        FlowerSection(nodes="7,8").pinned_nodes(3)  # ids, as in earlier versions; as a file it would pin nobody
    assert file.stat().st_mode & 0o077 == 0
    (folder / "gate").mkdir()
    (folder / "gate" / "nginx.pid").write_text("7")
    for said, code in (("kill(7, 1) failed (3: No such process)", 0), ("something else", 2)):
        (folder / "gate.sh").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
        assert register(8) == code  # its key is known; the gate was killed, or does not reload
    assert "did not read its keys again: something else; restart gate.sh" in capsys.readouterr().err
    (folder / "gate" / "nginx.pid").unlink()
    subprocess.run(["./keys.sh", "--rotate", "0"], cwd=folder, check=True)
    assert register(9) == 0
    assert FlowerSection(nodes=str(file)).pinned_nodes(3) == {0: 9}
    assert registration_calls(folder) == ["register", "register", "unregister"]
    subprocess.run(["./keys.sh", "2"], cwd=folder, check=True)
    assert register(10) == 2
    assert "[code: 7] something else; is superlink.sh running?" in capsys.readouterr().err
    for nothing in ((), ("x",), ("0", "1")):
        assert gate.main("revoke", folder, *nothing) == 2
        assert ", expected some of 0" in capsys.readouterr().err
    for file_of_failure, expected in (("down", "are not known"), ("failing", "place 0 is not revoked: .*not now")):
        (folder / "flwr" / file_of_failure).touch()
        assert gate.main("revoke", folder, "0") == 2
        assert re.search(expected, capsys.readouterr().err)
        assert FlowerSection(nodes=str(file)).pinned_nodes(3) == {0: 9}
        (folder / "flwr" / file_of_failure).unlink()
    assert gate.main("revoke", folder, "0") == 0
    assert FlowerSection(nodes=str(file)).pinned_nodes(3) == {}
    assert not (folder / "keys" / "node-0.pub").exists()
    assert gate.main("revoke", folder, "0") == 2
    events = [json.loads(line)["event"] for line in (folder / "audit" / "server.jsonl").read_text().splitlines()]
    assert events == ["registered", "registered", "revoked", "revoked"]


def test_a_wrong_public_key_revokes_no_other(
    folder: Path, pretended_flower: Callable[[int], int], capsys: Any
) -> None:  # fmt: skip
    """A file that is broken or has two places changes nothing. Keys whose files are swapped change places."""
    keys, places = folder / "keys", folder / "places.json"
    subprocess.run(["./keys.sh", "0", "1"], cwd=folder, check=True)
    texts = [(keys / f"node-{place}.pub").read_text() for place in (0, 1)]
    (keys / "node-1.pub").unlink()
    assert pretended_flower(70) == 0
    (keys / "node-1.pub").write_text(texts[1])
    assert pretended_flower(71) == 0
    before = places.read_text()
    other_kind = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ"
    for text, expected in [
        ("hello", "node-1.pub: is no public key of a node, expected one that ./keys.sh K has made"),
        (other_kind, "node-1.pub: is no public key of a node"),
        (texts[0].replace("node 0", "of mine"), "keys/node-1.pub: is the key of place 0, too"),
    ]:
        (keys / "node-1.pub").write_text(text)
        assert pretended_flower(72) == 2
        assert expected in capsys.readouterr().err
    (folder / "flwr" / "down").touch()
    (keys / "node-1.pub").write_text(texts[1])
    assert pretended_flower(72) == 2
    assert "the registered nodes are not known" in capsys.readouterr().err
    (folder / "flwr" / "down").unlink()
    assert places.read_text() == before
    assert "unregister" not in registration_calls(folder)
    know_keys(folder, {0: 70, 1: 71})
    for place in (0, 1):
        (keys / f"node-{place}.pub").write_text(texts[1 - place])
    assert pretended_flower(72) == 0
    assert FlowerSection(nodes=str(places)).pinned_nodes(3) == {0: 71, 1: 70}
    assert "unregister" not in registration_calls(folder)


def test_a_key_that_flower_does_not_know_any_more_is_named(
    folder: Path, pretended_flower: Callable[[int], int], capsys: Any
) -> None:  # fmt: skip
    """A data base that is new gets the key again; a key that was revoked stays so, whatever places.json says."""
    subprocess.run(["./keys.sh", "0"], cwd=folder, check=True)
    assert pretended_flower(70) == 0
    (folder / "flwr" / "nodes").write_text("")
    assert pretended_flower(71) == 0
    assert FlowerSection(nodes=str(folder / "places.json")).pinned_nodes(3) == {0: 71}
    (folder / "flwr" / "nodes").write_text("")
    know_keys(folder, {0: 71})
    capsys.readouterr()
    assert pretended_flower(72) == 2
    assert "this key was revoked, which cannot be undone; ./keys.sh --rotate K" in capsys.readouterr().err


OLD = """# What all scripts of this folder share; edit it on every machine alike.
SERVER=${SERVER:-example.org}     # name
PORT=${PORT:-8123}              # of the server
NODE_PORT=${NODE_PORT:-9094}
"""
OLD_NODE = """    flower-supernode --superlink "$SERVER:$PORT" \\
        --node-config "partition-id=0 state=\\"$HERE/mine\\" data=\\"folder:x y\\"" "$@" &
"""


def test_a_folder_of_the_last_version_is_upgraded(tmp_path: Path) -> None:
    """Its owner's address, settings, model and node configuration remain; replaced files are copied aside."""
    folder = tmp_path / "f"
    write_folder(folder, 2, "stc")
    for name in ("gate.sh", "gate.conf", "revoke.sh", "approve.sh"):
        (folder / name).unlink()
    (folder / "environment.sh").write_text(OLD)
    (folder / "node-0.sh").write_text(OLD_NODE)
    (folder / "app" / "app.py").write_text("# mine\n")
    described = folder / "app" / "pyproject.toml"
    lines = [
        line for line in described.read_text().splitlines() if not line.startswith(("key = ", "audit = ", "nodes = "))
    ]
    described.write_text("\n".join(lines).replace("wait = 60.0", "wait = 7.0").replace('name = ""', 'name = "fedavg"'))
    (folder / "state").mkdir()
    (folder / "state" / "client-0.pt").write_bytes(b"")
    (folder / "state" / "client-0.pt").chmod(0o644)
    folder.chmod(0o755)
    (tmp_path / "data of all").mkdir(mode=0o755)
    (folder / "data").symlink_to(tmp_path / "data of all")
    with pytest.raises(UsageError, match=r"got no LINK_PORT, .*pfedlms deploy upgrade"):
        check(folder)
    assert "port 8123 of the gate; port 8124 must not be open" in "\n".join(upgrade(folder))
    assert (folder / "app" / "app.py").read_text() == "# mine\n"
    assert (folder / "before-upgrade" / "node-0.sh").read_text() == OLD_NODE
    node = (folder / "node-0.sh").read_text()
    assert 'config="partition-id=0 state=\\"$HERE/mine\\" data=\\"folder:x y\\" keep=90"' in node
    subprocess.run(["bash", "-n", str(folder / "node-0.sh")], check=True)
    flat = tomllib.loads(described.read_text())["tool"]["flwr"]["app"]["config"]
    assert (flat["flower"]["wait"], flat["flower"]["key"]) == (7.0, f"{folder}/keys/server-signing.key")
    assert flat["method"]["name"] == "fedavg"
    assert load_config(folder / "app" / "pfedlms.toml").method == "stc"
    assert "SERVER:-example.org}" in (folder / "environment.sh").read_text()
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in (folder, folder / "state", folder / "state" / "client-0.pt")
    )
    assert (tmp_path / "data of all").stat().st_mode & 0o777 == 0o755  # not the folder's own
    again = {path: path.read_bytes() for path in folder.glob("*.*")}
    upgrade(folder)
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == again
    assert (folder / "before-upgrade" / "node-0.sh").read_text() == OLD_NODE  # a second time keeps what was there


def test_an_upgrade_keeps_all_of_the_environment(folder: Path) -> None:
    """The address that the gate listens on, too: else it would be open to all. A machine may have one node's script."""
    environment = folder / "environment.sh"
    text = environment.read_text().replace("NODE_PORT:-9094", "NODE_PORT:-9300").replace("MAX_BODY:-", "MAX_BODY:-7")
    environment.write_text(text.replace("GATE_HOST:-127.0.0.1", "GATE_HOST:-10.1.2.3"))
    before = environment.read_text()
    assert "GATE_HOST:-10.1.2.3" in before
    (folder / "node-0.sh").unlink()
    (folder / "node-1-old.sh").touch()
    node = (folder / "node-1.sh").read_text().replace("keep=90", "keep=9")
    (folder / "node-1.sh").write_text(node)
    upgrade(folder)
    assert environment.read_text() == before
    assert (folder / "node-1.sh").read_text() == node


def test_a_node_names_its_missing_files(folder: Path) -> None:
    for missing in ("keys/launcher-secret", "keys/server.pub", "approved.jsonl", "certificates/ca.crt", "keys/node-0"):
        done = call(folder, "./node-0.sh", timeout=20)
        assert (done.returncode, f"{missing}: is missing" in done.stderr) == (1, True), done.stderr
        (folder / missing).parent.mkdir(exist_ok=True)
        (folder / missing).touch()


def test_wrong_calls_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for arguments, expected in [
        (["init", str(tmp_path / "there")], "is not empty"),
        (["init", str(tmp_path / "new"), "--nodes", "0"], "data.clients: got 0"),
        (["init", str(tmp_path / "new"), "--server", "host:9000"], "--server: got 'host:9000'"),
        (["init", str(tmp_path / "new"), "--method", "fedagv"], "did you mean fedavg"),
        (["init", str(tmp_path / 'a"b%')], "expected a path without quotes"),
        (["init", str(tmp_path / "two\nlines")], "expected a path without quotes"),
        (["check", str(tmp_path / "there")], "expected a folder of: pfedlms deploy init"),
        (["approve", str(tmp_path / "there")], "expected a folder of: pfedlms deploy init"),
    ]:
        assert main(["deploy", *arguments]) == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_without_flower_approving_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.cli.build", None)
    for arguments in ([], ["--run-config", "train.rounds=3"]):
        assert main(["deploy", "approve", str(folder), *arguments]) == 2
        assert "pfedlms[flower]" in capsys.readouterr().err


def test_run_configs_override_the_file_and_all_errors_are_named(folder: Path) -> None:
    file = folder / "app" / "pfedlms.toml"
    config, flower = run_settings(
        file, declared_settings(folder) | {"train.rounds": 5, "method.name": "stc", "flower.wait": 3.0}
    )
    assert (config.train.rounds, config.method, flower.wait) == (5, "stc", 3.0)
    assert set(METHODS) == {
        run_settings(file, declared_settings(folder) | {"method.name": name})[0].method for name in METHODS
    }
    with pytest.raises(ConfigError) as caught:
        run_settings(file, declared_settings(folder) | {"train.rounds": 0, "flower.attempts": 0, "method.ratio": "x"})
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "flower.attempts", "train.rounds", "method.ratio",
    ]  # fmt: skip


def test_a_node_overrides_its_own_settings(folder: Path) -> None:
    config, flower = run_settings(folder / "app" / "pfedlms.toml", declared_settings(folder))
    own = {"partition-id": 2, "state": "mine", "server-key": "server.pub"}
    own |= {"device": "cpu", "threads": 3, "data-dir": "there", "data": "a:b"}
    there, section, state = node_settings(config, flower, own)
    assert (section.partition_id, section.data, state) == (2, "a:b", Path("mine"))
    assert (there.run.device, there.run.threads, there.data.dir) == ("cpu", 3, "there")
    assert node_settings(config, FlowerSection(state="all"), {"partition-id": 1, "num-partitions": 3})[2] == Path(
        "all/node-1"
    )
    with pytest.raises(ConfigError) as caught:
        node_settings(config, FlowerSection(), {"partition": 1, "threads": "x"})
    text = str(caught.value)
    assert all(f"node-config.{key}: " in text for key in ("partition-id", "partition", "threads", "state"))
    assert "got -1" in text
    with pytest.raises(ConfigError, match=r"node-config.server-key: got nothing, .*pfedlms deploy upgrade"):
        node_settings(config, flower, {"partition-id": 1, "state": "mine"})


def test_every_setting_of_a_node_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    for each in fields(NodeSection):
        assert f"`{each.name.replace('_', '-')}`" in page, each.name
    for each in fields(FlowerSection):
        assert f"`flower.{each.name}`" in page, each.name


def test_old_states_are_removed_except_that_of_this_run(tmp_path: Path) -> None:
    client_app = pytest.importorskip("pfedlms.flower.apps", reason="Flower is not installed (extra: flower)")
    for name, days in (("client-0-aa", 100), ("client-0-bb", 100), ("client-1-aa", 10)):
        for suffix in (".pt", ".lock"):
            path = tmp_path / f"{name}{suffix}"
            path.touch()
            os.utime(path, (time.time() - days * 86400,) * 2)
    client_app.remove_old_states(tmp_path, tmp_path / "client-0-bb.pt", 0)
    assert len(list(tmp_path.iterdir())) == 6
    client_app.remove_old_states(tmp_path, tmp_path / "client-0-bb.pt", 90)
    assert sorted(path.stem for path in tmp_path.glob("*.pt")) == ["client-0-bb", "client-1-aa"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can change users")
def test_the_user_that_runs_apps_cannot_read_the_nodes_key() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        folder = Path(name) / "f"
        write_folder(folder, 1)
        subprocess.run(["./keys.sh"], cwd=folder, check=True)
        (folder / "approved.jsonl").touch()
        users = {**os.environ, "NODE_USER": "daemon", "APP_USER": "nobody"}
        (folder / "data").mkdir(mode=0o700)
        for file in ("data/x.csv", "mine.py"):
            (folder / file).touch(0o600)
        subprocess.run(["./users.sh", "data"], cwd=folder, check=True, capture_output=True, env=users)
        nobody = ["setpriv", f"--reuid={pwd.getpwnam('nobody').pw_uid}", f"--regid={pwd.getpwnam('nobody').pw_gid}"]

        def can(*command: str) -> bool:
            done = subprocess.run([*nobody, "--clear-groups", *command], cwd=folder, capture_output=True)
            return done.returncode == 0

        for file in ("keys/launcher-secret", "keys/server.pub", "approved.jsonl", "environment.sh"):
            assert can("cat", file), file
        assert can("touch", "state/model.pt")
        assert can("cat", "data/x.csv")
        assert not can("cat", "mine.py")  # nobody named it
        assert not can("touch", "data/y.csv")
        assert not can("cat", "keys/node-0")
        assert not can("cat", "keys/server-signing.key")
        assert not can("sh", "-c", "echo '{}' >> approved.jsonl")
        assert not can("touch", "keys/other")
