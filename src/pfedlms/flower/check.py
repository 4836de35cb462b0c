"""`pfedlms deploy check`: what would keep a run from starting, found before it starts."""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import tomllib
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from pfedlms import __version__
from pfedlms.deploy.ground import Ground
from pfedlms.errors import PfedlmsError, UsageError, printable
from pfedlms.flower import MISSING
from pfedlms.flower.approval import SERVER, approve
from pfedlms.flower.carrier import CHECK_RECORD
from pfedlms.flower.config import own_settings
from pfedlms.flower.folder import NAME, environment
from pfedlms.flower.gate import flwr
from pfedlms.settings import CUSTOM

FLOWER = (1, 41)
"""The version whose commands the folder's scripts are written for."""
_SECONDS = 10.0
_WAIT = 15
_CLOSED = (
    "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/pull-messages", "/docs",
)  # fmt: skip
"""Paths of the SuperLink that must not answer whoever has no key."""
_REFUSED = (401, 404, 405)
_SECRET = ("keys/*", "certificates/*.key", "state/*", "superlink.db")
_LISTEN = "0A"
"""How Linux names a socket that waits for connections."""


@dataclass(frozen=True)
class Found:
    what: str
    said: str
    wrong: bool = False


def check(folder: Path, server: str | None = None) -> list[Found]:
    """Versions, configuration with its digest, whether the gate can be reached by TLS and passes nothing but what nodes
    need; and, unless a `server` is named, whether the SuperLink is on loopback only, and whether nodes fit, for which
    they are asked in a run of their own."""
    named = environment(folder)
    if missing := {"SERVER", "PORT", "LINK_PORT"} - named.keys():
        raise UsageError(
            f"{folder / 'environment.sh'}: got no {', '.join(sorted(missing))}; bring the folder up to date: pfedlms "
            f"deploy upgrade {folder}"
        )
    named |= {name: os.environ[name] for name in named if name in os.environ}
    found = [_flower(), *_configuration(folder / "app"), *_readable(folder)]
    address = server or f"{named['SERVER']}:{named['PORT']}"
    reached = _reached(address, folder / "certificates" / "ca.crt")
    found.append(reached)
    if not reached.wrong:
        found.append(_doors(address, folder / "certificates" / "ca.crt"))
    if server is None:
        found += _link(folder, int(named["LINK_PORT"]))
        if not any(each.wrong for each in found):
            found += _nodes(folder)
    return found


def _flower() -> Found:
    try:
        here = version("flwr")
    except PackageNotFoundError:
        return Found("versions", MISSING, wrong=True)
    fits = tuple(map(int, re.findall(r"\d+", here)[:2])) == FLOWER
    wanted = "" if fits else f", expected {FLOWER[0]}.{FLOWER[1]}: pip install 'pfedlms[flower]'"
    return Found("versions", f"pfedlms {__version__}, flwr {here}{wanted}", not fits)


def _configuration(app: Path) -> list[Found]:
    """Of an app with a model, loss or metric given in Python, the server alone knows the digest."""
    try:
        config, flower = own_settings(app)
        flower.pinned(config.data.clients)
        in_python = CUSTOM in (config.model.name, config.train.loss, config.train.metric)
        digest = "as app.py makes it" if in_python else Ground(config).run.hex()
        return [Found("configuration", f"{config.method}, {config.data.clients} places, digest {digest}")]
    except (KeyError, AttributeError, ValueError) as error:
        return [Found("configuration", f"{app / 'pyproject.toml'}: no run config ({error})", wrong=True)]
    except PfedlmsError as error:
        return [Found("configuration", line, wrong=True) for line in str(error).splitlines()]


def _readable(folder: Path) -> list[Found]:
    """Secrets that other users of this machine can read."""
    if not folder.stat().st_mode & 0o007:
        return []
    held = [path for name in _SECRET for path in folder.glob(name) if path.suffix not in (".pub", ".crt")]
    open_to_all = [str(path.relative_to(folder)) for path in held if path.stat().st_mode & 0o007]
    said = f"others can read {', '.join(open_to_all[:3])}; chmod 700 {folder}"
    return [Found("files", said, wrong=True)] if open_to_all else []


