"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017.

The server's step, momentum, Adam and Yogi: see `server_optimizer`.

Choices where the papers are silent: E steps of one mini-batch each instead of epochs; clients' momentum is zero after
every average; running statistics of batch norm stay with their clients unless they are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Method, Task
from pfedlms.methods.server_optimizer import ServerOptimizer, ServerSettings
from pfedlms.settings import setting
from pfedlms.wire.fields import Floats, Message


@dataclass(frozen=True)
class FedAvgSettings(ServerSettings):
    share_statistics: bool = setting(
        False, "average the running statistics of batch norm too, and count their bytes; otherwise they stay local"
    )
    server_step: float = setting(
        1.0, "η, the server's step along its clients' mean update; 1 with momentum 0 is FedAvg", above=0
    )
    # As in `ServerSettings`, but part of the digest of messages, as in all earlier versions.
    server_momentum: float = setting(
        0.0, "β, the server's momentum (FedAvgM); 0 with step 1 is FedAvg", minimum=0, below=1
    )


class Average(FieldMeans):
    """↑ θ_k      ↓ w = Σ p_k θ_k      then θ_k ← w; shared running statistics are sent with the model

    With a server optimiser: ↓ w ← w + step(Σ p_k θ_k − w); statistics are averaged as before.
    """

    def __init__(self, task: Task, settings: FedAvgSettings) -> None:
        self._optimizer = ServerOptimizer(settings.server_step, settings)
        self._statistics = task.statistics if settings.share_statistics else ()
        size = sum(size for _, size in self._statistics)
        fields = Floats("model", task.layout.dim), *([Floats("statistics", size)] if size else [])
        self.up, self.down = (Message(kind, fields) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        if not self._statistics:
            return cohort, {"model": cohort.params}
        statistics = [cohort.buffers[name].flatten(1) for name, _ in self._statistics]
        return cohort, {"model": cohort.params, "statistics": torch.cat(statistics, dim=1)}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        means = {name: mean.result() for name, mean in total.items()}
        if server:
            moments, step = self._optimizer.step(server, means["model"] - server["model"])
            means["model"] = server["model"] + step
            server = {"model": means["model"].float(), **moments}
        return server, {name: mean.float() for name, mean in means.items()}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        after = cohort.with_model(values["model"])
        if not self._statistics:
            return after
        statistics = to_device(values["statistics"], cohort.params.device)
        parts = torch.split(statistics, [size for _, size in self._statistics])
        shared = {
            name: part.view(cohort.buffers[name].shape[1:]).expand_as(cohort.buffers[name]).clone()
            for (name, _), part in zip(self._statistics, parts, strict=True)
        }
        return replace(after, buffers={**cohort.buffers, **shared})


class FedAvg(Method):
    """The server averages the clients' models every round, and all clients continue from the average.

    Sends n float32 up and n down. With one local step per round and full batches it is distributed gradient descent,
    with the server's momentum β. η = 1 and β = 0 take the mean itself, and the server has no state.
    """

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    personal = False
    about_last_steps = True
    Settings, exchange = FedAvgSettings, Average

    def server_start(self) -> Tensors:
        moments = ServerOptimizer(self.settings.server_step, self.settings).start(self.task.initial)
        return {"model": self.task.initial, **moments} if moments else {}

    def global_model(self, cohort: Cohort) -> Tensor | None:
        return cohort.params
