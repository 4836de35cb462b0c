"""A pretended GPU: the code for GPUs runs on a machine that has none, slowly, with Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest -p pretend_gpu tests/engine/test_gpu.py

A tensor that is made on, or moved to, a CUDA device stays in the memory of the host, and its storage is marked:
`device` and `is_cuda` of every tensor on such a storage are those of a GPU. As on a GPU, operators refuse a mix of both
kinds, `numpy` refuses marked tensors, and a CUDA graph records operators and kernels without running them, refuses what
would wait for the device, and runs them at each replay. What it cannot show: speed, memory, streams that run at the
same time, TF32 and bfloat16, operators that only CUDA has, and whether Triton compiles a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
_marked: dict[int, StorageWeakRef] = {}
"""Marked storages by address. A weak reference keeps the address from being used again."""
_HOST_DEVICE = torch._C.TensorBase.device.__get__


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


def mark(values: Any, given: Iterable[Tensor] = ()) -> Any:
    """Mark the storages of `values`, except those of `given`, which stay what they are."""
    old = {storage_address(value) for value in given}
    if len(_marked) > 4096:
        for address in [address for address, each in _marked.items() if each.expired()]:
            del _marked[address]
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and (address := storage_address(value)) not in {None, *old}:
            _marked.setdefault(address, StorageWeakRef(value.untyped_storage()))
    return values


def is_gpu(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return device is not None and torch.device(device).type == "cuda"


class Recording:
    """The stand-in for `torch.cuda.CUDAGraph`."""

    current: Recording | None = None

    def __init__(self) -> None:
        self.actions: list[Callable[[], Any]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        assert Recording.current is None, "a graph is being recorded already"
        Recording.current, self._generator = self, torch.get_rng_state()

    def capture_end(self) -> None:
        Recording.current = None
        torch.set_rng_state(self._generator)  # nothing was drawn while recording

    def replay(self) -> None:
        with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for action in self.actions:
                action()


# Batch norm changes its running statistics, which its schema does not say.
_HIDDEN_CHANGES = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
}
_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
_MIXES = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "set_", "_unsafe_index"}
"""Operators that take tensors of both kinds; indices may be on the host."""


class Operators(TorchDispatchMode):
    """Marks results, refuses mixtures, and hands operators to the recording."""

    on_gpu = False
    """Whether a function of PyTorch works on marked tensors: what it makes by itself is on the GPU, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("device")
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        marks = [is_marked(value) for value in given]
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        to_gpu = is_gpu(wanted) if wanted is not None else any(marks)
        to_gpu |= self.on_gpu and not given
        name = func._schema.name.removeprefix("aten::")
        if any(marks) and name not in _MIXES:
            hosts = [tuple(value.shape) for value, own in zip(given, marks, strict=True) if not own and value.dim()]
            if hosts:
                raise RuntimeError(f"pretended GPU: {name} got tensors of the host, {hosts}, beside those of the GPU")
        if name == "set_":
            return func(*args, **kwargs)
        if Recording.current is None or not (any(marks) or to_gpu):
            result = func(*args, **kwargs)
            return mark(result, given) if to_gpu else result
        if func in _WAITS or (
            name in _MIXES - {"index", "_unsafe_index"}
            and not all(marks)
            and any(not own and value.dim() for value, own in zip(given, marks, strict=True))
        ):
            raise RuntimeError(f"pretended GPU: {name} waits for the device, which is not allowed while recording")
        return mark(self._record(Recording.current, func, args, kwargs), given)

    def _record(self, recording: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        changed = [
            value for value, part in zip_arguments(schema, args, kwargs) if part.alias_info and part.alias_info.is_write
        ]
        if changed:  # not run now
            recording.actions.append(lambda: func(*args, **kwargs))
            returned = [value for each in changed for value in (each if isinstance(each, list | tuple) else [each])]
            if not schema.returns:
                return None
            return returned[0] if len(schema.returns) == 1 else tuple(returned[: len(schema.returns)])
        shown = list(args)
        for place in _HIDDEN_CHANGES.get(func, ()):
            shown[place] = None if args[place] is None else args[place].clone()
        result = func(*shown, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        sources = {storage_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        if not all(storage_address(value) in sources for value in made):  # a view needs no action

            def repeat() -> None:
                again = [value for value in tree_leaves(func(*args, **kwargs)) if isinstance(value, Tensor)]
                for own, value in zip(made, again, strict=True):
                    own.copy_(value)

            recording.actions.append(repeat)
        return result


def zip_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Given values with their declarations."""
    for place, part in enumerate(schema.arguments):
        if place < len(args):
            yield args[place], part
        elif part.name in kwargs:
            yield kwargs[part.name], part


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
        kwargs.pop("pin_memory", None)
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):  # copied without an operator
            wanted = kwargs.pop("device", args[0].device if func is Tensor.new_tensor else None)
            return moved(Tensor.to, func(*args, **kwargs, device="cpu"), wanted or "cpu")
        tensors = (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        if "device" in kwargs or Operators.on_gpu or not any(map(is_marked, tensors)):
            return func(*args, **kwargs)
        Operators.on_gpu = True
        try:
            return func(*args, **kwargs)
        finally:
            Operators.on_gpu = False


def moved(func: Any, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`to`, `cuda` and `cpu` of a tensor."""
    memory_format = kwargs.pop("memory_format", torch.preserve_format)
    copy = kwargs.pop("copy", False)
    if func is Tensor.to and args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    elif func is Tensor.to:
        named = SimpleNamespace(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        for each in args:
            if isinstance(each, torch.dtype):
                named.dtype = each
            elif each is not None and not isinstance(each, bool):
                named.device = each
        device, dtype = named.device, named.dtype
    else:
        device, dtype = GPU if func is Tensor.cuda else torch.device("cpu"), None
    here, there = is_marked(value), is_marked(value) if device is None else is_gpu(device)
    result = value if dtype is None or dtype == value.dtype else value.type(dtype)
    if here != there:
        if Recording.current is not None and value.dim():
            raise RuntimeError("pretended GPU: a copy to or from the host is not allowed while recording")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._DisableTorchDispatch())  # so that the copy is not marked
            result = result.clone(memory_format=memory_format)
        if there:
            mark(result)
    elif copy and result is value:
        result = value.clone(memory_format=memory_format)
    return result


class Stream:
    """All streams are one: work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> Stream:
        return self


def device_of(value: Tensor) -> torch.device:
    return GPU if is_marked(value) else _HOST_DEVICE(value)


def pytest_configure() -> None:
    """Pretend from now on, in this process."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        if Recording.current is None:
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                launch(executor, *args, **kwargs)
        else:
            Recording.current.actions.append(lambda: launch(executor, *args, **kwargs))

    GridExecutor.__call__ = launched
    torch.Tensor.is_cuda = property(is_marked)
    torch.Tensor.device = property(device_of)
    torch.Tensor.record_stream = lambda value, stream: None

    @contextlib.contextmanager
    def graph(recording: Recording, **_: Any) -> Iterator[None]:
        recording.capture_begin()
        try:
            yield
        finally:
            recording.capture_end()

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    pretended = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended GPU",
        "mem_get_info": lambda device=None: (4 << 30, 4 << 30),
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "Stream": Stream,
        "CUDAGraph": Recording,
        "graph": graph,
        "stream": nothing,
        "device": nothing,
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, value)
    Operators().__enter__()
    Functions().__enter__()
