"""Opening an HPU: each thing that is wrong gives one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import DeviceError, ExecutionMode
from services.engine.device.hpu import (
    GAUDI2,
    GAUDI3,
    HpuDevice,
    HpuSettings,
    RecipeCache,
    bridge,
    open_card,
    properties_of,
)
from services.engine.device.hpu.bridge import Installed, check_versions, prepare_environment
from services.engine.device.hpu.open_card import Driver
from tests.support.sim_device import Host


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    return Host(monkeypatch, tmp_path)


def refusal(host: Host, **settings: Any) -> str:
    with pytest.raises(DeviceError) as caught:
        host.open(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("device", "known"), [("gaudi2", GAUDI2), ("gaudi3", GAUDI3)])
def test_a_card_and_its_properties(host: Host, device: str, known: object) -> None:
    opened = host.open(device=device, hbm_gib=2)
    assert isinstance(opened, HpuDevice)
    assert opened.properties is known
    assert (opened.memory.figures().total, opened.torch_device.type) == (2 * 2**30, "hpu")
    facts = opened.capabilities
    assert (facts.wide_dtype, facts.block_size, facts.static_shapes) == (torch.float32, 128, True)


def test_variants_of_a_card_and_cards_that_are_too_old() -> None:
    assert properties_of("GAUDI2E") is GAUDI2
    with pytest.raises(DeviceError, match="GAUDI is not supported: Gaudi 2 and Gaudi 3 are"):
        properties_of("GAUDI")


def test_software_that_is_too_old(host: Host) -> None:
    text = refusal(host, version="1.21.3")
    assert text == (
        "Habana software 1.21.3 is too old: engines run on Habana software 1.22, 1.23 or 1.24 with Python "
        "3.11 or 3.12; take one of the vendor's images of these, such as gaudi-docker/1.24.0/ubuntu24.04/"
        "habanalabs/pytorch-installer-2.10.0, and a driver of the same release"
    )


@pytest.mark.parametrize("version", ["1.22.2", "1.23.0", "1.24.1", "1.25.0"])
def test_software_that_is_served(host: Host, version: str) -> None:
    assert host.open(version=version).name == "hpu"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Installed("1.23.0.695", "2.9.0+hpu_1.23.0-695.git1234567"), None),
        (Installed("1.24.0.1", "2.10.1"), None),
        (Installed("1.24.1.7", "2.11.0"), None),
        (Installed("1.23.0.695", "2.9.0+hpu_1.22.0-740.gitab"), "torch 2.9.0+hpu_1.22.0-740.gitab was built"),
        (
            Installed("1.23.0.695", "2.13.0"),
            "Habana software 1.23.0.695 goes with torch 2.9, not torch 2.13.0",
        ),
        (Installed("1.24.0", "2.9.1"), "goes with torch 2.10 or 2.11, not torch 2.9.1"),
        (Installed("1.24.0", "2.9.1", "==2.10.0"), "needs torch==2.10.0, not torch 2.9.1"),
        (Installed("1.21.3.57", "2.6.0"), "Habana software 1.21.3.57 is too old: engines run on"),
        (Installed("1.22.0.740", "2.7.1"), None),
        (Installed("what", "2.9.0"), "has the version 'what', which cannot be read"),
    ],
)
def test_versions_that_go_together(found: Installed, expected: str | None) -> None:
    if expected is None:
        check_versions(found)
        return
    with pytest.raises(DeviceError) as caught:
        check_versions(found)
    assert expected in str(caught.value)


def test_no_package(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "installed", lambda: None)
    assert refusal(host).startswith(
        "the package habana-torch-plugin is not installed for this Python: run in"
    )


def test_a_library_of_the_driver_that_is_missing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libSynapse.so: cannot open shared object file")

    monkeypatch.setattr(bridge, "installed", lambda: Installed("1.24.0", "2.10.0"))
    monkeypatch.setattr("importlib.import_module", broken)
    text = "Habana's bridge cannot be loaded (libSynapse.so: cannot open shared object file): the image and"
    with pytest.raises(DeviceError) as caught:
        bridge.load_bridge(ExecutionMode.EAGER)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Stock PyTorch is not supported in Lazy mode"),
        AssertionError("Compile-time\nmajor version 2.9 is not 2.10"),
        RuntimeError("synStatus 26"),
        ImportError("no module"),
    ],
)
def test_what_the_bridge_checks_by_itself_is_one_line(
    error: Exception, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise error

    monkeypatch.setattr(bridge, "installed", lambda: Installed("1.24.0", "2.10.0"))
    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(DeviceError) as caught:
        bridge.load_bridge(ExecutionMode.COMPILE)
    assert str(caught.value).startswith(
        f"Habana's bridge cannot be loaded ({' '.join(str(error).split())}): the image and"
    )


def test_torch_does_not_load_a_bridge_by_itself(tmp_path: Path) -> None:
    """BRG: it is an entry point of torch.backends, and reads its environment when it is imported."""
    (tmp_path / "bridge_of_this_test.py").write_text(
        "def load():\n    raise SystemExit('loaded too early')\n"
    )
    info = tmp_path / "bridge_of_this_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bridge-of-this-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nother = bridge_of_this_test:load\n")
    code = (
        "import importlib.metadata as m, services.engine.core.process, torch; "
        "print([e.name for e in m.entry_points(group='torch.backends')])"
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}", "PT_HPU_LAZY_MODE": "0"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "other" in done.stdout


def driver_files(root: Path, *, cards: int) -> Path:
    (root / "sys/module/habanalabs").mkdir(parents=True)
    (root / "sys/module/habanalabs/version").write_text("1.24.0-1a2b3c\n")
    (root / "dev/accel").mkdir(parents=True)
    for index in range(cards):
        (root / f"dev/accel/accel{index}").touch()
        (root / f"dev/accel/accel_controlD{index}").touch()
    return root


def test_no_card(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(open_card, "Driver", lambda root: Driver(tmp_path / "nothing"))
    assert refusal(host, driver=0).startswith("there is no HPU: the driver habanalabs is not loaded; install")
    root = driver_files(tmp_path / "empty", cards=0)
    monkeypatch.setattr(open_card, "Driver", lambda _: Driver(root))
    assert "start the container with --runtime=habana" in refusal(host, driver=0)
    other = driver_files(tmp_path / "cards", cards=2)
    monkeypatch.setattr(open_card, "Driver", lambda _: Driver(other))
    expected = "Habana software 1.24.0 sees none of the 2 cards of driver 1.24.0-1a2b3c: use the image"
    assert refusal(host, driver=0).startswith(expected)


def test_a_busy_card(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = host.other_process()
    other.touch()
    root = driver_files(tmp_path / "host", cards=1)
    for pid, target, name in ((71, "/dev/accel/accel0", "python3"), (72, "/dev/null", "bash")):
        process = root / f"proc/{pid}"
        (process / "fd").mkdir(parents=True)
        (process / "fd/5").symlink_to(target)
        (process / "comm").write_text(f"{name}\n")
    monkeypatch.setattr(open_card, "Driver", lambda _: Driver(root))
    text = refusal(host, modules=1)
    assert text.startswith(
        "every visible HPU is taken by another process, and none can be shared (synStatus=8"
    )
    assert "processes that have one open: 71 (python3): stop that process, or choose a free card" in text
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1")
    assert refusal(host).startswith("the HPU of module 0 is taken by another process")
    monkeypatch.delenv("HLS_MODULE_ID")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "1")
    assert host.open().name == "hpu"
    other.release()


@pytest.mark.parametrize("word", ["x", "²"])
def test_module_numbers_that_are_none(word: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", f"0,{word}")
    assert (
        refusal(host) == f"HABANA_VISIBLE_MODULES must be a list of module numbers such as 0,1, not {word!r}"
    )


def test_a_lazy_mode_that_does_not_go_with_the_options() -> None:
    with pytest.raises(DeviceError, match="PT_HPU_LAZY_MODE=1 does not go with execution mode compile"):
        prepare_environment(ExecutionMode.COMPILE, {"PT_HPU_LAZY_MODE": "1"})


def test_the_environment_of_the_bridge() -> None:
    given = {"PT_HPU_WEIGHT_SHARING": "1"}
    prepare_environment(ExecutionMode.GRAPH, given)
    assert given["PT_HPU_LAZY_MODE"] == "1"
    assert given["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "true"
    # What the operator has set stays.
    assert (given["PT_HPU_WEIGHT_SHARING"], given["EXPERIMENTAL_WEIGHT_SHARING"]) == ("1", "0")


def test_a_recipe_cache_that_cannot_be_written(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = HpuSettings(recipe_cache=RecipeCache(tmp_path / "file" / "recipes"))
    expected = f"recipe cache {tmp_path}/file/recipes cannot be written (Not a directory): make it writable"
    assert refusal(host, hpu=cache).startswith(expected)


def test_a_recipe_cache_whose_disk_is_full(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5 * 2**20}))
    text = refusal(host, hpu=HpuSettings(recipe_cache=RecipeCache(tmp_path)))
    assert text == (
        f"the disk of recipe cache {tmp_path} is full: 5 MiB are free and recipes need at least 64: free "
        "space, or name another directory with --recipe-cache"
    )
    # The operator's own variable is looked at too.
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{tmp_path},false,512")
    assert "is full" in refusal(host)


def test_a_recipe_cache_with_a_comma(host: Host, tmp_path: Path) -> None:
    text = refusal(host, hpu=HpuSettings(recipe_cache=RecipeCache(tmp_path / "a,b")))
    assert "has a comma in its name" in text
