"""The engine uses no name of torch that a supported release lacks, by the table of stored names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from catenary.gaudi import RELEASES
from services.engine.device import grouped_mm, plain_grouped_mm
from tests.support.repository import ROOT
from tests.support.torch_releases import lacking, names, stored_releases

SOURCES = sorted((ROOT / "services/engine").rglob("*.py"))
SUPPORTED = [f"{major}.{minor}" for each in RELEASES.values() for major, minor in each.torches]
# The vendor's bridge brings these.
VENDORS = ("torch.hpu", "torch.ops.hpu")
# Old releases make these where no source shows them, or they are named only after a look whether they exist.
UNSEEN = {"torch.Tensor._make_wrapper_subclass"}
# Members of a tensor that other objects have too.
COMMON = {"index"}


def test_the_table_has_the_torch_of_every_supported_release() -> None:
    assert set(SUPPORTED) <= set(stored_releases())
    assert SUPPORTED[0] == "2.7"


def test_the_table_knows_what_came_and_what_stayed() -> None:
    assert "grouped_mm" in lacking("2.7")["torch.nn.functional"]
    assert "grouped_mm" in lacking("2.9")["torch.nn.functional"]
    assert "grouped_mm" not in lacking("2.10")["torch.nn.functional"]
    for release in SUPPORTED:
        assert {"matmul", "bfloat16", "inference_mode"} <= names(release)["torch"]
        assert "index_reduce_" in names(release)["torch.Tensor"]
        assert "recompile_limit" in names(release)["torch._dynamo.config"]


@pytest.mark.parametrize("release", SUPPORTED)
def test_no_source_names_what_a_release_lacks(release: str) -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in torch_names(ast.parse(path.read_text()))
        if name not in UNSEEN and missing(release, name)
    ]
    assert problems == []


@pytest.mark.parametrize("release", SUPPORTED)
def test_no_source_calls_a_method_that_tensors_of_a_release_lack(release: str) -> None:
    absent = lacking(release)["torch.Tensor"] - COMMON
    problems = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in absent
        and f"torch.Tensor.{node.attr}" not in UNSEEN
    ]
    assert problems == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch.nn.functional import grouped_mm", True),
        ("import torch\ntorch.nn.functional.grouped_mm(a, b)", True),
        ("from torch import nn\nnn.functional.grouped_mm(a, b)", True),
        ("import torch as t\nt.compiler.nested_compile_region", True),
        ("from torch._dynamo import config\nconfig.recompile_limit = 9", False),
        ("import torch\ntorch._dynamo.config.nested_graph_breaks = True", True),
        ("import torch._dynamo.nothing_here", True),
        ("from torch.nn.functional import pad", False),
        ("import torch\ntorch.ops.hpu.anything", False),
        ("import torch\ntorch.ops.aten.mm.default", False),
        ("import torch\ntorch.ops.aten.nothing_here.default", True),
    ],
)
def test_every_way_to_name_a_part_of_torch_is_seen(source: str, expected: bool) -> None:
    assert any(missing("2.7", name) for _, name in torch_names(ast.parse(source))) is expected


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "release",
    [
        each if each < "2.9" or each == "2.9" else pytest.param(each, marks=pytest.mark.long)
        for each in SUPPORTED
    ],
)
def test_every_module_of_the_engine_imports(release: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_releases", release],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # All but the root itself, and a folder without `__init__` that stands for a package of the vendor.
    modules = [each for each in SOURCES if "hpex" not in each.parts]
    assert int(done.stdout.split()[-1]) == len(modules) - 1


@pytest.mark.parametrize("compiling", [False, True])
def test_the_grouped_product_is_the_same_without_the_kernel(
    compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weight = torch.randn(9, 48), torch.randn(5, 48, 64)
    ends = torch.tensor([2, 5, 5, 9, 9], dtype=torch.int32)
    expected = grouped_mm(rows, weight, ends)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    torch.testing.assert_close(plain_grouped_mm(rows, weight, ends), expected, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr("services.engine.device.kernels._TORCH_GROUPED_MM", None)
    torch.testing.assert_close(grouped_mm(rows, weight, ends), expected, atol=1e-5, rtol=1e-5)


def torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every dotted name under torch that a module imports or reads, whole chains once, with its line."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in known:
                yield node.lineno, ".".join([known[value.id], *reversed(parts)])


def missing(release: str, name: str) -> bool:
    """Whether a release lacks a dotted name. Inside of classes and of unlisted modules all is there."""
    table = names(release)
    first, *parts = name.split(".")
    if name.startswith(VENDORS):
        return False
    module = first
    for part in parts:
        if module == "torch.ops":
            module = f"{module}.{part}"
            continue
        if module not in table:
            return False
        # An operator and its twin in place are declared together.
        if part not in table[module] and not (
            module == "torch.ops.aten" and part.rstrip("_") in table[module]
        ):
            return True
        module = f"{module}.{part}"
    return False
