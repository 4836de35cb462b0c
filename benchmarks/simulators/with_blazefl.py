"""BlazeFL with its own FedAvg: threads, or processes with shared memory where PEER_MODE says so."""

import os
import tempfile
from pathlib import Path

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from work import flat, given_work


class Dataset:
    def __init__(self, work):
        self.work, self.round = work, 0

    def get_dataloader(self, type_, cid, batch_size=None, generator=None):
        return Loader(self.work.batches(cid, self.round))

    def set_dataset(self, type_, cid, dataset):
        pass


class Loader(list):
    dataset = None


class Models:
    def __init__(self, work):
        self.work = work

    def select_model(self, name):
        return self.work.module()


def main():
    work = given_work(threads=1)
    dataset = Dataset(work)
    common = {
        "model_selector": Models(work), "model_name": work.model, "dataset": dataset, "device": work.device,
        "num_clients": work.clients, "batch_size": work.batch, "seed": work.seed,
    }  # fmt: skip
    handler = FedAvgBaseServerHandler(global_round=work.rounds, sample_ratio=1.0, **common)
    common |= {"epochs": 1, "lr": work.rate, "num_parallels": work.parallel}
    if os.environ.get("PEER_MODE") == "processes":
        state = Path(tempfile.mkdtemp())
        trainer = FedAvgProcessPoolClientTrainer(
            share_dir=state, state_dir=state, ipc_mode=IPCMode.SHARED_MEMORY, **common
        )
    else:
        trainer = FedAvgThreadPoolClientTrainer(**common)
    while not handler.if_stop():
        dataset.round = handler.round
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        work.round_ended()
    work.finished(flat(handler.model))


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("fork")
    main()
