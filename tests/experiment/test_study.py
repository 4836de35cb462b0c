"""Problems, runs and studies: how they are made, stored, loaded, resumed and exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import SMALL, Crash, CrashAt, X, Y, half_accuracy, linear, same_models, without_timings
from torch import nn

import pfedlms
from pfedlms.errors import ConfigError, RunDirectoryError, UsageError
from pfedlms.experiment import plugins
from pfedlms.experiment.config import load_config
from pfedlms.experiment.rules import ineffective_settings
from pfedlms.methods import METHODS
from pfedlms.models import MODELS

ROOT = Path(__file__).parents[2]


def test_a_problem_gives_the_same_run_as_its_parts() -> None:
    parts = pfedlms.run((X, Y), linear, metric=("half", half_accuracy), method="fedavg", **SMALL)
    whole = pfedlms.run(pfedlms.Problem((X, Y), linear, metric=("half", half_accuracy)), method="fedavg", **SMALL)
    assert without_timings(parts.metrics) == without_timings(whole.metrics)
    assert parts.config == whole.config
    with pytest.raises(UsageError, match="model: got one beside a Problem, which has its own"):
        pfedlms.run(pfedlms.Problem((X, Y)), linear)
    assert pfedlms.run(pfedlms.Problem("digits", "dnn"), method="local", **SMALL).config.data.dataset == "digits"


def test_common_names_of_settings_are_answered_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"lr: unknown setting of pfedlms; did you mean train\.learning_rate\?"):
        pfedlms.run("digits", lr=1)
    with pytest.raises(ConfigError, match=r"data\.num_clients: unknown key; did you mean data\.clients\?"):
        load_config(None, {"data": {"num_clients": 1}})


# --- runs ---


def test_a_loaded_run_equals_the_stored_run(tmp_path: Path) -> None:
    named = {f"station {k}": (X[k::3], Y[k::3]) for k in range(3)}
    problem = pfedlms.Problem(named, linear)
    fresh = pfedlms.run(problem, method="fedavg", validation=0.2, out=tmp_path / "r", rounds=3, threads=1)
    loaded = pfedlms.load(tmp_path / "r", problem)
    assert (loaded.label, loaded.settings, loaded.metrics, loaded.summary, loaded.directory) == (
        fresh.label, fresh.settings, fresh.metrics, fresh.summary, fresh.directory
    )  # fmt: skip
    assert (loaded.accuracy, loaded.validation_accuracy) == (fresh.accuracy, fresh.validation_accuracy)
    assert loaded.classes == fresh.classes == ("0", "1")
    assert loaded.client_names == ("station 0", "station 1", "station 2")
    sample = torch.from_numpy(X[:9])
    with torch.no_grad():
        assert torch.equal(loaded.model("station 1")(sample), fresh.model(1)(sample))
        assert torch.equal(fresh.model(1)(sample), sample @ fresh.models[1]["weight"].T + fresh.models[1]["bias"])
    frame = loaded.to_pandas()
    assert list(frame["p_acc"]) == [record["p_acc"] for record in fresh.metrics]
    assert frame["bytes_up_payload"].iloc[-1] == fresh.metrics[-1]["bytes"]["up_payload"]


@pytest.mark.parametrize("at", [1, 3])
def test_a_killed_run_has_the_summary_of_a_shorter_run(at: int, tmp_path: Path) -> None:
    problem = pfedlms.Problem({"a": (X[::2], Y[::2]), "b": (X[1::2], Y[1::2])}, linear, metric=("half", half_accuracy))
    options: dict[str, Any] = {"method": "fedavg", "validation": 0.2, "checkpoint_every": 2, "threads": 1}
    with pytest.raises(Crash):
        pfedlms.run(problem, rounds=5, out=tmp_path / "r", callbacks=[CrashAt(at, where=["on_step"])], **options)
    killed = pfedlms.load(tmp_path / "r").summary
    whole = pfedlms.run(problem, rounds=at, **options).summary
    assert (killed["status"], killed["metric"]) == ("interrupted", "half")
    names = ["client_names", "partition"] if at == 3 else []
    for key in ("metric", "rounds", "evaluations", "accuracy", "best", "validation_accuracy", "global_accuracy",
                "bytes_per_round", "total_bytes", "rejected", "clients", *names):  # fmt: skip
        assert killed[key] == whole[key], key


def test_a_callback_can_end_a_run(tmp_path: Path) -> None:
    started_at: list[int] = []
    stop_after_two = SimpleNamespace(
        on_start=lambda run: started_at.append(run.round),
        on_evaluation=lambda run, record: run.stop() if len(run.metrics) == 2 else None,
    )
    run = pfedlms.run(method="local", out=tmp_path / "r", callbacks=[stop_after_two], **{**SMALL, "rounds": 9})
    assert (run.summary["status"], run.summary["rounds"]) == ("finished", 2)
    assert run.resume(callbacks=[stop_after_two]).summary["rounds"] == 9
    assert started_at == [0, 2]


def test_the_suffix_of_an_export_chooses_its_format(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    run = pfedlms.run(method="fedavg", out=tmp_path / "r", **SMALL)
    run.export(tmp_path / "m.onnx", client=3)
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    x = run.federation.data.x[:7]
    with torch.no_grad():
        expected = run.model(3)(x).numpy()
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], expected, atol=1e-5)
    props = {each.key: each.value for each in onnx.load(tmp_path / "m.onnx").metadata_props}
    run.export(tmp_path / "m.pt", client=3)
    for about in (json.loads(props["pfedlms"]), json.loads((tmp_path / "m.json").read_text())):
        assert about["normalisation"] == {"mean": [0.3053], "std": [0.376], "scale": 16.0}
        assert (about["client"], about["shape"], about["classes"]) == (3, [1, 8, 8], 10)
    pfedlms.export(tmp_path / "r", tmp_path / "again.pt", client=3)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("m.pt", "again.pt"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    with pytest.raises(UsageError, match=r"m\.h5: got the suffix '\.h5' for one model, expected a \.pt .* or \.onnx"):
        run.export(tmp_path / "m.h5", client=3)


def test_normalisation_constants_are_stored_and_can_be_given(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 200, size=(60, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "one.npz", x=images, y=np.arange(60) % 2)
    options = {**SMALL, "method": "local", "rounds": 1}
    one = pfedlms.run(f"file:{tmp_path / 'one.npz'}", out=tmp_path / "r", **options)
    raw = images.astype(np.float64) / 255
    stored = tomllib.loads((tmp_path / "r" / "config.toml").read_text())["data"]
    assert float(stored["mean"]) == pytest.approx(raw.mean())
    assert float(stored["std"]) == pytest.approx(raw.std())
    constants = {"mean": [float(stored["mean"])], "std": [float(stored["std"])], "scale": 255}
    assert one.summary["normalisation"] == constants
    given = pfedlms.run(f"file:{tmp_path / 'one.npz'}", mean="0.5", std="0.25", **options)
    np.testing.assert_allclose(given.federation.data.x[:, 0].numpy(), (raw - 0.5) / 0.25, atol=1e-5)


def test_a_cosine_schedule_has_a_floor_by_default() -> None:
    """Personalisation needs local steps in the last rounds."""
    assert not list(ineffective_settings(load_config(None, {"train": {"schedule": "cosine"}})))
    (warned,) = ineffective_settings(load_config(None, {"train": {"schedule": "cosine", "floor": 0.0}}))
    assert warned.startswith("train.schedule: cosine ends at ")
    assert "the last local steps do nothing" in warned
    steps = {"schedule": "step", "decay": 0.1, "decay_every": 10, "rounds": 100}
    assert "a larger train.decay" in next(iter(ineffective_settings(load_config(None, {"train": steps}))))
    assert load_config(None, {"train": {"schedule": "cosine"}}).train.floor == 0.1


# --- studies ---


def test_a_grid_trains_every_method_with_every_value_and_seed() -> None:
    """A value is left out for methods without that setting; a run equals the same run outside the study; the best is
    chosen by V-acc."""
    grid = {"method": ["sketchvote", "fedavg:server_step=0.5"], "ratio": [0.1, 0.5], "train.learning_rate": [0.01, 0.2]}
    study = pfedlms.study(grid=grid, seeds=[3, 1], validation=0.3, **SMALL)
    rows = ["sketchvote ratio=0.1 learning_rate=0.01", "sketchvote ratio=0.1 learning_rate=0.2",
            "sketchvote ratio=0.5 learning_rate=0.01", "sketchvote ratio=0.5 learning_rate=0.2",
            "fedavg:server_step=0.5 learning_rate=0.01", "fedavg:server_step=0.5 learning_rate=0.2"]  # fmt: skip
    assert [(run.label, run.config.run.seed) for run in study.runs] == [(row, seed) for row in rows for seed in (3, 1)]
    single_run = pfedlms.run(method="fedavg", server_step=0.5, learning_rate=0.2, seed=3, validation=0.3, **SMALL)
    assert without_timings(study.runs[-2].metrics) == without_timings(single_run.metrics)
    assert same_models(study.runs[-2].models, single_run.models)
    scores = {row: np.mean([r.validation_accuracy for r in study.runs if r.label == row]) for row in rows}
    best, by_test = study.best(), study.best("p_acc")
    with pytest.raises(ConfigError, match="by: got 'pacc', expected one of: p_acc"):
        study.best("pacc")
    assert (best["name"], best["score"]) == (max(scores, key=lambda row: scores[row]), max(scores.values()))
    assert by_test["score"] == max(np.mean([r.accuracy for r in study.runs if r.label == row]) for row in rows)
    frame = study.to_pandas()
    assert list(frame["name"]) == [run.label for run in study.runs]
    assert list(frame["method.ratio"].dropna()) == [0.1] * 4 + [0.5] * 4
    assert study.to_latex().count(r"\\") == 1 + len(rows)
    with pytest.raises(UsageError, match="expected one of them"):
        pfedlms.study(**SMALL)


def test_a_study_of_a_setting_that_no_method_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^method\.thresholds: unknown setting of local, fedavg; leave it out$"):
        pfedlms.study(grid={"method": ["local", "fedavg"], "method.thresholds": [1, 2]}, **SMALL)


def test_seeds_may_be_any_iterable() -> None:
    study = pfedlms.study(grid={"method": ["local", "fedavg"]}, seeds=(seed for seed in (4, 2)), **SMALL)
    assert [run.config.run.seed for run in study.runs] == [4, 2, 4, 2]


def test_cells_are_added_to_a_study_and_resumed_by_their_settings(tmp_path: Path) -> None:
    cells = {"narrow": {"method": "fedavg", "hidden": 4}, "alone": {"method": "local", "train": {"momentum": 0.5}}}
    options: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "hidden"}
    first = pfedlms.study(cells=cells, out=tmp_path / "s", **options)
    assert [run.settings["model"]["hidden"] for run in first.runs] == [4, load_config().model.hidden]
    assert first.runs[1].settings["train"]["momentum"] == 0.5
    metrics = tmp_path / "s" / "narrow-seed0" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    again = pfedlms.study(cells={"narrow": cells["narrow"], "wide": {"hidden": 16}}, out=tmp_path / "s", **options)
    assert [run.label for run in again.runs] == ["narrow", "wide"]
    assert metrics.stat().st_mtime_ns == before
    everything = pfedlms.load(tmp_path / "s")
    assert {run.label for run in everything.runs} == {"narrow", "alone", "wide"}
    assert not everything.interrupted
    with pytest.raises(RunDirectoryError, match=r"holds runs already, narrow-seed0 with another model\.hidden"):
        pfedlms.study(cells={"narrow": {"method": "fedavg", "hidden": 5}}, out=tmp_path / "s", **options)
    with pytest.raises(ConfigError, match="by: got g_acc, but local has no shared model"):
        pfedlms.study(cells=cells, by="g_acc", **options)
    with pytest.raises(RunDirectoryError, match="s: holds a study already; name another out=DIR"):
        pfedlms.run(method="fedavg", out=tmp_path / "s", **options)


def test_a_study_without_a_finished_run_resumes_with_its_problem(tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": "local,fedavg", "seeds": 1, **SMALL}
    pfedlms.compare((X, Y), linear, out=tmp_path / "s", **options)
    call = r"resume them with `pfedlms\.resume\('.*s', data, model\)`"
    with pytest.raises(RunDirectoryError, match=call):
        pfedlms.compare((X, Y), linear, out=tmp_path / "s", **{**options, "rounds": 9})
    for folder in (tmp_path / "s").glob("*-seed0"):  # as if killed before the first round
        shutil.rmtree(folder)
    loaded = pfedlms.load(tmp_path / "s", (X, Y), linear)
    assert (loaded.runs, loaded.interrupted) == ([], True)
    whole = pfedlms.compare((X, Y), linear, **options)
    resumed = loaded.resume(progress=False)
    assert [without_timings(run.metrics) for run in resumed.runs] == [
        without_timings(run.metrics) for run in whole.runs
    ]


def test_no_run_starts_after_the_time_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"grid": {"method": ["local", "fedavg"]}, "out": tmp_path / "s", **SMALL}
    for workers in (1, 2):
        assert pfedlms.study(seconds=0, workers=workers, **options).runs == []
    whole = pfedlms.study(**options)
    assert [run.summary["status"] for run in whole.runs] == ["finished", "finished"]


# --- custom methods and models ---

CUSTOM_MODULE = """
from torch import Tensor, nn
from pfedlms.methods import register
from pfedlms.methods.fedavg import FedAvg
from pfedlms.models import MODELS
from pfedlms.models.zoo import Entry


