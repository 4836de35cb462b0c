"""The backend of an operation, how work is divided among threads, and that results do not depend on it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pfedlms
from factories import SIZES, federation, normal, sketch_of, some_pull
from pfedlms import backend
from pfedlms.backend import (
    all_threads_per_operator,
    backend_of,
    for_each_in_threads,
    one_thread_per_operator,
    plain,
    run_kernel,
    threads,
    torch_threads,
)
from pfedlms.pull import cpu as pull_cpu
from pfedlms.sketch import cpu as sketch_cpu
from pfedlms.step import cpu as step_cpu
from pfedlms.step import sgd_step_


def test_the_backend_depends_on_device_and_type_of_a_tensor() -> None:
    for dtype, where in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.bfloat16, "plain")):
        assert backend_of(torch.zeros(2, dtype=dtype)) == where
    assert backend_of(torch.zeros(2, device="meta")) == "plain"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("installed", [False, True])
def test_a_gpu_uses_kernels_if_triton_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: installed)
    assert backend_of(torch.zeros(2, device="cuda")) == ("gpu" if installed else "plain")
    assert backend_of(torch.zeros(2, device="cuda", dtype=torch.float64)) == "plain"


def test_plain_holds_for_all_threads_until_it_ends() -> None:
    seen: list[str] = []

    def work(item: int) -> None:
        time.sleep(0.01)
        seen.append(backend_of(torch.zeros(1)))

    with torch_threads(3), plain():
        with plain():
            for_each_in_threads(work, range(6))
        assert backend_of(torch.zeros(1)) == "plain"
    assert seen == ["plain"] * 6
    with pytest.raises(KeyError), plain():
        raise KeyError
    assert backend_of(torch.zeros(1)) == "cpu"


def test_no_module_calls_a_kernel_under_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    sketch, pull, values = sketch_of(*SIZES), some_pull(3, 0.1, 0.3).pull, normal(2, sum(SIZES))
    sketched = sketch.forward(values)
    for module, name in (
        (sketch_cpu, "forward"), (sketch_cpu, "adjoint"), (pull_cpu, "gradient"), (step_cpu, "sgd_step_"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, object())  # cannot be called
    calls = (
        lambda: sketch.forward(values),
        lambda: sketch.adjoint(sketched),
        lambda: pull.gradient(values),
        lambda: sgd_step_(values.clone(), values.clone(), None, values.clone(), 0.1, 0.9, 0.0),
    )
    for call in calls:
        with plain():
            call()
        with pytest.raises(TypeError):
            call()


@pytest.fixture
def three_threads() -> Iterator[None]:
    with torch_threads(3):
        yield


@pytest.mark.usefixtures("three_threads")
def test_only_large_work_is_divided_among_threads() -> None:
    seen: list[tuple[int, int, int]] = []

    def kernel(first: int, last: int) -> None:
        time.sleep(0.01)  # so that no thread does it all
        seen.append((first, last, threading.get_ident()))

    run_kernel(kernel, 100, 10)
    assert seen == [(0, 100, threading.get_ident())]
    for tasks in (2, 5, 100):
        seen.clear()
        run_kernel(kernel, tasks, 1 << 20)
        assert [last for _, last, _ in sorted(seen)][:-1] == [first for first, _, _ in sorted(seen)][1:]
        assert (min(seen)[0], max(seen)[1]) == (0, tasks)
    assert 2 <= len({thread for _, _, thread in seen}) <= 3  # of the last, which takes long enough


@pytest.mark.usefixtures("three_threads")
def test_every_item_is_done_once_by_one_of_the_threads() -> None:
    seen: list[tuple[int, int, int, int]] = []

    def kernel(first: int, last: int) -> None:
        calls.append((first, last))

    def work(item: int) -> None:
        time.sleep(0.01)
        run_kernel(kernel, 10, 1 << 30)
        for_each_in_threads(lambda inner: calls.append(inner), [1, 2])
        seen.append((item, torch.get_num_threads(), threads(), threading.get_ident()))

    calls: list[Any] = []
    for_each_in_threads(work, list(range(10)))
    assert sorted(item for item, *_ in seen) == list(range(10))
    assert all(shares == [1, 1] for _, *shares, _ in seen)
    assert calls.count((0, 10)) == 10  # inside a thread, work is not divided again
    names = {thread for *_, thread in seen}
    assert 2 <= len(names) <= 3
    assert threading.get_ident() in names
    assert (torch.get_num_threads(), threads()) == (3, 3)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("bad", [0, 1, 5])
def test_an_error_in_a_thread_reaches_the_caller_and_ends_the_work(bad: int) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        time.sleep(0.01)
        if item == bad:
            raise ValueError(f"item {item}")
        done.append(item)

    with pytest.raises(ValueError, match=f"item {bad}"):
        for_each_in_threads(work, range(1000))
    assert len(done) < 1000
    assert torch.get_num_threads() == 3
    for_each_in_threads(done.append, [-1, -2])  # the threads work on
    assert {-1, -2} <= set(done)


@pytest.mark.usefixtures("three_threads")
def test_one_thread_per_operator_leaves_all_threads_to_divided_work() -> None:
    with one_thread_per_operator():
        assert (torch.get_num_threads(), threads()) == (1, 3)
        with one_thread_per_operator(), all_threads_per_operator():
            assert torch.get_num_threads() == 3
        assert (torch.get_num_threads(), threads()) == (1, 3)
        seen: list[tuple[int, int]] = []
        for_each_in_threads(lambda item: seen.append((torch.get_num_threads(), threads())), range(3))
        assert seen == [(1, 1)] * 3
    with pytest.raises(KeyError), one_thread_per_operator():
        raise KeyError
    assert torch.get_num_threads() == 3
    with torch_threads(2):
        assert threads() == 2


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "fedproto", "pfed1bs", "eden"])
def test_results_do_not_depend_on_the_number_of_threads(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of a few clients each, and with kernels that are always shared."""
    monkeypatch.setattr(backend, "_WORTH_WAKING", 1)

    def measured() -> tuple[Any, torch.Tensor]:
        result = pfedlms.run("digits", method=method, rounds=2, clients=7, hidden=2048, momentum=0.5, seed=1)
        for record in result.metrics:
            del record["seconds"]
        return result.metrics, result.federation.state()["params"]

    metrics, params = measured()
    for count in (2, 5):
        with torch_threads(count):
            again, theirs = measured()
        assert torch.equal(theirs, params)
        assert again == metrics