def _link(folder: Path, port: int) -> list[Found]:
    """Whether the SuperLink listens on this machine's loopback addresses only, where `flwr` looks for it."""
    file, found = folder / "flwr" / "config.toml", list[Found]()
    try:
        address = str(tomllib.loads(file.read_text(encoding="utf-8"))["superlink"][NAME]["address"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{file}: got no superlink.{NAME}.address ({error})") from error
    if address != f"127.0.0.1:{port}":
        said = f"has {address}, expected 127.0.0.1:{port}, LINK_PORT of environment.sh; edit one of them"
        found.append(Found("superlink", f"flwr/config.toml {said}", wrong=True))
    addresses = listening(port)
    if outside := sorted(each for each in addresses if not each.is_loopback):
        said = f"listens on {', '.join(map(str, outside))}, port {port}, expected 127.0.0.1 alone"
        found.append(Found("superlink", f"{said}; start it with gate.sh", wrong=True))
    elif not addresses:
        found.append(Found("superlink", f"nothing listens on port {port}; is superlink.sh running?", wrong=True))
    return found or [Found("superlink", f"listens on {', '.join(map(str, sorted(addresses)))}, port {port}")]


def listening(port: int) -> set[IPv4Address | IPv6Address]:
    """Addresses of this machine on which somebody listens at a port."""
    found = set[IPv4Address | IPv6Address]()
    for file, size in (("/proc/net/tcp", 8), ("/proc/net/tcp6", 32)):
        for line in Path(file).read_text().splitlines()[1:] if Path(file).exists() else ():
            local, state = line.split()[1], line.split()[3]
            if state != _LISTEN or int(local[size + 1 :], 16) != port:
                continue
            # Words of four bytes, each in the machine's order.
            order = -1 if sys.byteorder == "little" else 1
            address = ip_address(b"".join(bytes.fromhex(local[i : i + 8])[::order] for i in range(0, size, 8)))
            found.add(getattr(address, "ipv4_mapped", None) or address)
    return found


def _connection(address: str, authority: Path) -> HTTPSConnection:
    """By TLS, with the folder's authority; it is opened when it is used."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--server: got {address!r}, expected HOST:PORT, for example 192.168.0.10:8000")
    context = ssl.create_default_context(cafile=str(authority))
    return HTTPSConnection(host.strip("[]"), int(port), timeout=_SECONDS, context=context)


def _reached(address: str, authority: Path) -> Found:
    try:
        with closing(_connection(address, authority)) as opened:
            opened.connect()
            return Found(
                "server", f"{address} is there, {opened.sock.version()}, its certificate is of {authority.name}"
            )
    except FileNotFoundError:
        said = f"{authority}: is missing; certificates.sh makes it on the server, copy it from there"
    except ssl.SSLCertVerificationError as error:
        said = f"{address}: its certificate is refused ({error.verify_message}); is ca.crt its, SERVER its name?"
    except ssl.SSLError as error:
        said = f"{address}: no TLS there ({error.reason}); start it with gate.sh"
    except OSError as error:
        said = f"{address}: cannot be reached ({error.strerror or error}); is gate.sh running, the port open?"
    return Found("server", said, wrong=True)


def _doors(address: str, authority: Path) -> Found:
    """Whether anything but what nodes need answers at the address of the nodes."""
    for path in _CLOSED:
        try:
            with closing(_connection(address, authority)) as opened:
                opened.putrequest("POST", path, skip_accept_encoding=True)
                opened.putheader("Content-Type", "application/protobuf")
                opened.putheader("Content-Length", "0")
                opened.endheaders()
                status = opened.getresponse().status
        except (OSError, HTTPException) as error:
            return Found("doors", f"{address}{path}: no answer ({error or type(error).__name__})", wrong=True)
        if status not in _REFUSED:
            said = f"answers with {status}: whoever reaches this address can start runs, which are code on all machines"
            return Found("doors", f"{address}{path}: {said}; nodes must reach gate.sh, not the SuperLink", wrong=True)
    return Found("doors", f"{address} refuses {len(_CLOSED)} of the SuperLink's paths that are not for nodes")


def _nodes(folder: Path) -> list[Found]:
    """What nodes say in a run that asks them and ends."""
    approve(folder, {}, SERVER)
    settings = f"flower.check=true flower.wait={_WAIT}"
    done = flwr(folder, "run", str(folder / "app"), NAME, "--stream", "--run-config", settings, timeout=None)
    lines = [re.sub(r"\x1b\[\d+m", "", line).strip() for line in (done.stdout + done.stderr).splitlines()]
    records = [json.loads(line.partition(CHECK_RECORD)[2]) for line in lines if CHECK_RECORD + "{" in line]
    if records:
        return [Found("nodes", each["text"], each["wrong"]) for each in records]
    last = [line for line in lines if line][-5:] or ["flwr run: said nothing"]
    return [Found("nodes", printable(line), wrong=True) for line in last]
