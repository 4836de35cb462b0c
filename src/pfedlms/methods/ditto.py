"""Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

Algorithm 1 of the paper with FedAvg as its global solver, and where this differs: the mean is weighted by N_k (the
authors' code draws clients by N_k instead); the s = E personal steps see the batches of the shared model's steps, as in
the authors' code, but each round's start with zero momentum. A client that takes part for the first time starts v_k
from w⁰, as in the authors' code. λ is one for all clients and rounds: the paper also lets each client choose it on
validation data. What the paper does against attacks is not part of it; see `train.max_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pfedlms.cohort import Cohort
from pfedlms.methods.contract import ClientWork, Objective, PerClient
from pfedlms.methods.fedavg import FedAvg, FedAvgSettings
from pfedlms.methods.fedprox import Proximal
from pfedlms.methods.finetune import AverageOfShared
from pfedlms.settings import setting


@dataclass(frozen=True)
class DittoSettings(FedAvgSettings):
    strength: float = setting(
        0.1, "λ, the pull of the personal models towards w; 0 is `local`, with plain SGD", minimum=0
    )


class Ditto(FedAvg):
    """FedAvg, and a second, personal model v_k, which the client never sends:

        θ_k ← E steps on f_k from w                              ↑ θ_k   ↓ w, as `fedavg`
        v_k ← E steps on f_k(v) + λ/2 ‖v − w‖² from v_k          evaluated: v_k

    Messages, bytes and w are FedAvg's; a client keeps v_k and takes 2 E steps in a round. Limits: λ = 0 makes v_k the
    model of `local`, to the bit with plain SGD and without batch norm (momentum of v_k begins at zero in every round,
    and both models of a client share running statistics); w does not depend on λ. λ η > 2 diverges.
    """

    name = "ditto"
    paper = "Li et al., ICML 2021"
    personal = True
    Settings, exchange = DittoSettings, AverageOfShared

    def client_start(self, cohort: Cohort) -> Cohort:
        return cohort.with_state(shared=cohort.params, own=cohort.params)

    def client_rest(self, cohort: Cohort) -> Cohort:
        return replace(cohort.without_model(), state={"own": cohort.state["own"]})

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        w, strength = cohort.state["shared"], self.settings.strength
        pull = Proximal(PerClient(w), strength) if strength else Objective()
        personal, _ = work.train(cohort.with_model(cohort.state["own"]), pull, phase)
        return personal.with_state(shared=cohort.params, own=personal.params)
