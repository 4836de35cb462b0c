"""Fine-tuning: FedAvg (see `fedavg`), then some local steps from the last average; the baseline of personalisation.
Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated Evaluation of On-device Personalization", 2019.

The paper fine-tunes once, after the last round. Here it happens beside every round and leaves the shared model alone,
so that the curve shows for each round what clients would have if training ended there. It has the learning rate and the
batches of the round's own steps (the paper chooses a rate for it). Running statistics of batch norm go through both
trainings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Objective
from pfedlms.methods.fedavg import Average, FedAvg, FedAvgSettings
from pfedlms.settings import setting


@dataclass(frozen=True)
class FinetuneSettings(FedAvgSettings):
    steps: int = setting(
        40, "E′, local steps from the average, of the model that is evaluated; 0: the average itself", minimum=0
    )


class AverageOfShared(Average):
    """FedAvg's exchange for methods whose clients evaluate another model than the one they send. `state["shared"]` is
    θ_k, the model to send; from the answer to the end of the local steps it is w."""

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        _, values = super().client_send(replace(cohort, params=cohort.state["shared"]), round, work)
        return cohort, values

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        after = super().client_receive(cohort, values, round)
        return after.with_state(shared=after.params)


class Finetune(FedAvg):
    """FedAvg, and E′ more steps from w on the client's own data, whose model is evaluated and then dropped:

        θ_k ← E steps on f_k from w          ↑ θ_k   ↓ w, as `fedavg`
        v_k ← E′ steps on f_k from w         evaluated: v_k

    Messages, bytes and the shared model are FedAvg's. Limits: E′ = E is `fedavg`, whose P-acc is of models after E
    steps; E′ = 0 evaluates w itself, so that P-acc is G-acc (but for running statistics of batch norm).
    """

    name = "finetune"
    paper = "Wang et al., 2019"
    Settings, exchange = FinetuneSettings, AverageOfShared

    def client_start(self, cohort: Cohort) -> Cohort:
        return cohort.with_state(shared=cohort.params)

    def client_rest(self, cohort: Cohort) -> Cohort:
        return replace(super().client_rest(cohort), state={})  # θ_k was sent, and the next answer is w

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        tuned = cohort.with_model(cohort.state["shared"])
        if self.settings.steps == self.task.local_steps and not self.task.local_epochs:
            tuned = cohort  # E steps from w are those just taken
        elif self.settings.steps:
            tuned, _ = work.train(tuned, Objective(), phase, self.settings.steps)
        return tuned.with_state(shared=cohort.params)
