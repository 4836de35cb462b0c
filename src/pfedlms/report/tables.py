"""What people read: plans and results as tables; the numbers come from `experiment`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
Summary = Mapping[str, Any]


def table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    caption: str | None = None,
    gap: int = 1,
) -> Table:
    """Names on the left, numbers on the right."""
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        title=title,
        title_style="bold",
        caption=caption,
        caption_justify="left",
    )
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if place else "left")
    for row in rows:
        made.add_row(*row)
    return made


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """The table of `pfedlms compare`: a row a method, in the order methods first appear.

    Runs that diverged or were interrupted do not enter the means of those that finished; a method of which none
    finished shows what it had reached.
    """
    first = summaries[0]
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    shown = {name: [run for run in group if run["status"] == "finished"] or group for name, group in groups.items()}
    sampled = first["participation"] < 1 or "unheard" in first
    validated = "validation_accuracy" in first
    accuracies = ["P-acc max", "last 10", *(["V-acc"] * validated), *(["everyone"] * sampled)]
    # So that all of it fits a screen: one column more takes the gaps, two of them the place of the shared model.
    accuracies += [] if sampled and validated else ["G-acc max"]
    gap = 0 if sampled or validated else 1
    fedavg = sum(_mib_per_round(shown["fedavg"])) if "fedavg" in shown else 0.0
    rows = []
    for name, runs in shown.items():
        up, down = _mib_per_round(runs)
        ended, missing = runs[0]["status"], len(runs) < len(groups[name])
        # What a reader must know: how many seeds finished, if not all.
        note = f" ({len(runs)} of {len(groups[name])} seeds)" if missing else f" ({ended})" * (ended != "finished")
        rows.append(
            [
                f"{name}{note}",
                *(_spread([_accuracies(run)[column] for run in runs], " " * gap) for column in accuracies),
                _size(up),
                _size(down),
                f"{fedavg / (up + down):.1f}×" if fedavg and up + down else "–",
                f"{mean(run['seconds'] for run in runs):.1f}",
            ]
        )
    size = f"{first['model']}, {first['parameters']:,} parameters"
    share = f", {100 * first['participation']:g} % a round" if first["participation"] < 1 else ""
    share += ", messages lost" if "unheard" in first else ""
    early = "up to " * any(run.get("stopped_early") for run in summaries)
    rounds = f"{early}{max(run['rounds'] for run in summaries) if early else first['rounds']} rounds"
    title = f"{first['dataset']} · {size} · {first['clients']} clients{share} · {rounds}"
    explained = "; ".join(text for column, text in _EXPLAINED.items() if column in accuracies)
    measured = f"{first['metric']}, the higher the better" if "metric" in first else "Accuracy in %"
    caption = _CAPTION.format(measured, explained, " and catching up" * sampled)
    return table(["method", *accuracies, "MiB ↑", "MiB ↓", "fewer", "s"], rows, title, caption, gap)


_EXPLAINED = {
    "P-acc max": "P-acc: each participant's own model on its own test split after local steps",
    "V-acc": "V-acc: the same models on samples set aside (data.validation), mean of the last 10",
    "everyone": "everyone: of all clients after the last round, a copy of those who took no part in it having heard "
    "its answer and taken its steps",
    "G-acc max": "G-acc: the shared model before local steps",
}
_CAPTION = (
    "{}, ± over seeds: maximum, and mean of the last 10 evaluations. {}. MiB a round of all participants, "
    "framing{} included; fewer: how many times fewer bytes than FedAvg; s: seconds a run."
)


def comparison_text(summaries: Sequence[Summary]) -> str:
    """The comparison as plain text."""
    text = io.StringIO()
    Console(file=text, width=120, no_color=True).print(comparison_table(summaries))
    return text.getvalue()


def bits_table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `pfedlms bits`."""
    first = rows[0]
    sampled = first["participants"] < first["clients"]
    who = f"{first['participants']} of {first['clients']} clients a round" if sampled else f"{first['clients']} clients"
    columns = ("method", "bits ↑", "frame ↑", "bits ↓", "frame ↓", "/n ↑", "/n ↓", "MiB")
    cells = []
    for row in rows:
        up, down, mib = row["up_payload_bits"], row["down_payload_bits"], row["mib_per_round"]
        cells.append(
            [
                f"{row['method']}, {row['downlink']} ↓" if "downlink" in row else row["method"],
                *(f"{bits:,}" for bits in (up, row["up_framing_bits"], down, row["down_framing_bits"])),
                *(f"{bits / row['parameters']:.3g}" for bits in (up, down)),
                "≈" * row["estimated"] + (f"{mib:,.2f}" if mib >= 1 else f"{mib:.3g}") + " +" * row["catches_up"],
            ]
        )
    title = f"{first['model']}, {first['parameters']:,} parameters, {who}"
    more = f" ≈: {ESTIMATED}." if any(row["estimated"] for row in rows) else ""
    more += f" +: and {CATCHING_UP}." if any(row["catches_up"] for row in rows) else ""
    return table(columns, cells, title, _BITS_CAPTION + more)


