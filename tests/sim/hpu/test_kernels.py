"""Fused norms, rotations and experts on the simulated HPU agree with plain torch and with the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.device import NO_FEATURES as PLAIN
from services.engine.device import Device, DeviceError
from services.engine.device.cpu import CpuDevice
from services.engine.device.hpu import GAUDI2, GAUDI3
from services.engine.device.hpu.fused import (
    SWITCHES,
    FusedKernels,
    for_model,
    parse_switches,
    probe_kernels,
)
from services.engine.device.hpu.settings import AttentionSettings, HpuSettings, Softmax
from tests.sim.conftest import NewCard
from tests.support.hpu_devices import CHOICES, open_choice
from tests.support.paged_sequences import Heads, Sequences

FEW = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def _inference(new_card: NewCard) -> Iterator[None]:
    new_card()
    with torch.inference_mode():
        yield


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@FEW
@given(
    tokens=st.sampled_from([1, 2, 7]),
    heads=st.sampled_from([None, 1, 3]),
    size=st.sampled_from([2, 64, 130]),
    unit_offset=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_norms(tokens: int, heads: int | None, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    """Also of a slice of a wider tensor, as queries and keys are."""
    shape = (tokens, size) if heads is None else (tokens, heads + 2, size)
    x, weight = _randn(*shape, dtype=dtype)[:, :heads] * 3, _randn(size, dtype=dtype)
    if heads is None:
        x = _randn(*shape, dtype=dtype) * 3
    wide = x.double()
    scale = weight.double() + 1.0 if unit_offset else weight.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * scale
    for choice in ("default", "plain"):
        device = open_choice(choice)
        out = device.kernels.rms_norm(x.to("hpu"), weight.to("hpu"), 1e-5, unit_offset=unit_offset).cpu()
        assert (out.dtype, out.shape) == (dtype, x.shape)
        torch.testing.assert_close(out.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("choice", ["default", "plain"])
def test_a_small_weight_beside_one_is_not_rounded_away(choice: str) -> None:
    """Gemma's scale is one plus a weight: 1.001 is 1 in bfloat16."""
    x = _randn(4, 8, dtype=torch.bfloat16)
    weight = torch.full((8,), 0.001, dtype=torch.bfloat16)
    arguments = (x.to("hpu"), weight.to("hpu"), 1e-6)
    out = open_choice(choice).kernels.rms_norm(*arguments, unit_offset=True).cpu()
    assert torch.equal(out, CpuDevice(1).kernels.rms_norm(x, weight, 1e-6, unit_offset=True))


