"""FetchSGD: Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora, "FetchSGD: Communication-Efficient
Federated Learning with Sketching", ICML 2020.

Algorithm 1 of the paper, and where this differs: what is sketched is the update of E local steps instead of one
gradient, as for all methods here; the mean is weighted by N_k, as in the authors' code; the answer is not subtracted
from e, but its cells are set to zero in e and also in u, which Algorithm 1 leaves alone (momentum factor masking).
The authors' code does both (subtracting made their models diverge).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Task, Tracked, go_on_from
from pfedlms.methods.sparse import add_at, largest_positions
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message, Positions


@dataclass(frozen=True)
class FetchSGDSettings:
    rows: int = setting(5, "rows of the Count Sketch; an estimate is their median", minimum=1)
    columns: float = setting(
        0.02, "columns of a row, as a share of the parameters; a client sends rows · columns floats", above=0, maximum=1
    )
    answer: float = setting(0.005, "share of the entries of the model that the server's answer has", above=0, maximum=1)
    momentum: float = setting(0.9, "ρ, the momentum of the server's sketch", minimum=0, below=1)
    gain: float = setting(1.0, "η, the server's step along the sketch of its clients' mean update", minimum=0)


class CountSketch:
    """A table of `rows × columns` sums: entry i of a vector is added to one cell of every row, with a sign.

        table[r, bucket_r(i)] += sign_r(i) x(i)          estimate of x(i): the median over r of sign_r(i) table[r, …]

    bucket_r(i) is the upper half of word i of the stream (seed, "fetchsgd-bucket", r), times columns, over 2^32 and
    rounded down; sign_r(i) is sign i of the stream (seed, "fetchsgd-sign", r). Of an even number of rows the median is
    the lower one of the two in the middle.
    """

    def __init__(self, dim: int, rows: int, columns: int, seed: int) -> None:
        self.shape, self._dim, self._seed = (rows, columns), dim, seed
        self._members_on: dict[torch.device, list[Tensor]] = {}

    @cached_property
    def _cells_and_signs(self) -> tuple[Tensor, Tensor]:
        """Cell (in the flat table) and sign of every entry of a vector, in every row of the table: `[rows, dim]`."""
        rows, columns = self.shape
        cells, signs = np.empty((rows, self._dim), np.int64), np.empty((rows, self._dim), np.float32)
        for row in range(rows):
            words = rng.words(rng.stream(self._seed, "fetchsgd-bucket", row), self._dim) >> np.uint64(32)
            cells[row] = ((words * np.uint64(columns)) >> np.uint64(32)).astype(np.int64) + row * columns
            signs[row] = rng.signs(rng.stream(self._seed, "fetchsgd-sign", row), self._dim)
        return torch.from_numpy(cells), torch.from_numpy(signs)

    @cached_property
    def _members(self) -> tuple[Tensor, Tensor]:
        """The entries of every cell and their signs, `[cells, most entries of a cell]`, padded with entry 0 and sign 0.
        A sum over an axis always has the same order on a device; scattered additions do not."""
        cells, signs = (part.flatten().numpy() for part in self._cells_and_signs)
        order = np.argsort(cells, kind="stable")
        counts = np.bincount(cells, minlength=prod(self.shape))
        place = np.arange(len(cells)) - np.repeat(np.cumsum(counts) - counts, counts)
        entries, flips = (np.zeros((len(counts), counts.max()), kind) for kind in (np.int64, np.float32))
        entries[cells[order], place], flips[cells[order], place] = order % self._dim, signs[order]
        return torch.from_numpy(entries), torch.from_numpy(flips)

    def of(self, vectors: Tensor) -> Tensor:
        """The flat tables of `vectors: [clients, dim]`: `[clients, rows · columns]`."""
        if vectors.device not in self._members_on:
            self._members_on[vectors.device] = [part.to(vectors.device) for part in self._members]
        entries, signs = self._members_on[vectors.device]
        return torch.stack([(vector[entries] * signs).sum(dim=1, dtype=torch.float64).float() for vector in vectors])

    def estimates(self, table: Tensor) -> Tensor:
        """The estimate of every entry, `[dim]`, from a flat table on the host."""
        cells, signs = self._cells_and_signs
        return (table[cells] * signs).median(dim=0).values

    def cells_of(self, positions: Tensor) -> Tensor:
        """The cells of the entries at `positions`, in all rows."""
        return self._cells_and_signs[0][:, positions].flatten()


class CountSketches(FieldMeans):
    """↑ S(θ_k − w), a Count Sketch of floats
    u ← ρ u + Σ p_k S(θ_k − w),  e ← e + η u     both in the space of sketches
    ↓ Δ, the k largest of e's estimates, and w ← w + Δ on both ends;  then e and u are 0 in the cells of Δ"""

    def __init__(self, task: Task, settings: FetchSGDSettings) -> None:
        dim = task.layout.dim
        self.sketch = CountSketch(dim, settings.rows, max(1, int(settings.columns * dim)), task.seed)
        self._settings, self._answer = settings, max(1, int(settings.answer * dim))
        self.up = Message(0, (Floats("table", prod(self.sketch.shape)),))
        self.down = Message(1, (Floats("values", self._answer), Positions("positions", self._answer, dim)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"table": self.sketch.of(cohort.params - cohort.state["model"])}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        velocity = (self._settings.momentum * server["velocity"].double() + total["table"].result()).float()
        error = (server["error"].double() + self._settings.gain * velocity.double()).float()
        estimates = self.sketch.estimates(error)
        positions = largest_positions(estimates[None], self._answer)[0]
        sent = {"values": estimates[positions], "positions": positions}
        cells = self.sketch.cells_of(positions)
        cleared = {"velocity": velocity.index_fill(0, cells, 0), "error": error.index_fill(0, cells, 0)}
        return {"model": add_at(server["model"], **sent), **cleared}, sent

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        sent = {name: to_device(value, cohort.params.device) for name, value in values.items()}
        return go_on_from(cohort, add_at(cohort.state["model"], **sent))


class FetchSGD(Tracked):
    """Clients send Count Sketches of their updates and keep no residual. The server keeps momentum and the unsent rest
    as sketches, and answers with the largest entries.

    Limits: one row with as many columns as parameters is not FedAvg, because buckets collide; `gain` 0 never moves w.
    """

    name = "fetchsgd"
    paper = "Rothchild et al., ICML 2020"
    personal = False
    about_last_steps = True
    Settings, exchange = FetchSGDSettings, CountSketches

    def server_start(self) -> Tensors:
        nothing = torch.zeros(self.exchanges[0].up.fields[0].shape)
        return {**super().server_start(), "velocity": nothing, "error": nothing}
