"""What a record says of the machine that it was measured on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine(load_before: float) -> dict[str, Any]:
    """Processor, versions and load: a load above the number of threads means that the times are not to be trusted."""
    return {
        "processor": f"{platform.machine()}, {model()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before_and_after": [load_before, round(os.getloadavg()[0], 1)],
    }


def model() -> str:
    """The model of the processor, and whether it has instructions for bfloat16: Linux only."""
    found = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in found.splitlines() if line.startswith("model name")), "unknown")
    flags = next((line.split() for line in found.splitlines() if line.startswith("flags")), [])
    half = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return f"{name}, {' and '.join(half) or 'no instructions for bfloat16'}"
