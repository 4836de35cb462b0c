"""Tables of the field, in Markdown, from the rows of `study.py rivals-DATASET`, `bytes-DATASET` and `speakers`.

python benchmarks/field_table.py rivals-cifar10 [--out DIR]      # rows as they are run, else those collected
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import regimes
import study
from regime_table import Row, accuracies, spread, total

COLUMNS = ("everyone", "P-acc", "G-acc", "newcomers before", "newcomers after", "perplexity", "of the shared model")


def measured(row: Row) -> dict[str, float]:
    """P-acc, G-acc and perplexities are means of the last 3 evaluations; of the last 10 where nobody but participants
    is measured."""
    summary, curve = row["summary"], row["curve"]
    found = {"everyone": accuracies(row)["everyone"]} if summary["everyone"] else {}
    last = 3 if summary["everyone"] else 10
    found |= {name: mean(curve[key][-last:]) for name, key in (("P-acc", "p_acc"), ("G-acc", "g_acc")) if key in curve}
    newcomers = summary.get("newcomers") or {}
    found |= {f"newcomers {when}": newcomers[when] for when in ("before", "after") if when in newcomers}
    spoken = (("perplexity", "perplexity"), ("of the shared model", "global_perplexity"))
    return found | {name: summary[key]["last10"] for name, key in spoken if key in summary}


def named(row: Row) -> str:
    """The method with what was chosen for it."""
    method, rate = row["config"]["method"], row["config"]["train"]["learning_rate"]
    if row["label"] == "finetune-0":
        return f"`finetune`, E′ = 0, rate {rate:g}"
    key = regimes.OWN[row["label"]][0].partition(".")[2]
    own = "" if key == "learning_rate" else f"{key.replace('_', ' ')} {method[key]:.3g}, "
    return f"`{row['label']}`, {own}rate {rate:g}"


def table(rows: Sequence[Row]) -> None:
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    found = {label: [measured(row) for row in own] for label, own in by_label.items()}
    shown = [name for name in COLUMNS if any(name in each for own in found.values() for each in own)]
    print(f"| | {' | '.join(shown)} | MiB | seeds |\n|---|{'---|' * (len(shown) + 2)}")
    for label in sorted(found, key=lambda label: -mean(each[shown[0]] for each in found[label])):
        values_of = found[label]
        values = [spread([each[name] for each in values_of if name in each]) for name in shown]
        mib = total(by_label[label])
        sent = f"{mib:,.0f}" if mib >= 1000 else f"{mib:.3g}"
        print(f"| {named(by_label[label][0])} | {' | '.join(values)} | {sent} | {len(values_of)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP")
    parser.add_argument("--out", type=Path, default=study.RESULTS)
    options = parser.parse_args()
    for group in options.groups:
        rows = [row for row in study.rows_in(options.out, group) if row["status"] == "finished"]
        for setup in dict.fromkeys(row["setup"] for row in rows):
            print(f"\n{group}, {setup}\n")
            table([row for row in rows if row["setup"] == setup])


if __name__ == "__main__":
    main()
