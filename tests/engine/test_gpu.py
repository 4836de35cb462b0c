"""On a GPU, recorded steps and fused kernels give the results of the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedlms
from factories import layout_of
from pfedlms.cohort import Cohort
from pfedlms.data.batches import DeviceBatches, HostBatches
from pfedlms.engine import client as engine_client
from pfedlms.engine.graphs import Replayed
from pfedlms.methods import METHODS, Method, Objective, Task
from pfedlms.methods.eden import Codec
from pfedlms.sketch import Sketch
from pfedlms.wire.fields import Field

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass(frozen=True)
class Shrunk(Objective):
    """A pull towards zero along a sketch that is new in every round, and a projection after every third step."""

    sketch: Sketch
    strength: float

    def gradient(self, params: Tensor) -> Tensor:
        return self.strength * self.sketch.adjoint(self.sketch.forward(params))

    def after_step(self, params: Tensor, step: int) -> Tensor:
        if step % 3 < 2:
            return params
        sketched = self.sketch.forward(params)
        return params - 0.1 * self.sketch.adjoint(sketched.clamp(-0.5, 0.5))


class Fresh(Method):
    """No messages; only the objective changes from round to round."""

    name, paper, personal = "fresh-sketch", "a test", True

    @dataclass(frozen=True)
    class Settings:
        """None."""

    def objective(self, cohort: Cohort, round: int) -> Objective:
        layout, device = self.task.layout, cohort.params.device
        return Shrunk(Sketch(layout, 0.1, self.task.seed, round, device), 0.02)


ALL = {**METHODS, Fresh.name: Fresh}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, Fresh.name, Fresh)


@pytest.mark.parametrize("method", ALL)
def test_a_gpu_run_agrees_with_a_cpu_run(method: str) -> None:
    runs = {
        device: pfedlms.run("digits", method=method, rounds=10, clients=8, device=device, seed=3)
        for device in ("cpu", "cuda")
    }
    cpu, gpu = (runs[name].metrics for name in ("cpu", "cuda"))
    for here, there in zip(cpu, gpu, strict=True):  # the messages of `stc` follow which entries are largest
        assert here["bytes"] == pytest.approx(there["bytes"], rel=0.02 if method == "stc" else 0)
    np.testing.assert_allclose([r["p_acc"] for r in cpu], [r["p_acc"] for r in gpu], atol=1.5)
    np.testing.assert_allclose(cpu[0]["loss"], gpu[0]["loss"], rtol=1e-3)


@pytest.mark.parametrize("method", ["sketchmean", "stc"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_server_on_a_gpu_has_the_bits_of_one_on_the_host(method: str, optimizer: str) -> None:
    layout, samples = layout_of(37, 5000, 1), [3, 700_001, 12, 2_000_003]
    task = Task(layout, 10, 8, 5, torch.randn(layout.dim), 4, 4, learning_rate=0.1, weight_decay=0.0)
    answers = []
    for device in ("cpu", "cuda"):
        settings = METHODS[method].Settings(server_momentum=0.9, server_optimizer=optimizer)
        own = METHODS[method](replace(task, device=device), settings)
        (exchange,), server, found = own.exchanges, own.server_start(), []
        draw = torch.Generator().manual_seed(1)
        for round in range(4):
            values = {part.name: values_of(part, 4, draw) for part in exchange.up.fields}
            total = exchange.server_add(exchange.server_open(server, round), [0, 1, 2, 3], samples, values)
            server, answer = exchange.server_reply(server, total, round)
            found += [value.cpu() for value in (*answer.values(), *server.values())]
        answers.append(found)
    assert all(map(torch.equal, *answers))


def values_of(part: Field, clients: int, draw: torch.Generator) -> Tensor:
    """Some clients' values of a field of sketchmean's or stc's messages."""
    if part.name == "positions":
        return torch.stack(
            [torch.randperm(5038, generator=draw)[: part.shape[0]].sort().values for _ in range(clients)]
        )
    values = torch.randn(clients, *part.shape, generator=draw)
    if part.name == "magnitude":
        return values.abs()
    if part.dtype is np.float32:
        return torch.where(values >= 0, 1.0, -1.0)
    return torch.from_numpy((values.numpy() * 100).astype(np.int64).astype(part.dtype))


