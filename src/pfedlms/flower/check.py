"""`pfedlms deploy check`: what would keep a run from starting, found before it starts."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pfedlms import __version__
from pfedlms.deploy.ground import Ground
from pfedlms.errors import PfedlmsError, UsageError
from pfedlms.experiment.config import CUSTOM, Config
from pfedlms.flower import MISSING
from pfedlms.flower.folder import NAME
from pfedlms.flower.keys import configured
from pfedlms.flower.log import CHECKED

FLOWER = (1, 41)
"""The version whose commands the folder's scripts are written for."""
_SECONDS = 10.0
_WAIT = 15


@dataclass(frozen=True)
class Found:
    what: str
    said: str
    wrong: bool = False


def check(folder: Path, server: str | None = None) -> list[Found]:
    """Versions, configuration with its digest, whether the server can be reached by TLS; and, unless a `server` is
    named, whether its nodes fit, for which they are asked in a run of their own."""
    app = folder / "app"
    if not (app / "pyproject.toml").is_file():
        raise UsageError(f"{folder}: got no app/pyproject.toml, expected a folder of: pfedlms deploy init {folder}")
    found = [_flower(), *_configuration(app)]
    address = server or _address(folder)
    if server is None and (other := _other_port(folder, address)):
        found.append(other)
    found.append(_reached(address, folder / "certificates" / "ca.crt"))
    if server is None and not any(each.wrong for each in found):
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
        declared = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
        flat = {f"{section}.{key}": value for section, own in declared.items() for key, value in own.items()}
        config, flower = configured(app / "pfedlms.toml", flat)
        flower.pinned(config.data.clients)
        return [Found("configuration", f"{config.method}, {config.data.clients} places, digest {_digest(config)}")]
    except (KeyError, AttributeError, ValueError) as error:
        return [Found("configuration", f"{app / 'pyproject.toml'}: no run config ({error})", wrong=True)]
    except PfedlmsError as error:
        return [Found("configuration", line, wrong=True) for line in str(error).splitlines()]


def _digest(config: Config) -> str:
    in_python = CUSTOM in (config.model.name, config.train.loss, config.train.metric)
    return "as app.py makes it" if in_python else Ground(config).run.hex()


def _address(folder: Path) -> str:
    file = folder / "flwr" / "config.toml"
    try:
        return str(tomllib.loads(file.read_text(encoding="utf-8"))["superlink"][NAME]["address"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{file}: got no superlink.{NAME}.address ({error}); name it with --server") from error


def _other_port(folder: Path, address: str) -> Found | None:
    """What is wrong if nodes are told another port than `flwr`."""
    file = folder / "environment.sh"
    named = re.search(r"^PORT=\$\{PORT:-(\d+)\}", file.read_text(encoding="utf-8") if file.is_file() else "", re.M)
    if named is None or address.endswith(f":{named[1]}"):
        return None
    return Found(
        "server", f"environment.sh has port {named[1]}, flwr/config.toml {address}; edit one of them", wrong=True
    )


def _reached(address: str, authority: Path) -> Found:
    """By TLS, with the folder's authority."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--server: got {address!r}, expected HOST:PORT, for example 192.168.0.10:8000")
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as safe,
        ):
            return Found("server", f"{address} is there, {safe.version()}, its certificate is of {authority.name}")
    except FileNotFoundError:
        said = f"{authority}: is missing; certificates.sh makes it on the server, copy it from there"
    except ssl.SSLCertVerificationError as error:
        said = f"{address}: its certificate is refused ({error.verify_message}); is ca.crt its, SERVER its name?"
    except ssl.SSLError as error:
        said = f"{address}: no TLS there ({error.reason}); start it with superlink.sh"
    except OSError as error:
        said = f"{address}: cannot be reached ({error.strerror or error}); is superlink.sh running, the port open?"
    return Found("server", said, wrong=True)


def _nodes(folder: Path) -> list[Found]:
    """What nodes say in a run that asks them and ends."""
    command = [_beside("flwr"), "run", str(folder / "app"), NAME, "--stream", "--run-config"]
    environment: dict[str, Any] = {
        **os.environ, "FLWR_HOME": str((folder / "flwr").resolve()), "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }  # fmt: skip
    done = subprocess.run(
        [*command, f"flower.check=true flower.wait={_WAIT}"],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    plain = [re.sub(r"\x1b\[\d+m", "", line) for line in done.stdout.splitlines()]
    lines = [line for each in plain if (line := re.sub(r"^INFO\s*:", "", each).strip())]
    said = [line.removeprefix("pfedlms: ") for line in lines if re.match(r"pfedlms: |node \d+: ", line)]
    shown = said or lines[-5:] or ["flwr run: said nothing"]
    wrong = [bool(re.match(r"node \d+: |client \d+: (?!as the server)", line)) for line in shown]
    # Flower's own exit code says nothing of how a run ended.
    if not any(wrong) and not any(line.startswith(CHECKED) for line in lines):
        wrong[-1] = True
    return [Found("nodes", line, bad) for line, bad in zip(shown, wrong, strict=True)]


def _beside(name: str) -> str:
    """A command of the same environment."""
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else name
