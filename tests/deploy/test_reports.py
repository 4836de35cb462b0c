"""Reports of nodes are checked: a node whose numbers would spoil the metrics is left out, and the run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import false_replies as lies
import pytest
from false_replies import LIAR, MOST, Lie, lying_route
from fleet import CLIENTS, Fleet, make_config, own_data, serve_run

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import (
    Envelope,
    decode,
    measurement_record,
    read_measurement,
    read_training,
    training_record,
)
from pfedlms.deploy.nodes import Report, unusual_changes
from pfedlms.engine.transport import Code, Record, Split
from pfedlms.experiment.config import Config


def serve_with_liar(config: Config, fleet: Fleet) -> list[dict[str, Any]]:
    """Metrics of a run with a liar; every number in its files is finite."""
    with pytest.warns(UserWarning, match=f"client {LIAR} is left out"):
        summary, metrics = serve_run(config, fleet)
    assert summary["status"] == "finished"
    for name in ("metrics.jsonl", "summary.json"):
        text = (Path(config.run.out) / name).read_text()
        assert "Infinity" not in text
        assert "NaN" not in text
    return metrics


@pytest.mark.parametrize("known", [True, False], ids=["known-split", "own-data"])
@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lies.most_samples, f"measured: got {MOST} samples of "),
        (lies.large_loss, "samples and a loss of 1e+308, expected some and a loss of at most"),
        (lies.large_test_loss, "with a loss of 1e+308, expected a count of at most as many and a loss of at most"),
    ],
)
def test_an_impossible_report_leaves_its_sender_out(lie: Lie, reason: str, known: bool, tmp_path: Path) -> None:
    named, own, _ = own_data()
    config = make_config("fedavg", tmp_path / "run", data={} if known else named)
    fleet = Fleet(config, tmp_path / "nodes", lying_route(lie, lambda: fleet), data={} if known else own)
    metrics = serve_with_liar(config, fleet)
    honest = [client for client in range(CLIENTS) if client != LIAR]
    assert [each["round"] for each in metrics] == [1, 2, 3]
    for each in metrics:
        assert each["clients"] == honest
        assert reason in each["left_out"][str(LIAR)]
        assert len(each["client_acc"]) == len(honest)
    # Computed from the last reports of the honest nodes.
    last = [next(trip[client][1] for trip in reversed(fleet.trips) if client in trip) for client in honest]
    found = [
        read_measurement(each, percent=True)[1]
        for data in last
        for each in decode(data or b"").records
        if each.code == Code.MEASURED and each.index == Split.TEST
    ]
    assert len(found) == len(honest)
    assert metrics[-1]["p_acc"] == 100 * sum(correct for correct, _, _ in found) / sum(count for _, _, count in found)


def test_a_count_that_changes_during_the_run_leaves_its_sender_out(tmp_path: Path) -> None:
    """Where the server does not know the split, a node must repeat the count that it reported first."""
    named, own, _ = own_data()
    config = make_config("fedavg", tmp_path / "run", data=named)
    trips: list[int] = []

    def one_more(reply: Envelope, node: object) -> bytes:
        def change(each: Record) -> Record:
            split, (correct, loss, samples) = read_measurement(each, percent=True)
            trips.extend([1] * (split == Split.TEST))
            return measurement_record(split, correct, loss, samples + (len(trips) > 1)) if split == Split.TEST else each

        return lies.change_records(reply, Code.MEASURED, change)

    fleet = Fleet(config, tmp_path / "nodes", lying_route(one_more, lambda: fleet), data=own)
    metrics = serve_with_liar(config, fleet)
    count = len(own[LIAR][1][1])
    assert str(LIAR) not in metrics[0]["left_out"]
    assert all(f"got {count + 1} samples of test, expected {count}" in e["left_out"][str(LIAR)] for e in metrics[1:])


def test_a_report_that_jumps_unlike_the_others_is_warned_of(tmp_path: Path) -> None:
    """From the first round on the liar reports a hundred times its loss and half its samples. With data of its own this
    cannot be checked, so the report is accepted."""
    named, own, samples = own_data()
    config = make_config("fedavg", tmp_path / "run", data=named)

    def more(each: Record) -> Record:
        samples, loss = read_training(each)
        return training_record(each.number, samples, 100 * loss)

    def change(reply: Envelope, node: Node) -> bytes:
        node.samples = samples[LIAR] // 2  # in all messages from the next trip on
        return reply.encode() if reply.trip < 1 else lies.change_records(reply, Code.TRAIN, more)

    fleet = Fleet(config, tmp_path / "nodes", lying_route(change, lambda: fleet), data=own)
    text = rf"client {LIAR} reports {samples[LIAR] // 2} training samples, {samples[LIAR]} before and a loss of "
    with pytest.warns(UserWarning, match=text) as found:
        serve_run(config, fleet)
    assert {int(str(each.message).split("client ")[1].split()[0]) for each in found} == {LIAR}


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ([(9, 0.2, 95.0), (9, 0.3, 90.0), (9, 0.1, 99.0)], {}),
        ([(9, 2.5, 50.0), (9, 2.5, 50.0), (9, 0.24, 50.0)], {2: "a loss of 0.24, 2.5 before"}),
        ([(9, 2.5, 70.0), (9, 2.5, 70.0), (9, 2.5, 9.0)], {2: "an accuracy of 9.0 %, 50.0 % before"}),
        ([(9, 2.5, 60.0), (9, 2.5, 60.0), (8, 2.5, 0.1)], {2: "8 training samples, 9 before"}),
    ],
    ids=["all-similar", "loss", "accuracy", "samples"],
)
def test_which_changes_are_unusual(now: list[tuple[int, float, float]], named: dict[int, str]) -> None:
    before = dict.fromkeys(range(3), Report(9, 2.5, 50.0))
    assert unusual_changes(before, {client: Report(*each) for client, each in enumerate(now)}) == named
