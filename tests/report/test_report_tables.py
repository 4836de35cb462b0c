"""Tables of runs compared with numbers worked out by hand: on a terminal, in Markdown, LaTeX and JSON."""

from __future__ import annotations

import io
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from studies import make_summary, section_of, stored_run, write_comparison, write_sweep

import pfedlms
from pfedlms.errors import UsageError
from pfedlms.report import results
from pfedlms.report.results import COLUMNS, comparison, describe_runs
from pfedlms.report.runs import Section, Spread
from pfedlms.report.tables import Column, Table, table_from_records


def printed(table: Table, width: int | None = 80) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(table.rich(width))
    return text.getvalue()


def words(text: Any) -> str:
    return " ".join(str(text).split())


def test_the_rows_of_a_comparison(tmp_path: Path) -> None:
    local, fedavg, stc = comparison(section_of(write_comparison(tmp_path / "c")).runs).records
    assert [record["name"] for record in (local, fedavg, stc)] == ["local", "fedavg", "stc"]
    assert fedavg["p_acc_max"] == Spread(81.0, sqrt(2))  # 80 and 82
    assert fedavg["p_acc_last10"].mean == 75.5  # (70 + 80) / 2 and (70 + 82) / 2
    assert fedavg["g_acc_max"] is None, "the summaries made by hand have none"
    assert (fedavg["mib_up"], fedavg["mib_down"], fedavg["total_bytes"]) == (1.0, 1.0, 4 * 1024**2)
    assert (local["fewer"], fedavg["fewer"], stc["fewer"]) == (None, 1.0, 16.0)
    assert (stc["rounds"], stc["seeds"]) == (2, 2)


def test_catching_up_counts_as_received() -> None:
    """FedAvg moves 2 MiB, the other 1 up and 1 + 2 down: half as few."""
    plain, tracked = (stored_run(m, make_summary(m, [60.0], kib=1024)) for m in ("fedavg", "obda"))
    tracked.summary["bytes_per_round"]["catch_up"] = 2 << 20
    assert [(row["mib_down"], row["fewer"]) for row in comparison([plain, tracked]).records] == [(1.0, 1.0), (3.0, 0.5)]


def test_a_declared_column_is_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worst = Column("worst", "worst client", results.accuracy_text, path="extremes.worst", note="worst: of all clients")
    monkeypatch.setattr(results, "COLUMNS", (*COLUMNS, worst))
    runs = [
        stored_run(run.label, {**run.summary, "extremes": {"worst": 12.5}}, run.settings, run.directory)
        for run in section_of(write_comparison(tmp_path / "c")).runs
    ]
    write_sweep = Section("s", runs, "Sweep", {"method.name": ["local", "fedavg", "stc"]})
    for table in (comparison(runs), comparison(runs, write_sweep)):
        assert "worst client" in words(printed(table, None))
        assert "worst: of all clients" in words(table)
        assert "| worst client |" in table.markdown()
        assert "& worst client" in table.latex()
        assert table.records[0]["worst"] == Spread(12.5, 0.0)
    assert results.result_records(runs)[0]["worst"] == 12.5
    assert results.results_json(runs)["runs"][0]["extremes"] == {"worst": 12.5}


def test_unfinished_runs_are_left_out_of_means_and_title() -> None:
    cut = stored_run("stc", make_summary("stc", [20.0], status="interrupted"))
    bad = stored_run("fedavg", make_summary("fedavg", [10.0], seed=1, status="diverged"))
    table = comparison([cut, bad, stored_run("fedavg", make_summary("fedavg", [50.0, 70.0]))])
    stc, fedavg = table.records
    assert (fedavg["p_acc_max"], fedavg["name"]) == (Spread(70), "fedavg (1 of 2 seeds)")
    assert (stc["p_acc_max"], stc["name"]) == (Spread(20), "stc (interrupted)")
    assert table.title.endswith("· 2 clients · 2 rounds")
    assert comparison([cut]).title.endswith("· 1 round")
    ours = table.visible_columns[1]
    assert [table.is_bold(record, ours) for record in table.records] == [False, False]  # what is left may be lucky


