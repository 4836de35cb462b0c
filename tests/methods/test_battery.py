"""One battery for every method of the registry. The table CASES has what differs between methods; a method that is
missing there fails `test_every_method_has_a_case`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from inspect import getmodule
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from factories import (
    CLIENTS,
    DIM,
    HIDDEN,
    LAYERS,
    SEED,
    RecordingLink,
    Sent,
    cohort_of,
    digits,
    federation,
    method_of,
    normal,
    played,
    recorded_messages,
    same,
    seeded,
    task_of,
    tensors,
)  # fmt: skip
from pfedlms.engine import Federation
from pfedlms.engine.method_check import check_method
from pfedlms.errors import DivergedError, UsageError
from pfedlms.methods import METHODS
from pfedlms.models import Cohort
from pfedlms.wire.frames import HEADER_BYTES, SERVER

Parts = list[int]
"""Bits of every part of a client's messages of one round; each part is padded to whole bytes."""


def classes_of(*clients: int) -> int:
    """The number of classes that these clients train on, counted from the labels."""
    labels = digits().y.numpy()
    return len({int(label) for client in clients for label in labels[digits().train[client]]})


def prototypes(*clients: int) -> Parts:
    return [10, 32 * HIDDEN * classes_of(*clients)]


MODEL, ONE_BIT_EACH = [32 * DIM], [DIM]
SKETCH, MEAN_OF_SKETCHES = [DIM // 10], [32 * (DIM // 10), 32]
# 1,300 and 210 parameters are padded to 2,048 and 256, so m = 204 and 25; T = 7 takes 3 bits; two floats per layer.
LAYERWISE, WHOLE_ONE_BIT = [3 * 204, 3 * 25, 64, 64], [204, 64]
# 204 + 25 signs in one stream and one float per layer; a client also sends one bit: it has no digest yet.
SKETCHED_SIGNS = [229, 64]
# Σ N = 2,304: a fifth of it, 460.8, is divided evenly, and the smaller layer has enough entries.
EVENLY_SKETCHED_SIGNS = [230 + 230, 64]
# 229 signs in one stream, one bit for each of two layers, and one bit: no digest yet.
VOTES = [229, 2, 1]
# ⌊1,510 / 100⌋ = 15 signs and their magnitude, or 15 values; the positions are counted by `of_positions`.
TERNARY, ENTRIES = [32, 15], [32 * 15]
TABLE = [32 * 5 * 30]  # 5 rows of ⌊1,510 / 50⌋ columns
# Six values per count: blocks of 17 in bit_length(6^17 − 1) = 44 bits; 1,510 = 88 · 17 + 14, and 6^14 − 1 has 37. Then
# the number of senders.
COUNTS = [88 * 44 + 37, 32]
BODY = [32 * LAYERS[0]]  # all but the last layer
# One chunk for each layer: ⌊1,300 / 100⌋ and ⌊210 / 100⌋ codes of 2 bits, and four values for each layer. As many
# positions as in TERNARY, of as many entries.
CODES_AND_LEVELS = [2 * (13 + 2), 32 * 4 * 2]
SLOPES = [32 * 2 * 3]  # of two updates along three directions


def rotated(bits: int) -> Parts:
    """1,510 = 1,024 + 486, the rest padded to 512; one scale each."""
    return [1024 * bits, 512 * bits, 32, 32]


def of_positions(sent: Sent) -> Parts:
    """15 of 1,510 have b = 6, as (1 − 15/1510)^32 = 0.73 and its square is 0.53, and φ − 1 = 0.618; a gap g takes
    g // 64 ones, a zero and 6 bits."""
    if "positions" not in sent.values:
        return []
    before = [-1, *sent.values["positions"][:-1]]
    return [sum((int(b) - int(a) - 1) // 64 + 7 for a, b in zip(before, sent.values["positions"], strict=True))]


@dataclass(frozen=True)
class Case:
    """A method with some settings, and its expected properties."""

    method: str
    personal: bool
    up: Parts | Callable[[int], Parts]
    down: Parts
    settings: dict[str, Any] = field(default_factory=dict)
    learns_with: dict[str, Any] = field(default_factory=dict)
    """Other settings for a dozen rounds on a model of 1,510 parameters."""
    shares: bool | None = None
    """Whether all clients have one model after the answer; None: if it is not personal."""
    keeps_momentum: bool | None = None
    """Whether the local steps of a round continue with the momentum of the last; None: if it is personal."""

    @property
    def has_shared(self) -> bool:
        return not self.personal if self.shares is None else self.shares

    def __str__(self) -> str:
        return "-".join([self.method, *(f"{key}={value}" for key, value in self.settings.items())])


DENSE_SIGNS = {"ratio": 0.5}
DENSE = {"ratio": 0.5, "sparsity": 0.3}

CASES = [
    Case("local", True, [], []),
    Case("fedavg", False, MODEL, MODEL),
    Case("fedavg", False, MODEL, MODEL, {"server_step": 0.7, "server_momentum": 0.4}),
    Case("fedavg", False, MODEL, MODEL, {"server_optimizer": "yogi", "server_step": 0.03, "server_momentum": 0.9}),
    Case("fedprox", False, MODEL, MODEL),
    Case("scaffold", False, [*MODEL, *MODEL], [*MODEL, *MODEL]),
    Case("ditto", True, MODEL, MODEL, shares=True, keeps_momentum=False),
    Case("fedper", True, BODY, BODY, keeps_momentum=False),
    Case("fedrep", True, BODY, BODY, {"body_steps": 1}, keeps_momentum=False),
    Case("finetune", False, MODEL, MODEL, {"steps": 5}),
    Case("obda", False, ONE_BIT_EACH, ONE_BIT_EACH, learns_with={"step": 0.01}),
    Case("obcsaa", False, [*SKETCH, 32], MODEL, learns_with=DENSE),
    Case("obcsaa", False, [*SKETCH, 32], MEAN_OF_SKETCHES, {"downlink": "sum"}, DENSE),
    Case("fedproto", True, prototypes, prototypes(*range(CLIENTS))),
    Case("eden", False, rotated(1), MODEL),
    Case("eden", False, rotated(3), MODEL, {"bits": 3}),
    Case("stc", False, TERNARY, TERNARY, learns_with={"sparsity": 0.1}),
    Case("stc", False, TERNARY, TERNARY, {"gain": 1.5, "server_momentum": 0.3}, {"sparsity": 0.1}),
    Case("stc", False, TERNARY, TERNARY, {"server_optimizer": "adam", "gain": 0.02}, {"sparsity": 0.3, "gain": 0.03}),
    Case("sparseloco", False, CODES_AND_LEVELS, CODES_AND_LEVELS, learns_with={"density": 0.1}),
    Case(
        "decomfl",
        False,
        SLOPES,
        SLOPES,
        {"updates": 2, "perturbations": 3},
        {"updates": 5, "perturbations": 60, "step": 0.05},
    ),
    Case("fetchsgd", False, TABLE, ENTRIES, {"answer": 0.01}, {"columns": 0.2, "answer": 0.1}),
    Case("sketchmean", False, VOTES, [*TERNARY, 64], {"ratio": 0.1, "answer": 0.01}, {"ratio": 0.5, "answer": 0.1}),
    Case("zsign", False, ONE_BIT_EACH, MODEL, learns_with={"sigma": 0.5}),
    Case("zsign", False, ONE_BIT_EACH, MODEL, {"noise": "gaussian"}, {"sigma": 0.5}),
    Case("zsign", False, ONE_BIT_EACH, COUNTS, {"downlink": "sum"}, {"sigma": 0.5}),
    Case("sketchvote", False, [*SKETCHED_SIGNS, 1], SKETCHED_SIGNS, learns_with=DENSE_SIGNS),
    Case(
        "sketchvote",
        False,
        [*EVENLY_SKETCHED_SIGNS, 1],
        EVENLY_SKETCHED_SIGNS,
        {"ratio": 0.2, "allocation": 0.0, "refresh": 2, "check_every": 1},
    ),
    Case("pfed1bs", True, SKETCH, SKETCH),
    Case("pfedlms", True, LAYERWISE, LAYERWISE),
    Case("pfedlms", True, LAYERWISE, LAYERWISE, {"spacing": "lloyd-max"}),
    Case("pfedlms", True, WHOLE_ONE_BIT, WHOLE_ONE_BIT, {"thresholds": 1, "layerwise": False, "refresh": 2}),
]

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_method = pytest.mark.parametrize("name", METHODS)


def federation_of(case: Case, **options: Any) -> Federation:
    return federation(case.method, momentum=0.5, **options, **case.settings)


def transcript(case: Case, **options: Any) -> tuple[list[bytes], dict[str, Any]]:
    """Payloads of the clients' messages in three rounds, and the state after them."""
    post = RecordingLink()
    run = played(federation_of(case, link=post, **options), 3)
    return post.payloads, run.state()


# --- the registry -----------------------------------------------------------------------------------------------------


def test_every_method_has_a_case() -> None:
    ours = {name for name, method in METHODS.items() if method.__module__.startswith("pfedlms.")}
    assert {case.method for case in CASES} == ours


@every_method
def test_every_method_has_a_name_a_paper_and_a_docstring(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert "\n" not in method.paper
    for documented in (method, getmodule(method)):
        assert (documented.__doc__ or "").strip()


@every_case
def test_every_method_follows_the_contract(case: Case) -> None:
    """The same results for every cohort size and after a resumption, with absent clients, lost messages and settings at
    their limits."""
    report = check_method(METHODS[case.method], **case.settings)
    assert report.ok, str(report)


@every_case
def test_clients_and_server_have_the_same_global_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client of every cohort, and the server if it keeps w: bit for bit, also if each of them takes the step
    itself."""
    run = played(federation_of(case, cohort_size=2), 3)
    seen, global_model = [], run.method.global_model

    def recording(cohort: Cohort) -> torch.Tensor | None:
        shared = global_model(cohort)
        seen.extend([] if shared is None else shared.numpy().copy())
        return shared

    monkeypatch.setattr(run.method, "global_model", recording)
    measured = run.play_round(evaluate_global=True).global_evaluation
    assert (METHODS[case.method].personal, measured is not None) == (case.personal, case.has_shared)
    assert len(seen) == (CLIENTS if case.has_shared else 0)
    server = run.state()["server"]
    seen.extend([server["model"].numpy()] if "model" in server else [])
    assert len({value.tobytes() for value in seen}) == (1 if case.has_shared else 0)


@pytest.mark.parametrize(
    ("method", "settings"), [("zsign", {}), ("zsign", {"noise": "gaussian"}), ("obcsaa", {"cohort_size": 2})]
)
def test_both_downlinks_give_the_same_model(method: str, settings: dict[str, Any]) -> None:
    """Bit for bit, if the server sends the model or the sum from which clients compute it."""
    both = [federation(method, downlink=each, **settings) for each in ("model", "sum")]
    model, cheaper = (tensors(played(each, 5).state()) for each in both)
    for name in ("/params", "/momentum", "/state/model", "/server/model"):
        assert torch.equal(model[name], cheaper[name])
    assert not torch.equal(cheaper["/server/model"], both[0].model.initial)


@every_case
def test_an_answer_is_moved_to_the_device_of_the_clients(case: Case) -> None:
    """On PyTorch's device without data, whose tensors cannot be mixed with those of the host, like a GPU's."""
    run = played(federation_of(case), 1)
    device = torch.device("meta")
    for present in run._clients.present:
        cohort = present.to(device)
        for exchange in run.method.exchanges:
            answer = {name: torch.from_numpy(value) for name, value in exchange.down.example().items()}
            cohort = exchange.client_receive(cohort, answer, 1)
        assert {value.device for value in (*cohort.persistent_tensors, *cohort.heard.values())} == {device}


@pytest.mark.parametrize(
    ("method", "sizes", "task", "settings", "expected"),
    [
        ("zsign", (4,), {}, {"sigma": 0.0}, r"method\.step: got 0 with method\.sigma = 0"),
        ("zsign", (4,), {"participants": 256}, {"downlink": "sum"}, r"'sum' takes at most 255 clients .*, got 256;"),
        ("sketchvote", ((1 << 24) + 1,), {}, {"ratio": 0.6}, r"method\.ratio: got 0.6, which keeps 20132659 rows"),
        ("fedproto", (4,), {"feature_size": 0}, {}, "no linear layer"),
        ("fedproto", (4,), {"classes": 0}, {}, "these targets are no classes"),
        ("scaffold", (4,), {"optimizer": "adamw"}, {}, r"train\.optimizer: got 'adamw', expected 'sgd' with scaffold"),
        ("fedper", (4, 4), {}, {"head": 2}, r"method\.head: got 2, expected at most 1, because the model has 2 layers"),
        ("decomfl", (4,), {"local_steps": 3}, {"updates": 4}, r"method\.updates: got 4, expected at most 3"),
        ("decomfl", (4,), {"local_epochs": 1.0}, {"updates": 2}, r"method\.updates: got 2, expected at most 1"),
    ],
)  # fmt: skip
def test_settings_and_tasks_that_a_method_does_not_support_are_refused(
    method: str, sizes: tuple[int, ...], task: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        method_of(method, replace(task_of(*sizes), **task), **settings)


@pytest.mark.parametrize("method", ["sketchvote", "sketchmean", "pfedlms"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 3e38])
def test_an_update_that_cannot_be_sketched_is_reported_with_its_client(method: str, broken: float) -> None:
    own = method_of(method, task_of(16, 11, learning_rate=0.01), ratio=0.5)
    params = normal(3, 27)
    params[1, 2:5] = broken
    cohort = replace(own.client_start(cohort_of(torch.zeros(3, 27))), params=params)
    with pytest.raises(DivergedError, match=r"round 5: the model or update of client 1 is .*too large to be sketched"):
        own.exchanges[0].client_send(cohort, 4, None)


# --- learning ---------------------------------------------------------------------------------------------------------


@every_case
def test_every_method_learns(case: Case) -> None:
    """Predicting each client's most frequent label gives 38 %, and chance 10 %."""
    run = federation(case.method, local_steps=5, batch_size=32, **{**case.settings, **case.learns_with})
    for _ in range(12):
        report = run.play_round(evaluate_global=True)
    assert np.isfinite(report.loss)
    assert run.evaluate().accuracy > 68.2
    assert report.global_evaluation is None or report.global_evaluation.accuracy > 45


# --- random numbers and momentum --------------------------------------------------------------------------------------


@every_case
def test_another_seed_changes_every_message(case: Case) -> None:
    (sent, left), (other_sent, other_left) = transcript(case), transcript(case, seed=SEED + 1)
    assert len(sent) == len(other_sent) == 3 * CLIENTS * len(federation_of(case).method.exchanges)
    assert all(a != b for a, b in zip(sent, other_sent, strict=True))
    assert not torch.equal(left["params"], other_left["params"])


@every_case
def test_dropout_draws_from_the_seed_of_the_run(case: Case) -> None:
    """And not from PyTorch's generator, which does not change."""
    seen = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        shape = [nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, 10)]
        for seed in (2, 3):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            seen.append(transcript(case, module=nn.Sequential(*shape)))
            assert torch.equal(torch.get_rng_state(), before)
    assert seen[0][0] == seen[1][0]
    assert same(seen[0][1], seen[1][1])


@every_case
def test_momentum_is_kept_for_personal_models_only(case: Case) -> None:
    """If all clients start a round from a new model, the momentum of the old one has no effect."""
    state = played(federation_of(case), 2).state()
    assert state["momentum"].any(dim=1).all()
    params = []
    for momentum in (state["momentum"], state["momentum"] + 1):
        resumed = federation_of(case)
        resumed.load({**state, "momentum": momentum})
        resumed.play_round()
        params.append(resumed.state()["params"])
    assert torch.equal(*params) is not (case.personal if case.keeps_momentum is None else case.keeps_momentum)


# --- messages ---------------------------------------------------------------------------------------------------------


@every_case
def test_message_bits_are_those_of_the_formula(case: Case) -> None:
    """Counted from the frames of every sender; the report has the same bytes."""
    with recorded_messages() as messages:
        run = federation_of(case)
        traffic = run.play_round().traffic

    def payload_and_formula(sender: int, parts: Parts) -> tuple[int, int]:
        own = [sent for sent in messages if sent.sender == sender]
        bits = [*parts, *(part for sent in own for part in of_positions(sent))]
        return sum(len(sent.payload) for sent in own), sum(-(-each // 8) for each in bits)

    up = [payload_and_formula(k, case.up(k) if callable(case.up) else case.up) for k in range(CLIENTS)]
    down, expected = payload_and_formula(SERVER, case.down)
    assert [payload for payload, _ in up] == [formula for _, formula in up]
    assert down == expected
    framing = HEADER_BYTES * CLIENTS * len(run.method.exchanges)
    assert traffic.as_tuple() == (sum(payload for payload, _ in up), framing, CLIENTS * down, framing, 0)


# --- limits -----------------------------------------------------------------------------------------------------------

PULLED = [case for case in CASES if "strength" in {each.name for each in fields(METHODS[case.method].Settings)}]
WITHOUT = {"fedprox": "fedavg"}
"""The method that another one is without strength, if not `local`."""


@pytest.mark.parametrize("case", PULLED, ids=str)
def test_without_strength_a_method_has_the_bits_of_local_training(case: Case) -> None:
    """Or of FedAvg: every client's model, momentum and running statistics. With some strength they differ. (Both models
    of a client of ditto share statistics.)"""
    options: dict[str, Any] = {"momentum": 0.0}
    if case.keeps_momentum is None:
        options = {"momentum": 0.5, "module": seeded(with_statistics)}
    alone, without, pulled = (
        federation(WITHOUT.get(case.method, "local"), **options),
        *(federation(case.method, **options, **{**case.settings, "strength": each}) for each in (0.0, 0.01)),
    )
    for each in (alone, without, pulled):
        played(each, 3)
    for name in ("params", "momentum", "buffers"):
        assert same(without.state()[name], alone.state()[name])
    assert not torch.equal(pulled.state()["params"], alone.state()["params"])


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


@pytest.mark.parametrize("method", ["sketchvote", "sketchmean", "sparseloco", "stc", "fetchsgd"])
def test_without_gain_the_shared_model_never_moves(method: str) -> None:
    run = played(federation(method, gain=0.0), 3)
    state = run.state()
    models = (*state["state"]["model"], state["server"]["model"], run.method.task.initial)
    assert len({row.numpy().tobytes() for row in models}) == 1


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", ["stc", "sketchvote"])
def test_a_residual_is_the_same_if_the_message_is_lost(method: str) -> None:
    arrived, lost = (
        federation(method, link=lambda data, client, lose=lose: None if lose and client == 1 else data)
        for lose in (False, True)
    )
    for each in (arrived, lost):
        each.play_round()
    assert torch.equal(lost.state()["state"]["residual"], arrived.state()["state"]["residual"])
    assert not torch.equal(lost.state()["server"]["model"], arrived.state()["server"]["model"])
