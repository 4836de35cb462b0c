"""Frames in a GPU's memory against those of the host, on a GPU or under Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_device import DEVICE
from pfedlms.aggregate import WeightedMean
from pfedlms.wire import Floats, Message
from pfedlms.wire.frames import HEADER_BYTES, Intake, frame_on_gpu, frame_rows

SENDERS, SAMPLES = [1, 4, 9], [2, 5, 10]
HEADER = {"round": 2, "senders": SENDERS, "samples": SAMPLES, "digest": bytes(range(1, 9))}


def message_of(count: int) -> Message:
    return Message(0, (Floats("model", count), Floats("statistics", 77)))


def values_of(message: Message) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {part.name: draw.standard_normal((3, part.count), dtype=np.float32) for part in message.floats}


@pytest.mark.parametrize("count", [1, 16384 - 77 - 9, 16385 - 77 - 9, 40000])  # parts of a frame have 16384 words
def test_frames_have_the_bytes_of_the_host_and_are_accepted(count: int) -> None:
    message = message_of(count)
    rows = values_of(message)
    expected = np.empty((3, HEADER_BYTES + message.max_bytes), np.uint8)
    frame_rows(message, rows, out=expected, **HEADER)  # type: ignore[arg-type]
    values = {name: torch.from_numpy(own).to(DEVICE) for name, own in rows.items()}
    frames = frame_on_gpu(message, values, **HEADER)  # type: ignore[arg-type]
    assert np.array_equal(frames.cpu().numpy().view(np.uint8), expected)
    intake = Intake(message, bytes(range(1, 9)), 2, {1, 4, 9})
    received = intake.accept_on_gpu(frames)
    assert received is not None
    assert (received.senders, received.samples) == (SENDERS, SAMPLES)
    assert all(torch.equal(received.values[name], own) for name, own in values.items())
    assert intake.accept_on_gpu(frames) is None  # each sender once


@pytest.mark.parametrize(
    ("row", "word", "bits"),
    {
        "a bit of the payload": (1, 20_000, 1 << 12),
        "a bit of the last word": (2, -1, 1 << 30),
        "a bit of the checksum": (0, 9, 1),
        "another sender": (0, 3, 2),
    }.values(),
)
def test_changed_frames_are_refused(row: int, word: int, bits: int) -> None:
    message = message_of(20_000)
    values = {name: torch.from_numpy(own).to(DEVICE) for name, own in values_of(message).items()}
    frames = frame_on_gpu(message, values, **HEADER)  # type: ignore[arg-type]
    frames[row, word] ^= bits
    assert Intake(message, bytes(range(1, 9)), 2, {1, 3, 4, 9}).accept_on_gpu(frames) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_frames_with_numbers_that_are_not_finite_are_refused(wrong: float) -> None:
    message = message_of(20_000)
    values = {name: torch.from_numpy(own).to(DEVICE) for name, own in values_of(message).items()}
    values["model"][1, 7] = wrong
    frames = frame_on_gpu(message, values, **HEADER)  # type: ignore[arg-type]
    assert Intake(message, bytes(range(1, 9)), 2, {1, 4, 9}).accept_on_gpu(frames) is None


def test_means_have_the_bits_of_the_host() -> None:
    draw = np.random.default_rng(1)
    values = draw.standard_normal((7, 1000), dtype=np.float32) * 10.0 ** draw.integers(-30, 30, (7, 1))
    values, samples = values.astype(np.float32), draw.integers(1, 1 << 29, 7).tolist()
    expected = WeightedMean(1000).add(samples, values).result()
    means = WeightedMean(1000)
    for some in (slice(0, 3), slice(3, 7)):
        means.add(samples[some], torch.from_numpy(values[some]).to(DEVICE))
    assert torch.equal(means.result(), expected)
