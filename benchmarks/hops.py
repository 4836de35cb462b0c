"""The files that one pFedLMS round runs through, as calls from one file into another, each counted once.

    python benchmarks/hops.py [--list]

In a simulation, and on nodes (server and nodes together, without what carries bytes between them). Counted twice:
every file, and doors only, without what lies behind the door of a room (kernels, packing, the ways a model is run).
Left out everywhere: dispatch, random streams and the stopwatch, which touch no model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import torch

import pfedlms
from pfedlms.data import from_pairs
from pfedlms.deploy import Coordinator, Node
from pfedlms.engine import Federation
from pfedlms.engine.training import TrainSettings
from pfedlms.experiment.config import load_config
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build

ROOT = str(Path(pfedlms.__file__).parent) + "/"
BESIDE = {"backend.py", "rng.py", "engine/stopwatch.py"}
BEHIND = {"cpu.py", "gpu.py", "hadamard.py", "codec.py", "kernels.py", "checksum.py", "pieces.py"}
BEHIND_MODELS = {f"models/{name}.py" for name in ("chain", "stacked", "one_by_one", "runner", "streams")}

Call = tuple[str, str, str, str]
"""File and function that call, file and function that are called."""


def calls_of(play: Callable[[], Any]) -> list[Call]:
    """Calls from one file into another in a round, in the order they first happen."""
    found: dict[Call, None] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        here, above = frame.f_code, frame.f_back
        if event != "call" or not here.co_filename.startswith(ROOT):
            return
        while above is not None and not above.f_code.co_filename.startswith(ROOT):
            above = above.f_back
        if above is not None and above.f_code.co_filename != here.co_filename:
            names = (above.f_code.co_filename[len(ROOT) :], above.f_code.co_qualname)
            found[(*names, here.co_filename[len(ROOT) :], here.co_qualname)] = None

    sys.setprofile(watch)
    try:
        play()
    finally:
        sys.setprofile(None)
    return [call for call in found if not {call[0], call[2]} & BESIDE]


def simulation() -> Callable[[], Any]:
    """A round in one process, after a first one."""
    draw = np.random.default_rng(0)
    sets = [[(draw.standard_normal((n, 64), dtype=np.float32), np.arange(n) % 10) for n in (40, 20)] for _ in range(4)]
    model = CohortModel(build("dnn", (64,), 10, 16, 0), torch.device("cpu"))
    method, train = METHODS["pfedlms"], TrainSettings(3, 8, 0.1, 0.0, 1e-4)
    federation = Federation(method, method.Settings(), model, from_pairs([(a, b) for a, b in sets]), train, 0)
    federation.start()
    federation.play_round()
    return federation.play_round


def on_nodes(folder: Path) -> Callable[[], Any]:
    """A round on nodes without the network between them, after a first one."""
    tables = {"data": {"clients": 4}, "method": {"name": "pfedlms"}, "run": {"threads": 1}}
    config = load_config(None, tables | {"model": {"hidden": 16}, "train": {"rounds": 9, "local_steps": 3}})
    nodes = [Node(config, client, folder) for client in range(4)]

    class InThisProcess:
        def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
            return {client: nodes[client].handle(data) for client, data in requests.items()}

    coordinator: Any = Coordinator(config, InThisProcess())

    def play() -> None:
        if hasattr(coordinator, "play_round"):
            coordinator.play_round()
        else:  # versions before it
            while coordinator.step() is None:
                pass

    play()
    return play


def behind(file: str) -> bool:
    return Path(file).name in BEHIND or file in BEHIND_MODELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        for name, play in (("simulation", simulation()), ("nodes", on_nodes(Path(folder)))):
            calls = calls_of(play)
            doors = [call for call in calls if not behind(call[0]) and not behind(call[2])]
            for which, some in (("all files", calls), ("doors only", doors)):
                files = {file for call in some for file in (call[0], call[2])}
                print(f"{name:12s} {which:12s} {len(files):3d} files {len(some):4d} calls between them")
            if options.list:
                for call in doors:
                    print("  ".join(call))


if __name__ == "__main__":
    main()
