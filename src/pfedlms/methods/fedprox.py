"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Algorithm 2 of the paper, and where this differs: the inexact local solution is E steps for all clients (the paper lets
slow devices take fewer, as `train.local_epochs` does by their samples); clients are drawn uniformly and weighted by
N_k, as in FedAvg and in the authors' code (the paper draws them by N_k and weights them uniformly); phase 0 has no
pull, as for every method.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfedlms.cohort import Cohort
from pfedlms.methods.contract import Objective, PerClient
from pfedlms.methods.fedavg import FedAvg, FedAvgSettings
from pfedlms.settings import setting


@dataclass(frozen=True)
class FedProxSettings(FedAvgSettings):
    strength: float = setting(0.1, "μ of the paper, the pull towards w; 0 is `fedavg` exactly", minimum=0)


@dataclass(frozen=True)
class Proximal(Objective):
    """The task's loss + λ/2 ‖θ − w‖²."""

    anchor: PerClient
    """w, `[clients, dim]`."""
    strength: float

    def gradient(self, params: Tensor) -> Tensor:
        return self.strength * (params - self.anchor.value)


class FedProx(FedAvg):
    """FedAvg whose local steps are pulled towards the model they start from:

        θ_k ≈ argmin  f_k(θ) + μ/2 ‖θ − w‖²,  E steps from w

    Messages, bytes and the server are FedAvg's. Limits: μ = 0 is `fedavg`, to the bit. A pull with μ η > 2 diverges.
    """

    name = "fedprox"
    paper = "Li et al., MLSys 2020"
    Settings = FedProxSettings

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.strength == 0:
            return Objective()
        return Proximal(PerClient(cohort.params), self.settings.strength)
