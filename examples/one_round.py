"""One round of pFedLMS, from Φ to θ, in plain NumPy and loops and without this package: to be read beside the paper and
docs/protocol.md, whose sections are named below. Wherever both ends must agree on every bit, numbers are rounded to
float32 exactly there. `tests/test_examples.py` plays the same round with the package.

python examples/one_round.py
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

FEATURES, HIDDEN, CLASSES = 6, 10, 3  # the model: W₂ relu(W₁ x + b₁) + b₂
LAYERS = (FEATURES * HIDDEN + HIDDEN, HIDDEN * CLASSES + CLASSES)  # weight and bias of each: 70 and 33 parameters
T, RATIO, STRENGTH, SMOOTHING = 7, 0.25, 0.05, 0.1  # thresholds, m/N, λ, ρ in units of σ̄
STEPS, BATCH, RATE, DECAY = 20, 16, 0.1, 1e-4  # E, samples per step, η, μ

Arrays = list[np.ndarray]

# --- random numbers (§3): every end draws the same Φ, so it never travels ---------------------------------------------

WORD, GOLDEN = 2**64, 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def stream(seed: int, purpose: str, *counters: int) -> int:
    """The key of the stream of that name."""
    name = 0xCBF29CE484222325
    for byte in purpose.encode():
        name = (name ^ byte) * 0x100000001B3 % WORD
    key = mix((seed + GOLDEN) % WORD)
    for part in (name, *counters):
        key = mix(((key ^ part) + GOLDEN) % WORD)
    return key


def word(key: int, i: int) -> int:
    return mix((key + (i + 1) * GOLDEN) % WORD)


def sign(key: int, i: int) -> int:
    return -1 if word(key, i // 64) >> i % 64 & 1 else 1


def row(key: int, bits: int, i: int) -> int:
    """A bijection on the integers below 2^bits: its first m values are m different rows."""
    for j in range(6):
        i = ((word(key, 2 * j) | 1) * i + word(key, 2 * j + 1)) % 2**bits
        i ^= i >> max(1, (bits + 1) // 2)
    return i


# --- the sketch (§4): Φ = 1/√m S H D P --------------------------------------------------------------------------------


def hadamard(x: np.ndarray) -> np.ndarray:
    """H x. Pairs that lie close together are added first: the order of float32 sums is part of the protocol."""
    if len(x) == 1:
        return x
    a, b = hadamard(x[: len(x) // 2]), hadamard(x[len(x) // 2 :])
    return np.concatenate([a + b, a - b])


class Phi:
    """Φ of one layer in one round."""

    def __init__(self, seed: int, round: int, layer: int) -> None:
        n = LAYERS[layer]
        bits = (n - 1).bit_length()
        self.pad, m = 2**bits, max(1, int(RATIO * 2**bits))
        sign_key, row_key = stream(seed, "sketch-signs", round, layer), stream(seed, "sketch-rows", round, layer)
        self.signs = np.array([sign(sign_key, i) for i in range(n)], dtype=np.float32)
        self.rows = [row(row_key, bits, j) for j in range(m)]
        self.scale = np.float32(1 / sqrt(m))

    def forward(self, theta: np.ndarray) -> np.ndarray:
        """Φθ."""
        padded = np.zeros(self.pad, dtype=np.float32)
        padded[: len(theta)] = self.signs * theta
        return hadamard(padded)[self.rows] * self.scale

    def adjoint(self, u: np.ndarray) -> np.ndarray:
        """Φᵀu."""
        spread = np.zeros(self.pad, dtype=np.float32)
        spread[self.rows] = u
        return self.signs * hadamard(spread)[: len(self.signs)] * self.scale


# --- exchange A (§5): statistics of the sketches up, pooled mean and deviation down -----------------------------------


def pooled(sketches: Arrays, samples: list[int]) -> tuple[np.float32, np.float32]:
    """μ̄ = Σ p_k m_k and σ̄² = Σ p_k (s_k + (m_k − μ̄)²), summed in float64, one client after another."""
    means = [float(np.float32(y.mean(dtype=np.float64))) for y in sketches]  # m_k and s_k travel as float32
    variances = [float(np.float32(y.var(dtype=np.float64))) for y in sketches]
    mean, square = 0.0, 0.0
    for n, m in zip(samples, means, strict=True):
        mean += n * m
    mean /= sum(samples)
    for n, m, s in zip(samples, means, variances, strict=True):
        square += n * (s + (m - mean) * (m - mean))
    return np.float32(mean), np.float32(sqrt(square / sum(samples)))


def thresholds(mean: np.float32, deviation: np.float32) -> np.ndarray:
    """τ_t = μ̄ + σ̄ Υ⁻¹(t / (T + 1)), which every end computes from the two float32 numbers."""
    z = np.array([NormalDist().inv_cdf(t / (T + 1)) for t in range(1, T + 1)]).astype(np.float32)
    return (np.float64(mean) + np.float64(deviation) * z.astype(np.float64)).astype(np.float32)


# --- exchange B (§5): symbols up, those of the weighted majority down -------------------------------------------------


def symbols(y: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """q(i) = #{t : y(i) ≥ τ_t}: which of the T + 1 intervals y(i) lies in."""
    return np.array([sum(value >= tau) for value in y])


