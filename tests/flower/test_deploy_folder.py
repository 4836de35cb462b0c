"""What `pfedlms deploy init` writes: all keys, documented; scripts that are valid; nothing overwritten."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pfedlms.cli import main
from pfedlms.cli.listings import settings
from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment.config import load_config
from pfedlms.flower.check import check
from pfedlms.flower.folder import pyproject, write_folder
from pfedlms.flower.keys import FlowerSection, NodeSection, configured, seated
from pfedlms.methods import METHODS


def declared() -> dict[str, Any]:
    tables = tomllib.loads(pyproject())["tool"]["flwr"]["app"]["config"]
    return {f"{section}.{key}": value for section, own in tables.items() for key, value in own.items()}


def test_every_setting_is_declared_with_its_meaning() -> None:
    own = {f"flower.{each.name}" for each in fields(FlowerSection)}
    assert declared().keys() - own == {row["setting"] for row in settings()} | {"method.name"}
    assert own <= declared().keys()
    lines = pyproject().splitlines()
    start = lines.index("[tool.flwr.app.config.flower]")
    keys = [number for number, line in enumerate(lines) if number > start and " = " in line and line[0] not in "#["]
    assert len(keys) == len(declared())
    assert all(lines[number - 1].startswith("# ") for number in keys)


@pytest.mark.parametrize(("nodes", "weight"), [(1, 1.0), (2, 1.0), (3, 0.4), (5, 0.4)])
def test_the_folder_is_a_configuration(nodes: int, weight: float, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    files = write_folder(folder, nodes, "sketchvote", server="example.org", port=8123)
    assert sorted(files) == sorted(path for path in folder.rglob("*") if path.is_file())
    assert not [path for path in files if re.search("@[A-Z]+@", path.read_text())]
    config, flower = configured(folder / "app" / "pfedlms.toml", declared())
    assert config == load_config(folder / "app" / "pfedlms.toml")
    assert flower == FlowerSection()
    assert (config.method, config.data.clients, config.train.max_weight) == ("sketchvote", nodes, weight)
    assert config.run.out == str(folder / "run")
    where = tomllib.loads((folder / "flwr" / "config.toml").read_text())["superlink"]["federation"]
    assert where == {"address": "example.org:8123", "root-certificates": str(folder / "certificates" / "ca.crt")}
    scripts = sorted(folder.glob("*.sh"))
    assert [f"node-{k}.sh" for k in range(nodes)] == [path.name for path in scripts if path.name.startswith("node-")]
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert (script.stat().st_mode & 0o100 != 0) == (script.name != "environment.sh")
    assert len(list((folder / "systemd").iterdir())) == nodes + 1


def test_certificates_and_keys(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write_folder(folder, 2, server="example.org")
    for script in ("./certificates.sh", "./keys.sh", "./certificates.sh", "./keys.sh"):  # a second time keeps secrets
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.name in ("ca.key", "node-0")}
        subprocess.run([script], cwd=folder, check=True, capture_output=True)
        assert all(path.read_bytes() == held for path, held in before.items())
    made = folder / "certificates"
    shown = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "example.org", "server.pem"]
    assert subprocess.run(shown, cwd=made, check=True, capture_output=True, text=True).stdout == "server.pem: OK\n"
    secrets = [made / "ca.key", made / "server.key", folder / "keys" / "node-0", folder / "keys" / "node-1"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)


FLWR = """#!/usr/bin/env bash
case $3 in
    *node-0.pub) echo "╭─ Error ─╮"; echo "│ [code: 23] Public key already in use."; exit 1 ;;
    *node-2.pub) echo "[code: 7] something else"; exit 1 ;;
    *) echo "registered $3 with $FLWR_HOME" ;;
