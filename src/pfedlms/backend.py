"""How CPU kernels are compiled, and how work is spread over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

import numba
import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")

_WORKERS = 4  # beyond, threads wait for the interpreter rather than for arithmetic


class _Here(threading.local):
    shares = True
    """Whether kernels called from this thread may use others."""


_here = _Here()


def compiled(*, parallel: bool = False) -> Callable[[Function], Function]:
    """`numba.njit` for kernels: compiled at the first call, cached on disk, typed as the function it wraps.

    Without fastmath, because the order of float operations is part of the protocol; with NumPy's error model, so that
    a division by zero gives what IEEE 754 says instead of an exception and loops can be vectorised.
    """

    def decorate(function: Function) -> Function:
        return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy", parallel=parallel)(function))

    return decorate


@contextmanager
def plain() -> Iterator[None]:
    """Everything as it is defined, in plain PyTorch, while the context lasts."""
    yield


def use_threads(count: int) -> None:
    """Let kernels use `count` threads, or as many of them as numba has."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


@cache
def triton_kernels(module: str) -> Any:
    """A module of kernels for GPUs, or None where Triton is not installed."""
    try:
        return import_module(f"pfedlms.{module}")
    except ImportError:
        return None


def shares_work() -> bool:
    """Whether a kernel should spread its work over threads: not from a thread of `spread`."""
    return _here.shares


def spread(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """`work` on every item, on several threads at once, each with its share of PyTorch's threads."""
    threads = torch.get_num_threads()
    workers = min(threads, _WORKERS, len(items))
    if workers <= 1:
        for item in items:
            work(item)
        return

    def begin() -> None:
        _here.shares = False

    torch.set_num_threads(threads // workers)
    try:
        with ThreadPoolExecutor(workers, initializer=begin) as pool:
            list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
