"""Tables of runs. A column is declared once, in `COLUMNS`, and appears on the terminal, on the page, in Markdown, in
LaTeX, in results.csv and in results.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from pfedlms.report.runs import (
    MEASURES,
    MIB,
    REFERENCE,
    RunLike,
    Section,
    best_combination,
    compare_settings,
    dataset_title,
    rows_of_finished,
    rows_of_runs,
)
from pfedlms.report.tables import PARTIAL, Column, Summary, Table, accuracy_text, count_text, metric_text, mib_text


def _mib_per_round(*names: str) -> Callable[[Summary], float]:
    """Computes the MiB of all participants in a round from these kinds of bytes."""
    return lambda summary: sum(summary["bytes_per_round"][name] for name in names) / MIB


_ACCURACY: dict[str, Any] = {"format": accuracy_text, "bold_highest": True}
# The maximum over rounds with other participants is that of the luckiest ones, so it is in CSV and JSON only.
_MAXIMUM = {**_ACCURACY, "applies": lambda summary: summary["participation"] == 1}
_P_ACC = "P-acc: each participant's own model on its own test split after local steps"
_G_ACC = "G-acc: the shared model before local steps, – where a method shares none"
_MIB: dict[str, Any] = {"format": mib_text, "over_seeds": mean}
COLUMNS: tuple[Column, ...] = (
    Column("p_acc_max", "P-acc max", path="accuracy.max", note=_P_ACC, **_MAXIMUM),
    Column("p_acc_last10", "P-acc last 10", path="accuracy.last10", note=_P_ACC, **_ACCURACY),
    Column("p_acc_final", path="accuracy.final"),
    Column("v_acc_max", path="validation_accuracy.max"),
    Column("v_acc_last10", "V-acc last 10", path="validation_accuracy.last10", **_ACCURACY,
           note="V-acc: the same models on samples set aside (data.validation)"),
    Column("v_acc_final", path="validation_accuracy.final"),
    Column("g_acc_max", "G-acc max", path="global_accuracy.max", note=_G_ACC, optional=1, **_MAXIMUM),
    Column("g_acc_last10", "G-acc last 10", path="global_accuracy.last10", note=_G_ACC, optional=2, **_ACCURACY),
    Column("g_acc_final", path="global_accuracy.final"),
    Column("everyone", "everyone", path="everyone", **_ACCURACY,
           compute=lambda summary: (summary["everyone"] or {}).get("accuracy"),
           applies=lambda summary: summary["participation"] < 1 or "unheard" in summary,
           note="everyone: all clients after the last round, with the model each would use next"),
    Column("perplexity_last10", "perplexity last 10", format=metric_text, path="perplexity.last10", optional=1,
           note="perplexity: exp of the mean loss per token, of the models of P-acc"),
    Column("perplexity_final", path="perplexity.final"),
    Column("g_perplexity_final", path="global_perplexity.final"),
    Column("newcomers_before", "newcomers before", path="newcomers.before", **_ACCURACY,
           note="newcomers: clients held out of the run, with what a new client gets, and after its first local steps"),
    Column("newcomers_after", "newcomers after", path="newcomers.after", **_ACCURACY),
    Column("up_payload_per_round", path="bytes_per_round.up_payload"),
    Column("up_framing_per_round", path="bytes_per_round.up_framing"),
    Column("down_payload_per_round", path="bytes_per_round.down_payload"),
    Column("down_framing_per_round", path="bytes_per_round.down_framing"),
    Column("catch_up_per_round", path="bytes_per_round.catch_up"),
    Column("mib_up", "MiB ↑", path="mib_up", compute=_mib_per_round("up_payload", "up_framing"), **_MIB,
           note="MiB ↑ ↓: of all participants in a round, framing and catching up included"),
    Column("mib_down", "MiB ↓", path="mib_down", **_MIB,
           compute=_mib_per_round("down_payload", "down_framing", "catch_up")),
    Column("total_bytes", "MiB total", path="total_bytes", optional=2, over_seeds=mean,
           format=lambda value: mib_text(value / MIB), note="MiB total: of the whole run"),
    Column("fewer", "fewer", format="{:,.1f}×".format, over_seeds=None, optional=1,
           note="fewer: how many times fewer bytes than FedAvg"),
    Column("rounds", "rounds", path="rounds", over_seeds=max, optional=2),
    Column("seeds", "seeds", over_seeds=None, optional=2),
    Column("seconds", "s", path="seconds", format="{:,.1f}".format, over_seeds=mean, optional=1,
           note="s: seconds per run"),
)  # fmt: skip
"""All measures of a run, in the order of the tables, from what `experiment.summary` stores. One more line here is one
more column everywhere."""


def comparison(runs: Sequence[RunLike], swept: Section | None = None) -> Table:
    """One row per label, in the order in which labels first appear. Of a sweep, `swept`, the best row is marked. Runs
    that diverged or were interrupted do not enter the means of those that finished; a row in which none finished shows
    what it had reached."""
    rows, planned = rows_of_finished(runs), rows_of_runs(runs)
    top = best_combination(swept) if swept is not None else None
    records = []
    for label, row in rows.items():
        status = row[0].summary["status"]
        missing = f"{len(row)} of {len(planned[label])} seeds" if len(row) < len(planned[label]) else ""
        note = "best" if top and label == top.label else missing or (status if status != "finished" else "")
        name = f"{label} ({note})" if note else label
        partial = {PARTIAL: note} if missing or status != "finished" else {}
        records.append({"name": name, "row": label, **partial, **_over_seeds(row)})
    summaries = [run.summary for run in runs]
    methods = {summary["method"] for summary in summaries}
    reference = next((label for label, row in rows.items() if row[0].summary["method"] == REFERENCE), None)
    if reference is not None and len(methods) > 1:
        traffic = {record["row"]: record["mib_up"] + record["mib_down"] for record in records}
        for record in records:
            own_traffic = traffic[record["row"]]
            record["fewer"] = traffic[reference] / own_traffic if own_traffic and traffic[reference] else None
    chosen = f"; the best by {MEASURES[swept.by][0]} last 10" if swept is not None else ""
    title = describe_runs(runs, swept.axes if swept is not None else ())
    title = f"{summaries[0]['method']} · {title}" if swept is not None and len(methods) == 1 else title
    columns = [Column("name", "settings" if swept is not None else "method"), *_columns_that_apply(summaries)]
    unit = accuracy_unit(summaries[0])
    maximum = "maximum, and " * any(map(_MAXIMUM["applies"], summaries))
    intro = f"{unit}, ± over seeds: {maximum}mean of the last evaluations, at most 10{chosen}."
    if unlike := _unnamed_differences(runs, swept.axes if swept is not None else ()):
        intro += f" Rows differ in {', '.join(unlike)}, too."
    return Table(columns, records, title, intro)


def _unnamed_differences(runs: Sequence[RunLike], axes: Iterable[str]) -> list[str]:
    """Settings of training in which rows differ, `section.key`, without those whose values the names of rows tell: for
    every method a variant names it, so that the row without it has the default."""
    _, differing = compare_settings([run.settings for run in runs])
    methods, named = {run.summary["method"] for run in runs}, dict[str, set[str]]()
    for run in runs:
        for part in re.split("[: ]", run.label):
            named.setdefault(part.partition("=")[0], set()).add(run.summary["method"])
    keys = dict.fromkeys(key for settings in differing for key in settings if key.startswith("train."))
    return [key for key in keys if key not in axes and named.get(key.partition(".")[2]) != methods]


def _over_seeds(runs: Sequence[RunLike]) -> dict[str, Any]:
    values = {
        column.key: column.over_seeds([column.value(run.summary) for run in runs])
        for column in COLUMNS
        if column.over_seeds is not None
    }
    return {**values, "seeds": len(runs)}


def _columns_that_apply(summaries: Sequence[Summary]) -> list[Column]:
    """The columns that say something of any run; accuracies are shown as the user's own metric where there is one."""
    form = metric_text if "metric" in summaries[0] else accuracy_text
    chosen = [
        replace(column, format=form if column.format is accuracy_text else column.format)
        for column in COLUMNS
        if any(map(column.applies, summaries))
    ]
    only = "g_acc_last10" if "g_acc_max" not in {column.key for column in chosen} else ""  # the only G-acc: it stays
    return [replace(column, optional=1) if column.key == only else column for column in chosen]


