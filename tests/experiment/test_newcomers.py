"""Newcomers (clients that are held out of a run) and models for new devices, compared with plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import network as module
from torch import nn

import pfedlms
from pfedlms.data import Partitioning, batch_positions, from_pool, load_dataset
from pfedlms.errors import DataError, DataWarning, UsageError
from pfedlms.methods import METHODS

X, Y = load_dataset("digits")
SMALL: dict[str, Any] = {
    "rounds": 3, "local_steps": 4, "batch_size": 8, "learning_rate": 0.1, "weight_decay": 0.0, "hidden": 12,
    "clients": 10, "progress": False, "seed": 2,
}  # fmt: skip


def train_locally(weights: dict[str, torch.Tensor], x: Any, y: Any, client: int = 0) -> nn.Module:
    """The local steps of the phase after the last round, in float64."""
    model = module().double()
    model.load_state_dict(weights)
    places = batch_positions(SMALL["seed"], client, len(x), SMALL["rounds"] * 4, 4, 8)
    for batch in places:
        loss = nn.functional.cross_entropy(model(torch.as_tensor(x[batch]).double()), torch.as_tensor(y[batch]))
        for value, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            value.data -= 0.1 * slope
    return model


def accuracy(model: nn.Module, x: Any, y: Any) -> float:
    scores = model.double()(torch.as_tensor(x).double())
    return 100 * float((scores.argmax(1).numpy() == np.asarray(y)).mean())


@pytest.mark.parametrize("kind", ["file", "list"])
def test_clients_keep_their_names_where_others_are_newcomers(kind: str, tmp_path: Path) -> None:
    """Clients 0 to 9; the feature of a sample is its client."""
    rows = [(client, label % 2) for client in range(10) for label in range(12)]
    (tmp_path / "t.csv").write_text("client,f,y\n" + "".join(f"{client},{client},{y}\n" for client, y in rows))
    given = [(np.full((12, 1), client, np.float32), np.arange(12) % 2) for client in range(10)]
    source = f"file:{tmp_path / 't.csv'}" if kind == "file" else given
    run = pfedlms.run(source, nn.Linear(1, 2), method="local", newcomers=0.3, rounds=1, local_steps=1, progress=False)
    data, newcomers = run.federation.data, run.summary["newcomers"]["names"]
    assert sorted([*run.client_names, *newcomers]) == sorted(map(str, range(10)))
    assert [int(data.x[own][0]) for own in data.train] == list(map(int, run.client_names))
    assert [int(data.x[own][0]) for own, _ in data.newcomers] == list(map(int, newcomers))
    shifted = next(k for k, name in enumerate(run.client_names) if name != str(k))
    name = run.client_names[shifted]
    assert torch.equal(run.model(name).weight, run.models[shifted]["weight"])
    if name in map(str, range(len(data.train))):
        with pytest.raises(UsageError, match=rf"client: got {name}, which is the number of client .* and the name of"):
            run.model(int(name))


def test_newcomers_do_not_depend_on_the_number_of_threads() -> None:
    """On several threads PyTorch adds up products of this size in another order."""
    settings = {**SMALL, "hidden": 16, "batch_size": 32, "newcomers": 0.3, "method": "local"}
    one, two = (pfedlms.run("digits", "dnn", threads=threads, **settings) for threads in (1, 2))
    assert one.summary["newcomers"] == two.summary["newcomers"]
    given = X[:200].reshape(-1, 1, 8, 8), Y[:200]
    models = [run.personalise(given).state_dict().values() for run in (one, two)]
    assert all(map(torch.equal, *models))


@pytest.mark.parametrize(("method", "participation"), [("fedavg", 1.0), ("fedavg", 0.3), ("local", 0.3)])
def test_newcomers_are_measured_as_by_a_plain_loop(method: str, participation: float, tmp_path: Path) -> None:
    """fedavg: the exported shared model, then E steps from it. local: w⁰, then E steps from it."""
    start = module()
    run = pfedlms.run(
        model=start, method=method, newcomers=0.3, participation=participation, out=str(tmp_path / "r"), **SMALL
    )
    weights = start.state_dict()
    if method == "fedavg":
        run.export(tmp_path / "shared.pt", shared=True)
        weights = torch.load(tmp_path / "shared.pt")
    data, found = run.federation.data, run.summary["newcomers"]
    assert (run.summary["clients"], found["clients"], len(data.newcomers)) == (7, 3, 3)
    x, y = data.x.numpy(), data.y.numpy()
    model = module()
    model.load_state_dict(weights)
    for client, (train, test) in enumerate(data.newcomers):
        assert found["client_before"][client] == pytest.approx(accuracy(model, x[test], y[test]))
        after = train_locally(weights, x[train], y[train], client)
        assert found["client_after"][client] == pytest.approx(accuracy(after, x[test], y[test]))
    sizes = [len(test) for _, test in data.newcomers]
    assert found["after"] == pytest.approx(np.average(found["client_after"], weights=sizes))
    assert pfedlms.load(tmp_path / "r").summary["newcomers"] == found


def test_newcomers_share_no_sample_with_clients() -> None:
    one, other = (from_pool(X, Y, Partitioning(10, 0.5, seed, validation=0.2, newcomers=0.25)) for seed in (2, 3))
    clients = np.concatenate([*one.train, *one.test, *one.validation])
    held_out = np.concatenate([part for newcomer in one.newcomers for part in newcomer])
    assert not set(clients) & set(held_out)
    assert len(one.newcomers) == round(0.25 * 10)
    assert [len(test) for _, test in other.newcomers] != [len(test) for _, test in one.newcomers]


@pytest.mark.parametrize("method", METHODS)
def test_personalise_reproduces_the_newcomers_of_every_method(method: str, tmp_path: Path) -> None:
    """From the run in memory and from its folder without the data; the run itself is not changed."""
    settings = {**SMALL, "participation": 0.4, "newcomers": 0.2}
    data = (X[:400], Y[:400])
    run = pfedlms.run(data, module, method=method, out=str(tmp_path / "r"), **settings)
    again = pfedlms.run(data, module, method=method, **{**settings, "newcomers": 0.0})
    assert again.summary["clients"] == run.summary["clients"] + 2
    held, before = run.federation.data, [model["1.weight"].clone() for model in run.models]
    train, test = held.newcomers[0]
    own = (held.x[train].numpy(), held.y[train].numpy())
    personal = run.personalise(own)
    x, y = held.x[test], held.y[test].numpy()
    begins = run.federation.shared_state_dict() or run.federation.model.module.state_dict()  # the shared model, or w⁰
    start = module()
    start.load_state_dict(begins)
    if method not in ("fedper", "fedrep"):  # their newcomers begin with the shared body and the head of w⁰
        assert accuracy(start, x, y) == pytest.approx(run.summary["newcomers"]["client_before"][0])
    assert accuracy(personal, x, y) == pytest.approx(run.summary["newcomers"]["client_after"][0])
    loaded = pfedlms.load(tmp_path / "r", model=module).personalise(own)
    for one, other in zip(personal.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.float(), other)
    assert all(torch.equal(old, model["1.weight"]) for old, model in zip(before, run.models, strict=True))


@pytest.mark.parametrize("epochs", [0.0, 0.5])
def test_personalise_takes_named_classes_and_a_number_of_steps(epochs: float) -> None:
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    run = pfedlms.run((X, names[Y]), module, method="fedavg", local_epochs=epochs, **SMALL)
    few = (X[(Y == 3) | (Y == 5)][:60], names[Y[(Y == 3) | (Y == 5)][:60]])
    short, long = run.personalise(few), run.personalise(few, local_steps=60)
    wanted = [run.classes.index(name) for name in few[1]]
    assert accuracy(long, few[0], wanted) > max(90, accuracy(short, few[0], wanted))
    refused: dict[str, Any] = {
        r"got the class 'ten', expected one of the classes eight, five": (X[:2], ["ten", "one"]),
        r"got samples of shape \(64,\), expected \(1, 8, 8\)": (X[:4].reshape(4, 64), names[Y[:4]]),
        r"data: got one ndarray of shape .*, expected samples and labels": X,
        r"got a text, but the run was not trained on characters or bytes": "to be",
    }
    for message, data in refused.items():
        with pytest.raises(DataError, match=message):
            run.personalise(data)
    for several in ([few, few], (few, few)):
        with pytest.raises(
            DataError, match=r"data: got .*, expected all that one device|client 0: got a .* of ., expected"
        ):
            run.personalise(several)
    with pytest.raises(UsageError, match="local_steps: got 0, expected at least 1"):
        run.personalise(few, local_steps=0)


def test_images_of_a_new_device_must_be_normalised_as_the_runs_were() -> None:
    run = pfedlms.run("digits", method="fedavg", **SMALL)
    constants = run.summary["normalisation"]
    pixels = (X[:60] * constants["std"][0] + constants["mean"][0]) * constants["scale"]
    for raw in (pixels, pixels / constants["scale"]):
        with pytest.raises(DataError, match=r"got samples from .* to .*, but the run normalised its images"):
            run.personalise((raw.clip(0).round(4), Y[:60]))
    assert isinstance(run.personalise((X[:60], Y[:60])), torch.nn.Module)
    only_scaled = pfedlms.run("digits", method="fedavg", mean="0", std="1", **SMALL)
    assert isinstance(only_scaled.personalise((pixels.clip(0) / constants["scale"], Y[:60])), torch.nn.Module)


def test_labels_of_a_new_device_are_read_as_class_names_first() -> None:
    run = pfedlms.run((X, Y % 3 - 1), module, method="fedavg", **SMALL)
    assert run.classes == ("-1", "0", "1")
    held = Y % 3 > 0
    few, outputs = X[held][:60], (Y % 3)[held][:60]
    assert accuracy(run.personalise((few, outputs - 1), local_steps=60), few, outputs) > 90
    with pytest.raises(DataError, match=r"got the class '2', expected one of the classes -1, 0, 1$"):
        run.personalise((few, outputs))
    with pytest.raises(DataError, match=r"got the class '2', expected one of the classes -1, 0, 1$"):
        run.personalise((few[outputs == 2], outputs[outputs == 2]))  # no label is a name, so it might be a number


def test_numbers_for_named_classes_are_taken_in_their_order_with_a_warning() -> None:
    run = pfedlms.run((X, np.array(["b", "c", "a"])[Y % 3]), module, method="fedavg", **SMALL)
    few, outputs = X[:60], (Y[:60] + 1) % 3
    with pytest.warns(DataWarning, match="labels are numbers, in the order of the classes: 0 for a, 1 for b, 2 for c"):
        assert accuracy(run.personalise((few, outputs), local_steps=60), few, outputs) > 90


def test_targets_of_a_new_device_are_numbers_where_those_of_the_run_were() -> None:
    """The run had 1 to 10, so a device that has only 0 and 1 has no classes either."""
    loss = lambda outputs, y: (outputs - y[:, None]).square().mean(1)  # noqa: E731 - an argument
    run = pfedlms.run((X, Y + 1), nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), method="fedavg", loss=loss, **SMALL)
    assert isinstance(run.personalise((X[:60], Y[:60] % 2)), nn.Module)
    with pytest.raises(DataError, match="got the classes a, b, expected numbers, as the run had"):
        run.personalise((X[:60], np.array(["a", "b"])[Y[:60] % 2]))


def test_text_of_a_new_device_is_read_with_the_vocabulary_of_the_run(tmp_path: Path) -> None:
    clients = {name: ("the " + name + " ") * 30 for name in ("ant", "bee", "cat", "dog")}
    model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 12))
    given = pfedlms.data.texts(clients, window=8, stride=3)
    assert len(given.names) == 12
    run = pfedlms.run(given, model, method="fedavg", out=str(tmp_path / "r"), **{**SMALL, "clients": 4})
    text = "zebra the fox " * 9
    device = pfedlms.load(tmp_path / "r", model=model).personalise(text)
    expected = run.personalise(pfedlms.data.texts([text], window=8, stride=3, vocabulary=run.classes))
    assert all(torch.equal(*pair) for pair in zip(device.parameters(), expected.parameters(), strict=True))
    with pytest.raises(DataError, match=r"another vocabulary than the run's"):
        run.personalise(pfedlms.data.texts([text], window=8))
