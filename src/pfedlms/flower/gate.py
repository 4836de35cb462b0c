"""Which nodes the gate lets in: each place belongs to one key, for which Flower assigns a node id. On the server:

    python -m pfedlms.flower.gate register FOLDER     give place K to the key keys/node-K.pub
    python -m pfedlms.flower.gate revoke FOLDER K     shut node K out
    python -m pfedlms.flower.gate write FOLDER        write what gate.conf includes: address, keys, and size limits
    python -m pfedlms.flower.gate started FOLDER …    log who starts a run, and approve the app on the server

`environment.sh` exports PORT, LINK_PORT, GATE_HOST and MAX_BODY.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from pfedlms.deploy.nodes import message_bytes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.errors import PfedlmsError, UsageError, printable
from pfedlms.files import write_atomically
from pfedlms.flower import approval, audit
from pfedlms.flower.config import app_settings, has_parts_in_python, read_places
from pfedlms.flower.folder import NAME

PLACES, AUDIT = "places.json", "audit/server.jsonl"
_OVERHEAD = 16 * 1024
"""Bytes around a message: envelope, reports, Flower's records."""
_CUSTOM_MODEL_BODY = 64 << 20
"""Bytes of the largest body if a model is given in Python, so that its messages are not known here."""


# --- registration


def register(folder: Path) -> None:
    """Register new keys, revoke those that they replace, and open the gate to the new ones. A revoked key is so for
    good, so all files are checked before anything changes, and a key is revoked only once the new one has its place."""
    places = read_places(folder / PLACES)
    keys = _public_keys(folder, places)
    nodes, replaced, problems = _registered_nodes(folder), dict[int, int](), list[str]()
    for place, key in sorted(keys.items()):
        before = places.get(place)
        if before and before["key"] == key and before["node"] in nodes:
            print(f"place {place} is of node {before['node']}, as before")
            continue
        try:
            node = _register_key(folder, folder / "keys" / f"node-{place}.pub", key, nodes)
        except UsageError as error:
            problems.append(str(error))
            continue
        places[place] = {"node": node, "key": key}
        write_places(folder, places)
        audit.append(folder / AUDIT, "registered", place=place, node=node, key=key)
        print(f"place {place} is of node {node}")
        if before:
            replaced[before["node"]] = place
    for node in replaced.keys() & nodes - {entry["node"] for entry in places.values()}:
        try:
            _unregister(folder, replaced[node], node, nodes)
        except UsageError as error:
            problems.append(str(error))
    _reload(folder)
    if problems:
        raise UsageError("\n".join(problems))


