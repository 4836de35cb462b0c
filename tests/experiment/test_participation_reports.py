"""What a run reports where only some of the clients take part, or where messages get lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import pfedlms
from pfedlms.cli import main
from pfedlms.engine import Federation
from pfedlms.errors import QuorumError

SMALL = {"rounds": 4, "clients": 5, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1}
PARAMETERS = 64 * 12 + 12 + 12 * 10 + 10
FRAME = 40


def options(**settings: Any) -> list[str]:
    chosen = {
        "train.rounds": 4, "data.clients": 5, "model.hidden": 12, "train.local_steps": 2, "train.batch_size": 8,
        "run.threads": 1, **settings,
    }  # fmt: skip
    return [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "obda", "local"])
def test_metrics_are_of_those_who_took_part(method: str, tmp_path: Path) -> None:
    """Two of five, named beside their accuracies; `everyone` is over all of them and in no mean."""
    result = pfedlms.run(method=method, participation=0.4, out=tmp_path / "run", **SMALL)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tested = [len(held) for held in result.federation.data.test]
    for record in records:
        assert len(record["clients"]) == len(record["client_acc"]) == 2
        assert record["clients"] == sorted(set(record["clients"]))
        sizes = [tested[client] for client in record["clients"]]
        right = sum(size * own / 100 for size, own in zip(sizes, record["client_acc"], strict=True))
        assert record["p_acc"] == pytest.approx(100 * right / sum(sizes))
        assert "unheard" not in record
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["participation"] == 0.4
    assert summary["accuracy"]["max"] == max(record["p_acc"] for record in records)
    everyone = summary["everyone"]
    assert len(everyone["client_acc"]) == 5
    right = sum(size * own / 100 for size, own in zip(tested, everyone["client_acc"], strict=True))
    assert everyone["accuracy"] == pytest.approx(100 * right / sum(tested))


def test_bytes_are_those_of_participants_and_of_catching_up_apart() -> None:
    result = pfedlms.run(method="fedavg", participation=0.4, **SMALL)
    message = {"payload": 2 * 4 * PARAMETERS, "framing": 2 * FRAME}
    expected = {f"{way}_{part}": size for way in ("up", "down") for part, size in message.items()}
    assert result.summary["bytes_per_round"] == {**expected, "catch_up": 0}  # the answer is the model
    tracked = pfedlms.run(method="obda", participation=0.4, **SMALL).summary
    assert tracked["bytes_per_round"]["catch_up"] > 0
    assert tracked["total_bytes"] == pytest.approx(4 * sum(tracked["bytes_per_round"].values()))


def test_a_finished_run_is_not_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pfedlms.run(method="fedavg", participation=0.4, out=tmp_path / "run", **SMALL).summary

    def refuse(self: Federation) -> None:
        raise AssertionError

    monkeypatch.setattr(Federation, "everyone", refuse)
    assert pfedlms.resume(tmp_path / "run").summary == first
    pfedlms.run(method="fedavg", **SMALL)  # and with all clients the last evaluation was of everyone


def test_answers_that_were_lost_are_counted_where_they_can_be(tmp_path: Path) -> None:
    result = pfedlms.run(method="fedavg", lost=0.3, quorum=0, seed=1, out=tmp_path / "run", **SMALL)
    assert [record["unheard"] for record in result.metrics] == sorted(record["unheard"] for record in result.metrics)
    assert result.summary["unheard"] == result.metrics[-1]["unheard"] > 0


def test_a_run_that_losses_have_stopped_goes_on_with_fewer_of_them(tmp_path: Path) -> None:
    """Who loses what is drawn by name, so the same round would fail again."""
    chosen = {**SMALL, "clients": 6, "participation": 0.5, "rounds": 40, "checkpoint_every": 1}
    told = r"round \d+: .*; lower run\.lost or run\.quorum \(to go on, in the run's config\.toml\), or let more clients"
    with pytest.raises(QuorumError, match=told):
        pfedlms.run(method="fedavg", lost=0.5, quorum=0, out=tmp_path / "run", **chosen)
    with pytest.raises(QuorumError, match=told):
        pfedlms.resume(tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("lost = 0.5", "lost = 0.01"))
    assert pfedlms.resume(tmp_path / "run").summary["rounds"] == 40


@pytest.mark.parametrize(
    ("chosen", "catches_up"),
    [
        ({"method.name": "obda"}, True),
        ({"method.name": "zsign", "method.downlink": "sum"}, True),
        ({"method.name": "zsign", "method.downlink": "model"}, False),
        ({"method.name": "stc"}, True),
        ({"method.name": "fedavg"}, False),
        ({"method.name": "local"}, False),
    ],
)
def test_a_dry_run_says_who_takes_part_and_what_it_cannot_say(
    chosen: dict[str, str], catches_up: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--dry-run", *options(**{"train.participation": 0.4, **chosen})]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 clients, 2 of them in a round" in shown
    assert ("receive to catch up, which depends on the clients that are drawn" in shown) is catches_up
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["participants"], plan["catches_up"]) == (2, catches_up)
    if chosen["method.name"] == "fedavg":
        assert plan["bytes_per_round"]["up_payload"] == 2 * 4 * PARAMETERS
        assert plan["total_bytes"] == 4 * 2 * 2 * (4 * PARAMETERS + FRAME)
    assert main(["run", "--dry-run", "--json", *options(**chosen)]) == 0
    assert not json.loads(capsys.readouterr().out)["catches_up"]


def test_bits_of_a_round_are_those_of_participants(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for share in ("1", "0.25"):
        assert main(["bits", "--method", "fedavg", "--set", f"train.participation={share}", "--json"]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    assert [row["participants"] for row in rows] == [20, 5]
    assert rows[0]["up_payload_bits"] == rows[1]["up_payload_bits"]  # one client's
    assert rows[0]["mib_per_round"] == 4 * rows[1]["mib_per_round"]
    assert main(["bits", "--set", "train.participation=0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = [line.split()[0].rstrip(",") for line in lines if re.search(r" \+ *$", line)]
    assert set(marked) == {
        "zsign",
        "obcsaa",
        "obda",
        "stc",
        "sketchvote",
        "sketchmean",
        "fetchsgd",
        "sparseloco",
        "decomfl",
    }
