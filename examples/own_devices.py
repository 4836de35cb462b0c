"""Your own clients: every device brings its training and test data, and gets its own model back.

python examples/own_devices.py
"""

from __future__ import annotations

import numpy as np
from torch import nn

import pfedlms


def readings(device: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Made-up sensors: eight readings, three states; every device sits a little differently and sees other states."""
    random = np.random.default_rng(device)
    states = random.choice(3, size=160, p=np.roll([0.6, 0.3, 0.1], device))
    centres = np.random.default_rng(99).normal(size=(3, 8))
    values = centres[states] + 0.3 * random.normal(size=8) + 0.6 * random.normal(size=(160, 8))
    return (values[:60], states[:60]), (values[60:], states[60:])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 31), nn.ReLU(), nn.Linear(31, 3))


def main() -> None:
    clients = [readings(device) for device in range(12)]
    for method in ("local", "pfedlms", "fedavg"):
        settings = {"strength": 0.05} if method == "pfedlms" else {}
        result = pfedlms.run(
            clients, network, method=method, rounds=30, local_steps=5, batch_size=16, learning_rate=0.1, **settings
        )
        per_round = sum(result.summary["bytes_per_round"].values()) / len(clients)
        print(f"{method:8s} {result.accuracy:5.1f} %   {per_round:7,.0f} bytes a device and round")
    model = network()
    model.load_state_dict(result.models[0])
    print("device 0 has its model:", sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
