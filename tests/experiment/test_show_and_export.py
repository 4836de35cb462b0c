"""`show` and `export` of stored runs, also without the data or after the data were moved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import (
    OPTIONS,
    Crash,
    CrashAt,
    X,
    Y,
    accuracy_of_models,
    batch_norm,
    edit_config,
    same_models,
    without_timings,
)
from small import SMALL as SMALL_SETTINGS

import pfedlms
from factories import same
from pfedlms.cli import main
from pfedlms.errors import UsageError

SMALL = {**SMALL_SETTINGS, "clients": 5}


def load(file: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(file, weights_only=True))


@pytest.fixture
def remove_data(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After this function was called, no data set can be read."""

    def fail_to_load(name: str, *_: Any, **more: Any) -> Any:
        raise pfedlms.errors.DataError(f"{name}: removed")

    return lambda: monkeypatch.setattr("pfedlms.experiment.prepare.load_pool", fail_to_load)


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "fedproto"])
def test_export_needs_no_data(method: str, tmp_path: Path, remove_data: Callable[[], None]) -> None:
    result = pfedlms.run(method=method, out=tmp_path / "r", **SMALL)
    models = result.models
    remove_data()
    assert main(["export", str(tmp_path / "r"), "--client", "3", "-o", str(tmp_path / "m.pt")]) == 0
    assert same(load(tmp_path / "m.pt"), models[3])
    assert main(["export", str(tmp_path / "r"), "--all", str(tmp_path / "all")]) == 0
    names = [f"client-{k}.pt" for k in range(5)]
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == [*names, "models.json"]
    assert same_models([load(tmp_path / "all" / name) for name in names], models)


@pytest.mark.parametrize(("method", "participation"), [("fedavg", 1.0), ("sketchvote", 0.6), ("zsign", 0.6)])
def test_the_exported_shared_model_has_the_g_acc_of_the_run(
    method: str, participation: float, tmp_path: Path, remove_data: Callable[[], None]
) -> None:
    """G-acc of the participants of the last round, by PyTorch; the model has no running statistics."""
    result = pfedlms.run(method=method, participation=participation, out=tmp_path / "r", **SMALL)
    data, last = result.federation.data, result.metrics[-1]
    remove_data()
    assert main(["export", str(tmp_path / "r"), "--global", "-o", str(tmp_path / "w.pt")]) == 0
    reached = accuracy_of_models([load(tmp_path / "w.pt")] * 5, data, data.test, last.get("clients", range(5)))
    assert reached == pytest.approx(last["g_acc"])


def test_running_statistics_of_the_shared_model_are_the_mean_of_the_clients(tmp_path: Path) -> None:
    result = pfedlms.run(model=batch_norm, method="fedavg", out=tmp_path / "r", **{**SMALL, "hidden": 256})
    pfedlms.export(tmp_path / "r", tmp_path / "w.pt", shared=True, model=batch_norm)
    means = torch.stack([model["2.running_mean"] for model in result.models]).mean(dim=0)
    torch.testing.assert_close(load(tmp_path / "w.pt")["2.running_mean"], means)
    with pytest.raises(UsageError, match="a model given in Python; pass it there, model=…"):
        pfedlms.export(tmp_path / "r", tmp_path / "w.pt", shared=True)


