"""Half an hour over Flower in which nodes leave, are killed and come back: is memory flat, is anything lost?

    python benchmarks/soak.py [--minutes 30] [--folder DIR] [--json FILE]     # in the environment of `make test-deploy`

A SuperLink and SuperNodes as processes on this machine, with TLS and node keys; sketchvote, whose nodes must catch up,
on digits with six places:

    0, 1, 2     stay
    3           is ended (SIGTERM) and started again two rounds later, every eight rounds
    4           is killed (SIGKILL, with all it has started) at work and started again, every eight rounds
    5           joins after a fifth of the time and leaves for good after three fifths

Every second: resident memory and open files of all processes, sizes of what is kept, the state of every node and of the
server. When the time is over the run is stopped, and goes on for a few rounds from its checkpoint. Then it is checked
that every round was counted once, that nodes stand where they took part last, that models tracked after as many answers
were the same bits on all nodes and on the server at any time, and that the same trips, with the same replies lost, give
the same metrics, bytes and states in one process, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from kept import commit, keep
from soak_checks import figures, show
from soak_samples import PLACES, WORK, Flotilla, Seen, children, look_at_states, processes_of, sample, wait_until

ENDED, KILLED, GUEST = 3, 4, 5
CYCLE, KILL_AT, END_AT, BACK_AT = 8, 2, 4, 6
"""Rounds of a cycle, and those in which something is done."""
JOIN_AT, LEAVE_AT = 1 / 5, 3 / 5
"""Shares of the time."""
MORE_ROUNDS = 3
CONFIG = f"""schema = 1
[data]
clients = {PLACES}
[train]
rounds = 100000
max_weight = 0.4
[method]
name = "sketchvote"
[run]
seed = 1
device = "cpu"
threads = 1
cohort_size = 1
quorum = 0.3
timeout = 180.0
"""


@dataclass
class Play:
    """What is done to nodes, by the round and the time."""

    fleet: Flotilla
    seen: Seen
    upto: dict[str, int] = field(default_factory=dict)
    """The last cycle in which a thing was done."""
    ended: list[int] = field(default_factory=list)
    """Processes of nodes that were ended: they should end, too."""

    def act(self) -> None:
        passed = (time.monotonic() - self.seen.began) / 60 / self.seen.minutes
        if self._due("killed", KILL_AT) and self._at_work(KILLED):
            self.fleet.kill(f"node-{KILLED}")
            self.fleet.node(KILLED)
            self._note("killed")
        if self._due("ended", END_AT):
            self._end(ENDED)
            self._note("ended")
        if self._due("back", BACK_AT):
            self.back()
        if not self.seen.done["joined"] and passed > JOIN_AT:
            self.fleet.node(GUEST)
            self._note("joined")
        if not self.seen.done["left for good"] and passed > LEAVE_AT:
            self._end(GUEST)
            self._note("left for good")

    def back(self) -> None:
        if f"node-{ENDED}" not in self.fleet.started:
            self.fleet.node(ENDED)
            self._note("back")

    def _due(self, what: str, at: int) -> bool:
        """Once in a cycle of rounds, from one of its rounds on."""
        return self.seen.round % CYCLE >= at and self.upto.get(what, -1) < self.seen.round // CYCLE

    def _note(self, what: str) -> None:
        self.seen.done[what] += 1
        self.upto[what] = self.seen.round // CYCLE
        print(f"{time.monotonic() - self.seen.began:7.0f} s  round {self.seen.round + 1:4d}  {what}", flush=True)

    def _at_work(self, number: int) -> bool:
        return any(WORK.encode() in each for each in commands(children(self.fleet.started[f"node-{number}"].pid)))

    def _end(self, number: int) -> None:
        process = self.fleet.started.pop(f"node-{number}")
        self.ended += children(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)


def commands(pids: list[int]) -> list[bytes]:
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:  # it has just ended
            continue
    return found


def soak(fleet: Flotilla, minutes: float) -> Seen:
    """The run, sampled."""
    out = fleet.folder / "run"
    settings = f'run.out="{out}" flower.wait=20'
    fleet.open()
    for number in set(range(PLACES)) - {GUEST}:
        fleet.node(number)
    fleet.run(settings)
    play = Play(fleet, seen := Seen(minutes, commit()))
    while (passed := time.monotonic() - seen.began) < 60 * minutes:
        sample(fleet, seen)
        assert fleet.started["run"].poll() is None, fleet.log_text("run")[-3000:]
        play.act()
        time.sleep(max(0.0, 1 - (time.monotonic() - seen.began - passed)))
    play.back()
    found = re.search(r"started run (\d+)", fleet.log_text("run"))
    assert found is not None
    fleet.start("stop", "flwr", "stop", found[1], "federation")

    def stopped() -> bool:
        look_at_states(fleet, seen)
        there = any(b"flwr-serverapp" in each for each in commands(processes_of(fleet.home)))
        return fleet.started["run"].poll() is not None and not there

    wait_until(stopped, 120, "the end of the stopped run and of its server app")
    # Its length is no part of what both ends agree on, so it can be made shorter as well as longer.
    fleet.run(f"{settings} train.rounds={seen.round + MORE_ROUNDS}", name="again")
    while fleet.started["again"].poll() is None:
        look_at_states(fleet, seen)  # what was measured is the server app before
        time.sleep(1)
    wait_until(lambda: (out / "summary.json").exists(), 10, "the summary")
    look_at_states(fleet, seen)
    seen.left = len(set(play.ended) & set(processes_of(fleet.home)))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--folder", type=Path, help="keep the files of the run here; if they are there, show their results again"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "fed"
        samples = folder / "samples.pickle"
        if not samples.exists():
            with Flotilla(folder, PLACES) as fleet:
                (fleet.app / "pfedlms.toml").write_text(CONFIG)
                fleet.environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
                samples.write_bytes(pickle.dumps(soak(fleet, options.minutes)))
        results = figures(folder, pickle.loads(samples.read_bytes()), MORE_ROUNDS)
    show(results)
    if options.json:
        keep(results, options.json)
    if results["checks"]["wrong"]:
        raise SystemExit("something was lost: see above")


if __name__ == "__main__":
    main()
