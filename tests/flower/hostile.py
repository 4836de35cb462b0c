"""What nodes may do that are not as they should be: ATTACK in the environment of a node says what. It goes into the
app's folder; the handler of requests is that of the package, and what it returns is changed."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ATTACK = os.environ.get("ATTACK", "")
CLAIM = 1_000_000
APP = '''"""As `deploy init` writes it, but for nodes that are told to attack."""

from pathlib import Path

import hostile

FILE = Path(__file__).with_name("pfedlms.toml")
hostile.arm()

from pfedlms import flower

server = flower.server(FILE)
client = flower.client(hostile.file(FILE))
'''


def arm() -> None:
    """Where the environment says so."""
    if ATTACK == "version":
        import pfedlms

        pfedlms.__version__ = "0.0.9"
    elif ATTACK in CHANGES:
        from pfedlms.deploy import Node
        from pfedlms.flower import client_app

        client_app.left = lambda *_: {"event": "reply"}  # an honest node could not note such a reply in its audit log
        handle = Node.handle
        Node.handle = lambda self, request: CHANGES[ATTACK](handle(self, request), self)  # type: ignore[method-assign]


def file(own: Path) -> Path:
    """The configuration a node has, be it another than the server's."""
    if ATTACK != "settings":
        return own
    other = own.with_name("other.toml")
    other.write_text(own.read_text().replace("learning_rate = 0.1", "learning_rate = 0.2"))
    return other


def garbage(said: bytes, node: object) -> bytes:
    return b"garbage" * 1000


def replay(said: bytes, node: object) -> bytes:
    """The first reply, again and again."""
    first: Path = node.path.with_suffix(".first")  # type: ignore[attr-defined]
    if not first.exists():
        first.write_bytes(said)
    return first.read_bytes()


def enormous(said: bytes, node: object) -> bytes:
    """A length of 2⁶⁰ bytes."""
    return said[:32] + struct.pack("<Q", 1 << 60) + said[40:]


def not_a_number(said: bytes, node: object) -> bytes:
    return _messages(said, lambda index, data: struct.pack_into("<f", data, len(data) - 4, float("nan")), first=True)


def changing(said: bytes, node: object) -> bytes:
    """One more sample in the second message of a round than in the first."""
    return _messages(said, lambda index, data: _add(data, 1) if index else None)


def heavy(said: bytes, node: object) -> bytes:
    """A million samples, in everything it says."""
    from pfedlms.deploy.envelope import Code, decode

    data = _messages(said, lambda index, data: struct.pack_into("<I", data, 16, CLAIM))
    whole = decode(data)
    records = [
        replace(each, data=struct.pack("<I", CLAIM) + bytes(each.data)[4:]) if each.code == Code.TRAIN else each
        for each in whole.records
    ]
    return replace(whole, records=tuple(records)).encode()


CHANGES: dict[str, Callable[[bytes, object], bytes]] = {
    each.__name__: each for each in (garbage, replay, enormous, not_a_number, changing, heavy)
}


def _messages(said: bytes, change: Callable[[int, bytearray], None], first: bool = False) -> bytes:
    """With its messages changed, by exchange, and checksums that fit; or that of the first exchange alone."""
    from pfedlms.deploy.envelope import Code, decode

    whole, records = decode(said), []
    for each in whole.records:
        if each.code == Code.SEND and not (first and each.index):
            data = bytearray(each.data)
            change(each.index, data)
            data[36:40] = struct.pack("<I", zlib.crc32(bytes(data[:36]) + bytes(data[40:])))
            each = replace(each, data=bytes(data))
        records.append(each)
    return replace(whole, records=tuple(records)).encode()


def _add(data: bytearray, samples: int) -> None:
    struct.pack_into("<I", data, 16, struct.unpack_from("<I", data, 16)[0] + samples)
