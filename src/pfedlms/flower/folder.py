"""`pfedlms deploy init`: a folder for one server and its nodes, ready to edit."""

from __future__ import annotations

import os
import re
import sys
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

SCRIPTS = ("certificates.sh", "keys.sh", "superlink.sh", "register.sh", "run.sh", "flwr.sh")
FILES = {
    **{name: name for name in ("README.md", "environment.sh", *SCRIPTS)},
    ".gitignore": "gitignore",
    "flwr/config.toml": "flwr.toml",
    "app/app.py": "app.py.in",
    "app/pfedlms.toml": "pfedlms.toml",
    "systemd/pfedlms-superlink.service": "superlink.service",
}
"""Names of files, and what in the template they are made of; those of nodes come on top."""


def write_folder(
    folder: Path, nodes: int, method: str = "pfedlms", dataset: str = "digits", server: str = "127.0.0.1",
    port: int = 8000,
) -> list[Path]:  # fmt: skip
    """Write it, and name the files; what is there already is not touched but refused."""
    if nodes < 1:
        raise UsageError(f"--nodes: got {nodes}, expected a count of at least 1")
    if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", server, re.ASCII):
        raise UsageError(f"--server: got {server!r}, expected a name or an address; --port names the port")
    if not 1 <= port <= 65535:
        raise UsageError(f"--port: got {port}, expected a number from 1 to 65535")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; name a folder that is not there yet")
    load_config(None, {"data": {"dataset": dataset, "clients": nodes}, "method": {"name": method}})  # names are known
    here = folder.resolve()
    beside = Path(sys.executable).parent
    said = {
        "COUNT": str(nodes), "NODES": " ".join(map(str, range(nodes))), "NAME": NAME, "HERE": str(here),
        "METHOD": method, "DATASET": dataset, "SERVER": server, "PORT": str(port),
        "WEIGHT": str(LIMIT if nodes >= LIMITED_FROM else 1.0), "PATH": f"{beside}:{os.defpath.strip(':')}",
    }  # fmt: skip
    texts = {"app/pyproject.toml": pyproject(str(here / "state"))}
    texts |= {name: _filled(source, said) for name, source in FILES.items()}
    for node in range(nodes):
        own = {**said, "NODE": str(node)}
        texts[f"node-{node}.sh"] = _filled("node.sh", own)
        texts[f"systemd/pfedlms-node-{node}.service"] = _filled("node.service", own)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh" and name != "environment.sh":
            path.chmod(0o755)
    return [folder / name for name in texts]


def _filled(name: str, said: dict[str, str]) -> str:
    """A file of the template, with what stands between two @ replaced."""
    text = (resources.files("pfedlms") / "flower" / "template" / name).read_text(encoding="utf-8")
    for key, value in said.items():
        text = text.replace(f"@{key}@", value)
    return text


def pyproject(state: str = "") -> str:
    """The app as Flower wants it described: every key of the run config with what it means."""
    lines = [
        "[build-system]",
        'requires = ["setuptools>=77"]',
        'build-backend = "setuptools.build_meta"',
        "",
        "[project]",
        'name = "federation"',
        'version = "1.0.0"',
        'description = "Personalised federated learning that talks in low-bit sketches"',
        'license = "Apache-2.0"',
        f'dependencies = ["pfedlms[flower]=={__version__}"]',
        "",
        "[tool.flwr.app]",
        'publisher = "pfedlms"',
        "",
        "[tool.flwr.app.components]",
        'serverapp = "app:server"',
        'clientapp = "app:client"',
        "",
        "# What --run-config may say. A key that is empty here is as in pfedlms.toml, or else has the default named.",
        "[tool.flwr.app.config.flower]",
    ]
    for each in fields(FlowerSection):
        value = state if each.name == "state" else each.default
        lines += [f"# {each.metadata['help']}", f"{each.name} = {as_toml(value)}"]
    sections: dict[str, list[str]] = {"data": [], "model": [], "train": [], "method": [], "run": []}
    sections["method"] = ["# method by name", f"name = {as_toml(AS_IN_FILE)}"]
    for (section, key), each in keys(METHODS).items():
        whose = "" if section != "method" else _having(key)
        default = f"default {as_toml(each.default)}" if section != "method" else whose
        sections[section] += [f"# {each.metadata['help']} ({default})", f"{key} = {as_toml(AS_IN_FILE)}"]
    for section, declared in sections.items():
        lines += ["", f"[tool.flwr.app.config.{section}]", *declared]
    return "\n".join(lines) + "\n"


def _having(key: str) -> str:
    """Whose key it is, and the default each has."""
    having = {name: keys([name])["method", key].default for name in METHODS if ("method", key) in keys([name])}
    if len(set(map(str, having.values()))) == 1:
        return f"of {', '.join(having)}; default {as_toml(next(iter(having.values())))}"
    return "of " + ", ".join(f"{name}: default {as_toml(value)}" for name, value in having.items())
