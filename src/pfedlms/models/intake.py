"""The user's modules: how they are prepared for training, and what they may return."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pfedlms.errors import UsageError, reason


def copy_module(module: nn.Module) -> nn.Module:
    """A copy of the module, so that the user's own is not changed."""
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever parts of it may raise
        raise UsageError(
            f"model: cannot be copied ({reason(error)}); give a function that makes it, model=lambda: …, instead"
        ) from error


def trainable_module(module: nn.Module, sample: Tensor, key: int) -> nn.Module:
    """The module, ready for training: lazy layers are initialised with `sample: [batch, …]` and the stream `key`, and
    parameters of other floating types become float32."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UsageError(
            "model: is scripted or traced (torch.jit), so it cannot run with clients' parameters; give the module it "
            "was made from"
        )
    values = [*module.parameters(), *module.buffers()]
    others = {str(value.dtype) for value in values if value.is_floating_point() and value.dtype != torch.float32}
    if others:
        warnings.warn(f"model: has {', '.join(sorted(others))}; clients train in float32", stacklevel=3)
        module = module.float()
    if any(map(is_lazy, values)):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key % (1 << 63))
            module.eval()(sample)
    return module


def outputs_of(returned: Any) -> Tensor:
    """The outputs in what a module returned: the tensor itself, or `logits` as an attribute or key. Half-precision
    outputs become float32, so that the loss is computed in float32."""
    outputs = returned
    if isinstance(returned, Mapping):
        outputs = returned.get("logits")
    elif not isinstance(returned, Tensor):
        outputs = getattr(returned, "logits", None)
    if not isinstance(outputs, Tensor):
        keys = f" with {', '.join(map(repr, returned))}" if isinstance(returned, Mapping) else ""
        raise UsageError(
            f"model: returns {type(returned).__name__}{keys}, expected a tensor, or something that has one as `logits`"
            "; wrap the module in one that returns the outputs alone"
        )
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def check_batch_of_one(module: nn.Module, sample: Tensor) -> None:
    """Refuse a model that cannot be trained on one sample, as batch norm cannot, before any training."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[sample.device] if sample.is_cuda else []):
            copy.deepcopy(module).train()(sample[:1])
    except ValueError as error:
        raise UsageError(
            f"train.batch_size: got 1, but the model cannot be trained on one sample ({reason(error)}); use 2 or more, "
            "or group norm instead of batch norm"
        ) from error
