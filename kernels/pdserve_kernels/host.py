"""What this machine's processor can do, told without compiling anything."""

import importlib.util

import torch


def why_not_here() -> str:
    """Why the native CPU kernels cannot run on this machine; empty if they can."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return f"they need AVX-512; the processor offers {torch.backends.cpu.get_cpu_capability()}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return ""
