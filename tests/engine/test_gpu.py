"""On a GPU: recorded steps and fused kernels give the results of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pfedlms

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
