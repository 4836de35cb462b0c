"""What `sketchvote` and `sketchmean` share: clients send signs of a sketch of their update to w, which all ends track,
and from time to time a digest of w that shows whether they do."""

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
from pfedlms.errors import DivergedError
from pfedlms.methods.consensus import Sketches
from pfedlms.methods.contract import Exchange, Task, Tracked
from pfedlms.settings import setting
from pfedlms.wire import Mask, MaskedBytes, Message
from pfedlms.wire.fields import Field

DIGEST_BYTES = 8
Total = TypeVar("Total")


# Settings of both methods; where they stand among the others is part of the order of all.
ALLOCATION = partial(
    setting, 1.0, "a: rows of a layer are shared out in proportion to N^a; 1 is the same ratio for every layer",
    minimum=0, maximum=8,
)  # fmt: skip
REFRESH = partial(setting, 1, "h, rounds between fresh sketches; fresh directions every round work best", minimum=1)
CHECK_EVERY = partial(
    setting, 50, "rounds after which a client's message carries a digest of the model it tracks; 0: never", minimum=0
)


class Due(Mask):
    """Whether a digest follows. Messages are measured without one, the usual case."""

    def example(self) -> NDArray[np.bool_]:
        return np.zeros(self.shape, dtype=np.bool_)


class SketchedUpdates(Exchange[Total]):
    """An exchange whose clients sketch their updates. Messages up end with two fields: after `check_every` rounds
    without a check 1 and the first 8 bytes of the SHA-256 of the w a client trained from; else 0 and nothing."""

    def __init__(self, task: Task, settings: Any, up: tuple[Field, ...], down: tuple[Field, ...]) -> None:
        self._sketches, self._every = sketches_of(task, settings), settings.check_every
        self.sketched = self._sketches.layout, self._sketches.sizes
        self.up = Message(0, (*up, Due("checked", 1), MaskedBytes("digest", "checked", DIGEST_BYTES)))
        self.down = Message(1, down)

    def checked(self, cohort: Cohort, round: int, last: Tensor, scales: Tensor) -> tuple[Cohort, Tensors]:
        """The clients after they sent, and the values of the last two fields. `last` is `cohort.state["checked"]` and
        `scales: [clients, layers]` the size of their sketches, both on the host."""
        fine = torch.isfinite(scales).all(dim=1).tolist()  # any number in an update that is not finite makes them so
        if not all(fine):
            raise DivergedError(
                f"round {round + 1}: the update of client {cohort.ids[fine.index(False)]} is not finite or too large "
                "to be sketched; lower train.learning_rate or method.gain"
            )
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
    """The first bytes of SHA-256 of every model, as little-endian float32: `[clients, dim]` → uint8 `[clients, 8]`, on
    the host."""
    if bool((models.view(torch.int32) == models[0].view(torch.int32)).all()):
        models = models[:1]  # all are equal, and hashing takes longer than comparing
    digests = [hashlib.sha256(own.astype("<f4").tobytes()).digest()[:DIGEST_BYTES] for own in models.cpu().numpy()]
    return torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)


def sketches_of(task: Task, settings: Any) -> Sketches:
    return Sketches(task.layout, settings.ratio, task.seed, settings.refresh, settings.allocation)


class Sketched(Tracked):
    """One model for all; clients train from it and send sketches of their updates."""

    personal = False
    about_last_steps = True
    paper = "a method of this package; see docs/methods.md for what it owes to others"
    server_on_device = True

    def agreement(self) -> dict[str, int | float | str]:
        """With an allocation m comes from a power in floating point, so both ends compare their results."""
        assert self.sketched is not None
        return {"rows": ",".join(map(str, self.sketched[1]))}

    def client_start(self, cohort: Cohort) -> Cohort:
        """Clients count as checked in round 0, because the digest of every frame covers w⁰."""
        checked = torch.zeros(len(cohort.ids), 1, dtype=torch.int64, device=cohort.params.device)
        started = super().client_start(cohort)
        # Records of absent clients on the disk have this order, see `engine.participation`.
        return replace(started, state={"model": started.state["model"], "checked": checked, **started.state})
