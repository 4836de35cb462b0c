"""Mutated requests and replies through real processes: a SuperLink with its gate, two nodes and eight liars.

In every trip the server's app sends node 1 a request that was changed after it was signed, and each liar, which has a
registered key, replies with a changed reply. Node 0 is honest, so that rounds continue. A message costs processes on
both sides, so this is a hundred messages and not a hundred thousand.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flower"))
from attacker import Attacker
from flotilla import Flotilla, Memory, run_config, wait_until
from mutations import mutated, with_checksum

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import check_reply, decode, read_reply
from pfedlms.deploy.nodes import message_bytes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.errors import WireError
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import RunDirectory
from pfedlms.flower.signing import unseal

LIARS = range(2, 10)
APP = '''"""As `deploy init` writes it, but for a server that changes each request to node 1 after it was signed."""

import random
from pathlib import Path

from mutations import mutated

from pfedlms import flower
from pfedlms.flower.carrier import Carrier

FILE = Path(__file__).with_name("pfedlms.toml")
draw, send = random.Random(3), Carrier.send


def changed(self, requests, timeout):
    other = {client: mutated(data, draw) if client == 1 else data for client, data in requests.items()}
    return send(self, other, timeout)


Carrier.send = changed
server = flower.server(FILE)
client = flower.client(FILE)
'''


class Liar:
    """Executes requests, and changes the reply; of every second one it mends length and checksum."""

    def __init__(self, node: Node, seed: int) -> None:
        self._node, self._messages, self._draw = node, message_bytes(RunSetup(node.config)), random.Random(seed)
        self.replied: dict[int, bool] = {}
        """By trip: whether what was sent differs from the truth only in numbers, which nobody else can check."""

    def __call__(self, attacker: Attacker, kind: str, data: bytes) -> bytes | None:
        request = unseal(data, None)[1]
        if kind != "train.request" or (trip := decode(request).trip) in self.replied:
            return None
        reply = self._node.handle(request)
        other = mutated(reply, self._draw)
        other = with_checksum(other) if trip % 2 else other
        self.replied[trip] = self._is_valid(request, other)
        return other

    def _is_valid(self, request: bytes, reply: bytes) -> bool:
        """As the server reads it, but for the message, which the server decodes, too."""
        asked = decode(request)
        try:
            read_reply(asked, check_reply(asked, reply, self._messages), True)
        except WireError:
            return False
        return True


def end_to_end(count: int) -> dict[str, Any]:
    rounds = -(-count // (len(LIARS) + 1))
    with tempfile.TemporaryDirectory() as name, Flotilla(Path(name) / "f", 10) as flotilla:
        (flotilla.app / "app.py").write_text(APP)
        shutil.copy(Path(__file__).with_name("mutations.py"), flotilla.app)
        out = Path(name) / "f" / "run"
        chosen = {"run.out": str(out), "train.rounds": rounds, "run.quorum": 0.1, "run.timeout": 120.0}
        flotilla.open()
        for number in (0, 1):
            flotilla.node(number)
        with ExitStack() as stack:
            liars = _liars(flotilla, flotilla.config(**chosen), Path(name), stack)
            memory = Memory(flotilla)
            flotilla.run(run_config({**chosen, "flower.wait": 120.0}))
            wait_until(lambda: any(liar.replied for liar in liars.values()), 600, "a trip")
            with memory:
                flotilla.wait_for_end(seconds=3000)
        metrics = RunDirectory(out).read_metrics()
        lines = [json.loads(line) for line in (flotilla.folder / "audit" / "server.jsonl").read_text().splitlines()]
    requests = [each["result"] for each in lines if each["event"] == "request" and each["client"] == 1]
    found = {"requests refused by the node": 0, "requests accepted": 0, "replies refused by the server": 0}
    found |= {"replies with other valid numbers": 0, "replies accepted wrongly": 0}
    for result in requests:
        found["requests accepted" if result == "replied" else "requests refused by the node"] += 1
    for each in metrics:
        for client, liar in liars.items():
            if each["round"] not in liar.replied:
                continue
            if client not in each.get("clients", range(10)):
                found["replies refused by the server"] += 1
            else:
                valid = liar.replied[each["round"]]
                found["replies with other valid numbers" if valid else "replies accepted wrongly"] += 1
    sizes = {kind: [round(size) for size in each] for kind, each in memory.seen.items()}
    honest = sum(0 in each.get("clients", range(10)) for each in metrics)
    return {"rounds": len(metrics), "with the honest node": honest, **found, "MiB at first and most": sizes}


def _liars(flotilla: Flotilla, config: Config, folder: Path, stack: ExitStack) -> dict[int, Liar]:
    liars = {}
    for place in LIARS:
        node = stack.enter_context(Node(config, place, folder / f"liar-{place}"))
        liars[place] = Liar(node, place)
        stack.enter_context(Attacker(f"127.0.0.1:{flotilla.port}", flotilla.folder, place, liars[place]))
    return liars
