"""Local training: no communication at all; what every federated method must beat."""

from __future__ import annotations

from pfedlms.methods.contract import Method


class Local(Method):
    """Each client trains alone, θ_k ← θ_k − η (∇f_k + μθ_k)."""

    name = "local"
    paper = "baseline without communication"
    personal = True
