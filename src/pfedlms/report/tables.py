"""What people read: plans and results as tables; the numbers come from `experiment`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pfedlms.experiment.config import Config
    from pfedlms.experiment.schema import DataSection

MIB = 1 << 20
SCREEN = 80
NOTE = 60
"""Titles and notes take at least so many columns, be their table narrower."""
Summary = Mapping[str, Any]


def table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    caption: str | None = None,
    gap: int = 1,
) -> Table:
    """Names on the left, numbers on the right; all text as it is, brackets included."""
    columns, rows = list(columns), [list(row) for row in rows]
    width = _width(columns, rows, gap)
    narrow = width < NOTE
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        title=_as_wide_as_a_note(title) if narrow else escape(title or "") or None,
        title_style="bold",
        title_justify="left" if narrow and cell_len(title or "") > width else "center",
        caption=_as_wide_as_a_note(caption) if narrow else escape(caption or "") or None,
        caption_justify="left",
    )
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if place else "left")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def _as_wide_as_a_note(text: str | None) -> Text | None:
    """Lines that are not broken again."""
    return Text("\n".join(wrap(text, NOTE)), no_wrap=True, overflow="ignore") if text else None


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """The table of `pfedlms compare`: a row a variant, in the order they first appear, in 80 columns.

    Runs that diverged or were interrupted do not enter the means of those that finished; a method of which none
    finished shows what it had reached.
    """
    first = summaries[0]
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.get("name", summary["method"]), []).append(summary)
    shown = {name: [run for run in group if run["status"] == "finished"] or group for name, group in groups.items()}
    sampled = first["participation"] < 1 or "unheard" in first
    validated = "validation_accuracy" in first
    own = "metric" in first
    tail, over = last_evaluations(summaries)
    accuracies = ["P-acc max", tail, *(["V-acc"] * validated), *(["everyone"] * sampled)]
    # So that all of it fits a screen: one column more takes the gaps, two of them the place of the shared model.
    accuracies += [] if sampled and validated else ["G-acc max"]
    plain = next((runs for runs in shown.values() if runs[0]["method"] == "fedavg"), None)
    fedavg = sum(_mib_per_round(plain)) if plain else 0.0
    columns = ["method", *accuracies, "MiB ↑", "MiB ↓", *(["fewer"] * bool(fedavg)), "s"]
    rows = []
    for name, runs in shown.items():
        up, down = _mib_per_round(runs)
        ended, missing = runs[0]["status"], len(runs) < len(groups[name])
        # What a reader must know: how many seeds finished, if not all.
        note = f" ({len(runs)} of {len(groups[name])} seeds)" if missing else f" ({ended})" * (ended != "finished")
        rows.append(
            [
                f"{name}{note}",
                *(_spread([_accuracies(run, tail)[column] for run in runs], own) for column in accuracies),
                _size(up),
                _size(down),
                *([f"{fedavg / (up + down):.1f}×" if up + down else "–"] if fedavg else []),
                f"{mean(run['seconds'] for run in runs):.1f}",
            ]
        )
    size = f"{first['model']}, {first['parameters']:,} parameters"
    share = f", {100 * first['participation']:g} % a round" if first["participation"] < 1 else ""
    share += ", messages lost" if "unheard" in first else ""
    title = f"{first['dataset']} · {size} · {counted(first['clients'], 'client')}{share} · {_rounds(summaries)}"
    columns, rows, gap = fitted(columns, rows, tight=sampled or validated, optional=("G-acc max", "s"))
    explained = "; ".join(text for column, text in _EXPLAINED.items() if column in columns)
    explained += _shared(shown, "G-acc max" in columns)
    caption = _CAPTION.format(measured(first), over, explained, " and catching up" * sampled)
    caption += "; fewer: how many times fewer bytes than FedAvg" * bool(fedavg)
    caption += "; s: seconds a run" * ("s" in columns)
    return table(columns, rows, title, f"{caption}.", gap)


def counted(number: int, what: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {what}{'s' * (number != 1)}"


def _rounds(runs: Sequence[Summary]) -> str:
    """How many were played by runs that finished, or by all if none did."""
    played = [run for run in runs if run["status"] == "finished"] or runs
    most = max(run["rounds"] for run in played)
    differ = any(run["rounds"] < most or run.get("stopped_early") for run in played)
    return "up to " * differ + counted(most, "round")


def _shared(rows: Mapping[str, Sequence[Summary]], shown: bool) -> str:
    """Why there is no G-acc: of which rows, where it is `shown`; altogether, where there was no room for it."""
    without = [name for name, runs in rows.items() if not any("global_accuracy" in run for run in runs)]
    if shown:
        return f" (not for {', '.join(without)})" * bool(without)
    return "; no room for G-acc, see global_accuracy in the results" * (len(without) < len(rows))


def dealt_by(summary: Summary, data: DataSection) -> str:
    """How samples were dealt out, as far as that is known: `α = 0.5`, `partition iid`."""
    by_name = "" if data.dataset == "custom" or ":" in data.dataset else "dirichlet"
    chosen = data.partition if data.partition != "auto" else by_name
    return dealt(summary.get("partition") or chosen, data.alpha)


def dealt(scheme: str, alpha: float) -> str:
    """α where there is one."""
    how = f"α = {alpha:g}"
    return {"": "", "dirichlet": how, "quantity": f"partition quantity, {how}"}.get(scheme, f"partition {scheme}")


def set_up(config: Config, summary: Summary, swept: Iterable[str] = ()) -> str:
    """The title of a study's plot: data set, clients and how samples were dealt out, but for what is `swept`."""
    how = {"data.dataset": config.data.title, "data.clients": counted(summary["clients"], "client")}
    varied = {"data.alpha", "data.partition"} & set(swept)
    parts = [text for key, text in how.items() if key not in swept]
    return " · ".join([*parts, *([] if varied else [dealt_by(summary, config.data)])]).strip(" ·")


