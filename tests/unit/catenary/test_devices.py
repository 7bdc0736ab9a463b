"""`--device auto`: what is there, never a CPU in the place of a card that cannot be used."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from catenary.devices import DEVICES, ChosenDevice, choose_device, described, why_not_opened
from catenary_apps.up.config import UpConfig
from services.engine.config import EngineConfig


def nothing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def card(root: Path, address: str, vendor: str, kind: str) -> None:
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def node(root: Path, name: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_a_machine_with_nothing_computes_on_its_cpu(tmp_path: Path) -> None:
    chosen = choose_device(tmp_path, {}, nothing)
    assert chosen == "cpu"
    assert described(chosen) == (
        "device cpu: there is neither a Gaudi card nor an NVIDIA GPU (--device names another)"
    )


@pytest.mark.parametrize(("count", "text"), [(1, "1 Gaudi card on"), (8, "8 Gaudi cards on")])
def test_gaudi_cards_are_chosen_with_or_without_software(tmp_path: Path, count: int, text: str) -> None:
    """Without it the start fails and says so."""
    for index in range(count):
        card(tmp_path, f"0000:{index + 16}:00.0", "0x1da3", "0x120000")
    # A graphics card beside them changes nothing.
    node(tmp_path, "dev/nvidiactl")
    chosen = choose_device(tmp_path, {}, nothing)
    assert chosen == "hpu"
    assert text in chosen.reason


def test_an_hpu_without_its_package_is_known_not_to_open() -> None:
    assert why_not_opened("hpu", nothing).startswith("the package habana-torch-plugin is not installed")
    assert why_not_opened("hpu", lambda name: "1.24.0") == ""
    assert [why_not_opened(device, nothing) for device in ("cpu", "cuda", "sim")] == ["", "", ""]


def test_a_container_with_the_software_and_without_cards_is_meant_for_them(tmp_path: Path) -> None:
    chosen = choose_device(tmp_path, {}, lambda name: "1.24.0")
    assert (chosen, chosen.reason) == ("hpu", "habana-torch-plugin 1.24.0 is installed")


@pytest.mark.parametrize(
    ("vendor", "kind"), [("0x8086", "0x120000"), ("0x1da3", "0x020000"), ("0x10de", "0x030200")]
)
def test_other_devices_of_the_bus_are_no_gaudi_cards(tmp_path: Path, vendor: str, kind: str) -> None:
    card(tmp_path, "0000:01:00.0", vendor, kind)
    (tmp_path / "sys/bus/pci/devices/0000:02:00.0").mkdir()
    assert choose_device(tmp_path, {}, nothing) == "cpu"


@pytest.mark.parametrize("name", ["dev/nvidiactl", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1"])
def test_an_nvidia_gpu_is_chosen_unless_it_is_hidden(tmp_path: Path, name: str) -> None:
    node(tmp_path, name)
    assert choose_device(tmp_path, {}, nothing) == "cuda"
    assert choose_device(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}, nothing) == "cuda"
    for hidden in ("", "-1", "None"):
        assert choose_device(tmp_path, {"CUDA_VISIBLE_DEVICES": hidden}, nothing) == "cpu"


def test_auto_is_the_default_and_a_named_device_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CATENARY_ENGINE_DEVICE", raising=False)
    for module in ("services.engine.options", "catenary_apps.up.config"):
        monkeypatch.setattr(f"{module}.choose_device", lambda: ChosenDevice("hpu", "a test says so"))
    assert (EngineConfig().device, UpConfig().device, EngineConfig(device="auto").device) == ("hpu",) * 3
    assert described(UpConfig().device) == "device hpu: a test says so (--device names another)"
    assert (EngineConfig(device="cpu").device, UpConfig(device="sim").device) == ("cpu", "sim")
    assert described(EngineConfig(device="cpu").device) is None
    assert '"device":"hpu"' in EngineConfig().model_dump_json()
    # What is for a CPU alone is refused beside a card that was found.
    with pytest.raises(ValueError, match="is for device cpu, not hpu"):
        EngineConfig(quantization="int8")


def test_what_was_said_to_the_engines_counts_for_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_ENGINE_DEVICE", "sim")
    assert UpConfig().device == "sim"
    assert UpConfig(device="cpu").device == "cpu"


def test_each_device_has_an_extra_and_a_module() -> None:
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(DEVICES) == ["cpu", "cuda", "hpu", "sim"]
    for kind in DEVICES.values():
        assert kind.extra in extras
        path = root / kind.module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
