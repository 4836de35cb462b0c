"""The user's modules: how they are prepared for training, and what they may return."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pfedlms import rng
from pfedlms.backend import one_thread_per_operator
from pfedlms.errors import PfedlmsError, UsageError, reason


def copy_module(module: nn.Module) -> nn.Module:
    """A copy of the module, so that the user's own is not changed."""
    _refuse_hooks_of_parameters(module)  # which the copy would not have
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever parts of it may raise
        raise UsageError(
            f"model: cannot be copied ({reason(error)}); give a function that makes it, model=lambda: …, instead"
        ) from error


def trainable_module(module: nn.Module, sample: Tensor, key: int) -> nn.Module:
    """The module, ready for training: lazy layers are initialised with `sample: [batch, …]` and the stream `key`, and
    parameters of other floating types become float32."""
    _refuse_hooks_of_parameters(module)
    for name, value in module.named_parameters():
        if value.is_complex() and value.requires_grad:
            raise UsageError(
                f"model: its parameter {name} is {value.dtype}, but clients train float32; use torch.view_as_complex "
                "in forward"
            )
    values = [*module.parameters(), *module.buffers()]
    others = {str(value.dtype) for value in values if value.is_floating_point() and value.dtype != torch.float32}
    if others:
        warnings.warn(f"model: has {', '.join(sorted(others))}; clients train in float32", stacklevel=3)
        module = module.float()
    if any(map(is_lazy, values)):
        with torch.no_grad(), rng.forked_generators(torch.device("cpu"), key):
            module.eval()(sample)
    return module


def _refuse_hooks_of_parameters(module: nn.Module) -> None:
    """Refuse hooks that would never be called: the gradient is taken of the clients' own tensors."""
    for name, value in module.named_parameters():
        if value.requires_grad and (value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)):
            raise UsageError(
                f"model: its parameter {name} has a hook of its gradient, which is not called for clients' own "
                "parameters; use a hook of the module (register_full_backward_hook)"
            )


def outputs_of(returned: Any) -> Tensor:
    """The outputs in what a module returned: the tensor itself, or `logits` as an attribute or key. Half-precision
    outputs become float32, so that the loss is computed in float32."""
    outputs = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", returned)
    if not isinstance(outputs, Tensor):
        keys = f" with {', '.join(map(repr, returned))}" if isinstance(returned, Mapping) else ""
        raise UsageError(
            f"model: returns {type(returned).__name__}{keys}, expected a tensor, or something that has one as `logits`"
            "; wrap the module in one that returns the outputs alone, several of them put together by torch.cat"
        )
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def check_trains(module: nn.Module, sample: Tensor) -> None:
    """Refuse a model, before any training, whose passes fail in training, whose backward pass would use other
    parameters than the forward pass did, that writes into its parameters, as evaluations then would, too, or that keeps
    something of one client's samples for the next client. One that cannot be copied is not tried."""
    try:
        tried, first, second = (copy.deepcopy(module).train() for _ in range(3))
    except Exception:  # whatever parts of it may raise
        return
    again = (
        "it computes parts of the forward pass again in the backward pass, as torch.utils.checkpoint does, when other "
        "parameters are in their place; leave that out of it"
    )
    try:
        places = {name: _place(value) for name, value in first.named_parameters()}  # fails in torch.inference_mode
        # Small operators wait for threads longer than they compute.
        with torch.enable_grad(), rng.forked_generators(sample.device), one_thread_per_operator():
            with torch.autograd.graph.disable_saved_tensors_hooks(again):
                outputs = outputs_of(tried(sample.clone()))
            trained = [value for value in tried.parameters() if value.requires_grad]
            torch.autograd.grad(outputs, trained, torch.ones_like(outputs), allow_unused=True)
        _call(first, sample)
        _call(second, sample[:1].expand_as(sample))
    except PfedlmsError:
        raise
    except Exception as error:  # it is the user's own and may raise anything
        raise UsageError(f"model: cannot be trained ({reason(error)})") from error
    given = dict(module.named_parameters())
    # flatten_parameters moves those of a recurrent layer on a GPU; their values stay what they were.
    movable = {id(own) for part in first.modules() if isinstance(part, nn.RNNBase) for own in part.parameters()}
    for name, parameter in first.named_parameters():
        kept = torch.allclose(parameter, given[name], rtol=0, atol=0, equal_nan=True)  # .data does not count writes
        in_place = id(parameter) in movable or _place(parameter) == places[name]
        if parameter.requires_grad and not (kept and in_place):
            raise UsageError(
                f"model: a call writes into its parameter {name}, as nn.Embedding does with max_norm, so that "
                "evaluations would change what is trained; compute with a changed copy of it instead"
            )
    # Both were called once, on other samples: with one state dict they differ by what a call keeps beside it.
    second.load_state_dict(first.state_dict(), strict=False)
    if not torch.allclose(_call(first, sample), _call(second, sample), equal_nan=True):
        raise UsageError(
            "model: a call leaves something of its samples to the next call, which may be another client's, and its "
            "state dict lacks it; register it as a persistent buffer, and each client has its own"
        )


def _place(parameter: Tensor) -> tuple[int, int]:
    """Where a parameter is stored, and how often it was written into, as far as autograd counts."""
    return parameter.data_ptr(), parameter._version


def _call(module: nn.Module, sample: Tensor) -> Tensor:
    """The outputs of a module, which draws the same random numbers in every call."""
    with torch.no_grad(), rng.forked_generators(sample.device), one_thread_per_operator():
        return outputs_of(module(sample.clone()))


def layer_called_after_head(module: nn.Module, layers: Sequence[str], head: int, sample: Tensor) -> str | None:
    """A layer of the body that is called after a layer of the head, which is the last `head` of all `layers`; None if
    there is none."""
    calls: list[str] = []
    parts = [(name, part) for name, part in module.named_modules() if name in layers]
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: calls.append(name)) for name, part in parts]
    try:
        with torch.no_grad(), rng.forked_generators(sample.device):
            module(sample)
    finally:
        for hook in hooks:
            hook.remove()
    last = {name: place for place, name in enumerate(calls)}
    begins = min((last[name] for name in layers[-head:] if name in last), default=len(calls))
    return next((name for name in layers[:-head] if last.get(name, 0) > begins), None)


def check_batch_of_one(module: nn.Module, sample: Tensor) -> None:
    """Refuse a model that cannot be trained on one sample, as batch norm cannot, before any training."""
    try:
        with torch.no_grad(), rng.forked_generators(sample.device):
            copy.deepcopy(module).train()(sample[:1])
    except ValueError as error:
        raise UsageError(
            f"train.batch_size: got 1, but the model cannot be trained on one sample ({reason(error)}); use 2 or more, "
            "or group norm instead of batch norm"
        ) from error
