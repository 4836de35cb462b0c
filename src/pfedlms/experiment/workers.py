"""Runs of a study in processes of their own, some at the same time; on several GPUs each has one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

from pfedlms.errors import DivergedError, PfedlmsError, QuorumError, RunError, UsageError
from pfedlms.experiment import plugins
from pfedlms.experiment.callbacks import Calls, RunInfo
from pfedlms.experiment.grids import Cell
from pfedlms.experiment.loop import signals
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run, load_run, resume_run


@dataclass
class _Worker:
    cell: Cell
    process: Any
    inbox: Any
    place: int

    def ended(self) -> tuple[Cell, Callable[[], Run]]:
        error: RunError | None = None
        try:
            error = self.inbox.recv()
        except EOFError:  # it had nothing to report
            if self.process.exitcode:
                error = RunError(f"{self.cell.config.run.out}: its process ended with code {self.process.exitcode}")

        def result() -> Run:
            if error is not None:
                raise error
            done = load_run(self.cell.config.run.out, label=self.cell.label)
            done.stopped = 2 if done.summary["status"] == "interrupted" else 0
            return done

        return self.cell, result


def in_parallel(
    cells: Sequence[Cell], problem: Problem, callbacks: Sequence[Any], data_dir: str | None, workers: int
) -> Iterator[tuple[Cell, Callable[[], Run]]]:
    """Play cells that have folders, as many at a time; yields each with its result when it ends. Callbacks stay in this
    process: of every run they are called at its start and its end. A signal is passed on, and no other run is begun."""
    context, call = get_context("spawn"), Calls(callbacks)
    waiting, free = list(cells), list(range(workers))
    running: list[_Worker] = []
    interrupted = False
    with signals() as came:
        while running or (waiting and not interrupted):
            while waiting and free and not interrupted:
                cell = waiting.pop(0)
                running.append(_started(context, cell, problem, data_dir, free.pop(0), workers))
                call("on_start", _info(cell))
            connection.wait([each.process.sentinel for each in running], timeout=0.2)
            if came() and not interrupted:
                interrupted = True
                for each in running:
                    each.process.terminate()  # which lets the round end and be saved
            for each in [each for each in running if not each.process.is_alive()]:
                running.remove(each)
                free.append(each.place)
                each.process.join()
                call.end(_info(each.cell), load_run(each.cell.config.run.out).summary)
                yield each.ended()


def _info(cell: Cell) -> RunInfo:
    return RunInfo(f"{cell.label} seed {cell.config.run.seed}", cell.config, Path(cell.config.run.out))


def _started(context: Any, cell: Cell, problem: Problem, data_dir: str | None, place: int, workers: int) -> _Worker:
    inbox, outbox = context.Pipe(duplex=False)
    arguments = (outbox, cell, problem, data_dir, _how(cell, place, workers), list(plugins.IMPORTED))
    process = context.Process(target=_work, args=arguments)
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"workers: what was given in Python cannot be sent to another process ({error}); give functions and "
            "classes of a module, no lambda, or leave workers out"
        ) from error
    outbox.close()
    return _Worker(cell, process, inbox, place)


def _how(cell: Cell, place: int, workers: int) -> dict[str, Any]:
    """A device and threads of its own, unless the configuration names them."""
    how: dict[str, Any] = {}
    if cell.config.run.device in ("auto", "cuda") and torch.cuda.device_count() > 1:
        how["device"] = f"cuda:{place % torch.cuda.device_count()}"
    if not cell.config.run.threads:
        how["threads"] = max(1, (os.cpu_count() or 1) // workers)
    return how


def _work(
    outbox: Any, cell: Cell, problem: Problem, data_dir: str | None, how: dict[str, Any], imports: Sequence[str]
) -> None:
    """The whole life of a process: one run."""
    plugins.import_modules(imports)
    try:
        resume_run(cell.config.run.out, problem, (), data_dir, cell.label, **how)
    except (DivergedError, QuorumError) as error:
        outbox.send(_summarised(type(error)(str(error)), error))
    except PfedlmsError as error:
        outbox.send(RunError(str(error)))


def _summarised(made: DivergedError | QuorumError, error: RunError) -> RunError:
    made.summary = error.summary
    return made
