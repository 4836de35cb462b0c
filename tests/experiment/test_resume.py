"""A run that was interrupted at any moment, by any cause, resumes to the same measurements."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Crash, CrashAt, assert_same_run, batch_norm, edit_config, same_models

import pfedlms
from pfedlms.cli import main
from pfedlms.errors import RunDirectoryError
from pfedlms.methods import METHODS
from pfedlms.report.progress import PlainProgress

ROUNDS = 12
SMALL = {
    "data.clients": 5, "model.hidden": 16, "train.local_steps": 3, "train.batch_size": 8, "train.momentum": 0.5,
    "run.checkpoint_every": 2, "run.threads": 1,
}  # fmt: skip
OPTIONS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
SETTINGS = {key if key == "train.momentum" else key.split(".")[1]: value for key, value in SMALL.items()}
"""As keywords; fetchsgd has a momentum of its own, too."""


def arguments(out: Path, *more: str, method: str = "fedavg", rounds: int = ROUNDS) -> list[str]:
    return ["run", "--method", method, "--rounds", str(rounds), "--out", str(out), *OPTIONS, *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of uninterrupted runs, each made once."""
    made: dict[tuple[str, int], Path] = {}

    def get(method: str = "fedavg", rounds: int = ROUNDS) -> Path:
        if (method, rounds) not in made:
            out = tmp_path_factory.mktemp("uninterrupted") / "run"
            assert main(arguments(out, "--quiet", method=method, rounds=rounds)) == 0
            made[method, rounds] = out
        return made[method, rounds]

    return get


# One process loads the package and its kernels once and forks a child for every moment. The child counts the files of
# its run that are opened or renamed (by Python's audit events, so the package is not changed). At the given count it
# kills itself, or limits file sizes so that the system kills it in a write that takes a file beyond 1500 bytes.
KILLED_RUNS = """
import os, resource, signal, sys
from pfedlms.cli import main

def run_until(how, moment, folder, arguments):
    seen = 0
    def watch(event, details):
        nonlocal seen
        if event in ("open", "os.rename", "os.truncate") and str(details[0]).startswith(folder):
            seen += 1
            if seen == moment + 1 and how == "tear":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
            elif seen == moment + 1:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    main(arguments)

how, moments, folder, arguments = *sys.argv[1:4], sys.argv[4:]
main([part.replace("OUT", os.path.join(folder, "warm")) for part in arguments] + ["--rounds", "1"])
for moment in moments.split(","):
    own = os.path.join(folder, moment)
    child = os.fork()
    if child == 0:
        run_until(how, int(moment), own, [part.replace("OUT", own) for part in arguments])
        os._exit(0)
    print(moment, os.waitpid(child, 0)[1] & 127)
"""


def run_and_kill(how: str, moments: range, folder: Path, command: list[str]) -> dict[int, int]:
    """The signal that ended the child of every moment, 0 for none."""
    script = [sys.executable, "-c", KILLED_RUNS, how, ",".join(map(str, moments)), str(folder), *command]
    # One thread, and the threading layer that survives a fork.
    environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True, env=environment)
    return dict(map(int, line.split()) for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \d+", line))


@pytest.mark.parametrize(("how", "by"), [("kill", signal.SIGKILL), ("tear", signal.SIGXFSZ)])
def test_a_run_killed_at_any_file_operation_resumes(
    how: str, by: signal.Signals, tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    """Between two operations or within a write, after config.toml was written and before the summary was."""
    moments = range(3, 46, 3)
    ends = run_and_kill(how, moments, tmp_path, [*arguments(Path("OUT")), "--quiet"])
    assert list(ends) == list(moments)
    assert list(ends.values()).count(by) >= len(moments) - 3  # the last moments may come after the end of the run
    for moment in moments:
        assert main(["resume", str(tmp_path / str(moment)), "--quiet"]) == 0
        assert_same_run(tmp_path / str(moment), uninterrupted())


def test_a_run_killed_before_its_config_exists_starts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_kill("kill", range(1, 2), tmp_path, [*arguments(Path("OUT")), "--quiet"]) == {1: signal.SIGKILL}
    assert main(["resume", str(tmp_path / "1")]) == 2
    assert "config.toml is missing" in capsys.readouterr().err
    assert main([*arguments(tmp_path / "1", rounds=1), "--quiet"]) == 0  # the remains of the killed run do not matter


def test_a_comparison_killed_at_several_moments_resumes(tmp_path: Path, uninterrupted: Callable[..., Path]) -> None:
    compare = ["compare", "--methods=fedavg,local", "--seeds=1", f"--rounds={ROUNDS}", "--out", "OUT", *OPTIONS]
    moments = range(3, 80, 19)
    ends = run_and_kill("kill", moments, tmp_path, [*compare, "--quiet"])
    assert set(ends.values()) == {signal.SIGKILL}
    for moment in moments:
        assert main(["resume", str(tmp_path / str(moment)), "--quiet"]) == 0
        for method in ("fedavg", "local"):
            assert_same_run(tmp_path / str(moment) / f"{method}-seed0", uninterrupted(method))


def start_process(command: list[str]) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "pfedlms", *command]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize("evaluations", [0, 1, 7])
def test_a_run_killed_by_sigkill_resumes(evaluations: int, tmp_path: Path, uninterrupted: Callable[..., Path]) -> None:
    """At a random moment: right after config.toml appears, or shortly after some evaluation."""
    out = tmp_path / "run"
    process = start_process(arguments(out, method="pfedlms", rounds=100))
    try:
        wait_for(process, lambda: (out / "config.toml").exists() and lines(out / "metrics.jsonl") >= evaluations)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    assert main(["resume", str(out), "--quiet"]) == 0
    assert_same_run(out, uninterrupted("pfedlms", 100))


def crashed_run(out: Path, at: int = 5, **options: Any) -> Path:
    """A run of six rounds that ended in round `at`, with a checkpoint after every second."""
    with pytest.raises(Crash):
        pfedlms.run(out=out, rounds=6, callbacks=[CrashAt(at)], **SETTINGS, **options)
    return out


VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "train.momentum": 0.0},
    "cosine": {"schedule": "cosine", "warmup": 2},
    "step": {"schedule": "step", "decay": 0.5, "decay_every": 2},
    "clip": {"clip": 0.1},
    "lost": {"lost": 0.2, "quorum": 0.0, "clients": 12},
    "all clients": {"participation": 1.0, "validation": 0.0},
}


