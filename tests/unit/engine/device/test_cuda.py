"""What of the cuda device can be shown without a GPU; `make gpu-check` shows the rest where there is one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from services.engine.device import AttentionFeatures, DeviceError
from services.engine.device.attention import fused_prefill
from services.engine.device.cpu import CpuDevice
from services.engine.device.cuda import CudaDevice
from tests.support.repository import ROOT


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built without CUDA: install a CUDA build of torch"):
        CudaDevice()


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"nvidia-smi lists one, that the driver fits CUDA 13\.0"):
        CudaDevice()


@pytest.mark.parametrize("kind", ["causal", "bool", "float", "softcap"])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_prefill_attention_equals_the_cpus(kind: str, value_dim: int) -> None:
    """The function names no device: what differs from the CPU's is how masks and grouped heads are given."""
    torch.manual_seed(3)
    query, key = torch.randn(2, 6, 5, 16), torch.randn(2, 2, 5, 16)
    value = torch.randn(2, 2, 5, value_dim)
    lower = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    mask = {"bool": lower, "float": torch.where(lower, 0.0, -1e30).expand(2, 6, 5, 5)}.get(kind)
    features = AttentionFeatures(softcap=2.0 if kind == "softcap" else None)
    expected = CpuDevice(1).kernels.attend_prefill(query, key, value, mask, 0.3, features)
    given = fused_prefill(query, key, value, mask, 0.3, features, groups_masked=False)
    torch.testing.assert_close(given, expected)


def test_the_gpu_check_says_that_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = ROOT / "deploy" / "gpu" / "check.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert run.stdout == "gpu-check: no NVIDIA GPU here, nothing was checked\n"
