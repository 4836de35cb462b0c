"""`pfedlms deploy init`: a folder for one server and its nodes, ready to edit. `pfedlms deploy upgrade`: a folder of an
older version gets the scripts of this one and keeps what is its owner's."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from pfedlms import __version__
from pfedlms.errors import UsageError
from pfedlms.experiment.config import as_toml, load_config, setting_fields
from pfedlms.flower.approval import declared
from pfedlms.flower.config import AS_IN_FILE, FlowerSection
from pfedlms.methods import METHODS

NAME = "federation"
"""What `flwr` calls the server."""
LIMITED_FROM, LIMIT = 3, 0.4
"""From so many nodes on, the largest share one may have of all weight; see train.max_weight."""
POOLING = '\n[pfedlms]\npooling = "median"  # one node cannot move the thresholds of all\n'
SERVER_MEMORY, GATE_MEMORY, LINK_MEMORY, APP_MEMORY = "4G", "256M", "1G", "8G"
"""Limits of the units: server, gate, a node's connection, and its apps."""

AS_NAMED = (
    "README.md", "environment.sh", "gate.conf", "certificates.sh", "keys.sh", "superlink.sh", "gate.sh", "register.sh",
    "revoke.sh", "approve.sh", "users.sh", "run.sh", "flwr.sh",
)  # fmt: skip
FILES = {name: name for name in AS_NAMED} | {
    ".gitignore": "gitignore", "flwr/config.toml": "flwr.toml", "app/app.py": "app.py.in",
    "app/pfedlms.toml": "pfedlms.toml",
}  # fmt: skip
"""Names of files, and what in the template they are made of. The app's description, units and nodes are added."""
OWNED = ("app/app.py", "app/pfedlms.toml")
"""Files that an upgrade leaves to their owner."""
BEFORE = "before-upgrade"
"""Where it puts what was there."""


def write_folder(
    folder: Path, nodes: int, method: str = "pfedlms", dataset: str = "digits", server: str = "127.0.0.1",
    port: int = 8000, link_port: int | None = None,
) -> list[Path]:  # fmt: skip
    """Write it, and name the files; what is there already is not touched but refused."""
    link_port = port + 1 if link_port is None else link_port
    if nodes < 1:
        raise UsageError(f"--nodes: got {nodes}, expected a count of at least 1")
    if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", server, re.ASCII):
        raise UsageError(f"--server: got {server!r}, expected a name or an address; --port names the port")
    for name, value in (("--port", port), ("--link-port", link_port)):
        if not 1 <= value <= 65535:
            raise UsageError(f"{name}: got {value}, expected a number from 1 to 65535")
    if port == link_port:
        raise UsageError(f"--link-port: got {link_port}, expected another one than --port")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; name a folder that is not there yet")
    load_config(None, {"data": {"dataset": dataset, "clients": nodes}, "method": {"name": method}})  # names are known
    texts = made(folder, nodes, server, port, link_port, method, dataset)
    write(folder, texts)
    return [folder / name for name in texts]


def made(
    folder: Path, nodes: int, server: str, port: int, link_port: int, method: str = "pfedlms", dataset: str = "digits"
) -> dict[str, str]:  # fmt: skip
    """Texts of all files by name."""
    here, beside = folder.resolve(), Path(sys.executable).parent
    said = {
        "COUNT": str(nodes), "NODES": " ".join(map(str, range(nodes))), "NAME": NAME, "METHOD": method,
        "DATASET": dataset, "SERVER": server, "PORT": str(port), "LINK_PORT": str(link_port),
        "GATE_HOST": "127.0.0.1" if server in ("127.0.0.1", "localhost") else "",
        "POOLING": POOLING if method == "pfedlms" else "",
        "WEIGHT": str(LIMIT if nodes >= LIMITED_FROM else 1.0), "BURST": str(100 + 40 * nodes),
        "CONNECTIONS": str(20 + 8 * nodes), "HERE": str(here), "PATH": f"{beside}:{os.defpath.strip(':')}:/usr/sbin",
    }  # fmt: skip

    def unit(source: str, memory: str, **more: str) -> str:
        own = {"USER": "pfedlms", "PRIVATE_DEVICES": "yes", **said, **more}
        hardened = _filled("hardened.service", {"MEMORY": memory, **own})
        return _filled(source, {"HARDENED": hardened.rstrip(), **own})

    texts = {"app/pyproject.toml": pyproject(here)}
    texts |= {name: _filled(source, said) for name, source in FILES.items()}
    texts["systemd/pfedlms-superlink.service"] = unit("superlink.service", SERVER_MEMORY)
    texts["systemd/pfedlms-gate.service"] = unit("gate.service", GATE_MEMORY)
    for node in range(nodes):
        texts[f"node-{node}.sh"] = _filled("node.sh", {**said, "NODE": str(node)})
        texts[f"systemd/pfedlms-node-{node}.service"] = unit("node.service", LINK_MEMORY, NODE=str(node))
        # A GPU is a device.
        apps = {"NODE": str(node), "USER": "pfedlms-app", "PRIVATE_DEVICES": "no"}
        texts[f"systemd/pfedlms-app-{node}.service"] = unit("app.service", APP_MEMORY, **apps)
    return texts


