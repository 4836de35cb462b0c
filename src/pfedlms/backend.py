"""Where an operation runs (plain torch, CPU kernels, GPU kernels), and how CPU kernels are compiled and share threads.

Every room of fast operations (`sketch`, `pull`, `step`) holds the definition in torch in its `__init__`, kernels for
CPUs in `cpu` and for GPUs in `gpu`, and asks `backend_of` which one takes a tensor. Under `with plain():` all of them
run their definition.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar, cast

import numba
import numpy as np
import torch
from numba.core import event
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")
First = TypeVar("First")
Second = TypeVar("Second")

_WORKERS = 8  # threads that call torch: beyond, they wait for the interpreter rather than for arithmetic
_WORTH_WAKING = 1 << 19  # numbers per thread; to wake one and to wait for it takes as long as to read a tenth of them
_WORTH_ANNOUNCING = 0.5  # seconds of compilation after which the user is told the reason of the wait
_TURNS = 4  # pieces of work for each thread, so that one on a busy core does fewer of them

_plain = False


def compiled() -> Callable[[Function], Function]:
    """`numba.njit` for kernels: compiled at the first call, cached on disk, typed as the function it wraps.

    Without fastmath, because the order of float operations is part of the protocol; with NumPy's error model, so that
    a division by zero follows IEEE 754 instead of raising an exception and loops can be vectorised. Without numba's
    own threads, which set PyTorch's thread count and wait for work by spinning: see `run_kernel`.
    """
    return cast(Callable[[Function], Function], numba.njit(cache=True, nogil=True, error_model="numpy"))


class Compilation(event.Listener):
    """Seconds spent on compiling kernels in this process; numba's cache makes that necessary once per machine."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth, self._began, self._from = 0, 0.0, 0.0
        self._announce: Callable[[], None] | None = None

    @contextmanager
    def announce_when_long(self, announce: Callable[[], None]) -> Iterator[None]:
        """Within it `announce` is called once if compilation takes long."""
        before, self._announce, self._from = self._announce, announce, self.seconds
        try:
            yield
        finally:
            self._announce = before

    def on_start(self, started: Any) -> None:
        """Kernels that a kernel calls are compiled within its own time."""
        self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter()
            if self._announce is not None and self.seconds - self._from > _WORTH_ANNOUNCING:
                self._announce()
                self._announce = None

    def on_end(self, ended: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


COMPILATION = Compilation()
event.register("numba:compile", COMPILATION)  # type: ignore[no-untyped-call]


def is_differentiated(values: Tensor) -> bool:
    """Whether autograd follows what is computed with `values`, backward or forward. Kernels have no derivatives."""
    is_backward = values.requires_grad and torch.is_grad_enabled()
    return is_backward or forward_ad.unpack_dual(values).tangent is not None  # type: ignore[no-untyped-call]


def backend_of(values: Tensor) -> Literal["plain", "cpu", "gpu"]:
    """Which of a package's three implementations computes with `values`."""
    if _plain:
        return "plain"
    if values.is_cuda:
        return "gpu" if values.dtype == torch.float32 and has_triton() else "plain"
    return "cpu" if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64) else "plain"


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def row_memory(rows: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """The memory of `rows: [rows, entries]` from the first entry to the last as one vector, and how far apart rows
    begin. Kernels vectorise loops over such a vector, but not over an array whose rows lie apart."""
    step, inner = rows.strides
    if inner != rows.itemsize or step % rows.itemsize or step < rows.shape[1] * rows.itemsize or not len(rows):
        rows = np.ascontiguousarray(rows)
        step = rows.strides[0]
    stride = step // rows.itemsize
    length = (len(rows) - 1) * stride + rows.shape[1] if len(rows) else 0
    flat = np.lib.stride_tricks.as_strided(rows, (length,), (rows.itemsize,), writeable=rows.flags.writeable)
    return flat, stride


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; to a GPU through pinned memory, so that the host does not wait for the copy."""
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def to_host(*values: Tensor) -> list[Tensor]:
    """Tensors of a device on the host; from a GPU through pinned memory, with one wait for all of them."""
    return to_host_later(*values)()


def to_host_later(*values: Tensor) -> Callable[[], list[Tensor]]:
    """`to_host` whose wait is the function returned: it does not wait for work that is launched in between."""
    found, copied = [], {}
    for value in values:
        if value.is_cuda:
            pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            found.append(pinned.copy_(value.detach(), non_blocking=True))
            copied[value.device] = torch.cuda.current_stream(value.device)
        else:
            found.append(value.detach().cpu())
    events = [stream.record_event() for stream in copied.values()]

    def wait() -> list[Tensor]:
        for each in events:
            each.synchronize()
        return found

    return wait


@lru_cache
def streams(device: torch.device, purpose: str, count: int) -> list[torch.cuda.Stream]:
    """Streams of a GPU for one purpose, always the same ones."""
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def run_overlapped(
    first: Callable[[], First], second: Callable[[], Second], device: torch.device, purpose: str
) -> tuple[First, Second]:
    """Call both functions and return both results. On a GPU they run at the same time, on two streams. Nested calls
    need different purposes."""
    if device.type != "cuda":
        return first(), second()
    current, (side,) = torch.cuda.current_stream(device), streams(device, purpose, 1)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        one = first()
    two = second()
    current.wait_stream(side)
    return one, two


@contextmanager
def plain() -> Iterator[None]:
    """Within it every package uses its definition in torch, on all threads of the process."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


class _ThreadState(threading.local):
    threads: int | None = None
    """How many threads may share the work of this thread; None: as many as PyTorch's operators use."""
    shared = False
    """Whether this thread does a part of shared work now."""


_thread = _ThreadState()


def threads() -> int:
    """How many threads may share the work of the calling thread."""
    return torch.get_num_threads() if _thread.threads is None else _thread.threads


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it PyTorch's operators use `count` threads each; this is a setting of the thread that calls them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread_per_operator() -> Iterator[None]:
    """Within it PyTorch's operators run on one thread each. Our own functions for threads still use all of them.

    An operator that uses several threads waits for all of them, and most operators are short. On cores that are busy
    with other jobs such waiting takes many times as long as the work.
    """
    before, _thread.threads = _thread.threads, threads()
    try:
        with torch_threads(1):
            yield
    finally:
        _thread.threads = before


@contextmanager
def all_threads_per_operator() -> Iterator[None]:
    """Within it PyTorch's operators may use all threads, also inside of `one_thread_per_operator`."""
    if threads() > 1:
        _do_not_spin(os.getpid())
    with torch_threads(threads()):
        yield


@cache
def _do_not_spin(process: int) -> None:
    """Make the threads of an operator sleep while they wait for each other. GNU's OpenMP spins unless it was configured
    before it was loaded, or has more threads than there are cores. So this adds threads, which stay idle."""
    configured = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if sys.platform != "linux" or configured:
        return
    count, before, started = len(os.sched_getaffinity(0)) + 1, torch.get_num_threads(), threading.Event()

    def keep() -> None:
        torch.set_num_threads(count)
        torch.zeros(count << 16).add_(1)  # long enough for all of them
        started.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="pfedlms-idle", daemon=True).start()
    started.wait()
    torch.set_num_threads(before)  # for threads to come; each has a count of its own


