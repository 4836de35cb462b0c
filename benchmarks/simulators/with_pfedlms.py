"""pfedlms, also under torchrun. A round begins with the exchange, so the last average is taken here."""

import os

import torch
from work import given_work

import pfedlms

work = given_work(threads=1 if "RANK" in os.environ else None)


class Clock(pfedlms.Callback):
    def on_round(self, run, record):
        work.round_ended()


def client(number):
    x, y = (array.cpu().numpy() for array in work.samples(number))
    return (x, y), (x[:1], y[:1])


run = pfedlms.run(
    [client(number) for number in range(work.clients)],
    work.module(),
    method="fedavg",
    rounds=work.rounds - 1,
    local_steps=work.steps,
    batch_size=work.batch,
    learning_rate=work.rate,
    momentum=0.0,
    weight_decay=0.0,
    seed=work.seed,
    evaluate_every=work.rounds,
    everyone=False,
    device=work.device,
    callbacks=[Clock()],
    out=work.folder / "run" if "RANK" in os.environ else None,
)
models = [torch.cat([value.flatten() for value in state.values()]) for state in run.models]
if os.environ.get("RANK", "0") == "0":
    work.finished(torch.stack(models).double().mean(dim=0))
