"""Valid messages with any float32 numbers, in any order: no NaN, no warning, the same sums. With `train.max_scale` a
client whose numbers are far larger than those of the others is left out and named."""

from __future__ import annotations

import math
import struct
import warnings
from itertools import permutations
from typing import Any

import numpy as np
import plain_client as plain
import pytest
import torch

from factories import (
    LARGEST,
    digits,
    played,
    random_values,
    recorded_messages,
    sealed,
    small_data,
    small_module,
    task_of,
)
from factories import federation as federation_of
from pfedlms.aggregate import outliers
from pfedlms.cohort import Cohort
from pfedlms.engine import aggregation
from pfedlms.engine import simulate as engine_simulate
from pfedlms.engine.federation import Federation
from pfedlms.errors import QuorumError, WireError
from pfedlms.methods import METHODS, Method
from pfedlms.wire import Message
from pfedlms.wire.frames import SERVER, Intake, frame

SAMPLES = (7, 10, 13, 16)
LAYERS = 2


def federation(link: Any, **settings: Any) -> Federation:
    return federation_of("pfedlms", small_data(*SAMPLES), small_module(), link=link, quorum=0.0, **settings)


def with_means(data: bytes, means: list[float]) -> bytes:
    """The statistics of exchange A with other means and the right checksum."""
    return sealed(data[:40] + struct.pack(f"<{LAYERS}f", *means) + data[40 + 4 * LAYERS :])


def with_samples(data: bytes, samples: int) -> bytes:
    """The same message with another number of samples in its header."""
    return sealed(data[:16] + struct.pack("<I", samples) + data[20:])


def floats_in(data: bytes) -> list[float]:
    return list(struct.unpack_from(f"<{2 * LAYERS}f", data, 40))


@pytest.mark.filterwarnings("ignore:method.smoothing")
@pytest.mark.parametrize("smoothing", [0.1, 2.1, 3.0, 1e30])
@pytest.mark.parametrize("spacing", ["quantile", "lloyd-max"])
@pytest.mark.parametrize("side", [1, -1])
def test_a_mean_that_makes_thresholds_overflow_does_not_stop_the_run(side: int, spacing: str, smoothing: float) -> None:
    def link(data: bytes, sender: int) -> bytes:
        return with_means(data, [side * LARGEST, side * LARGEST]) if data[5] == 0 and sender == 3 else data

    run = federation(link, thresholds=15, smoothing=smoothing, spacing=spacing)
    with recorded_messages() as messages:
        played(run, 3)
    (first, *_) = [sent.data for sent in messages if sent.message.kind == 1]
    mean, _, deviation, _ = floats_in(first)
    taus = plain.thresholds_of(mean, deviation, 15, spacing)
    assert [x for x in taus if math.isinf(x)] == [side * math.inf] * sum(map(math.isinf, taus)) != []
    assert run.state()["params"].isfinite().all()


