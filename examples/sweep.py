"""Choosing settings: every combination of two settings' values, scored on samples that are neither trained nor tested
on; then the chosen ones against the defaults on seeds that took no part in choosing.

    python examples/sweep.py
"""

import pfedlms

QUICK = {"clients": 10, "rounds": 15, "local_steps": 5, "batch_size": 32}

swept = pfedlms.sweep(
    "digits", method="sketchvote", ratio=[0.05, 0.1, 0.2, 0.4], learning_rate=[0.05, 0.1], validation=0.1, **QUICK
)
print(swept)
cell = swept.best()
assert cell is not None
best = cell["settings"]
print(f"chosen: {best}, V-acc {cell['score']:.2f} %\n")

chosen = ("sketchvote", {"ratio": best["method.ratio"], "learning_rate": best["train.learning_rate"]})
print(pfedlms.compare("digits", methods=["local", "sketchvote", chosen], seed=1, seeds=2, **QUICK))
