"""The names that each release of torch has, by tests/data/torch-names.json, and hiding what one lacks.

Run as a script it hides them from everything but torch itself, imports every module of the engine, and with a
model's directory serves a prompt on a simulated HPU: python -m tests.support.torch_releases 2.7 [MODEL MODE].
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "data/torch-names.json"
PROMPT = [5, 9, 13, 21]
# On a card the vendor's bridge is the device. Its stand-in needs help that torch gives since 2.10.
_STAND_IN = "services.engine.device.sim.registration"


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(TABLE.read_text())
    return document


def stored_releases() -> list[str]:
    """Every release of the table, oldest first."""
    return list(_document()["releases"])


@cache
def names(release: str) -> dict[str, frozenset[str]]:
    """By module the names that a release has; modules that it lacks are not there."""
    found: dict[str, frozenset[str]] = {}
    for module, groups in _document()["modules"].items():
        having = [text for key, text in groups.items() if release in key.split()]
        if having:
            found[module] = frozenset(" ".join(having).split())
    return found


def lacking(release: str) -> dict[str, frozenset[str]]:
    """By module the names that a later release of the table has and this one has not."""
    newest = names(stored_releases()[-1])
    own = names(release)
    return {module: found - own.get(module, frozenset()) for module, found in newest.items()}


def hide(release: str) -> None:
    """Makes attributes and imports fail that this release has not, for every caller outside of torch."""
    for name, absent in lacking(release).items():
        # What the compiler writes runs as its caller's code, and torch._C has no source: the test of sources
        # is theirs.
        module = None if name.startswith(("torch._dynamo", "torch._inductor")) else sys.modules.get(name)
        if type(module) is ModuleType and module.__file__ is not None and module.__file__.endswith(".py"):
            _hide(module, absent)


def _hide(module: ModuleType, absent: frozenset[str]) -> None:
    hidden = {name: module.__dict__[name] for name in absent if name in module.__dict__}
    own_uses = _globals_used(module)
    for name in hidden.keys() - own_uses:
        del module.__dict__[name]
    before = module.__dict__.get("__getattr__")

    def missing(name: str) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - Python has no other way
        if name in hidden and (caller in ("torch", _STAND_IN) or caller.startswith("torch.")):
            return hidden[name]
        if before is not None and name not in hidden:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = missing


def _globals_used(module: ModuleType) -> set[str]:
    """Names that the module's own code looks up among its globals, where `__getattr__` is not asked."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def import_engine() -> list[str]:
    """Imports every module of the engine, and returns their names."""
    package = importlib.import_module("services.engine")
    found = [each.name for each in pkgutil.walk_packages(package.__path__, "services.engine.")]
    for name in found:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return found


def main(release: str, model: str | None = None, mode: str = "graph") -> None:
    """Prints how many modules were imported, and the tokens that were served."""
    importlib.import_module("torch")
    hide(release)
    sys.stdout.write(f"{len(import_engine())}\n")
    if model is None:
        return
    from tests.support.torch_engine import LocalCore, tiny_options

    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_prefill_batch": 1}
    device = {"device": "sim", "block_size": 128, "kv_cache_gib": 0.01, "warmup": "full"}
    core = LocalCore(tiny_options(Path(model), **options, **device, enforce_eager=mode in ("eager", "lazy")))
    assert core.engine.device.execution.mode.value == mode
    key = core.submit(PROMPT, max_tokens=4)
    core.run()
    sys.stdout.write(" ".join(map(str, core.outputs[key].token_ids)) + "\n")
    core.engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