def test_a_run_keeps_the_threads_of_torch_and_starts_none_of_numba() -> None:
    """In a fresh interpreter, because a threading layer that was started stays; with as many threads as there are and
    with one."""
    script = """
import numba, torch
import pfedlms
for count in (3, 1):
    torch.set_num_threads(count)
    pfedlms.run("digits", rounds=2, clients=4, hidden=512)
    assert torch.get_num_threads() == count, (torch.get_num_threads(), count)
try:
    numba.threading_layer()
except ValueError as error:
    assert "not initialized" in str(error), error
else:
    raise AssertionError("numba has started threads of its own")
"""
    run_in_new_interpreter(script)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_threads_of_long_operators_do_not_spin_if_torch_was_imported_first() -> None:
    """The environment variable comes too late then; OpenMP does not spin with more threads than cores."""
    run_in_new_interpreter("""
import os, threading, torch
import pfedlms
from pfedlms.backend import all_threads_per_operator, one_thread_per_operator
assert "GOMP_SPINCOUNT" not in os.environ
torch.set_num_threads(2)
with one_thread_per_operator(), all_threads_per_operator():
    assert torch.get_num_threads() == 2
    assert len(os.listdir("/proc/self/task")) > len(os.sched_getaffinity(0))
seen = [torch.get_num_threads()]
other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
other.start()
other.join()
assert seen == [2, 2], seen
""")
    run_in_new_interpreter("import os, pfedlms; assert os.environ['GOMP_SPINCOUNT'] == '1000'")


def run_in_new_interpreter(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


class RecordThreads(TorchDispatchMode):
    """Records how many threads every operator that is called from this thread may use."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.setdefault(func.name(), set()).add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("three_threads")
def test_every_operator_of_a_round_runs_on_one_thread() -> None:
    """Threads of one operator wait for each other, on busy cores many times as long as they work."""
    made = federation("pfedlms")
    with RecordThreads() as recorder:
        made.play_round(evaluate_global=True)
        made.evaluate()
    assert {"aten::bmm", "aten::_log_softmax", "aten::bucketize.Tensor"} <= set(recorder.threads)
    assert {name: found for name, found in recorder.threads.items() if found != {1}} == {}
    assert torch.get_num_threads() == 3


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_has_its_own_threads() -> None:
    def work() -> None:
        meet = threading.Barrier(2, timeout=30)  # passes only with two threads
        for_each_in_threads(lambda item: meet.wait(), range(2))

    work()  # the parent's threads are there
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == 0
