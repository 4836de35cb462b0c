"""The measured theorem: constants, terms and measurements along a run, each compared with an independent value."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from math import sqrt
from pathlib import Path

import numpy as np
import papers.pfedlms.theorem as measured
import pytest
import torch
from papers.pfedlms.__main__ import main
from papers.pfedlms.theorem import NEVER, Constants, Plan, convergence, shared_settings, softmax_smoothness, terms
from papers.pfedlms.theorem_sheets import by_round
from papers.pfedlms.trajectory import Watched, WatchedPFedLMS, WatchedSettings, follow, penalty
from torch import Tensor, nn

import pfedlms
from definitions import dense_model, smoothed, votes_of
from factories import CPU, federation, normal, played, seeded, small_data, some_pull
from pfedlms.data import FederatedData, batch_positions
from pfedlms.engine import Federation
from pfedlms.errors import UsageError
from pfedlms.models import CohortModel
from pfedlms.train_settings import TrainSettings

SEED, RHO, DECAY = 3, 0.0625, 0.01
SIZES, RATIO, LEVELS = (4 * 4 + 4,), 0.5, 3  # softmax regression on 4 numbers, 4 classes: N = 32, m = 16


# --- constants --------------------------------------------------------------------------------------------------------


def hessian(x: Tensor, y: Tensor, classes: int, theta: Tensor) -> Tensor:
    def loss(flat: Tensor) -> Tensor:
        weight, bias = flat[: classes * x.shape[1]].view(classes, -1), flat[classes * x.shape[1] :]
        return nn.functional.cross_entropy(x @ weight.T + bias, y)

    return torch.autograd.functional.hessian(loss, theta)


def test_smoothness_bounds_every_hessian_and_is_attained_by_two_equal_classes() -> None:
    x, y = normal(30, 4, seed=1, dtype=torch.float64), torch.arange(30) % 3
    for trial in range(5):
        theta = trial * normal(15, seed=trial, dtype=torch.float64)
        assert float(torch.linalg.eigvalsh(hessian(x, y, 3, theta))[-1]) < softmax_smoothness(x)
    at_half = hessian(x, y % 2, 2, torch.zeros(10, dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(at_half)[-1]) == pytest.approx(softmax_smoothness(x), rel=1e-12)


KNOWN = Constants(task_smoothness=3.0, sizes=(8, 2), pads=(32, 18), strength=0.5, rho=0.25, decay=0.1)


def test_constants_by_hand() -> None:
    """κ² = 32/8 = 4 and 18/2 = 9; L_F = 3 + 0.5·9/0.25 + 0.1; Ψ_inf = −0.5·0.25·10/2; B² = 2 (7 + 4·0.25·50)/0.01."""
    assert KNOWN.kappas == (2.0, 3.0)
    assert KNOWN.smoothness == pytest.approx(21.1)
    assert KNOWN.lowest == pytest.approx(-0.625)
    assert KNOWN.largest_model(gradient=7.0, start=1.0) == pytest.approx(sqrt(11400))
    assert KNOWN.largest_model(gradient=7.0, start=200.0) == 200.0


def test_drift_bound_by_hand() -> None:
    """Layer 1: √8·2·5 = 28.28…, layer 2: √2·3·5 = 21.21…; 6 m τ = 24 and 6 for τ = 0.5; 6 or 2 times the first."""
    first, thresholds = 10 * sqrt(8) + 15 * sqrt(2), 24.0 + 6.0
    assert KNOWN.drift(False, model=5.0, threshold=0.5) == pytest.approx(2 * first + thresholds)
    assert KNOWN.drift(True, model=5.0, threshold=0.5) == pytest.approx(6 * first + thresholds)


def test_terms_by_hand() -> None:
    """R = 3, E = 5, η = 0.1: 2/(ηER) = 4/3."""
    found = terms(descent=6.0, smoothness=20.0, rate=0.1, noise=0.7, drifts=[1.0, 2.0, 6.0], local_steps=5)
    assert found == pytest.approx({"optimisation": 8.0, "noise": 1.4, "drift": 12.0, "total": 21.4})


def test_penalty_equals_its_definition_and_autograd() -> None:
    made, phi = some_pull(3, 0.7, 0.3), dense_model((16, 11, 1, 5, 64, 33), 0.5, 3)
    layers = made.pull.sketch.layers
    theta = normal(3, phi.shape[1], seed=4, dtype=torch.float64).requires_grad_()
    votes = votes_of(made.consensus, 3)
    expected = torch.stack([smoothed(phi @ own, made.tau, made.rho, votes, layers) for own in theta])
    (gradient,) = torch.autograd.grad(expected.sum(), theta)
    value, slope = penalty(made.pull, theta.detach())
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, gradient, rtol=1e-12, atol=1e-12)


# --- along a run ------------------------------------------------------------------------------------------------------

TRAIN = TrainSettings(local_steps=3, batch_size=4, learning_rate=0.05, weight_decay=DECAY)
CLIENTS = (9, 6, 7)


def linear() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4)), 2)


def watched(
    refresh: int = 2, strength: float = 0.05, absolute: bool = True, module: nn.Module | None = None
) -> Federation:
    settings = WatchedSettings(
        thresholds=LEVELS, ratio=RATIO, strength=strength, smoothing=RHO, refresh=refresh, absolute=absolute
    )
    model = CohortModel(module or linear(), CPU)
    return Federation(WatchedPFedLMS, settings, model, small_data(*CLIENTS), TRAIN, SEED, cohort_size=1)


def rounds_of(run: Federation, rounds: int) -> Iterator[dict[int, Watched]]:
    run.start()
    for _ in range(rounds):
        run.play_round()
        yield dict(run.method.notes)


class ClientByHand:
    """One client's F_k with dense Φ, its gradient and its batches, by numpy and autograd."""

    def __init__(self, data: FederatedData, client: int) -> None:
        self.held, self.data, self.client = data.train[client], data, client

    def task(self, theta: Tensor, samples: np.ndarray) -> tuple[float, np.ndarray]:
        """Loss and gradient of softmax regression in closed form: (p − y) x̃ᵀ."""
        x, y = self.data.x[samples].double().numpy(), self.data.y[samples].numpy()
        weight, bias = theta.numpy()[:16].reshape(4, 4), theta.numpy()[16:]
        scores = np.exp(x @ weight.T + bias)
        shares = scores / scores.sum(axis=1, keepdims=True)
        loss = -np.log(shares[np.arange(len(y)), y]).mean()
        shares[np.arange(len(y)), y] -= 1
        return float(loss), np.concatenate([(shares.T @ x).ravel(), shares.sum(axis=0)]) / len(y)

    def penalty(self, theta: Tensor, own: Watched, round: int, refresh: int) -> tuple[float, np.ndarray]:
        phi, leaf = dense_model(SIZES, RATIO, SEED, round // refresh), theta.clone().requires_grad_()
        widths, layers = torch.full((1,), RHO, dtype=torch.float64), torch.zeros(16, dtype=torch.long)
        votes = votes_of(own.pull.consensus, LEVELS)
        value = smoothed(phi @ leaf, own.pull.thresholds.double(), widths, votes, layers)
        return float(value.detach()), torch.autograd.grad(value, leaf)[0].numpy()

    def batch(self, round: int) -> np.ndarray:
        first = (round + 1) * TRAIN.local_steps
        own = batch_positions(SEED, self.client, len(self.held), first, TRAIN.local_steps, TRAIN.batch_size)
        return self.held[own]


@pytest.mark.parametrize("refresh", [1, 2])
def test_the_measurements_of_a_run_equal_their_definitions(refresh: int) -> None:
    """The theorem's left side, noise, potential and drift, each by its definition, on the engine's own iterates; and
    that these iterates are SGD on F_k with an absolute ρ, which is what the theorem is about."""
    rounds, strength = 3, 0.05
    share, found = np.array(CLIENTS) / sum(CLIENTS), follow(watched(refresh), TRAIN, SEED, rounds)
    clients = [ClientByHand(small_data(*CLIENTS), client) for client in range(3)]
    squares, noises, gradients = (np.zeros((rounds, 3, TRAIN.local_steps)) for _ in range(3))
    potential, drift, norms, before = np.zeros((rounds + 1, 3)), np.zeros((rounds, 3)), [], {}
    for round, notes in enumerate(rounds_of(watched(refresh), rounds + 1)):
        for k, client in enumerate(clients):
            thetas = [theta.double() for theta in notes[k].seen]
            assert len(thetas) == TRAIN.local_steps + 1
            pulled = client.penalty(thetas[0], notes[k], round, refresh)[0]
            decayed = DECAY / 2 * float((thetas[0] ** 2).sum())
            potential[round, k] = client.task(thetas[0], client.held)[0] + strength * pulled + decayed
            if round:
                drift[round - 1, k] = pulled - client.penalty(thetas[0], before[k], round - 1, refresh)[0]
                drift[round - 1, k] *= strength
            if round == rounds:
                continue
            norms += [float(theta.norm()) for theta in thetas]
            for e, samples in enumerate(client.batch(round)):
                exact, drawn = client.task(thetas[e], client.held)[1], client.task(thetas[e], samples)[1]
                extra = strength * client.penalty(thetas[e], notes[k], round, refresh)[1] + DECAY * thetas[e].numpy()
                squares[round, k, e] = ((exact + extra) ** 2).sum()
                noises[round, k, e], gradients[round, k, e] = ((drawn - exact) ** 2).sum(), (drawn**2).sum()
                stepped = thetas[e].numpy() - TRAIN.learning_rate * (drawn + extra)
                np.testing.assert_allclose(thetas[e + 1].numpy(), stepped, atol=1e-6)
        before = notes
    assert found["stationarity"] == pytest.approx((squares.mean(axis=2) @ share).tolist(), rel=1e-9)
    assert found["noise"] == pytest.approx((noises.mean(axis=2) @ share).tolist(), rel=1e-9)
    assert found["largest_noise"] == pytest.approx(noises.max(axis=(1, 2)).tolist(), rel=1e-9)
    assert found["largest_gradient"] == pytest.approx(gradients.max(axis=(1, 2)).tolist(), rel=1e-9)
    assert found["potential"] == pytest.approx((potential @ share).tolist(), rel=1e-9)
    assert found["drift"] == pytest.approx((drift @ share).tolist(), rel=1e-9)
    assert found["largest_drift"] == pytest.approx(np.abs(drift).max(axis=1).tolist(), rel=1e-9)
    assert max(found["largest_model"]) == pytest.approx(max(norms), rel=1e-9)
    assert len(found["largest_threshold"]) == rounds + 1
    assert min(noises.max(), abs(drift).max(), squares.max()) > 1e-3  # nothing of it is a comparison of zeros


def test_gradients_can_be_measured_in_some_rounds_only() -> None:
    everything, some = (follow(watched(), TRAIN, SEED, 3, every) for every in (1, 2))
    assert some["stationarity"] == [everything["stationarity"][round] for round in (0, 2)]
    assert some["drift"] == everything["drift"]


def models_of(run: Federation) -> list[list[float]]:
    return [torch.cat([own.flatten() for own in model.values()]).tolist() for _, model in played(run, 3).models()]


def plain(method: str, **settings: float) -> Federation:
    return federation(method, small_data(*CLIENTS), linear(), **vars(TRAIN), **settings)


def test_watching_a_run_does_not_change_it() -> None:
    """With ρ relative it is pFedLMS, with λ = 0 `local`; an absolute ρ is something else."""
    relative = models_of(watched(absolute=False))
    chosen = {"thresholds": LEVELS, "ratio": RATIO, "strength": 0.05, "smoothing": RHO, "refresh": 2}
    assert relative == models_of(plain("pfedlms", **chosen))
    assert relative != models_of(watched(absolute=True))
    assert models_of(watched(strength=0.0)) == models_of(plain("local"))


# --- documents --------------------------------------------------------------------------------------------------------


def plan(**changed: object) -> Plan:
    return Plan(**{**asdict(Plan("softmax", 0, 0.05, 2, 4, 2)), **changed})


SHORT = [
    plan(strength=0.0, refresh=1), plan(refresh=1), plan(refresh=2), plan(refresh=NEVER),
    plan(model="dnn", refresh=1, rounds=2),
]  # fmt: skip


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "plans", lambda config, quick: iter(SHORT))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> measured.Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "plans", lambda config, quick: iter(SHORT))
        return convergence("digits", tmp_path_factory.mktemp("convergence"), device="cpu")