def describe_runs(runs: Sequence[RunLike], swept: Iterable[str] = ()) -> str:
    """What was run: data set, model, clients, partition, participation, rounds; without what is swept."""
    first, data = runs[0].summary, runs[0].settings.get("data", {})
    share = first["participation"]
    left_out = {"data.alpha" if key == "data.partition" else key for key in swept}
    clients = {
        "data.clients": count_text(first["clients"], "client"),
        "data.alpha": partition_text(first, data) if data else "",
        "train.participation": f"{100 * share:g} % per round" * (share < 1),
        "run.lost": "messages lost" * ("unheard" in first),
    }
    parts = {
        "data.dataset": dataset_title(first["dataset"]),
        "model.name": f"{first['model']}, {first['parameters']:,} parameters",
        "clients": ", ".join(text for key, text in clients.items() if text and key not in left_out),
        "train.rounds": _rounds_text([run.summary for run in runs]),
    }
    return " · ".join(text for key, text in parts.items() if key not in left_out and text)


def _rounds_text(summaries: Sequence[Summary]) -> str:
    """The rounds of the runs that finished, or of all if none did."""
    finished = [summary for summary in summaries if summary["status"] == "finished"] or summaries
    most = max(summary["rounds"] for summary in finished)
    differ = any(summary["rounds"] < most or summary.get("stopped_early") for summary in finished)
    return "up to " * differ + count_text(most, "round")


