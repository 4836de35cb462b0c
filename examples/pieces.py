"""The pieces as a library: sketch a vector, agree on thresholds, vote, and count the bits that travel.

python examples/pieces.py
"""

from __future__ import annotations

import torch

from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.models import Layer, Layout
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of
from pfedlms.sketch import Sketch
from pfedlms.wire import pack, unpack


def main() -> None:
    layout = Layout((), (Layer("weights", 0, 1000),))
    common = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    vectors = common + 0.3 * torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    samples = [100, 80, 120, 60, 90]

    sketch = Sketch(layout, ratio=0.25, seed=7, epoch=0)
    sketched = sketch.forward(vectors)
    means, variances = statistics(sketched, sketch.sizes)
    mean, deviation = pool_statistics(samples, means.numpy(), variances.numpy())
    thresholds = torch.from_numpy(thresholds_of(mean, deviation, normal_quantiles(7)))
    symbols = symbols_of(sketched, thresholds, sketch.sizes).numpy()

    vote = Vote(sketch.size, thresholds=7)
    sent = 0
    for weight, own in zip(samples, symbols, strict=True):
        packed = pack(own, levels=8)
        sent += len(packed)
        vote.add(unpack(packed, sketch.size, levels=8), weight)
    consensus = vote.result()

    truth = symbols_of(sketch.forward(common[None]), thresholds, sketch.sizes)[0].numpy()
    agree = abs(consensus.astype(int) - truth.astype(int)) <= 1
    print(f"{sketch.size} sketch entries a client, {sent} bytes from {len(samples)} clients")
    print(f"the vote is within one interval of the common vector in {100 * agree.mean():.1f} % of entries")


if __name__ == "__main__":
    main()
