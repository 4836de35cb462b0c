"""Regression: a custom loss and metric, compared with a plain PyTorch model that was trained on all data in one place.

python examples/regression.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import pfedlms

Samples = tuple[np.ndarray, np.ndarray]


def station(number: int) -> tuple[Samples, Samples]:
    """Made-up weather stations: six readings and a temperature that depends on them in the same way everywhere; the
    distribution of readings differs between stations."""
    random, common = np.random.default_rng(number), np.random.default_rng(99)
    x = random.normal(size=(180, 6)) + random.normal(size=6)
    weights = common.normal(size=(6, 3))
    y = np.tanh(x @ weights) @ np.array([3.0, 2.0, 1.0]) + 0.3 * random.normal(size=180)
    return (x[:60], y[:60]), (x[60:], y[60:])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number per sample."""
    return nn.functional.huber_loss(outputs, targets, reduction="none")


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Minus the absolute error: a higher metric is better."""
    return -(outputs - targets).abs()


def in_one_place(stations: list[tuple[Samples, Samples]], steps: int = 1500) -> float:
    """The metric of a model that has seen every station's samples, a mean over stations."""
    torch.manual_seed(0)
    model, random = network(), np.random.default_rng(0)
    x, y = (torch.tensor(np.concatenate([train[part] for train, _ in stations])).float() for part in (0, 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    for _ in range(steps):
        chosen = random.integers(len(y), size=32)
        optimiser.zero_grad()
        huber(model(x[chosen]), y[chosen]).mean().backward()
        optimiser.step()
    with torch.no_grad():
        scores = [error(model(torch.tensor(x).float()), torch.tensor(y).float()).mean() for _, (x, y) in stations]
    return float(torch.stack(scores).mean())


def main() -> None:
    stations = [station(number) for number in range(10)]
    print("metric: minus the mean absolute error; the higher the better")
    half = {"ratio": 0.5}  # the model is small, so there are bytes to spare
    for method, settings in (("local", {}), ("fedavg", {}), ("pfedlms", half), ("sketchvote", half)):
        result = pfedlms.run(
            stations, network, method=method, loss=huber, metric=error, rounds=60, local_steps=10, batch_size=32,
            learning_rate=0.1, evaluate_every=10, **settings,
        )  # fmt: skip
        sent = sum(result.summary["bytes_per_round"].values()) / len(stations)
        reached = result.summary["accuracy"]["final"]
        print(f"{method:10s} metric {reached:6.3f}   {sent:5,.0f} bytes a station and round")
    print(f"all data in one place, plain PyTorch: metric {in_one_place(stations):6.3f}")


if __name__ == "__main__":
    main()