def accuracy_unit(summary: Summary) -> str:
    """The unit of the accuracy columns: percent, or the user's own metric."""
    if "metric" in summary:
        return f"{summary['metric']}, the higher the better"
    return "Next-token accuracy in %" if "tokens" in summary else "Accuracy in %"


def partition_text(summary: Summary, data: Mapping[str, Any]) -> str:
    """How samples were partitioned, as `α = 0.5` or `partition iid`; "" where the summary does not say."""
    scheme, alpha = summary.get("partition", ""), f"α = {data.get('alpha', 0.0):g}"
    return {"": "", "dirichlet": alpha, "quantity": f"partition quantity, {alpha}"}.get(scheme, f"partition {scheme}")


# --- results.csv and results.json ---

_RUN_KEYS = ("method", "seed", "status")


def results_json(runs: Sequence[RunLike], **keys: Any) -> dict[str, Any]:
    """The document of results.json: one entry per run, with the settings in which the runs differ. `keys` are added to
    the document."""
    same, differing = compare_settings([run.settings for run in runs])
    entries = []
    for run, settings in zip(runs, differing, strict=True):
        entry = {"name": run.label, **{key: run.summary[key] for key in _RUN_KEYS}, "settings": settings}
        for column in COLUMNS:
            outer, _, inner = column.path.partition(".")
            if inner:
                entry.setdefault(outer, {})[inner] = column.value(run.summary)
            elif outer:
                entry[outer] = column.value(run.summary)
        for _, name in MEASURES.values():
            entry[name] = entry[name] if name in run.summary else None
        entries.append({**entry, "directory": run.directory.name if run.directory else None})
    return {"schema": 1, **keys, "settings": same, "runs": entries}


def result_records(runs: Sequence[RunLike]) -> list[dict[str, Any]]:
    """One flat record per run, for results.csv and data frames."""
    differing = compare_settings([run.settings for run in runs])[1]
    keys = list(dict.fromkeys(key for settings in differing for key in settings))
    return [
        {
            "name": run.label,
            **{key: run.summary[key] for key in _RUN_KEYS},
            **{key: settings.get(key) for key in keys},
            **{column.key: column.value(run.summary) for column in COLUMNS if column.path},
            "directory": run.directory.name if run.directory else None,
        }
        for run, settings in zip(runs, differing, strict=True)
    ]