def test_the_bound_is_above_the_measured_terms(document: measured.Record) -> None:
    assert [row["rounds"] for row in document["rows"]] == [1, 2, 4] * 4
    for row in document["rows"]:
        assert 0 < row["left"] <= row["real_total"] <= row["bound_total"]
        assert all(row[f"real_{term}"] <= row[f"bound_{term}"] for term in ("optimisation", "noise", "drift"))
        assert row["real_drift"] <= row["drift_by_norm"] <= row["bound_drift"]
        assert row["bound_over_left"] == pytest.approx(row["bound_total"] / row["left"])


def test_a_row_by_hand(document: measured.Record) -> None:
    """λ = 0.05, h = 2, R = 4, E = 2: all terms from constants that are computed here again from the data."""
    run = document["runs"][2]
    row = next(row for row in document["rows"] if row["refresh"] == "2" and row["rounds"] == 4)
    known, seen = run["constants"], run["trajectory"]
    config = pfedlms.load_config(None, {"data": {"dataset": "digits"}, "run": {"device": "cpu"}})
    prepared = pfedlms.prepare(config, pfedlms.Problem(model=measured.softmax("digits")))
    spectra = []
    for held in prepared.data.train:
        x = prepared.data.x[held].reshape(len(held), -1).double().numpy()
        spectra.append(np.linalg.norm(np.hstack([x, np.ones((len(x), 1))]), 2) ** 2 / len(x) / 2)
    pad, m, mu = 1024, 102, 1e-4
    rho = np.float32(0.1 * prepared.model.initial.double().norm().item() / sqrt(m))
    smooth = max(spectra) + 0.05 * (pad / m) / float(rho) + mu
    assert known["rho"] == float(rho)
    assert known["smoothness"] == pytest.approx(smooth, rel=1e-6)
    assert known["rate"] * smooth == pytest.approx(1, rel=1e-6)
    largest = sqrt(2 * (max(seen["largest_gradient"]) + 4 * 0.05**2 * pad)) / mu
    tau = max(seen["largest_threshold"])
    beta = [(2 + 4 * fresh) * sqrt(pad) * largest + 6 * m * tau for fresh in (0, 1, 0, 1)]  # √m κ = √N
    scale = 2 * smooth / (2 * 4)
    lowest = -0.05 * float(rho) * m / 2
    assert run["allowed"] == pytest.approx([0.05 * each for each in beta], rel=1e-6)
    assert row["bound_drift"] == pytest.approx(scale * 0.05 * sum(beta), rel=1e-6)
    assert row["bound_optimisation"] == pytest.approx(scale * (seen["potential"][0] - lowest), rel=1e-6)
    assert row["bound_noise"] == pytest.approx(max(seen["largest_noise"]), rel=1e-6)  # L_F η = 1
    assert row["real_drift"] == pytest.approx(scale * sum(seen["drift"]), rel=1e-6)
    assert row["left"] == pytest.approx(np.mean(seen["stationarity"]), rel=1e-12)


