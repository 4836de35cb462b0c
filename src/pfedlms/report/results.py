"""Tables of runs. A column is declared once, in `COLUMNS`, and appears on the terminal, on the page, in Markdown, in
LaTeX, in results.csv and in results.json."""

from __future__ import annotations

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
    Settings,
    all_rows,
    best_combination,
    combinations,
    compare_settings,
    dataset_title,
    rows,
)
from pfedlms.report.tables import Column, Summary, Table, accuracy_text, count_text, metric_text, mib_text


def _per_round(*names: str) -> Callable[[Summary], float]:
    """MiB of all participants in a round; fields that older runs do not have are 0."""
    return lambda summary: sum(summary["bytes_per_round"].get(name, 0) for name in names) / MIB


def _mean(values: list[Any]) -> float | None:
    measured = [value for value in values if value is not None]
    return mean(measured) if measured else None


_ACCURACY: dict[str, Any] = {"show": accuracy_text, "leads": True}
_MIB: dict[str, Any] = {"show": mib_text, "over_seeds": _mean}
COLUMNS: tuple[Column, ...] = (
    Column("p_acc_max", "P-acc max", place="accuracy.max", **_ACCURACY,
           note="P-acc: each participant's own model on its own test split after local steps"),
    Column("p_acc_last10", "P-acc last 10", place="accuracy.last10", **_ACCURACY),
    Column("p_acc_final", place="accuracy.final"),
    Column("v_acc_max", place="validation_accuracy.max"),
    Column("v_acc_last10", "V-acc last 10", place="validation_accuracy.last10", **_ACCURACY,
           note="V-acc: the same models on samples set aside (data.validation)"),
    Column("v_acc_final", place="validation_accuracy.final"),
    Column("g_acc_max", "G-acc max", place="global_accuracy.max", optional=1, **_ACCURACY,
           note="G-acc: the shared model before local steps, – where a method shares none"),
    Column("g_acc_last10", "G-acc last 10", place="global_accuracy.last10", optional=2, **_ACCURACY),
    Column("g_acc_final", place="global_accuracy.final"),
    Column("everyone", "everyone", place="everyone", of=lambda summary: (summary.get("everyone") or {}).get("accuracy"),
           when=lambda summary: summary.get("participation", 1.0) < 1 or "unheard" in summary, **_ACCURACY,
           note="everyone: all clients after the last round, with the model each would use next"),
    Column("perplexity_last10", "perplexity last 10", show=metric_text, place="perplexity.last10", optional=1,
           note="perplexity: exp of the mean loss per token, of the models of P-acc"),
    Column("perplexity_final", place="perplexity.final"),
    Column("g_perplexity_final", place="global_perplexity.final"),
    Column("newcomers_before", "newcomers before", place="newcomers.before", **_ACCURACY,
           note="newcomers: clients held out of the run, with what a new client gets, and after its first local steps"),
    Column("newcomers_after", "newcomers after", place="newcomers.after", **_ACCURACY),
    Column("up_payload_per_round", place="bytes_per_round.up_payload"),
    Column("up_framing_per_round", place="bytes_per_round.up_framing"),
    Column("down_payload_per_round", place="bytes_per_round.down_payload"),
    Column("down_framing_per_round", place="bytes_per_round.down_framing"),
    Column("catch_up_per_round", place="bytes_per_round.catch_up"),
    Column("mib_up", "MiB ↑", place="mib_up", of=_per_round("up_payload", "up_framing"), **_MIB,
           note="MiB ↑ ↓: of all participants in a round, framing and catching up included"),
    Column("mib_down", "MiB ↓", place="mib_down", of=_per_round("down_payload", "down_framing", "catch_up"), **_MIB),
    Column("total_bytes", "MiB total", place="total_bytes", optional=2, over_seeds=_mean,
           show=lambda value: mib_text(value / MIB), note="MiB total: of the whole run"),
    Column("fewer", "fewer", show="{:,.1f}×".format, over_seeds=None, optional=1,
           note="fewer: how many times fewer bytes than FedAvg"),
    Column("rounds", "rounds", place="rounds", over_seeds=max, optional=2),
    Column("seeds", "seeds", over_seeds=None, optional=2),
    Column("seconds", "s", place="seconds", show="{:,.1f}".format, over_seeds=_mean, optional=1,
           note="s: seconds per run"),
)  # fmt: skip
"""All measures of a run, in the order of tables. One more line here is one more column everywhere, of what
`experiment.summary` writes down."""


def comparison(runs: Sequence[RunLike], swept: Section | None = None) -> Table:
    """One row per label, in the order in which labels first appear; of a sweep the best is marked. Runs that diverged
    or were interrupted do not enter the means of those that finished; a row in which none finished shows what it had
    reached."""
    grouped, planned = rows(runs), all_rows(runs)
    top = best_combination(combinations(swept)) if swept is not None else None
    records = []
    for label, own in grouped.items():
        status = own[0].summary["status"]
        missing = f"{len(own)} of {len(planned[label])} seeds" if len(own) < len(planned[label]) else ""
        note = "best" if top and label == top.label else missing or (status if status != "finished" else "")
        records.append({"name": f"{label} ({note})" if note else label, "row": label, **_over_seeds(own)})
    plain = next((label for label, own in grouped.items() if own[0].summary["method"] == REFERENCE), None)
    if plain is not None and swept is None:
        traffic = {record["row"]: record["mib_up"] + record["mib_down"] for record in records}
        for record in records:
            own_traffic = traffic[record["row"]]
            record["fewer"] = traffic[plain] / own_traffic if own_traffic and traffic[plain] else None
    summaries = [run.summary for run in runs]
    chosen = f"; the best by {MEASURES[swept.by][0]} last 10" if swept is not None else ""
    about = list(describe_runs(runs, swept.axes if swept is not None else ()).values())
    if swept is not None and len({summary["method"] for summary in summaries}) == 1:
        about.insert(0, summaries[0]["method"])
    columns = [Column("name", "settings" if swept is not None else "method"), *_columns(summaries)]
    intro = f"{measured(summaries[0])}, ± over seeds: maximum, and mean of the last evaluations, at most 10{chosen}."
    return Table(columns, records, " · ".join(about), intro)


