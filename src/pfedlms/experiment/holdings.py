"""Who holds what under a configuration, before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedlms.data.schemes import scheme_of
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import dealt, named_pool


def holdings(config: Config) -> dict[str, Any]:
    """The data set, how it was partitioned, and of every client the samples of each part, and how many samples, or of
    text tokens, it has of each class."""
    pool = named_pool(config)
    data = dealt(config, pool)
    scheme = scheme_of(config.data.partition, pool.owner)
    parts = {"train": data.train, "test": data.test, **({"validation": data.validation} if data.validation else {})}
    labels = data.y.numpy()
    clients = []
    for client in range(data.clients):
        held = {part: own[client] for part, own in parts.items()}
        counts = np.bincount(labels[np.concatenate(list(held.values()))].reshape(-1), minlength=data.classes)
        name = data.client_names[client] if data.client_names else str(client)
        sizes = {part: len(own) for part, own in held.items()}
        clients.append({"client": client, "name": name, **sizes, "classes": counts.tolist()})
    return {
        "dataset": config.data.dataset,
        "samples": len(labels),
        "shape": list(data.shape),
        "partition": scheme,
        **({"alpha": config.data.alpha} if scheme in ("dirichlet", "quantity") else {}),
        "seed": config.run.seed,
        **({"unit": "tokens"} if data.tokens else {}),
        "classes": [repr(name)[1:-1] for name in pool.names or map(str, range(data.classes))],
        "clients": clients,
    }
