"""How much memory clients take: how many can train at once, and where their state is kept.

From round to round a client *keeps* its model, momentum, running statistics and what its method adds. An absent client
keeps only what the next answer does not replace: on the device if that of all clients fits there, else on the host.
While it trains, a client *works* on the device with copies of its parameters (the model trained, its gradient and the
gradient's parts, the pull and the padded vectors of its transform, the inputs and results of recorded steps) and with
its activations, for the backward pass and as gradients.

Measured on an H200, pFedLMS without momentum, from 100 to 1,000 clients: 7.9 MB per client for `dnn` and 34 MB for
`vgg8`. This module estimates 8.0 (of which 0.8 are kept) and 62.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from pfedlms import rng
from pfedlms.data import FederatedData
from pfedlms.engine import Federation
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel
from pfedlms.step import optimizer_size
from pfedlms.train_settings import TrainSettings

_USABLE_SHARE = 0.6  # of the free memory; the rest is for evaluation, messages and what allocators waste
_PARAMETER_COPIES = 8  # of the parameters of a client at work


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device now; None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def kept_bytes(method: Method, model: CohortModel, kept: int) -> tuple[int, int]:
    """Bytes that one client keeps from round to round while it takes part, and while it is absent; `kept` is the number
    of values that its optimizer keeps."""
    present = method.client_start(model.cohort((0,), (1,), kept))
    return present.nbytes, method.client_rest(present).nbytes


def working_bytes(model: CohortModel, data: FederatedData, batch_size: int) -> int:
    """Bytes that one client takes on the device during local steps, besides those it keeps."""
    outputs: list[int] = []
    sample = data.x[data.train[0][:1]].to(model.device).expand(2, *data.shape).clone()

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append(output.numel() * output.element_size())
        elif isinstance(output, tuple):  # a recurrent layer gives its state, too
            for part in output:
                count(module, inputs, part)

    with ExitStack() as hooks, torch.no_grad(), rng.forked_generators(model.device):
        for module in model.module.modules():
            hooks.enter_context(module.register_forward_hook(count))
        model.module.eval()(sample)
    # Two samples were run, and activations are held twice.
    return _PARAMETER_COPIES * 4 * model.layout.dim + batch_size * sum(outputs)


def fitting_cohort(model: CohortModel, data: FederatedData, batch_size: int, participants: int | None = None) -> int:
    """The number of clients in a cohort: as many participants (by default all clients) as fit into the memory that is
    free now, in cohorts of nearly the same size. Results depend on it only for models with dropout, and on a GPU by
    rounding."""
    participants, free = participants or data.clients, free_memory(model.device)
    if free is None:
        return participants
    fitting = max(1, int(_USABLE_SHARE * free) // working_bytes(model, data, batch_size))
    cohorts = -(-participants // fitting)
    return -(-participants // cohorts)


def needed_bytes(federation: Federation, train: TrainSettings) -> tuple[int, int]:
    """Bytes that all clients keep once each has taken part, and bytes that the largest cohort works with."""
    optimizer_values = optimizer_size(federation.model.layout.dim, train.optimizer, train.momentum)
    present, absent = kept_bytes(federation.method, federation.model, optimizer_values)
    working = working_bytes(federation.model, federation.data, train.batch_size)
    participants = federation.participation.count
    kept = participants * present + (federation.data.clients - participants) * absent
    return kept, federation.largest_cohort * working


def all_clients_fit(federation: Federation, train: TrainSettings) -> bool:
    """Whether the state that all clients keep fits on the device beside the memory for training."""
    free = free_memory(federation.model.device)
    return free is None or sum(needed_bytes(federation, train)) <= int(_USABLE_SHARE * free)
