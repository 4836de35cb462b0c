"""pfl-research: as its own benchmarks set FedAvg up; several processes share the clients out."""

import os

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import flat, given_work

work = given_work(threads=1)
if "PFL_WORKER_RANK" not in os.environ:
    torch.set_num_threads(work.parallel)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = work.module()

    def loss(self, x, y):
        return F.cross_entropy(self.module(x), y)

    def metrics(self, x, y):
        return {}


class Clock(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        work.round_ended()
        return False, Metrics()


def client(number):
    x, y = zip(*work.batches(number, len(work.stamps)), strict=True)
    return PyTorchTensorDataset((torch.cat(x), torch.cat(y)))


module = Module().to(work.device)
model = PyTorchModel(
    module,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
)
clients = FederatedDataset(client, get_user_sampler("minimize_reuse", range(work.clients)))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=work.rounds,
        evaluation_frequency=10**9,
        train_cohort_size=work.clients,
        val_cohort_size=None,
    ),
    SimulatedBackend(training_data=clients, val_data=clients),
    model,
    # An epoch is all batches: local_num_steps alone would end after one pass over a client's samples.
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.rate, local_batch_size=work.batch),
    callbacks=[Clock()],
    send_metrics_to_platform=False,
)
if os.environ.get("PFL_WORKER_RANK", "0") == "0":
    work.finished(flat(module))
if torch.distributed.is_initialized():  # a process that ends before the others may abort
    torch.distributed.destroy_process_group()
