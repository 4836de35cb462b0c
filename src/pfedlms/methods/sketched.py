"""What `sketchvote` and `sketchmean` share. Clients and server track one model w. Clients send the signs of a sketch of
their update and, every few rounds, a digest of w, which shows whether they hold the server's w."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.consensus import Sketches, refuse_not_finite
from pfedlms.methods.contract import Exchange, Task, Tracked
from pfedlms.settings import setting
from pfedlms.wire import Mask, MaskedBytes, Message
from pfedlms.wire.fields import Field

DIGEST_BYTES = 8
Total = TypeVar("Total")


# Settings of both methods. Each method declares them at its own place, because the order of settings is fixed.
ALLOCATION = partial(
    setting, 1.0, "a: rows of a layer are shared out in proportion to N^a; 1 is the same ratio for every layer",
    minimum=0, maximum=8,
)  # fmt: skip
REFRESH = partial(setting, 1, "h, rounds between fresh sketches; fresh directions every round work best", minimum=1)
CHECK_EVERY = partial(
    setting, 50, "rounds after which a client's message carries a digest of the model it tracks; 0: never", minimum=0
)


class DigestFlag(Mask):
    """Whether a digest follows. The example has none, because most messages have none."""

    def example(self) -> NDArray[np.bool_]:
        return np.zeros(self.shape, dtype=np.bool_)


class SketchedUpdates(Exchange[Total]):
    """An exchange whose clients sketch their updates. Messages up end with two fields, a flag and a digest: if the last
    digest is `check_every` rounds old, 1 and the first 8 bytes of the SHA-256 of the w that the client trained from;
    else 0 and nothing."""

    def __init__(self, task: Task, settings: Any) -> None:
        self._sketches = Sketches(task.layout, settings.ratio, task.seed, settings.refresh, settings.allocation)
        self.sketched = self._sketches.layout, self._sketches.sizes
        self._every = settings.check_every

    def declare(self, up: tuple[Field, ...], down: tuple[Field, ...]) -> None:
        """Set both messages; `up` gets the flag and the digest behind its fields."""
        self.up = Message(0, (*up, DigestFlag("checked", 1), MaskedBytes("digest", "checked", DIGEST_BYTES)))
        self.down = Message(1, down)

    def add_digests(self, cohort: Cohort, round: int, last: Tensor, scales: Tensor) -> tuple[Cohort, Tensors]:
        """The clients after they sent, and the values of flag and digest. `last` is `cohort.state["checked"]`, and
        `scales: [clients, layers]` is the size of their sketches; both are on the host."""
        refuse_not_finite(cohort, scales, round)
        device, model = cohort.params.device, cohort.state["model"]
        due = last + self._every <= round if self._every else torch.zeros_like(last, dtype=torch.bool)
        digests = torch.zeros(len(cohort.ids), DIGEST_BYTES, dtype=torch.uint8)
        if due.any():
            rows = due.flatten().nonzero().flatten()
            digests[rows] = digests_of(model[rows.to(device)])
            cohort = cohort.with_state(checked=torch.where(due, round, last).to(device))
        return cohort, {"checked": due, "digest": digests}

    def in_step(self, server: Tensors, values: Tensors) -> list[bool]:
        checked = values["checked"].flatten()
        if not checked.any():
            return [True] * len(checked)
        return (~checked | (values["digest"] == digests_of(server["model"][None])).all(dim=1)).tolist()


def digests_of(models: Tensor) -> Tensor:
    """The first bytes of the SHA-256 of every model as little-endian float32: `[clients, dim]` → uint8 `[clients, 8]`
    (or `[1, 8]` if all models are equal), on the host."""
    if bool((models.view(torch.int32) == models[0].view(torch.int32)).all()):
        models = models[:1]  # all are equal, and comparing is faster than hashing
    digests = [hashlib.sha256(model.astype("<f4").tobytes()).digest()[:DIGEST_BYTES] for model in models.cpu().numpy()]
    return torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)


class Sketched(Tracked):
    """One model for all; clients train from it and send sketches of their updates."""

    personal = False
    about_last_steps = True
    paper = "a method of this package; see docs/methods.md for what it owes to others"
    server_on_device = True

    @property
    def sketch_sizes(self) -> tuple[int, ...]:
        """m of every layer."""
        assert self.sketched is not None
        return self.sketched[1]

    def agreement(self) -> dict[str, int | float | str]:
        """m of every layer: with an allocation it comes from a power in floating point, which machines may round
        differently."""
        return {"rows": ",".join(map(str, self.sketch_sizes))}

    def client_start(self, cohort: Cohort) -> Cohort:
        """Start with a check in round 0, because the digest of every frame covers w⁰."""
        checked = torch.zeros(len(cohort.ids), 1, dtype=torch.int64, device=cohort.params.device)
        started = super().client_start(cohort)
        # The records of absent clients on disk have this order, see `engine.participation`.
        return replace(started, state={"model": started.state["model"], "checked": checked, **started.state})
