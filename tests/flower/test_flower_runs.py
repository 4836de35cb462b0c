"""Real processes on loopback: a run over Flower equals the run in one process, also when processes are killed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fleet import Fleet, comparable, serve_run
from flotilla import Flotilla, check, long, needs_flower, run_config, wait_until

from factories import digits
from pfedlms.experiment.store import RunDirectory

pytestmark = needs_flower


@pytest.fixture(scope="module")
def flotilla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flotilla]:
    with Flotilla(tmp_path_factory.mktemp("flower") / "four", 4) as made:
        yield made.open(nodes=4)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Flotilla]:
    with Flotilla(tmp_path / "two", 2) as made:
        yield made.open()


def test_a_short_run_of_two_nodes(pair: Flotilla) -> None:
    """Part of `make test`."""
    chosen = {"train.rounds": 1, "run.out": str(pair.folder / "run"), "flower.wait": 60.0}
    for number in range(2):
        pair.node(number)
    pair.run(run_config(chosen))
    log = pair.wait_for_end()
    metrics = check(pair, chosen)
    assert f"P-acc {metrics[-1]['p_acc']:5.2f} %" in log
    assert "round 1/1: 2 trained" in log


@long
def test_nodes_with_data_of_their_own(pair: Flotilla, tmp_path: Path) -> None:
    """One file for each node, one without some classes; the run equals that of nodes in this process."""
    pool = digits()
    files = {}
    for client in range(2):
        samples = np.concatenate([np.asarray(pool.train[client]), np.asarray(pool.test[client])])
        files[client] = f"file:{tmp_path / f'{client}.npz'}"
        np.savez(tmp_path / f"{client}.npz", x=pool.x[samples].numpy(), y=pool.y[samples].numpy())
    chosen = {"data.dataset": "custom", "data.class_names": ",".join("abcdefghij"), "data.sample_shape": "1x8x8"}
    chosen |= {"method.name": "sketchvote", "run.out": str(pair.folder / "run")}
    for number, file in files.items():
        state = pair.folder / "state"
        pair.node(number, "--node-config", f'partition-id={number} state="{state}" data="{file}" device="cpu"')
    pair.run(run_config(chosen))
    pair.wait_for_end()
    config = pair.config(**chosen)
    metrics = RunDirectory(Path(config.run.out)).read_metrics()
    here = config.with_run(out=str(tmp_path / "here"))
    _, expected = serve_run(here, Fleet(here, tmp_path / "nodes", data=files))
    assert len(metrics) == 2
    assert [comparable(each) for each in metrics] == [comparable(each) for each in expected]


@long
@pytest.mark.skipif(find_spec("ray") is None, reason="Flower's simulations are not installed (extra: simulation)")
@pytest.mark.parametrize("method", ["pfedlms", "sketchvote", "fedavg"])
def test_a_run_in_flowers_simulation(method: str, tmp_path: Path) -> None:
    with Flotilla(tmp_path / "twenty", 20) as made:
        chosen = {"method.name": method, "run.out": str(made.folder / "run"), "flower.wait": 60.0}
        made.run(run_config(chosen), simulated=20)
        made.wait_for_end()
        check(made, chosen, state="state/node-{}")


@long
def test_a_node_killed_in_mid_round_continues(flotilla: Flotilla) -> None:
    """It comes back before the timeout, gets the request again and continues with its model: nothing is lost."""
    chosen = {"method.name": "sketchvote", "run.out": str(flotilla.folder / "killed"), "run.seed": 4}
    chosen |= {"train.rounds": 3, "run.timeout": 200.0}
    requests = flotilla.log_text("node-1").count("Receiving: train.request")
    flotilla.run(run_config(chosen), name="killed")
    # The second request: it has trained once.
    wait_until(lambda: flotilla.log_text("node-1").count("Receiving: train.request") >= requests + 2, 120, "a request")
    flotilla.kill("node-1")
    flotilla.node(1)
    assert "left out" not in flotilla.wait_for_end("killed")
    check(flotilla, chosen)


@long
@pytest.mark.parametrize("moment", ["in mid-round", "between rounds"])
def test_a_killed_server_resumes(flotilla: Flotilla, moment: str) -> None:
    """Started again, it resumes from its checkpoint, and nodes reconnect. In mid-round a node is killed, too, while it
    executes a request."""
    name = moment.replace(" ", "-")
    chosen = {"method.name": "pfedlms", "run.out": str(flotilla.folder / name), "run.seed": 5 + len(name)}
    metrics = Path(str(chosen["run.out"])) / "metrics.jsonl"
    flotilla.run(run_config(chosen), name=name)
    wait_until(lambda: metrics.exists() and metrics.read_bytes(), 240, "a round")
    if moment == "in mid-round":
        before = flotilla.log_text("node-0").count("Receiving: train.request")
        wait_until(lambda: flotilla.log_text("node-0").count("Receiving: train.request") > before, 60, "a request")
        flotilla.kill("node-0")
        flotilla.node(0)
    flotilla.kill("superlink")
    flotilla.kill(name)
    flotilla.server()
    flotilla.run(run_config(chosen), name=f"{name}-again")
    assert "resumed after round 1" in flotilla.wait_for_end(f"{name}-again")
    check(flotilla, chosen)
