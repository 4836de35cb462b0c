"""What a node reports is checked: numbers that would fill the metrics leave their sender out, and the run continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import CLIENTS, Fleet, configured, own_data, served

from pfedlms.deploy.envelope import Code, Record, Split, decode, measured, read_measured, read_trained, trained
from pfedlms.experiment.config import Config
from pfedlms.wire.frames import Intake, frame

LIAR = 2
MOST = 2**32 - 1
Change = Callable[[Record], Record]


def lying(change: Change) -> Callable[[int, bytes, Callable[[bytes], bytes]], bytes]:
    """A way on which the liar's replies are changed, record by record."""

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes:
        said = decode(handle(request))
        if client == LIAR:
            said = replace(said, records=tuple(map(change, said.records)))
        return said.encode()

    return way


def most_samples(each: Record) -> Record:
    """As many test samples as the field can name, all of them predicted correctly."""
    return measured(Split(each.index), MOST, 0.0, MOST) if each.code == Code.MEASURED else each


def large_loss(each: Record) -> Record:
    return trained(each.number, read_trained(each)[0], 1e308) if each.code == Code.TRAIN else each


def large_test_loss(each: Record) -> Record:
    if each.code != Code.MEASURED:
        return each
    split, (correct, _, samples) = read_measured(each, percent=True)
    return measured(split, correct, 1e308, samples)


def played(config: Config, fleet: Fleet) -> list[dict[str, Any]]:
    """Metrics of a run with a liar; every number in its files is finite."""
    with pytest.warns(UserWarning, match=f"client {LIAR} is left out"):
        summary, metrics = served(config, fleet)
    assert summary["status"] == "finished"
    for name in ("metrics.jsonl", "summary.json"):
        text = (Path(config.run.out) / name).read_text()
        assert "Infinity" not in text
        assert "NaN" not in text
    return metrics


@pytest.mark.parametrize("known", [True, False], ids=["the server knows the split", "data of the nodes' own"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (most_samples, f"measured: got {MOST} samples of "),
        (large_loss, "samples and a loss of 1e+308, expected some and a loss of at most"),
        (large_test_loss, "with a loss of 1e+308, expected a count of at most as many and a loss of at most"),
    ],
)
def test_a_report_beyond_what_can_be_leaves_its_sender_out(
    change: Change, said: str, known: bool, tmp_path: Path
) -> None:
    named, own, _ = own_data()
    config = configured("fedavg", tmp_path / "run", data={} if known else named)
    fleet = Fleet(config, tmp_path / "nodes", lying(change), data={} if known else own)
    metrics = played(config, fleet)
    honest = [client for client in range(CLIENTS) if client != LIAR]
    assert [each["round"] for each in metrics] == [1, 2, 3]
    for each in metrics:
        assert each["clients"] == honest
        assert said in each["left_out"][str(LIAR)]
        assert len(each["client_acc"]) == len(honest)
    # By hand, from what the honest nodes reported last.
    last = [next(trip[client][1] for trip in reversed(fleet.trips) if client in trip) for client in honest]
    found = [
        read_measured(each, percent=True)[1]
        for data in last
        for each in decode(data or b"").records
        if each.code == Code.MEASURED and each.index == Split.TEST
    ]
    assert len(found) == len(honest)
    assert metrics[-1]["p_acc"] == 100 * sum(correct for correct, _, _ in found) / sum(count for _, _, count in found)


def test_a_count_that_changes_during_the_run_leaves_its_sender_out(tmp_path: Path) -> None:
    """Where the server does not know the split, a node's first count is what it is held to."""
    named, own, _ = own_data()
    config = configured("fedavg", tmp_path / "run", data=named)
    trips: list[int] = []

    def one_more(each: Record) -> Record:
        if each.code != Code.MEASURED or each.index != Split.TEST:
            return each
        trips.append(1)
        split, (correct, loss, samples) = read_measured(each, percent=True)
        return measured(split, correct, loss, samples + (len(trips) > 1))

    metrics = played(config, Fleet(config, tmp_path / "nodes", lying(one_more), data=own))
    count = len(own[LIAR][1][1])
    assert str(LIAR) not in metrics[0]["left_out"]
    assert all(f"got {count + 1} samples of test, expected {count}" in e["left_out"][str(LIAR)] for e in metrics[1:])


def test_a_model_of_1e38_leaves_its_sender_out(tmp_path: Path) -> None:
    """Finite in every entry and valid as a message. Without `train.max_scale` the mean of all is of its size."""
    config = configured("fedavg", tmp_path / "run", train={"max_scale": 100.0}, run={"quorum": 0.5})

    def enormous(each: Record) -> Record:
        if each.code != Code.SEND:
            return each
        up, terms = fleet.node(LIAR)._terms.method.exchanges[0].up, fleet.node(LIAR)._terms
        got = Intake(up, terms.digest, each.number, (LIAR,)).accept(each.data)
        values = {"model": np.full_like(got.values["model"], 1e38)}
        data = frame(up, values, round=each.number, sender=LIAR, samples=got.samples, digest=terms.digest)
        return replace(each, data=bytes(data))

    fleet = Fleet(config, tmp_path / "nodes", lying(enormous))
    metrics = played(config, fleet)
    assert [each["round"] for each in metrics] == [1, 2, 3]
    for each in metrics:
        assert "model is more than train.max_scale = 100 times the others'" in each["left_out"][str(LIAR)]
        assert 0 < each["loss"] < 10
    assert metrics[-1]["p_acc"] > metrics[0]["p_acc"]
    assert all(fleet.node(client).state.cohort.params.abs().max() < 10 for client in range(CLIENTS))
