"""Server optimisers: they turn the clients' mean update into the step of the model.

Step and momentum (FedAvgM): Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", 2019. FedAdam and FedYogi: Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    sgd     u ← β u + Δ                 step η u
    adam    u ← β u + (1 − β) Δ         v ← β₂ v + (1 − β₂) Δ²                      step η u / (√v + ε)
    yogi    u ← β u + (1 − β) Δ         v ← v − (1 − β₂) Δ² sign(v − Δ²)            step η u / (√v + ε)

u begins with 0 and v with ε² (the paper's τ²), without bias correction, as in Algorithm 2 of Reddi et al.; the authors'
experiments ran optimisers of Keras, whose v begins with 0 and which correct the bias. Where this differs from both: β
is 0 unless it is set. Δ is weighted by N_k, as in their experiments (`train.weights = uniform` is the algorithm's).
Momentum of sgd is the equation of Hsu et al., without Nesterov's acceleration, which their experiments have.

Everything is computed in float64, entry by entry; u and v are stored as float32. Only the server computes this, so
clients need not agree on it to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.cohort import Tensors
from pfedlms.settings import setting


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of every method with a server optimiser, besides its step η."""

    server_momentum: float = setting(
        0.0, "β, the server's momentum; 0 with sgd has none", minimum=0, below=1, server_only=True
    )
    server_optimizer: str = setting(
        "sgd",
        "what makes a step of the mean update: sgd, adam or yogi",
        choices=lambda: ["sgd", "adam", "yogi"],
        server_only=True,
    )
    server_decay: float = setting(0.99, "β₂ of adam and yogi", minimum=0, below=1, server_only=True)
    server_epsilon: float = setting(
        1e-3, "ε of adam and yogi: no step is longer than η u / ε", above=0, server_only=True
    )


class ServerOptimizer:
    """Turns a mean update into a step by the equations above."""

    def __init__(self, step: float = 1.0, settings: ServerSettings | None = None) -> None:
        self._step, self._settings = step, settings or ServerSettings()

    @property
    def is_plain(self) -> bool:
        """Whether a step is the mean update itself."""
        return self._step == 1 and self._settings.server_momentum == 0 and self._settings.server_optimizer == "sgd"

    def start(self, like: Tensor) -> Tensors:
        """The optimiser's first state for vectors like `like`; empty if a step is the mean update itself."""
        settings = self._settings
        if settings.server_optimizer == "sgd":
            return {} if self.is_plain else {"update": torch.zeros_like(like)}
        return {"update": torch.zeros_like(like), "square": torch.full_like(like, settings.server_epsilon**2)}

    def step(self, server: Tensors, mean: Tensor) -> tuple[Tensors, Tensor]:
        """The optimiser's next state, which is part of the server's, and the step for a mean update: `[dim]`,
        float64."""
        if self.is_plain:
            return {}, mean
        settings = self._settings
        beta, decay, u = settings.server_momentum, settings.server_decay, server["update"].double()
        if settings.server_optimizer == "sgd":
            u = beta * u + mean
            return {"update": u.float()}, self._step * u
        u, v, square = beta * u + (1 - beta) * mean, server["square"].double(), mean * mean
        if settings.server_optimizer == "adam":
            v = decay * v + (1 - decay) * square
        else:
            v = v - (1 - decay) * square * torch.sign(v - square)
        return {"update": u.float(), "square": v.float()}, self._step * u / (v.sqrt() + settings.server_epsilon)
