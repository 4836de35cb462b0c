"""The work that every simulator is given: data, batches in the order of training, and the initial model.

A folder made by `peers.py` holds it, so that scripts need nothing but NumPy and PyTorch. The scripts beside this file
are what a user of each simulator writes for it; their lines are counted, those of this file are not.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


class Work:
    """FedAvg: all clients in every round, local steps by SGD on given batches, then the mean of all models."""

    def __init__(self, folder: str | Path, parallel: int = 1, device: str = "cpu", rounds: int = 0) -> None:
        self.folder, self.parallel, self.device = Path(folder), parallel, device
        given = json.loads((self.folder / "work.json").read_text())
        self.model: str = given["model"]
        self.clients: int = given["clients"]
        self.steps: int = given["steps"]
        self.batch: int = given["batch"]
        self.rate: float = given["rate"]
        self.seed: int = given["seed"]
        self.rounds: int = rounds or given["rounds"]
        self.stamps: list[float] = []

    def __getstate__(self) -> dict[str, object]:
        """For another process, which maps the files itself."""
        return {name: value for name, value in vars(self).items() if name != "_samples"}

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor, np.ndarray]:
        """Mapped files on a CPU, which processes share; copies on a GPU."""
        x, y, order = (np.load(self.folder / f"{name}.npy", mmap_mode="c") for name in ("x", "y", "order"))
        return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device), order

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        x, y, _ = self._samples
        return x[client], y[client]

    def batches(self, client: int, round: int) -> Batches:
        """The local steps of a client in a round."""
        x, y = self.samples(client)
        order = torch.from_numpy(self._samples[2][round, client].astype(np.int64)).to(self.device)
        return [(x[index], y[index]) for index in order]

    def module(self) -> nn.Module:
        """The global model at the start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return {"cnn": cnn, "smooth": smooth, "dnn": dnn}[self.model]()

    def round_ended(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.stamps.append(time.time())

    def finished(self, model: Tensor) -> None:
        """Save when rounds ended, and the global model after the last, flat."""
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        np.save(self.folder / "model.npy", model.detach().cpu().float().numpy())
        (self.folder / "stamps.json").write_text(json.dumps({"stamps": self.stamps, "gpu_bytes": peak}))


def cnn() -> nn.Module:
    """The small CNN of PyTorch's tutorial, which BlazeFL's benchmark trains."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def smooth() -> nn.Module:
    """The same without kinks. Where an input of ReLU or max pooling is so close to a kink that rounding decides, models
    drift apart; here they must not."""
    layers = [nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in cnn()]
    return nn.Sequential(*[nn.AvgPool2d(2) if isinstance(layer, nn.MaxPool2d) else layer for layer in layers])


def dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def given_work(threads: int | None = None) -> Work:
    """As the command line says, with so many threads for each operator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=0)
    work = Work(**vars(parser.parse_args()))
    torch.set_num_threads(threads or work.parallel)
    return work
