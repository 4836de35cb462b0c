"""sketchvote: which votes count, its limits, and clients out of sync. wire/test_second_sketchvote.py recomputes whole
runs."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from torch import Tensor

import factories
from definitions import dense_model
from factories import CLIENTS, CPU, RATIO, SEED, SIZES, Work, cohort_of, federation, hold, layout_of, normal, task_of
from pfedlms.cohort import Cohort
from pfedlms.methods.consensus import Sketches
from pfedlms.methods.sketchvote import ResidualSignVote
from pfedlms.wire.frames import HEADER_BYTES


def exchange_of(*sizes: int, ratio: float = RATIO) -> ResidualSignVote:
    exchange = factories.exchange_of("sketchvote", task_of(*sizes, seed=SEED), ratio=ratio, check_every=0)
    assert isinstance(exchange, ResidualSignVote)
    return exchange


def clients_at(params: Tensor, model: Tensor, residual: Tensor, samples: list[int]) -> Cohort:
    cohort = cohort_of(params, samples=samples, model=model)
    return cohort.with_state(residual=residual, checked=torch.zeros(len(params), 1, dtype=torch.int64))


def test_a_client_whose_update_of_a_layer_is_zero_has_no_vote_there() -> None:
    """In the first layer the heavy client has x = 0: there the light one decides sign and size; in the second it is
    outvoted. In the third all clients have x = 0, and it does not change, −0 included."""
    sizes, samples = (16, 64, 4), [7, 1]
    model = torch.cat([normal(80, seed=1), torch.tensor([-0.0, 0.0, 1.0, -1.0])])
    params = model + normal(2, 84, seed=2)
    params[0, :16], params[:, 80:] = model[:16], model[80:]
    heavy_alone, light_alone = (
        hold(exchange_of(*sizes), clients_at(params[k : k + 1], model, torch.zeros(1, 84), [1]), {"model": model})[1]
        for k in (0, 1)
    )
    _, together = hold(exchange_of(*sizes), clients_at(params, model, torch.zeros(2, 84), samples), {"model": model})
    assert torch.equal(together["model"][:16], light_alone["model"][:16])
    assert torch.equal(together["model"][16:80], heavy_alone["model"][16:80])
    assert not torch.equal(heavy_alone["model"][16:80], light_alone["model"][16:80])
    assert together["model"][80:].numpy().tobytes() == model[80:].numpy().tobytes()


def test_exact_values_and_all_rows_give_fedavg() -> None:
    """The mean of the y_k in place of vote and median, each layer with its own c over √(2/π) s̄; nothing is kept."""
    model, params = normal(sum(SIZES), seed=1), normal(3, sum(SIZES), seed=2)
    sketches = Sketches(layout_of(*SIZES), 1.0, SEED, refresh=1)
    factors = torch.from_numpy(exchange_of(*SIZES, ratio=1.0)._factors) / sqrt(2 / pi)
    before = model.expand(3, -1)
    y, kept = sketches.of(4, CPU).split(params.double(), before.double(), torch.zeros(before.shape).double())
    mean = (torch.tensor([2, 3, 7]).double() @ y)[None] / 12
    step = sketches.of(4, CPU).spread(mean)[0] * factors.repeat_interleave(torch.tensor(SIZES))
    fedavg = torch.tensor([2, 3, 7]).double() @ params.double() / 12
    torch.testing.assert_close(model + step, fedavg, rtol=1e-5, atol=2e-6)
    assert kept.abs().max() < 1e-12


def test_an_update_is_split_into_the_message_and_the_residual() -> None:
    """x = (m/N) Φᵀy + e, and without padding Φe = 0."""
    x = normal(3, 64, seed=2)
    cohort = clients_at(x, torch.zeros(64), torch.zeros(3, 64), [1, 1, 1])
    after, _ = exchange_of(64, ratio=0.25).client_send(cohort, 0, Work())  # type: ignore[arg-type]
    phi, kept = dense_model((64,), 0.25, SEED), after.state["residual"].double()
    torch.testing.assert_close(x.double(), 0.25 * (x.double() @ phi.T) @ phi + kept, rtol=0, atol=1e-6)
    torch.testing.assert_close(kept @ phi.T, torch.zeros(3, 16, dtype=torch.float64), rtol=0, atol=1e-5)


def on_a_quadratic(contraction: float, ratio: float) -> tuple[list[float], list[float]]:
    """f_k = ½ ‖θ − a_k‖²; in a round, local steps take a client the share `contraction` of the distance to a_k. For
    every round the largest ‖e_k‖, and the distance of w from the mean of the a_k."""
    dim, goals = 256, normal(5, 256, seed=4) + normal(256, seed=9)
    exchange, server = exchange_of(dim, ratio=ratio), {"model": torch.zeros(dim)}
    cohort = clients_at(torch.zeros(5, dim), torch.zeros(dim), torch.zeros(5, dim), [1] * 5)
    kept, distances = [], []
    for round in range(300):
        start = cohort.params
        trained = start + contraction * (goals - start)
        (cohort,), server = hold(exchange, cohort.with_model(trained).with_state(model=start), server, round=round)
        kept.append(cohort.state["residual"].norm(dim=1).max().item())
        distances.append((server["model"] - goals.mean(dim=0)).norm().item())
    return kept, distances


@pytest.mark.parametrize("ratio", [0.25, 0.1])
def test_residuals_are_bounded_up_to_the_limit_of_the_contraction(ratio: float) -> None:
    """A direction is sent after k rounds, P(k) = δ (1−δ)^(k−1), and then moves by all k of them, so that the error
    in it becomes 1 − kη times itself: E (1 − kη)² < 1 iff η < 2δ / (2 − δ). Rounds that contract more diverge."""
    limit = 2 * ratio / (2 - ratio)
    kept, stable = on_a_quadratic(0.6 * limit, ratio)
    assert max(kept[200:]) < 1.1 * max(kept[100:200])
    assert max(stable[200:]) < stable[0]
    _, unstable = on_a_quadratic(1.3 * limit, ratio)
    assert min(unstable[250:]) > 10 * unstable[0]


@pytest.mark.parametrize("out_of_sync", [(1, 2, 3), (0, 1, 2, 3, 4)])
def test_clients_out_of_sync_are_sent_the_model_also_if_they_are_the_majority(out_of_sync: tuple[int, ...]) -> None:
    """Only the votes of the others count; if there are none, w does not change. In the next round all are in sync."""
    run = federation("sketchvote", check_every=1)
    run.start()
    run.play_round()
    (cohort,) = run._clients.present
    model = cohort.state["model"].clone()
    model[list(out_of_sync), 7] += 1e-3
    run._clients.present = [cohort.with_state(model=model)]
    before = run.state()["server"]["model"]
    with pytest.warns(
        UserWarning, match="tracks another model than the server, and is sent that one before it goes on"
    ):
        report = run.play_round()
    assert (report.rejected, report.astray, report.participants) == (0, len(out_of_sync), tuple(range(CLIENTS)))
    differs = before.view(torch.int32) != run.method.task.initial.view(torch.int32)
    assert len(out_of_sync) * 4 * int(differs.sum()) < report.traffic.catch_up
    assert report.traffic.catch_up <= len(out_of_sync) * (HEADER_BYTES + 4 * before.numel())
    after = run.state()
    assert torch.equal(after["server"]["model"], before) == (len(out_of_sync) == CLIENTS)
    assert all(torch.equal(row, after["server"]["model"]) for row in after["state"]["model"])
    assert run.play_round().astray == 0