@pytest.mark.parametrize("dataset", ["digits", "mnist"])
def test_published_measurements_have_the_shipped_settings(dataset: str) -> None:
    """Settings that were added later had their default."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / f"convergence-{dataset}.json"
    stored, config = json.loads(file.read_text()), pfedlms.load_config(None, {"data": {"dataset": dataset}})
    shipped = shared_settings(config)
    assert stored["settings"] == {key: shipped[key] for key in stored["settings"]}
    assert [run["plan"] for run in (*stored["runs"], *stored["practice"])] == [
        asdict(own) for own in measured.plans(config, quick=False)
    ]


SHIPPED = shared_settings(pfedlms.load_config(None, {"data": {"dataset": "digits"}}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.learning_rate", 0.3), ("data.alpha", 0.1), ("method.smoothing", 0.2), ("model.hidden", 100)],
)
def test_other_settings_are_refused(key: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "follow", lambda *given: pytest.fail("measured"))
    before = {"schema": 2, "dataset": "digits", "settings": {**SHIPPED, key: value}, "runs": [], "practice": []}
    file = tmp_path / "convergence-digits.json"
    file.write_text(json.dumps(before))
    with pytest.raises(UsageError, match=f"was measured with {key} {value}, now {SHIPPED[key]}; name another --out"):
        convergence("digits", tmp_path, device="cpu")
    assert json.loads(file.read_text()) == before


@pytest.mark.usefixtures("short")
def test_measurements_are_used_again(
    tmp_path: Path, document: measured.Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "convergence-digits.json"
    known = {key: own for key, own in SHIPPED.items() if key != "train.weights"}  # a setting that came later
    stored = {"schema": 2, "dataset": "digits", "settings": known, "rows": [], "runs": document["runs"], "practice": []}
    file.write_text(json.dumps(stored))
    progress: list[str] = []
    again = convergence("digits", tmp_path, device="cpu", progress=progress.append)
    assert progress == ["dnn, λ 0.05, h 1, seed 0"]
    assert json.loads(json.dumps({**again, "settings": SHIPPED})) == json.loads(json.dumps(document))

    monkeypatch.setattr(measured, "follow", lambda *given: pytest.fail("measured again"))
    read = convergence("digits", tmp_path, device="cpu", progress=progress.append)
    assert len(progress) == 1
    assert read["rows"] == again["rows"]
    assert json.loads(file.read_text())["rows"] == again["rows"]


@pytest.mark.parametrize(("text", "message"), [("{", "no document of convergence"), ('{"schema": 99}', "schema 99")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "convergence-digits.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        convergence("digits", tmp_path, device="cpu", quick=True)


def test_the_points_have_every_round_of_every_run(document: measured.Record) -> None:
    """Rounds are counted from 1; of dnn those looked at, here two."""
    points = by_round(document)
    assert [point["model"] for point in points] == ["softmax"] * 16 + ["dnn"] * 2
    run = document["runs"][2]
    own = [point for point in points if (point["model"], point["refresh"]) == ("softmax", "2")]
    assert [point["round"] for point in own] == [1, 2, 3, 4]
    assert [point["left"] for point in own] == run["trajectory"]["stationarity"]
    assert [point["drift"] for point in own] == run["trajectory"]["drift"]
    assert [point["allowed_by_norm"] for point in own] == run["allowed_by_norm"]
    some = {**document["practice"][0], "plan": {**document["practice"][0]["plan"], "rounds": 12, "every": 10}}
    assert [point["round"] for point in by_round({**document, "runs": [], "practice": [some]})] == [1, 11]


@pytest.mark.usefixtures("short")
def test_results_of_dnn_are_printed_and_stored(
    document: measured.Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "convergence-digits.json").write_text(json.dumps({**document, "settings": SHIPPED}))
    assert main(["convergence", "--datasets", "digits", "--quick", "--out", str(tmp_path), "--quiet"]) == 0
    (run,) = json.loads((tmp_path / "quick" / "convergence-digits.json").read_text())["practice"]
    assert (run["settings"]["learning_rate"], run["settings"]["smoothing"]) == (0.1, 0.1)
    assert run["left"] == pytest.approx(np.mean(run["stationarity"]))
    assert len(run["stationarity"]) == 2
    assert f"{run['left']:.3g}" in capsys.readouterr().out
    with (tmp_path / "quick" / "convergence-digits-dnn.csv").open() as file:
        (record,) = csv.DictReader(file)
    assert float(record["left"]) == run["left"]
    assert [float(record[key]) for key in ("first", "last")] == [run["stationarity"][0], run["stationarity"][-1]]
    with (tmp_path / "quick" / "convergence-digits.csv").open() as file:
        assert next(csv.reader(file))[:4] == ["strength", "refresh", "rounds", "left"]
    assert (tmp_path / "quick" / "convergence-digits-points.csv").is_file()
    if find_spec("altair") is not None:
        assert (tmp_path / "quick" / "convergence-digits.svg").stat().st_size > 10_000