@pytest.mark.filterwarnings("always")  # the command line prints them
@pytest.mark.parametrize("method", ["local", "fedavg", "sketchvote"])
def test_a_client_that_took_no_part_is_exported_trained_only_if_its_data_are_there(
    method: str, tmp_path: Path, remove_data: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    result = pfedlms.run(method=method, participation=0.4, out=tmp_path / "r", **SMALL)
    present = result.federation.present_ids
    absent = next(k for k in range(5) if k not in present)
    models = result.models
    command = ["export", str(tmp_path / "r"), "-o", str(tmp_path / "m.pt"), "--client"]
    assert present != (0, 1), "otherwise the models would be in order anyway"
    for client in range(5):
        assert main([*command, str(client)]) == 0
        assert same(load(tmp_path / "m.pt"), models[client])
    if method == "fedavg":
        pfedlms.export(tmp_path / "r", tmp_path / "w.pt", shared=True)
    remove_data()
    capsys.readouterr()
    assert main([*command, str(present[0])]) == 0
    assert same(load(tmp_path / "m.pt"), models[present[0]])
    assert "warning" not in capsys.readouterr().err
    assert main([*command, str(absent)]) == 0
    assert f"client {absent} took no part in the last round, and its data are not here" in capsys.readouterr().err
    untrained = load(tmp_path / "m.pt")
    assert not same(untrained, models[absent])
    if method == "fedavg":
        assert same(untrained, load(tmp_path / "w.pt"))


def test_a_wrong_export_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pfedlms.compare(methods="local,pfedlms", seeds=1, out=tmp_path / "c", **SMALL)
    wrong = {
        ("c", "--client", "0", "-o", "m.pt"): "holds 2 runs; export one of them: ",
        ("c", "--global"): "expected --client K or --global with -o FILE",
        ("c", "--all", "models", "-o", "m.pt"): "or --all FOLDER, which takes no -o",
        ("c/pfedlms-seed0", "--global", "-o", "m.pt"): "pfedlms has no shared model",
        ("c/pfedlms-seed0", "--client", "9", "-o", "m.pt"): "client: got 9, expected 0 to 4",
        (
            "c/pfedlms-seed0",
            "--client",
            "0",
            "-o",
            "none/m.pt",
        ): "none/m.pt: cannot be written (No such file or directory)",
        ("c/local-seed0", "--client", "0", "-o", "m.pt"): "no checkpoint yet; `pfedlms resume ",
    }
    (tmp_path / "c" / "local-seed0" / "checkpoint.pt").unlink()
    for (folder, *arguments), message in wrong.items():
        assert main(["export", str(tmp_path / folder), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("always")
def test_resume_and_export_find_moved_data_by_data_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new"
    new.mkdir()
    np.savez(tmp_path / "t.npz", x=X, y=Y)
    options = ["--dataset", "file:t.npz", "--data-dir", str(tmp_path), *OPTIONS, "--participation", "0.5", "--quiet"]
    assert main(["run", "--method", "fedavg", *options, "--out", str(tmp_path / "r")]) == 0
    assert main(["compare", "--methods", "fedavg,local", "--seeds", "1", *options, "--out", str(tmp_path / "c")]) == 0
    whole = pfedlms.load(tmp_path / "c" / "local-seed0").summary
    shutil.move(tmp_path / "t.npz", new)
    for name in ("r", "c/local-seed0"):
        for file in ("checkpoint.pt", "metrics.jsonl", "summary.json"):
            (tmp_path / name / file).unlink()
    for name in ("r", "c"):
        assert main(["resume", str(tmp_path / name), "--quiet"]) == 2
        assert main(["resume", str(tmp_path / name), "--quiet", "--data-dir", str(new)]) == 0
    assert without_timings([pfedlms.load(tmp_path / "c" / "local-seed0").summary]) == without_timings([whole])
    capsys.readouterr()
    export = ["export", str(tmp_path / "r"), "--all", str(tmp_path / "all"), "--data-dir", str(new)]
    assert main(export) == 0
    assert "took no part" not in capsys.readouterr().err
    edit_config(tmp_path / "r", 'device = "auto"', 'device = "cuda"')  # trained on a machine with a GPU
    assert main(export) == 0
    assert "took no part" not in capsys.readouterr().err
    assert main(export[:-2]) == 0
    assert "2 of 4 clients took no part" in capsys.readouterr().err


def test_clients_are_shown_and_exported_by_number_and_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hospitals = {name: (X[i::3], Y[i::3]) for i, name in enumerate(("north", "2", "south"))}
    settings = {"rounds": 2, "local_steps": 2, "batch_size": 4, "participation": 0.4}
    result = pfedlms.run(hospitals, method="fedavg", out=tmp_path / "r", **settings)
    before = {file: file.read_bytes() for file in (tmp_path / "r").iterdir()}
    show, export = ["show", str(tmp_path / "r"), "--clients"], ["export", str(tmp_path / "r"), "--client"]
    assert main(show) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.split("train samples")[1].splitlines() if line.split()[1:]]
    everyone, samples = result.summary["everyone"]["client_acc"], result.federation.data.samples
    assert rows[-3:] == [[str(k), name, str(samples[k]), f"{everyone[k]:.2f}"] for k, name in enumerate(hospitals)]
    assert shown.err == ""
    assert main([*show, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["P-acc"] for row in document.pop("per_client")] == everyone
    assert document == {**result.summary, "directory": str(tmp_path / "r")}
    assert before == {file: file.read_bytes() for file in (tmp_path / "r").iterdir()}
    models = pfedlms.load(tmp_path / "r", hospitals).models
    for name, number in (("south", 2), ("1", 1), ("0", 0), ("2", 1)):  # a name goes before a number
        pfedlms.export(tmp_path / "r", tmp_path / "m.pt", client=name, data=hospitals)
        assert same(load(tmp_path / "m.pt"), models[number])
    capsys.readouterr()
    assert main([*export, "soth", "-o", str(tmp_path / "m.pt")]) == 2
    assert "client: got soth, expected 0 to 2, or a name: did you mean south" in capsys.readouterr().err


def test_show_says_that_a_run_is_being_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []

    def show(run: Any, record: Any) -> None:
        if record["round"] == 2:
            assert main(["show", str(tmp_path / "r")]) == 0
            shown.extend(capsys.readouterr())

    pfedlms.run(method="local", out=tmp_path / "r", callbacks=[SimpleNamespace(on_evaluation=show)], **SMALL)
    out, err = shown
    assert "local (running)" in out
    assert "after 2 rounds; it is being trained now" in err
    assert "resume" not in err
    edit_config(tmp_path / "r", f"rounds = {SMALL['rounds']}", "rounds = 9")
    seen: list[str] = []
    begun = SimpleNamespace(on_start=lambda run: seen.append(pfedlms.load(tmp_path / "r").summary["status"]))
    stored = tmp_path / "r" / "summary.json"
    stored.write_text(stored.read_text().replace('"finished"', '"interrupted"'))
    pfedlms.resume(tmp_path / "r", callbacks=[begun])
    assert seen == ["running"]


def test_show_prints_the_metrics_of_a_killed_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**SMALL, "callbacks": [CrashAt(2, "fedavg")]}
    with pytest.raises(Crash):
        pfedlms.compare(methods="local,fedavg,pfedlms", seeds=1, out=tmp_path / "c", **options)
    assert main(["show", str(tmp_path / "c" / "fedavg-seed0")]) == 0
    assert f"pfedlms resume {tmp_path / 'c' / 'fedavg-seed0'}" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "c")]) == 0
    shown = capsys.readouterr()
    assert "local" in shown.out
    assert "fedavg (interrupted)" in " ".join(shown.out.split())
    assert "pfedlms " not in shown.out
    assert f"pfedlms resume {tmp_path / 'c'}" in shown.err