def test_a_gpu_run_is_deterministic() -> None:
    first, second = (pfedlms.run("digits", rounds=5, clients=8, device="cuda").metrics for _ in range(2))
    for record in (*first, *second):
        del record["seconds"]
    assert first == second


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", ALL)
def test_recorded_steps_equal_steps_without_a_recording(
    method: str, participation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels on the same numbers: a recording that reads values of an earlier round would differ at once."""
    settings = {"rounds": 5, "clients": 8, "device": "cuda", "train.momentum": 0.5, "method": method, "local_steps": 7}
    recorded = pfedlms.run("digits", participation=participation, **settings).federation.state()["params"]
    monkeypatch.setattr(engine_client, "Replayed", lambda largest: None)
    plain = pfedlms.run("digits", participation=participation, **settings).federation.state()["params"]
    assert torch.equal(plain, recorded)


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_padded_cohorts_keep_the_tensors_of_each_client(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are lost, so that cohorts of many sizes are padded to those that are recorded. The objective of
    `scaffold` has a tensor of each client; `ditto` trains a second time in every round."""
    settings = {"rounds": 12, "clients": 16, "device": "cuda", "method": method, "lost": 0.3, "quorum": 0.1}
    recorded = pfedlms.run("digits", **settings)
    assert len({len(record.get("clients", range(16))) for record in recorded.metrics}) >= 3
    monkeypatch.setattr(engine_client, "Replayed", lambda largest: None)
    plain = pfedlms.run("digits", **settings)
    torch.testing.assert_close(
        plain.federation.state()["params"], recorded.federation.state()["params"], rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("method", ["local", "pfedlms", "pfed1bs", "fedproto", "scaffold", "ditto", Fresh.name])
def test_stacked_clients_get_nearly_the_models_of_single_clients(method: str) -> None:
    settings = {"rounds": 4, "clients": 8, "device": "cuda", "train.momentum": 0.5, "method": method}
    if method == "pfed1bs":
        # tanh(10⁴ x) turns a last bit into a full pull, so the pull is kept at the paper's.
        settings["strength"] = 5e-4
    alone = pfedlms.run("digits", cohort_size=1, **settings).federation.state()["params"]
    stacked = pfedlms.run("digits", cohort_size=4, **settings).federation.state()["params"]
    distance = (alone - stacked).norm(dim=1) / alone.norm(dim=1)
    assert distance.max() < 1e-2


def test_cohorts_of_many_sizes_need_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are lost, so every round trains another number of clients."""
    made: list[Replayed] = []

    def recording(largest: int) -> Replayed:
        made.append(Replayed(largest))
        return made[-1]

    monkeypatch.setattr(engine_client, "Replayed", recording)
    settings = {"rounds": 25, "clients": 16, "device": "cuda", "method": "pfedlms", "lost": 0.3, "quorum": 0.1}
    result = pfedlms.run("digits", **settings)
    sizes = {len(record.get("clients", range(16))) for record in result.metrics}
    assert len(sizes) >= 4
    # The start, and the rounds at 16, 8 and at most two smaller sizes.
    assert sum(len(replayed._recordings) for replayed in made) <= 5


def test_an_objective_that_changes_its_computation_every_round_is_not_replayed() -> None:
    """It has a number in place of a tensor: after some recordings it runs without them."""

    class Counting(Fresh):
        def objective(self, cohort: Cohort, round: int) -> Objective:
            return Shrunk(Sketch(self.task.layout, 0.1, self.task.seed, 0, cohort.params.device), 0.001 * round)

    METHODS[Fresh.name] = Counting
    settings = {"rounds": 20, "clients": 4, "method": Fresh.name, "seed": 2}
    with pytest.warns(UserWarning, match="another computation in every round"):
        gpu = pfedlms.run("digits", device="cuda", **settings)
    cpu = pfedlms.run("digits", device="cpu", **settings)
    np.testing.assert_allclose(cpu.metrics[-1]["loss"], gpu.metrics[-1]["loss"], rtol=5e-2)


def convolutional() -> nn.Module:
    """Every layer with its own rule for stacking."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 20, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 2, stride=2), nn.Flatten(), nn.Linear(20, 10),
    )  # fmt: skip


def test_a_convolutional_model_learns_on_a_gpu_as_on_a_cpu() -> None:
    settings = {"method": "pfedlms", "rounds": 5, "clients": 6, "seed": 3, "augment": "flip"}
    cpu, gpu = (pfedlms.run("digits", convolutional, device=device, **settings) for device in ("cpu", "cuda"))
    first_cpu, first_gpu = cpu.metrics[0], gpu.metrics[0]
    assert first_cpu["bytes"] == first_gpu["bytes"]
    np.testing.assert_allclose(first_cpu["loss"], first_gpu["loss"], rtol=2e-2)  # convolutions in TF32
    np.testing.assert_allclose(cpu.accuracy, gpu.accuracy, atol=6)


def test_batches_are_drawn_on_the_device_as_on_the_host() -> None:
    federation = pfedlms.run("digits", rounds=1, clients=8, device="cuda").federation
    ids = tuple(range(8))
    device, host = DeviceBatches(5, federation.data), HostBatches(5, federation.data)
    for first in (0, 20, 45):
        assert torch.equal(device.indices(ids, first, 20, 32).cpu(), host.indices(ids, first, 20, 32))


def test_eden_decodes_on_the_gpu_as_on_the_host() -> None:
    """The rotations of clients are the same on both."""
    codec, ids = Codec(70_001, 2, seed=5), (3, 8)
    x = torch.randn(2, 70_001, generator=torch.Generator().manual_seed(0))
    indices, scales = codec.encode(x, ids, 4)
    on_gpu = codec.decode(indices.cuda(), scales.cuda(), ids, 4)
    torch.testing.assert_close(on_gpu.cpu(), codec.decode(indices, scales, ids, 4), rtol=1e-5, atol=1e-6)
