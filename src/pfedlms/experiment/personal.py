"""A model for a new device: what a client gets that joins after the last round, after its first local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedlms.data import FederatedData, Pool, read, texts
from pfedlms.data.pool import class_numbers
from pfedlms.data.text import KINDS
from pfedlms.errors import DataError
from pfedlms.experiment.exporting import Models
from pfedlms.experiment.problem import Problem, as_the_model_takes_them, checked_outputs


def personalise(
    models: Models, summary: Mapping[str, Any], problem: Problem, data: Any, local_steps: int | None = None
) -> nn.Module:
    """See `Run.personalise`."""
    federation, config = models.federation, models.config
    held = _one_client(_given(data, summary, config.data.stride, federation.data, problem), federation.data, summary)
    if held.shape != federation.data.shape:
        raise DataError(f"data: got samples of shape {held.shape}, expected {federation.data.shape}, as the run had")
    held = as_the_model_takes_them(federation.model.module, held)
    criterion = problem.criterion(checked_outputs(federation.model, held, config), held)
    return models.personalised(held.to(federation.model.device), criterion, local_steps)


def _given(data: Any, summary: Mapping[str, Any], stride: int, like: FederatedData, problem: Problem) -> Pool:
    """The device's data, read; a text is cut as the run's."""
    if not isinstance(data, str):
        return read(data if isinstance(data, Pool) else [data], problem.loss is not None, all_clients=False)
    kind = summary.get("tokens")
    if kind not in KINDS:
        remedy = (
            "pass pfedlms.data.texts({'me': text}, tokens=tokenizer)" if kind else "pass samples and labels, (x, y)"
        )
        raise DataError(f"data: got a text, but the run was not trained on characters or bytes; {remedy}")
    return texts({"data": data}, kind, like.shape[0], stride, vocabulary=summary["classes"])


def _one_client(pool: Pool, like: FederatedData, summary: Mapping[str, Any]) -> FederatedData:
    """All samples of the device, or of (train, test) those of train, to be trained on."""
    names = tuple(summary.get("classes") or map(str, range(like.classes)))
    if pool.tokens and pool.names != names:
        raise DataError("data: got another vocabulary than the run's; pass the text itself, or vocabulary=run.classes")
    if like.classes and not pool.tokens:
        pool = replace(pool, y=class_numbers(pool, names), classes=len(names), names=names)
    own = pool.held[0] if pool.held else np.arange(len(pool.y))
    train = own[0] if isinstance(own, tuple) else own
    x, y = torch.from_numpy(pool.x), torch.from_numpy(pool.y)
    return FederatedData(x, y, (train,), (train,), pool.classes, names=pool.names, tokens=pool.tokens)
