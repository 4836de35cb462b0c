"""Runs of a study in other processes, some at the same time; on several GPUs each process has one."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from typing import Any

import torch

from pfedlms.errors import DivergedError, PfedlmsError, QuorumError, RunError, UsageError
from pfedlms.experiment import plugins
from pfedlms.experiment.callbacks import Calls, RunInfo
from pfedlms.experiment.loop import signals
from pfedlms.experiment.prepare import cache_data_sets
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run


class _Worker:
    """A process that plays one run after another, and the run it plays now."""

    run: Run | None = None

    def __init__(self, problem: Problem, place: int) -> None:
        self.place = place
        self.pipe, theirs = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(target=_work, args=(theirs, problem, list(plugins.IMPORTED)))
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"workers: what was given in Python cannot be sent to another process ({error}); give functions and "
                "classes of a module, no lambda, or leave workers out"
            ) from error
        theirs.close()

    def begin(self, run: Run, workers: int) -> None:
        """Play a run, on a device and threads of its own unless the configuration names them."""
        how: dict[str, Any] = {}
        if run.config.run.device in ("auto", "cuda") and torch.cuda.device_count() > 1:
            how["device"] = f"cuda:{self.place % torch.cuda.device_count()}"
        if not run.config.run.threads:
            how["threads"] = max(1, (os.cpu_count() or 1) // workers)
        self.run = run
        self.pipe.send((run.config, run.directory, run.label, how))

    def end(self, interrupted: bool) -> tuple[Run, Callable[[], Run]]:
        """The run that was played, and its result. A signal ends a process that is not playing rounds yet."""
        run, self.run = self.run, None
        assert run is not None
        try:
            message, summary = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            message = "" if interrupted else f"{run.directory}: its process ended with code {code}"
            summary = {**run.reread().summary, "status": "failed"}

        def result() -> Run:
            if message:
                error = RunError(message)
                error.summary = summary
                raise error
            done = run.reread()
            done.stopped = 2 if done.summary["status"] == "interrupted" else 0
            return done

        return run, result


def in_parallel(
    runs: Sequence[Run], callbacks: Sequence[Any], workers: int, deadline: float
) -> Iterator[tuple[Run, Callable[[], Run]]]:
    """Play runs that have folders, as many at a time, and yield each with its result when it ends. Callbacks are called
    in this process, at the start and the end of every run. A signal is passed on; after it, and after `deadline`, no
    run is begun."""
    call, waiting, interrupted = Calls(callbacks), list(runs), False
    pool: list[_Worker] = []
    try:
        with signals() as received_signal:
            while True:
                busy = [each for each in pool if each.run is not None]
                while waiting and len(busy) < workers and not interrupted and time.monotonic() < deadline:
                    pool = [each for each in pool if each.run is not None or each.process.is_alive()]
                    worker = next((each for each in pool if each.run is None), None)
                    if worker is None:
                        place = min(set(range(workers)) - {each.place for each in pool})
                        worker = _Worker(waiting[0].problem, place)
                        pool.append(worker)
                    run = waiting.pop(0)
                    worker.begin(run, workers)
                    busy.append(worker)
                    call("on_start", RunInfo(run.label, run.config, run.directory))
                if not busy:
                    return
                connection.wait([each.pipe for each in busy], timeout=0.2)
                if received_signal() and not interrupted:
                    interrupted = True
                    for each in busy:
                        each.process.terminate()  # which lets the round end and be saved
                for each in [each for each in busy if each.pipe.poll()]:
                    run, result = each.end(interrupted)
                    call.end(RunInfo(run.label, run.config, run.directory), run.reread().summary)
                    yield run, result
    finally:
        for each in pool:
            if each.run is not None:  # an error ends the study
                each.process.terminate()
            each.pipe.close()  # which ends an idle process
            each.process.join()


def _work(pipe: Any, problem: Problem, imports: Sequence[str]) -> None:
    """The life of a process: runs, until the other end of the pipe is closed. A data set is read once for all."""
    plugins.import_modules(imports)
    with cache_data_sets():
        while True:
            try:
                config, directory, label, how = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            found = _played(Run(config, directory, problem, label), how)
            with suppress(BrokenPipeError):  # the study was left meanwhile
                pipe.send(found)


def _played(run: Run, how: dict[str, Any]) -> tuple[str, Any]:
    """Play a run, whose results are in its folder; the message of the error that ended it, and the summary of a run
    whose error does not end the others."""
    try:
        run.train(begins=not run.begun, **how)
    except PfedlmsError as error:
        return str(error), error.summary if isinstance(error, DivergedError | QuorumError) else None
    return "", None
