"""What all tests share."""
import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so set before any test file is imported


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN, or the largest integer, so that a place nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
