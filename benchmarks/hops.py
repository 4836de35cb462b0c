"""The files that one pFedLMS round runs through, as calls from one file into another, each counted once; and the files
and forms of one accuracy, from the round that measures it to a table and to the page.

    python benchmarks/hops.py [--list]

A round in a simulation, and on nodes (server and nodes together, without what carries bytes between them). Counted
three times: every file; doors only, without what lies behind the door of a room (kernels, packing, how a model is
run); and θ: the doors that take or return clients' models themselves, not only messages, votes or losses. Left out
everywhere: dispatch, random streams and the stopwatch, which touch no model.

An accuracy is followed by its value, which occurs nowhere else: in the arguments and results of functions, and in what
these hold. A form is what holds it: a number, a line of metrics.jsonl, a summary, a row of a table, a mean over seeds,
a record of a figure, or text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import torch

import pfedlms
from pfedlms.cohort import Cohort
from pfedlms.data import from_pairs
from pfedlms.deploy import Coordinator, Node
from pfedlms.engine import Evaluation, Federation
from pfedlms.experiment.config import load_config
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build
from pfedlms.train_settings import TrainSettings

ROOT = str(Path(pfedlms.__file__).parent) + "/"
BESIDE = {"backend.py", "rng.py"}
BEHIND = {"cpu.py", "gpu.py", "hadamard.py", "codec.py", "kernels.py"}
BEHIND_MODELS = {f"models/{name}.py" for name in ("chain", "stacked", "one_by_one", "runner")}

MODEL = CohortModel(build("dnn", (64,), 10, 16, 0), torch.device("cpu"))
"""What both rounds train: 64 inputs, 16 hidden units, 10 classes."""
Call = tuple[str, str, str, str]
"""File and function that call, file and function that are called."""


@contextmanager
def watched_by(watch: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Every call and return of a function is shown to `watch`."""
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


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

    with watched_by(watch):
        play()
    return [call for call in found if not {call[0], call[2]} & BESIDE and "Stopwatch" not in call[3]]


def way_of_models(play: Callable[[], Any]) -> set[str]:
    """The files with a function that is given models of clients, or returns them."""
    files: set[str] = set()

    def has_models(value: Any, depth: int = 3) -> bool:
        if isinstance(value, torch.Tensor):
            return value.shape[-1:] == (MODEL.layout.dim,)
        inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        return isinstance(value, Cohort) or (depth > 0 and any(has_models(own, depth - 1) for own in list(inside)[:20]))

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and event in ("call", "return"):
            given = [value for name, value in frame.f_locals.items() if name != "self"]
            if any(has_models(value) for value in (given if event == "call" else [argument])):
                files.add(file[len(ROOT) :])

    with watched_by(watch):
        play()
    return {file for file in files if file not in BESIDE and not behind(file)}


def simulation() -> Callable[[], Any]:
    """A round in one process, after a first one."""
    draw = np.random.default_rng(0)
    sets = [[(draw.standard_normal((n, 64), dtype=np.float32), np.arange(n) % 10) for n in (40, 20)] for _ in range(4)]
    method, train = METHODS["pfedlms"], TrainSettings(local_steps=3, batch_size=8)
    federation = Federation(method, method.Settings(), MODEL, from_pairs([(a, b) for a, b in sets]), train, 0)
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


ACCURACY, SHOWN = 12.3456789, ("12.35", "12.3456789")
"""A value that an evaluation is made to have, and how it looks in texts."""
FORMS = {
    "line": ("p_acc", "g_acc"), "summary": ("max", "last10", "final", "accuracy"), "figure": ("mean", "low", "high")
}  # fmt: skip
"""What has a key of that name; all other keys are those of rows."""
ROOMS = ("pfedlms.engine.reports", "pfedlms.experiment", "pfedlms.report")
"""Where the classes are that hold it."""


def way_of_accuracy(folder: Path, to: str) -> tuple[set[str], set[str]]:
    """Files and forms of P-acc, from a round to a table or to the page."""
    files: set[str] = set()
    forms: set[str] = set()

    def holders(value: Any, holder: str, depth: int = 4) -> set[str]:
        """What holds the accuracy within a value; by `type`, since an object may claim another class."""
        kind = type(value)
        if issubclass(kind, float | str):
            here = value == ACCURACY or (kind is str and any(text in value for text in SHOWN))
            return {"text" if kind is str else holder} if here else set()
        parts: list[tuple[str, Any]] = []
        if issubclass(kind, dict):
            form = {key: name for name, keys in FORMS.items() for key in keys}
            parts = [(form.get(key, "row"), own) for key, own in list(value.items())[:60]]
        elif issubclass(kind, list | tuple):
            parts = [(holder, own) for own in value[:20]]
        elif kind.__module__.startswith(ROOMS) and hasattr(value, "__dict__"):
            parts = [(kind.__name__, own) for own in list(vars(value).values())]
        return set().union(*(holders(own, name, depth - 1) for name, own in parts)) if depth else set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and event in ("call", "return"):
            held = list(frame.f_locals.values()) if event == "call" else [argument]
            here = set().union(*(holders(each, "number") for each in held))
            forms.update(here)
            files.update([file[len(ROOT) :]] if here else [])

    measured = Evaluation.accuracy
    Evaluation.accuracy = property(lambda self: ACCURACY)  # type: ignore[method-assign,assignment]
    try:
        settings: dict[str, Any] = {"clients": 3, "rounds": 1, "local_steps": 1, "hidden": 8, "threads": 1}
        with watched_by(watch):
            study = pfedlms.compare(methods="fedavg", seeds=2, out=folder, progress=False, **settings)
            if to == "table":
                assert SHOWN[0] in str(study)
            else:
                study.report(folder / "page.html")
    finally:
        Evaluation.accuracy = measured  # type: ignore[method-assign]
    return files, forms


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
            models = way_of_models(play)
            print(f"{name:12s} {'θ':12s} {len(models):3d} files")
            if options.list:
                for call in doors:
                    print("  ".join(call))
                print("  ".join(sorted(models)))
        for to in ("table", "page"):
            places, forms = way_of_accuracy(Path(folder) / to, to)
            print(f"accuracy     to a {to:5s}   {len(places):3d} files {len(forms):4d} forms")
            if options.list:
                print("  ".join(sorted(places)), "  ".join(sorted(forms)), sep="\n")


if __name__ == "__main__":
    main()