def measured(summary: Summary) -> str:
    """What the accuracies of a run are: a metric of the user's own stands in their place."""
    return f"{summary['metric']}, the higher the better" if "metric" in summary else "Accuracy in %"


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], tight: bool = False, optional: Sequence[str] = ()
) -> tuple[list[str], list[list[str]], int]:
    """Columns, rows and the gap so that a table takes a screen of 80 columns: with air if there is room, else without,
    then with the settings of a variant each on a line of its own, then without columns that are `optional`."""
    head, airy = list(columns), [list(row) for row in rows]
    close = [[cell.replace(" ± ", "±") for cell in row] for row in rows]
    for cells, gap in ((airy, 1), (airy, 0), (close, 0)):
        if _width(head, cells, gap) <= SCREEN and not (tight and cells is airy):
            return head, cells, gap
    cells = [[row[0].replace(":", "\n ").replace(" (", "\n ("), *row[1:]] for row in close]
    for name in optional:
        if _width(head, cells, 0) > SCREEN and name in head:
            place = head.index(name)
            head, *cells = ([*row[:place], *row[place + 1 :]] for row in (head, *cells))
    return head, cells, 0


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]], gap: int) -> int:
    """Of a table: its columns, the gaps between them, and a space at either end."""
    widest = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(columns, *rows, strict=True)
    ]
    return sum(widest) + (len(widest) - 1) * (1 + gap) + gap + 2


def last_evaluations(summaries: Sequence[Summary]) -> tuple[str, str]:
    """What the mean of the last 10 evaluations is called, and over how many it is where there are fewer than 20."""
    counts = [run.get("evaluations") or 20 for run in summaries if run["accuracy"]["max"] is not None]
    few = min(counts, default=20)
    if few < 10:
        return f"last {few}", f"all {few} evaluations" if few > 1 else "the one evaluation"
    return "last 10", "the last 10 evaluations" if few >= 20 else f"the last 10 of {few} evaluations"


_EXPLAINED = {
    "P-acc max": "P-acc: each participant's own model on its own test split after local steps",
    "V-acc": "V-acc: the same models on samples set aside (data.validation), the same mean",
    "everyone": "everyone: of all clients after the last round, a copy of those who took no part in it having heard "
    "its answer and taken its steps",
    "G-acc max": "G-acc: the shared model before local steps",
}
_CAPTION = "{}, ± over seeds: maximum, and mean of {}. {}. MiB a round of all participants, framing{} included"


