"""The pieces as a library: sketch vectors, agree on thresholds, vote, count the bits that travel, and follow the vote.

python examples/pieces.py
"""

from __future__ import annotations

import torch

from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.pull import Pull
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of
from pfedlms.sketch import Sketch
from pfedlms.wire import pack, unpack


def main() -> None:
    common = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    vectors = common + 0.3 * torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    samples = [100, 80, 120, 60, 90]

    sketch = Sketch.of_vector(1000, ratio=0.25, seed=7)
    sketched = sketch.forward(vectors)
    mean, deviation = pool_statistics(samples, *statistics(sketched, sketch.sizes))
    thresholds = thresholds_of(mean, deviation, normal_quantiles(7))
    symbols = symbols_of(sketched, thresholds, sketch.sizes)

    vote = Vote(sketch.size, thresholds=7)
    sent = 0
    for weight, own in zip(samples, symbols, strict=True):
        packed = pack(own, levels=8)
        sent += len(packed)
        vote.add(unpack(packed, sketch.size, levels=8), weight)
    print(f"{sketch}, {vote}")
    print(f"{sketch.size} sketch entries a client, {sent} bytes from {len(samples)} clients")

    truth = symbols_of(sketch.forward(common), thresholds, sketch.sizes).numpy()
    agree = abs(vote.result().astype(int) - truth.astype(int)) <= 1
    print(f"the vote is within one interval of the common vector in {100 * agree.mean():.1f} % of entries")

    # A zero vector moves towards the consensus. Each row is one vector; a NumPy array works, too.
    pull = Pull(sketch, thresholds, deviation, vote.result(), strength=0.05, smoothing=0.1)
    follower = torch.zeros(1000)
    for _ in range(400):
        follower -= 0.5 * pull.gradient(follower)
    inside = symbols_of(sketch.forward(follower), thresholds, sketch.sizes).numpy() == vote.result()
    print(f"pulled from zero, {100 * inside.mean():.1f} % of its entries lie in the interval the vote chose")

    # The sketch is differentiable: the gradient of ‖Φx‖²/2 is ΦᵀΦx.
    x = common.clone().requires_grad_()
    (sketch.forward(x).square().sum() / 2).backward()
    assert x.grad is not None
    apart = (x.grad - sketch.adjoint(sketch.forward(common))).norm() / x.grad.norm()
    print(f"autograd and the adjoint differ by {100 * apart:.4f} %")


if __name__ == "__main__":
    main()
