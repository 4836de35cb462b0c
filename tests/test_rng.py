"""Random streams: published values, and the second implementation. Frozen vectors are in wire/vectors.json."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_client import fnv1a, row, signs, stream, word

from pfedlms import rng

MASK = (1 << 64) - 1
KEYS = st.integers(0, MASK)


def test_generators_of_the_user_are_seeded_and_restored() -> None:
    def draws() -> list[float]:
        return [float(torch.rand(1)), float(np.random.rand()), random.random()]

    cpu, kept = torch.device("cpu"), rng.generators_state()
    with rng.forked_generators(cpu, 5):
        first = draws()
        assert rng.generators_state() != kept
    assert rng.generators_state() == kept
    with rng.forked_generators(cpu, 5):
        assert draws() == first
    with rng.forked_generators(cpu, 6):
        assert not set(draws()) & set(first)


def test_fnv1a_has_its_published_values() -> None:
    """Test vectors of Fowler, Noll and Vo (64-bit FNV-1a), for the implementation that streams are checked with."""
    assert fnv1a("") == 0xCBF29CE484222325
    assert fnv1a("a") == 0xAF63DC4C8601EC8C
    assert fnv1a("foobar") == 0x85944171F73967E8


def test_words_are_splitmix64() -> None:
    """The published output for seed 1234567 (Vigna's splitmix64.c)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert rng.words(1234567, 4).tolist() == published


@settings(max_examples=50, deadline=None, derandomize=True)
@given(KEYS, st.integers(0, 20))
def test_words_equal_the_second_implementation(key: int, count: int) -> None:
    assert rng.words(key, count).tolist() == [word(key, index) for index in range(count)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(-(2**70), 2**70),
    st.text(st.characters(max_codepoint=127), max_size=12),
    st.lists(st.integers(-3, 2**65), max_size=4),
)
def test_stream_equals_the_second_implementation(seed: int, purpose: str, counters: list[int]) -> None:
    """Whatever integers it is given: they count modulo 2^64."""
    assert rng.stream(seed, purpose, *counters) == stream(seed, purpose, *(c % 2**64 for c in counters))


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_many_streams_at_once_equal_single_streams(seed: int) -> None:
    first = np.array([0, 1, 19, 2**62, 2**63 - 1, -1])
    second = np.array([5, 0, 2**40, 3, 3, -(2**63)])
    for counters in ((first,), (first, second), (first, second, first)):
        keys = rng.streams(seed, "batches", *counters)
        assert keys.dtype == np.uint64
        assert keys.tolist() == [rng.stream(seed, "batches", *own) for own in np.stack(counters, axis=1).tolist()]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(KEYS, st.integers(0, 2**63 - 1))
def test_words_on_a_device_equal_the_second_implementation(key: int, index: int) -> None:
    signed = torch.from_numpy(np.array([key], dtype=np.uint64).view(np.int64))
    got = rng.device_words(signed, torch.tensor([index])).numpy().view(np.uint64)
    assert got.tolist() == [word(key, index)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(KEYS, st.integers(0, 200))
def test_signs_equal_the_second_implementation(key: int, count: int) -> None:
    ours, theirs = rng.signs(key, count), rng.device_signs(torch.from_numpy(np.uint64([key]).view(np.int64))[0], count)
    assert (ours.dtype, theirs.dtype) == (np.float32, torch.int8)
    assert ours.tolist() == theirs.tolist() == signs(key, count)


def rows_of(key: int, bits: int, count: int) -> np.ndarray:
    constants = rng.row_constants(np.array([key], dtype=np.uint64))[:, 0]
    return rng.row_images(np.arange(count), constants, bits)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(KEYS, min_size=1, max_size=3), st.integers(0, 24), st.integers(0, 30))
def test_rows_equal_the_second_implementation(keys: list[int], bits: int, count: int) -> None:
    """On the host and on a device, from constants that the host hashes for all streams at once."""
    count = min(count, 1 << bits)
    constants = torch.from_numpy(rng.row_constants(np.array(keys, dtype=np.uint64)))
    for key, own in zip(keys, constants.unbind(dim=1), strict=True):
        expected, found = [row(key, bits, x) for x in range(count)], rows_of(key, bits, count)
        assert (found.dtype, found.tolist()) == (np.int64, expected)
        assert rng.row_images(torch.arange(count), own, bits).tolist() == expected


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 7, 8, 13])
def test_all_rows_are_a_permutation(bits: int) -> None:
    for key in range(20):
        assert sorted(rows_of(rng.stream(key, "test"), bits, 1 << bits).tolist()) == list(range(1 << bits))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(KEYS, st.integers(0, 60))
def test_permutation_sorts_the_words(key: int, count: int) -> None:
    assert rng.permutation(key, count).tolist() == sorted(range(count), key=lambda index: (word(key, index), index))
