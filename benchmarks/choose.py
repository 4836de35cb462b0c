"""Choose the setting of its own of every method by validation accuracy, as docs/results.md says, and write the TOML.

    python benchmarks/choose.py DATASET… --data-dir DIR --out DIR [--workers 4] [--device cuda] [--write FOLDER]

One seed that is in no table, α = 0.5, a fifth of the training samples set aside; V-acc of the last 10 evaluations.
Where the best value lies at an end, the search goes on beyond it, by the step it came with. Rows are kept as study.py's
are, in the group own-DATASET, so that a call can be repeated.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import study
from cells import OWN, SWEEP_SEED, own_settings

from pfedlms import load_config, load_dataset
from pfedlms.data.sources import DATASETS

FURTHER = 2  # times beyond an end


def most(dataset: str, method: str) -> float:
    """The largest value there is, or of which the method itself does not warn."""
    if method == "pfedlms":
        config = load_config(None, {"data": {"dataset": dataset}, "method": {"name": method}})
        return 0.1 * config.settings.ratio / config.train.learning_rate * (1 + 1e-9)  # 2 η λ / ratio of 0.2
    return 1.0 if method == "obcsaa" else float("inf")


def found(dataset: str, folders: list[Path]) -> dict[str, dict[float, float]]:
    """V-acc by method and value, of the runs that came to an end."""
    scores: dict[str, dict[float, float]] = {method: {} for method in OWN}
    for folder in folders:
        for row in study.rows_in(folder, f"own-{dataset}"):
            if row["status"] == "finished":
                own = row["config"]["method"]
                scores[own["name"]][rounded(own[OWN[own["name"]][0]])] = row["summary"]["validation_accuracy"]["last10"]
    return scores


def chosen(scores: Mapping[float, float], limit: float) -> float:
    return max((value for value in scores if value <= limit), key=lambda value: scores[value])


def beyond(scores: Mapping[float, float], limit: float) -> float | None:
    """The next value where the best lies at an end of those tried."""
    values, best = sorted(scores), chosen(scores, limit)
    if best == values[-1]:
        value = best * best / values[-2]
        return rounded(value) if value <= limit else None
    return rounded(best * best / values[1]) if best == values[0] else None


def rounded(value: float) -> float:
    """Without what products of decimal fractions leave behind."""
    return float(f"{value:.4g}")


def toml(dataset: str, method: str, scores: Mapping[float, float]) -> str:
    values, key = sorted(scores), OWN[method][0]
    swept = (
        f"Swept on seed {SWEEP_SEED}, which is in no table, with data.validation 0.2 at alpha 0.5: {key} "
        f"{', '.join(f'{value:g}' for value in values)}; V-acc of the last 10 evaluations "
        f"{', '.join(f'{scores[value]:.2f}' for value in values)}."
    )
    if values[-1] > most(dataset, method):
        swept += f" Of what is beyond {most(dataset, method):g} the method warns."
    files = " --data-dir DIR" if DATASETS[dataset].needs_dir else ""
    return (
        f"# pfedlms run --dataset {dataset}{files} --method {method}\n"
        f"{textwrap.fill(swept, 120, initial_indent='# ', subsequent_indent='# ')}\n"
        f"schema = 1\n\n[method]\n{key} = {chosen(scores, most(dataset, method))!r}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", metavar="DATASET")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--done", type=Path, action="append", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="")
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)  # for trials of this script
    parser.add_argument("--write", type=Path, help="folder for DATASET-METHOD.toml")
    options = parser.parse_args()
    folders = [options.out, *options.done]
    for dataset in options.datasets:
        load_dataset(dataset, options.data_dir or None)
    values = {dataset: {method: list(given) for method, (_, given) in OWN.items()} for dataset in options.datasets}
    for _ in range(1 + FURTHER):
        cells = [cell for dataset in options.datasets for cell in own_settings(dataset, values[dataset])]
        there = {row["cell"] for folder in folders for dataset in options.datasets
                 for row in study.rows_in(folder, f"own-{dataset}")}  # fmt: skip
        missing = [cell for cell in cells if cell.name not in there]
        if missing:
            run = {"device": options.device, "threads": options.threads}
            pairs = [(cell, cell.config(options.data_dir, **run)) for cell in missing]
            if options.rounds:
                pairs = [(cell, replace(own, train=replace(own.train, rounds=options.rounds))) for cell, own in pairs]
            study.run_all(pairs, options, study.current_commit(options))
        for dataset in options.datasets:
            for method, scores in found(dataset, folders).items():
                more = beyond(scores, most(dataset, method)) if len(scores) > 1 else None
                if more is not None:
                    values[dataset][method].append(more)
    for dataset in options.datasets:
        for method, scores in found(dataset, folders).items():
            print(dataset, method, {f"{value:g}": round(scores[value], 2) for value in sorted(scores)})
            if options.write and scores:
                (options.write / f"{dataset}-{method}.toml").write_text(toml(dataset, method, scores))


if __name__ == "__main__":
    main()
