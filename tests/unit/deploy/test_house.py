"""The counts of source trees, and of the files that a chat crosses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Tree = Callable[[Mapping[str, str]], Path]


def test_a_tree_is_counted(house: Any, tree: Tree) -> None:
    root = tree(
        {
            "gateway/a.py": "import gateway.b\n" * 10,
            "gateway/b.py": "def f():\n    import gateway.a\n",
            "catenary/v1/x_pb2.py": "\n" * 1000,
            "services/engine/run.py": "\n" * 100,
            "services/engine/scripted/script.py": "\n" * 50,
            "catenary_testing/stack.py": "\n" * 30,
            "tests/test_a.py": "\n" * 30,
        }
    )
    counts = house.count(root)
    # The faces of gateway, catenary, catenary.v1, services and services.engine are empty.
    assert (counts.files, counts.faces, counts.lines, counts.folders) == (8, 5, 112, 5)
    assert (counts.median, counts.max) == (0, 100)
    assert (counts.testing_files, counts.testing_lines) == (4, 80)
    assert counts.run_circles == []
    assert counts.all_circles == [["gateway.a", "gateway.b"]]
    assert counts.face_circles == []


def test_circles_of_packages_are_counted_below_each_parent(house: Any, tree: Tree) -> None:
    root = tree(
        {
            "services/engine/kv/a.py": "from services.engine.scheduler.b import x",
            "services/engine/scheduler/b.py": "x = 1",
            "services/engine/scheduler/c.py": "import services.engine.kv.d",
            "services/engine/kv/d.py": "",
        }
    )
    counts = house.count(root)
    assert counts.all_circles == []
    assert counts.package_circles == [["services.engine.kv", "services.engine.scheduler"]]


@pytest.mark.parametrize(("values", "expected"), [([7], 7), (list(range(1, 102)), 91), ([1, 2], 1.9)])
def test_percentile(house: Any, values: list[int], expected: float) -> None:
    assert house.percentile(values, 90) == pytest.approx(expected)


def test_a_tree_without_our_source_is_refused(house: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has none of catenary"):
        house.count(tmp_path)


def test_two_trees_are_compared_by_ratios(house: Any, tree: Tree, tmp_path: Path) -> None:
    before = house.count(tree({"gateway/a.py": "\n" * 9, "gateway/b.py": "\n", "gateway/c.py": ""}))
    (tmp_path / "gateway/b.py").unlink()
    (tmp_path / "gateway/c.py").unlink()
    lines = house.compared(before, house.count(tmp_path))
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["files"][:3] == ["4", "2", "0.500"]
    assert rows["lines"][:3] == ["10", "9", "0.900"]
    assert rows["circles"][:3] == ["0", "0", "-"]


def test_a_revision_is_counted_as_git_has_it(house: Any, tree: Tree) -> None:
    root = tree({"gateway/a.py": "\n" * 9})
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run((*git, *command), cwd=root, check=True)
    (root / "gateway/a.py").write_text("")
    with house.tree_of("HEAD", root) as directory:
        assert house.count(directory).lines == 9
    assert house.count(root).lines == 0


def test_files_are_recorded_in_windows_alone(tree: Tree, chat_files: Any) -> None:
    root = tree(
        {
            "gateway/always.py": "def f():\n    return 1\n",
            "gateway/once.py": "def f():\n    return 1\n",
            "gateway/before.py": "def f():\n    return 1\n",
            "gateway/imported.py": "x = 1\n",
            "gateway/resumed.py": "def steps():\n    while True:\n        yield 1\n",
            "run.py": """
                import threading
                from gateway import always, before, once, resumed
                def window(number):
                    open("entered/window", "r+b").write(bytes([number]))
                going = resumed.steps()
                next(going)
                before.f()
                for number in (1, 2):
                    window(number)
                    thread = threading.Thread(target=always.f)
                    thread.start()
                    thread.join()
                    next(going)
                    import gateway.imported
                    if number == 1:
                        once.f()
                    window(0)
                    before.f()
            """,
        }
    )
    (root / "entered").mkdir()
    (root / "entered/window").write_bytes(b"\0")
    own = {"ENTERED_DIRECTORY": str(root / "entered"), "ENTERED_ROOT": str(root)}
    path = {"PYTHONPATH": os.pathsep.join((str(chat_files.HOOK), str(root)))}
    subprocess.run((sys.executable, "run.py"), cwd=root, env=os.environ | own | path, check=True)
    (file,) = (root / "entered").glob("*.entered")
    entered = chat_files.read_windows(root / "entered", {int(file.stem): "gateway"})
    counted = chat_files.gathered(root, entered, 2)
    assert counted.files == ["gateway/always.py", "gateway/resumed.py"]
    assert counted.sometimes == ["gateway/once.py"]
    assert counted.lines == 5
    assert counted.by_process == {"gateway": counted.files}


def test_files_of_all_processes_are_joined_without_stubs_and_others(tree: Tree, chat_files: Any) -> None:
    root = tree({"gateway/a.py": "\n", "services/b.py": "\n\n"})
    both = {1, 2}
    entered = {
        "gateway": {"gateway/a.py": both, "catenary/v1/x_pb2.py": both, "tests/t.py": both},
        "core": {"services/b.py": both, "gateway/a.py": {1}},
    }
    counted = chat_files.gathered(root, entered, 2)
    expected = {"chat": 2, "lines of these": 3, "of these, while idle too": 0, "core": 1, "gateway": 1}
    assert counted.figures() == expected


def test_files_that_are_entered_without_a_chat_are_told(tree: Tree, chat_files: Any) -> None:
    root = tree({"gateway/a.py": "", "gateway/b.py": "", "gateway/timer.py": ""})
    entered = {"gateway": {"gateway/a.py": {1, 2}, "gateway/b.py": {1, 2, 3}, "gateway/timer.py": {3}}}
    counted = chat_files.gathered(root, entered, 2)
    assert (counted.files, counted.idle) == (["gateway/a.py", "gateway/b.py"], 1)


def test_the_command_line_of_a_tree_is_its_entry_point(chat_files: Any, tree: Tree) -> None:
    root = tree({"pyproject.toml": '[project.scripts]\ncatenary = "catenary_apps.cli.main:main"\n'})
    assert chat_files.command_of(root) == "catenary_apps.cli.main"


def test_counts_are_printed_as_a_table_and_as_json(
    house: Any, laws: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        laws, "ROOT", tree({"gateway/a.py": "import gateway.b", "gateway/b.py": "import gateway.a"})
    )
    assert house.main([]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].split()[:2] == ["files", "3"]
    assert "circle of 2: gateway.a, gateway.b" in told
    assert house.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all_circles"] == [["gateway.a", "gateway.b"]]