def _public_keys(folder: Path, places: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """The public keys in keys/ by place. UsageError if one cannot be read or has two places."""
    files = (folder / "keys").glob("node-*.pub")
    named = {int(match[1]): file for file in files if (match := re.fullmatch(r"node-(\d+)\.pub", file.name))}
    if not named:
        raise UsageError(f"{folder / 'keys'}: got no node-K.pub; ./keys.sh K makes one, on the node's machine")
    keys = {place: file.read_text(encoding="utf-8", errors="replace").strip() for place, file in named.items()}
    owners = dict[bytes, int]()
    for place, key in sorted(({place: entry["key"] for place, entry in places.items()} | keys).items()):
        try:
            pem = _pem(key)
        except (ValueError, UnsupportedAlgorithm) as error:
            file = named.get(place, PLACES)
            raise UsageError(f"{file}: is no public key of a node, expected one that ./keys.sh K has made") from error
        if (other := owners.setdefault(pem, place)) != place:
            raise UsageError(f"keys/node-{place}.pub: is the key of place {other}, too; copy that of node {place}")
    return keys


def revoke(folder: Path, *named: str) -> None:
    """Shut the nodes of these places out, and free the places."""
    places = read_places(folder / PLACES)
    if not named or not set(named) <= set(map(str, places)):
        known = ", ".join(map(str, sorted(places))) or "no place"
        raise UsageError(f"revoke: got {' '.join(named) or 'nothing'}, expected some of {known}")
    nodes = _registered_nodes(folder)
    for place in sorted(set(map(int, named))):
        node = places.pop(place)["node"]
        _unregister(folder, place, node, nodes)
        write_places(folder, places)
        public = folder / "keys" / f"node-{place}.pub"
        if public.exists():  # else the next ./register.sh would let it in again
            (folder / "keys" / "old").mkdir(mode=0o700, exist_ok=True)
            public.rename(folder / "keys" / "old" / f"{public.name}.revoked-{os.getpid()}")
        print(f"place {place} is free; a new key in keys/node-{place}.pub gets it by ./register.sh")
        _reload(folder)


def write_places(folder: Path, places: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the file that `read_places` reads; only its owner can read it."""

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps({str(place): entry for place, entry in sorted(places.items())}, indent=1).encode())

    write_atomically(folder / PLACES, write)


def _registered_nodes(folder: Path) -> set[int]:
    """Ids of the nodes that the SuperLink lets in."""
    done = call_flwr(folder, "supernode", "list", NAME, "--format", "json")
    try:
        nodes = json.loads(done.stdout)["nodes"]
        return {int(node["node-id"]) for node in nodes if node["status"] != "unregistered"}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the registered nodes are not known: {_said(done)}; is superlink.sh running?") from error


def _register_key(folder: Path, file: Path, key: str, nodes: Collection[int]) -> int:
    """Register a key with Flower. Returns its node id, also if the key was registered before."""
    done = call_flwr(folder, "supernode", "register", str(file.resolve()), NAME, "--format", "json")
    if match := re.search(r'"node-id":\s*"?(\d+)', done.stdout):
        return int(match[1])
    if "code: 23" in done.stdout + done.stderr:  # it is registered; Flower has its id in the database only
        with closing(sqlite3.connect(f"file:{folder / 'superlink.db'}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT node_id FROM node WHERE public_key = ?", (_pem(key),)).fetchone()
        if row is not None and (node := int(row[0]) % 2**64) in nodes:
            return node
        raise UsageError(f"{file}: this key was revoked, which cannot be undone; ./keys.sh --rotate K makes a new one")
    raise UsageError(f"{file}: is not registered: {_said(done)}; is superlink.sh running?")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return printable((done.stderr or done.stdout).strip())


def _unregister(folder: Path, place: int, node: int, registered: Collection[int]) -> None:
    """Revoke a node's key; UsageError if Flower did not, whose exit code is 0 then, too."""
    if node in registered:
        done = call_flwr(folder, "supernode", "unregister", str(node), NAME, "--format", "json")
        if not re.search(r'"success":\s*true', done.stdout):
            repeat = f"repeat ./flwr.sh supernode unregister {node} {NAME}, or ./revoke.sh {place}"
            raise UsageError(f"node {node} of place {place} is not revoked: {_said(done)}; {repeat}")
    audit.append(folder / AUDIT, "revoked", place=place, node=node)
    print(f"node {node} of place {place} is revoked")


def call_flwr(folder: Path, *arguments: str, timeout: float | None = 120) -> subprocess.CompletedProcess[str]:
    """Call the `flwr` of this Python environment with the folder's server; paths are from the folder."""
    here, path = folder.resolve(), f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FLWR_HOME": str(here / "flwr")}
    command = [str(here / "flwr.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def _reload(folder: Path) -> None:
    """Make the gate read its keys again, if it runs."""
    pid = folder / "gate" / "nginx.pid"
    if pid.exists() and pid.read_text().strip():
        done = subprocess.run([str(folder / "gate.sh"), "--reload"], capture_output=True, text=True, timeout=60)
        if done.returncode and "No such process" not in done.stderr:  # nginx that was killed leaves its file
            raise UsageError(f"the gate did not read its keys again: {printable(done.stderr.strip())}; restart gate.sh")


# --- what nginx includes


def largest_body(folder: Path) -> int:
    """Bytes of the largest request that a node sends."""
    config, _ = app_settings(folder / "app")
    if has_parts_in_python(config):
        return _CUSTOM_MODEL_BODY
    return _OVERHEAD + sum(message_bytes(RunSetup(config)))


def _pem(public_key: str) -> bytes:
    """A public key as Flower stores it."""
    key = load_ssh_public_key(public_key.encode())
    if not isinstance(key, EllipticCurvePublicKey):
        raise ValueError("Flower takes keys of elliptic curves only")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_header(public_key: str) -> str:
    """A public key as Flower's nodes send it in a header."""
    return b64encode(_pem(public_key)).decode()


def write_includes(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Write the files in gate/, which gate.conf includes."""
    port, link, host = (environment.get(name, "") for name in ("PORT", "LINK_PORT", "GATE_HOST"))
    places = read_places(folder / PLACES)
    hosts = [host] if host else ["0.0.0.0", *(["[::]"] if socket.has_dualstack_ipv6() else [])]
    size = environment.get("MAX_BODY") or str(largest_body(folder))
    rate = 20 + 10 * max(1, len(places))
    (folder / "gate" / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in {
        "listen.conf": "".join(f"listen {host}:{port} ssl;\n" for host in hosts),
        "link.conf": f"upstream superlink {{ server 127.0.0.1:{link}; keepalive 16; }}\n",
        "keys.conf": "".join(f'"{key_header(entry["key"])}" "{place}";\n' for place, entry in sorted(places.items())),
        "size.conf": f"client_max_body_size {int(size)};\n",
        "rate.conf": f"limit_req_zone $binary_remote_addr zone=requests:1m rate={rate}r/s;\n"
        "limit_conn_zone $binary_remote_addr zone=connections:1m;\n",
        # Without it, the workers of a gate that root starts run as a user who cannot read this folder.
        "user.conf": "user root root;\n" if os.geteuid() == 0 else "",
    }.items():
        (folder / "gate" / name).write_text(text, encoding="utf-8")


# --- commands


def log_start(folder: Path, *arguments: str) -> None:
    """Log who starts a run on the server, and with which app. The server approves the app in this folder."""
    settings = approval.run_config(arguments)
    entry = approval.approve(folder, settings, approval.SERVER)
    user = {"user": getpass.getuser(), "uid": os.getuid(), "from": os.environ.get("SSH_CONNECTION", "this machine")}
    audit.append(folder / AUDIT, "start", **user, app=entry["app"], settings=settings)


COMMANDS: dict[str, Callable[..., None]] = {
    "register": register, "revoke": revoke, "write": write_includes, "started": log_start
}  # fmt: skip


def main(command: str = "", folder: str = "", *arguments: str) -> int:
    try:
        if command not in COMMANDS:
            raise UsageError(f"gate: got {command!r}, expected one of {', '.join(COMMANDS)}")
        COMMANDS[command](Path(folder), *arguments)
    except PfedlmsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
