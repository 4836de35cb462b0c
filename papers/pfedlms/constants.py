"""The constants of the convergence theorem, and the terms of its bound.

For K clients, E local steps, R rounds and η ≤ 1/L_F the paper has

    (1/RE) Σ_r Σ_e Σ_k p_k E‖∇F_k(θ_k^{r,e}; V^r)‖² ≤ 2(Ψ⁰ − Ψ_inf)/(ηER) + L_F η σ² + (2λ/(ηER)) Σ_r β^r
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor


def softmax_smoothness(x: Tensor) -> float:
    """L_f of softmax regression with biases on the mean over samples `x: [samples, features]`: ½ λ_max(X̃ᵀX̃/n), where
    X̃ has a column of ones. The Hessian is the mean of (diag(p) − ppᵀ) ⊗ x̃x̃ᵀ, and ‖diag(p) − ppᵀ‖ ≤ ½."""
    extended = torch.cat([x.double(), x.new_ones(len(x), 1, dtype=torch.float64)], dim=1)
    return float(torch.linalg.eigvalsh(extended.T @ extended / len(x))[-1]) / 2


@dataclass(frozen=True)
class Constants:
    """What is known before the first step of F_k = f_k + λ R̃_ρ + (μ/2)‖θ‖², with one absolute ρ for all layers."""

    task_smoothness: float
    """L_f."""
    sizes: tuple[int, ...]
    """m of every layer."""
    pads: tuple[int, ...]
    """N of every layer."""
    strength: float
    """λ."""
    rho: float
    """ρ, in units of a sketch's entries."""
    decay: float
    """μ."""

    @property
    def kappas(self) -> tuple[float, ...]:
        """κ_l = √(N_l/m_l) ≥ ‖Φ_l‖."""
        return tuple(sqrt(pad / m) for pad, m in zip(self.pads, self.sizes, strict=True))

    @property
    def smoothness(self) -> float:
        """L_F = L_f + max_l λ κ_l²/ρ + μ."""
        return self.task_smoothness + self.strength * max(self.kappas) ** 2 / self.rho + self.decay

    @property
    def lowest(self) -> float:
        """Ψ_inf = −λ ρ Σ m_l / 2: a loss is not below 0, and R̃_ρ is not below −ρ/2 for a sketched coordinate."""
        return -self.strength * self.rho * sum(self.sizes) / 2

    def largest_model(self, gradient: float, start: float) -> float:
        """B_θ = max(‖θ⁰‖, √(2 (G² + 4λ² Σ κ_l² m_l)) / μ), from G² and the largest ‖θ_k⁰‖; infinite without decay."""
        moment = gradient + 4 * self.strength**2 * sum(self.pads)  # κ_l² m_l = N_l
        return max(start, sqrt(2 * moment) / self.decay) if self.decay else float("inf")

    def drift(self, refreshed: bool, model: float, threshold: float) -> float:
        """β^r = Σ_l 4 √m κ B χ + 2 √m κ B + 6 m τ_max, with B = `model`."""
        parts = zip(self.sizes, self.kappas, strict=True)
        return sum((4 * refreshed + 2) * sqrt(m) * kappa * model + 6 * m * threshold for m, kappa in parts)


def terms(
    descent: float, smoothness: float, rate: float, noise: float, drifts: Sequence[float], local_steps: int
) -> dict[str, float]:
    """2·descent/(ηER), L_F η·noise, 2 Σ drifts/(ηER) and their total, where R is the number of `drifts`. Ψ⁰ − Ψ_inf, σ²
    and the λβ^r give the theorem's bound; Ψ⁰ − Ψ^R, the mean of ‖ĝ − ∇f‖² and the real drifts the measured terms."""
    scale = 2 / (rate * local_steps * len(drifts))
    found = {"optimisation": scale * descent, "noise": smoothness * rate * noise, "drift": scale * sum(drifts)}
    return {**found, "total": sum(found.values())}
