"""`pfedlms deploy init`: a folder for one server and its nodes, ready to edit."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path

from pfedlms import __version__
from pfedlms.errors import UsageError
from pfedlms.experiment.config import as_toml, keys, load_config
from pfedlms.flower.keys import AS_IN_FILE, FlowerSection
from pfedlms.methods import METHODS

NAME = "federation"
"""What `flwr` calls the server."""
LIMITED_FROM, LIMIT = 3, 0.4
"""From so many nodes on, the largest share one may have of all weight; see train.max_weight."""
POOLING = '\n[pfedlms]\npooling = "median"  # one node cannot move the thresholds of all\n'
SERVER_MEMORY, GATE_MEMORY, LINK_MEMORY, APP_MEMORY = "4G", "256M", "1G", "8G"
"""Limits of the units: server, gate, a node's connection, and its apps."""

SCRIPTS = (
    "certificates.sh", "keys.sh", "superlink.sh", "gate.sh", "register.sh", "revoke.sh", "approve.sh", "users.sh",
    "run.sh", "flwr.sh",
)  # fmt: skip
FILES = {
    **{name: name for name in ("README.md", "environment.sh", "gate.conf", *SCRIPTS)},
    ".gitignore": "gitignore",
    "flwr/config.toml": "flwr.toml",
    "app/app.py": "app.py.in",
    "app/pfedlms.toml": "pfedlms.toml",
    "systemd/pfedlms-superlink.service": "superlink.service",
    "systemd/pfedlms-gate.service": "gate.service",
}
"""Names of files, and what in the template they are made of; those of nodes are added."""
OWNED = ("app/app.py", "app/pfedlms.toml", "app/pyproject.toml")
"""Files that an upgrade leaves to their owner."""


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
    texts |= {name: _filled(source, said) for name, source in FILES.items() if not name.startswith("systemd/")}
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


def pyproject(here: Path | None = None) -> str:
    """The app as Flower wants it described: every key of the run config with what it means; with the paths of a folder,
    where it is that folder's."""
    paths = {"state": "state", "key": "keys/server-signing.key", "nodes": "places.json", "audit": "audit/server.jsonl"}
    sections: dict[str, list[str]] = {"flower": [], "data": [], "model": [], "train": [], "method": [], "run": []}
    for each in fields(FlowerSection):
        value = str(here / paths[each.name]) if here and each.name in paths else each.default
        sections["flower"] += [f"# {each.metadata['help']}", f"{each.name} = {as_toml(value)}"]
    sections["method"] = ["# method by name", f"name = {as_toml(AS_IN_FILE)}"]
    for (section, key), each in keys(METHODS).items():
        default = _having(key) if section == "method" else f"default {as_toml(each.default)}"
        sections[section] += [f"# {each.metadata['help']} ({default})", f"{key} = {as_toml(AS_IN_FILE)}"]
    config = ["\n".join([f"[tool.flwr.app.config.{name}]", *lines]) for name, lines in sections.items()]
    return _filled("app.toml", {"VERSION": __version__, "CONFIG": "\n\n".join(config)})


def _having(key: str) -> str:
    """Whose key it is, and the default each has."""
    having = {name: keys([name])["method", key].default for name in METHODS if ("method", key) in keys([name])}
    if len(set(map(str, having.values()))) == 1:
        return f"of {', '.join(having)}; default {as_toml(next(iter(having.values())))}"
    return "of " + ", ".join(f"{name}: default {as_toml(value)}" for name, value in having.items())