@pytest.mark.parametrize(
    ("method", "variant"),
    [*((name, "") for name in METHODS), *((name, variant) for variant in VARIANTS for name in ("stc", "pfedlms"))],
)
def test_every_method_resumes_after_a_crash(method: str, variant: str, tmp_path: Path) -> None:
    """With all state of its server and its clients between rounds, also of absent clients."""
    options = {"method": method, "participation": 0.6, "validation": 0.2, **SETTINGS, **VARIANTS.get(variant, {})}
    whole = pfedlms.run(out=tmp_path / "whole", rounds=6, **options)
    with pytest.raises(Crash):
        pfedlms.run(out=tmp_path / "crashed", rounds=6, callbacks=[CrashAt(5)], **options)
    resumed = pfedlms.resume(tmp_path / "crashed")
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")
    assert same_models(resumed.models, whole.models)


@pytest.mark.parametrize("evaluate_every", [1, 4])
def test_running_statistics_and_sparse_evaluations_resume(evaluate_every: int, tmp_path: Path) -> None:
    options = {"model": batch_norm, "method": "fedavg", "evaluate_every": evaluate_every}
    pfedlms.run(out=tmp_path / "whole", rounds=6, **options, **SETTINGS)
    out = crashed_run(tmp_path / "crashed", at=5 if evaluate_every == 1 else 4, **options)
    with pytest.raises(pfedlms.PfedlmsError, match=r"was given in Python.*pfedlms\.resume"):
        pfedlms.resume(out)
    pfedlms.resume(out, model=batch_norm)
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.parametrize("tail", [b'{"round": 6, "p_ac', b"{}\n", b""])
@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_torn_last_line_of_metrics_is_repaired(
    tail: bytes, cut: int, tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    """Lines 1 to 4 belong to the checkpoint; the fifth is cut short, and something may stand behind it."""
    out = crashed_run(tmp_path / "run", method="fedavg")
    metrics = out / "metrics.jsonl"
    content = metrics.read_bytes()
    assert content.count(b"\n") == 5
    metrics.write_bytes(content[: len(content) - cut] + tail)
    pfedlms.resume(out)
    assert_same_run(out, uninterrupted("fedavg", 6))


@pytest.mark.parametrize("left", [200, None])
def test_missing_metrics_that_the_checkpoint_counted_are_refused(
    left: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = crashed_run(tmp_path / "run") / "metrics.jsonl"
    if left is None:
        metrics.unlink()
    else:
        metrics.write_bytes(metrics.read_bytes()[:left])
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert re.search(r"metrics\.jsonl.*delete checkpoint\.pt", capsys.readouterr().err)
    assert left is None or len(metrics.read_bytes()) == left


def flip_one_bit(content: bytes) -> bytes:
    """One bit of a model's weights; PyTorch would load the file without an error."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one bit": flip_one_bit,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_corrupt_checkpoint_is_named_and_no_metrics_are_lost(
    damage: Callable[[bytes], bytes], tmp_path: Path, uninterrupted: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = crashed_run(tmp_path / "run", method="fedavg")
    checkpoint, metrics = out / "checkpoint.pt", (out / "metrics.jsonl").read_bytes()
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    for command in (["resume", str(out)], ["export", str(out), "--client", "0", "-o", str(tmp_path / "model.pt")]):
        capsys.readouterr()
        assert main(command) == 2
        message = capsys.readouterr().err
        assert f"{checkpoint}: cannot be read" in message
        assert "delete it to start this run over" in message
        assert "Traceback" not in message
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert not (tmp_path / "model.pt").exists()
    checkpoint.unlink()  # as the message advises
    assert main(["resume", str(out), "--quiet"]) == 0
    assert_same_run(out, uninterrupted("fedavg", 6))


@pytest.mark.parametrize("content", [[1, 2], {"schema": 1}, {}])
def test_a_file_that_is_not_a_checkpoint_is_refused(content: Any, tmp_path: Path) -> None:
    out = crashed_run(tmp_path / "run", method="fedavg")
    metrics = (out / "metrics.jsonl").read_bytes()
    torch.save(content, out / "checkpoint.pt")
    with pytest.raises(RunDirectoryError, match=r"checkpoint\.pt: (cannot be read|got schema 1, expected 2)"):
        pfedlms.resume(out)
    assert (out / "metrics.jsonl").read_bytes() == metrics


CHANGES = {
    "momentum = 0.5": "momentum = 0.0",
    "alpha = 0.5": "alpha = 0.4",
    "hidden = 16": "hidden = 17",
    'name = "fedavg"\nserver_momentum = 0.0\nserver_optimizer = "sgd"\nserver_decay = 0.99\nserver_epsilon = 0.001\n'
    "share_statistics = false\nserver_step = 1.0": 'name = "local"',
}


@pytest.mark.parametrize("made_with", CHANGES)
def test_a_checkpoint_of_other_settings_is_refused(made_with: str, tmp_path: Path) -> None:
    out = crashed_run(tmp_path / "run", method="fedavg")
    metrics = (out / "metrics.jsonl").read_bytes()
    edit_config(out, made_with, CHANGES[made_with])
    with pytest.raises(RunDirectoryError, match=r"checkpoint\.pt does not fit config\.toml") as caught:
        pfedlms.resume(out)
    assert made_with.splitlines()[0].replace('"', "'") in str(caught.value)
    assert (out / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(("method", "at", "begun"), [("fedavg", 4, 1), ("fedavg", ROUNDS, 1), ("local", 1, 2)])
def test_ctrl_c_stops_a_comparison_in_any_round(
    method: str, at: int, begun: int, tmp_path: Path, uninterrupted: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip

    def interrupt(self: PlainProgress, run: Any, record: Mapping[str, Any]) -> None:
        if (run.config.method, record["round"]) == (method, at):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PlainProgress, "on_round", interrupt, raising=False)
    compare = ["compare", "--methods", "fedavg,local", "--seeds", "1", "--rounds", str(ROUNDS), *OPTIONS]
    assert main([*compare, "--out", str(tmp_path / "c"), "--json"]) == 130
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["runs"]) == begun
    assert f"pfedlms resume {tmp_path / 'c'}" in shown.err
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "c"), "--json", "--quiet"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["method"], run["status"]) for run in runs] == [("fedavg", "finished"), ("local", "finished")]
    for name in ("fedavg", "local"):
        assert_same_run(tmp_path / "c" / f"{name}-seed0", uninterrupted(name))


@pytest.mark.parametrize(("kind", "sent", "code"), [("run", signal.SIGINT, 130), ("compare", signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_after_the_round_is_saved(kind: str, sent: int, code: int, tmp_path: Path) -> None:
    out = tmp_path / "r"
    method, run = ("--methods", out / "local-seed0") if kind == "compare" else ("--method", out)
    process = start_process([kind, method, "local", "--rounds", "100000", "--out", str(out), *OPTIONS])
    try:
        wait_for(process, lambda: lines(run / "metrics.jsonl") >= 2)
        process.send_signal(sent)
        shown, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].endswith(f"pfedlms resume {out}")
    assert "local" in shown  # the table of results
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", lines(run / "metrics.jsonl"))


def test_a_second_process_is_refused_in_a_directory_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    process = start_process(arguments(out, method="local", rounds=100_000))
    try:
        wait_for(process, lambda: lines(out / "metrics.jsonl") >= 1)
        assert main(["resume", str(out)]) == 2
        assert f"{out}: another process is running here" in capsys.readouterr().err
        assert main(arguments(out)) == 2
        assert f"pfedlms resume {out}" in capsys.readouterr().err
        before = lines(out / "metrics.jsonl")
        wait_for(process, lambda: lines(out / "metrics.jsonl") > before)  # the first process goes on
    finally:
        process.kill()
        process.communicate()