def vote(chosen: Arrays, samples: list[int]) -> np.ndarray:
    """q̃(i) = #{t : Σ_k N_k b_t^k(i) ≥ 0}, b_t^k(i) = +1 where q_k(i) ≥ t and −1 elsewhere."""
    consensus = np.zeros_like(chosen[0])
    for t in range(1, T + 1):
        consensus += sum(n * np.where(q >= t, 1, -1) for n, q in zip(samples, chosen, strict=True)) >= 0
    return consensus


# --- local steps (§10): θ ← θ − η (∇f + λ∇R̃_ρ + μθ) -------------------------------------------------------------------


def split(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two layers of a model: W₁ row by row and b₁, then W₂ and b₂."""
    return theta[: LAYERS[0]], theta[LAYERS[0] :]


def task_gradient(theta: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """∇f of the mean cross-entropy of a batch, by the chain rule."""
    first, second = split(theta)
    w1, w2 = first[:-HIDDEN].reshape(HIDDEN, FEATURES), second[:-CLASSES].reshape(CLASSES, HIDDEN)
    hidden = np.maximum(x @ w1.T + first[-HIDDEN:], 0)
    outputs = hidden @ w2.T + second[-CLASSES:]
    shares = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)  # softmax
    slope = (shares - np.eye(CLASSES, dtype=np.float32)[labels]) / np.float32(len(x))  # ∂f/∂outputs
    back = slope @ w2 * (hidden > 0)  # ∂f/∂(W₁ x + b₁)
    parts = [(back.T @ x).ravel(), back.sum(axis=0), (slope.T @ hidden).ravel(), slope.sum(axis=0)]
    return np.concatenate(parts)


class Client(NamedTuple):
    """A client's samples, float32 `[N_k, FEATURES]`, and their labels."""

    x: np.ndarray
    labels: np.ndarray


class Agreed(NamedTuple):
    """What all clients know about a layer after the exchanges."""

    phi: Phi
    deviation: np.float32
    tau: np.ndarray
    consensus: np.ndarray


def pull(theta: np.ndarray, agreed: Agreed) -> np.ndarray:
    """λ∇R̃_ρ = λ/T Φᵀ Σ_t [clip((Φθ − τ_t)/ρ_l, −1, 1) − v_t], with ρ_l = ρ σ̄_l and v_t = +1 where q̃ ≥ t, else −1."""
    if agreed.deviation == 0:
        return np.zeros_like(theta)
    y, total = agreed.phi.forward(theta), np.zeros(len(agreed.consensus), dtype=np.float32)
    for t in range(1, T + 1):
        inside = np.clip((y - agreed.tau[t - 1]) / (np.float32(SMOOTHING) * agreed.deviation), -1, 1)
        total += inside - np.where(agreed.consensus >= t, np.float32(1), np.float32(-1))
    return agreed.phi.adjoint(np.float32(STRENGTH / T) * total)


def local_steps(theta: np.ndarray, client: Client, batches: np.ndarray, agreed: list[Agreed]) -> np.ndarray:
    """SGD on the samples `batches: [steps, batch]`; before the first round `agreed` is empty, and there is no pull."""
    for chosen in batches:
        gradient = task_gradient(theta, client.x[chosen], client.labels[chosen]) + np.float32(DECAY) * theta
        if agreed:
            gradient += np.concatenate([pull(part, about) for part, about in zip(split(theta), agreed, strict=True)])
        theta = theta - np.float32(RATE) * gradient
    return theta


# --- the round --------------------------------------------------------------------------------------------------------


def exchanges(models: Arrays, clients: list[Client], seed: int, round: int) -> list[Agreed]:
    """What clients and server agree on, layer by layer."""
    samples, agreed = [len(client.labels) for client in clients], []
    for layer in range(len(LAYERS)):
        phi = Phi(seed, round, layer)
        sketches = [phi.forward(split(theta)[layer]) for theta in models]
        mean, deviation = pooled(sketches, samples)
        tau = thresholds(mean, deviation)
        agreed.append(Agreed(phi, deviation, tau, vote([symbols(y, tau) for y in sketches], samples)))
    return agreed


def train(models: Arrays, clients: list[Client], batches: Arrays, agreed: list[Agreed]) -> Arrays:
    """Every client's model after its local steps."""
    return [local_steps(*own, agreed) for own in zip(models, clients, batches, strict=True)]


# --- a handful of clients ---------------------------------------------------------------------------------------------


def made_up_clients() -> list[Client]:
    """Five clients, each of which sees one class most often."""
    random = np.random.default_rng(1)
    centres, clients = random.normal(size=(CLASSES, FEATURES)), []
    for client, count in enumerate((40, 60, 80, 50, 30)):
        labels = random.choice(CLASSES, size=count, p=np.roll([0.6, 0.3, 0.1], client))
        clients.append(Client((centres[labels] + random.normal(size=(count, FEATURES))).astype(np.float32), labels))
    return clients


def inside(models: Arrays, agreed: list[Agreed]) -> str:
    """How many of all clients' sketched entries lie in the interval of the consensus."""
    pairs = [(part, about) for theta in models for part, about in zip(split(theta), agreed, strict=True)]
    hits = [symbols(about.phi.forward(part), about.tau) == about.consensus for part, about in pairs]
    return f"{100 * np.concatenate(hits).mean():.0f} %"


def main() -> None:
    random, clients = np.random.default_rng(2), made_up_clients()
    first, second = ([random.integers(len(each.labels), size=(STEPS, BATCH)) for each in clients] for _ in range(2))
    initial = (random.normal(size=sum(LAYERS)) / sqrt(HIDDEN)).astype(np.float32)
    models = train([initial] * len(clients), clients, first, [])

    agreed = exchanges(models, clients, seed=7, round=0)
    pulled, alone = (train(models, clients, second, consensus) for consensus in (agreed, []))

    for n, about in zip(LAYERS, agreed, strict=True):
        print(f"{n} parameters, padded to {about.phi.pad}: {len(about.consensus)} sketch entries per client")
        print("  thresholds", *(f"{t:.2f}" for t in about.tau))
        print("  consensus ", *about.consensus)
    print("Entries in the interval of the consensus:")
    print(f"  {inside(models, agreed)} before the local steps")
    print(f"  {inside(pulled, agreed)} after them, {inside(alone, agreed)} after the same steps without the pull")
    entries = sum(len(about.consensus) for about in agreed)
    print(f"A client sent {entries} symbols of 3 bits and 4 float32: {3 * entries + 128} bits.", end=" ")
    print(f"Its model has {32 * sum(LAYERS):,}.")


if __name__ == "__main__":
    main()
