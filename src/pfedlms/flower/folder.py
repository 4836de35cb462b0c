"""`pfedlms deploy init` writes a folder for one server and its nodes. `pfedlms deploy upgrade` writes this version's
scripts into a folder of an older version and keeps what its owner has written."""

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
from pfedlms.flower.approval import declared_settings
from pfedlms.flower.config import AS_IN_FILE, FlowerSection
from pfedlms.methods import METHODS

NAME = "federation"
"""The server's name in `flwr` commands."""
MIN_NODES_TO_LIMIT, MAX_WEIGHT = 3, 0.4
"""From so many nodes on, `init` writes this train.max_weight."""
POOLING = '\n[pfedlms]\npooling = "median"  # one node cannot move the thresholds of all\n'

SAME_NAME = (
    "README.md", "environment.sh", "gate.conf", "certificates.sh", "keys.sh", "superlink.sh", "gate.sh", "register.sh",
    "revoke.sh", "approve.sh", "users.sh", "run.sh", "flwr.sh",
)  # fmt: skip
FILES = {name: name for name in SAME_NAME} | {
    ".gitignore": "gitignore", "flwr/config.toml": "flwr.toml", "app/app.py": "app.py.in",
    "app/pfedlms.toml": "pfedlms.toml",
}  # fmt: skip
"""Templates by the name of the file. The app's pyproject.toml, the units and the nodes' scripts are added."""
OWNERS_FILES = ("app/app.py", "app/pfedlms.toml")
"""Files that an upgrade does not change."""
BACKUP = "before-upgrade"
"""Where an upgrade puts the files that it replaces."""


def write_folder(
    folder: Path, nodes: int, method: str = "pfedlms", dataset: str = "digits", server: str = "127.0.0.1",
    port: int = 8000, link_port: int | None = None,
) -> list[Path]:  # fmt: skip
    """Write the folder and return its files. A folder that is not empty is refused."""
    link_port = port + 1 if link_port is None else link_port
    if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", server, re.ASCII):
        raise UsageError(f"--server: got {server!r}, expected a name or an address; --port names the port")
    if len({port, link_port}) < 2 or not all(1 <= each < 1 << 16 for each in (port, link_port)):
        raise UsageError(f"--port, --link-port: got {port} and {link_port}, expected two ports from 1 to 65535")
    # Its path stands in TOML, in systemd's units, and in quotes in --node-config.
    path = str(folder.resolve())
    if not path.isprintable() or set(path) & set("\"'\\$%`"):
        raise UsageError(f"{path!r}: expected a path without quotes, \\, $, %, ` and line ends; name another folder")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; name a folder that is not there yet")
    chosen: dict[str, dict[str, Any]] = {"data": {"dataset": dataset, "clients": nodes}, "method": {"name": method}}
    load_config(None, chosen)  # refuses unknown names
    texts = render_files(folder, nodes, server, port, link_port, method, dataset)
    write_files(folder, texts)
    return [folder / name for name in texts]


def render_files(
    folder: Path, nodes: int, server: str, port: int, link_port: int, method: str = "pfedlms", dataset: str = "digits"
) -> dict[str, str]:  # fmt: skip
    """The texts of all files by name."""
    here, python = folder.resolve(), Path(sys.executable).parent
    values = {
        "COUNT": str(nodes), "NODES": " ".join(map(str, range(nodes))), "NAME": NAME, "METHOD": method,
        "DATASET": dataset, "SERVER": server, "PORT": str(port), "LINK_PORT": str(link_port),
        "GATE_HOST": "127.0.0.1" if server in ("127.0.0.1", "localhost") else "",
        "POOLING": POOLING if method == "pfedlms" else "",
        "WEIGHT": str(MAX_WEIGHT if nodes >= MIN_NODES_TO_LIMIT else 1.0), "BURST": str(100 + 40 * nodes),
        "CONNECTIONS": str(20 + 8 * nodes), "HERE": str(here), "PATH": f"{python}:{os.defpath.strip(':')}:/usr/sbin",
    }  # fmt: skip

    values["HARDENED"] = _render("hardened.service", values).rstrip()
    texts = {"app/pyproject.toml": render_pyproject(here)}
    texts |= {name: _render(template, values) for name, template in FILES.items()}
    texts |= {f"systemd/pfedlms-{unit}.service": _render(f"{unit}.service", values) for unit in ("superlink", "gate")}
    for node in map(str, range(nodes)):
        values["NODE"] = node
        texts[f"node-{node}.sh"] = _render("node.sh", values)
        for unit in ("node", "app"):
            texts[f"systemd/pfedlms-{unit}-{node}.service"] = _render(f"{unit}.service", values)
    return texts


