"""No simulator: one module, which is every client in turn."""

import torch
import torch.nn.functional as F
from work import flat, given_work

work = given_work()
module = work.module().to(work.device)
parameters = list(module.parameters())
for round in range(work.rounds):
    start = [parameter.detach().clone() for parameter in parameters]
    mean = [torch.zeros_like(value) for value in start]
    for client in range(work.clients):
        optimiser = torch.optim.SGD(parameters, lr=work.rate)
        for x, y in work.batches(client, round):
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimiser.step()
        with torch.no_grad():
            for parameter, value, total in zip(parameters, start, mean, strict=True):
                total.add_(parameter, alpha=1 / work.clients)
                parameter.copy_(value)
    with torch.no_grad():
        for parameter, value in zip(parameters, mean, strict=True):
            parameter.copy_(value)
    work.round_ended()
work.finished(flat(module))
