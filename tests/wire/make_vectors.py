"""Make tests/wire/vectors.json, the test vectors of docs/protocol.md, from the package.

    python tests/wire/make_vectors.py            writes the file
    python tests/wire/make_vectors.py --check    compares the file with what the package computes

Models come from the package's own integer generator, so that nothing here depends on a framework's random numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vector_makers.agreements import agreements, as_settings, task
from vector_makers.fields import fields, refused_fields
from vector_makers.notation import SAMPLES
from vector_makers.numbers import (
    allocations,
    generator_vectors,
    medians,
    packed,
    pools,
    sizes,
    threshold_vectors,
    transforms,
    votes,
)
from vector_makers.refusals import checked, refused
from vector_makers.runs import fedavg, run, stc
from vector_makers.sketchvote import sketchmean, sketchvote

from pfedlms.wire.codec import block_shape

__all__ = ["FILE", "SAMPLES", "as_settings", "checked", "task", "text", "vectors"]

FILE = Path(__file__).with_name("vectors.json")


def vectors() -> dict[str, Any]:
    runs = [
        run([18, 8], seed=7, rounds=[0], ratio=0.25),
        run([18, 1, 70, 8], seed=2**63 - 1, rounds=[1, 2], zero_last=True, thresholds=2, ratio=0.5, refresh=2),
        run([18, 8], seed=0, rounds=[5], thresholds=1, ratio=0.5, layerwise=False, strength=0.01, smoothing=0.2),
        run([18, 8], seed=3, rounds=[0], thresholds=4, ratio=0.5, spacing="lloyd-max"),
        run([18, 1], seed=4, rounds=[0, 1, 2], ratio=0.5, huge_last=True),
    ]
    fedavg_round, stc_rounds = fedavg(), stc()
    all_three = {0, 1, 2}
    vote_runs = [
        # Client 2 misses two answers, later three, which have more bytes than the model.
        sketchvote(
            [18, 8],
            seed=7,
            phases=[all_three, all_three, {0, 1}, {0, 1}, all_three, {0, 1}, {0, 1}, {0, 1}, all_three, all_three],
            silent={0: {2: 1}},
            ratio=0.25,
            check_every=3,
        ),
        # No client votes in layer 1 in round 0.
        sketchvote(
            [18, 1, 70, 8],
            seed=2**63 - 1,
            phases=[all_three, {0, 2}, all_three, all_three],
            silent={0: {0: 1, 1: 1, 2: 1}},
            ratio=0.3,
            allocation=0.5,
            gain=0.7,
            refresh=2,
            check_every=0,
        ),
        # Half of client 1's y of layer 1 is zero in round 0; in round 2 client 0 is out of sync and sends its digest.
        # Client 2 misses four answers of 57 bytes; w has 40 + 4 · 47.
        sketchvote(
            [39, 8],
            seed=5,
            phases=[*[all_three] * 4, *[{0, 1}] * 4, all_three, all_three],
            silent={},
            even={0: {1: 1}},
            drifted={2: 0},
            ratio=1.0,
            check_every=2,
        ),
    ]
    mean_runs = [
        # Client 2 misses one answer, then some, then is absent until w has fewer bytes than all other ways to catch up.
        sketchmean(
            [18, 8],
            7,
            [all_three, {0, 1}, *[all_three] * 2, *[{0, 1}] * 5, all_three, *[{0, 1}] * 14, all_three, all_three],
            {0: {2: 1}},
            ratio=0.25,
            answer=0.1,
            gain=3.0,
            check_every=3,
        ),
        # Few entries change, so that those since the client's w, or since w⁰, have the fewest bytes.
        sketchmean(
            [70, 8],
            2**63 - 1,
            [{0, 1}, {0, 1}, {0, 1, 2}, *[{0, 1}] * 12, {0, 1, 2}, {0, 1}],
            {1: {0: 1, 1: 1}},
            lost={8: 1},
            ratio=0.5,
            answer=0.01,
            gain=1.0,
            refresh=2,
            check_every=0,
        ),
        # Nearly all entries change in every round.
        sketchmean([18, 8], 3, [all_three, *[{0, 1}] * 5, all_three, all_three], {}, ratio=1.0, answer=0.9, gain=0.5),
        # As the third of sketchvote. Client 2 first takes part when the entries changed since w⁰ are those that differ
        # from it, so that both frames have the same size.
        sketchmean(
            [70, 8],
            5,
            [*[{0, 1}] * 3, *[all_three] * 3],
            {},
            even={0: {1: 1}},
            drifted={4: 0},
            ratio=1.0,
            answer=0.01,
            gain=1.0,
            check_every=2,
        ),
    ]
    digests = [entry["agreement"] for entry in (*runs, fedavg_round, stc_rounds, *vote_runs, *mean_runs)]
    return {
        "protocol": 1,
        **generator_vectors(),
        "sizes": sizes(),
        "transforms": transforms(),
        **threshold_vectors(),
        "votes": votes(),
        "blocks": [[levels, *block_shape(levels)] for levels in range(2, 257)],
        "packed": packed(),
        "fields": fields(),
        "digests": [{key: entry[key] for key in ("text", "sha256", "digest")} for entry in digests],
        "runs": runs,
        "fedavg": fedavg_round,
        "stc": stc_rounds,
        "refused": refused(runs),
        "allocations": allocations(),
        "medians": medians(),
        "sketchvote": vote_runs,
        "sketchmean": mean_runs,
        "refused_fields": refused_fields(),
        "pools": pools(),
        "agreements": agreements(),
    }


def render(value: Any, indent: str = "") -> str:
    """JSON with one line for each value without objects in it, so that a change of it is a few changed lines."""
    deeper = indent + " "
    if isinstance(value, dict) and (len(json.dumps(value)) > 110 or not indent):
        lines = [f"{deeper}{json.dumps(key)}: {render(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(deeper + render(item, deeper) for item in value) + f"\n{indent}]"
    return json.dumps(value)


def text() -> str:
    return render(vectors()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    arguments = parser.parse_args()
    if not arguments.check:
        FILE.write_text(text(), encoding="ascii")
    elif FILE.read_text(encoding="ascii") != text():
        raise SystemExit(
            f"{FILE.name}: differs from what the package computes; read docs/protocol.md, section 13, first"
        )


if __name__ == "__main__":
    main()