def read_environment(folder: Path, *needed: str) -> dict[str, str]:
    """The addresses and ports in the folder's environment.sh."""
    file = folder / "environment.sh"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    named = dict(re.findall(r"^(?:export )?(\w+)=\$\{\w+:-([^}]*)\}", text, re.M))
    if missing := [name for name in needed if name not in named]:
        expected = "expected a folder of: pfedlms deploy init; pfedlms deploy upgrade writes what is new"
        raise UsageError(f"{file}: got no {', '.join(missing)}, {expected}")
    return named


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write folders and files that only their owner can read. Scripts are executable."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700 if path.suffix == ".sh" and name != "environment.sh" else 0o600)


def _render(name: str, values: Mapping[str, str]) -> str:
    """A template with each @KEY@ replaced by its value."""
    text = (resources.files("pfedlms") / "flower" / "template" / name).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def render_pyproject(folder: Path, values: Mapping[str, Any] | None = None) -> str:
    """The app's pyproject.toml for Flower: every key of the run config with its meaning. Paths are in this folder;
    `values` are settings to keep."""
    paths = {"state": "state", "key": "keys/server-signing.key", "nodes": "places.json", "audit": "audit/server.jsonl"}
    kept = {name: value for name, value in (values or {}).items() if value != AS_IN_FILE}
    sections: dict[str, list[str]] = {"flower": [], "data": [], "model": [], "train": [], "method": [], "run": []}

    def add(section: str, key: str, meaning: str, value: Any = AS_IN_FILE) -> None:
        sections[section] += [f"# {meaning}", f"{key} = {as_toml(kept.get(f'{section}.{key}', value))}"]

    for field in fields(FlowerSection):
        value = str(folder / paths[field.name]) if field.name in paths else field.default
        add("flower", field.name, field.metadata["help"], value)
    add("method", "name", "method by name")
    for (section, key), field in setting_fields(METHODS).items():
        default = _method_defaults(key) if section == "method" else f"default {as_toml(field.default)}"
        add(section, key, f"{field.metadata['help']} ({default})")
    config = ["\n".join([f"[tool.flwr.app.config.{name}]", *lines]) for name, lines in sections.items()]
    return _render("app.toml", {"VERSION": __version__, "CONFIG": "\n\n".join(config)})


def _method_defaults(key: str) -> str:
    """The defaults of this key, by method."""
    fields_of = {name: setting_fields([name]).get(("method", key)) for name in METHODS}
    return "default " + ", ".join(f"{as_toml(own.default)} of {name}" for name, own in fields_of.items() if own)


def upgrade(folder: Path) -> list[str]:
    """Write all files except the owner's, and keep the old ones in a backup folder. Returns what is left to do."""
    named = read_environment(folder, "SERVER", "PORT")
    named.setdefault("LINK_PORT", str(int(named["PORT"]) + 1))  # the gate takes over the port that nodes know
    scripts = {int(match[1]) for file in folder.iterdir() if (match := re.fullmatch(r"node-(\d+)\.sh", file.name))}
    nodes = max(scripts, default=-1) + 1
    texts = render_files(folder, nodes, named["SERVER"], int(named["PORT"]), int(named["LINK_PORT"]))
    for name in OWNERS_FILES:
        del texts[name]
    for node in scripts:
        texts[f"node-{node}.sh"] = _keep_node_config(texts[f"node-{node}.sh"], folder / f"node-{node}.sh")
    texts["environment.sh"] = re.sub(
        r"(\w+):-([^}]*)", lambda found: f"{found[1]}:-{named.get(found[1], found[2])}", texts["environment.sh"]
    )
    settings = declared_settings((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    texts["app/pyproject.toml"] = render_pyproject(folder.resolve(), settings)
    for name, text in texts.items():
        if (folder / name).exists() and (folder / name).read_bytes() != text.encode():
            backup = folder / BACKUP / name
            backup.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(folder / name, backup)
    write_files(folder, texts)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    return [
        f"{len(texts)} files are of this version; those before are in {folder / BACKUP}",
        f"server: nodes reach port {named['PORT']} of the gate; port {named['LINK_PORT']} must not be open to others",
        f"end all processes and follow the steps in {folder / 'README.md'} again; what is there already is kept",
        "with systemd, also: sudo ./users.sh on nodes, and sudo systemctl daemon-reload",
    ]


def _keep_node_config(text: str, old_file: Path) -> str:
    """A node's new script with the --node-config that its owner has written into the old one."""
    old = old_file.read_text(encoding="utf-8")
    match = re.search(r'--node-config "(partition-id=.*?)" "\$@"', old) or re.search(r'^config="(.*)"$', old, re.M)
    if match is None:
        return text
    config = match[1] if "keep=" in match[1] else f"{match[1]} keep=90"
    return re.sub(r'^config=".*"$', lambda _: f'config="{config}"', text, count=1, flags=re.M)
