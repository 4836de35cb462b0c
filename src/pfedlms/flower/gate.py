"""What gate.conf includes: address, port, keys of registered nodes, and limits that follow from the model.

    python -m pfedlms.flower.gate FOLDER

`environment.sh` exports PORT, LINK_PORT, GATE_HOST and MAX_BODY.
"""

from __future__ import annotations

import os
import socket
import sys
from base64 import b64encode
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from pfedlms.deploy.ground import Ground
from pfedlms.deploy.nodes import message_bytes
from pfedlms.errors import UsageError
from pfedlms.experiment.config import CUSTOM
from pfedlms.flower.keys import own_settings, read_places

_AROUND = 16 * 1024
"""Bytes around a message: envelope, reports, Flower's records."""
_UNKNOWN = 64 << 20
"""Largest body where a model is given in Python."""
FLEET_PATHS = tuple(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
        "confirm-message-received", "get-run", "get-fab", "pull-object", "push-object",
    )
)  # fmt: skip
"""What a node of flwr 1.41 with a key calls; gate.conf passes these and nothing else."""


def largest_body(folder: Path) -> int:
    """Bytes of the largest request that a node sends."""
    config, _ = own_settings(folder / "app")
    if CUSTOM in (config.model.name, config.train.loss, config.train.metric):
        return _UNKNOWN
    return _AROUND + sum(message_bytes(Ground(config)))


def pem(public_key: str) -> bytes:
    """A public key as Flower keeps it."""
    return load_ssh_public_key(public_key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def header(public_key: str) -> str:
    """A public key as Flower's nodes send it in a header."""
    return b64encode(pem(public_key)).decode()


def includes(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Texts of the files in gate/."""
    port, link, host = (environment.get(name, "") for name in ("PORT", "LINK_PORT", "GATE_HOST"))
    if not port.isdecimal() or not link.isdecimal():
        raise UsageError(f"environment.sh: got PORT={port!r} and LINK_PORT={link!r}, expected two numbers")
    places = read_places(folder / "places.json")
    hosts = [host] if host else ["0.0.0.0", *(["[::]"] if _has_ipv6() else [])]
    size = environment.get("MAX_BODY") or str(largest_body(folder))
    rate = 20 + 10 * max(1, len(places))
    return {
        "listen.conf": "".join(f"listen {each}:{port} ssl;\n" for each in hosts),
        "link.conf": f"upstream superlink {{ server 127.0.0.1:{link}; keepalive 16; }}\n",
        "keys.conf": "".join(f'"{header(each["key"])}" "{place}";\n' for place, each in sorted(places.items())),
        "size.conf": f"client_max_body_size {int(size)};\n",
        "rate.conf": f"limit_req_zone $binary_remote_addr zone=requests:1m rate={rate}r/s;\n"
        "limit_conn_zone $binary_remote_addr zone=connections:1m;\n",
        # Without it, workers of a gate that root starts are of a user who cannot read this folder.
        "user.conf": "user root root;\n" if os.geteuid() == 0 else "",
    }


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::", 0))
            return True
    except OSError:
        return False


def write_includes(folder: Path, environment: dict[str, str]) -> None:
    (folder / "gate" / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in includes(folder, environment).items():
        (folder / "gate" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_includes(Path(sys.argv[1]), dict(os.environ))
