"""On a GPU: recorded steps and fused kernels give the results of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import pfedlms
from pfedlms.data.batches import DeviceBatches, HostBatches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("method", ["local", "fedavg", "pfedlms", "pfed1bs", "fedproto", "obda", "eden"])
def test_a_gpu_run_agrees_with_a_cpu_run(method: str) -> None:
    runs = {
        device: pfedlms.run("digits", method=method, rounds=10, clients=8, device=device, seed=3)
        for device in ("cpu", "cuda")
    }
    cpu, gpu = (runs[name].metrics for name in ("cpu", "cuda"))
    assert [r["bytes"] for r in cpu] == [r["bytes"] for r in gpu]
    np.testing.assert_allclose([r["p_acc"] for r in cpu], [r["p_acc"] for r in gpu], atol=1.5)
    np.testing.assert_allclose(cpu[0]["loss"], gpu[0]["loss"], rtol=1e-3)


def test_a_gpu_run_is_deterministic() -> None:
    first, second = (pfedlms.run("digits", rounds=5, clients=8, device="cuda").metrics for _ in range(2))
    for record in (*first, *second):
        del record["seconds"]
    assert first == second


@pytest.mark.parametrize("method", ["local", "pfedlms", "pfed1bs", "fedproto"])
def test_recorded_steps_equal_plain_steps(method: str) -> None:
    """cohort_size 1 runs without recordings, 4 clients at a time with them; a recording that reads values of an earlier
    round would drift away."""
    settings = {"rounds": 4, "clients": 8, "device": "cuda", "momentum": 0.5, "method": method}
    plain = pfedlms.run("digits", cohort_size=1, **settings).federation.state()["params"]
    recorded = pfedlms.run("digits", cohort_size=4, **settings).federation.state()["params"]
    distance = (plain - recorded).norm(dim=1) / plain.norm(dim=1)
    assert distance.max() < 1e-2


def convolutional() -> nn.Module:
    """Every layer that is stacked by a rule of its own."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 20, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 2, stride=2), nn.Flatten(), nn.Linear(20, 10),
    )  # fmt: skip


def test_a_convolutional_model_learns_on_a_gpu_what_it_learns_on_a_cpu() -> None:
    settings = {"method": "pfedlms", "rounds": 5, "clients": 6, "seed": 3, "augment": "flip"}
    cpu, gpu = (pfedlms.run("digits", convolutional, device=device, **settings) for device in ("cpu", "cuda"))
    first_cpu, first_gpu = cpu.metrics[0], gpu.metrics[0]
    assert first_cpu["bytes"] == first_gpu["bytes"]
    np.testing.assert_allclose(first_cpu["loss"], first_gpu["loss"], rtol=2e-2)  # convolutions in TF32
    np.testing.assert_allclose(cpu.accuracy, gpu.accuracy, atol=6)


def test_batches_are_drawn_on_the_device_as_on_the_host() -> None:
    federation = pfedlms.run("digits", rounds=1, clients=8, device="cuda").federation
    ids = tuple(range(8))
    device, host = DeviceBatches(5, federation.data), HostBatches(5, federation.data)
    for first in (0, 20, 45):
        assert torch.equal(device.indices(ids, first, 20, 32).cpu(), host.indices(ids, first, 20, 32))
