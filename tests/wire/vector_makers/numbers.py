"""Sections 2 to 6 of the page: sizes, random numbers, the transform, thresholds, votes, packed symbols."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pfedlms import rng
from pfedlms.aggregate import Vote, pool_statistics, weighted_medians
from pfedlms.models.layout import Layer
from pfedlms.quantise import lloyd_max, normal_quantiles, symbols_of, thresholds_of
from pfedlms.sketch.hadamard import fwht_
from pfedlms.wire.codec import block_shape, pack
from vector_makers.agreements import task
from vector_makers.notation import bits32, bits64, floats, sign_text, symbols, word


def generator_vectors() -> dict[str, Any]:
    names = [
        (0, "sketch-signs", (0, 0)),
        (0, "sketch-rows", (0, 0)),
        (7, "sketch-signs", (3, 1)),
        (7, "sketch-rows", (3, 1)),
        (2**63 - 1, "sketch-signs", (2**32 - 1, 40)),
        (1, "", ()),
    ]
    keys = [rng.stream(seed, purpose, *counters) for seed, purpose, counters in names]
    constants = rng.row_constants(np.array(keys[1:2], dtype=np.uint64))[:, 0]
    rows = {bits: rng.row_images(np.arange(min(12, 1 << bits)), constants, bits) for bits in (0, 1, 2, 3, 7, 18, 24)}
    return {
        "fnv1a": [{"text": text, "hash": word(rng._fnv1a(text))} for text in ("", "a", "sketch-signs", "sketch-rows")],
        "streams": [
            {"seed": word(seed), "purpose": purpose, "counters": [word(c) for c in counters], "key": word(key)}
            for (seed, purpose, counters), key in zip(names, keys, strict=True)
        ],
        "words": [{"key": word(key), "words": list(map(word, rng.words(key, 5)))} for key in (0, 2**64 - 1, *keys[:2])],
        "signs": [{"key": word(key), "signs": sign_text(rng.signs(key, 70))} for key in (keys[0], keys[2])],
        "rows": [{"key": word(keys[1]), "bits": bits, "rows": each.tolist()} for bits, each in rows.items()],
    }


def sizes() -> list[dict[str, Any]]:
    pairs = [(1, 0.1), (2, 0.1), (18, 0.25), (200_960, 0.1), (2_570, 0.1), (32, 1.0), (33, 0.7), (1_000_003, 1e-9)]
    layers = [(Layer("", 0, size), ratio) for size, ratio in pairs]
    return [
        {"size": layer.size, "ratio": bits64(ratio), "pad": layer.pad, "sketch": layer.sketch(ratio)}
        for layer, ratio in layers
    ]


def allocations() -> list[dict[str, Any]]:
    entries = []
    for allocation in (0.0, 0.5, 0.7, 1.0, 1.3, 3.0):
        for ratio, layers in ((0.1, [200_960, 2_570]), (0.3, [1, 18, 70, 8]), (1.0, [33, 1_000, 5])):
            table = task(layers, 0, np.zeros(0, np.float32)).layout
            rows = list(table.sketch_sizes(ratio, allocation))
            entries.append(
                {"sizes": layers, "ratio": bits64(ratio), "allocation": bits64(allocation), "sketches": rows}
            )
    return entries


def transforms() -> list[dict[str, Any]]:
    entries = []
    for exponent in (0, 1, 3, 7):
        values = floats(1 << exponent, 1, exponent)
        result = fwht_(torch.from_numpy(values.copy())).numpy()
        entries.append({"input": bits32(values), "output": bits32(result)})
    return entries


def threshold_vectors() -> dict[str, Any]:
    pooled = [(0.0, 1.0), (0.1, 0.3), (-1e-3, 7e-5), (5.0, 0.0), (1e-40, 1e-42), (3e38, 2e38), (-3.4e38, 3.4e38)]
    thresholds, binned = [], []
    for index, ((mean, deviation), count) in enumerate(zip(pooled, (7, 2, 1, 3, 5, 7, 3), strict=True)):
        mean32, deviation32 = np.float32([mean]), np.float32([deviation])
        tau = thresholds_of(mean32, deviation32, normal_quantiles(count))[0]
        thresholds.append({"mean": bits32(mean32)[0], "deviation": bits32(deviation32)[0], "thresholds": bits32(tau)})
        # Each threshold itself, its two neighbours, and some values around them; no sketch has an infinite entry.
        beside = [np.nextafter(tau, np.float32(side)) for side in (-np.inf, np.inf)]
        with np.errstate(over="ignore"):
            around = mean32 + 4 * deviation32 * floats(8, 2, index)
        values = np.concatenate([tau, *beside, around]).astype(np.float32)
        values = values[np.isfinite(values)]
        chosen = symbols_of(torch.from_numpy(values)[None], torch.from_numpy(tau)[None], [len(values)])[0]
        binned.append({"thresholds": bits32(tau), "values": bits32(values), "symbols": chosen.tolist()})
    quantiles = [{"thresholds": t, "quantiles": bits32(normal_quantiles(t))} for t in (1, 2, 3, 7, 15)]
    # Among those of 198, 164 and 93 are the five that lie closest to the middle between two float32 numbers.
    boundaries = [{"thresholds": t, "boundaries": bits32(lloyd_max(t + 1)[1])} for t in (1, 2, 3, 7, 15, 93, 164, 198)]
    return {"quantiles": quantiles, "lloyd_max": boundaries, "thresholds": thresholds, "symbols": binned}


def pools() -> list[dict[str, Any]]:
    """One layer of some clients; sums whose order matters, and the ends of float32."""
    cases = [
        ((5, 17, 12), (0.1, -0.2, 0.3), (0.01, 0.04, 0.0)),
        ((1, 1, 1, 1), (2.0**60, 3.0, -(2.0**60), 5.0), (0.0, 0.0, 0.0, 0.0)),
        ((2**32 - 1, 2**32 - 1, 1), (1e-3, -1e-3, 7.0), (1e-6, 2e-6, 3.0)),
        ((5, 17, 12), (0.0, 3.4e38, 3.4e38), (3.4e38, 0.0, 1.0)),
        ((5, 17, 12), (1e-45, 0.0, -1e-45), (1e-45, 0.0, 1e-45)),
    ]
    entries = []
    for samples, means, variances in cases:
        given = np.float32(means), np.float32(variances)
        mean, deviation = pool_statistics(samples, given[0][:, None], given[1][:, None])
        known = {"samples": list(samples), "means": bits32(given[0]), "variances": bits32(given[1])}
        entries.append({**known, "mean": bits32(mean)[0], "deviation": bits32(deviation)[0]})
    return entries


def votes() -> list[dict[str, Any]]:
    entries = []
    weights = {1: (1, 1), 2: (5, 17, 12), 7: (300, 1, 200, 99), 255: (2**32 - 1, 2**32 - 1, 1)}
    for thresholds, samples in weights.items():
        ballots = [symbols(10, thresholds + 1, 3, thresholds, client) for client in range(len(samples))]
        vote = Vote(10, thresholds)
        for weight, ballot in zip(samples, ballots, strict=True):
            vote.add(ballot, weight)
        known = {"thresholds": thresholds, "samples": list(samples), "symbols": [each.tolist() for each in ballots]}
        entries.append({**known, "consensus": vote.result().tolist()})
    return entries


def medians() -> list[dict[str, Any]]:
    """Halves that are just reached and just missed, equal values, zeros of both signs, and no voters."""
    cases = [
        ((1,), (2.5,)),
        ((1, 1), (3.0, 2.0)),
        ((5, 17, 12), (3.0, 2.0, 1.0)),
        ((5, 17, 12), (1.0, 2.0, 1.0)),
        ((5, 18, 12), (1.0, 2.0, 1.0)),
        ((5, 17, 12), (2.0, 0.0, 1.0)),
        ((7, 7, 7, 7), (4.0, 1.0, 3.0, 2.0)),
        ((3, 9, 3), (0.0, -0.0, 1e-45)),
        ((4, 2), (0.0, 0.0)),
        ((2**32 - 1, 2**32 - 1, 1), (1.0, 2.0, 3.0)),
    ]
    found = [bits32(weighted_medians(samples, np.float32(values)[:, None]))[0] for samples, values in cases]
    return [
        {"samples": list(samples), "values": bits32(values), "median": median}
        for (samples, values), median in zip(cases, found, strict=True)
    ]


def packed() -> list[dict[str, Any]]:
    entries = []
    for levels in (2, 3, 4, 5, 7, 8, 10, 16, 100, 128, 255, 256):
        size = block_shape(levels)[0]
        counts = (1, 11) if levels & (levels - 1) == 0 else (1, size, 2 * size + 3)
        some = [symbols(count, levels, 4, levels, count) for count in counts]
        entries += [
            {"levels": levels, "symbols": chosen.tolist(), "bytes": pack(chosen, levels).hex()}
            for chosen in (*some, np.full(9, levels - 1, np.uint8))
        ]
    return entries
