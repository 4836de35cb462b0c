"""Where GPU kernels are tested: on a GPU, or under Triton's interpreter on the CPU (`make test-kernels` installs it). A
test file that imports this is skipped where there is neither."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; make test-kernels installs it")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
