"""A run on nodes equals the run in one process: accuracies, bytes and models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import CLIENTS, Fleet, check_same_run, check_states, comparable, make_config, own_data, serve_run, simulate

from pfedlms.deploy import Node
from pfedlms.errors import UsageError
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import start_run
from pfedlms.methods import METHODS

CASES: list[tuple[str, dict[str, Any]]] = [
    *((method, {}) for method in METHODS),
    ("zsign", {"downlink": "sum"}),
    ("obcsaa", {"downlink": "sum"}),
    ("fedavg", {"server_step": 1.5, "server_momentum": 0.5}),
    ("sketchvote", {"check_every": 2}),
    ("sketchmean", {"check_every": 2, "answer": 0.05, "server_optimizer": "adam", "gain": 0.02}),
]


def check(config: Any, tmp_path: Path) -> Fleet:
    fleet = Fleet(config, tmp_path / "nodes")
    summary, metrics = serve_run(config, fleet)
    check_same_run(fleet)
    assert all(each["left_out"] == {} for each in metrics)
    if config.train.participation == 1:
        assert summary["transport"] == fleet.transport_bytes()
    return fleet


@pytest.mark.parametrize(
    ("method", "settings", "participation"),
    [
        *((*case, share) for share in (1.0, 0.5) for case in CASES),
        *((method, {}, 0.2) for method in ("pfedlms", "sketchvote", "sketchmean", "fedavg", "obda")),
    ],
)
def test_every_method(method: str, settings: dict[str, Any], participation: float, tmp_path: Path) -> None:
    """Clients that missed answers catch up, and those absent at the end are measured on copies: `everyone` of the
    summary."""
    clients, rounds = (CLIENTS, 3) if participation == 1 else (6, 7)
    train = {"participation": participation, "rounds": rounds, "momentum": 0.5}
    fleet = check(make_config(method, tmp_path / "run", clients=clients, method=settings, train=train), tmp_path)
    if participation == 1:
        exchanges = len(fleet.node(0)._method.exchanges)
        assert len(fleet.trips) == 1 + 3 * max(1, exchanges)  # the start, and one trip for each exchange


def test_epochs_and_uniform_weights(tmp_path: Path) -> None:
    """A node takes its own number of steps; stacked clients take as many as the largest of them."""
    train = {"participation": 0.5, "rounds": 4, "local_epochs": 0.5, "weights": "uniform"}
    check(make_config("scaffold", tmp_path / "run", clients=6, train=train), tmp_path)


@pytest.mark.filterwarnings("ignore:.*weighs less")
@pytest.mark.parametrize("method", ["pfedlms", "fedavg", "sketchmean"])
def test_adamw_sparse_evaluation_and_limited_weights(method: str, tmp_path: Path) -> None:
    """The limit of weights changes the result, so the comparison means something."""
    train = {"optimizer": "adamw", "learning_rate": 0.002, "rounds": 5, "max_weight": 0.26}
    config = make_config(method, tmp_path / "run", train=train, run={"evaluate_every": 2})
    check(config, tmp_path)
    free = simulate(make_config(method, train={**train, "max_weight": 1.0}, run={"evaluate_every": 2}))
    assert free.metrics[-1]["test_loss"] != simulate(config).metrics[-1]["test_loss"]


def test_any_width_and_batch(tmp_path: Path) -> None:
    """Clients train alone, as in all these tests (`run.cohort_size = 1`). Stacked ones may differ here in the last bit:
    BLAS rounds products of small matrices by where they begin in memory."""
    shape = {"model": {"hidden": 33}, "train": {"batch_size": 3}}
    check(make_config("pfedlms", tmp_path / "run", **shape), tmp_path)


def test_a_run_can_be_extended(tmp_path: Path) -> None:
    """Two rounds, then three more, equal five at once, except that the first end asked for no messages."""
    for method in ("sketchvote", "pfedlms", "obda"):
        folder = tmp_path / method
        fleet = Fleet(make_config(method, folder / "run", train={"rounds": 2}), folder / "nodes")
        serve_run(fleet.config, fleet)
        extended = make_config(method, folder / "run", train={"rounds": 5})
        serve_run(extended, fleet)
        check_same_run(fleet, extended)
        assert len(fleet.trips) == 1 + 5 * len(fleet.node(0)._method.exchanges) + 1
        assert len(fleet.trips[0]) == CLIENTS


def test_nodes_read_their_own_data_with_names_of_classes(tmp_path: Path) -> None:
    """Each node has its own data with class names; in one process all data are given in Python, with class numbers."""
    data, pairs, _ = own_data()
    names = [f"class {number}" for number in range(10)]
    named = {client: tuple((x, [names[label] for label in y]) for x, y in own) for client, own in pairs.items()}
    for method in ("pfedlms", "sketchvote", "fedproto"):
        config = make_config(method, tmp_path / method, data={**data, "class_names": ", ".join(names)})
        fleet = Fleet(config, tmp_path / "nodes", data=named)
        summary, metrics = serve_run(config, fleet)
        expected = start_run(config.with_run(out=""), Problem(list(pairs.values())))
        assert [comparable(each) for each in metrics] == [comparable(each) for each in expected.metrics]
        check_states(fleet, expected.federation)
        assert summary["classes"] == names


def test_a_node_numbers_the_classes_of_its_file_as_all_nodes_do(tmp_path: Path) -> None:
    """It holds two of them; that the others do not occur here is nothing to warn of."""
    (tmp_path / "t.csv").write_text("a,b,label\n" + "".join(f"{row},1,{row % 2 * 3}\n" for row in range(40)))
    data = {"dataset": "custom", "class_names": "0,1,2,3", "sample_shape": "2"}
    with Node(make_config("fedavg", data=data), 0, tmp_path, f"file:{tmp_path / 't.csv'}") as node:
        assert set(node._client._data.y.tolist()) == {0, 3}


def test_the_order_of_classes_is_part_of_the_digest(tmp_path: Path) -> None:
    held = (np.zeros((4, 3), dtype=np.float32), ["a", "b", "b", "a"])
    runs = set()
    for order in ("a,b,c", "b,a,c", "a,b,d"):
        data = {"dataset": "custom", "class_names": order, "sample_shape": "3"}
        with Node(make_config("fedavg", data=data), 0, tmp_path, held) as node:
            runs.add(node.run)
            place = {name: number for number, name in enumerate(order.split(","))}
            assert sorted(node._client._data.y.tolist()) == sorted(place[name] for name in held[1])
    assert len(runs) == 3


def test_wrong_data_are_refused(tmp_path: Path) -> None:
    x = np.zeros((4, 3), dtype=np.float32)
    data = {"dataset": "custom", "class_names": "a,b", "sample_shape": "3"}
    for own, expected in [
        ((x, ["a", "b", "z", "a"]), "got the class 'z', expected one of the classes a, b"),
        ((x, [0, 1, 2, 1]), "got the class 2"),
        ((x[:, :2], ["a", "b", "b", "a"]), "got samples of shape"),
        ("no.such:function", "gave no data"),
        (None, "every node needs data of its own"),
    ]:
        with pytest.raises(UsageError, match=re.escape(expected)):
            Node(make_config("fedavg", data=data), 0, tmp_path, own)
    with pytest.raises(UsageError, match=r"data\.class_names: got 'a', .*\ndata\.sample_shape: got '3x', "):
        Node(
            make_config("fedavg", data={**data, "class_names": "a", "sample_shape": "3x"}), 0, tmp_path, (x, ["a"] * 4)
        )
    with pytest.raises(UsageError, match="partitioned over all nodes"):
        Node(make_config("fedavg"), 0, tmp_path, (x, ["a"] * 4))
    with pytest.raises(IndexError, match="client: got 4"):
        Node(make_config("fedavg"), 4, tmp_path)
