"""The second implementation and edge cases of the vectors: Lloyd–Max boundaries, the order of sums, streams of frames,
and what methods add to the digest."""

from __future__ import annotations

import hashlib
import io
from decimal import Decimal
from itertools import pairwise
from typing import Any

import make_vectors
import numpy as np
import plain_client as plain
import pytest
from second import VECTORS, bits32, f32, f32s, recorded_run

from pfedlms.quantise import lloyd_max, lloyd_max_in_float64


def test_what_a_caller_does_to_levels_does_not_reach_the_next_one() -> None:
    centroids, _ = lloyd_max(4)
    before = centroids.copy()
    centroids[:] = 99
    assert np.array_equal(lloyd_max(4)[0], before)


def test_lloyd_max_boundaries_match_the_vectors() -> None:
    for entry in VECTORS["lloyd_max"]:
        assert bits32(plain.quantiles(entry["thresholds"], "lloyd-max")) == entry["boundaries"]


def test_boundaries_and_centroids_in_float64_are_exact() -> None:
    worst = Decimal(0)
    for levels in range(2, 257):
        exact = plain.lloyd_max_boundaries(levels)
        centroids, edges = lloyd_max_in_float64(levels)
        worst = max(worst, *(abs(Decimal(x) - y) for x, y in zip(edges.tolist(), exact, strict=True)))
        # By hand from the definition: a boundary lies halfway between its centroids.
        halfway = (centroids[1:] + centroids[:-1]) / 2
        worst = max(worst, *(abs(Decimal(x) - y) for x, y in zip(halfway.tolist(), exact, strict=True)))
    assert worst < Decimal("1e-13")


def test_boundaries_are_rounded_to_the_same_numbers() -> None:
    for levels in range(2, 257):
        assert plain.quantiles(levels - 1, "lloyd-max") == lloyd_max(levels)[1].tolist()


@pytest.mark.parametrize("levels", [2, 3, 4, 5])
def test_the_second_implementation_meets_the_definition(levels: int) -> None:
    """Centroids by sums over 400,000 strips of the normal density: no Newton's method, no error function."""
    bounds = np.array([-12.0, *map(float, plain.lloyd_max_boundaries(levels)), 12.0])
    means = []
    for a, b in pairwise(bounds):
        x = a + (np.arange(400_000) + 0.5) * (b - a) / 400_000
        density = np.exp(-x * x / 2)
        means.append((x * density).sum() / density.sum())
    assert np.allclose((np.array(means[1:]) + means[:-1]) / 2, bounds[1:-1], atol=1e-9, rtol=0)


def test_pooled_statistics_match_the_vectors() -> None:
    for entry in VECTORS["pools"]:
        means, variances = f32s(entry["means"]), f32s(entry["variances"])
        assert bits32(plain.pool(entry["samples"], means, variances)) == [entry["mean"], entry["deviation"]]
    by_hand = VECTORS["pools"][1]
    assert f32(by_hand["mean"]) == 5 / 4  # ((2^60 + 3) − 2^60) + 5: in another order the 3 would not be lost
    backwards = plain.pool(*(list(reversed(part)) for part in ([1] * 4, f32s(by_hand["means"]), [0.0] * 4)))
    assert backwards[0] != 5 / 4


STREAMS = {
    # The checksum is right: the reader continues with the next frame.
    "reserved bytes in use": ("decode", True),
    "digest of another run": ("digest", True),
    "the other exchange": ("kind", True),
    "the round after": ("round", True),
    "an unknown client": ("sender", True),
    "no samples": ("decode", True),
    "a mean that is NaN": ("decode", True),
    # The start of the next frame is unknown. A payload cut short takes its last byte from the next frame, and an extra
    # byte becomes the first one of the next header.
    "another magic": ("magic", False),
    "version 2": ("version", False),
    "length of 2^60": ("oversized", False),
    "a flipped bit in the payload": ("checksum", False),
    "payload cut short": ("checksum", False),
    "one byte too many": ("magic", False),
}


