"""Skips what this machine can't run, with the reason, and seeds every test."""

import os

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _gpu_reason():
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs a Hopper GPU, this is {torch.cuda.get_device_name()}"
    from flash_attn3 import ops

    if ops._C is None:
        return f"needs the compiled kernels: {ops.load_error}"
    return None


def pytest_collection_modifyitems(items):
    reason = _gpu_reason()
    for item in items:
        if reason and (item.get_closest_marker("gpu") or item.get_closest_marker("sm90")):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs or more"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)
