"""The laws of the house on small trees, and the list of known violations."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Tree = Callable[[Mapping[str, str]], Path]
LONG_ENOUGH = "\n" * 60


def broken(laws: Any, root: Path, law: str) -> dict[str, str]:
    """Details by file of the violations of a law."""
    return {one.file: one.detail for one in laws.find_violations(root) if one.law == law}


def test_a_circle_is_found_with_the_way_round(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "gateway/a.py": "from gateway.b import x",
            "gateway/b.py": "def f():\n    from gateway.c import x",
            "gateway/c.py": "import gateway.a",
            "gateway/outside.py": "import gateway.a",
        }
    )
    assert broken(laws, root, "circle") == {
        "gateway/a.py": "gateway.a -> gateway.b -> gateway.c -> gateway.a",
        "gateway/b.py": "gateway.b -> gateway.c -> gateway.a -> gateway.b",
        "gateway/c.py": "gateway.c -> gateway.a -> gateway.b -> gateway.c",
    }


def test_a_circle_through_the_packages_own_face_is_found(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "gateway/p/__init__.py": "from gateway.p.a import thing",
            "gateway/p/a.py": "from gateway.p import b",
            "gateway/p/b.py": "x = 1",
        }
    )
    assert set(broken(laws, root, "circle")) == {"gateway/p/__init__.py", "gateway/p/a.py"}


def test_a_circle_through_another_packages_face_is_found(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "gateway/p/__init__.py": "from gateway.p.a import thing",
            "gateway/p/a.py": "from gateway.q.x import thing",
            "gateway/q/x.py": "from gateway.p.leaf import thing",
            "gateway/p/leaf.py": "thing = 1",
        }
    )
    assert set(broken(laws, root, "circle")) == {"gateway/p/__init__.py", "gateway/p/a.py", "gateway/q/x.py"}


def test_a_face_that_hands_on_its_modules_is_no_circle(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "gateway/p/__init__.py": "from gateway.p.a import thing",
            "gateway/p/a.py": "from gateway.p.b import x",
            "gateway/p/b.py": "x = 1",
            "gateway/reader.py": "from gateway.p import thing",
        }
    )
    assert broken(laws, root, "circle") == {}


def test_the_lazy_import_upward_is_no_circle_through_faces(laws: Any, tree: Tree) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from catenary_apps.llm import LLM"
    root = tree(
        {
            "catenary/__init__.py": lazy,
            "catenary/wire.py": "x = 1",
            "catenary_apps/llm/__init__.py": "from catenary.wire import x\nLLM = x",
        }
    )
    assert broken(laws, root, "circle") == broken(laws, root, "layer") == {}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("catenary/a.py", "gateway.b"),
        ("catenary/a.py", "catenary_apps.b"),
        ("gateway/a.py", "services.router.b"),
        ("services/router/a.py", "services.engine.b"),
        ("services/engine/a.py", "catenary_apps.b"),
        ("services/tokenizer/a.py", "catenary_testing.b"),
        ("catenary_apps/a.py", "catenary_testing.b"),
        ("services/engine/a.py", "catenary_apps.migration.b"),
    ],
)
def test_groups_import_downward_alone(laws: Any, tree: Tree, importer: str, imported: str) -> None:
    root = tree({importer: f"def late():\n    import {imported}", f"{imported.replace('.', '/')}.py": ""})
    (detail,) = broken(laws, root, "layer").values()
    assert detail.endswith(f"{imported} in line 2")


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("gateway/a.py", "catenary.b"),
        ("services/engine/a.py", "services.engine.b"),
        ("catenary_apps/a.py", "gateway.b"),
        ("catenary_testing/a.py", "catenary_apps.b"),
        ("catenary_apps/cli/a.py", "services.router.b"),
    ],
)
def test_the_table_allows(laws: Any, tree: Tree, importer: str, imported: str) -> None:
    root = tree({importer: f"import {imported}", f"{imported.replace('.', '/')}.py": ""})
    assert broken(laws, root, "layer") == {}


def test_the_table_is_closed(laws: Any) -> None:
    for group, allowed in laws.TABLE.items():
        for other in allowed:
            assert set(laws.TABLE[other]) <= {group, *allowed}, (group, other)


def test_a_pure_core_that_reaches_torch_through_others_is_found_with_the_chain(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "services/engine/kv/pool.py": "from services.engine.near import x",
            "services/engine/near.py": "def f():\n    from services.engine.far import y",
            "services/engine/far.py": "import torch.nn",
            "services/engine/runner/run.py": "import torch",
        }
    )
    chain = "services.engine.kv.pool -> services.engine.near -> services.engine.far -> torch"
    assert broken(laws, root, "pure-torch") == {"services/engine/kv/pool.py": chain}


def test_a_pure_core_reaches_what_a_face_on_its_way_imports(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "services/router/fleet/members.py": "from catenary.rpc.names import x",
            "catenary/rpc/__init__.py": "import asyncio\nimport grpc.aio",
            "catenary/rpc/names.py": "x = 1",
        }
    )
    chain = "services.router.fleet.members -> catenary.rpc"
    assert broken(laws, root, "pure-asyncio") == {"services/router/fleet/members.py": f"{chain} -> asyncio"}
    assert broken(laws, root, "pure-grpc") == {"services/router/fleet/members.py": f"{chain} -> grpc"}


def test_a_stub_of_a_service_counts_as_grpc_and_one_of_messages_does_not(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "services/router/placement/a.py": "from catenary.v1 import x_pb2",
            "services/router/placement/b.py": "from catenary.v1 import x_pb2_grpc",
            "catenary/v1/x_pb2.py": "",
            "catenary/v1/x_pb2_grpc.py": "",
        }
    )
    assert set(broken(laws, root, "pure-grpc")) == {"services/router/placement/b.py"}


def test_an_import_for_type_checkers_leaves_a_core_pure(laws: Any, tree: Tree) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    root = tree({"services/engine/scheduler/a.py": text})
    assert broken(laws, root, "pure-torch") == {}


def test_a_small_module_of_one_neighbour_is_found(laws: Any, tree: Tree) -> None:
    root = tree({"gateway/p/small.py": "x = 1", "gateway/p/big.py": "from gateway.p.small import x"})
    assert broken(laws, root, "small") == {"gateway/p/small.py": "1 lines, which gateway.p.big alone imports"}


@pytest.mark.parametrize(
    "files",
    [
        {"gateway/p/small.py": LONG_ENOUGH, "gateway/p/big.py": "import gateway.p.small"},
        {
            "gateway/p/small.py": "",
            "gateway/p/one.py": "import gateway.p.small",
            "gateway/p/two.py": "import gateway.p.small",
        },
        {"gateway/p/small.py": "", "gateway/other.py": "import gateway.p.small"},
        {"gateway/p/small.py": "x = 1", "gateway/p/__init__.py": "from gateway.p.small import x"},
        {"gateway/p/__main__.py": "import gateway.p.app", "gateway/p/app.py": LONG_ENOUGH},
    ],
    ids=["of 60 lines", "two readers", "a reader elsewhere", "the face hands it on", "what starts"],
)
def test_a_module_that_may_stand_alone(laws: Any, tree: Tree, files: Mapping[str, str]) -> None:
    assert broken(laws, tree(files), "small") == {}


def test_files_of_more_than_600_lines_are_found_except_stubs(laws: Any, tree: Tree) -> None:
    long = "\n" * 601
    root = tree(
        {
            "gateway/long.py": long,
            "gateway/fits.py": "\n" * 600,
            "services/engine/long.cpp": long,
            "tests/unit/test_long.py": long,
            "catenary/v1/x_pb2.py": long,
        }
    )
    assert set(broken(laws, root, "long")) == {
        "gateway/long.py",
        "services/engine/long.cpp",
        "tests/unit/test_long.py",
    }


def test_citations_of_documents_that_are_not_there_are_found(laws: Any, tree: Tree) -> None:
    root = tree(
        {
            "docs/gaudi.md": "See [another](design/engine.md), [this](../README.md) and (away.md).",
            "docs/design/engine.md": "",
            "README.md": "docs/gaudi.md",
            "gateway/a.py": '"""As docs/gaudi.md and engine.md say, and https://example.org/else.md."""',
            "gateway/b.py": '"""Source: facts/gaudi.md 2.4."""',
            "gateway/c.py": "# (facts 4.5 and\n# Facts 2.1), as the facts are, gaudi-facts 4.5\n",
        }
    )
    assert broken(laws, root, "citation") == {
        "docs/gaudi.md": "away.md",
        "gateway/b.py": "facts/gaudi.md",
        "gateway/c.py": "Facts 2.1, facts 4.5",
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What it holds."""', True),
        ('def close() -> None:\n    """It is closed."""', True),
        ('class Span:\n    """See Span."""', True),
        ('def memory_limit() -> None:\n    """Return the memory limit."""', True),
        ('def close() -> None:\n    """Close the stream; waiting requests fail."""', False),
        ('def whatever() -> None:\n    """Whether it waits."""', False),
        ("def close() -> None:\n    pass", False),
    ],
)
def test_docstrings_that_say_nothing_are_found(laws: Any, tree: Tree, source: str, found: bool) -> None:
    root = tree({"catenary/__init__.py": "", "catenary/a.py": source})
    assert [one.file for one in laws.find_violations(root) if one.law == "caption"] == (
        ["catenary/a.py"] if found else []
    )


def test_what_is_listed_passes_what_is_not_and_what_is_mended_fails(laws: Any, tree: Tree) -> None:
    root = tree({"gateway/p/small.py": "", "gateway/p/big.py": "import gateway.p.small"})
    listed = root / "violations.toml"
    assert laws.problems(root, listed) == [
        "gateway/p/small.py: small: 0 lines, which gateway.p.big alone imports"
    ]
    laws.write_list({("small", "gateway/p/small.py"): "it is a table"}, listed)
    assert laws.problems(root, listed) == []
    laws.write_list({("small", "gateway/p/small.py"): " "}, listed)
    assert laws.problems(root, listed) == [
        "gateway/p/small.py: small: listed in violations.toml without a reason"
    ]
    (root / "gateway/p/other.py").write_text("import gateway.p.small")
    laws.write_list({("small", "gateway/p/small.py"): "it is a table"}, listed)
    (line,) = laws.problems(root, listed)
    assert line.startswith("gateway/p/small.py: small: listed in violations.toml, and mended or gone")


def test_the_list_is_read_as_it_was_written(laws: Any, tmp_path: Path) -> None:
    rows = {("small", "b/c.py"): "so", ("pure-torch", "a/b.py"): "why", ("small", "a/b.py"): 'a "reason"'}
    laws.write_list(rows, tmp_path / "list.toml")
    assert laws.read_list(tmp_path / "list.toml") == rows
    text = (tmp_path / "list.toml").read_text()
    assert text.index("[pure-torch]") < text.index("[small]")


def test_the_list_follows_files_that_moved(laws: Any) -> None:
    rows = {("small", "old.py"): "so", ("long", "kept.py"): "why"}
    assert laws.followed(rows, {"old.py": "new.py"}) == {
        ("small", "new.py"): "so",
        ("long", "kept.py"): "why",
    }


def test_renames_are_those_that_git_sees(laws: Any, tree: Tree) -> None:
    text = "".join(f"line {number}\n" for number in range(20))
    root = tree({"old/a.py": text, "kept.py": "x = 1"})
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run((*git, *command), cwd=root, check=True)
    (root / "new").mkdir()
    subprocess.run((*git, "mv", "old/a.py", "new/b c.py"), cwd=root, check=True)
    (root / "new/b c.py").write_text(text + "one more\n")
    assert laws.renamed_since("HEAD", root) == {"old/a.py": "new/b c.py"}


def test_the_list_is_pruned_and_added_to(
    laws: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree({"gateway/p/small.py": "", "gateway/p/big.py": "import gateway.p.small"})
    listed = root / "violations.toml"
    laws.write_list({("small", "gateway/gone.py"): "why"}, listed)
    monkeypatch.setattr(laws.find_violations, "__defaults__", (root, None))
    monkeypatch.setattr(laws.problems, "__defaults__", (root, listed, None))
    monkeypatch.setattr(laws.read_list, "__defaults__", (listed,))
    monkeypatch.setattr(laws.write_list, "__defaults__", (listed,))
    assert laws.main(["--prune"]) == 1
    assert capsys.readouterr().out.startswith("gateway/p/small.py: small: 0 lines")
    assert laws.read_list(listed) == {}
    assert laws.main(["--add", "small", "gateway/p/small.py", "it is a table"]) == 0
    assert laws.read_list(listed) == {("small", "gateway/p/small.py"): "it is a table"}
    assert capsys.readouterr().out == ""
