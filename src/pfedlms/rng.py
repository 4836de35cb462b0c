"""Random streams that are the same on every device, library version and language.

Everything random in the package comes from a *stream*, named by a seed, a purpose and counters (round, client, layer
…).
A stream is a 64-bit key; its i-th word is SplitMix64 at position i (Steele, Lea, Flood, OOPSLA 2014):

    mix(z)      z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    word(i)     mix(key + (i + 1) * 0x9E3779B97F4A7C15)                      all modulo 2^64
    key         k = mix(seed + G); then k = mix((k xor part) + G) for part in (fnv1a(purpose), *counters),
                G = 0x9E3779B97F4A7C15

Words depend on their index alone, so any part of a stream can be computed anywhere without what came before it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST_SEED = (1 << 63) - 1
"""The largest seed and counter that all programming languages read alike."""
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
# Rounds of the row bijection. With four, the distribution of pairs of rows is 4 % away from uniform at N = 16; with
# six, 1 %.
_ROUNDS = 6


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _fnv1a(text: str) -> int:
    h = 0xCBF29CE484222325
    for byte in text.encode("ascii"):
        h = ((h ^ byte) * 0x100000001B3) & _MASK
    return h


def stream(seed: int, purpose: str, *counters: int) -> int:
    """Key of the stream named (seed, purpose, counters); different names give unrelated streams."""
    key = _mix((seed + _GAMMA) & _MASK)
    for part in (_fnv1a(purpose), *counters):
        key = _mix(((key ^ (part & _MASK)) + _GAMMA) & _MASK)
    return key


def streams(seed: int, purpose: str, *counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`stream` for many names at once: keys of (seed, purpose, counters[0][i], counters[1][i], …)."""
    keys = np.full(len(counters[0]), _as_signed(stream(seed, purpose)))
    for part in counters:
        keys = _mix_array((keys ^ part) + _as_signed(_GAMMA))
    return keys.view(np.uint64)


def _mix_array(z: Any) -> Any:
    """`mix` of every entry of an int64 array or tensor, bit for bit."""
    z = (z ^ _shift_right(z, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _as_signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _as_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift_right(z: Any, bits: int) -> Any:
    """A right shift that brings in zeros; that of int64 brings in the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def words(key: int, count: int) -> NDArray[np.uint64]:
    """First `count` 64-bit words of the stream."""
    return words_at(np.array([key], dtype=np.uint64), np.arange(count))


def words_at(keys: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Word `index` of the streams `keys`, element by element."""
    signed: NDArray[np.int64] = _word_at(keys.view(np.int64), index)
    return signed.view(np.uint64)


def device_words(keys: Tensor, index: Tensor) -> Tensor:
    """`words_at` on any device; keys and words as int64, bit for bit."""
    result: Tensor = _word_at(keys, index)
    return result


def _word_at(keys: Any, index: Any) -> Any:
    return _mix_array(keys + (index + 1) * _as_signed(_GAMMA))


SIGNS_OF_BYTE = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(1), np.float32(-1))
SIGNS_OF_BYTE.flags.writeable = False
"""The eight signs that a byte stands for, lowest bit first: +1 where it is set."""


def signs(key: int, count: int) -> NDArray[np.float32]:
    """`count` Rademacher signs: entry i is −1 where bit i % 64 (least significant first) of word i // 64 is set."""
    unset = ~words(key, -(-count // 64)).astype("<u8").view(np.uint8)
    return SIGNS_OF_BYTE.take(unset, axis=0).reshape(-1)[:count]


def device_signs(key: Tensor, count: int) -> Tensor:
    """`signs` of the stream `key` (int64, without axes) on its device, as int8."""
    index = torch.arange(-(-count // 64), device=key.device)
    bits = (device_words(key, index).unsqueeze(1) >> torch.arange(64, device=key.device)).to(torch.int8) & 1
    return (1 - 2 * bits).flatten()[:count]


def row_constants(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """a_0, b_0, a_1, … of the row bijections of some streams: `[12, keys]`, modulo 2^64 as int64."""
    constants = words_at(keys, np.arange(2 * _ROUNDS)[:, None])
    constants[::2] |= np.uint64(1)
    return constants.view(np.int64)


def row_images(x: Any, constants: Any, bits: int) -> Any:
    """Images of `x`, an int64 array or tensor, under the bijection of `bits`-bit integers with these constants.

    The bijection is, six times over (r = 0..5), with a_r = word(2r) | 1 and b_r = word(2r + 1):

        x ← (a_r x + b_r) mod 2^bits;   x ← x xor (x >> ceil(bits / 2))        (shift by at least one)
    """
    for r in range(_ROUNDS):
        x = (x * constants[2 * r] + constants[2 * r + 1]) & ((1 << bits) - 1)
        x = x ^ (x >> max(1, (bits + 1) // 2))
    return x


def uniforms(key: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in (0, 1): the top 53 bits of each word, plus a half, over 2^53."""
    return ((words(key, count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normals(key: int, count: int) -> NDArray[np.float64]:
    """`count` standard normal numbers, by Box and Muller from two uniforms each pair."""
    pairs = -(-count // 2)
    u = uniforms(key, 2 * pairs).reshape(2, pairs)
    radius, angle = np.sqrt(-2 * np.log(u[0])), 2 * np.pi * u[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def first_of_permutation(key: int, count: int, chosen: int) -> NDArray[np.int64]:
    """The first `chosen` entries of `permutation(key, count)`, ascending. They are found without sorting all words,
    since a stream has no word twice."""
    all_words = words(key, count)
    return np.flatnonzero(all_words <= np.partition(all_words, chosen - 1)[chosen - 1])


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """A permutation of 0..count−1: the order that sorts the stream's first `count` words (ties by index)."""
    return np.argsort(words(key, count), kind="stable")


def generator(key: int) -> np.random.Generator:
    """A NumPy generator for draws that need a distribution (the Dirichlet shares of a partition)."""
    return np.random.Generator(np.random.Philox(key=key))


@contextmanager
def forked_generators(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """A context after which the generators from which the user's code may draw are as before it: those of PyTorch, on
    the CPU and on `device` if that is a GPU, of NumPy and of Python. With a `seed` they start from it."""
    kept = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if seed is not None:
                torch.default_generator.manual_seed(seed % (1 << 63))
                np.random.seed(seed % (1 << 32))
                random.seed(seed)
                if device.type == "cuda":
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(seed % (1 << 63))
            yield
    finally:
        np.random.set_state(kept[0])
        random.setstate(kept[1])


def generators_state() -> bytes:
    """The states of the generators that `forked_generators` keeps on the host: any draw changes them."""
    return pickle.dumps((torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()))