@FEW
@given(
    tokens=st.sampled_from([1, 5]),
    heads=st.sampled_from([1, 4]),
    size=st.sampled_from([4, 64, 96]),
    share=st.sampled_from([1, 2]),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_rotations(tokens: int, heads: int, size: int, share: int, dtype: torch.dtype) -> None:
    """Of all dimensions of a head, or of the first half of them."""
    rotated = size // share
    x = _randn(tokens, heads, size, dtype=dtype)
    angles = torch.outer(torch.arange(tokens) * 7.0, torch.linspace(1, 0.01, rotated // 2))
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turn = torch.complex(cos.double(), sin.double())[..., : rotated // 2]
    first, second = x[..., :rotated].double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * turn
    expected = torch.cat((turned.real, turned.imag, x[..., rotated:].double()), dim=-1)
    for choice in ("default", "plain"):
        out = open_choice(choice).kernels.rotate(x.to("hpu"), cos.to("hpu"), sin.to("hpu")).cpu()
        assert (out.dtype, out.shape) == (dtype, x.shape)
        torch.testing.assert_close(out.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@FEW
@given(
    tokens=st.sampled_from([1, 2, 9]),
    count=st.sampled_from([1, 4, 6]),
    activation=st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]),
    rounded=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_experts(tokens: int, count: int, activation: str, rounded: bool, dtype: torch.dtype) -> None:
    """Weights may be float32 whatever the model's type (mixtral)."""
    hidden, size = 16, 24
    x = _randn(tokens, hidden, dtype=dtype)
    gate_up, down = _randn(count, 2 * size, hidden, seed=4) * 0.3, _randn(count, hidden, size, seed=5) * 0.3
    scores, ids = torch.topk(torch.softmax(_randn(tokens, count, seed=6), -1), min(2, count), dim=-1)
    weights = scores.to(dtype) if rounded else scores
    tensors = (x, weights, ids, gate_up.to(dtype), down.to(dtype))

    def computed(device: Device) -> torch.Tensor:
        to = device.torch_device
        a, b, c, d, e = (tensor.to(to) for tensor in tensors)
        return device.kernels.experts(a, b, c, d, e, activation).cpu()

    expected = computed(CpuDevice(1))
    for choice in ("default", "plain"):
        out = computed(open_choice(choice))
        assert out.dtype is dtype
        torch.testing.assert_close(out, expected, atol=3 * DTYPES[dtype], rtol=3 * DTYPES[dtype])


def test_which_kernels_are_used_where(new_card: NewCard) -> None:
    def used(version: str) -> set[str]:
        return {name for name in SWITCHES if getattr(probe_kernels(GAUDI3, version, {}), name)}

    everything = set(SWITCHES) - {"block_softmax"}
    assert used("1.24.0") == used("1.22.0.494") == everything
    assert used("1.22.0.493") == everything - {"block_softmax_adjustment"}
    assert not probe_kernels(GAUDI2, "1.24.0", {}).block_softmax_adjustment
    new_card(version="1.22.1")
    assert used("1.22.1") == everything - {"sdpa_sinks"}
    new_card(missing=frozenset({"FusedSDPA", "rms_norm", "mixture_of_experts", "rotary_pos_embedding"}))
    # Slices are a way of the fused attention.
    assert used("1.24.0") == {"block_softmax_adjustment", "index_reduce"}


def test_kernels_are_switched_by_name() -> None:
    switches = parse_switches("sdpa=off, block_softmax=on,")
    kernels = probe_kernels(GAUDI3, "1.24.0", switches)
    assert (kernels.sdpa, bool(kernels.block_softmax)) == (None, True)
    assert (kernels.sdpa_sinks, kernels.sliced_sdpa) == (False, None)
    assert parse_switches("") == {}


@pytest.mark.parametrize("text", ["sdpa", "sdpa=yes", "flash=on", "=off", "rotary_mode=on"])
def test_a_switch_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match=r"^kernels: .* is not understood; write NAME=on or NAME=off"):
        parse_switches(text)


def test_switching_on_what_is_not_there_is_refused(new_card: NewCard) -> None:
    new_card(version="1.22.1", missing=frozenset({"block_softmax"}))
    message = r"block_softmax=on, but Habana software 1\.22\.1 has no such kernel"
    with pytest.raises(DeviceError, match=message):
        probe_kernels(GAUDI3, "1.22.1", parse_switches("block_softmax=on"))
    new_card()
    with pytest.raises(DeviceError, match="needs block_softmax_adjustment=on"):
        probe_kernels(GAUDI2, "1.24.0", parse_switches("block_softmax=on"))


@pytest.mark.parametrize("name", ["sdpa_sinks", "sliced_sdpa"])
def test_switching_on_a_part_of_what_is_off_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"^kernels: {name}=on needs sdpa=on$"):
        probe_kernels(GAUDI3, "1.24.0", parse_switches(f"{name}=on,sdpa=off"))


def test_a_kernel_that_is_switched_twice_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"^kernels: sdpa is switched twice$"):
        parse_switches("sdpa=on,sdpa=off")


@pytest.mark.parametrize("choice", CHOICES)
def test_a_layer_is_compiled_whole(choice: str) -> None:
    """Neither a kernel nor its reference breaks the compiler's graph, whichever the shapes are."""
    device = open_choice(choice)
    batch = Sequences([5, 23], Heads(), device)
    expected = [batch.prefill([0, 6], 8, 3, PLAIN, 5), batch.decode(PLAIN, 5)]
    norm, gates, down = (_randn(*shape).to("hpu") for shape in ((8,), (3, 16, 8), (3, 8, 8)))
    turn = _randn(4, 1, 8).to("hpu")
    x, weights, ids = _randn(4, 8).to("hpu"), _randn(4, 2).to("hpu"), torch.tensor([[0, 2]] * 4).to("hpu")

    def rest() -> torch.Tensor:
        turned = device.kernels.rotate(device.kernels.rms_norm(x, norm, 1e-5).view(4, 1, 8), turn, turn).view(
            4, 8
        )
        return device.kernels.experts(turned, weights, ids, gates, down, "silu")

    calm = rest().cpu()
    prefill, decode = device.kernels.attend_prefill, device.kernels.attend_decode
    torch.compiler.reset()
    whole = partial(torch.compile, backend="eager", fullgraph=True, dynamic=False)
    device.kernels.attend_prefill = whole(prefill)
    device.kernels.attend_decode = whole(decode)
    for found, plain in zip(
        (batch.prefill([0, 6], 8, 3, PLAIN, 5), batch.decode(PLAIN, 5)), expected, strict=True
    ):
        torch.testing.assert_close(found, plain)
    torch.testing.assert_close(whole(rest)().cpu(), calm)
    torch.compiler.reset()


BOTH = FusedKernels(block_softmax="a", block_softmax_adjustment="b", rms_norm="c")


@pytest.mark.parametrize(
    ("asked", "switches", "needed", "softmax", "adjusting"),
    [
        (Softmax.AUTO, "", False, Softmax.FAST, True),
        (Softmax.AUTO, "", True, Softmax.FP32, False),
        (Softmax.FAST, "", False, Softmax.FAST, True),
        # The operator's word on the softmax counts, but the adjustment is never right for the family.
        (Softmax.FAST, "", True, Softmax.FAST, False),
        (Softmax.FP32, "", False, Softmax.FP32, False),
        (Softmax.FP32, "block_softmax_adjustment=on", False, Softmax.FP32, True),
        (Softmax.AUTO, "block_softmax_adjustment=off", True, Softmax.FP32, False),
    ],
)
def test_rules_by_model(
    asked: Softmax, switches: str, needed: bool, softmax: Softmax, adjusting: bool
) -> None:
    settings = HpuSettings(attention=AttentionSettings(softmax=asked), kernels=switches)
    after, kernels = for_model(settings, BOTH, float32_scores=needed)
    assert after.attention.softmax is softmax
    assert (kernels.block_softmax_adjustment is not None) is adjusting
    assert (kernels.block_softmax is not None) is adjusting
    assert kernels.rms_norm == "c"


def test_the_adjustment_is_refused_for_a_family_that_it_rounds_too_much() -> None:
    settings = HpuSettings(kernels="block_softmax_adjustment=on")
    with pytest.raises(DeviceError, match=r"^kernels: block_softmax_adjustment=on .* leave it out$"):
        for_model(settings, BOTH, float32_scores=True)


@pytest.mark.parametrize(
    ("model_type", "softmax"),
    [
        ("qwen2", Softmax.FP32),
        ("qwen2_moe", Softmax.FP32),
        ("qwen2_5_vl", Softmax.FP32),
        ("qwen3", Softmax.FAST),
        ("llama", Softmax.FAST),
        (None, Softmax.FAST),
    ],
)
def test_a_device_takes_the_rules_of_its_model(model_type: str | None, softmax: Softmax) -> None:
    device = open_choice("default")
    device.kernels.adapt({} if model_type is None else {"model_type": model_type})
    assert device.kernels.settings.attention.softmax is softmax
    assert (device.kernels.fused.block_softmax_adjustment is None) is (softmax is Softmax.FP32)
