"""What the native decoder takes, keeps and refuses."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.engine.config import EngineConfig
from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from services.engine.device import DeviceError, ExecutionMode
from services.engine.device.cpu import CpuDevice, CpuSettings, Quantization
from services.engine.device.cpu import device as cpu_device
from services.engine.device.cpu.native import BuildError, open_library
from services.engine.device.cpu.packing import Packer
from services.engine.model.decoder import NativeDecoderModel
from services.engine.model.loading import Checkpoint
from tests.support.decoder_models import open_decoder, prompt_logits, save_family
from tests.support.native import BLOCK, Paged, open_native
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options
from tests.support.torch_families import FAMILIES as MODULES
from tests.support.torch_families import save_family as save_module

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)


def test_packed_weights_take_the_place_of_the_parameters(llama: Path) -> None:
    model = open_native(llama, "bfloat16")
    assert {name for name, parameter in model.decoder.named_parameters() if parameter.numel() > 512} == set()
    # Embedding and head are one, and in memory once; panels are a little larger than what they hold.
    numbers = sum(parameter.numel() for parameter in open_decoder(llama).decoder.parameters())
    assert 2 * numbers < model.weight_bytes() < 2.5 * numbers
    small = open_native(llama, "bfloat16", quantization=Quantization.INT8)
    assert 0 < small.weight_bytes() < model.weight_bytes()


def test_a_layer_is_packed_before_the_next_one_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    read, pack = Checkpoint.read, Packer.linear

    def noted_read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        done.append(name.split(".")[2] if ".layers." in name else "outside")
        return read(checkpoint, name)

    def noted_pack(packer: Packer, *arguments: Any) -> Any:
        done.append("packed")
        return pack(packer, *arguments)

    monkeypatch.setattr(Checkpoint, "read", noted_read)
    monkeypatch.setattr(Packer, "linear", noted_pack)
    open_native(llama, "bfloat16")
    in_layers = [what for what, _ in groupby(done) if what != "outside"]
    assert in_layers == ["packed", "0", "packed", "1", "packed", "2", "packed"]


def arguments(paged: Paged, **changes: Any) -> dict[str, torch.Tensor]:
    """A valid prefill of four tokens after one cached block, but for the changes."""
    first, second = paged.tables[0][:2]
    valid = {
        "tokens": [5, 6, 7, 8],
        "positions": [8, 9, 10, 11],
        "slots": [second * BLOCK + at for at in range(4)],
        "context_blocks": [[first]],
        "context_lens": [8],
    }
    return {name: torch.tensor(value) for name, value in {**valid, **changes}.items()}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"tokens": [5, 6, 1 << 40, 8]}, "not in the vocabulary"),
    "pending token": ({"tokens": [-1, 6, 7, 8]}, "not in the vocabulary"),
    "position": ({"positions": [8, 9, 10, 12]}, "does not follow its context"),
    "context": ({"context_lens": [1 << 40]}, "does not follow its context"),
    "negative context": ({"context_lens": [-8]}, "does not follow its context"),
    "slot": ({"slots": [-8, -7, -6, -5]}, "a slot does not fit"),
    "slot within its block": ({"slots": [9, 10, 11, 12]}, "a slot does not fit"),
    "block": ({"context_blocks": [[1 << 40]]}, "a row's blocks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_reach_beyond_memory_is_refused(fault: str, llama: Path) -> None:
    model = open_native(llama)
    changes, message = FAULTS[fault]
    given = arguments(Paged(model, [PROMPT]), **changes)
    with pytest.raises(ValueError, match=message):
        model.prefill(*given.values())


def test_wanted_tokens_that_are_none_of_the_batch_are_refused(llama: Path) -> None:
    model = open_native(llama)
    paged = Paged(model, [PROMPT])
    assert model.select is not None
    for place in (-1, 4, 1 << 40):
        with pytest.raises(ValueError, match="a wanted token is none of the batch"):
            model.select(*arguments(paged).values(), torch.tensor([place]))
    with pytest.raises(ValueError, match=r"wanted has 1 numbers of torch\.int32, not 1 of int64"):
        model.select(*arguments(paged).values(), torch.tensor([3], dtype=torch.int32))
    hidden, sound = model.select(*arguments(paged).values(), torch.tensor([3, 3]))
    assert torch.equal(hidden[0], hidden[1])
    assert sound.tolist() == [True] * 4


def test_a_decode_without_a_block_is_refused(llama: Path) -> None:
    model = open_native(llama)
    table = Paged(model, [PROMPT]).tables[0]
    token, position, slot = torch.tensor([5]), torch.tensor([9]), torch.tensor([table[1] * BLOCK + 1])
    for blocks, owners, starts in (([table[0]], [0], [0]), ([table[0]] * 2, [0, 0], [0, 99 * BLOCK])):
        with pytest.raises(ValueError, match="a row's blocks"):
            model.decode(
                token, position, slot, torch.tensor(blocks), torch.tensor(owners), torch.tensor(starts)
            )


def test_blocks_are_cleared_in_all_layers_and_no_other_is(llama: Path) -> None:
    model = open_native(llama, "bfloat16")
    paged = Paged(model, [PROMPT])
    caches = [tensor for cache in model.caches for tensor in (cache.key, cache.value)]
    for tensor in caches:
        tensor.fill_(3.0)
    padding = paged.spare
    model.clear_blocks(torch.tensor([2, 0, 2, padding]))
    for tensor in caches:
        by_block = tensor.view(padding + 1, -1)
        assert [row.unique().tolist() for row in by_block] == [
            [0.0] if index in (0, 2) else [3.0] for index in range(padding + 1)
        ]
    for block in (-1, padding + 1):
        with pytest.raises(ValueError, match="a row's blocks"):
            model.clear_blocks(torch.tensor([block]))


def test_tensors_of_another_kind_are_refused(llama: Path) -> None:
    model = open_native(llama)
    given = arguments(Paged(model, [PROMPT]))
    given["positions"] = given["positions"].int()
    with pytest.raises(ValueError, match=r"positions has 4 numbers of torch\.int32, not 4 of int64"):
        model.prefill(*given.values())
    with pytest.raises(ValueError, match=r"blocks has 2 numbers of torch\.int32, not 2 of int64"):
        model.clear_blocks(torch.tensor([0, 1], dtype=torch.int32))


def no_compiler(cache: Path | None, **_: Any) -> Any:
    raise BuildError("no C++ compiler is here")


def test_a_library_without_a_function_is_refused_in_one_line() -> None:
    with pytest.raises(BuildError, match=r"\.so has no catenary_nothing$"):
        open_library().function("catenary_nothing", None)


def test_without_a_compiler_torch_computes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = prompt_logits(open_native(llama), PROMPT)
    monkeypatch.setattr(cpu_device, "open_library", no_compiler)
    model = open_decoder(llama, kernels="auto")
    assert not isinstance(model, NativeDecoderModel)
    assert torch.allclose(prompt_logits(model, PROMPT), expected, atol=1e-4)
    ready = start_engine(tiny_options(llama), lambda activity, fraction: None).ready
    assert ready.notes == [
        "torch computes the model, slower than the native kernels would: no C++ compiler is here"
    ]
    # Who asked for torch is not told of it.
    assert (
        start_engine(tiny_options(llama, cpu_kernels="torch"), lambda activity, fraction: None).ready.notes
        == []
    )
    with pytest.raises(StartError, match=r"cpu-kernels native needs the native kernels: no C\+\+ compiler"):
        start_engine(tiny_options(llama, cpu_kernels="native"), lambda activity, fraction: None)


def test_kernels_are_kept_in_the_cache_of_the_options(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []

    def open_library(cache: Path | None, **_: Any) -> Any:
        asked.append(cache)
        raise BuildError("no C++ compiler is here")

    monkeypatch.setattr(cpu_device, "open_library", open_library)
    LocalCore(tiny_options(llama, cache_dir=str(tmp_path)))
    assert asked == [tmp_path]


def test_pages_that_cannot_be_mapped_are_memory_that_is_out() -> None:
    device = CpuDevice(1)
    with pytest.raises(OSError, match="memory") as raised:
        device.memory.zeros((1 << 55,), torch.float32)
    assert device.memory.out_of_memory(raised.value)
    assert not device.memory.out_of_memory(FileNotFoundError(2, "No such file"))


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(StartError) as raised:
        start_engine(tiny_options(directory, **options), lambda activity, fraction: None)
    return str(raised.value)


def test_models_that_are_not_native_are_refused_where_they_must_be(llama: Path, tmp_path: Path) -> None:
    assert "float16 is not native" in refusal(llama, cpu_kernels="native", dtype="float16")
    module = save_module(MODULES["phi"], tmp_path / "module")
    for options in ({"quantization": "int4"}, {"cpu_kernels": "native"}):
        assert "transformers runs this one" in refusal(module, **options)
    experts = save_tiny_model("qwen3_moe", tmp_path / "experts")
    packed = LocalCore(tiny_options(experts, quantization="int8")).engine.model
    assert isinstance(packed, NativeDecoderModel)
    core = LocalCore(tiny_options(llama, dtype="float16"))
    assert not isinstance(core.engine.model, NativeDecoderModel)


def test_compiled_models_are_torchs(llama: Path) -> None:
    eager, compiled = (
        CpuDevice(1, mode).kernels.native_decoder(open_decoder_spec(llama))
        for mode in (ExecutionMode.EAGER, ExecutionMode.COMPILE)
    )
    assert eager is not None
    assert compiled is None
    with pytest.raises(
        DeviceError, match="quantization int8 needs the native kernels: compiled and captured models"
    ):
        CpuDevice(
            1, ExecutionMode.COMPILE, CpuSettings(quantization=Quantization.INT8)
        ).kernels.native_decoder(open_decoder_spec(llama))


def open_decoder_spec(directory: Path) -> Any:
    from services.engine.model.decoder.decoder import native_spec

    return native_spec(open_decoder(directory).decoder, torch.float32, lambda prefix: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8", "device": "hpu"}, "quantization int8 is for device cpu, not hpu"),
        ({"quantization": "int4", "cpu_kernels": "torch"}, "quantization int4 excludes cpu-kernels torch"),
        ({"quantization": "int8", "compile": True}, "compile excludes quantization"),
        ({"cpu_kernels": "native", "compile": True}, "compile excludes quantization and cpu-kernels native"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**options)
