"""What a server learns from its clients' messages: their models and the classes they hold.

    python benchmarks/reconstruct.py [--methods pfedlms,fedavg] [--rounds 20,80] [--seeds 3] [--json FILE]

The server is honest but curious. It knows what every server knows: the seed, w⁰, the settings, its own answers and the
decoded messages of one run on the embedded digits, with all clients in every round. From these alone it rebuilds
every client's model with a simple decoder (below, one function per kind of message). Three figures per method:

    cosine    of θ̂ − w⁰ and θ − w⁰, θ the model that the client's last message is about; mean over clients
    accuracy  of θ̂ on the client's own test split, beside that of θ and that of the shared model w
    AUC       of naming the classes a client holds (at least 5 % of its training samples): how often a class that is
              held scores above one that is not, over all clients. The score of a class is how much more θ̂ favours it
              in the last layer than the other clients' θ̂ do, summed over rounds. FedProto's messages name the classes.

A better decoder finds more: the figures are lower bounds of what messages reveal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from kept import keep_rows
from torch import Tensor

from pfedlms import load_config
from pfedlms.cohort import Tensors
from pfedlms.engine import Federation
from pfedlms.experiment.prepare import execution_settings, prepare
from pfedlms.methods import METHODS, Method
from pfedlms.methods.consensus import Sketches
from pfedlms.methods.obcsaa import decode_mean_of_signs
from pfedlms.quantise import thresholds_of

HELD = 0.05  # the smallest share of a client's training samples that counts as holding a class


@dataclass
class Observer:
    """What the server received and answered, and what it makes of it."""

    method: Method
    clients: int
    received: list[dict[int, Tensors]] = field(default_factory=list)
    """Of the round being played: the values of every client's message, for each exchange."""
    answers: list[Tensors] = field(default_factory=list)
    rebuilt: Tensor = field(init=False)
    """θ̂ of every client, `[clients, dim]`."""
    shared: Tensor = field(init=False)
    """w, which local steps start from where the method has a shared model; else w⁰."""
    scale: Tensor = field(init=False)
    """S of sketchmean."""

    def __post_init__(self) -> None:
        initial = self.method.task.initial
        self.rebuilt, self.shared = initial.repeat(self.clients, 1), initial.clone()
        self.scores = torch.zeros(self.clients, self.method.task.classes)
        self.named = False
        for number, exchange in enumerate(self.method.exchanges):
            self._listen(number, exchange)

    def _listen(self, number: int, exchange: Any) -> None:
        add, reply = exchange.server_add, exchange.server_reply

        def server_add(total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
            own = self.received[number]
            for row, client in enumerate(ids):
                own[client] = {name: value[row].clone() for name, value in values.items()}
            return add(total, ids, samples, values)

        def server_reply(server: Tensors, total: Any, round: int) -> tuple[Tensors, Tensors]:
            state, values = reply(server, total, round)
            self.answers.append({name: value.clone() for name, value in values.items()})
            self._next = state.get("model", values.get("model"))
            return state, values

        exchange.server_add, exchange.server_reply = server_add, server_reply

    def play(self, federation: Federation, round: int) -> Tensor:
        """One round, and the models that its messages were about."""
        self.received, self.answers, self._next = [{} for _ in self.method.exchanges], [], None
        about = federation.state()["params"].clone()
        federation.play_round()
        DECODERS[self.method.name](self, round)
        if not self.named:
            self.scores += self._favoured()
        return about

    def _favoured(self) -> Tensor:
        """How much more each client's θ̂ favours a class than the others' do, with features that are all alike."""
        last, classes = self.method.task.layout.layers[-1], self.scores.shape[1]
        own = self.rebuilt[:, last.offset : last.offset + last.size]
        change = own - own.mean(dim=0)
        return change[:, :-classes].reshape(len(change), classes, -1).sum(dim=2) + change[:, -classes:]

    def moved_on(self) -> None:
        """The next messages are about steps from the answer of this round."""
        if self._next is not None:
            self.shared = self._next.clone()

    def stacked(self, exchange: int, name: str) -> Tensor:
        """One field of all clients' messages, `[clients, …]`."""
        return torch.stack([self.received[exchange][client][name] for client in range(self.clients)])


# --- decoders: messages of a round → θ̂ of every client ---------------------------------------------------------------


def project(observer: Observer, sketches: Sketches, round: int, wanted: Callable[[Tensor], Tensor]) -> None:
    """θ̂ ← θ̂ + (m/N) Φᵀ(wanted(Φθ̂) − Φθ̂): the nearest model whose sketch is as the message says, without padding."""
    sketch = sketches.of(round, torch.device("cpu"))
    now = sketch.forward(observer.rebuilt)
    back = sketch.adjoint(wanted(now) - now)
    for place in sketch.shape.places:
        back[:, place.begin : place.end] *= place.share
    observer.rebuilt = observer.rebuilt + back


def intervals(observer: Observer, round: int) -> None:
    """pFedLMS: each entry of the sketch lies between two thresholds. Outside them it is moved to a normal's mean in the
    interval."""
    chosen, answer = observer.method.settings, observer.answers[0]
    first = observer.method.exchanges[0]
    taus = thresholds_of(answer["mean"], answer["deviation"], first._quantiles)  # [layers, T]
    sketches, symbols = first._sketches, observer.stacked(1, "symbols").long()
    layer = torch.repeat_interleave(torch.arange(len(sketches.sizes)), torch.tensor(sketches.sizes))
    far = answer["mean"] + 3 * answer["deviation"], answer["mean"] - 3 * answer["deviation"]
    edges = torch.cat([far[1][:, None], taus, far[0][:, None]], dim=1)[layer]  # [entries, T + 2]
    low, high = (edges.gather(1, (symbols + end).T).T for end in (0, 1))
    middle = (low + high) / 2
    project(observer, sketches, round, lambda now: torch.where((now >= low) & (now < high), now, middle))
    assert chosen.thresholds + 2 == edges.shape[1]


def signs_of_models(observer: Observer, round: int) -> None:
    """pFed1BS: entries with the wrong sign get the right one. The size of θ is not sent: Φ is fixed and so is θ̂'s."""
    signs = observer.stacked(0, "signs")
    project(observer, observer.method.exchanges[0]._sketches, round, lambda now: signs * now.abs())


def voted_updates(observer: Observer, round: int) -> None:
    """sketchvote: w + (m/N) Φᵀ(√(2/π) s_k sign(y_k)), what the update's sketch is on average."""
    signed_sketch(observer, round, observer.stacked(0, "scale"))


def mean_votes(observer: Observer, round: int) -> None:
    """sketchmean: the same with S, which all clients share, for s_k; S came with the answer of the round before."""
    exchange = observer.method.exchanges[0]
    if round == 0:
        observer.scale = torch.from_numpy(exchange._start).float()
    signed_sketch(observer, round, observer.scale.expand(observer.clients, -1))
    observer.scale = observer.answers[0]["scale"]


def signed_sketch(observer: Observer, round: int, scales: Tensor) -> None:
    """θ̂ from the signs of the update's sketch and its size in each layer, `[clients, layers]`."""
    sketches = observer.method.exchanges[0]._sketches
    sketch = sketches.of(round, torch.device("cpu"))
    bits = np.unpackbits(observer.stacked(0, "signs").numpy(), axis=1, count=sketch.size, bitorder="little")
    entries = torch.repeat_interleave(scales, torch.tensor(sketches.sizes), dim=1)
    update = sketch.adjoint((torch.from_numpy(bits).float() * 2 - 1) * entries * (2 / np.pi) ** 0.5)
    for place in sketch.shape.places:
        update[:, place.begin : place.end] *= place.share
    observer.rebuilt = observer.shared + update


def counted_updates(observer: Observer, round: int) -> None:
    """FetchSGD: w + (columns/dim) Aᵀ table, A the Count Sketch: nearly the smallest update that has this table."""
    sketch = observer.method.exchanges[0].sketch
    cells, signs = sketch._cells_and_signs
    update = (observer.stacked(0, "table")[:, cells] * signs).sum(dim=1)
    observer.rebuilt = observer.shared + update * (sketch.shape[1] / update.shape[1])


def models(observer: Observer, round: int) -> None:
    """FedAvg sends the model itself."""
    observer.rebuilt = observer.stacked(0, "model")


def ternary_updates(observer: Observer, round: int) -> None:
    magnitude, signs, positions = (observer.stacked(0, name) for name in ("magnitude", "signs", "positions"))
    observer.rebuilt = observer.shared + torch.zeros_like(observer.rebuilt).scatter(1, positions, magnitude * signs)


def rotated_updates(observer: Observer, round: int) -> None:
    codec, ids = observer.method.exchanges[0]._codec, list(range(observer.clients))
    update = codec.decode(observer.stacked(0, "indices"), observer.stacked(0, "scales"), ids, round)
    observer.rebuilt = observer.shared + update


def signed_updates(observer: Observer, round: int) -> None:
    """z-sign: the mean size of an update is not sent; the server's own step stands in for it."""
    exchange, rate = observer.method.exchanges[0], observer.method.task.rate(round)
    observer.rebuilt = observer.shared - exchange._server_step * rate * observer.stacked(0, "signs")


def sparse_directions(observer: Observer, round: int) -> None:
    exchange = observer.method.exchanges[0]
    sketch = exchange._sketches.of(0, torch.device("cpu"))
    signs, norms = observer.stacked(0, "signs"), observer.stacked(0, "norm")
    rows = [decode_mean_of_signs(sketch, row[None], exchange._sparsity, exchange._settings.iterations) for row in signs]
    observer.rebuilt = observer.shared - norms * torch.cat(rows)


def signed_gradients(observer: Observer, round: int) -> None:
    observer.rebuilt = observer.shared - observer.method.settings.step * observer.stacked(0, "signs")


def prototypes(observer: Observer, round: int) -> None:
    """FedProto names its classes; of the model nothing but mean features is sent."""
    observer.scores, observer.named = observer.stacked(0, "held").float(), True


def nothing(observer: Observer, round: int) -> None:
    """`local` sends nothing."""


DECODERS: dict[str, Callable[[Observer, int], None]] = {
    "local": nothing,
    "fedavg": models,
    "pfedlms": intervals,
    "pfed1bs": signs_of_models,
    "sketchvote": voted_updates,
    "stc": ternary_updates,
    "sketchmean": mean_votes,
    "fetchsgd": counted_updates,
    "eden": rotated_updates,
    "zsign": signed_updates,
    "obcsaa": sparse_directions,
    "obda": signed_gradients,
    "fedproto": prototypes,
}

# --- what was found ---------------------------------------------------------------------------------------------------


def accuracy(federation: Federation, params: Tensor) -> float:
    """Of every client's row of `params` on its own test split, in percent of all test samples."""
    data, right, total = federation.data, 0, 0
    for client, held in enumerate(data.test):
        x, y = data.x[held], data.y[held]
        with torch.no_grad():
            outputs, _ = federation.model.forward(params[client : client + 1], {}, x[None], training=False)
        right += int((outputs[0].argmax(dim=1) == y).sum())
        total += len(y)
    return 100 * right / total


def holdings(federation: Federation) -> Tensor:
    """Which classes each client holds, `[clients, classes]`."""
    data = federation.data
    counts = torch.stack([torch.bincount(data.y[held], minlength=data.classes) for held in data.train])
    return counts >= HELD * counts.sum(dim=1, keepdim=True)


def auc(scores: Tensor, held: Tensor) -> float:
    """How often a class that is held scores above one that is not, by the same client; a tie counts half."""
    wins = pairs = 0.0
    for own, there in zip(scores, held, strict=True):
        difference = own[there][:, None] - own[~there][None, :]
        wins += float((difference > 0).sum() + 0.5 * (difference == 0).sum())
        pairs += difference.numel()
    return wins / pairs if pairs else float("nan")


def measure(method: str, seed: int, rounds: list[int]) -> list[dict[str, Any]]:
    config = load_config(None, {"method": {"name": method}, "run": {"seed": seed, "device": "cpu"}})
    rows = []
    with execution_settings(config):
        federation = prepare(config)
        observer, held = Observer(federation.method, federation.data.clients), holdings(federation)
        federation.start()
        for round in range(max(rounds)):
            about = observer.play(federation, round)
            if round + 1 in rounds:
                first = federation.method.task.initial
                pairs = torch.nn.functional.cosine_similarity(observer.rebuilt - first, about - first, dim=1)
                found = {"rebuilt": observer.rebuilt, "true": about, "shared": observer.shared.expand_as(about)}
                rows.append(
                    {
                        "method": method, "seed": seed, "rounds": round + 1, "cosine": float(pairs.mean()),
                        "auc": auc(observer.scores, held),
                        **{f"accuracy_{name}": accuracy(federation, params) for name, params in found.items()},
                    }
                )  # fmt: skip
            observer.moved_on()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| method | rounds | cosine | accuracy of θ̂ | of θ | of w | AUC of classes |\n|---|---|---|---|---|---|---|")
    names = ("accuracy_rebuilt", "accuracy_true", "accuracy_shared")
    for method, rounds in dict.fromkeys((row["method"], row["rounds"]) for row in rows):
        own = [row for row in rows if (row["method"], row["rounds"]) == (method, rounds)]
        accuracies = " | ".join(f"{mean(row[name] for row in own):.1f}" for name in names)
        similar, named = (mean(row[name] for row in own) for name in ("cosine", "auc"))
        print(f"| `{method}` | {rounds} | {similar:.2f} | {accuracies} | {named:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="", help="separated by commas; default: all")
    parser.add_argument("--rounds", default="20,80")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = options.methods.split(",") if options.methods else [name for name in METHODS if name in DECODERS]
    rounds = [int(number) for number in options.rounds.split(",")]
    rows = [row for name in chosen for seed in range(options.seeds) for row in measure(name, seed, rounds)]
    show(rows)
    if options.json:
        keep_rows(rows, options.json)


if __name__ == "__main__":
    main()
