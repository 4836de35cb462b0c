"""The interface of runners, which run K models at once; `forward.choose` chooses one for a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfedlms.errors import UsageError
from pfedlms.models.intake import outputs_of

Result = TypeVar("Result")
Values = dict[str, Tensor]
"""Parameters, their gradients or buffers, by name."""


class Pass(NamedTuple):
    """The inputs of a forward pass of some clients; the first axis of all tensors is clients."""

    params: Values
    places: Values
    """Tensors into which gradients of parameters may be written."""
    buffers: Values
    """Running statistics, updated in place in training. Where the module assigns a new tensor instead, the runner puts
    it here; the values before it may still be needed in the backward pass."""
    x: Tensor
    training: bool
    features: bool
    """Whether to return the features, too: the input of the last linear layer."""


class Runner(ABC):
    """Runs the models of some clients."""

    def parts(self, clients: int) -> list[slice]:
        """Rows of clients that should take their local steps together. Several threads run several parts at once; a
        module serves one thread at a time, so a runner that calls it needs a copy for each thread."""
        return [slice(0, clients)]

    def has_short_operators(self, clients: int) -> bool:
        """Whether operators on so many clients are too short to be worth several CPU threads."""
        return False

    def run_all(self, clients: int, work: Callable[[slice], Result]) -> list[Result]:
        """Call `work` for the rows of all clients, as many at a time as `forward` takes."""
        return [work(slice(0, clients))]

    @abstractmethod
    def forward(self, inputs: Pass) -> tuple[Tensor, Tensor | None]:
        """Outputs `[clients, batch, classes]`, and features `[clients, batch, width]` if `inputs.features`."""


def hooks_forward(part: nn.Module) -> bool:
    """Whether the user has registered hooks of the forward pass."""
    return bool(part._forward_hooks or part._forward_pre_hooks)


def hooks_backward(part: nn.Module) -> bool:
    """Whether the user has registered hooks of the backward pass."""
    return bool(part._backward_hooks or part._backward_pre_hooks)


class FunctionalModule:
    """A module as a function of parameters and buffers; its own stay as they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.frozen = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}
        linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
        self.head = linear[-1] if linear else None

    def call(self, features: bool, params: Values, buffers: Values, x: Tensor) -> tuple[Any, ...]:
        """The buffers that the module assigned, the outputs and, with `features`, the features."""
        if not features:
            values = {**params, **buffers, **self.frozen}
            outputs = outputs_of(functional_call(self.module, values, (x,)))
            # `functional_call` has put the tensors that the module assigned into `values`.
            assigned = {name: values[name] for name, before in buffers.items() if values[name] is not before}
            return {name: _like_before(name, value, buffers[name]) for name, value in assigned.items()}, outputs
        if self.head is None:
            raise UsageError(f"model: {type(self.module).__name__} has no linear layer, so it has no features to send")
        caught: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        try:
            assigned, outputs = self.call(False, params, buffers, x)
        finally:
            handle.remove()
        if not caught:
            raise UsageError("model: its last linear layer takes no part in the outputs, so it has no features to send")
        return assigned, outputs, caught[0]


def _like_before(name: str, value: Tensor, before: Tensor) -> Tensor:
    """A tensor that a module assigned to a buffer, as a value of that buffer."""
    if value.shape != before.shape or not torch.can_cast(value.dtype, before.dtype):
        raise UsageError(
            f"model: assigns {value.dtype} of shape {list(value.shape)} to its buffer {name}, expected {before.dtype} "
            f"of shape {list(before.shape)}, as it was registered; keep its shape and type in forward"
        )
    return value.detach().to(before.dtype, copy=True)  # it may share memory with a buffer that is stored first
