"""The streaming vote over many simulated clients of `dnn` sketches: clients per second, and memory that does not grow.

    python benchmarks/vote.py [--clients 100 1000 10000] [--thresholds 7] [--ratio 0.1] [--json FILE]

First the streamed consensus is asserted to equal the batch formula and the upper weighted median on a subset. Then
every client's frame is checked, decoded and counted (intake + vote), and its symbols alone are counted (vote). A
client of the simulation is one of a few prepared messages under its own id; a copy of the same symbols is the lower
bound. Memory is traced in a run of its own, because tracing takes time: the peak of all that the server allocates
while the messages come in, but for the ids it has seen, which have a column of their own. It is asserted to be the
same for every number of clients.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
from kept import keep

from pfedlms.aggregate import Vote
from pfedlms.models.layout import flat_layout
from pfedlms.models.zoo import dnn
from pfedlms.wire import Message, Symbols
from pfedlms.wire.frames import Intake, frame

DIGEST = bytes(8)
PREPARED = 32  # different messages; more would only cost time to make
SAMPLES = 2_625  # training samples of a client: 70,000 images, three quarters of them, over 20 clients
FLAT = 1.01  # the peak may differ by this factor between the fewest and the most clients


def prepare(message: Message, seed: int) -> tuple[list[np.ndarray], list[bytes]]:
    """Symbols of some clients that agree more than chance would have it, and their frames."""
    (field,) = message.fields
    draw = np.random.default_rng(seed)
    common = draw.normal(size=sum(field.segments))
    edges = np.linspace(-1.5, 1.5, field.levels - 1)
    symbols = [
        np.searchsorted(edges, common + 0.7 * draw.normal(size=common.shape), side="right").astype(np.uint8)
        for _ in range(PREPARED)
    ]
    frames = [
        frame(message, {field.name: own}, round=0, sender=k, samples=weight(k), digest=DIGEST)
        for k, own in enumerate(symbols)
    ]
    return symbols, frames


def weight(client: int) -> int:
    """N_k: around SAMPLES, repeated with the prepared messages."""
    return SAMPLES - 16 + client % PREPARED


def addressed(prepared: bytes, client: int) -> bytes:
    """A prepared frame under another client's id."""
    header = prepared[:12] + struct.pack("<I", client) + prepared[16:36]
    return header + struct.pack("<I", zlib.crc32(prepared[40:], zlib.crc32(header))) + prepared[40:]


def serve(message: Message, thresholds: int, frames: list[bytes], clients: int, *, forgetful: bool = False) -> Vote:
    """What the server does in exchange B, one client after another; `forgetful` of the ids it has seen."""
    (field,) = message.fields
    intake, vote = Intake(message, DIGEST, 0, range(clients)), Vote(sum(field.segments), thresholds)
    for client in range(clients):
        if forgetful:
            intake = Intake(message, DIGEST, 0, range(clients))
        received = intake.accept(addressed(frames[client % PREPARED], client))
        vote.add(received.values[field.name], received.samples)
    return vote


def check(message: Message, thresholds: int, symbols: list[np.ndarray], frames: list[bytes], clients: int) -> None:
    """Streamed = batch formula = bin of the upper weighted median, over `clients` of the clients."""
    streamed = serve(message, thresholds, frames, clients).result()
    stacked = np.stack([symbols[client % PREPARED] for client in range(clients)])
    weights = np.array([weight(client) for client in range(clients)], dtype=np.int64)
    batch = np.zeros(stacked.shape[1], dtype=np.uint8)
    for t in range(1, thresholds + 1):
        batch += (weights @ np.where(stacked >= t, 1, -1)) >= 0
    assert np.array_equal(streamed, batch), "streamed vote and batch formula differ"

    order = np.argsort(stacked, axis=0, kind="stable")
    below = np.cumsum(weights[order], axis=0)
    # The first client, in ascending order of symbols, up to which more than half of the weight lies.
    first = np.argmax(2 * below > weights.sum(), axis=0)
    median = np.take_along_axis(np.take_along_axis(stacked, order, axis=0), first[None], axis=0)[0]
    assert np.array_equal(streamed, median), "streamed vote and weighted median differ"


def seen_bytes(clients: int) -> int:
    """Memory of the ids of `clients` clients: a set, and the numbers that are not shared (those above 256)."""
    return sys.getsizeof(set(range(clients))) + sum(sys.getsizeof(k) for k in range(257, clients))


def measure(
    message: Message, thresholds: int, symbols: list[np.ndarray], frames: list[bytes], clients: int
) -> dict[str, float]:
    """Seconds of intake + vote, of the vote alone and of copies; then the peak of memory."""
    start = time.perf_counter()
    vote = serve(message, thresholds, frames, clients)
    vote.result()
    served = time.perf_counter() - start

    start = time.perf_counter()
    alone = Vote(len(symbols[0]), thresholds)
    for client in range(clients):
        alone.add(symbols[client % PREPARED], weight(client))
    consensus = alone.result()
    voted = time.perf_counter() - start
    assert np.array_equal(consensus, vote.result())

    sink = np.empty_like(symbols[0])
    start = time.perf_counter()
    for client in range(clients):
        np.copyto(sink, symbols[client % PREPARED])
    copied = time.perf_counter() - start

    tracemalloc.start()
    serve(message, thresholds, frames, clients, forgetful=True).result()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "clients": clients,
        "served_per_second": clients / served,
        "voted_per_second": clients / voted,
        "vote_to_copy": voted / copied,
        "counter_bytes": vote.counts.nbytes,
        "peak_bytes": peak,
        "seen_bytes": seen_bytes(clients),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--thresholds", type=int, default=7)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    arguments = parser.parse_args()

    sizes = flat_layout(dnn((1, 28, 28), 10)).sketch_sizes(arguments.ratio)
    message = Message(2, (Symbols("symbols", sizes, arguments.thresholds + 1),))
    symbols, frames = prepare(message, seed=1)
    check(message, arguments.thresholds, symbols, frames, clients=100)

    print(f"dnn 784-256-10, ratio {arguments.ratio:g}: {sum(sizes):,} symbols of {arguments.thresholds + 1} levels,")
    print(f"{len(frames[0]):,} bytes a frame; one thread\n")
    print("clients  intake+vote    vote alone  vote/copy   counters       peak   ids seen")
    rows = []
    for clients in arguments.clients:
        row = measure(message, arguments.thresholds, symbols, frames, clients)
        rows.append(row)
        print(
            f"{clients:7,d}  {row['served_per_second']:9,.0f}/s  {row['voted_per_second']:10,.0f}/s"
            f"  {row['vote_to_copy']:8.1f}x  {row['counter_bytes'] / 1e3:6,.0f} kB"
            f"  {row['peak_bytes'] / 1e3:6,.0f} kB  {row['seen_bytes'] / 1e3:6,.0f} kB"
        )
    # Counters are as wide as N needs, so few clients (N below 65,536) take less; the rest must not differ.
    peaks = [row["peak_bytes"] for row in rows if row["counter_bytes"] == rows[-1]["counter_bytes"]]
    assert max(peaks) <= FLAT * min(peaks), f"the server's memory grows with the number of clients: {peaks}"
    if arguments.json:
        settings = {"thresholds": arguments.thresholds, "ratio": arguments.ratio, "symbols": sum(sizes)}
        keep({**settings, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
