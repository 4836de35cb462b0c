"""Whether a client tracks the server's model: from time to time its message carries a digest of its w."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.wire import Mask, MaskedBytes

DIGEST_BYTES = 8


class Due(Mask):
    """Whether a digest follows. Messages are measured without one, the usual case."""

    def example(self) -> NDArray[np.bool_]:
        return np.zeros(self.shape, dtype=np.bool_)


class ModelCheck:
    """The last two fields of a client's message. After `every` rounds without a check: 1 and the first 8 bytes of the
    SHA-256 of the w it trained from; else 0 and nothing. With `every` 0 no client is ever checked."""

    fields = (Due("checked", 1), MaskedBytes("digest", "checked", DIGEST_BYTES))

    def __init__(self, every: int) -> None:
        self._every = every

    @staticmethod
    def client_start(cohort: Cohort) -> Cohort:
        """Clients count as checked in round 0, because the digest of every frame covers w⁰."""
        checked = torch.zeros(len(cohort.ids), 1, dtype=torch.int64, device=cohort.params.device)
        return cohort.with_state(checked=checked)

    def client_send(self, cohort: Cohort, round: int, last: Tensor) -> tuple[Cohort, Tensors]:
        """The clients after that, and the values of the fields; `last` is `cohort.state["checked"]` on the host."""
        device, model = cohort.params.device, cohort.state["model"]
        due = last + self._every <= round if self._every else torch.zeros_like(last, dtype=torch.bool)
        digests = torch.zeros(len(cohort.ids), DIGEST_BYTES, dtype=torch.uint8)
        if due.any():
            rows = due.flatten().nonzero().flatten()
            digests[rows] = digests_of(model[rows.to(device)])
            cohort = cohort.with_state(checked=torch.where(due, round, last).to(device))
        return cohort, {"checked": due, "digest": digests}

    @staticmethod
    def in_step(server: Tensors, values: Tensors) -> list[bool]:
        """Whether each sender has the server's w, as far as its message shows."""
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
