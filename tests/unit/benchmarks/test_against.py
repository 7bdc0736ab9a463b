"""Two trees measured in turn: which tree's packages run, what is read, when a ratio holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.added_latency import row
from benchmarks.against import PeerError, Ratio, Tree, figures_of, hops_of, ratios_of, turned
from benchmarks.peers import FIRST_TOKEN, Sample

CPU = "CPU of a request, ms, its tokens included, at 50 requests a second: "
SPENT = "gateway 1.50, router 0.50, tokenizer 0.20, tokenizer's worker 0.10, engine 0.70, this client 9.00"


def told(first: str = "to the first token", cpu: str = CPU) -> str:
    """What benchmarks.added_latency prints, by its own function for rows."""
    direct, through = [0.1, 0.1, 0.1], [0.104, 0.105, 0.112]
    slow = [0.14, 0.15, 0.16]
    rows = [row(first, direct, through), row("to the last token", direct, slow)]
    return "\n".join(["192 requests of about 32 tokens", "| ms | direct, mean |", *rows, cpu + SPENT])


def make_tree(root: Path, entry: str = "catenary_apps.cli.main:main") -> Tree:
    """A tree with the packages that are looked for."""
    (root / "pyproject.toml").write_text(f'[project.scripts]\ncatenary = "{entry}"\n')
    for name in ("catenary", "gateway", "services", "services/engine"):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
    return Tree("this", root)


@pytest.mark.parametrize(
    ("ratios", "holds"),
    [
        ((1.0, 1.0, 1.0), True),
        ((0.97, 0.96, 0.98), True),
        ((0.96, 0.95, 0.99), False),
        ((0.90, 0.80, 1.0), True),
        ((0.90, 0.80, 1.10), True),
        ((1.2, 1.3, 1.4), True),
        ((0.5,), False),
    ],
)
def test_a_ratio_holds_by_its_median_or_if_its_spread_includes_1(
    ratios: tuple[float, ...], holds: bool
) -> None:
    assert Ratio("start, s", 1, 1, ratios, len(ratios)).holds is holds


def test_ratios_are_of_the_same_repeat_and_more_is_better() -> None:
    before = {"8 streams, tokens/s": [100.0, 50.0, 80.0], "start, s": [10.0, 20.0, 8.0], "gone": [1.0]}
    after = {"8 streams, tokens/s": [110.0, 60.0, 40.0], "start, s": [5.0, 20.0, 16.0], "new": [1.0]}
    rate, start = ratios_of(before, after)
    assert rate == Ratio("8 streams, tokens/s", 80.0, 60.0, (1.1, 1.2, 0.5), 3)
    assert start == Ratio("start, s", 10.0, 16.0, (2.0, 1.0, 0.5), 3)
    assert rate.cells() == ["8 streams, tokens/s", "80", "60", "1.100", "0.500 to 1.200", "holds"]


def test_a_figure_that_is_nothing_in_half_of_the_repeats_was_not_measured() -> None:
    (found,) = ratios_of({"added, ms": [0.0, 2.0]}, {"added, ms": [1.0, 1.0]})
    assert (found.ratios, found.measured, found.holds) == ((2.0,), False, False)
    assert found.cells() == ["added, ms", "1", "1", "-", "-", "NOT MEASURED"]
    (found,) = ratios_of({"added, ms": [-1.0, 2.0, 3.0]}, {"added, ms": [1.0, 1.0, 1.0]})
    assert (found.ratios, found.measured, found.holds) == ((2.0, 3.0), True, True)


def test_hops_are_read_as_the_benchmark_prints_them() -> None:
    assert hops_of(told()) == pytest.approx(
        {
            "added to the first token, ms": 5.0,
            "added to the last token, ms": 50.0,
            "CPU of a request, gateway, ms": 1.5,
            "CPU of a request, router, ms": 0.5,
            "CPU of a request, tokenizer, ms": 0.3,
            "CPU of a request, engine, ms": 0.7,
            "CPU of a request, all services, ms": 3.0,
        }
    )


@pytest.mark.parametrize("text", ["", told(first="otherwise"), told(cpu="CPU otherwise: ")])
def test_another_output_is_an_error(text: str) -> None:
    with pytest.raises(PeerError, match="printed something else"):
        hops_of(text)


def test_a_run_gives_a_rate_and_cpu_a_token() -> None:
    sample = Sample("this", 8, 0, 320.0, 1.6, 1.024, 0.0, 64)
    assert dict(figures_of(sample)) == {"8 streams, tokens/s": 320.0, "8 streams, CPU a token, ms": 2.0}
    single = Sample("this", 1, 0, 80.0, 1.6, 0.256, 0.0, 64)
    assert dict(figures_of(single)) == {"1 stream, tokens/s": 80.0, "1 stream, CPU a token, ms": 2.0}
    first = Sample("this", FIRST_TOKEN, 0, 250.0, 1.6, 1.024, 0.0, 64)
    assert dict(figures_of(first)) == {"first token of 400 words, ms": 250.0}


def test_trees_take_turns_in_being_first() -> None:
    assert [turned(("a", "b"), repeat) for repeat in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_a_tree_is_started_by_its_entry_point(tmp_path: Path) -> None:
    assert make_tree(tmp_path).command == (sys.executable, "-m", "catenary_apps.cli.main")


def test_a_tree_without_entry_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no entry point `catenary`"):
        _ = Tree("this", tmp_path).command


def test_processes_of_a_tree_import_its_packages(tmp_path: Path) -> None:
    make_tree(tmp_path).check()


def test_packages_of_another_tree_are_noticed(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    (tmp_path / "gateway/__init__.py").write_text("__file__ = '/elsewhere/gateway/__init__.py'")
    with pytest.raises(PeerError, match=r"import /elsewhere/gateway/__init__\.py"):
        tree.check()


def test_a_command_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no such thing"):
        make_tree(tmp_path).run((sys.executable, "-c", "raise SystemExit('no such thing')"))


def test_a_revision_is_checked_out_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "file").write_text("one")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run((*git, *command), cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("two")
    monkeypatch.setattr(against, "HERE", tmp_path)
    with against.checkout("HEAD") as root:
        assert (root / "file").read_text() == "one"
    assert not root.exists()
    listed = subprocess.run(
        ("git", "worktree", "list"), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1
    with pytest.raises(PeerError, match=r"invalid reference|not a valid"), against.checkout("no-such"):
        pass
