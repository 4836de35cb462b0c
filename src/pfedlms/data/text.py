"""Running text as windows of tokens: a window is a sample, and its target is the next token at each position.

A client's tokens t_0 … t_{n−1} give the windows x = (t_s … t_{s+L−1}) with y = (t_{s+1} … t_{s+L}) for s = 0, stride,
2 stride, … as far as they are full; what is left at the end is not used. A client tests on its last windows, and
trains on none that overlaps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.pool import Pool
from pfedlms.errors import DataError

Tokens = NDArray[np.int64]
Encode = Callable[[str], Tokens]
KINDS = ("characters", "bytes")
UNKNOWN = "\ufffd"
"""The last entry of a vocabulary of characters; it stands for every character that the text of the run lacks."""


@dataclass(frozen=True)
class Windows:
    """How text becomes samples, as section [data] of a configuration says."""

    tokens: Any = "characters"
    """One of `KINDS`, or a tokenizer: an object with `encode`, or a function, that turns a text into whole numbers from
    0 on."""
    length: int = 80
    stride: int = 0
    """Tokens from one window to the next; 0: as many as a window has, so that windows do not overlap."""
    min_tokens: int = 0
    """Clients with fewer tokens are left out."""

    @property
    def step(self) -> int:
        return self.stride or self.length

    @property
    def kind(self) -> str:
        return self.tokens if isinstance(self.tokens, str) else "custom"


def cut_windows(texts: Mapping[str, str], how: Windows, where: object = "data", names: Sequence[str] = ()) -> Pool:
    """A pool of windows, cut from the text of each client. `names` is the vocabulary of characters, if it is known;
    error messages begin with `where`."""
    if how.kind not in (*KINDS, "custom"):
        raise DataError(f"data.tokens: got {how.tokens!r}, expected {' or '.join(KINDS)}, or a tokenizer in Python")
    if how.length < 1 or how.stride < 0:
        raise DataError(f"data.window, data.stride: got {how.length} and {how.stride}, expected at least 1 and 0")
    encode, vocabulary = _encoder(texts, how, names)
    encoded = {client: encode(text) for client, text in texts.items()}
    tokens = {client: row for client, row in encoded.items() if len(row) >= how.min_tokens}
    least, needed = min(map(len, tokens.values()), default=0), how.length + how.step + 1
    if least < needed:
        raise DataError(
            f"{where}: got {len(tokens)} of {len(texts)} clients with data.min_tokens = {how.min_tokens}, the shortest "
            f"with {least} tokens, expected {needed} or more, for 2 windows; leave such clients out with "
            f"data.min_tokens = {needed}, or use a smaller data.window"
        )
    windows = {client: _sliding_windows(row, how) for client, row in tokens.items()}
    rows = np.concatenate(list(windows.values()))
    if not vocabulary:
        vocabulary = tuple(map(str, range(int(rows.max()) + 1)))
    if rows.min() < 0 or rows.max() >= len(vocabulary):
        raise DataError(
            f"data.tokens: the tokenizer gave {rows.min()} to {rows.max()}, expected whole numbers from 0 to "
            f"{len(vocabulary) - 1}"
        )
    return Pool(
        np.ascontiguousarray(rows[:, :-1]),
        np.ascontiguousarray(rows[:, 1:]),
        len(vocabulary),
        vocabulary,
        owner=np.repeat(np.arange(len(windows)), [len(rows) for rows in windows.values()]),
        client_names=tuple(windows),
        tokens=how.kind,
        stride=how.stride,
    )


def _sliding_windows(tokens: Tokens, how: Windows) -> Tokens:
    """Each window together with the token after it, `[windows, length + 1]`."""
    return np.lib.stride_tricks.sliding_window_view(tokens, how.length + 1)[:: how.step]


def _encoder(texts: Mapping[str, str], how: Windows, names: Sequence[str]) -> tuple[Encode, tuple[str, ...]]:
    """The function from text to tokens, and the vocabulary, which is empty if a tokenizer has none."""
    if how.tokens == "bytes":
        names = tuple(f"{byte:02x}" for byte in range(256))
        return lambda text: np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int64), names
    if how.kind == "custom":
        return _wrap_tokenizer(how.tokens), _tokenizer_vocabulary(how.tokens)
    points = [_code_points(text) for text in texts.values()] if not names else []
    codes = np.unique(np.concatenate(points)) if points else np.array([ord(name) for name in names], dtype=np.uint32)
    codes = codes[codes != ord(UNKNOWN)]

    def encode(text: str) -> Tokens:
        points = _code_points(text)
        places = np.searchsorted(codes, points).clip(max=len(codes) - 1)
        return np.where(codes[places] == points, places, len(codes)).astype(np.int64)

    return encode, (*map(chr, codes.tolist()), UNKNOWN)


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype="<u4")


def _wrap_tokenizer(tokenizer: Any) -> Encode:
    """A function that calls the user's tokenizer, and checks what it returns."""

    def encode(text: str) -> Tokens:
        result = (tokenizer.encode if hasattr(tokenizer, "encode") else tokenizer)(text)
        ids = np.asarray(getattr(result, "ids", result))
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise DataError(
                f"data.tokens: the tokenizer gave {type(result).__name__}, expected a list of whole numbers"
            )
        return ids.astype(np.int64)

    return encode


def _tokenizer_vocabulary(tokenizer: Any) -> tuple[str, ...]:
    """The vocabulary from `get_vocab`, or `vocab_size` numbers; empty if the tokenizer has neither."""
    if callable(getattr(tokenizer, "get_vocab", None)):
        tokens = {number: token for token, number in tokenizer.get_vocab().items()}
        return tuple(tokens.get(number, str(number)) for number in range(max(tokens) + 1))
    return tuple(map(str, range(getattr(tokenizer, "vocab_size", 0))))
