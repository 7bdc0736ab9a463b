"""Options, variables, commands, faces, bucket files and protos are as tests/data/surface has them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.support import surface


@pytest.mark.parametrize("name", surface.in_process())
def test_surface_is_as_stored(name: str) -> None:
    difference = surface.difference(name, surface.in_process()[name]())
    if difference:
        pytest.fail(difference, pytrace=False)


def test_a_difference_is_shown_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface, "stored", lambda _: {"--port": {"default": "8000"}})
    told = surface.difference("options", {"--port": {"default": "8001"}})
    assert told.splitlines()[0].startswith("tests/data/surface/options.json differs")
    assert {'-  "default": "8000"', '+  "default": "8001"'} <= set(told.splitlines())
    assert surface.difference("options", {"--port": {"default": "8000"}}) == ""


def test_names_of_our_modules_are_in_no_stored_surface() -> None:
    # The protos' package is a name on the wire, and no module's.
    for file in (file for file in surface.STORED.glob("*.json") if file.stem != "protos"):
        lines = [line for line in file.read_text().splitlines() if surface.OURS.search(line)]
        # What a person types stays: python -m services.engine.
        assert all("python -m " in line or '"services.' in line for line in lines), (file.name, lines)


def test_schemas_of_one_name_are_told_apart_without_their_modules() -> None:
    def document(first: str, second: str) -> dict[str, object]:
        schemas = {
            f"{first}.Message": {"type": "string"},
            f"{second}.Message": {"type": "array", "items": {"$ref": "#/components/schemas/Other"}},
            "Other": {"$ref": f"#/components/schemas/{first}.Message"},
        }
        return {
            "paths": {"$ref": f"#/components/schemas/{second}.Message"},
            "components": {"schemas": schemas},
        }

    expected = {
        "paths": {"$ref": "#/components/schemas/Message"},
        "components": {
            "schemas": {
                "Message-1": {"type": "string"},
                "Message": {"type": "array", "items": {"$ref": "#/components/schemas/Other"}},
                "Other": {"$ref": "#/components/schemas/Message-1"},
            }
        },
    }
    for modules in (("gateway.a", "gateway.b"), ("gateway.z", "gateway.c.d")):
        assert surface.with_plain_names(document(*modules)) == expected


def test_signatures_name_neither_modules_nor_addresses() -> None:
    sentinel = object()

    def function(a: catenary.rpc.TlsFiles = sentinel, *, b: int = 3) -> gateway.schemas.Chat: ...  # type: ignore[name-defined, assignment, empty-body]  # noqa: F821

    assert inspect.isfunction(function)
    assert surface.signature(function) == ["a: TlsFiles = <object>", "*", "b: int = 3", "-> Chat"]


def test_families_of_a_metrics_page() -> None:
    page = """\
# HELP a_total Text.
# TYPE a_total counter
a_total{model="m",code="200"} 1.0
a_total{model="m",extra="}"} 1.0
# TYPE b_seconds histogram
b_seconds_bucket{le="1.0"} 2.0
b_seconds_sum 3.0
# TYPE never_total counter
# TYPE a_created gauge
a_created{model="m"} 1.7e9
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.0
"""
    assert surface.families(page) == {
        "a_total": {"type": "counter", "labels": ["code", "extra", "model"]},
        "b_seconds": {"type": "histogram", "labels": ["le"]},
        "never_total": {"type": "counter", "labels": []},
    }


def test_labels_count_where_both_pages_had_samples() -> None:
    none: dict[str, Any] = {"type": "counter", "labels": []}
    some = {"type": "counter", "labels": ["a"]}
    other = {"type": "counter", "labels": ["b"]}
    before = {"x": {"one": some, "two": none, "three": some}}
    after = {"x": {"one": none, "two": some, "three": other, "new": some}}
    expected = {"x": {"one": some, "two": none, "three": other, "new": some}}
    assert surface.seen_alike(before, after) == expected


def test_texts_are_left_out_of_a_document_and_fields_of_these_names_stay() -> None:
    document = {
        "summary": "x",
        "properties": {"description": {"type": "string", "description": "x"}},
        "list": [{"description": "x", "a": 1}],
    }
    assert surface.without_texts(document) == {
        "properties": {"description": {"type": "string"}},
        "list": [{"a": 1}],
    }
