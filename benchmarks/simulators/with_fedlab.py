"""FedLab, standalone: one process simulates all clients."""

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from work import flat, given_work

work = given_work()


class Dataset:
    def get_dataloader(self, client, batch_size):
        return work.batches(client, len(work.stamps))


class Pipeline(StandalonePipeline):
    def evaluate(self):
        work.round_ended()


gpu = {"cuda": work.device == "cuda", "device": work.device}
trainer = SGDSerialClientTrainer(work.module(), work.clients, **gpu)
trainer.setup_dataset(Dataset())
trainer.setup_optim(epochs=1, batch_size=work.batch, lr=work.rate)
handler = SyncServerHandler(work.module(), work.rounds, sample_ratio=1.0, **gpu)
Pipeline(handler, trainer).main()
work.finished(flat(handler.model))
