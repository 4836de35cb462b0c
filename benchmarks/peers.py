"""Seconds per FedAvg round on a CPU: the stacked engine, the public simulator pfl 0.6 and a plain loop over clients.

    pip install 'pfl[pytorch]==0.6.*'
    python benchmarks/peers.py [--rounds N] [--threads N] [--json FILE]

All do the same work: 20 clients with random data of their own, the model `dnn`, 20 local steps on batches of 64 by SGD
(no momentum, no weight decay), then the average of all models. They start from the same weights and see the same
batches; the global models after two rounds are compared before the clock runs, and pfl's steps are counted. Then they
take turns, so that a noisy neighbour disturbs all of them, and medians are compared. Nothing is evaluated.

pfl is measured twice: in one process with all threads, and spread over processes, which is its own way to use several
cores. It gets its batches ready-made in the order of training, and neither callbacks nor metrics; the plain loop gets
the order. Only the stacked engine shuffles the samples, encodes every model to bytes and decodes it, both ways, and
checks that it is finite within the measured time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import statistics
import time
import warnings
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from kept import keep
from torch import Tensor, nn

from pfedlms.data import batch_positions, from_pairs
from pfedlms.data.federated import FederatedData
from pfedlms.engine import Federation
from pfedlms.engine.training import TrainSettings
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build

CLIENTS, SAMPLES, SHAPE, CLASSES, HIDDEN = 20, 400, (1, 28, 28), 10, 256
STEPS, BATCH, RATE, SEED = 20, 64, 0.05, 0
CHECKED_ROUNDS = 2  # also the warm-up
TOLERANCE = 1e-6
TURN = 2  # rounds in a row


class Simulator(Protocol):
    def prepare(self, round: int) -> None:
        """What is not measured."""

    def play(self) -> None:
        """One round, the measured part."""

    def model(self) -> Tensor:
        """The global model after the rounds played, flat."""


def random_data() -> FederatedData:
    draw = np.random.default_rng(SEED)
    pairs = []
    for _ in range(CLIENTS):
        train, test = (
            (draw.standard_normal((n, *SHAPE), dtype=np.float32), draw.integers(0, CLASSES, n)) for n in (SAMPLES, 1)
        )
        train[1][0] = CLASSES - 1  # every class number up to the last is known to the data
        pairs.append((train, test))
    return from_pairs(pairs)


def new_module() -> nn.Module:
    return build("dnn", SHAPE, CLASSES, HIDDEN, SEED)


def batches(data: FederatedData, client: int, round: int) -> Tensor:
    """Samples that the stacked engine takes for a client's local steps, `[steps, batch]`."""
    return torch.from_numpy(data.train[client][batch_positions(SEED, client, SAMPLES, round * STEPS, STEPS, BATCH)])


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Stacked:
    """Our rounds begin with the exchange: the first play is only local steps, and the last average is still due."""

    def __init__(self, data: FederatedData) -> None:
        model = CohortModel(new_module(), torch.device("cpu"))
        train = TrainSettings(STEPS, BATCH, RATE, momentum=0.0, weight_decay=0.0)
        method = METHODS["fedavg"]
        self._federation = Federation(method, method.Settings(), model, data, train, SEED)
        self._started = False

    def prepare(self, round: int) -> None: ...

    def play(self) -> None:
        if self._started:
            self._federation.play_round()
        else:
            self._federation.start()
        self._started = True

    def model(self) -> Tensor:
        params: Tensor = self._federation.state()["params"]
        return params.double().mean(dim=0).float()


