"""The vectors' edges: Lloyd–Max boundaries, sums in order, thresholds beyond float32, −1 among signs, answers that are
refused, and what methods add to the digest; by the second implementation."""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter
from typing import Any

import make_vectors
import plain_client as plain
import pytest
from second import VECTORS, bits32, f32, f32s, recorded_run


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


STREAMS = {
    # The checksum is right: the reader goes on with the next frame.
    "reserved bytes in use": ("decode", True),
    "digest of another run": ("digest", True),
    "the other exchange": ("kind", True),
    "the round after": ("round", True),
    "an unknown client": ("sender", True),
    "no samples": ("decode", True),
    "a mean that is NaN": ("decode", True),
    # Nobody knows where the next frame begins. What is cut short takes its last byte from the frame behind it, and the
    # byte that is too many is the first of the next header.
    "another magic": ("magic", False),
    "version 2": ("version", False),
    "length of 2^60": ("oversized", False),
    "a flipped bit in the payload": ("checksum", False),
    "payload cut short": ("checksum", False),
    "one byte too many": ("magic", False),
}


@pytest.mark.parametrize("what", STREAMS)
def test_a_stream_after_a_refusal(what: str) -> None:
    """A good frame of client 0, a bad one, a good one of client 2."""
    error, goes_on = STREAMS[what]
    good = [bytes.fromhex(client["frame_a"]) for client in VECTORS["runs"][0]["rounds"][0]["clients"]]
    (entry,) = [entry for entry in VECTORS["refused"] if entry["what"] == what]
    refused: list[str] = []
    stream = io.BytesIO(good[0] + bytes.fromhex(entry["frame"]) + good[2])
    accepted, stays_open = plain.accept_stream(statistics_receiver(), stream, refused)
    assert (refused, stays_open) == ([error], goes_on)
    well = [1] if what == "one byte too many" else []  # all of that frame but the byte behind it
    assert [sender for sender, _, _ in accepted] == [0, *well, *[2] * goes_on]


def statistics_receiver() -> plain.Receiver:
    digest = bytes.fromhex(VECTORS["runs"][0]["agreement"]["digest"])
    return plain.Receiver(0, [plain.Floats(2), plain.Floats(2, minimum=0.0)], 0, digest, [0, 1, 2])


def test_a_payload_too_short_for_its_fields_leaves_the_stream_open() -> None:
    good = [bytes.fromhex(client["frame_a"]) for client in VECTORS["runs"][0]["rounds"][0]["clients"]]
    short = plain.write_frame(0, 0, 1, 5, good[0][28:36], good[1][40:-1])
    refused: list[str] = []
    accepted, stays_open = plain.accept_stream(statistics_receiver(), io.BytesIO(short + good[2]), refused)
    assert (refused, stays_open, len(accepted)) == (["truncated"], True, 1)


def test_a_stream_that_ends_within_a_frame() -> None:
    data = bytes.fromhex(VECTORS["runs"][0]["rounds"][0]["clients"][0]["frame_a"])
    for cut in range(len(data) + 1):
        refused: list[str] = []
        accepted, stays_open = plain.accept_stream(statistics_receiver(), io.BytesIO(data[:cut]), refused)
        whole = cut in (0, len(data))
        assert (len(accepted), refused, stays_open) == (cut // len(data), [] if whole else ["truncated"], whole)


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


@pytest.mark.parametrize(("method", "number"), [("sketchvote", 2), ("sketchmean", 3)])
def test_a_wrong_digest_and_entries_of_zero_are_in_the_runs(method: str, number: int) -> None:
    """`test_runs` of each method plays them: who has another w is not counted, and is sent the server's."""
    entry = VECTORS[method][number]
    run, first = recorded_run(method, entry["agreement"]), entry["rounds"][0]
    x = [theta - w for theta, w in zip(f32s(first["clients"][1]["model"]), run.initial, strict=True)]
    y = plain.sketch(x, run.layers, run.sizes, run.seed, 0)[1]
    assert y.count(0.0) == len(y) // 2
    told = [(played, own) for played in entry["rounds"] for own in played["clients"] if "w" in own]
    ((played, own),) = told
    assert own["frame"][-16:] == plain.model_digest(f32s(own["w"])).hex()
    assert own["w"] != entry["rounds"][played["round"] - 1]["w"]
    assert own["id"] in {each["id"] for each in played["caught_up"]}


def test_two_ways_to_catch_up_of_as_many_bytes_are_in_the_runs() -> None:
    """Answers and w of sketchvote; entries changed since w⁰ and different from w⁰ of sketchmean. The first is sent."""
    (missed,) = [each for played in VECTORS["sketchvote"][2]["rounds"][3:] for each in played["caught_up"]]
    assert (len(missed["frames"]), sum(map(len, missed["frames"])) // 2) == (4, 40 + 4 * 47)
    initial = VECTORS["sketchmean"][3]["agreement"]["initial"]
    *before, played = VECTORS["sketchmean"][3]["rounds"][:3]
    changed, seen = set[int](), initial
    for w in (each["w"] for each in before):
        changed |= {i for i, (old, new) in enumerate(zip(seen, w, strict=True)) if old != new}
        seen = w
    assert changed == {i for i, (old, new) in enumerate(zip(initial, seen, strict=True)) if old != new}
    (sent,) = [each for each in played["caught_up"] if each["id"] == 2]
    assert (sent["heard"], [data[10:12] for data in sent["frames"]]) == (0, ["05"])
