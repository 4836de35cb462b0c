"""How many clients fit into memory at once."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from pfedlms.data import FederatedData
from pfedlms.models import CohortModel

_SHARE = 0.6  # of the free memory; the rest is for evaluation, messages and what allocators waste
_COPIES = 8  # of a client's parameters during a step: model, gradient and its parts, pull and its work, momentum


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on the device now, or None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def client_bytes(model: CohortModel, data: FederatedData, batch_size: int) -> int:
    """Bytes one client takes during a local step: its parameters several times over, and its activations twice."""
    outputs: list[int] = []
    sample = data.x[data.train[0][:1]].to(model.device).expand(2, *data.shape).clone()

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(count) for module in model.module.modules()]
    try:
        with torch.no_grad():
            model.module.eval()(sample)
    finally:
        for hook in hooks:
            hook.remove()
    # Two samples were run, and activations are held twice: for the backward pass and as gradients.
    return _COPIES * 4 * model.layout.dim + batch_size * sum(outputs)


def fitting_clients(model: CohortModel, data: FederatedData, batch_size: int) -> int | None:
    """How many clients fit into the memory that is free now; None where the system does not tell."""
    free = free_memory(model.device)
    return None if free is None else max(1, int(_SHARE * free) // client_bytes(model, data, batch_size))


def fitting_cohort(model: CohortModel, data: FederatedData, batch_size: int) -> int:
    """The number of clients to stack: all that fit, in cohorts as even as they come. Results depend on it
    only for models with dropout, and on a GPU by rounding."""
    fitting = fitting_clients(model, data, batch_size)
    if fitting is None:
        return data.clients
    cohorts = -(-data.clients // fitting)
    return -(-data.clients // cohorts)
