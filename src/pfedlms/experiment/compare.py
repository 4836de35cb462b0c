"""Several methods × seeds on the same partitions, one table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pfedlms.errors import ConfigError, DivergedError, QuorumError, RunDirectoryError
from pfedlms.experiment.config import Config, load_config, merge, of_method, read_toml
from pfedlms.experiment.play import Progress, Result
from pfedlms.experiment.prepare import ModelLike, Own, prepare, python_overrides
from pfedlms.experiment.run import begin, resume
from pfedlms.experiment.store import RunDirectory, write_atomically
from pfedlms.report.tables import comparison_text
from pfedlms.step.own import PerSample

SCHEMA = 1


@dataclass(frozen=True)
class Comparison:
    """The finished runs of a comparison, in the order methods and seeds were given."""

    runs: list[dict[str, Any]]
    """Their summaries."""
    directory: Path | None
    interrupted: bool = False

    @property
    def broken(self) -> bool:
        """Whether any run ended early: a loss stopped being finite, or too many messages were lost."""
        return any(summary["status"] in ("diverged", "failed") for summary in self.runs)

    def __str__(self) -> str:
        return comparison_text(self.runs)


def compare(
    data: Any = None,
    model: ModelLike = None,
    *,
    methods: Sequence[str] = ("local", "fedavg", "pfedlms", "sketchvote"),
    seeds: int = 3,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    loss: PerSample | None = None,
    metric: PerSample | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with `seeds` seeds (from `seed` on); data, model, loss, metric and settings as in `run`.
    Printing the result shows the table.

    A setting that only some of the methods have goes to those.
    """
    own = Own(loss, metric)
    data = own.read(data)  # once, for all runs
    overrides = own.into(python_overrides(data, model, methods, settings))
    configs = plan(config, overrides, methods, seeds)
    return play(configs, Path(out) if out else None, data, model, progress or Progress(), own)


def plan(
    file: str | Path | None, overrides: Mapping[str, Mapping[str, Any]], methods: Sequence[str], seeds: int
) -> list[Config]:
    """One checked configuration for each method and seed; every problem of all of them is reported at once."""
    found = [] if methods else ["--methods: got none, expected at least one name"]
    if len(set(methods)) < len(methods):
        found.append(f"--methods: got {','.join(methods)}, expected every method once")
    if seeds < 1:
        found.append(f"--seeds: got {seeds}, expected a count of at least 1")
    given = merge(read_toml(Path(file)) if file else {}, overrides)
    asked = given.get("method", {})
    configs = []
    for name in methods:
        if isinstance(asked, Mapping):
            given["method"] = {**of_method(name, methods, asked), "name": name}
        try:
            first = load_config(None, given).run.seed
            configs += [load_config(None, merge(given, {"run": {"seed": first + more}})) for more in range(seeds)]
        except ConfigError as error:
            found += [problem for problem in error.problems if problem not in found]
    if found:
        raise ConfigError(found)
    return configs


def play(
    configs: Sequence[Config], out: Path | None, data: Any, model: ModelLike, progress: Progress, own: Own | None = None
) -> Comparison:
    """Execute planned runs; with a directory, every run has its own folder in it, and compare.json the whole plan."""
    own = own or Own()
    if out is None:
        begun = [partial(begin, config.with_run(out=""), progress, data, model, own=own) for config in configs]
        return _collect(begun, None)
    prepare(configs[0], data, model, own)  # finds what is wrong with data and model before anything is written
    manifest = out / "compare.json"
    if manifest.exists() or (out / "config.toml").exists():
        raise RunDirectoryError(f"{out}: holds runs already; go on with `pfedlms resume {out}`, or name another --out")
    named = {f"{config.method}-seed{config.run.seed}": config for config in configs}
    runs = {name: config.with_run(out=str(out / name)).to_toml() for name, config in named.items()}
    content = json.dumps({"schema": SCHEMA, "runs": runs}, indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(manifest, lambda file: file.write(content.encode()))
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written ({error.strerror}); name another --out") from error
    return resume_comparison(out, data, model, progress, own)


def resume_comparison(
    directory: Path, data: Any, model: ModelLike, progress: Progress, own: Own | None = None
) -> Comparison:
    """Finish every run of a comparison that is not finished yet."""
    try:
        manifest = json.loads((directory / "compare.json").read_text())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{directory}: compare.json cannot be read ({error})") from error
    if manifest.get("schema") != SCHEMA:
        raise RunDirectoryError(
            f"{directory}: got schema {manifest.get('schema')!r}, expected {SCHEMA}; "
            "it is of another version of pfedlms"
        )
    runs = manifest["runs"]
    for name, config in runs.items():
        folder = RunDirectory(directory / name)
        if not folder.config.is_file():
            with folder:
                folder.create(config)
    functions = vars(own or Own())
    return _collect([partial(resume, directory / name, data, model, progress, **functions) for name in runs], directory)


def _collect(plays: Sequence[Callable[[], Result]], directory: Path | None) -> Comparison:
    """Play all runs. One that diverges, or loses too many messages, is marked and does not take the others with it."""
    summaries: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt):  # between two runs, or Ctrl-C pressed twice
        for play in plays:
            try:
                result = play()
            except (DivergedError, QuorumError) as error:
                summary = dict(error.summary or {})
                ended = f"{summary['method']} seed {summary['seed']} {summary['status']}"
                warnings.warn(f"{ended}: {error}", stacklevel=2)
                summaries.append(summary)
                continue
            summaries.append(result.summary)
            if result.stopped:
                break
    unfinished = any(summary["status"] == "interrupted" for summary in summaries)
    return Comparison(summaries, directory, interrupted=unfinished or len(summaries) < len(plays))
