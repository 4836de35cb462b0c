"""A pretended GPU: the code for GPUs runs on a machine that has none, slowly, with Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest -p pretend_gpu tests/engine/test_gpu_code.py

A tensor that is made on, or moved to, a CUDA device stays in the memory of the host, and its storage is marked:
`device` and `is_cuda` of every tensor on such a storage are those of a GPU. As on a GPU, operators refuse a mix of both
kinds, `numpy` refuses marked tensors, and a CUDA graph repeats the operators and kernels that were called while it was
recorded, and refuses what would wait for the device. What it cannot show: speed, memory, streams that run at the same
time, TF32 and bfloat16, operators that only CUDA has, whether Triton compiles a kernel, and that a GPU does not compute
while it records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_marked: dict[int, StorageWeakRef] = {}
"""Marked storages by address. A weak reference keeps the address from being used again."""
_HOST_DEVICE = torch._C.TensorBase.device.__get__
_WAITS = {"_local_scalar_dense", "nonzero", "equal"}
_MIXES = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "set_", "_unsafe_index"}
"""Operators that take tensors of both kinds; indices may be on the host."""
_WAITS_FOR_HOST = _MIXES - {"index", "_unsafe_index"}


def tensors_in(*values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def storage_address(value: Tensor) -> int | None:
    """None for a tensor without a storage of its own, as a sparse one."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_marked(value: Tensor) -> bool:
    return storage_address(value) in _marked


def device_of(value: Tensor) -> torch.device:
    return torch.device("cuda", 0) if is_marked(value) else _HOST_DEVICE(value)


def mark(values: Any, given: Iterable[Tensor] = ()) -> Any:
    """Mark the storages of `values`, except those of `given`, which stay what they are."""
    old = {None, *map(storage_address, given)}
    if len(_marked) > 4096:
        for address in [address for address, each in _marked.items() if each.expired()]:
            del _marked[address]
    for value in tensors_in(values):
        if (address := storage_address(value)) not in old:
            _marked.setdefault(address, StorageWeakRef(value.untyped_storage()))
    return values


class Recording:
    """The stand-in for `torch.cuda.CUDAGraph`."""

    current: Recording | None = None

    def __init__(self) -> None:
        self.actions: list[Callable[[], Any]] = []

    def capture_begin(self) -> None:
        Recording.current = self

    def capture_end(self) -> None:
        Recording.current = None

    def replay(self) -> None:
        with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for action in self.actions:
                action()


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator or a kernel; a recording that is being made will repeat it into the same results."""
    result = func(*args, **kwargs)
    made = tensors_in(result)

    def repeat() -> None:
        for own, value in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
            if own.data_ptr() != value.data_ptr():
                own.copy_(value)

    if Recording.current is not None:
        Recording.current.actions.append(repeat)
    return result


class Operators(TorchDispatchMode):
    """Marks results, refuses mixtures, and hands operators to the recording."""

    on_gpu = False
    """Whether a function of PyTorch works on marked tensors: what it makes by itself is on the GPU, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.removeprefix("aten::")
        kwargs.pop("pin_memory", None)
        given = tensors_in(args, kwargs)
        any_marked = to_gpu = any(map(is_marked, given))
        if kwargs.get("device") is not None:
            to_gpu, kwargs["device"] = torch.device(kwargs["device"]).type == "cuda", "cpu"
        to_gpu |= self.on_gpu and not given
        mixed = any_marked and any(value.dim() and not is_marked(value) for value in given)
        if mixed and name not in _MIXES:
            raise RuntimeError(f"pretended GPU: {name} got tensors of the host beside those of the GPU")
        if name == "set_" or not (any_marked or to_gpu):
            return func(*args, **kwargs)
        if Recording.current is not None and (name in _WAITS or (mixed and name in _WAITS_FOR_HOST)):
            raise RuntimeError(f"pretended GPU: {name} waits for the device, which is not allowed while recording")
        result = run(func, args, kwargs)
        return mark(result, given) if to_gpu else result


class Functions(TorchFunctionMode):
    """What PyTorch decides by device before any operator runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return moved(func, *args, **kwargs)
        if func in (Tensor.numpy, Tensor.__array__) and is_marked(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if func is Tensor.pin_memory:
            assert not is_marked(args[0]), "only tensors of the host can be pinned"
            return args[0]
        if func is Tensor.__deepcopy__:  # copies the storage
            return mark(func(*args, **kwargs)) if is_marked(args[0]) else func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):  # copied without an operator
            kwargs.pop("pin_memory", None)
            wanted = kwargs.pop("device", args[0].device if func is Tensor.new_tensor else None)
            return moved(Tensor.to, func(*args, **kwargs, device="cpu"), wanted or "cpu")
        if "device" in kwargs or Operators.on_gpu or not any(map(is_marked, tensors_in(args, kwargs))):
            return func(*args, **kwargs)
        Operators.on_gpu = True
        try:
            return func(*args, **kwargs)
        finally:
            Operators.on_gpu = False


def moved(func: Any, value: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """`to`, `cuda` and `cpu` of a tensor."""
    if func is not Tensor.to:
        args, kwargs = (func.__name__,), {}
    elif args and isinstance(args[0], Tensor):
        args = args[0].device, args[0].dtype
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    there = is_marked(value) if device is None else device.type == "cuda"
    result = value if dtype in (None, value.dtype) else value.type(dtype)
    if is_marked(value) != there:
        assert Recording.current is None or not value.dim(), "a copy to or from the host while recording"
        with torch._C._DisableTorchDispatch():  # so that the copy is not marked
            result = result.clone(memory_format=memory_format or torch.preserve_format)
        return mark(result) if there else result
    return value.clone() if copy and result is value else result


def pytest_configure() -> None:
    """Pretend from now on, in this process."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launched(*args: Any, **kwargs: Any) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            run(launch, args, kwargs)

    GridExecutor.__call__ = launched
    torch.Tensor.is_cuda = property(is_marked)
    torch.Tensor.device = property(device_of)
    torch.Tensor.record_stream = lambda value, stream: None
    pretended = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended GPU",
        "mem_get_info": lambda device=None: (4 << 30, 4 << 30),
        "synchronize": lambda device=None: None,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        # All streams are one: work is done when it is asked for.
        "Stream": lambda *_, **__: MagicMock(),
        "current_stream": lambda device=None: MagicMock(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "CUDAGraph": Recording,
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)
    Operators().__enter__()
    Functions().__enter__()