_BITS_CAPTION = (
    "Bits of one client in one round: payload, framing apart, and payload a parameter (/n). MiB: payload of all "
    "participants in a round, up and down."
)
ESTIMATED = (
    "an average message; one of stc, here with entries at random places, is up to a few percent longer or shorter, one "
    "of sketchvote that has a digest 8 bytes longer"
)
CATCHING_UP = "what clients that were away are sent to catch up, which depends on who is drawn"


def print_plan(plan: Mapping[str, Any], at_once: int, console: Console) -> None:
    """The plan of `pfedlms run --dry-run`, in which `at_once` clients train at the same time."""
    samples, memory, traffic = plan["samples"], plan["memory_bytes"], plan["bytes_per_round"]
    config, participants = plan["config"], plan["participants"]
    data, train, clients = config["data"], config["train"], config["data"]["clients"]
    console.print(
        f"[bold]{config['method']['name']}[/bold] on {data['dataset']}, model {config['model']['name']}, "
        f"{plan['parameters']:,} parameters, on {plan['device']}"
    )
    aside = f" and {samples['validation']:,} for validation" if "validation" in samples else ""
    taking_part = f", {participants} of them in a round" if participants < clients else ""
    console.print(
        f"{clients} clients{taking_part}, α = {data['alpha']:g}, {samples['train']:,} training samples "
        f"({samples['smallest_client']} to {samples['largest_client']} a client){aside}, {train['rounds']} rounds of "
        f"{train['local_steps']} steps"
    )
    if names := plan.get("classes"):
        more = f", … ({len(names)} in all)" if len(names) > 10 else ""
        console.print(f"classes: {', '.join(names[:10])}{more}", markup=False)
    rows = [[value if isinstance(value, str) else f"{value:,}" for value in layer.values()] for layer in plan["layers"]]
    console.print(table(plan["layers"][0], rows, "layers"))
    for way, label in (("up", "clients → server"), ("down", "server → clients")):
        console.print(
            f"{label}: {traffic[f'{way}_payload']:,} bytes a round and {traffic[f'{way}_framing']:,} of framing, "
            "all participants together"
        )
    more = f", {ESTIMATED}" if plan["estimated"] else ""
    more += f", and {CATCHING_UP}" if plan["catches_up"] else ""
    console.print(f"whole run: {plan['total_bytes'] / MIB:,.2f} MiB{more}")
    for note in plan["notes"]:
        console.print(f"note: {note}")
    held, kept, working = (f"{memory[part] / MIB:,.1f} MiB" for part in ("data", "clients", "working"))
    console.print(
        f"memory: about {held} of data, {kept} kept by all clients, {working} at work "
        f"({at_once} at once, activations included)"
    )


def profile_table(seconds: Mapping[str, float], rounds: int) -> Table:
    """The table of `--profile`: time by stage, largest first."""
    total, ordered = sum(seconds.values()), sorted(seconds.items(), key=lambda item: -item[1])
    rows = [(stage, f"{1e3 * spent / rounds:.2f}", f"{100 * spent / total:.0f} %") for stage, spent in ordered]
    return table(("stage", "ms a round", "share"), rows, "where the time went")


def plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows as they are, a column a key."""
    made = Table(*rows[0], box=SIMPLE_HEAD)
    for row in rows:
        made.add_row(*(str(value) for value in row.values()))
    return made


def _accuracies(run: Summary) -> dict[str, float | None]:
    """By the name of their column; None what was not measured."""
    own, shared, everyone = run["accuracy"], run.get("global_accuracy", {}), run["everyone"] or {}
    return {
        "P-acc max": own["max"],
        "last 10": own["last10"],
        "V-acc": run.get("validation_accuracy", {}).get("last10"),
        "everyone": everyone.get("accuracy"),
        "G-acc max": shared.get("max"),
    }


def _mib_per_round(runs: Sequence[Summary]) -> tuple[float, float]:
    """What all participants together send and receive in a round, framing and catching up included."""
    sent = [run["bytes_per_round"] for run in runs]
    up = mean(each["up_payload"] + each["up_framing"] for each in sent)
    down = mean(each["down_payload"] + each["down_framing"] + each["catch_up"] for each in sent)
    return up / MIB, down / MIB


def _spread(values: Iterable[float | None], space: str) -> str:
    """Mean and standard deviation of those that were measured."""
    measured = [value for value in values if value is not None]
    if not measured:
        return "–"
    return f"{mean(measured):.2f}" + (f"{space}±{space}{stdev(measured):.2f}" if len(measured) > 1 else "")


def _size(mib: float) -> str:
    return "0" if mib == 0 else f"{mib:.4f}" if mib < 0.1 else f"{mib:.2f}"
