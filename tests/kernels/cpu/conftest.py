"""These kernels are compiled for AVX-512: elsewhere there is nothing to test."""

import pytest
import torch

from pdserve_kernels.host import why_not_here

collect_ignore_glob = ["test_*.py"] if why_not_here() else []


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
