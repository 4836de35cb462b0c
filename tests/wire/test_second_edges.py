"""The vectors' edges: Lloyd–Max boundaries, sums in order, thresholds beyond float32, −1 among signs, answers that are
refused, and what methods add to the digest; by the second implementation."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import make_vectors
import plain_client as plain
import pytest
from bit_patterns import bits32, f32, f32s

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="ascii"))


def test_lloyd_max() -> None:
    assert {entry["thresholds"] for entry in VECTORS["lloyd_max"]} >= {1, 2, 93, 164, 198}
    for entry in VECTORS["lloyd_max"]:
        assert bits32(plain.quantiles(entry["thresholds"], "lloyd-max")) == entry["boundaries"]
    (run,) = [run for run in VECTORS["runs"] if run["agreement"]["settings"]["spacing"] == "lloyd-max"]
    (played,) = run["rounds"]
    equal_shares = [
        bits32(plain.thresholds_of(*pooled, 4)) for pooled in zip(*pooled_in(played["reply_a"]), strict=True)
    ]
    assert all(ours != theirs for ours, theirs in zip(played["thresholds"], equal_shares, strict=True))


def pooled_in(reply: str, layers: int = 2) -> tuple[list[float], list[float]]:
    means, deviations = plain.read_payload([plain.Floats(layers), plain.Floats(layers)], bytes.fromhex(reply)[40:])
    return means, deviations


def test_pools() -> None:
    for entry in VECTORS["pools"]:
        means, variances = f32s(entry["means"]), f32s(entry["variances"])
        assert bits32(plain.pool(entry["samples"], means, variances)) == [entry["mean"], entry["deviation"]]
    by_hand = VECTORS["pools"][1]
    assert f32(by_hand["mean"]) == 5 / 4  # ((2^60 + 3) − 2^60) + 5: in another order the 3 would not be lost
    backwards = plain.pool(*(list(reversed(part)) for part in ([1] * 4, f32s(by_hand["means"]), [0.0] * 4)))
    assert backwards[0] != 5 / 4


def test_thresholds_beyond_float32() -> None:
    """Above and below, by themselves and in a whole run, whose vote goes on."""
    alone = [tau for entry in VECTORS["thresholds"] for tau in f32s(entry["thresholds"])]
    played = [played for run in VECTORS["runs"] for played in run["rounds"]]
    in_runs = [tau for each in played for layer in each["thresholds"] for tau in f32s(layer)]
    for values in (alone, in_runs):
        assert {math.inf, -math.inf} <= set(values)
    for entry in VECTORS["symbols"]:
        assert all(map(math.isfinite, f32s(entry["values"])))


def test_signs_of_both_kinds() -> None:
    texts = [entry["signs"] for entry in VECTORS["fields"] if "signs" in entry]
    texts += [entry["signs"] for entry in VECTORS["signs"]]
    assert len(texts) == 4
    assert all(set(text) == {"+", "-"} for text in texts)


def test_every_kind_is_refused_for_its_own_reasons() -> None:
    """What the entries hold; `test_both_refuse_for_the_same_reason` plays them."""
    seen = Counter((entry["kind"], entry["error"]) for entry in VECTORS["refused"])
    for error in ("digest", "kind", "round", "sender", "decode", "oversized", "checksum", "truncated"):
        assert seen[0, error] + seen[2, error] > 0
        assert seen[1, error] + seen[3, error] > 0
    assert all(sum(n for (kind, _), n in seen.items() if kind == k) > 1 for k in (0, 1, 2, 3))


@pytest.mark.parametrize("known", VECTORS["agreements"], ids=lambda known: known["digest"])
def test_agreements(known: dict[str, Any]) -> None:
    """The text from what was configured, also where a shape does not read it."""
    layers, initial = [tuple(pair) for pair in known["layers"]], f32s(known["initial"])
    settings = make_vectors.as_settings(known["settings"])
    if known["method"] == "sketchvote":
        run = plain.VoteRun(layers, known["classes"], int(known["seed"], 16), initial, **settings)
        text = run.text()
    else:
        lines = plain.common_lines(known["method"], layers, known["classes"], int(known["seed"], 16), initial)
        lines |= {f"method.{name}": value for name, value in settings.items()}
        text = plain.digest_text(lines | plain.zsign_lines(**make_vectors.as_settings(known["facts"])))
    assert text == known["text"]
    assert (hashlib.sha256(text.encode()).hexdigest()[:16], plain.digest_of(text).hex()) == (known["digest"],) * 2


def test_agreements_of_all_shapes() -> None:
    shapes = {(known["facts"]["schedule"], known["facts"]["warmup"] > 0) for known in VECTORS["agreements"][1:]}
    assert shapes == {(shape, warm) for shape in ("constant", "cosine", "step") for warm in (False, True)}
    assert len({known["digest"] for known in VECTORS["agreements"]}) == len(VECTORS["agreements"])


def test_digests_have_their_hashes() -> None:
    for entry in VECTORS["digests"]:
        assert plain.digest_of(entry["text"]).hex() == entry["digest"] == entry["sha256"][:16]
