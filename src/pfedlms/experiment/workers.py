"""Runs of a study in other processes, some at the same time; on several GPUs each process has one."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

from pfedlms.errors import DivergedError, PfedlmsError, QuorumError, RunError, UsageError
from pfedlms.experiment import plugins
from pfedlms.experiment.callbacks import Calls, RunInfo
from pfedlms.experiment.grids import Cell
from pfedlms.experiment.loop import signals
from pfedlms.experiment.prepare import keeping_pools
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run, load_run, resume_run


class _Worker:
    """A process that plays one run after another, and the run it plays now."""

    cell: Cell | None = None

    def __init__(self, problem: Problem, data_dir: str | None, place: int) -> None:
        self.place = place
        self.pipe, theirs = get_context("spawn").Pipe()
        arguments = (theirs, problem, data_dir, list(plugins.IMPORTED))
        self.process = get_context("spawn").Process(target=_work, args=arguments)
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"workers: what was given in Python cannot be sent to another process ({error}); give functions and "
                "classes of a module, no lambda, or leave workers out"
            ) from error
        theirs.close()

    def begin(self, cell: Cell, workers: int) -> None:
        """Play a run, on a device and threads of its own unless the configuration names them."""
        how: dict[str, Any] = {}
        if cell.config.run.device in ("auto", "cuda") and torch.cuda.device_count() > 1:
            how["device"] = f"cuda:{self.place % torch.cuda.device_count()}"
        if not cell.config.run.threads:
            how["threads"] = max(1, (os.cpu_count() or 1) // workers)
        self.cell = cell
        self.pipe.send((cell, how))

    def end(self, interrupted: bool) -> tuple[Cell, Callable[[], Run]]:
        """The cell that was played, and its result. A signal ends a process that is not playing rounds yet."""
        cell, self.cell = self.cell, None
        assert cell is not None
        try:
            message, summary = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            message = "" if interrupted else f"{cell.config.run.out}: its process ended with code {code}"
            summary = {**load_run(cell.config.run.out).summary, "status": "failed"}

        def result() -> Run:
            if message:
                error = RunError(message)
                error.summary = summary
                raise error
            done = load_run(cell.config.run.out, label=cell.label)
            done.stopped = 2 if done.summary["status"] == "interrupted" else 0
            return done

        return cell, result


def in_parallel(
    cells: Sequence[Cell], problem: Problem, callbacks: Sequence[Any], data_dir: str | None, workers: int,
    deadline: float = float("inf"),
) -> Iterator[tuple[Cell, Callable[[], Run]]]:  # fmt: skip
    """Play cells that have folders, as many at a time, and yield each with its result when it ends. Callbacks are
    called in this process, at the start and the end of every run. A signal is passed on; after it, and after
    `deadline`, no run is begun."""
    call, waiting, interrupted = Calls(callbacks), list(cells), False
    pool: list[_Worker] = []
    try:
        with signals() as received_signal:
            while True:
                busy = [each for each in pool if each.cell is not None]
                while waiting and len(busy) < workers and not interrupted and time.monotonic() < deadline:
                    idle = [each for each in pool if each.cell is None and each.process.is_alive()]
                    pool = busy + idle
                    if not idle:
                        taken = {each.place for each in busy}
                        idle = [_Worker(problem, data_dir, min(set(range(workers)) - taken))]
                        pool += idle
                    idle[0].begin(waiting.pop(0), workers)
                    assert idle[0].cell is not None
                    call("on_start", _info(idle[0].cell))
                    busy = [each for each in pool if each.cell is not None]
                if not busy:
                    return
                connection.wait([each.pipe for each in busy], timeout=0.2)
                if received_signal() and not interrupted:
                    interrupted = True
                    for each in busy:
                        each.process.terminate()  # which lets the round end and be saved
                for each in [each for each in busy if each.pipe.poll()]:
                    cell, result = each.end(interrupted)
                    call.end(_info(cell), load_run(cell.config.run.out).summary)
                    yield cell, result
    finally:
        for each in pool:
            if each.cell is not None:  # an error ends the study
                each.process.terminate()
            each.pipe.close()  # which ends an idle process
            each.process.join()


def _info(cell: Cell) -> RunInfo:
    return RunInfo(f"{cell.label} seed {cell.config.run.seed}", cell.config, Path(cell.config.run.out))


def _work(pipe: Any, problem: Problem, data_dir: str | None, imports: Sequence[str]) -> None:
    """The life of a process: runs, until the other end of the pipe is closed. A data set is read once for all."""
    plugins.import_modules(imports)
    with keeping_pools():
        while True:
            try:
                cell, how = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            pipe.send(_played(cell, problem, data_dir, how))


def _played(cell: Cell, problem: Problem, data_dir: str | None, how: dict[str, Any]) -> tuple[str, Any]:
    """Play a run, whose results are in its folder; the message of the error that ended it, and the summary of a run
    whose error does not end the others."""
    try:
        resume_run(cell.config.run.out, problem, (), data_dir, cell.label, **how)
    except PfedlmsError as error:
        return str(error), error.summary if isinstance(error, DivergedError | QuorumError) else None
    return "", None