@register
class Mine(FedAvg):
    name = "mine"


MODELS["tiny"] = Entry("one layer", lambda shape, classes, hidden: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
"""


PROGRAM = """
from pfedlms.cli import main
if __name__ == "__main__":
    for each in {calls}:
        assert main(each) == 0, each
"""


def test_the_command_line_imports_custom_methods_and_models(tmp_path: Path) -> None:
    (tmp_path / "own_methods.py").write_text(CUSTOM_MODULE)
    quick = ["--rounds", "2", "--clients", "3", "--local-steps", "1", "--model", "tiny", "--quiet"]
    commands = [
        ["run", "--method", "mine", *quick, "--out", "r"],
        ["compare", "--methods", "mine,local", "--seeds", "1", "--workers", "2", *quick, "--out", "c"],
        ["show", "c"],
        ["export", "r", "--client", "0", "-o", "m.pt"],
    ]
    calls = [[*each, "--import", "own_methods"] for each in commands]
    (tmp_path / "program.py").write_text(PROGRAM.format(calls=calls))
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "program.py"], env=environment, **options)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    missing = subprocess.run([sys.executable, "-m", "pfedlms", "show", "r"], env=environment, **options)
    assert missing.returncode == 2
    assert "method.name: got 'mine'" in missing.stderr


def test_installed_packages_can_offer_methods_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(METHODS["fedavg"]):
        name = "installed"

    def flat(shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))

    points = {
        "pfedlms.methods": [SimpleNamespace(name="installed", value="package:Installed", load=lambda: Installed)],
        "pfedlms.models": [SimpleNamespace(name="flat", value="package:flat", load=lambda: flat)],
    }
    monkeypatch.setattr(plugins, "installed_entry_points", lambda group, path: points[group])
    try:
        run = pfedlms.run(method="installed", model="flat", **SMALL)
        assert run.summary["model"] == "flat"
        assert without_timings(run.metrics) == without_timings(
            pfedlms.run(method="fedavg", model="flat", **SMALL).metrics
        )
    finally:
        METHODS.pop("installed", None)
        MODELS.pop("flat", None)


TYPED = """
import pfedlms

problem = pfedlms.Problem("digits", "dnn")
run: pfedlms.Run = pfedlms.run(problem, method="fedavg", rounds=2, learning_rate=0.1)
accuracy: float = run.accuracy
study = pfedlms.study(problem, grid={"method": ["fedavg"], "learning_rate": [0.1, 0.2]}, seeds=[1, 2])
text: str = study.table()
sketch = pfedlms.sketch.Sketch
run.export("model.onnx", client=3)
pfedlms.nonsense()
"""


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_the_api(checker: str, tmp_path: Path) -> None:
    """The checker finds the one name that is unknown, and nothing else."""
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "src")]}))
    (tmp_path / "typed.py").write_text(TYPED)
    options = {
        "mypy": ["--config-file", str(ROOT / "pyproject.toml"), "--follow-imports=silent", "--cache-dir",
                 str(ROOT / ".mypy_cache"), "typed.py"],
        "pyright": ["--pythonpath", sys.executable, "--project", str(tmp_path)],
    }[checker]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", checker, *options], cwd=tmp_path, capture_output=True, text=True, timeout=500,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())},
    )  # fmt: skip
    if checker == "pyright" and "error" not in done.stdout:
        pytest.skip("pyright needs node, which is not here")
    found = [line for line in done.stdout.splitlines() if "error" in line and ".py" in line]
    assert len(found) == 1, done.stdout
    assert "nonsense" in found[0]


def test_a_run_that_starts_over_and_is_killed_has_the_summary_of_its_new_metrics(tmp_path: Path) -> None:
    pfedlms.run((X, Y), linear, method="fedavg", out=tmp_path / "r", **SMALL)
    (tmp_path / "r" / "checkpoint.pt").unlink()
    with pytest.warns(UserWarning, match="starts over"), pytest.raises(Crash):
        pfedlms.resume(tmp_path / "r", (X, Y), linear, callbacks=[CrashAt(2, where=["on_step"])])
    killed = pfedlms.load(tmp_path / "r")
    assert (killed.interrupted, len(killed.metrics)) == (True, 2)


def test_a_run_whose_metric_is_never_finite_has_accuracy_nan() -> None:
    def never_finite(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0] * float("nan")

    run = pfedlms.run((X, Y), linear, metric=never_finite, method="local", **SMALL)
    assert run.summary["accuracy"]["last10"] is None
    assert np.isnan(run.accuracy)
