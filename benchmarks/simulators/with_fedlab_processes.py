"""FedLab, across processes: rank 0 is the server, every other rank simulates a share of the clients."""

import os

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from work import flat, given_work

work = given_work(threads=1)
rank, share = int(os.environ["RANK"]), work.clients // work.parallel
network = DistNetwork(("127.0.0.1", os.environ["PORT"]), world_size=work.parallel + 1, rank=rank)


class Dataset:
    calls = 0

    def get_dataloader(self, client, batch_size):
        round, self.calls = self.calls // share, self.calls + 1
        return work.batches((rank - 1) * share + client, round)


class Handler(SyncServerHandler):
    def global_update(self, buffer):
        super().global_update(buffer)
        work.round_ended()


if rank:
    trainer = SGDSerialClientTrainer(work.module(), share)
    trainer.setup_dataset(Dataset())
    trainer.setup_optim(epochs=1, batch_size=work.batch, lr=work.rate)
    PassiveClientManager(network, trainer).run()
else:
    handler = Handler(work.module(), work.rounds, sample_ratio=1.0)
    SynchronousServerManager(network, handler).run()
    work.finished(flat(handler.model))
