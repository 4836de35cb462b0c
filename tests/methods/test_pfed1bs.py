"""pFed1BS: its objective and its messages in float64 through a dense Φ."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from torch import Tensor

from definitions import dense_phi
from factories import SMALL_DIM, cohort_of, federation, normal, recorded_messages, small_data, small_module, task_of
from pfedlms.methods.pfed1bs import PFed1BS, PFed1BSSettings
from pfedlms.wire.frames import SERVER

SEED = 5


def penalty(theta: Tensor, phi: Tensor, consensus: Tensor, settings: PFed1BSSettings) -> Tensor:
    """λ Σ_i [log cosh(γ y_i) / γ − v_i y_i], y = Φθ; log cosh z = |z| + log(1 + e^(−2|z|)) − log 2."""
    y = phi @ theta
    z = settings.sharpness * y
    smooth = z.abs() + torch.log1p(torch.exp(-2 * z.abs())) - log(2)
    return settings.strength * (smooth / settings.sharpness - consensus * y).sum()


@pytest.mark.parametrize("sharpness", [0.5, 20.0, 1e4])
@pytest.mark.parametrize("sizes", [(60,), (40, 24)], ids=["padded", "two-layers"])
def test_gradient_of_the_objective(sizes: tuple[int, ...], sharpness: float) -> None:
    """Against float64 autograd; the sketch is of the whole model, with m = floor(0.5 n) rows."""
    dim = sum(sizes)
    settings = PFed1BSSettings(ratio=0.5, strength=0.3, sharpness=sharpness)
    theta, consensus = normal(3, dim, seed=2, dtype=torch.float64), torch.where(normal(dim // 2) >= 0, 1.0, -1.0)
    phi = torch.from_numpy(dense_phi(dim, dim // 2, SEED))
    expected = []
    for own in theta:
        leaf = own.clone().requires_grad_()
        penalty(leaf, phi, consensus.double(), settings).backward()
        expected.append(leaf.grad)
    method = PFed1BS(task_of(*sizes, seed=SEED), settings)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        cohort = cohort_of(theta.to(dtype)).with_heard(consensus=consensus.to(dtype))
        gradient = method.objective(cohort, 0).gradient(cohort.params)
        assert gradient is not None
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def test_a_federation_sends_signs_of_one_fixed_sketch_and_their_majority() -> None:
    """Three rounds: every client's message is the sign of ΦΘ through the dense Φ of the whole model, the same Φ each
    round, and the answer is the weighted majority: of four clients the last has as many samples as two others."""
    run = federation("pfed1bs", small_data(5, 6, 8, 14), small_module(), seed=SEED, ratio=0.5)
    phi = dense_phi(SMALL_DIM, SMALL_DIM // 2, SEED)
    run.start()
    for _ in range(3):
        params = run.state()["params"].double().numpy()
        with recorded_messages() as messages:
            run.play_round()
        sketched = params @ phi.T
        clear = np.abs(sketched) > 1e-5
        assert clear.mean() > 0.99
        signs = np.array([np.where(sent.values["signs"] >= 0, 1, -1) for sent in messages if sent.sender != SERVER])
        np.testing.assert_array_equal(signs[clear], np.sign(sketched)[clear])
        (down,) = [sent.values["signs"] for sent in messages if sent.sender == SERVER]
        np.testing.assert_array_equal(down, np.where(np.array(run.data.samples) @ signs >= 0, 1, -1))