def test_settings_of_training_that_no_name_tells_are_in_the_caption() -> None:
    runs = [stored_run(label, make_summary("stc", [50.0])) for label in ("stc", "stc:local_steps=3")]
    for run, steps, rate in zip(runs, (20, 3), (0.1, 0.5), strict=True):
        run.settings["train"] = {"local_steps": steps, "learning_rate": rate}
    assert "Rows differ in train.learning_rate, too." in comparison(runs).intro
    assert "Rows differ" not in comparison(runs[:1]).intro
    assert "local_steps" not in comparison(runs).intro
    other = stored_run("fedavg", make_summary("fedavg", [50.0]))
    other.settings["train"] = {"local_steps": 5, "learning_rate": 0.1}
    assert "Rows differ in train.local_steps, train.learning_rate, too." in comparison([*runs, other]).intro


@pytest.mark.parametrize(
    ("changes", "there", "missing"),
    [
        ({}, ["P-acc max", "of the last evaluations, at most 10"], ["everyone", "V-acc", "G-acc", "fewer", "30 %"]),
        ({"participation": 0.3}, ["P-acc last 10", "everyone", "30 % per round"], ["max", "messages lost"]),
        ({"unheard": 3}, ["everyone", "messages lost"], []),
        ({"validation_accuracy": {"max": 1.0, "last10": 2.0, "final": 3.0}}, ["V-acc last 10"], []),
        ({"global_accuracy": {"max": 1.0, "last10": 2.0, "final": 3.0}}, ["G-acc max", "before local steps"], []),
        ({"method": "fedavg"}, [], ["fewer"]),
        ({"metric": "hits"}, ["hits, the higher the better", "local 60 "], ["%"]),
    ],
)  # fmt: skip
def test_empty_columns_and_notes_are_left_out(changes: dict[str, Any], there: list[str], missing: list[str]) -> None:
    summary = make_summary("local", [60.0]) | changes
    shown = words(printed(comparison([stored_run("local", summary)]), None))
    assert [text for text in there if text in shown] == there
    assert not [text for text in missing if text in shown]


def test_a_narrow_terminal_gets_fewer_columns(tmp_path: Path) -> None:
    table = comparison(section_of(write_comparison(tmp_path / "c")).runs)
    wide, narrow, least = (printed(table, width) for width in (None, 70, 45))
    assert max(map(len, narrow.splitlines())) <= 70
    assert all(head in words(wide) for head in ("MiB total", "rounds", "seeds", "fewer"))
    assert "rounds, seeds: see results.csv" in words(narrow)
    assert "fewer" in narrow
    assert "No room for fewer, s, MiB total, rounds, seeds: see results.csv or to_pandas()." in words(least)
    # By hand, columns of 10 characters: the least needed go first, of equal ones the last.
    columns = [Column(head, head, optional=rank) for head, rank in zip("abcdef", (0, 1, 2, 1, 2, 0), strict=True)]
    made = Table(columns, [dict.fromkeys("abcdef", "12345678")])
    heads = [words(printed(made, 10 * count).splitlines()[1]) for count in range(1, 7)]
    assert heads == ["a f", "a f", "a b f", "a b d f", "a b c d f", "a b c d e f"]