def for_each_in_threads(work: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call `work` on every item, in several threads at once; each has its share of PyTorch's threads."""
    workers = 1 if _thread.shared else min(threads(), _WORKERS, len(items))
    if workers <= 1:
        for item in items:
            work(item)
        return
    of_worker, of_operator, before = threads() // workers, max(1, torch.get_num_threads() // workers), _thread.threads

    def work_with_fewer_threads(item: Item) -> None:
        _thread.threads = of_worker
        torch.set_num_threads(of_operator)
        work(item)

    try:
        with torch_threads(of_operator):
            _run_in_threads(work_with_fewer_threads, items, workers)
    finally:
        _thread.threads = before


def run_kernel(kernel: Callable[..., None], tasks: int, cost: int, *arguments: Any) -> None:
    """Call `kernel(first, last, *arguments)`, which is compiled or else lets other threads run, for the tasks 0 to
    `tasks` − 1, in several threads if that is faster. A task reads about `cost` numbers. No two tasks may write to the
    same place."""
    worth = tasks * cost // _WORTH_WAKING
    workers = 1 if worth <= 1 or _thread.shared else min(threads(), tasks, worth)
    if workers <= 1:
        kernel(0, tasks, *arguments)
        return
    pieces = min(tasks, _TURNS * workers)
    ends = [tasks * number // pieces for number in range(pieces + 1)]
    _run_in_threads(lambda piece: kernel(ends[piece], ends[piece + 1], *arguments), range(pieces), workers)


def _run_in_threads(work: Callable[[Item], object], items: Sequence[Item], workers: int) -> None:
    """Call `work` on every item in `workers` threads, one of them the caller's. A free thread takes the next item."""
    waiting = deque(items)

    def work_on_items() -> None:
        _thread.shared = True
        try:
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                work(item)
        finally:
            _thread.shared = False
            waiting.clear()  # after an error all threads stop

    others = [_pool(os.getpid()).submit(work_on_items) for _ in range(workers - 1)]
    try:
        work_on_items()
    finally:
        # Threads that have not begun yet are cancelled, so that the caller does not wait for a busy core.
        begun = [other for other in others if not other.cancel()]
        errors = [other.exception() for other in begun]
    for error in filter(None, errors):
        raise error


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that sleep while they wait for work; a forked process cannot use its parent's."""
    return ThreadPoolExecutor(256, thread_name_prefix="pfedlms")
