"""The messages of one FedAvg round, every check included, against one thread that copies their bytes at each end.

    python benchmarks/messages.py [--model vgg11] [--clients 20] [--repeats 9] [--threads 16] [--json FILE]

A round is an upload of every client and one answer of the server. Each is written into a frame, summed, checked and
read into a row of a room, as the engine does it: one buffer for all frames, and a room for as many senders as fit in
64 MB. The bound copies the same numbers into that buffer and from there into that row, in one thread. First a frame is
asserted to be header, CRC-32 by zlib and numbers, and every number to arrive; then both take turns.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from kept import keep

from pfedlms.wire import Floats, Message
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, frame

PARAMETERS = {"dnn": 203_530, "vgg11": 9_799_844}  # 784-256-10; 100 classes
ROOM_BYTES = 64 << 20
DIGEST = bytes(8)
GOAL = 3.0  # times the copies, at most, on a host of 16 cores


class Round:
    """What is there before a round begins: the clients' models, a buffer for frames, and room for some senders."""

    def __init__(self, floats: int, clients: int) -> None:
        self.up, self.down = (Message(kind, (Floats("model", floats),)) for kind in (0, 1))
        self.models = np.random.default_rng(0).standard_normal((clients, floats), dtype=np.float32)
        self.buffer = bytearray(HEADER_BYTES + self.up.max_bytes)
        self.room = self.up.empty_values(max(1, min(clients, ROOM_BYTES // self.up.max_bytes)))
        self.bytes = (clients + 1) * len(self.buffer)

    def row(self, sender: int) -> dict[str, np.ndarray]:
        return {name: array[sender % len(array)] for name, array in self.room.items()}

    def messages(self, *, check: bool = False) -> None:
        intake = Intake(self.up, DIGEST, 0, range(len(self.models)))
        for client, model in enumerate(self.models):
            self.send(self.up, intake, client, 17, model, check)
        self.send(self.down, Intake(self.down, DIGEST, 0, (SERVER,)), SERVER, 0, self.models[0], check)

    def send(self, message: Message, intake: Intake, sender: int, samples: int, model: np.ndarray, check: bool) -> None:
        sent = frame(message, {"model": model}, round=0, sender=sender, samples=samples, digest=DIGEST, out=self.buffer)
        received = intake.accept(sent, self.row(sender))
        if check:
            header = struct.pack("<4sBBHIIIQ8s", b"PFLM", 1, message.kind, 0, 0, sender, samples, model.nbytes, DIGEST)
            assert sent == header + struct.pack("<I", zlib.crc32(model, zlib.crc32(header))) + model.tobytes()
            assert received.values["model"].tobytes() == model.tobytes()

    def copies(self) -> None:
        payload = np.frombuffer(self.buffer, np.float32, offset=HEADER_BYTES)
        for sender, model in enumerate([*self.models, self.models[0]]):
            np.copyto(payload, model)
            np.copyto(self.row(sender)["model"], payload)

    def checksums(self) -> None:
        zlib.crc32(self.buffer)


def measure(floats: int, clients: int, repeats: int) -> dict[str, float]:
    played = Round(floats, clients)
    played.messages(check=True)
    tasks = {"messages": played.messages, "copies": played.copies, "checksum": played.checksums}
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - start)
    ratios = [ours / bound for ours, bound in zip(seconds["messages"], seconds["copies"], strict=True)]
    return {
        "floats": floats,
        "clients": clients,
        "bytes": played.bytes,
        "threads": torch.get_num_threads(),
        "messages_s": statistics.median(seconds["messages"]),
        "copies_s": statistics.median(seconds["copies"]),
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "zlib_gb_per_s": len(played.buffer) / 1e9 / statistics.median(seconds["checksum"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PARAMETERS), default="vgg11")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    row = measure(PARAMETERS[arguments.model], arguments.clients, arguments.repeats)
    print(f"{arguments.model}: {arguments.clients} uploads and one answer, {row['bytes'] / 1e6:,.1f} MB in frames;")
    print(
        f"{row['threads']} threads, median of {arguments.repeats}; zlib sums {row['zlib_gb_per_s']:.1f} GB/s a thread"
    )
    print(f"\nmessages, all checks    {1e3 * row['messages_s']:9.2f} ms")
    print(f"copies, one thread      {1e3 * row['copies_s']:9.2f} ms")
    print(f"messages / copies       {row['ratio']:9.2f}x  ({row['ratio_least']:.2f} to {row['ratio_most']:.2f})")
    print(f"goal on 16 cores        {GOAL:9.2f}x")
    if arguments.json:
        keep({"model": arguments.model, **row}, arguments.json)


if __name__ == "__main__":
    main()
