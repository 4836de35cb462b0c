"""What Flower is told: keys of the run config, which are those of the TOML file and a section of their own, and keys of
a node's config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pfedlms.errors import ConfigError
from pfedlms.experiment.config import Config, Tables, load_config, merge, read_toml
from pfedlms.flower.approval import declared
from pfedlms.methods import METHODS
from pfedlms.settings import find_problems, setting

AS_IN_FILE = ""
"""The value of a key of the run config that leaves it as it is in the TOML file."""


@dataclass(frozen=True)
class FlowerSection:
    """How the server gets along with nodes; section `flower` of the run config."""

    wait: float = setting(
        60.0,
        "at the start: seconds without a new node after which the run begins, although places are free",
        minimum=0,
    )
    attempts: int = setting(
        10, "how often a round in which too few nodes answered is tried before the run ends", minimum=1
    )
    nodes: str = setting(
        "",
        "ids of nodes by place, from 0, separated by commas, or the file that register.sh writes: replies for their "
        "place are taken from them alone; empty: nodes say themselves which place is theirs (partition-id)",
    )
    key: str = setting(
        "", "the server's private key, which signs requests; empty: a key of this process alone, for simulations"
    )
    audit: str = setting("", "the server's audit log, which lines are appended to; empty: none")
    state: str = setting(
        "", "folder for the state of nodes that name none themselves, one below it for each; for Flower's simulations"
    )
    check: bool = setting(False, "ask all nodes for versions and digest, say what differs, and end")

    def pinned(self, clients: int) -> dict[int, int]:
        """Nodes by place, where they are named. A place may be left free."""
        if "/" in self.nodes:
            return {place: each["node"] for place, each in read_places(Path(self.nodes)).items() if place < clients}
        named = [each.strip() for each in self.nodes.split(",")]
        given = [each for each in named if each]
        if not all(each.isdecimal() for each in given) or len(named) > clients or len(set(given)) < len(given):
            raise ConfigError(
                [f"flower.nodes: got {self.nodes!r}, expected at most data.clients = {clients} different node ids"]
            )
        return {place: int(each) for place, each in enumerate(named) if each}


def own_settings(app: Path) -> tuple[Config, FlowerSection]:
    """The configuration of a run of this app without any --run-config."""
    return configured(app / "pfedlms.toml", declared((app / "pyproject.toml").read_text(encoding="utf-8")))


def read_places(file: Path) -> dict[int, dict[str, Any]]:
    """Which node has which place, as register.sh wrote it: its id and its public key."""
    if not file.exists():
        return {}
    try:
        kept = {int(place): each for place, each in json.loads(file.read_text(encoding="utf-8")).items()}
        if all(isinstance(each["node"], int) and isinstance(each["key"], str) for each in kept.values()):
            return kept
    except (ValueError, AttributeError, KeyError, TypeError):
        pass
    raise ConfigError([f"{file}: cannot be read as places; delete it and run ./register.sh"])


@dataclass(frozen=True)
class NodeSection:
    """What a node's owner says, in --node-config; with - for _."""

    partition_id: int = setting(-1, "its place among data.clients, from 0; must be given", minimum=0)
    state: str = setting("", "folder for its state: model, optimiser, what its method keeps, last answer")
    server_key: str = setting(
        "", "the server's public key, keys/server.pub; a node with a state folder of its own needs it"
    )
    keep: int = setting(0, "days after which the state of other runs is removed; 0: never", minimum=0)
    data: str = setting("", "its own data, where data.dataset is custom: folder:PATH, file:PATH or module:function")
    data_dir: str = setting("", "where the files of a data set by name are; data.dir")
    device: str = setting("", "cpu, cuda or cuda:N; run.device")
    threads: int = setting(0, "CPU threads; 0: as the run says; run.threads", minimum=0, maximum=1024)
    num_partitions: int = setting(0, "written by Flower's simulations, not used", minimum=0)


def configured(file: Path, run_config: Mapping[str, Any]) -> tuple[Config, FlowerSection]:
    """A run's configuration, the same on all ends; raises ConfigError with every problem found."""
    tables: Tables = {}
    for name, value in run_config.items():
        section, _, key = name.partition(".")
        if value != AS_IN_FILE:
            tables.setdefault(section, {})[key] = value
    own = tables.pop("flower", {})
    found = find_problems("flower", FlowerSection, own)
    try:
        config = load_config(None, merge(_of_method(read_toml(file), tables), tables))
    except ConfigError as error:
        raise ConfigError([*found, *error.problems]) from error
    if found:
        raise ConfigError(found)
    return config, FlowerSection(**own)


def _of_method(written: Tables, given: Tables) -> Tables:
    """The file without sections of methods that this run does not have: `[pfedlms]` where another one is chosen."""
    chosen = given.get("method", {}).get("name") or written.get("method", {}).get("name")
    return {section: own for section, own in written.items() if section not in METHODS or section == chosen}


def seated(config: Config, flower: FlowerSection, node_config: Mapping[str, Any]) -> tuple[Config, NodeSection, Path]:
    """A node's configuration, which its owner has the last word on, its place, and where its state lies."""
    given = {name.replace("-", "_"): value for name, value in node_config.items()}
    known = {each.name for each in fields(NodeSection)}
    found = find_problems("node-config", NodeSection, {"partition_id": -1} | given)
    seat = NodeSection(**{key: value for key, value in given.items() if key in known})
    if not seat.state and not flower.state:
        found.append("node-config.state: got nothing, expected a folder, for example --node-config 'state=\"state\"'")
    if seat.state and not seat.server_key:
        found.append(
            "node-config.server_key: got nothing, expected keys/server.pub, by which this node knows requests of its "
            "server; run `pfedlms deploy upgrade FOLDER` on this node"
        )
    if found:
        raise ConfigError([problem.replace("_", "-", 1) for problem in found])
    folder = Path(seat.state or Path(flower.state) / f"node-{seat.partition_id}")
    said: Tables = {"data": {"dir": seat.data_dir}, "run": {"device": seat.device, "threads": seat.threads}}
    given_here = {section: {key: value for key, value in own.items() if value} for section, own in said.items()}
    return load_config(None, merge(config.tables(), given_here), stored=True), seat, folder