esac
"""


def test_keys_are_registered_as_they_come(tmp_path: Path) -> None:
    """One that is known does not keep others out; what fails otherwise is said, and ends with 1."""
    folder, beside = tmp_path / "f", tmp_path / "bin"
    write_folder(folder, 3)
    beside.mkdir()
    (beside / "flwr").write_text(FLWR)
    (beside / "flwr").chmod(0o755)
    environment = {"PATH": f"{beside}:/usr/bin:/bin"}

    def register() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["./register.sh"], cwd=folder, env=environment, capture_output=True, text=True)

    nothing = register()
    assert (nothing.returncode, "keys.sh makes keys" in nothing.stderr) == (1, True)
    (folder / "keys").mkdir()
    for node in (0, 1):
        (folder / "keys" / f"node-{node}.pub").touch()
    done = register()
    assert done.returncode == 0
    known, fresh = done.stdout.splitlines()
    assert known == "keys/node-0.pub: is known already"
    assert fresh == f"registered keys/node-1.pub with {folder / 'flwr'}"
    (folder / "keys" / "node-2.pub").touch()
    failed = register()
    assert (failed.returncode, failed.stderr) == (1, "[code: 7] something else\n")


def test_a_port_that_was_changed_in_one_place_only(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write_folder(folder, 1, port=8123)
    said = "environment.sh has port 9000, flwr/config.toml 127.0.0.1:8123; edit one of them"
    assert said not in [each.said for each in check(folder)]
    environment = folder / "environment.sh"
    environment.write_text(environment.read_text().replace("8123", "9000"))
    assert [each.wrong for each in check(folder) if each.said == said] == [True]


def test_a_node_without_its_files_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write_folder(folder, 1)
    done = subprocess.run(["./node-0.sh"], cwd=folder, capture_output=True, text=True, timeout=20)
    assert (done.returncode, "certificates/ca.crt: is missing" in done.stderr) == (1, True)


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for arguments, said in [
        (["init", str(tmp_path / "there")], "is not empty"),
        (["init", str(tmp_path / "new"), "--nodes", "0"], "--nodes: got 0"),
        (["init", str(tmp_path / "new"), "--port", "99999"], "--port: got 99999"),
        (["init", str(tmp_path / "new"), "--server", "host:9000"], "--server: got 'host:9000'"),
        (["init", str(tmp_path / "new"), "--server", "a b"], "--server: got 'a b'"),
        (["init", str(tmp_path / "new"), "--method", "fedagv"], "did you mean fedavg"),
        (["inti", str(tmp_path / "new")], "deploy: got 'inti'; did you mean init?"),
        (["check", str(tmp_path / "there")], "expected a folder of: pfedlms deploy init"),
    ]:
        assert main(["deploy", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_run_configs_come_on_top_and_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write_folder(folder, 3)
    file = folder / "app" / "pfedlms.toml"
    config, flower = configured(file, declared() | {"train.rounds": 5, "method.name": "stc", "flower.wait": 3.0})
    assert (config.train.rounds, config.method, flower.wait) == (5, "stc", 3.0)
    assert set(METHODS) == {configured(file, declared() | {"method.name": name})[0].method for name in METHODS}
    with pytest.raises(ConfigError) as caught:
        configured(file, declared() | {"train.rounds": 0, "flower.attempts": 0, "method.ratio": "x"})
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "flower.attempts", "train.rounds", "method.ratio",
    ]  # fmt: skip


def test_a_node_has_the_last_word_on_what_is_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write_folder(folder, 3)
    config, flower = configured(folder / "app" / "pfedlms.toml", declared())
    own = {"partition-id": 2, "state": "mine", "device": "cpu", "threads": 3, "data-dir": "there", "data": "a:b"}
    there, seat, state = seated(config, flower, own)
    assert (seat.partition_id, seat.data, state) == (2, "a:b", Path("mine"))
    assert (there.run.device, there.run.threads, there.data.dir) == ("cpu", 3, "there")
    assert seated(config, FlowerSection(state="all"), {"partition-id": 1, "num-partitions": 3})[2] == Path("all/node-1")
    with pytest.raises(ConfigError) as caught:
        seated(config, flower, {"partition": 1, "threads": "x"})
    said = str(caught.value)
    assert all(f"node-config.{key}: " in said for key in ("partition-id", "partition", "threads", "state"))
    assert "got -1" in said


@pytest.mark.parametrize("named", ["1,2,3,4", "1,x", "7,7"])
def test_pins_that_cannot_be(named: str) -> None:
    with pytest.raises(UsageError, match=r"flower\.nodes: got '"):
        FlowerSection(nodes=named).pinned(3)
    assert FlowerSection(nodes="12, 5").pinned(3) == {0: 12, 1: 5}


def test_every_key_of_a_node_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    for each in fields(NodeSection):
        assert f"`{each.name.replace('_', '-')}`" in page, each.name
    for each in fields(FlowerSection):
        assert f"`flower.{each.name}`" in page, each.name