@pytest.mark.parametrize("room", [1, 1 << 26])
@pytest.mark.parametrize("cohort_size", [0, 1, 2])
def test_statistics_are_summed_in_the_order_of_ids(
    cohort_size: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the order of arrival: in ascending order ((2^60 + 3) − 2^60) + 5 is 5, because 2^60 + 3 rounds to 2^60; in
    other orders it is 8, 3 or 0."""
    monkeypatch.setattr(aggregation, "BUFFER_BYTES", room)
    means = [2.0**60, 3.0, -(2.0**60), 5.0]
    before = federation(engine_simulate.perfect_link, cohort_size=cohort_size)
    with recorded_messages() as messages:
        before.play_round()
    statistics = [sent for sent in messages if sent.message.kind == 0]
    frames = {sent.sender: with_samples(with_means(sent.data, [means[sent.sender]] * 2), 1) for sent in statistics}
    answers = set()
    for order in list(permutations(range(4)))[::5]:

        def link(data: bytes, k: int, order: tuple[int, ...] = order) -> bytes:
            return frames[order[k]] if data[5] == 0 else with_samples(data, 1)

        run = federation(link, cohort_size=cohort_size)
        with recorded_messages() as messages:
            run.play_round()
        answers |= {sent.data for sent in messages if sent.message.kind == 1}
    assert [floats_in(answer)[:2] for answer in answers] == [[5 / 4, 5 / 4]]


# --- random messages --------------------------------------------------------------------------------------------------


def through_bytes(message: Message, values: dict[str, np.ndarray], sender: int, samples: int) -> Any:
    """The message as the receiver decodes it."""
    data = frame(message, values, round=3, sender=sender, samples=samples, digest=bytes(8))
    return Intake(message, bytes(8), 3, (sender,)).accept(data)


def tensors(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def exchanged(method: Method, cohort: Cohort, draw: np.random.Generator) -> Cohort:
    """All exchanges with random messages; if the server's own answer is not valid, a random one in its place."""
    server = method.server_start()
    for exchange in method.exchanges:
        total = exchange.server_open(server, 3)
        for client in range(3):
            samples = int(draw.choice([1, 5, 2**32 - 1]))
            received = through_bytes(exchange.up, random_values(exchange.up, draw), client, samples)
            each = {name: torch.from_numpy(value)[None] for name, value in received.values.items()}
            total = exchange.server_add(total, [client], [samples], each)
        server, reply = exchange.server_reply(server, total, 3)
        try:
            answer = through_bytes(exchange.down, {name: value.numpy() for name, value in reply.items()}, SERVER, 0)
        except WireError:
            answer = through_bytes(exchange.down, random_values(exchange.down, draw), SERVER, 0)
        cohort = exchange.client_receive(cohort, tensors(answer.values), 3)
        other = through_bytes(exchange.down, random_values(exchange.down, draw), SERVER, 0)
        exchange.client_receive(cohort, tensors(other.values), 3)
    return cohort


CASES = [
    *((name, {}) for name in METHODS),
    ("pfedlms", {"thresholds": 3, "smoothing": 50.0, "spacing": "lloyd-max", "strength": 0.01}),
    ("zsign", {"downlink": "sum"}),
    ("obcsaa", {"downlink": "sum"}),
]


@pytest.mark.filterwarnings("ignore:method.smoothing")
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_valid_messages_cause_no_warning(name: str, settings: dict[str, Any]) -> None:
    task = task_of(30, 1, 12, clients=3, learning_rate=0.1)
    method, draw = METHODS[name](task, METHODS[name].Settings(**settings)), np.random.default_rng(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            params = torch.from_numpy(draw.normal(size=(2, 43)).astype(np.float32))
            cohort = method.client_start(Cohort((0, 2), (5, 9), params, torch.zeros(2, 0), {}))
            after = exchanged(method, cohort, draw)
            if name == "pfedlms":  # for any consensus
                assert method.objective(after, 3).gradient(params).isfinite().all()


# --- a client that sends enormous numbers -----------------------------------------------------------------------------

ATTACKER = 2
_HEADER = struct.Struct("<4sBBHIIIQ8s")


def float_fields() -> list[tuple[str, int, str]]:
    """Every field of floats in the clients' messages, of every method."""
    found = []
    for name in METHODS:
        for number, exchange in enumerate(federation_of(name, digits(5)).method.exchanges):
            own = [part for part in exchange.up.fields if part.dtype is np.float32 and type(part).__name__ != "Signs"]
            found += [(name, number, part.name) for part in own]
    return found


FIELDS = float_fields()


def test_the_fields_are_those_of_every_method_that_sends_floats() -> None:
    without = {"sketchmean", "pfed1bs", "zsign", "obda", "local"}
    assert {name for name, _, _ in FIELDS} == set(METHODS) - without


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1e9])
@pytest.mark.parametrize(("method", "exchange", "field"), FIELDS)
def test_the_sender_of_an_enormous_number_is_left_out(method: str, exchange: int, field: str, value: float) -> None:
    def link(data: bytes, sender: int) -> bytes:
        _, _, kind, _, round, _, samples, _, digest = _HEADER.unpack_from(data)
        message = run.method.exchanges[exchange].up
        if sender != ATTACKER or kind != message.kind:
            return data
        part = next(each for each in message.fields if each.name == field)
        values = Intake(message, digest, round, (sender,)).accept(data).values
        values[field] = np.full_like(values[field], abs(value) if part.minimum >= 0 else value)
        return bytes(frame(message, values, round=round, sender=sender, samples=samples, digest=digest))

    run: Any = federation_of(method, digits(5), link=link, max_scale=100.0, quorum=0.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            report = run.play_round()
            assert np.isfinite(report.loss)
    state = run.state()
    assert state["params"].isfinite().all()
    assert all(tensor.isfinite().all() for tensor in state["server"].values())
    named = [str(each.message) for each in seen if f"client {ATTACKER} is left out" in str(each.message)]
    assert len(named) >= 3
    assert all(f"its {field} is more than train.max_scale = 100 times" in text for text in named)
    assert not [
        each for each in seen if "is left out" in str(each.message) and f"client {ATTACKER} " not in str(each.message)
    ]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "local"])
def test_max_scale_does_not_change_ordinary_runs(method: str) -> None:
    states = [played(federation_of(method, digits(5), max_scale=bound), 4).state() for bound in (0.0, 100.0)]
    assert all((states[0]["server"][name] == value).all() for name, value in states[1]["server"].items())
    assert (states[0]["params"] == states[1]["params"]).all()


def test_a_round_in_which_every_message_is_too_large_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four scales of ten clients, each client may have the largest of one. Room for one message: groups that are
    empty once messages are left out are not added up."""
    monkeypatch.setattr(aggregation, "BUFFER_BYTES", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        some = played(federation_of("eden", digits(5), max_scale=1.1, quorum=0.0, cohort_size=1), 2)
        assert some.state()["params"].isfinite().all()
        with pytest.raises(QuorumError, match=r"all 5 messages were left out.* = 0\.01 times.*raise train\.max_scale"):
            played(federation_of("eden", digits(5), max_scale=0.01, quorum=0.0), 1)


def test_outliers_by_hand() -> None:
    """Medians 2 and 20 by column; in 300 columns the largest of a row counts, here 1, 1 and 500."""
    assert outliers(np.float32([[1, 10], [2, 20], [3, 2001]]), 100) == [2]
    assert outliers(np.float32([[1, 10], [2, 20], [3, 2000]]), 100) == []
    wide = np.ones((3, 300), dtype=np.float32)
    wide[2, 7] = -500
    assert outliers(wide, 100) == [2]
    assert outliers(wide, 500) == []
    assert outliers(np.zeros((4, 2), dtype=np.float32), 100) == []
    # Of a column that only one row has anything in, the size is that of all entries, here 1.
    assert outliers(np.float32([[1, 0], [1, 0], [1, 101]]), 100) == [2]
    spoilt = np.float32([[1, 10], [np.nan, 20], [3, 30], [2, 10]])
    assert outliers(spoilt, 100) == outliers(torch.from_numpy(spoilt), 100) == [1]
    assert outliers(np.where(np.isnan(spoilt), spoilt, 0), 100) == [1]
    assert outliers(spoilt.repeat(200, axis=1), 100) == [1]
