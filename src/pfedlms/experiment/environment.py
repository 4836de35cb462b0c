"""What a run was made with: versions and the device."""

from __future__ import annotations

import platform

import numpy as np
import torch

from pfedlms import __version__


def environment(device: torch.device) -> dict[str, str]:
    """Versions of what computes, the kind of machine and what trained; nothing that names a machine or its user."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "pfedlms": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": named,
    }
