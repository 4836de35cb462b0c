"""OBCSAA: Fan, Wang, Huo, Tian, "1-Bit Compressive Sensing for Efficient Federated Learning Over the Air", IEEE
Transactions on Wireless Communications, 2023. Run here digitally and without noise.

Choices where the paper is silent: what is made sparse is the update of E local steps; means are weighted by N_k; the
size of the step is the weighted mean of the clients' norms, 32 bits each; clients keep the κ entries that the decoder
looks for; Φ is a Hadamard sketch, fixed for the run. The default decoder is made for the mean of several clients'
signs. The paper's, binary iterative hard thresholding (`decoder = "biht"`), is made for the signs of one vector: given
such a mean it wanders.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, pi, sqrt

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.consensus import Sketches
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Task, Tracked, go_on_from
from pfedlms.methods.sparse import largest_positions
from pfedlms.settings import setting
from pfedlms.sketch import Sketch
from pfedlms.wire import Floats, Message, Scalar, Signs


@dataclass(frozen=True)
class OBCSAASettings:
    ratio: float = setting(0.1, "m / n, measurements (bits) per parameter", above=0, maximum=1)
    sparsity: float = setting(
        0.1,
        "κ / n, share of the update's largest entries that is kept, and that the decoder looks for",
        above=0,
        maximum=1,
    )
    iterations: int = setting(
        10, "steps of the decoder after its first, which takes the κ largest entries of Φᵀȳ; 0: that alone", minimum=0
    )
    decoder: str = setting(
        "averages",
        "averages: made for the mean of several clients' signs; biht: binary iterative hard thresholding, the paper's",
        choices=lambda: ["averages", "biht"],
        optional=True,
    )
    downlink: str = setting(
        "model",
        "model: w, 32 bits each; sum: the weighted sum of the signs, 32 bits per measurement",
        choices=lambda: ["model", "sum"],
    )


def keep_largest(x: Tensor, count: int) -> Tensor:
    """top_κ: x `[rows, dim]` with all but the `count` entries of largest magnitude of each row set to zero. With equal
    weights many entries of Φᵀȳ are alike; of these the first are kept, on every machine."""
    positions = largest_positions(x, count)
    return torch.zeros_like(x).scatter_(1, positions, x.gather(1, positions))


def decode_mean_of_signs(sketch: Sketch, mean: Tensor, sparsity: int, iterations: int) -> Tensor:
    """Direction of the clients' mean update from the mean of their signs, ȳ: `[1, m]` → unit vector `[1, dim]`, or zero
    if ȳ is zero.

        x ← top_κ(x + (Φᵀ(ȳ − tanh(√m Φx))/√m − αx) / (N/m + α)) from x = 0, then x/‖x‖

    The first step takes the largest entries of Φᵀȳ. With a sign in place of tanh and without α this is binary iterative
    hard thresholding (Jacques, Laska, Boufounos, Baraniuk, IEEE Trans. Inf. Theory 2013). It comes near that where all
    clients agree and κ is far below m: x grows and tanh becomes a sign. Where clients disagree, ȳ is small and nearly
    linear in Φx̄, x̄ = Σ p_k x_k/‖x_k‖ (for a normal φ, E[sign⟨φ, x⟩ φ] = √(2/π) x/‖x‖), and x stays where tanh is
    linear. There a sign in place of tanh would push back even where it is right.

    It is a descent on Σ [log cosh(√m Φx) − ȳ √m Φx]/m + α/2 ‖x‖², a regression with probabilities (1 + ȳ)/2 of +1; as
    ‖Φ‖² ≤ N/m, no step makes that larger. α = (π/2) κ/m weighs κ normal entries against all the noise there can be
    among clients that do not oppose each other: the distortion of a sign, 1 − 2/π of its variance, and the entries of
    x̄ that are not kept, at most the other 2/π. Without it the steps fit noise where κ is near m.
    """
    root, alpha = sqrt(sketch.size), pi / 2 * sparsity / sketch.size
    step = 1 / (1 / sketch.shape.places[0].share + alpha)
    x = mean.new_zeros(1, sketch.dim)
    for _ in range(1 + iterations):
        residual = (mean - torch.tanh(root * sketch.forward(x))) / root
        x = keep_largest((1 - step * alpha) * x + step * sketch.adjoint(residual), sparsity)
    return normalize(x, dim=1)


def decode_by_thresholding(sketch: Sketch, mean: Tensor, sparsity: int, iterations: int) -> Tensor:
    """The same direction by the paper's decoder, binary iterative hard thresholding (Jacques et al.):

    x ← top_κ(x + Φᵀ(ȳ − sign(Φx))) from x = 0, then x/‖x‖
    """
    x = mean.new_zeros(1, sketch.dim)
    for _ in range(1 + iterations):
        x = keep_largest(x + sketch.adjoint(mean - torch.sign(sketch.forward(x))), sparsity)
    return normalize(x, dim=1)


DECODERS = {"averages": decode_mean_of_signs, "biht": decode_by_thresholding}


class SparseDirections(FieldMeans):
    """↑ sign(Φ top_κ(w − θ_k)) and its norm      ↓ w ← w − (Σ p_k ‖·‖) · direction decoded from Σ p_k sign(·)

    With `downlink = "sum"` the server sends the mean of the signs, and the clients decode it; both give the same w.
    """

    def __init__(self, task: Task, settings: OBCSAASettings) -> None:
        self._settings = settings
        dim = task.layout.dim
        self._sparsity = max(1, floor(settings.sparsity * dim))
        self._sketches = Sketches.of_whole_model(task, settings.ratio)
        self.sketched = self._sketches.layout, self._sketches.sizes
        (measured,) = self._sketches.sizes
        self.up = Message(0, (Signs("signs", measured), Scalar("norm", minimum=0)))
        mean = (Floats("mean", measured), Scalar("norm", minimum=0))
        self.down = Message(1, mean if settings.downlink == "sum" else (Floats("model", dim),))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        update = keep_largest(cohort.state["model"] - cohort.params, self._sparsity)
        signs = self._sketches.of(round, update.device).forward(update)
        return cohort, {"signs": signs, "norm": update.norm(dim=1, keepdim=True)}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        mean, norm = (total[name].result().float() for name in ("signs", "norm"))
        model = self._step(server["model"].unsqueeze(0), mean, norm).squeeze(0)
        reply = {"mean": mean, "norm": norm} if self._settings.downlink == "sum" else {"model": model}
        return {"model": model}, reply

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        if self._settings.downlink == "sum":
            return go_on_from(cohort, self._step(cohort.state["model"], values["mean"], values["norm"]))
        return go_on_from(cohort, values["model"])

    def _step(self, model: Tensor, mean: Tensor, norm: Tensor) -> Tensor:
        """w after an answer: w − norm · decoded direction. It is decoded on the host, where clients and server get the
        same bits; on a GPU the adjoint adds up in another order."""
        sketch, decode = self._sketches.of(0, mean.device), DECODERS[self._settings.decoder]
        step = norm * decode(sketch, mean.unsqueeze(0), self._sparsity, self._settings.iterations)
        return model - to_device(step, model.device)


class OBCSAA(Tracked):
    """FedAvg whose updates are made sparse and travel as the signs of random measurements.

    With unequal N_k the sum of K signs takes up to 2^K values rather than K + 1, so `downlink = "sum"` sends it,
    divided by N, as float32: lossless, and a tenth of the 32-bit model at ratio 0.1. κ = n keeps the whole update.
    """

    name = "obcsaa"
    paper = "Fan, Wang, Huo, Tian, IEEE TWC 2023"
    personal = False
    about_last_steps = True
    Settings, exchange = OBCSAASettings, SparseDirections

    def __init__(self, task: Task, settings: OBCSAASettings) -> None:
        super().__init__(task, settings)
        self.tracks = settings.downlink == "sum"
