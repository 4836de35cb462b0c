"""Real processes: nodes that lie, in all ways at once. Each is left out or weakened, warned of and named; the others'
run is what it would be without them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch
from fleet import Fleet, plain, served
from flotilla import SMALL, Flotilla, long, needs_flower, run_config, until

import pfedlms
from factories import digits
from pfedlms.deploy import Node
from pfedlms.deploy.envelope import Code, decode
from pfedlms.experiment.store import RunDirectory

pytestmark = [needs_flower, long]
HONEST, IMPOSTOR = 0, 9
ATTACKS = {
    1: "version", 2: "settings", 3: "garbage", 4: "replay", 5: "enormous", 6: "not_a_number", 7: "changing", 8: "heavy",
}  # fmt: skip
CHOSEN = {
    "data.dataset": "custom", "data.class_names": ",".join("abcdefghij"), "data.sample_shape": "1x8x8",
    "method.name": "pfedlms", "train.max_weight": 0.4, "run.quorum": 0.2,
}  # fmt: skip
WHY = {
    2: r"refused, run: digest: got \w+, expected \w+; the ends differ",
    3: "reply: got 7000 bytes, expected at most \\d+, as follows from the request",
    4: "RoundError: reply: got one to round 1, trip 0, expected |got more than 2 records, as follows from",
    5: "TruncatedError: envelope: got \\d+ bytes, expected 1152921504606846976",
    6: "DecodeError: field 'variance': got nan at position 1, expected a finite number",
    7: r"DecodeError: samples: got \d+, expected \d+, as before",
}


@dataclass(frozen=True)
class Fixed:
    """A flotilla in which places but the impostor's are taken, and all have data of their own."""

    flotilla: Flotilla
    files: dict[int, str]
    pinned: int
    """Id of the honest node."""


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixed]:
    folder = tmp_path_factory.mktemp("hostile")
    made = Flotilla(folder / "ten", 10)
    (made.app / "pfedlms.toml").write_text(SMALL.format(nodes=9))
    (made.app / "app.py").write_text(hostile.APP)
    shutil.copy(hostile.__file__, made.app / "hostile.py")
    pool, files = digits(9), dict[int, str]()
    for client in range(9):
        held = np.concatenate([np.asarray(pool.train[client]), np.asarray(pool.test[client])])
        files[client] = f"file:{folder / f'{client}.npz'}"
        np.savez(folder / f"{client}.npz", x=pool.x[held].numpy(), y=pool.y[held].numpy())

    def started(number: int, place: int, **environment: str) -> None:
        said = f'partition-id={place} state="{made.folder}/state-{number}" data="{files[place]}" device="cpu"'
        made.node(number, "--node-config", said, **environment)

    def online() -> list[int]:
        nodes = json.loads(made.call("flwr", "supernode", "list", "federation", "--format", "json"))["nodes"]
        return [int(each["node-id"]) for each in nodes if each["status"] == "online"]

    with closing(made):
        made.open()
        started(HONEST, HONEST)
        until(online, 60, "a node")
        (pinned,) = online()
        assert pinned == json.loads((made.folder / "places.json").read_text())["0"]["node"]
        for number, attack in ATTACKS.items():
            started(number, number, ATTACK=attack)
        started(IMPOSTOR, HONEST)
        until(lambda: len(online()) == 10, 120, "all nodes")
        yield Fixed(made, files, pinned)


def test_a_check_names_who_differs(fixed: Fixed) -> None:
    """Another version of the package, other settings; and its exit status is 1."""
    pyproject = fixed.flotilla.app / "pyproject.toml"
    text = pyproject.read_text()
    for key, value in CHOSEN.items():
        section, _, name = key.partition(".")
        table = f"[tool.flwr.app.config.{section}]"
        head, own = text.split(table)
        text = (
            head + table + re.sub(rf"^{name} = .*$", f"{name} = {json.dumps(value)}", own, count=1, flags=re.MULTILINE)
        )
    pyproject.write_text(text)
    fixed.flotilla.approve()
    done = subprocess.run(
        [sys.executable, "-m", "pfedlms", "deploy", "check", str(fixed.flotilla.folder), "--json"],
        env=fixed.flotilla.environment, text=True, stdout=subprocess.PIPE, timeout=400,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    found = [each for each in json.loads(done.stdout) if each["what"] == "nodes"]
    of_nodes = [each for each in found if re.match(r"client \d, node", each["said"])]
    assert len(of_nodes) == 9, found
    texts = [each["said"].partition(": ")[2] for each in of_nodes]
    assert re.fullmatch(rf"pfedlms: got 0\.0\.9, expected {re.escape(pfedlms.__version__)}", texts[1])
    assert re.fullmatch(r"digest: got (\w{16}), expected (?!\1)\w{16}", texts[2])
    assert [text for client, text in enumerate(texts) if client not in (1, 2)] == ["as the server"] * 7
    assert [each["wrong"] for each in of_nodes] == [client in (1, 2) for client in range(9)]
    rivals = [each["said"] for each in found if "all say that this is their place" in each["said"]]
    assert len(rivals) == 1
    assert rivals[0].startswith("client 0: nodes ")
    assert str(fixed.pinned) in rivals[0]


def test_all_attacks_at_once(fixed: Fixed, tmp_path: Path) -> None:
    flotilla, out = fixed.flotilla, fixed.flotilla.folder / "run"
    chosen = {**CHOSEN, "run.out": str(out)}
    flotilla.run(run_config(chosen))
    said = flotilla.finished(seconds=900)
    config, metrics = flotilla.config(**chosen), RunDirectory(out).read_metrics()
    assert [each["round"] for each in metrics] == [1, 2]
    for each in metrics:
        assert sorted(map(int, each["left_out"])) == sorted(WHY)
        assert all(re.search(why, each["left_out"][str(client)]) for client, why in WHY.items())
        assert each["weakened"] == [8]
        assert each["clients"] == [0, 1, 8]
    for client, why in WHY.items():
        assert re.search(rf"round 1: client {client} is left out: .*(?:{why})", said)
    assert f"client 8 weighs less than its {hostile.CLAIM} samples, by train.max_weight" in said

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        """Who cannot be believed says nothing."""
        reply, asked = handle(request), decode(request)
        second = any(each.code == Code.SEND and each.index == 1 for each in asked.records)
        silent = client in (2, 3, 5, 6) or (client == 4 and asked.trip > 0) or (client == 7 and second)
        return None if silent else reply

    here = config.with_run(out=str(tmp_path / "here"))
    fleet = Fleet(here, tmp_path / "nodes", way, data=dict(fixed.files))
    fleet.node(8).samples = hostile.CLAIM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, expected = served(here, fleet)
    assert [plain(each) for each in metrics] == [plain(each) for each in expected]
    for client in (0, 1, 8):
        with Node(config, client, flotilla.folder / f"state-{client}", fixed.files[client]) as node:
            own, other = node.model(), fleet.node(client).model()
        assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_place_that_is_pinned(fixed: Fixed) -> None:
    """The impostor said in the check that it has it, and has nothing of the run."""
    assert "Receiving: query.who" in fixed.flotilla.said(f"node-{IMPOSTOR}")
    assert "Receiving: train.request" not in fixed.flotilla.said(f"node-{IMPOSTOR}")
    assert not (fixed.flotilla.folder / f"state-{IMPOSTOR}").exists()
