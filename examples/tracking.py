"""Following a run: a custom callback, and TensorBoard where it is installed (extra: tracking).

python examples/tracking.py          # then, if it is: tensorboard --logdir tb
"""

from importlib.util import find_spec

import pfedlms


class Best(pfedlms.Callback):
    """Prints an evaluation that is better than all before it; any object with these methods will do."""

    def __init__(self):
        self.reached = {}

    def on_evaluation(self, run, record):
        if record["p_acc"] > self.reached.get(run.name, 0):
            self.reached[run.name] = record["p_acc"]
            print(f"{run.name}: round {record['round']:2}, P-acc {record['p_acc']:.2f} %")

    def on_end(self, run, summary):
        print(f"{run.name}: {summary['status']}, {summary['total_bytes'] / 2**20:.2f} MiB")


callbacks = [Best()]
if find_spec("tensorboard"):
    callbacks.append(pfedlms.tracking.TensorBoard("tb"))
pfedlms.compare("digits", methods="fedavg,fedavg:server_step=0.5", seeds=1, clients=10, rounds=10, callbacks=callbacks)
