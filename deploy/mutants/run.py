"""`make mutants`: breaks our HPU code in stored ways, one at a time, and demands that a named test notices.

Each mutation stands for a trap of the hardware (gaudi-facts.md) into which code would fall without any error
on a CPU. It is applied to a temporary copy of the tree, where exactly its test runs and must fail; in the
tree as it is, that test must pass. A mutation whose text is gone is an error: it has to follow the code.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Of pytest: all passed, and some test failed. Others mean that it could not run the test at all.
_PASSED, _FAILED = 0, 1

# What takes long to load. Nothing of ours: it would be that of the unmutated tree.
_PRELOADED = ["pytest", "torch", "torch._dynamo", "transformers.models.llama.modeling_llama"]
_SERVER = multiprocessing.get_context("forkserver")


class MutantError(Exception):
    """What is wrong with a mutation, or with the test that should notice it."""


def apply(mutation: Mutation, tree: Path) -> None:
    """Write the mutated file into a tree. Raises MutantError unless the old text is there exactly once."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = text.count(mutation.old)
    if found != 1:
        raise MutantError(f"{mutation.file} has the mutation's text {found} times, not once: update it")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def copy_tree(target: Path) -> None:
    """Copy the files that git knows or would take up."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run tests in a tree. Returns pytest's exit code and the end of its output.

    In a process forked from one that has loaded torch and nothing of ours: loading it takes longer than most
    of the tests.
    """
    with tempfile.NamedTemporaryFile("r", prefix="catenary-mutant-", suffix=".log") as log:
        process = _SERVER.Process(target=_pytest, args=(str(tree), list(tests), log.name))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            return -1, f"no end within {seconds:.0f} s"
        return process.exitcode, "\n".join(log.read().splitlines()[-20:])


def _pytest(tree: str, tests: list[str], log: str) -> None:
    """Run in the forked process, which ends with it."""
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path[:] = [tree, *(path for path in sys.path if Path(path).resolve() not in (ROOT, HERE))]
    code = pytest.main(["-x", "--show-capture=no", "-p", "no:cacheprovider", "--rootdir", tree, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def try_mutation(mutation: Mutation, seconds: float) -> str | None:
    """What is wrong, or None if the mutation's test notices it."""
    with tempfile.TemporaryDirectory(prefix="catenary-mutant-") as name:
        tree = Path(name)
        copy_tree(tree)
        try:
            apply(mutation, tree)
        except MutantError as error:
            return str(error)
        code, output = run_tests(tree, [mutation.test], seconds)
    if code == _FAILED:
        return None
    if code == _PASSED:
        return f"{mutation.test} passes all the same"
    return f"{mutation.test} could not be run (pytest's exit code {code}):\n{output}"


def check_unmutated(tests: Sequence[str], seconds: float) -> str | None:
    """What is wrong, or None if the tests pass in the tree as it is."""
    code, output = run_tests(ROOT, tests, seconds)
    return None if code == _PASSED else f"the tests do not pass without a mutation:\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traps", nargs="*", help="names of mutations to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of a run (default: %(default)s)")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.traps or m.trap in options.traps]
    if unknown := set(options.traps) - {m.trap for m in MUTATIONS}:
        parser.error(f"no mutation called {', '.join(sorted(unknown))}")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # Tests' processes end at once, with semaphores that they do not give back.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    _SERVER.set_forkserver_preload(_PRELOADED)
    started = time.monotonic()
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        tests = sorted({m.test for m in chosen})
        unmutated = pool.submit(check_unmutated, tests, options.seconds)
        results = [(m, pool.submit(try_mutation, m, options.seconds)) for m in chosen]
        for name, result in [("unmutated", unmutated), *((m.trap, future) for m, future in results)]:
            problem = result.result()
            wrong += problem is not None
            verdict = "ok    " if problem is None else "FAILED"
            sys.stdout.write(f"{verdict}  {name}" + (f": {problem}\n" if problem else "\n"))
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} mutations, {wrong} problems, {time.monotonic() - started:.0f} s\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
