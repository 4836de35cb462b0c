"""Section 8 of the page: frames that must be refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from pfedlms import errors
from pfedlms.methods import METHODS
from pfedlms.wire.frames import SERVER, Intake
from vector_makers.agreements import as_settings, task


def sealed(data: bytes, at: int | None = None, new: bytes = b"") -> bytes:
    """The frame with `new` written at `at`, and a valid checksum."""
    if at is not None:
        data = data[:at] + new + data[at + len(new) :]
    return data[:36] + struct.pack("<I", zlib.crc32(data[40:], zlib.crc32(data[:36]))) + data[40:]


def refused(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    statistics = bytes.fromhex(runs[0]["rounds"][0]["clients"][1]["frame_a"])
    ternary = bytes.fromhex(runs[1]["rounds"][0]["clients"][1]["frame_b"])
    # Answers, which clients refuse.
    pooled = bytes.fromhex(runs[0]["rounds"][0]["reply_a"])
    consensus = bytes.fromhex(runs[1]["rounds"][0]["reply_b"])
    one = struct.Struct("<f").pack
    cases: list[tuple[str, str, int, int, bytes]] = [
        ("header cut short", "truncated", 0, 0, statistics[:39]),
        ("payload cut short", "truncated", 0, 0, statistics[:-1]),
        ("one byte too many", "oversized", 0, 0, statistics + b"\0"),
        ("length of 2^60", "oversized", 0, 0, sealed(statistics, 20, struct.pack("<Q", 1 << 60))),
        ("another magic", "magic", 0, 0, sealed(statistics, 0, b"PFLN")),
        ("version 2", "version", 0, 0, sealed(statistics, 4, b"\2")),
        ("a flipped bit in the payload", "checksum", 0, 0, statistics[:-1] + bytes([statistics[-1] ^ 1])),
        ("reserved bytes in use", "decode", 0, 0, sealed(statistics, 6, b"\0\1")),
        ("digest of another run", "digest", 0, 0, sealed(statistics, 28, ternary[28:36])),
        ("the other exchange", "kind", 0, 0, sealed(statistics, 5, b"\2")),
        ("a kind that does not exist", "kind", 0, 0, sealed(statistics, 5, b"\xff")),
        ("the round after", "round", 0, 0, sealed(statistics, 8, b"\1\0\0\0")),
        ("an unknown client", "sender", 0, 0, sealed(statistics, 12, b"\3\0\0\0")),
        ("the server's id", "sender", 0, 0, sealed(statistics, 12, b"\xff\xff\xff\xff")),
        ("no samples", "decode", 0, 0, sealed(statistics, 16, b"\0\0\0\0")),
        ("a mean that is NaN", "decode", 0, 0, sealed(statistics, 40, one(float("nan")))),
        ("a mean that is infinite", "decode", 0, 0, sealed(statistics, 40, one(float("-inf")))),
        ("a negative variance", "decode", 0, 0, sealed(statistics, 48, one(-1e-30))),
        ("a block value out of range", "decode", 1, 2, sealed(ternary, 40, b"\xff" * (len(ternary) - 40))),
        ("a bit after the last symbol", "decode", 1, 2, sealed(ternary, len(ternary) - 1, bytes([ternary[-1] | 128]))),
        (
            "payload and length one byte short",
            "truncated",
            1,
            2,
            sealed(ternary[:-1], 20, struct.pack("<Q", len(ternary) - 41)),
        ),
        ("an answer cut short", "truncated", 0, 1, pooled[:-1]),
        ("an answer with a flipped bit", "checksum", 0, 1, pooled[:44] + bytes([pooled[44] ^ 128]) + pooled[45:]),
        ("a client's statistics in place of the answer", "kind", 0, 1, statistics),
        ("the answer of the round before", "round", 1, 3, sealed(consensus, 8, b"\0\0\0\0")),
        ("an answer from a client", "sender", 0, 1, sealed(pooled, 12, b"\1\0\0\0")),
        ("an answer with samples", "decode", 0, 1, sealed(pooled, 16, b"\1\0\0\0")),
        ("a pooled mean that is infinite", "decode", 0, 1, sealed(pooled, 40, one(float("inf")))),
        ("a negative deviation", "decode", 0, 1, sealed(pooled, 48, one(-1e-45))),
        ("a deviation that is NaN", "decode", 0, 1, sealed(pooled, 52, one(float("nan")))),
        ("the consensus of another run", "digest", 1, 3, sealed(consensus, 28, pooled[28:36])),
        ("a client's symbols in place of the consensus", "kind", 1, 3, ternary),
        ("a consensus from a client", "sender", 1, 3, sealed(consensus, 12, b"\2\0\0\0")),
        ("a consensus with samples", "decode", 1, 3, sealed(consensus, 16, b"\0\0\0\1")),
        ("a consensus out of range", "decode", 1, 3, sealed(consensus, 40, b"\xff" * (len(consensus) - 40))),
        ("a consensus with a byte too many", "oversized", 1, 3, consensus + b"\0"),
    ]
    entries = [
        {
            "what": what,
            "error": error,
            "run": index,
            "kind": kind,
            "round": runs[index]["rounds"][0]["round"],
            "senders": [SERVER] if kind % 2 else [0, 1, 2],
            "before": [],
            "frame": data.hex(),
        }
        for what, error, index, kind, data in cases
    ]
    again = {**entries[0], "what": "a second message of one sender", "error": "sender"}
    entries.append({**again, "before": [statistics.hex()], "frame": statistics.hex()})
    twice = {"what": "a second answer", "error": "sender", "kind": 1, "senders": [SERVER]}
    entries.append({**entries[0], **twice, "before": [pooled.hex()], "frame": pooled.hex()})
    return [checked(entry, runs) for entry in entries]


def checked(entry: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry, after a check that the package refuses it for the stated reason."""
    intake = package_intake(entry, runs)
    for data in entry["before"]:
        intake.accept(bytes.fromhex(data))
    try:
        intake.accept(bytes.fromhex(entry["frame"]))
    except errors.WireError as error:
        reason = type(error).__name__.lower()
    else:
        reason = "accepted"
    assert reason == f"{entry['error']}error", f"{entry['what']}: {reason}"
    return entry


def package_intake(entry: dict[str, Any], runs: list[dict[str, Any]]) -> Intake:
    """The receiver that a `refused` entry describes."""
    known = runs[entry["run"]]["agreement"]
    settings = METHODS["pfedlms"].Settings(**as_settings(known["settings"]))
    initial = np.array([int(x, 16) for x in known["initial"]], dtype=np.uint32).view(np.float32)
    method = METHODS["pfedlms"](task([size for _, size in known["layers"]], int(known["seed"], 16), initial), settings)
    exchange = method.exchanges[entry["kind"] // 2]
    message = exchange.down if entry["kind"] % 2 else exchange.up
    return Intake(message, bytes.fromhex(known["digest"]), entry["round"], entry["senders"])
