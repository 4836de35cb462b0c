"""Faults seeded one at a time all over the package, and which tests catch them.

    python benchmarks/faults.py [--list] [--json FILE] [ids]

Each fault is a small mistake that somebody could make. The runner copies the tree to a temporary folder, applies one
fault there, runs the tests named for it with `-x` and prints `caught` with the first test that fails, or `MISSED`.
`MOVED` means that the old text is not found exactly once: the code was changed since, so look up what the sentence
describes and write down the new place. `NO TESTS` means that the tests named are not there any more. The test that
fails is run again without the fault: `FAILS without the fault` means that it says nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kept import keep

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")


class Fault(NamedTuple):
    id: str
    room: str
    wrong: str
    """What is wrong, in one sentence: it outlives the text."""
    file: str
    """Below src/pfedlms."""
    old: str
    new: str
    tests: str
    """Arguments of pytest, below tests; of several files the quickest."""


# fmt: off
FAULTS = (
    Fault("rng-rows", "rng", "The row bijection shifts by half the bits rounded down instead of up.",
          "rng.py", "max(1, (bits + 1) // 2)", "max(1, bits // 2)",
          "test_rng.py"),
    Fault("cohort-momentum", "cohort", "A client whose model is replaced keeps the momentum of the old one.",
          "cohort.py", "params=models, momentum=torch.zeros_like(self.momentum))", "params=models)",
          "test_cohort.py"),
    Fault("data-partition", "data", "A Dirichlet partition that is drawn again is the same draw again.",
          "data/partition.py", 'stream(seed, "partition", draw)', 'stream(seed, "partition", 0)',
          "data/test_partition.py"),
    Fault("data-batches", "data", "In the quick path the later shuffles of a round repeat the first one.",
          "data/batches.py", "ids[row], epoch[row] + within)", "ids[row], epoch[row])",
          "data/test_batches.py"),
    Fault("data-idx", "data", "An IDX file with bytes behind its last image is accepted.",
          "data/formats.py", "len(content) - header != prod(shape):", "len(content) - header < prod(shape):",
          "data/test_sources.py -k idx"),
    Fault("data-cifar", "data", "CIFAR-100 is read with its coarse labels (in pickled batches; binary ones are gone).",
          "data/formats.py", '"cifar100": "fine_labels"', '"cifar100": "coarse_labels"',
          "data/test_cifar.py -k pickled"),
    Fault("data-parquet", "data", "Height and width of decoded Parquet images are swapped.",
          "data/images.py", "pixels.transpose(0, 3, 1, 2)", "pixels.transpose(0, 3, 2, 1)",
          "data/test_parquet.py -k found"),
    Fault("data-folder", "data", "The key of a decoded image folder depends on the names of its files alone.",
          "data/images.py", "else read_contents(file)).digest()", "else str(file).encode()).digest()",
          "data/test_folder.py"),
    Fault("data-cache", "data", "A copy in the cache whose checksum (now that of a zip file) is wrong ends the run.",
          "data/images.py", "KeyError, EOFError, zipfile.BadZipFile)", "KeyError, EOFError)",
          "data/test_parquet.py -k copy"),
    Fault("data-download", "data", "A download is accepted whatever its SHA-256 is.",
          "data/download.py", "pooch.retrieve(url, sha256,", "pooch.retrieve(url, None,",
          "data/test_download.py -k wrong"),
    Fault("models-pad", "models", "A layer whose size is a power of two is padded to twice its size.",
          "models/layout.py", "1 << (self.size - 1).bit_length()", "1 << self.size.bit_length()",
          "models/test_layout.py"),
    Fault("models-gradient", "models", "A parameter without a gradient in this step keeps the one of the last step.",
          "models/forward.py", "place.zero_()", "pass",
          "models/test_forward.py -k takes_no_part"),
    Fault("sketch-scale", "sketch", "A sketch is scaled by 1/√N instead of 1/√m.",
          "sketch/__init__.py", "1 / sqrt(self.stop - self.start)", "1 / sqrt(self.pad)",
          "wire/test_second_implementation.py -k recomputed"),
    Fault("pull-width", "pull", "The width of the smoothed threshold is not in units of the layer's deviation.",
          "pull/__init__.py", "wide = self.smoothing * self.deviations",
          "wide = self.smoothing * torch.ones_like(self.deviations)", "methods/test_pfedlms.py"),
    Fault("step-schedule", "step", "A cosine schedule ends at zero: its last phase divides by Q − 1 instead of Q.",
          "train_settings.py", "/ (last + 1))) / 2", "/ max(1, last))) / 2",
          "test_train_settings.py"),
    Fault("step-adamw", "step", "AdamW corrects the bias of its second moment with the first beta.",
          "step/cpu.py", "sqrt(1 - BETAS[1] ** count)", "sqrt(1 - BETAS[0] ** count)",
          "step/test_optimizers.py"),
    Fault("step-clip", "step", "Clipping does not add the method's own gradient before it takes the norm.",
          "step/cpu.py", "        if has_extra:\n            own += extra[client]\n", "",
          "step/test_optimizers.py -k clip"),
    Fault("quantise-tie", "quantise", "A value equal to a threshold falls below it instead of above.",
          "quantise.py", "row, right=True)", "row, right=False)",
          "test_quantise.py -k symbols"),
    Fault("aggregate-pool", "aggregate", "The pooled deviation leaves out how far clients' means lie apart.",
          "aggregate.py", "average(weights, s + (m - mean) ** 2)", "average(weights, s)",
          "test_aggregate.py -k pooled"),
    Fault("aggregate-tie", "aggregate", "An even split of a vote on symbols goes down instead of up.",
          "aggregate.py", "np.uint8(above[i] >= total - above[i])", "np.uint8(above[i] > total - above[i])",
          "test_aggregate.py -k vote_is_the_formula"),
    Fault("wire-codec", "wire", "Packed symbols with bits set behind their end are accepted.",
          "wire/kernels.py", " or (stop > start and segment[stop - start - 1] >> used):", ":",
          "wire/test_codec.py -k after_the_end"),
    Fault("wire-golomb", "wire", "The Golomb parameter is computed from the chosen places instead of the others.",
          "wire/golomb.py", "unchosen, bits = (places - count) / places, 0", "unchosen, bits = count / places, 0",
          "wire/test_golomb.py"),
    Fault("wire-checksum", "wire", "The checksum of a frame covers the payload but not the header.",
          "wire/frames.py", "zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: _HEADER.size]))",
          "zlib.crc32(data[HEADER_BYTES:])", "wire/test_frames.py"),
    Fault("wire-sender", "wire", "A second message of one sender in an exchange is counted again.",
          "wire/frames.py", "        self._seen.add(sender)\n", "",
          "wire/test_frames.py -k repeated"),
    Fault("wire-rows", "wire", "Rows that were not sent are read as ones.",
          "wire/fields.py", "out = np.zeros(self.shape, np.float32)", "out = np.ones(self.shape, np.float32)",
          "wire/test_fields.py -k masked_rows"),
    Fault("pfedlms-heads", "methods", "pFedLMS counts votes by clients instead of by their samples.",
          "methods/consensus.py", 'total.add(values["symbols"].numpy(), samples)',
          'total.add(values["symbols"].numpy(), [1] * len(ids))', "test_examples.py -k has_the_bits"),
    Fault("sketchvote-silent", "methods", "sketchvote counts the vote of a client that has nothing to say in a layer.",
          "methods/sketchvote.py", "np.where(scales > 0, np.array(samples)[:, None], 0)",
          "np.where(scales >= 0, np.array(samples)[:, None], 0)", "methods/test_sketchvote.py -k has_no_vote"),
    Fault("stc-residual", "methods", "The server of stc forgets its residual after every round.",
          "methods/sparse.py", '"residual": residual, **moments}',
          '"residual": torch.zeros_like(x), **moments}', "methods/test_stc.py -k server_has"),
    Fault("eden-rotation", "methods", "All clients of eden share one rotation in a round.",
          "methods/eden.py", '"eden", round, client, number)', '"eden", round, 0, number)',
          "methods/test_eden.py -k dense_definition"),
    Fault("zsign-rate", "methods", "zsign scales by the learning rate of the next phase, not of the steps it is about.",
          "methods/zsign.py", "self._server_step * self._task.rate(round)",
          "self._server_step * self._task.rate(round + 1)", "engine/test_engines_agree.py -k gamma"),
    Fault("obcsaa-step", "methods", "The decoder of obcsaa steps by m/N instead of N/m.",
          "methods/obcsaa.py", "1 / (1 / sketch.shape.places[0].share + alpha)",
          "1 / (sketch.shape.places[0].share + alpha)", "methods/test_obcsaa.py -k decoder"),
    Fault("obda-coin", "methods", "The coin of obda for even splits is not turned over in odd rounds.",
          "methods/obda.py", "-coin if round % 2 else coin", "coin",
          "methods/test_obda.py"),
    Fault("fedproto-held", "methods", "fedproto pulls samples of a class without a prototype towards zero.",
          "methods/fedproto.py", "torch.where(self.held[labels], distance, 0.0).mean(dim=1)", "distance.mean(dim=1)",
          "methods/test_fedproto.py"),
    Fault("pfed1bs-rows", "methods", "pFed1BS keeps a share of the padded length instead of the model's own.",
          "methods/consensus.py", "floor(ratio * task.layout.dim)",
          "floor(ratio * layout.layers[0].pad)", "methods/test_pfed1bs.py"),
    Fault("fedavg-momentum", "methods", "The server of fedavg keeps its update after the step size was multiplied in.",
          "methods/server_optimizer.py", 'return {"update": u.float()}, self._step * u',
          'return {"update": (self._step * u).float()}, self._step * u', "methods/test_fedavg.py"),
    Fault("engine-draw", "engine", "The number of participants is rounded down instead of to the nearest.",
          "engine/participation.py", "max(1, round(self.share * self.clients))",
          "max(1, int(self.share * self.clients))", "engine/test_participation.py -k number_of_participants"),
    Fault("engine-catch-up", "engine", "A client that was absent is not sent the first answer that it missed.",
          "engine/catch_up.py", "rounds = range(since, until)", "rounds = range(since + 1, until)",
          "engine/test_catch_up.py -k fewest_bytes"),
    Fault("engine-quorum", "engine", "A round stops where exactly the quorum of messages is valid.",
          "engine/server.py", "if aggregation.valid < max(1, self._quorum * inbox.expected):",
          "if aggregation.valid <= max(1, self._quorum * inbox.expected):",
          "engine/test_intake.py -k quorum"),
    Fault("engine-in-step", "engine", "A client that tracks another model is left out but still counted as in step.",
          "engine/server.py", "out_of_sync=(*state.out_of_sync, *aggregation.out_of_sync),",
          "out_of_sync=state.out_of_sync,", "methods/test_sketchvote.py -k out_of_sync"),
    Fault("engine-loss", "engine", "The loss of a round is the plain mean of clients' losses, without their samples.",
          "engine/reports.py", "        total += samples * loss\n        weight += samples\n",
          "        total += loss\n        weight += 1\n", "engine/test_round.py -k loss_of_a_round"),
    Fault("engine-traffic", "engine", "The framing of an answer is counted once for each request, not for each client.",
          "engine/transport.py", "down_framing += clients * HEADER_BYTES", "down_framing += HEADER_BYTES",
          "methods/test_battery.py -k message_bits"),
    Fault("engine-accuracy", "engine", "Accuracy is the plain mean over clients, without their test samples.",
          "engine/reports.py", "return self._unit * sum(self.correct) / sum(self.tested)",
          "return sum(self.per_client) / len(self.tested)",
          "experiment/test_participation_reports.py -k metrics_are_of"),
    Fault("engine-mask", "engine", "Evaluation also counts the padding of clients with fewer samples than others.",
          "engine/client.py", "score.masked_fill(~mask, 0).to(self._score_dtype)", "score.to(self._score_dtype)",
          "engine/test_engines_agree.py -k engines_agree"),
    Fault("config-bound", "experiment", "A setting that must lie below a bound may also be equal to it.",
          "settings.py", '"below": (lt, ', '"below": (le, ',
          "experiment/test_config.py"),
    Fault("resume-rewind", "experiment", "A resumed run keeps the metrics written after its checkpoint.",
          "experiment/store.py", "if size > length:", "if size > length and not length:",
          "experiment/test_resume.py -k torn_last_line"),
    Fault("summary-last10", "experiment", "The mean of the last 10 evaluations is of the last 9.",
          "experiment/summary.py", "tail = values[-10:]", "tail = values[-9:]",
          "experiment/test_run.py -k agrees"),
    Fault("sweep-choice", "experiment", "A sweep chooses by P-acc although validation samples are set aside.",
          "experiment/grids.py", 'by or ("v_acc" if validated else "p_acc")', 'by or "p_acc"',
          "experiment/test_variants.py -k edge"),
    Fault("export-order", "experiment", "Exported models are numbered in the order in which clients last trained.",
          "experiment/exporting.py", "sorted(models, key=lambda pair: pair[0])", "models",
          "experiment/test_show_and_export.py -k took_no_part"),
    Fault("export-name", "experiment", "A client's name that is a number is taken for its number.",
          "experiment/exporting.py", "if str(client) in names:",
          "if str(client) in names and not str(client).isdecimal():",
          "experiment/test_show_and_export.py -k number_and_name"),
    Fault("export-shared", "experiment", "The exported shared model has the running statistics of one client.",
          "engine/federation.py", "value.double().mean(dim=0).to(value.dtype) if value.is_floating_point()",
          "value[0] if value.is_floating_point()", "experiment/test_show_and_export.py -k running_statistics"),
    Fault("results-csv", "report", "Every accuracy column of results.csv holds the final accuracy.",
          "report/results.py", "column.value(run.summary) for column in COLUMNS if column.path}",
          'replace(column, path=column.path.replace("last10", "final").replace("max", "final")).value(run.summary)\n'
          "               for column in COLUMNS if column.path}", "experiment/test_variants.py -k rows_folders"),
    Fault("compare-std", "report", "The ± of a comparison divides by the number of seeds instead of one less.",
          "report/runs.py", "from statistics import mean, stdev", "from statistics import mean, pstdev as stdev",
          "report/test_report_tables.py -k rows_of"),
    Fault("report-fewer", "report", "The factor of fewer bytes compares FedAvg's both ways with the way up alone.",
          "report/results.py", 'own_traffic = traffic[record["row"]]', 'own_traffic = record["mib_up"]',
          "report/test_report_tables.py -k rows_of"),
    Fault("deploy-replay", "deploy", "A node answers another request of the same trip with its last reply.",
          "deploy/node.py", "if same_trip and digest == state.request:", "if same_trip:",
          "deploy/test_left_out.py -k node_refuses"),
    Fault("deploy-refused", "deploy", "What was meant for a node that could not be reached is counted as sent.",
          "deploy/nodes.py", "                    reached.discard(client)", "                    pass",
          "deploy/test_dropouts.py -k missed_answers"),
    Fault("deploy-trip", "deploy", "Requests of the next trip carry the number of the last one.",
          "engine/server.py", "trip=state.trip + 1", "trip=state.trip",
          "deploy/test_same_run.py -k every_method"),
    Fault("store-atomic", "experiment", "A file is written in place, so a process killed then leaves a part of it.",
          "files.py", 'temporary = path.with_name(path.name + ".tmp")', "temporary = path",
          "experiment/test_resume.py -k killed_at_any"),
    Fault("flower-permissions", "flower", "The scripts of a deployment folder may not be executed.",
          "flower/folder.py", "path.chmod(0o700 if path.suffix", "path.chmod(0o600 if path.suffix",
          "flower/test_deploy_folder.py -k certificates"),
)
# fmt: on


def seed(fault: Fault, tree: Path) -> str:
    """Apply a fault; what is in the way, if anything."""
    path = tree / "src/pfedlms" / fault.file
    if not path.exists():
        return f"MOVED: src/pfedlms/{fault.file} is not there any more"
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return f"MOVED: the old text is found {text.count(fault.old)} times in src/pfedlms/{fault.file}"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return ""


def tested(tree: Path, tests: str, kernels: Path | None) -> tuple[int, str, float]:
    """Exit status of pytest, the first test that failed, and seconds."""
    names = [f"tests/{part}" if ".py" in part else part for part in shlex.split(tests)]
    more = {"NUMBA_CACHE_DIR": str(kernels)} if kernels else {}
    # No bytecode is left behind, so that no later run takes a faulty module for the right one.
    here = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **more}
    began = time.perf_counter()
    call = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *names]
    done = subprocess.run(call, cwd=tree, env={**os.environ, **here}, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else "", round(time.perf_counter() - began, 1)


def run(fault: Fault, tree: Path) -> dict[str, Any]:
    """One row of results; the tree is as it was afterwards."""
    path = tree / "src/pfedlms" / fault.file
    if moved := seed(fault, tree):
        return {"id": fault.id, "result": moved, "caught_by": "", "seconds": 0.0}
    # Kernels of other files may have those of this one compiled into them.
    kernels = tree / "kernels" / fault.id if "@compiled" in path.read_text(encoding="utf-8") else None
    status, test, seconds = tested(tree, fault.tests, kernels)
    shutil.copy2(ROOT / "src/pfedlms" / fault.file, path)
    if status == 1 and tested(tree, shlex.quote(test.removeprefix("tests/")), None)[0]:
        return {"id": fault.id, "result": "FAILS without the fault", "caught_by": test, "seconds": seconds}
    result = {0: "MISSED", 1: "caught", 4: "NO TESTS", 5: "NO TESTS"}.get(status, f"ENDED with {status}")
    return {"id": fault.id, "result": result, "caught_by": test, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="faults by id or by room; default: all")
    parser.add_argument("--list", action="store_true", help="show what there is and run nothing")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    asked = parser.parse_args()
    unknown = set(asked.ids) - {name for fault in FAULTS for name in (fault.id, fault.room)}
    if unknown:
        parser.error(f"ids: got {', '.join(sorted(unknown))}, expected ids or rooms of --list")
    chosen = [fault for fault in FAULTS if not asked.ids or {fault.id, fault.room} & set(asked.ids)]
    if asked.list:
        for fault in chosen:
            print(f"{fault.id:20} {fault.room:11} {fault.wrong}\n{'':32} {fault.file}; tests/{fault.tests}")
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for fault in chosen:
            rows.append(run(fault, tree))
            print("{id:20} {result:8} {seconds:6.1f} s  {caught_by}".format(**rows[-1]), flush=True)
            if asked.json:
                keep({"faults": rows}, asked.json)
    caught = [row["result"] for row in rows].count("caught")
    print(f"{caught} of {len(rows)} caught")
    return int(caught < len(rows))


if __name__ == "__main__":
    sys.exit(main())
