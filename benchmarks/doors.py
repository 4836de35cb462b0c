"""Mutated requests and replies at both ends in process, mutated HTTP requests at a real gate, and mutated messages
through real processes: what is accepted and how much memory it takes.

    python benchmarks/doors.py --count 100000 --http 100000 --messages 100 --json benchmarks/results/doors.json
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kept import commit
from mutations import mutated, with_checksum

from pfedlms.deploy import Coordinator, Node
from pfedlms.deploy.envelope import check_reply, decode, read_reply
from pfedlms.deploy.nodes import message_bytes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.engine.transport import Code
from pfedlms.errors import WireError
from pfedlms.experiment.config import Config, load_config
from pfedlms.flower.check import listening_addresses
from pfedlms.flower.folder import write_folder
from pfedlms.flower.gate import key_header, write_includes, write_places
from pfedlms.flower.signing import SealedNode, SigningTransport
from pfedlms.wire.frames import Intake

KEY = Ed25519PrivateKey.generate()


class Recording:
    """Nodes in this process; the last requests and replies."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.nodes = {client: Node(config, client, folder) for client in range(config.data.clients)}
        self.requests: dict[int, bytes] = {}
        self.replies: dict[int, bytes] = {}

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        self.requests = requests
        self.replies = {k: SealedNode(self.nodes[k], KEY.public_key()).handle(data) for k, data in requests.items()}
        return self.replies


def memory() -> float:
    """MiB now in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def at_both_ends(count: int) -> dict[str, Any]:
    config = load_config(
        None,
        {
            "data": {"clients": 3},
            "model": {"hidden": 12},
            "train": {"local_steps": 2},
            "run": {"device": "cpu", "threads": 1},
        },
    )
    draw, found = random.Random(1), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        way = Recording(config, Path(name))
        sizes = message_bytes(RunSetup(config))
        coordinator = Coordinator(config, SigningTransport(way, KEY, sizes))
        for _ in range(3):
            coordinator.step()
        request, reply, node = way.requests[0], way.replies[0], way.nodes[0]
        before, state = memory(), node.state
        for _ in range(count):
            reply = decode(SealedNode(node, KEY.public_key()).handle(mutated(request, draw)))
            found["requests refused" if reply.records[0].code == Code.REFUSED else "requests accepted"] += 1
        assert node.state is state
        middle, asked, terms = memory(), decode(request[112:]), RunSetup(config).terms
        for number in range(count):
            data = mutated(reply, draw)
            data = with_checksum(data) if number % 2 else data
            if data == reply:
                continue
            try:
                whole = read_reply(asked, check_reply(asked, data, sizes), True)
                for order in [each for each in asked.records if each.code == Code.SEND]:
                    up = terms.method.exchanges[order.index].up
                    Intake(up, terms.digest, order.number, (asked.client,)).accept(whole[0] or b"")
                same = whole == read_reply(asked, check_reply(asked, reply, sizes), True)
                found["replies with the same contents" if same else "replies with other valid numbers"] += 1
            except WireError:
                found["replies refused"] += 1
        after = memory()
        for each in way.nodes.values():
            each.close()
    return {**found, "MiB before": round(before), "after requests": round(middle), "after replies": round(after)}


def at_the_gate(count: int) -> dict[str, Any]:
    """nginx with the shipped configuration, but for the rate limit, which would answer everything."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, link = one.getsockname()[1], two.getsockname()[1]
        one.close()
        two.close()
        folder = Path(name) / "f"
        write_folder(folder, 1, port=port, link_port=link)
        for script in ("./certificates.sh", "./keys.sh"):
            subprocess.run([script], cwd=folder, check=True, capture_output=True)
        public = (folder / "keys" / "node-0.pub").read_text().strip()
        write_places(folder, {0: {"node": 7, "key": public}})
        write_includes(folder, {"PORT": str(port), "LINK_PORT": str(link), "GATE_HOST": "127.0.0.1"})
        rate = folder / "gate" / "rate.conf"
        rate.write_text(rate.read_text().replace("rate=30r/s", "rate=1000000r/s"))
        passed = Counter[str]()
        server = _answering(folder, link, passed)
        gate = subprocess.Popen(
            ["/usr/sbin/nginx", "-p", f"{folder}/", "-c", f"{folder}/gate.conf", "-e", f"{folder}/gate/error.log",
             "-g", "daemon off;"]
        )  # fmt: skip
        while not listening_addresses(port):
            time.sleep(0.1)
        fleet_paths = re.findall(r"location = (\S+)", (folder / "gate.conf").read_text())
        found = _http(count, port, key_header(public), folder, fleet_paths)
        largest = max(_rss(pid) for pid in [gate.pid, *_children(gate.pid)])
        gate.terminate()
        gate.wait()
        server.shutdown()
        server.server_close()
    outside = {path: number for path, number in passed.items() if path not in fleet_paths}
    return {
        **found,
        "passed": sum(passed.values()),
        "passed to other paths": outside,
        "MiB of the gate": round(largest),
    }


def _http(count: int, port: int, key: str, folder: Path, fleet_paths: list[str]) -> dict[str, int]:
    draw, found = random.Random(2), Counter[str]()
    context = ssl.create_default_context(cafile=str(folder / "certificates" / "ca.crt"))
    paths = [*fleet_paths, "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/../control/start-run"]
    safe: ssl.SSLSocket | None = None
    for _ in range(count):
        line = f"POST {draw.choice(paths)} HTTP/1.1".encode()
        head = b"\r\nHost: x\r\nflwr-public-key: " + key.encode() + b"\r\nContent-Length: 0"
        data = (mutated(line, draw) + head if draw.random() < 0.7 else mutated(line + head, draw)) + b"\r\n\r\n"
        try:
            if safe is None:
                safe = context.wrap_socket(
                    socket.create_connection(("127.0.0.1", port), timeout=2), server_hostname="127.0.0.1"
                )
            safe.sendall(data)
            answer = safe.recv(4096)
            status = answer[9:12].decode() if answer.startswith(b"HTTP/1.") else "400, as HTTP/0.9 has no status"
            found[status if answer else "closed"] += 1
            keep = b"keep-alive" in answer
        except (OSError, ssl.SSLError):
            found["closed"] += 1
            keep = False
        if not keep and safe is not None:
            safe.close()
            safe = None
    if safe is not None:
        safe.close()
    return dict(sorted(found.items()))


def _answering(folder: Path, port: int, passed: Counter[str]) -> ThreadingHTTPServer:
    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            passed[self.path] += 1
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificates" / "server.pem", folder / "certificates" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _rss(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="at each end in process; 0: none")
    parser.add_argument("--http", type=int, default=100_000, help="at the gate; 0: none")
    parser.add_argument("--messages", type=int, default=100, help="through real processes; 0: none")
    parser.add_argument("--json", type=Path, help="what was not measured this time stays as it is in the file")
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    if chosen.count:
        found["ends"] = {"commit": commit(), "count": chosen.count, **at_both_ends(chosen.count)}
        assert found["ends"].get("requests accepted", 0) == 0
    if chosen.http:
        found["gate"] = {"commit": commit(), "count": chosen.http, **at_the_gate(chosen.http)}
        assert found["gate"]["passed to other paths"] == {}
    if chosen.messages:
        from doors_end_to_end import end_to_end  # needs Flower

        found["end to end"] = {"commit": commit(), **end_to_end(chosen.messages)}
        assert not found["end to end"]["requests accepted"] + found["end to end"]["replies accepted wrongly"]
    print(json.dumps(found, indent=1))
    if chosen.json:
        kept = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
        chosen.json.write_text(json.dumps({**kept, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