def _over_seeds(runs: Sequence[RunLike]) -> dict[str, Any]:
    values = {
        column.key: column.over_seeds([column.value(run.summary) for run in runs])
        for column in COLUMNS
        if column.over_seeds is not None
    }
    return {**values, "seeds": len(runs)}


def _columns(summaries: Sequence[Summary]) -> list[Column]:
    """Those that apply, with numbers in the form that fits the runs."""
    form = metric_text if "metric" in summaries[0] else accuracy_text
    return [
        replace(column, show=form if column.show is accuracy_text else column.show)
        for column in COLUMNS
        if any(map(column.when, summaries))
    ]


def describe_runs(runs: Sequence[RunLike], swept: Iterable[str] = ()) -> dict[str, str]:
    """What was run, by setting, without what is swept: data set, model, clients, partition, participation, rounds."""
    first, data = runs[0].summary, runs[0].settings.get("data", {})
    share = first.get("participation", 1.0)
    left_out = {"data.alpha" if key == "data.partition" else key for key in swept}
    clients = {
        "data.clients": count_text(first["clients"], "client"),
        "data.alpha": partition_text(first, data) if data else "",
        "train.participation": f"{100 * share:g} % per round" * (share < 1),
        "run.lost": "messages lost" * ("unheard" in first),
    }
    parts = {
        "data.dataset": dataset_title(data.get("dataset", first["dataset"])),
        "model.name": f"{first['model']}, {first.get('parameters', 0):,} parameters",
        "clients": ", ".join(text for key, text in clients.items() if text and key not in left_out),
        "train.rounds": _rounds([run.summary for run in runs]),
    }
    return {key: text for key, text in parts.items() if text and key not in left_out}


def _rounds(summaries: Sequence[Summary]) -> str:
    """Of the runs that finished, or of all if none did."""
    played = [summary for summary in summaries if summary["status"] == "finished"] or summaries
    most = max(summary["rounds"] for summary in played)
    differ = any(summary["rounds"] < most or summary.get("stopped_early") for summary in played)
    return "up to " * differ + count_text(most, "round")


def measured(summary: Summary) -> str:
    """The unit of the accuracy columns: percent, or the user's own metric."""
    if "metric" in summary:
        return f"{summary['metric']}, the higher the better"
    return "Next-token accuracy in %" if "tokens" in summary else "Accuracy in %"


def partition_text(summary: Summary, data: Mapping[str, Any]) -> str:
    """How samples were split over clients, as far as that is known: `α = 0.5`, `partition iid`."""
    dataset = data.get("dataset", "custom")
    by_name = "" if dataset == "custom" or ":" in dataset else "dirichlet"
    chosen = data.get("partition", "auto")
    scheme = summary.get("partition") or (chosen if chosen != "auto" else by_name)
    alpha = f"α = {data.get('alpha', 0.0):g}"
    return {"": "", "dirichlet": alpha, "quantity": f"partition quantity, {alpha}"}.get(scheme, f"partition {scheme}")


# --- results.csv and results.json ---

_OF_A_RUN = ("method", "seed", "status")


def results_json(runs: Sequence[RunLike], planned: Sequence[Settings] = (), **more: Any) -> dict[str, Any]:
    """The document of results.json: one entry per run, with the settings in which the runs differ. The settings are
    those of all runs that are `planned`, so that they stay the same until all are done."""
    same, differing = compare_settings(planned or [run.settings for run in runs])
    entries = []
    for run, own in zip(runs, differing, strict=False):
        entry = {"name": run.label, **{key: run.summary[key] for key in _OF_A_RUN}, "settings": own}
        for column in COLUMNS:
            outer, _, inner = column.place.partition(".")
            if inner:
                entry.setdefault(outer, {})[inner] = column.value(run.summary)
            elif outer:
                entry[outer] = column.value(run.summary)
        for _, name in MEASURES.values():
            entry[name] = entry[name] if name in run.summary else None
        entries.append({**entry, "directory": run.directory.name if run.directory else None})
    return {"schema": 1, **more, "settings": same, "runs": entries}


def result_records(runs: Sequence[RunLike], planned: Sequence[Settings] = ()) -> list[dict[str, Any]]:
    """One flat record per run, for results.csv and data frames."""
    differing = compare_settings(planned or [run.settings for run in runs])[1]
    keys = list(dict.fromkeys(key for own in differing for key in own))
    return [
        {
            "name": run.label,
            **{key: run.summary[key] for key in _OF_A_RUN},
            **{key: own.get(key) for key in keys},
            **{column.key: column.value(run.summary) for column in COLUMNS if column.place},
            "directory": run.directory.name if run.directory else None,
        }
        for run, own in zip(runs, differing, strict=False)
    ]