def sweep_table(cells: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, by: str) -> Table:
    """The table of `pfedlms sweep`: a row a combination, the best marked."""
    runs = [run for cell in cells for run in cell["runs"]]
    first, (_, over) = runs[0], last_evaluations(runs)
    measures = {"V-acc": "validation_accuracy", "P-acc": "accuracy", "G-acc": "global_accuracy"}
    measures = {name: key for name, key in measures.items() if any(key in run for run in runs)}
    keys = [key.partition(".")[2] for key in cells[0]["settings"]]
    columns = ["", *keys, *measures, "MiB", "s"]
    rows = []
    for cell in cells:
        ended = {run["status"] for run in cell["runs"]} - {"finished"}
        rows.append(
            [
                "best" if best and cell["name"] == best["name"] else ", ".join(sorted(ended)),
                *(str(value) for value in cell["settings"].values()),
                *(
                    _spread([run.get(key, {}).get("last10") for run in cell["runs"]], "metric" in first)
                    for key in measures.values()
                ),
                _size(sum(_mib_per_round(cell["runs"]))),
                f"{mean(run['seconds'] for run in cell['runs']):.1f}",
            ]
        )
    columns, rows, gap = fitted(columns, rows, optional=("s", "MiB"))
    parts = {
        "data.dataset": f"on {first['dataset']}",
        "model.name": f"· {first['model']}",
        "data.clients": f"· {counted(first['clients'], 'client')}",
        "train.rounds": f"· {_rounds(runs)}",
    }
    title = " ".join([first["method"], *(text for key, text in parts.items() if key not in cells[0]["settings"])])
    named = {"v_acc": "V-acc", "p_acc": "P-acc", "g_acc": "G-acc"}[by]
    explained = "; ".join(_MEASURED[name] for name in measures)
    explained += f"; no G-acc, {first['method']} shares no model" * ("G-acc" not in measures)
    caption = f"{measured(first)}, ± over seeds, mean of {over}; the best by {named}. {explained}. MiB a round of all "
    return table(columns, rows, title, caption + "participants, both ways; s: seconds a run.", gap)


_MEASURED = {
    "V-acc": "V-acc: each participant's own model on samples set aside (data.validation)",
    "P-acc": "P-acc: each participant's own model on its test split",
    "G-acc": "G-acc: the shared model before local steps",
}


def clients_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The per-client table of `pfedlms show --clients`."""
    cells = [[_number(v) if isinstance(v, float) else "–" if v is None else f"{v}" for v in r.values()] for r in rows]
    return table(rows[0], cells, "clients")


def comparison_text(summaries: Sequence[Summary]) -> str:
    """The comparison as plain text."""
    return as_text(comparison_table(summaries)) if summaries else "no runs yet\n"


def as_text(shown: Table) -> str:
    """A table as plain text."""
    text = io.StringIO()
    Console(file=text, width=120, no_color=True).print(shown)
    return text.getvalue()


def as_latex(shown: Table) -> str:
    """A table for a paper (booktabs)."""
    signs = {"±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "–": "--", "η": r"$\eta$"}

    def cell(text: Any) -> str:
        escaped = re.sub(r"([&%$#_{}])", r"\\\1", str(text).replace("\n", " "))
        return "".join(signs.get(letter, letter) for letter in escaped)

    rows = zip(*(column.cells for column in shown.columns), strict=True)
    lines = [" & ".join(map(cell, row)) + r" \\" for row in ([column.header for column in shown.columns], *rows)]
    align = "l" + "r" * (len(shown.columns) - 1)
    return "\n".join(
        [rf"\begin{{tabular}}{{{align}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule",
         r"\end{tabular}", ""]
    )  # fmt: skip


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
        f"[bold]{config['method']['name']}[/bold] on {escape(data['dataset'])}, model {config['model']['name']}, "
        f"{plan['parameters']:,} parameters, on {plan['device']}"
    )
    aside = f" and {samples['validation']:,} for validation" if "validation" in samples else ""
    taking_part = f", {participants} of them in a round" if participants < clients else ""
    how = dealt(plan["partition"], data["alpha"])
    console.print(
        f"{clients} clients{taking_part}, {how}, {samples['train']:,} training samples "
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
        console.print(f"note: {note}", markup=False)
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
        made.add_row(*(escape(str(value)) for value in row.values()))
    return made


def _accuracies(run: Summary, tail: str) -> dict[str, float | None]:
    """By the name of their column, that of the last evaluations in `tail`; None what was not measured."""
    own, shared, everyone = run["accuracy"], run.get("global_accuracy", {}), run["everyone"] or {}
    return {
        "P-acc max": own["max"],
        tail: own["last10"],
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


def _number(value: float) -> str:
    """Two decimals, of small ones four digits: it may be an accuracy or a metric."""
    return f"{value:.4g}" if 0 < abs(value) < 1 else f"{value:.2f}"


def _spread(values: Iterable[float | None], own: bool = False) -> str:
    """Mean and standard deviation of those that were measured; of a metric of the user's `own`, four and two digits,
    wherever its point is."""
    measured = [value for value in values if value is not None]
    if not measured:
        return "–"
    if own:
        return f"{mean(measured):.4g}" + (f" ± {stdev(measured):.2g}" if len(measured) > 1 else "")
    return f"{mean(measured):.2f}" + (f" ± {stdev(measured):.2f}" if len(measured) > 1 else "")


def _size(mib: float) -> str:
    return "0" if mib == 0 else f"{mib:.4f}" if mib < 0.1 else f"{mib:.2f}"
