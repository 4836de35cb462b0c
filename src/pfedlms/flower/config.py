"""Settings that Flower passes on: the run config (keys of the TOML file and a section `flower`) and node configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pfedlms.errors import ConfigError
from pfedlms.experiment.config import Config, Tables, load_config, merge
from pfedlms.flower.approval import declared_settings
from pfedlms.settings import CUSTOM, find_problems, setting

AS_IN_FILE = ""
"""A key of the run config with this value is as in the TOML file."""


@dataclass(frozen=True)
class FlowerSection:
    """Section `flower` of the run config: how the server works with nodes."""

    wait: float = setting(60.0, "seconds without a new node after which a run begins with free places", minimum=0)
    attempts: int = setting(10, "how often a round with too few answers is tried before the run ends", minimum=1)
    nodes: str = setting("", "the file of places that register.sh writes; empty: nodes name theirs (partition-id)")
    key: str = setting("", "the server's private key, which signs requests; empty: a new one, for simulations")
    audit: str = setting("", "the server's audit log, which lines are appended to; empty: none")
    state: str = setting("", "folder for the state of nodes that name none, one below it for each; for simulations")
    check: bool = setting(False, "ask all nodes for versions and digest, say what differs, and end")

    def pinned_nodes(self, clients: int) -> dict[int, int]:
        """Node ids by place, from the file `nodes`. A place may be left free."""
        if self.nodes and "/" not in self.nodes:  # a name that is no file would leave all places to whoever claims them
            raise ConfigError([f"flower.nodes: got {self.nodes!r}, expected the path of places.json, or nothing"])
        places = read_places(Path(self.nodes)) if self.nodes else {}
        return {place: entry["node"] for place, entry in places.items() if place < clients}


def has_parts_in_python(config: Config) -> bool:
    """Whether the model, loss or metric is given in app.py, so that they are known only where it is executed."""
    return CUSTOM in (config.model.name, config.train.loss, config.train.metric)


def app_settings(app: Path) -> tuple[Config, FlowerSection]:
    """The settings of a run of this app without any --run-config."""
    return run_settings(app / "pfedlms.toml", declared_settings((app / "pyproject.toml").read_text(encoding="utf-8")))


def read_places(file: Path) -> dict[int, dict[str, Any]]:
    """Nodes by place, as register.sh wrote them: each node's id and public key."""
    if not file.exists():
        return {}
    try:
        places = json.loads(file.read_text(encoding="utf-8"))
        return {int(place): {"node": int(own["node"]), "key": str(own["key"])} for place, own in places.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError([f"{file}: cannot be read as places; delete it and run ./register.sh"]) from error


@dataclass(frozen=True)
class NodeSection:
    """What a node's owner sets in --node-config; keys have - for _ there."""

    partition_id: int = setting(-1, "its place among data.clients, from 0; must be given", minimum=0)
    state: str = setting("", "folder for its state: model, optimiser, what its method keeps, last answer")
    server_key: str = setting("", "the server's public key, keys/server.pub; needed with a state folder of its own")
    keep: int = setting(0, "days after which the state of other runs is removed; 0: never", minimum=0)
    data: str = setting("", "its own data, where data.dataset is custom: folder:PATH, file:PATH or module:function")
    data_dir: str = setting("", "where the files of a data set by name are; data.dir")
    device: str = setting("", "cpu, cuda or cuda:N; run.device")
    threads: int = setting(0, "CPU threads; 0: as the run says; run.threads", minimum=0, maximum=1024)
    num_partitions: int = setting(0, "written by Flower's simulations, not used", minimum=0)


def run_settings(file: Path, run_config: Mapping[str, Any]) -> tuple[Config, FlowerSection]:
    """The settings of a run, the same on the server and all nodes; raises ConfigError with every problem found."""
    tables: Tables = {}
    for name, value in run_config.items():
        section, _, key = name.partition(".")
        if value != AS_IN_FILE:
            tables.setdefault(section, {})[key] = value
    flower = tables.pop("flower", {})
    found = find_problems("flower", FlowerSection, flower)
    try:
        config = load_config(file, tables)
    except ConfigError as error:
        found += error.problems
    if found:
        raise ConfigError(found)
    return config, FlowerSection(**flower)


def node_settings(
    config: Config, flower: FlowerSection, node_config: Mapping[str, Any]
) -> tuple[Config, NodeSection, Path]:  # fmt: skip
    """A node's configuration, in which its owner's settings come last; its section; and the folder for its state."""
    values = {name.replace("-", "_"): value for name, value in node_config.items()}
    found = find_problems("node-config", NodeSection, {"partition_id": -1} | values)
    names = {field.name for field in fields(NodeSection)}
    section = NodeSection(**{key: value for key, value in values.items() if key in names})
    if not section.state and not flower.state:
        found.append("node-config.state: got nothing, expected a folder, for example --node-config 'state=\"state\"'")
    if section.state and not section.server_key:
        found.append("node-config.server_key: got nothing, expected keys/server.pub, as pfedlms deploy upgrade adds it")
    if found:
        raise ConfigError([problem.replace("_", "-", 1) for problem in found])
    folder = Path(section.state or Path(flower.state) / f"node-{section.partition_id}")
    own: Tables = {"data": {"dir": section.data_dir}, "run": {"device": section.device, "threads": section.threads}}
    own = {name: {key: value for key, value in table.items() if value} for name, table in own.items()}
    return load_config(None, merge(config.tables(), own), stored=True), section, folder