@pytest.mark.parametrize("what", STREAMS)
def test_a_stream_continues_after_a_refusal_only_where_the_next_frame_is_found(what: str) -> None:
    """A valid frame of client 0, a wrong one, a valid one of client 2."""
    error, continues = STREAMS[what]
    good = [bytes.fromhex(client["frame_a"]) for client in VECTORS["runs"][0]["rounds"][0]["clients"]]
    (entry,) = [entry for entry in VECTORS["refused"] if entry["what"] == what]
    refused: list[str] = []
    stream = io.BytesIO(good[0] + bytes.fromhex(entry["frame"]) + good[2])
    accepted, stays_open = plain.accept_stream(statistics_receiver(), stream, refused)
    assert (refused, stays_open) == ([error], continues)
    valid = [1] if what == "one byte too many" else []  # that frame is valid up to the extra byte
    assert [sender for sender, _, _ in accepted] == [0, *valid, *[2] * continues]


def statistics_receiver() -> plain.Receiver:
    digest = bytes.fromhex(VECTORS["runs"][0]["agreement"]["digest"])
    return plain.Receiver(0, [plain.Floats(2), plain.Floats(2, minimum=0.0)], 0, digest, [0, 1, 2])


def test_a_payload_too_short_for_its_fields_leaves_the_stream_open() -> None:
    good = [bytes.fromhex(client["frame_a"]) for client in VECTORS["runs"][0]["rounds"][0]["clients"]]
    short = plain.write_frame(0, 0, 1, 5, good[0][28:36], good[1][40:-1])
    refused: list[str] = []
    accepted, stays_open = plain.accept_stream(statistics_receiver(), io.BytesIO(short + good[2]), refused)
    assert (refused, stays_open, len(accepted)) == (["truncated"], True, 1)


def test_a_stream_that_ends_within_a_frame_is_truncated() -> None:
    data = bytes.fromhex(VECTORS["runs"][0]["rounds"][0]["clients"][0]["frame_a"])
    for cut in range(len(data) + 1):
        refused: list[str] = []
        accepted, stays_open = plain.accept_stream(statistics_receiver(), io.BytesIO(data[:cut]), refused)
        whole = cut in (0, len(data))
        assert (len(accepted), refused, stays_open) == (cut // len(data), [] if whole else ["truncated"], whole)


@pytest.mark.parametrize("known", VECTORS["agreements"], ids=lambda known: known["digest"])
def test_agreements_match_the_vectors(known: dict[str, Any]) -> None:
    """The text follows from the settings; those that the shape of a schedule does not use are not in it."""
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


@pytest.mark.parametrize(("method", "number"), [("sketchvote", 2), ("sketchmean", 3)])
def test_the_recorded_runs_contain_a_wrong_digest_and_entries_of_zero(method: str, number: int) -> None:
    """Runs of each method are recomputed elsewhere: a client out of sync is not counted, and is sent the server's w."""
    entry = VECTORS[method][number]
    run, first = recorded_run(method, entry["agreement"]), entry["rounds"][0]
    x = [theta - w for theta, w in zip(f32s(first["clients"][1]["model"]), run.initial, strict=True)]
    y = plain.sketch(x, run.layers, run.sizes, run.seed, 0)[1]
    assert y.count(0.0) == len(y) // 2
    ((played, own),) = [(played, own) for played in entry["rounds"] for own in played["clients"] if "w" in own]
    assert own["frame"][-16:] == plain.model_digest(f32s(own["w"])).hex()
    assert own["w"] != entry["rounds"][played["round"] - 1]["w"]
    assert own["id"] in {each["id"] for each in played["caught_up"]}


def test_the_recorded_runs_contain_two_ways_to_catch_up_of_equal_size() -> None:
    """sketchvote: answers or w. sketchmean: entries changed since w⁰ or different from w⁰. The first is sent."""
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