def environment(folder: Path) -> dict[str, str]:
    """What environment.sh of a folder says: addresses and ports."""
    if not (folder / "app" / "pyproject.toml").is_file():
        raise UsageError(f"{folder}: got no app/pyproject.toml, expected a folder of: pfedlms deploy init {folder}")
    file = folder / "environment.sh"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return dict(re.findall(r"^(?:export )?(\w+)=\$\{\w+:-([^}]*)\}", text, re.M))


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Folders and files that nobody but their owner can read; scripts can be executed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700 if path.suffix == ".sh" and name != "environment.sh" else 0o600)


def _filled(name: str, said: dict[str, str]) -> str:
    """A file of the template, with what stands between two @ replaced."""
    text = (resources.files("pfedlms") / "flower" / "template" / name).read_text(encoding="utf-8")
    for key, value in said.items():
        text = text.replace(f"@{key}@", value)
    return text


def pyproject(here: Path | None = None, had: Mapping[str, Any] | None = None) -> str:
    """The app as Flower wants it described: every key of the run config with what it means; with the paths of a folder,
    where it is that folder's, and the values that it `had`."""
    paths = {"state": "state", "key": "keys/server-signing.key", "nodes": "places.json", "audit": "audit/server.jsonl"}
    own = {name: value for name, value in (had or {}).items() if value != AS_IN_FILE}
    sections: dict[str, list[str]] = {"flower": [], "data": [], "model": [], "train": [], "method": [], "run": []}

    def add(section: str, key: str, meaning: str, value: Any = AS_IN_FILE) -> None:
        sections[section] += [f"# {meaning}", f"{key} = {as_toml(own.get(f'{section}.{key}', value))}"]

    for each in fields(FlowerSection):
        value = str(here / paths[each.name]) if here and each.name in paths else each.default
        add("flower", each.name, each.metadata["help"], value)
    add("method", "name", "method by name")
    for (section, key), each in setting_fields(METHODS).items():
        default = _having(key) if section == "method" else f"default {as_toml(each.default)}"
        add(section, key, f"{each.metadata['help']} ({default})")
    config = ["\n".join([f"[tool.flwr.app.config.{name}]", *lines]) for name, lines in sections.items()]
    return _filled("app.toml", {"VERSION": __version__, "CONFIG": "\n\n".join(config)})


def _having(key: str) -> str:
    """Whose key it is, and the default each has."""
    having = {
        name: setting_fields([name])["method", key].default
        for name in METHODS
        if ("method", key) in setting_fields([name])
    }
    if len(set(map(str, having.values()))) == 1:
        return f"of {', '.join(having)}; default {as_toml(next(iter(having.values())))}"
    return "of " + ", ".join(f"{name}: default {as_toml(value)}" for name, value in having.items())


def upgrade(folder: Path) -> list[str]:
    """Write all files that are not the owner's own; old ones go to a folder of their own. Says what is left to do."""
    named = environment(folder)
    if "SERVER" not in named or "PORT" not in named:
        raise UsageError(
            f"{folder / 'environment.sh'}: got no SERVER and PORT, expected those of `pfedlms deploy init`"
        )
    named.setdefault("LINK_PORT", str(int(named["PORT"]) + 1))  # the gate takes the port that nodes know
    nodes = len(list(folder.glob("node-*.sh")))
    texts = made(folder, nodes, named["SERVER"], int(named["PORT"]), int(named["LINK_PORT"]))
    for name in OWNED:
        del texts[name]
    for node in range(nodes):
        texts[f"node-{node}.sh"] = _with_own_config(texts[f"node-{node}.sh"], folder / f"node-{node}.sh")
    had = declared((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    texts["app/pyproject.toml"] = pyproject(folder.resolve(), had)
    for name in texts:
        if (folder / name).exists():
            kept = folder / BEFORE / name
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(folder / name, kept)
    write(folder, texts)
    for path in [folder, *(each for each in folder.rglob("*") if each.is_dir())]:
        path.chmod(0o700)
    for path in (*folder.glob("state/*"), *folder.glob("superlink.db*"), *folder.glob("run/**/*")):
        path.chmod(path.stat().st_mode & 0o700)
    return [
        f"{len(texts)} files are of this version; those before are in {folder / BEFORE}",
        "server: end superlink.sh, ./certificates.sh, ./keys.sh server; then ./superlink.sh, ./gate.sh, ./register.sh",
        f"server: nodes reach port {named['PORT']} of the gate; port {named['LINK_PORT']} must not be open to others",
        "each node: update pfedlms, `pfedlms deploy upgrade` there, copy app/ and keys/server.pub from the server, "
        "./keys.sh K, ./approve.sh, and start node-K.sh again",
    ]


def _with_own_config(text: str, before: Path) -> str:
    """A node's script with the --node-config that its owner had written."""
    old = before.read_text(encoding="utf-8")
    found = re.search(r'--node-config "(partition-id=.*?)" "\$@"', old) or re.search(r'^config="(.*)"$', old, re.M)
    if found is None:
        return text
    own = found[1] if "keep=" in found[1] else f"{found[1]} keep=90"
    return re.sub(r'^config=".*"$', lambda _: f'config="{own}"', text, count=1, flags=re.M)
