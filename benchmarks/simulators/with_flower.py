"""Flower's simulation: Ray's workers run the clients, with one CPU each."""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import given_work

work = given_work()
app, server = ClientApp(), ServerApp()


@app.train()
def train(message, context):
    module = work.module()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    module.to(work.device).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=work.rate)
    round = message.content["config"]["server-round"] - 1
    for x, y in work.batches(context.node_config["partition-id"], round):
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
    reply = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": work.steps * work.batch}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(work.module().state_dict()),
        num_rounds=work.rounds,
        evaluate_fn=lambda round, arrays: work.round_ended() if round else None,
    )
    work.finished(torch.cat([value.flatten() for value in result.arrays.to_torch_state_dict().values()]))


resources = {"init_args": {"num_cpus": work.parallel}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
run_simulation(server, app, num_supernodes=work.clients, backend_config=resources)
