"""What a record says of the machine that it was measured on."""

import os
import platform
from typing import Any

import torch


def machine(load_before: float) -> dict[str, Any]:
    """Processor, versions and load: a load above the number of threads means that the times are not to be trusted."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before_and_after": [load_before, round(os.getloadavg()[0], 1)],
    }