class PlainLoop:
    """What most code does: one module, which is every client in turn."""

    def __init__(self, data: FederatedData) -> None:
        self._data, self._module = data, new_module()
        self._orders: list[Tensor] = []

    def prepare(self, round: int) -> None:
        self._orders = [batches(self._data, client, round) for client in range(CLIENTS)]

    def play(self) -> None:
        parameters = list(self._module.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        mean = [torch.zeros_like(value) for value in start]
        for order in self._orders:
            optimiser = torch.optim.SGD(parameters, lr=RATE)
            for index in order:
                optimiser.zero_grad()
                F.cross_entropy(self._module(self._data.x[index]), self._data.y[index]).backward()
                optimiser.step()
            with torch.no_grad():
                for parameter, value, total in zip(parameters, start, mean, strict=True):
                    total.add_(parameter, alpha=1 / CLIENTS)
                    parameter.copy_(value)
        with torch.no_grad():
            for parameter, value in zip(parameters, mean, strict=True):
                parameter.copy_(value)

    def model(self) -> Tensor:
        return flat(self._module)


class ModuleForPfl(nn.Module):
    """The model with the functions that pfl calls; counts local steps and their samples."""

    def __init__(self) -> None:
        super().__init__()
        self.module = new_module()
        self.steps = self.samples = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        self.samples += len(y)
        return F.cross_entropy(self.module(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


class Pfl:
    """FedAvg as pfl's own benchmarks set it up, all clients in every round."""

    def __init__(self, data: FederatedData) -> None:
        os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
        try:
            from pfl.aggregate.simulate import SimulatedBackend
            from pfl.algorithm.base import NNAlgorithmParams
            from pfl.algorithm.federated_averaging import FederatedAveraging
            from pfl.data.federated_dataset import FederatedDataset
            from pfl.data.pytorch import PyTorchTensorDataset
            from pfl.data.sampling import get_user_sampler
            from pfl.hyperparam import NNTrainHyperParams
            from pfl.model.pytorch import PyTorchModel
        except ImportError as error:
            raise SystemExit(
                f"pfl cannot be imported ({error}); install it with: pip install 'pfl[pytorch]==0.6.*'"
            ) from error
        self.module = ModuleForPfl()
        self._data, self._dataset, self._params = data, PyTorchTensorDataset, NNAlgorithmParams
        self._model = PyTorchModel(
            self.module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.module.parameters(), lr=1.0),
        )
        everyone = get_user_sampler("minimize_reuse", range(CLIENTS))  # one after another, round after round
        clients = FederatedDataset(lambda client: self._clients[client], everyone)
        self._backend = SimulatedBackend(training_data=clients, val_data=clients)
        self._algorithm = FederatedAveraging()
        # An epoch is E batches: local_num_steps alone would end after one pass over a client's samples.
        self._train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH)
        self._clients: list[Any] = []
        self._round = 0

    def prepare(self, round: int) -> None:
        self._round = round
        orders = [batches(self._data, client, round).flatten() for client in range(CLIENTS)]
        self._clients = [self._dataset((self._data.x[order], self._data.y[order])) for order in orders]

    def play(self) -> None:
        # Runs go on where the last one ended. The very first round evaluates whatever the frequency; it is warm-up.
        rounds = self._params(
            central_num_iterations=self._round + 1,
            evaluation_frequency=10**9,
            train_cohort_size=CLIENTS,
            val_cohort_size=None,
        )
        self._algorithm.run(rounds, self._backend, self._model, self._train, send_metrics_to_platform=False)

    def model(self) -> Tensor:
        return flat(self.module)

    def counts(self) -> tuple[int, int]:
        """Local steps so far, and their samples."""
        return self.module.steps, self.module.samples


def serve(pipe: Connection, rank: int, addresses: str, threads: int) -> None:
    """One of several processes over which pfl spreads the clients: does what the pipe says."""
    os.environ |= {"PFL_WORKER_RANK": str(rank), "PFL_WORKER_ADDRESSES": addresses}
    warnings.simplefilter("ignore")  # pfl calls the reduction by a deprecated name
    torch.set_num_threads(threads)
    simulator = Pfl(random_data())
    with suppress(EOFError):  # the end of the benchmark
        while True:
            name, arguments = pipe.recv()
            result = getattr(simulator, name)(*arguments)
            pipe.send(result.numpy() if isinstance(result, Tensor) else result)


class PflProcesses:
    """pfl with an equal share of the clients in every process."""

    def __init__(self, processes: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            addresses = ",".join([f"localhost:{free.getsockname()[1]}"] * processes)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        for rank in range(processes):
            here, there = context.Pipe()
            work = (there, rank, addresses, threads // processes)
            # Only in a process of this name does pfl join the others.
            context.Process(target=serve, name="MainProcess", args=work, daemon=True).start()
            there.close()
            self._pipes.append(here)

    def prepare(self, round: int) -> None:
        self._ask("prepare", round)

    def play(self) -> None:
        self._ask("play")

    def model(self) -> Tensor:
        return torch.from_numpy(self._ask("model")[0])

    def counts(self) -> tuple[int, int]:
        steps, samples = map(sum, zip(*self._ask("counts"), strict=True))
        return steps, samples

    def _ask(self, name: str, *arguments: int) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return [pipe.recv() for pipe in self._pipes]


def check(simulators: dict[str, Simulator]) -> dict[str, dict[str, float]]:
    """Play the first rounds and compare the global models; how far each is from the stacked engine's.

    Now and then a ReLU gets an input so close to zero that rounding decides its sign, which shows in the weights of
    that hidden unit; one wrong sample would show in all of them. So 99 % of the weights must agree.
    """
    expected = CHECKED_ROUNDS * CLIENTS * STEPS, CHECKED_ROUNDS * CLIENTS * STEPS * BATCH
    for name, simulator in simulators.items():
        for round in range(CHECKED_ROUNDS):
            simulator.prepare(round)
            simulator.play()
        if isinstance(simulator, Pfl | PflProcesses) and simulator.counts() != expected:
            raise SystemExit(f"{name}: got {simulator.counts()} local steps and samples, expected {expected}")
    models = {name: simulator.model() for name, simulator in simulators.items()}
    reference = models.pop("stacked")
    differences = {}
    for name, model in {"initial": flat(new_module()), **models}.items():
        apart = (model - reference).abs()
        most, largest = apart.quantile(0.99).item(), apart.max().item()
        differences[name] = {"99 %": most, "largest": largest}
        print(f"|{name} - stacked| after {CHECKED_ROUNDS} rounds: 99 % within {most:.1e}, largest {largest:.1e}")
        if (most < TOLERANCE) is (name == "initial"):
            raise SystemExit(f"{name}: expected the global models to be the same, and other than at the start")
    return differences


def measure(simulators: dict[str, Simulator], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round."""
    times: dict[str, list[float]] = {name: [] for name in simulators}
    for first in range(0, rounds, TURN):
        for name, simulator in simulators.items():
            for round in range(first, min(first + TURN, rounds)):
                simulator.prepare(CHECKED_ROUNDS + round)
                began = time.perf_counter()
                simulator.play()
                times[name].append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}; expected at least 1")
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; expected at least 1")
    torch.set_num_threads(arguments.threads)

    data = random_data()
    simulators: dict[str, Simulator] = {"stacked": Stacked(data), "pfl, 1 process": Pfl(data)}
    # A divisor of the clients: pfl deals them out in turn, and would deal differently to every process otherwise.
    processes = max(n for n in range(1, arguments.threads + 1) if CLIENTS % n == 0)
    if processes > 1:
        simulators[f"pfl, {processes} processes"] = PflProcesses(processes, arguments.threads)
    simulators["plain loop"] = PlainLoop(data)
    versions = {name: version(name) for name in ("pfl", "torch", "numba")} | {"python": platform.python_version()}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    differences = check(simulators)
    times = measure(simulators, arguments.rounds)
    medians = {name: statistics.median(series) for name, series in times.items()}

    print(f"{CLIENTS} clients x {STEPS} steps, {arguments.threads} threads, {arguments.rounds} rounds of each")
    print(f"{'seconds per round':<18}  {'median':>7}  {'fastest':>7}  {'median / stacked':>16}")
    for name, seconds in medians.items():
        print(f"{name:<18}  {seconds:7.3f}  {min(times[name]):7.3f}  {seconds / medians['stacked']:16.2f}")
    if arguments.json:
        report = {
            "versions": versions,
            "processor": platform.processor() or platform.machine(),
            "threads": arguments.threads,
            "differences": differences,
            "median_seconds": medians,
            "seconds": times,
        }
        keep(report, arguments.json)


if __name__ == "__main__":
    main()
