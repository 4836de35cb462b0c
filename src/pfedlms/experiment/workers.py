"""Runs of a study in worker processes, several at the same time; on several GPUs each process has one."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch

from pfedlms.errors import DivergedError, PfedlmsError, QuorumError, RunError, StorageError, UsageError
from pfedlms.experiment import plugins
from pfedlms.experiment.callbacks import Callbacks, RunInfo
from pfedlms.experiment.loop import signals
from pfedlms.experiment.prepare import cache_data_sets
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run
from pfedlms.methods import METHODS

Outcomes = Generator[tuple[Run, Callable[[], Run]], None, None]
"""Runs, each with a function that returns its result, or raises the error that ended it."""


class _Worker:
    """A process that trains one run after another, and the run that it trains now."""

    run: Run | None = None

    def __init__(self, problem: Problem, place: int, methods: Sequence[str]) -> None:
        self.place = place
        self.pipe, far_end = get_context("spawn").Pipe()
        arguments = far_end, problem, list(plugins.IMPORTED_MODULES), methods
        self.process = get_context("spawn").Process(target=_worker_main, args=arguments)
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"workers: what was given in Python cannot be sent to another process ({error}); give functions and "
                "classes of a module, no lambda, or leave workers out"
            ) from error
        far_end.close()

    def start(self, run: Run, workers: int) -> None:
        """Start a run, on a device and threads of its own unless the configuration names them."""
        overrides: dict[str, Any] = {}
        if run.config.run.device in ("auto", "cuda") and torch.cuda.device_count() > 1:
            overrides["device"] = f"cuda:{self.place % torch.cuda.device_count()}"
        if not run.config.run.threads:
            overrides["threads"] = max(1, (os.cpu_count() or 1) // workers)
        self.run = run
        self.pipe.send((run.config, run.directory, run.label, overrides))

    def finish(self, stop_signal: int) -> tuple[Run, Callable[[], Run]]:
        """The run that has ended, and a function that returns its result. A process that a signal ended before its
        first round sends nothing."""
        run, self.run = self.run, None
        assert run is not None
        try:
            message, summary, storage = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            storage = ()
            message = "" if stop_signal else f"{run.directory}: its process ended with code {self.process.exitcode}"
            summary = {**run.reload().summary, "status": "failed"}

        def result() -> Run:
            if storage:
                raise StorageError(*storage)
            if message:
                error = RunError(message)
                error.summary = summary
                raise error
            trained = run.reload()
            trained.stopped = (stop_signal or signal.SIGINT) if trained.interrupted else 0
            return trained

        return run, result


def train_in_parallel(runs: Sequence[Run], callbacks: Sequence[Any], workers: int, deadline: float) -> Outcomes:
    """Train runs that have folders, `workers` of them at a time. Yield each when it ends, with a function that returns
    its result. This process calls callbacks at the start and the end of every run. It passes a signal on to the
    workers; after a signal, and after `deadline`, no run is started."""
    call, waiting, stop_signal = Callbacks(callbacks), list(runs), 0
    modules = {METHODS[run.config.method].__module__ for run in runs} - {"__main__"}
    methods = sorted(name for name in modules if not name.startswith("pfedlms."))
    pool: list[_Worker] = []
    try:
        with signals() as received_signal:
            while True:
                busy = [worker for worker in pool if worker.run is not None]
                while waiting and len(busy) < workers and not stop_signal and time.monotonic() < deadline:
                    pool = [worker for worker in pool if worker.run is not None or worker.process.is_alive()]
                    idle = next((worker for worker in pool if worker.run is None), None)
                    if idle is None:
                        place = min(set(range(workers)) - {worker.place for worker in pool})
                        idle = _Worker(waiting[0].problem, place, methods)
                        pool.append(idle)
                    run = waiting.pop(0)
                    idle.start(run, workers)
                    busy.append(idle)
                    call("on_start", _info_of(run))
                if not busy:
                    return
                connection.wait([worker.pipe for worker in busy], timeout=0.2)
                if received_signal() and not stop_signal:
                    stop_signal = received_signal()
                    for worker in busy:
                        worker.process.terminate()  # which lets the round end and be saved
                for worker in [worker for worker in busy if worker.pipe.poll()]:
                    run, get_result = worker.finish(stop_signal)
                    call.end(_info_of(run), run.reload().summary)
                    yield run, get_result
    finally:
        for worker in pool:
            if worker.run is not None:  # an error ends the study
                worker.process.terminate()
            worker.pipe.close()  # which ends an idle process
            worker.process.join()


def _info_of(run: Run) -> RunInfo:
    """The run as callbacks see it, with its evaluations so far."""
    info = RunInfo(run.label, run.config, run.directory)
    info.metrics = run.reload().metrics
    return info


def _worker_main(pipe: Any, problem: Problem, imports: Sequence[str], methods: Sequence[str]) -> None:
    """Train runs in this worker process until the other end of the pipe is closed. A data set is read once for all.
    `methods` are modules of methods; runs of those that cannot be imported fail, the others do not."""
    threading.Thread(target=_stop_with_study, daemon=True).start()
    plugins.import_modules(imports)
    for name in methods:
        with suppress(UsageError):
            plugins.import_modules([name])
    with cache_data_sets():
        while True:
            try:
                config, directory, label, overrides = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            outcome = _train_run(Run(config, directory, problem, label), overrides)
            with suppress(BrokenPipeError):  # the study has ended meanwhile
                pipe.send(outcome)


def _stop_with_study() -> None:
    """Stop this worker process after its round if the process of the study was killed."""
    study = parent_process()
    assert study is not None
    connection.wait([study.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _train_run(run: Run, overrides: dict[str, Any]) -> tuple[str, Any, Sequence[str]]:
    """Train a run, which writes its results to its folder. Returns the message of the error that ended it, if one did,
    the summary if the other runs of the study go on after this error, and the arguments of a StorageError."""
    try:
        if plugins.find_method(run.config.method) is None:
            raise UsageError(
                f"workers: the method {run.config.method!r} is not known in another process; put it into a module "
                "that can be imported, my_methods.py for instance, or leave workers out"
            )
        run.train(new=not run.has_started, **overrides)
    except StorageError as error:
        return str(error), None, (str(error.path), error.reason)
    except PfedlmsError as error:
        return str(error), error.summary if isinstance(error, DivergedError | QuorumError) else None, ()
    return "", None, ()
