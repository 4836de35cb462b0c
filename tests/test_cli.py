"""The command line: every command, and every wrong call answered by one readable message."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

import pfedlms
from pfedlms.cli import COMMANDS, main
from pfedlms.data import DATASETS
from pfedlms.experiment import plugins
from pfedlms.methods import METHODS
from pfedlms.models import MODELS
from pfedlms.report.progress import LiveProgress, PlainProgress

SMALL = {"data.clients": 4, "model.hidden": 12, "train.local_steps": 2, "train.batch_size": 8, "run.threads": 1}
OPTIONS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
ANY_METHOD = ["run", "--rounds", "3", *OPTIONS]
RUN = [*ANY_METHOD, "--method", "fedavg"]
COMPARE = ["compare", "--methods", "local,fedavg", "--seeds", "2", "--rounds", "2", *OPTIONS]
PARAMETERS = 64 * 12 + 12 + 12 * 10 + 10
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def own_process_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in and a screen of 80 columns."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "PFEDLMS_DATA"):
        monkeypatch.delenv(name, raising=False)


class Done(NamedTuple):
    """What a call returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Done:
        capsys.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def files_here() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def test_help_fits_on_a_screen(call: Any) -> None:
    shown = call("--help")
    lines = shown.out.splitlines()
    assert shown.code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(re.search(rf"\b{command}\b", shown.out) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text(command: str, call: Any) -> None:
    shown = call(command, "--help")
    assert shown.code == 0
    assert f"usage: pfedlms {command}" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


WRONG_CALLS = {
    "mistyped command": (["rnu"], "invalid choice: 'rnu' (choose from"),
    "a folder as a file": (["run", "."], ".: cannot be read as a TOML file of settings"),
    "option and --set": (["run", "--rounds", "1", "--set", "rounds=2"], "train.rounds: got '2' and '1'; give one"),
    "--set twice": (["run", *OPTIONS, "--set", "seed=2", "--set", "seed=3"], "seed: got '2' and '3'; give one"),
    "two values": (["run", "--learning-rate", ".1", ".2"], ".2: cannot be read as a TOML file of settings"),
    "several values": (["run", "--learning-rate", ".1,.2"], "train.learning_rate: got [0.1, 0.2], expected a number"),
    "several methods": (["run", "--method", "fedavg,ditto"], "several are compared: pfedlms compare"),
    "nothing to sweep": (["sweep", *OPTIONS], "sweep: got no setting with several values"),
    "option of one": (["compare", "--method", "fedavg"], "did you mean --methods?"),
    "setting of a method": (["run", "--thresholds", "3"], "did you mean --set method.thresholds=…?"),
    "model of other inputs": (["run", "--set", "model.name=vgg8"], "vgg8 takes images of shape (channels, 32, 32)"),
    "custom data": (["run", "--dataset", "custom"], "stands for data given in Python"),
    "download of nothing": (["data", "download"], "data download: say which data set"),
    "plot of data of no kind": (["data", "show", "--plot", "picture.xyz"], "got 'picture.xyz', expected a .png"),
    "missing directory": (["resume", "none"], "none: no run here"),
    "resume nothing": (["resume"], "DIR"),
    "too long a name to write": (["compare", *OPTIONS, "--out", "a" * 300], "File name too long"),
    "bits of no classes": (["bits", "--classes", "0"], "classes: got 0"),
    "out is a file": (["run", *OPTIONS, "--out", "/proc/version"], "/proc/version: cannot be written (File exists)"),
    "out in proc": (["compare", *OPTIONS, "--out", "/proc/pfedlms"], "/proc/pfedlms: cannot be written"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_exits_with_2_and_one_readable_message(arguments: list[str], message: str, call: Any) -> None:
    done = call(*arguments)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.err
    assert done.out == ""
    assert files_here() == []  # nothing was written


def test_a_custom_module_that_cannot_be_imported_is_refused(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "IMPORTED_MODULES", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("well_made.py").write_text("from pfedlms.methods import Method\nclass Mine(Method): ...\n")
    Path("badly_made.py").write_text("1 / 0")
    Path("in_need.py").write_text("import numpie")
    for named, message in (
        ("well_made:Nope", "expected MODULE:CLASS; the module well_made has no class 'Nope'"),
        ("badly_made:Mine", "'badly_made' cannot be imported (ZeroDivisionError: division by"),
        ("in_need:Mine", "'in_need' cannot be imported (ModuleNotFoundError: No module named 'nu"),
        ("well_made.py", "'well_made.py' cannot be imported"),
    ):
        done = call("methods", "check", named)
        assert done.code == 2
        assert message in done.err


def test_all_wrong_settings_are_reported_at_once(call: Any) -> None:
    done = call("run", "--rounds", "0", "--seed", "x", "--set", "data.alpha=-1", "--set", "method.ration=1")
    assert done.code == 2
    assert done.err.splitlines()[0] == "error: 4 problems in the settings"
    assert len(done.err.splitlines()) == 5


def test_run_prints_a_table_on_stdout_and_plain_lines_on_stderr(call: Any) -> None:
    done = call(*RUN, "--out", "r")
    assert done.code == 0
    assert "fedavg" in done.out
    assert "P-acc max" in done.out
    assert done.err.splitlines()[0] == "fedavg seed 0: 3 rounds on digits"
    assert re.match(r"fedavg seed 0: round 1/3  P-acc [ \d]\d\.\d\d %  G-acc ", done.err.splitlines()[1])
    assert done.err.splitlines()[-1] == "results: r"
    assert ESCAPE not in done.out + done.err
    assert files_here() == ["r", "r/.lock", "r/checkpoint.pt", "r/config.toml", "r/metrics.jsonl", "r/summary.json"]


@pytest.mark.parametrize("command", [RUN, COMPARE], ids=["run", "compare"])
def test_quiet_prints_only_the_folder_of_the_results(command: list[str], call: Any) -> None:
    done = call(*command, "--out", "r", "--quiet")
    assert (done.code, done.err) == (0, "results: r\n")
    assert "fedavg" in done.out
    for finished in (True, False):
        for file in () if finished else [*Path("r").rglob("checkpoint.pt"), *Path("r").rglob("summary.json")]:
            file.unlink()  # as if it had been killed in the first round
        done = call("resume", "r", "--quiet", "--json")
        assert (done.code, done.err) == (0, "results: r\n")
        assert json.loads(done.out)["directory"] == "r"


def test_without_out_every_run_gets_a_new_folder(call: Any) -> None:
    assert [call(*RUN, "--quiet").code for _ in range(2)] == [0, 0]
    folders = sorted(Path("runs").iterdir())
    assert len(folders) == 2
    assert all(re.match(r"\d{8}-\d{6}-digits-fedavg", folder.name) for folder in folders)


def test_an_option_overrides_the_out_of_a_file(call: Any) -> None:
    Path("my.toml").write_text('[run]\nout = "there"\n')
    for given, folder in (([], "there"), (["--out", "elsewhere"], "elsewhere"), (["--set", "run.out=third"], "third")):
        assert call("run", "my.toml", *RUN[1:], "--quiet", *given).code == 0
        assert Path(folder, "summary.json").exists()
    again = call("run", "my.toml", *RUN[1:])
    assert again.code == 2
    assert "there: holds a run already" in again.err


def test_the_config_of_a_run_runs_again_in_a_new_folder(call: Any) -> None:
    assert call(*RUN, "--quiet", "--out", "r").code == 0
    assert call("run", "r/config.toml", "--quiet").code == 0
    (fresh,) = Path("runs").iterdir()
    ours, theirs = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (Path("r"), fresh))
    assert [json.loads(line)["client_acc"] for line in theirs] == [json.loads(line)["client_acc"] for line in ours]


@pytest.mark.parametrize("name", ["with space", "a[/b]", "ünïcode ☃ 100%"])
def test_paths_are_printed_unchanged(name: str, call: Any) -> None:
    done = call(*RUN, "--out", name)
    assert done.code == 0
    assert done.err.splitlines()[-1] == f"results: {name}"
    assert call("resume", name, "--quiet").code == 0
    done = call("export", name, "--client", "0", "-o", f"{name}/m.pt")
    assert done.err == f"model of client 0: {name}/m.pt\n"


def test_what_a_message_quotes_of_a_file_is_printable_and_short(call: Any) -> None:
    Path("x.csv").write_bytes(b"\x1b[2J\x00" * 2000 + b"\n1\n")
    done = call("run", "--dataset", "file:x.csv")
    assert done.code == 2
    assert done.err.startswith("error: x.csv: ")
    assert r"\x1b[2J\x00" in done.err
    assert len(done.err) < 10_000
    assert all(each.isprintable() or each == "\n" for each in done.err)


def test_a_diverging_run_exits_with_1_and_names_round_and_client(call: Any) -> None:
    done = call(*RUN, "--out", "r", "--set", "train.learning_rate=1e30")
    assert done.code == 1
    assert re.fullmatch(r"error: .*round 1: .* client \d .*train\.learning_rate.*", done.err.splitlines()[-1])
    assert "Traceback" not in done.err
    assert json.loads(Path("r/summary.json").read_text())["status"] == "diverged"


def test_options_set_their_settings(call: Any) -> None:
    done = call(
        "run", "--dry-run", "--json", "--clients", "7", "--model", "dnn", "--learning-rate", ".03", "--reference"
    )
    config = json.loads(done.out)["config"]
    assert (config["data"]["clients"], config["model"]["name"], config["train"]["learning_rate"]) == (7, "dnn", 0.03)
    assert config["run"]["reference"] is True


def test_dry_run_prints_plan_bytes_and_memory_and_writes_nothing(call: Any) -> None:
    done = call(*RUN, "--dry-run", "--out", "r")
    assert done.code == 0
    assert files_here() == []
    assert f"{PARAMETERS:,} parameters" in done.out
    words = " ".join(done.out.split())
    assert f"send {4 * 4 * PARAMETERS:,} bytes per round and 160 of framing" in words
    assert "Memory: about" in words
    assert ESCAPE not in done.out


def test_warnings_are_one_line_without_the_source(call: Any) -> None:
    """In a new process, with the default warning filters of Python."""
    done = run_program(*ANY_METHOD, "--method", "pfedlms", "--set", "method.strength=1", "--out", "r")
    warned = [line for line in done.stderr.splitlines() if "method.strength" in line]
    assert (done.returncode, len(warned)) == (0, 1)
    assert warned[0].startswith("warning: method.strength: 2 η λ / ratio = ")
    assert not re.search(r"UserWarning|\.py:|warnings\.warn", done.stderr)


def test_dry_run_json_by_hand(call: Any) -> None:
    """Layers of 780 and 130 parameters; T = 7 at ratio 0.1: m = 102 and 25, 39 + 10 bytes, and 16 of statistics."""
    done = call(*ANY_METHOD, "--dry-run", "--json", "--method", "pfedlms")
    plan = json.loads(done.out)
    assert [(layer["offset"], layer["size"], layer["pad"], layer["sketch"]) for layer in plan["layers"]] == [
        (0, 780, 1024, 102),
        (780, 130, 256, 25),
    ]
    assert plan["bytes_per_round"] == {
        "up_payload": 4 * 65, "up_framing": 4 * 80, "down_payload": 4 * 65, "down_framing": 4 * 80, "catch_up": 0,
    }  # fmt: skip
    assert plan["total_bytes"] == 3 * 4 * 2 * (65 + 80)
    assert plan["samples"]["train"] == pytest.approx(0.75 * 1797, abs=4)
    # A sample's outputs: 64 flattened, 12 and 12 hidden, 10, and 10 of the whole; eight samples, held twice.
    copies, activations = 8 * 4 * PARAMETERS, 2 * 8 * 4 * (64 + 12 + 12 + 10 + 10)
    assert plan["memory_bytes"] == {
        "data": 1797 * (64 * 4 + 8), "clients": 4 * PARAMETERS * 4, "working": 4 * (copies + activations),
    }  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_run_sends_the_bytes_that_a_dry_run_prints(method: str, call: Any) -> None:
    """FedProto is counted as if every client held every class: a bound. The largest entries are counted as if they lay
    anywhere: an estimate."""
    planned = json.loads(call(*ANY_METHOD, "--dry-run", "--json", "--method", method).out)["bytes_per_round"]
    done = call(*ANY_METHOD, "--out", "r", "--json", "--quiet", "--method", method)
    measured = json.loads(done.out)["bytes_per_round"]
    if method == "fedproto":
        assert all(measured[key] <= planned[key] for key in planned)
    elif method in ("stc", "sparseloco", "sketchmean"):
        assert measured == pytest.approx(planned, abs=4 * 2)  # two bytes each of four clients
    else:
        assert measured == planned


def test_compare_json_is_one_document(call: Any) -> None:
    done = call(*COMPARE, "--out", "c", "--json", "--seed", "5")
    document = json.loads(done.out)
    assert document.keys() == {"directory", "runs"}
    folders = [f"c/{method}-seed{seed}" for method in ("local", "fedavg") for seed in (5, 6)]
    assert [run["directory"] for run in document["runs"]] == folders
    assert "fedavg seed 6: 2 rounds on digits" in done.err


@pytest.mark.parametrize(
    ("command", "names"),
    [("methods", METHODS), ("datasets", [*DATASETS, "folder:PATH", "file:PATH"]), ("models", MODELS)],
)
def test_lists_have_every_name(command: str, names: Any, call: Any) -> None:
    rows = json.loads(call(command, "--json").out)
    assert [row["name"] for row in rows] == list(names)
    table = call(command)
    assert table.code == 0
    assert all(name in table.out for name in names)
    assert ESCAPE not in table.out


def test_settings_are_listed_with_default_and_meaning(call: Any) -> None:
    rows = json.loads(call("settings", "--json").out)
    listed = {(row["setting"], row["for"]): row for row in rows}
    assert len(listed) == len(rows)
    assert listed["data.alpha", "all"]["default"] == 0.5
    assert listed["method.strength", "pfedlms"]["default"] == 0.05
    assert all(row["meaning"] for row in rows)
    shown = call("settings").out
    assert all(row["setting"] in shown for row in rows)


# MiB of payload per round, 20 clients, up and down.
MIB = {
    ("dnn", None): {"parameters": 203_530, "fedavg": "31.06", "pfedlms": "0.38", "pfed1bs": "0.097"},
    ("vgg8", None): {"parameters": 279_706, "fedavg": "42.68", "pfedlms": "0.72", "pfed1bs": "0.133"},
    ("vgg11", "100"): {"parameters": 9_799_844, "fedavg": "1495.34", "pfedlms": "25.05", "pfed1bs": "4.67"},
}


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "pfed1bs"])
@pytest.mark.parametrize(("model", "classes"), MIB)
def test_bits_equal_the_paper(model: str, classes: str | None, method: str, call: Any) -> None:
    arguments = ["bits", "--model", model, "--method", method, "--clients", "20", "--json"]
    arguments += ["--classes", classes] if classes else []
    arguments += ["--set", "method.thresholds=7"] if method == "pfedlms" else []
    row = json.loads(call(*arguments).out)
    expected = MIB[model, classes]
    decimals = len(expected[method].partition(".")[2])
    assert f"{row['mib_per_round']:.{decimals}f}" == expected[method]
    assert row["parameters"] == expected["parameters"]
    assert row["mib_per_round"] == 20 * (row["up_payload_bits"] + row["down_payload_bits"]) / 8 / 2**20
    assert row["up_framing_bits"] == row["down_framing_bits"] == 320 * (2 if method == "pfedlms" else 1)


def test_bits_of_all_methods_in_a_table(call: Any) -> None:
    shown = call("bits")
    assert shown.code == 0
    assert all(re.search(rf"^ +{name}[ ,]", shown.out, re.MULTILINE) for name in METHODS)
    assert "31.06" in shown.out
    rows = json.loads(call("bits", "--json", "--set", "data.dataset=digits").out)
    assert list(dict.fromkeys(row["method"] for row in rows)) == list(METHODS)
    # Both costs of the methods that can answer in two ways: the whole model, and what the clients need to compute it.
    for name, cheap in (("zsign", "sum"), ("obcsaa", "sum")):
        model, other = (row for row in rows if row["method"] == name)
        assert (model["downlink"], other["downlink"]) == ("model", cheap)
        assert model["up_payload_bits"] == other["up_payload_bits"]
        assert model["down_payload_bits"] > 5 * other["down_payload_bits"]
    assert rows[0]["parameters"] == 64 * 252 + 252 + 252 * 10 + 10  # the data set's own model
    assert {row["method"] for row in rows if row["estimated"]} == {
        "stc", "sketchvote", "sketchmean", "fetchsgd", "sparseloco",
    }  # fmt: skip
    assert re.search(r"^ +stc .* ≈0\.", shown.out, re.MULTILINE)
    assert "≈: an average message; one of stc, here with entries at random" in " ".join(shown.out.split())


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pfedlms", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_piped_output_is_plain_in_an_ascii_encoding() -> None:
    done = run_program("datasets", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "digits" in done.stdout
    assert ESCAPE not in done.stdout
    assert done.stderr == ""


def test_a_pipe_that_closes_early_causes_no_traceback() -> None:
    line = f"{sys.executable} -m pfedlms settings --json | head -n 1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[\n"
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "pfedlms", "datasets"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_live_progress_shows_round_accuracy_bytes_and_time() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, legacy_windows=False)
    settings: dict[str, Any] = {key.split(".")[1]: value for key, value in SMALL.items()}
    with LiveProgress(console) as progress:
        pfedlms.run(method="fedavg", rounds=3, callbacks=[progress], **settings)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    last = shown.splitlines()[-1]
    assert re.search(r"fedavg seed 0 .*3/3 P-acc +\d+\.\d\d %  G-acc +\d+\.\d\d % 0\.\d+ MiB 0:00:\d\d", last), last


def test_progress_shows_runs_of_workers_when_they_end() -> None:
    """Of these there is one call at the start and one at the end, in any order of the runs."""
    line = {"round": 30, "p_acc": 50.0, "loss": 1.0, "bytes": {"up": 1 << 20}, "seconds": 2.0}
    runs = [SimpleNamespace(name=name, round=0, metrics=[], config=pfedlms.load_config(None)) for name in ("a", "b")]
    live, plain = (Console(file=io.StringIO(), width=140, force_terminal=terminal) for terminal in (True, False))
    with LiveProgress(live) as progress:
        for callback in (progress, PlainProgress(plain)):
            for run in runs:
                callback.on_start(run)
            for run in runs:
                run.metrics = [line]
                callback.on_end(run, {})
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", live.file.getvalue()).splitlines()[-2:]
    assert [each.split()[0] for each in last if "30/100 P-acc" in each] == ["a", "b"]
    shown = [each.split("  loss")[0] for each in plain.file.getvalue().splitlines()]
    assert shown[2:] == ["a: round 30/100  P-acc 50.00 %", "b: round 30/100  P-acc 50.00 %"]


def test_methods_check_takes_settings(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "IMPORTED_MODULES", [])
    done = call("methods", "check", "pfedlms.methods.fedavg:FedAvg", "--set", "method.server_step=0.5")
    assert done.code == 0
    for text in ("method.server_step=-1", "method.nonsense=1", "train.rounds=3"):
        assert call("methods", "check", "pfedlms.methods.fedavg:FedAvg", "--set", text).code == 2
