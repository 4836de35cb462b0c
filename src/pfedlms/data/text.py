"""Running text as windows of tokens: a window is a sample, and its target is the next token at each position.

A client's tokens t_0 … t_{n−1} give the windows x = (t_s … t_{s+L−1}) with y = (t_{s+1} … t_{s+L}) for s = 0, stride,
2 stride, … as far as they are full; what is left at the end is not used. A client tests on its last windows, and
trains on none that overlaps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.pool import Pool
from pfedlms.errors import DataError, reason

Tokens = NDArray[np.int64]
Encode = Callable[[str], Tokens]
KINDS = ("characters", "bytes")
UNKNOWN = "\ufffd"
"""The last entry of a vocabulary of characters: it stands for all that the text of the run does not have."""


@dataclass(frozen=True)
class Windows:
    """How text becomes samples; the settings of section [data]."""

    tokens: Any = "characters"
    """One of `KINDS`, or a tokenizer: an object with `encode`, or a function, from a text to whole numbers from 0."""
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


def windows_of(texts: Mapping[str, str], how: Windows, called: object = "data", names: Sequence[str] = ()) -> Pool:
    """The windows of all clients, by the text of each; `names` is the vocabulary of characters, where it is known."""
    if how.kind not in (*KINDS, "custom"):
        raise DataError(f"data.tokens: got {how.tokens!r}, expected {' or '.join(KINDS)}, or a tokenizer in Python")
    if how.length < 1 or how.stride < 0:
        raise DataError(f"data.window, data.stride: got {how.length} and {how.stride}, expected at least 1 and 0")
    encode, vocabulary = _encoder(texts, how, names)
    encoded = {client: encode(text) for client, text in texts.items()}
    kept = {client: own for client, own in encoded.items() if len(own) >= how.min_tokens}
    if not kept:
        most = max(map(len, encoded.values()), default=0)
        raise DataError(
            f"{called}: got {len(texts)} clients with at most {most} tokens, expected one with data.min_tokens = "
            f"{how.min_tokens} or more; lower it"
        )
    cut = {client: _cut(own, how) for client, own in kept.items()}
    short = {client: own for client, own in kept.items() if len(cut[client]) < 2}
    if short:
        client, own = min(short.items(), key=lambda each: len(each[1]))
        raise DataError(
            f"{called}: {len(short)} of {len(kept)} clients have too little text for 2 windows (client {client!r}: "
            f"{len(own)} tokens), expected {how.length + how.step + 1} tokens or more; leave such clients out with "
            f"data.min_tokens = {how.length + how.step + 1}, or use a smaller data.window"
        )
    rows = np.concatenate(list(cut.values()))
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
        owner=np.repeat(np.arange(len(cut)), [len(own) for own in cut.values()]),
        client_names=tuple(cut),
        tokens=how.kind,
        overlap=-(-how.length // how.step) - 1,
    )


def _cut(tokens: Tokens, how: Windows) -> Tokens:
    """Windows with the token after them, `[windows, length + 1]`."""
    if len(tokens) <= how.length:
        return np.empty((0, how.length + 1), dtype=np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, how.length + 1)[:: how.step]


def _encoder(texts: Mapping[str, str], how: Windows, names: Sequence[str]) -> tuple[Encode, tuple[str, ...]]:
    """The function from text to tokens, and the vocabulary; of a tokenizer that does not tell, none."""
    if how.tokens == "bytes":
        names = tuple(f"{byte:02x}" for byte in range(256))
        return lambda text: np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int64), names
    if how.kind == "custom":
        return _guarded(how.tokens), _vocabulary_of(how.tokens)
    points = [_code_points(text) for text in texts.values()] if not names else []
    codes = np.unique(np.concatenate(points)) if points else np.array([ord(name) for name in names], dtype=np.uint32)
    codes = codes[codes != ord(UNKNOWN)]

    def encode(text: str) -> Tokens:
        own = _code_points(text)
        places = np.searchsorted(codes, own).clip(max=len(codes) - 1)
        return np.where(codes[places] == own, places, len(codes)).astype(np.int64)

    return encode, (*map(chr, codes.tolist()), UNKNOWN)


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype="<u4")


def _guarded(tokenizer: Any) -> Encode:
    """A tokenizer of the user's own, which may raise or return anything."""

    def encode(text: str) -> Tokens:
        try:
            found = (tokenizer.encode if hasattr(tokenizer, "encode") else tokenizer)(text)
            ids = np.asarray(getattr(found, "ids", found))
            if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
                raise TypeError(f"it gave {type(found).__name__}, expected a list of whole numbers from 0")
            return ids.astype(np.int64)
        except Exception as error:
            raise DataError(f"data.tokens: the tokenizer fails on {text[:40]!r} ({reason(error)})") from error

    return encode


def _vocabulary_of(tokenizer: Any) -> tuple[str, ...]:
    """By `get_vocab`, or as many numbers as `vocab_size` says; empty if the tokenizer has neither."""
    if callable(getattr(tokenizer, "get_vocab", None)):
        known = {place: token for token, place in tokenizer.get_vocab().items()}
        return tuple(known.get(place, str(place)) for place in range(max(known) + 1))
    return tuple(map(str, range(getattr(tokenizer, "vocab_size", 0))))


def joined_by_client(path: Path, texts: Sequence[Any], clients: Sequence[Any] | None) -> dict[str, str]:
    """All texts of each client, in their order, with a newline between them."""
    if clients is None:
        raise DataError(
            f"{path}: got text and no column that says whose it is, expected client, user or client_id; name it with "
            "--set data.owner_column=COLUMN (owner_column in Python)"
        )
    found: dict[str, list[str]] = {}
    for row, (client, text) in enumerate(zip(clients, texts, strict=True)):
        if not isinstance(text, str) or client is None:
            wrong = f"{type(text).__name__} as text" if client is not None else "no client"
            raise DataError(f"{path}, row {row} (from 0): got {wrong}, expected a client and its text")
        found.setdefault(str(client), []).append(text)
    return {client: "\n".join(own) for client, own in found.items()}
