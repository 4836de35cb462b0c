"""How a client that was away gets the model that its method tracks."""

from __future__ import annotations

from typing import Any

import torch

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort
from pfedlms.methods.contract import Exchange
from pfedlms.wire.fields import Message
from pfedlms.wire.frames import SERVER, Received, frame


class Answers:
    """The latest answers of a method whose ends track a model, by round: as many as are fewer bytes than the model."""

    def __init__(self, model_bytes: int, frames: dict[int, bytes] | None = None) -> None:
        self._model_bytes = model_bytes
        self.frames = dict(frames or {})

    def add(self, round: int, frame: bytes) -> None:
        self.frames[round] = frame
        while sum(map(len, self.frames.values())) > self._model_bytes and len(self.frames) > 1:
            del self.frames[min(self.frames)]

    def missed(self, since: int, until: int) -> dict[int, bytes] | None:
        """The answers of rounds since .. until − 1, or None where the model is fewer bytes."""
        if any(number not in self.frames for number in range(since, until)):
            return None
        frames = {number: self.frames[number] for number in range(since, until)}
        return frames if sum(map(len, frames.values())) <= self._model_bytes else None


def from_server(message: Message, arrays: dict[str, Any], number: int, digest: bytes) -> bytes:
    """A frame of the server's."""
    return bytes(frame(message, arrays, round=number, sender=SERVER, samples=0, digest=digest))


def catching_up(
    since: int, round: int, answers: Answers, down: Message, model: Message, w: torch.Tensor, digest: bytes
) -> tuple[dict[int, bytes], Message]:
    """What a client that knows the answers of rounds below `since` is sent before round `round`, by round, and the
    message it is: the answers it missed, or the model `w` they lead to where that is fewer bytes."""
    frames = answers.missed(since, round)
    if frames is not None:
        return frames, down
    return {round - 1: from_server(model, {"model": w.cpu().numpy()}, round - 1, digest)}, model


def took_in(exchange: Exchange[Any], cohort: Cohort, received: Received, number: int, is_model: bool) -> Cohort:
    """Clients after an answer of a round, or after the model that the answers up to it lead to."""
    values = {name: torch.from_numpy(value) for name, value in received.values.items()}
    if is_model:
        own = to_device(values["model"], cohort.params.device)
        return cohort.with_state(model=own.expand_as(cohort.params).clone())
    return exchange.client_receive(cohort, values, number)