def test_the_best_row_of_a_sweep_is_marked(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", {"learning_rate": [0.1, 0.2, 0.3]}, [70.0, 90.0, 99.0], interrupted=[99.0])
    section = section_of(tmp_path / "s")
    table = comparison(section.runs, section)
    assert [record["name"] for record in table.records] == [
        "learning_rate=0.1", "learning_rate=0.2 (best)", "learning_rate=0.3 (interrupted)",
    ]  # fmt: skip
    assert words(table).startswith("fedavg · digits · dnn, 18,910 parameters · 2 clients, α = 0.5 · 1 round")
    assert "; the best by P-acc" in words(table)
    assert not any("fewer" in record for record in table.records), "all rows are fedavg"


def test_a_title_leaves_out_the_settings_of_the_sweep() -> None:
    data = {"dataset": "digits", "clients": 3, "alpha": 0.5, "partition": "auto"}
    run = stored_run("local", make_summary("local", [60.0], clients=(1, 2, 3), partition="dirichlet"), {"data": data})
    model = "dnn, 18,910 parameters"
    assert describe_runs([run], ["train.rounds"]) == f"digits · {model} · 3 clients, α = 0.5"
    assert describe_runs([run], ["data.alpha"]) == f"digits · {model} · 3 clients · 1 round"
    assert describe_runs([run], ["data.clients", "data.partition"]) == f"digits · {model} · 1 round"


def test_small_numbers_keep_their_digits() -> None:
    table = table_from_records(
        [{"client": 0, "P-acc": 0.0012345}, {"client": 1, "P-acc": 97.315}, {"client": 2, "P-acc": None}]
    )
    assert [table.cell_text(record, table.columns[1]) for record in table.records] == ["0.001234", "97.31", "–"]


def test_latex_escapes_special_characters() -> None:
    table = Table([Column("name", "a_b"), Column("x", "MiB ↑", results.accuracy_text, bold_highest=True)],
                  [{"name": "50 % & #1", "x": Spread(1.0, 0.5)}, {"name": "{z}", "x": Spread(2.0)}])  # fmt: skip
    assert table.latex().splitlines() == [
        r"\begin{tabular}{lr}", r"\toprule", r"a\_b & MiB $\uparrow$ \\", r"\midrule",
        r"50 \% \& \#1 & 1.00 $\pm$ 0.50 \\", r"\{z\} & \textbf{2.00} \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_result_records_have_settings_and_exact_numbers(tmp_path: Path) -> None:
    runs = section_of(write_comparison(tmp_path / "c")).runs
    flat = results.result_records(runs)
    assert [row["p_acc_max"] for row in flat] == [60, 80, 75, 61, 82, 75]
    assert {row["up_payload_per_round"] for row in flat if row["method"] == "stc"} == {64 * 1024}
    assert [row["directory"] for row in flat][:2] == ["l0", "f0"]
    assert "method.server_step" in flat[1], "fedavg has it, others do not"
    entry = results.results_json(runs, schema=1)["runs"][1]
    assert entry["accuracy"] == {"max": 80, "last10": 75, "final": 80}
    assert (entry["validation_accuracy"], entry["everyone"]) == (None, 60.0)


def test_brackets_and_long_notes_are_printed_unchanged() -> None:
    note = "P-acc of each participant's own model on its own test split after local steps, in percent of all [samples]"
    lines = printed(
        table_from_records([{"a": "[one]", "b": "[/two]"}], "[a title of more than] eight columns", note)
    ).splitlines()
    shown = [line.strip() for line in lines if line.strip()]
    assert shown[0] == "[a title of more than] eight columns"
    assert "[one]" in shown[-3]
    assert shown[-2:] == [
        "P-acc of each participant's own model on its own test split",
        "after local steps, in percent of all [samples]",
    ]


def test_every_column_finds_its_value_in_a_summary() -> None:
    """A column with a misspelt path would disappear without an error."""
    short = {"rounds": 2, "clients": 4, "hidden": 8, "validation": 0.2, "progress": False}
    images = pfedlms.run("digits", method="fedavg", newcomers=0.25, **short)
    words = pfedlms.data.texts({"a": "abab" * 30, "b": "baab" * 30}, window=8)
    text = pfedlms.run(words, "gru", method="fedavg", rounds=2, progress=False)
    for column in COLUMNS:
        if column.path:
            assert any(column.value(run.summary) is not None for run in (images, text)), column.key


def test_columns_are_selected_by_key_or_head() -> None:
    records = [{"name": "a", "p_acc_max": 1.5, "total": 2.5}]
    table = Table([Column("name", "method"), Column("p_acc_max", "P-acc max"), Column("total", "MiB")], records)
    assert table.select(["total", "P-acc max"]).latex().splitlines()[2:5] == [
        r"method & MiB & P-acc max \\", r"\midrule", r"a & 2.50 & 1.50 \\"
    ]  # fmt: skip
    assert table.select(["name", "total"]).columns == table.select(["total"]).columns
    assert table.select([]) is table
    with pytest.raises(UsageError, match=r"columns: got 'p_acc'.*P-acc max"):
        table.select(["p_acc"])
