#!/usr/bin/env bash
# `make check`: everything that a reviewer should not have to look for. Each part runs, so that one run shows all
# that is wrong; the exit code says whether any did.
set -uo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=()

part() { # part NAME COMMAND...
  local name=$1
  shift
  if "$@" >"$scratch/log" 2>&1; then
    echo "ok      $name"
  else
    echo "FAILED  $name"
    sed 's/^/        /' "$scratch/log"
    failed+=("$name")
  fi
}

stubs_current() {
  protos/generate.sh "$scratch/stubs" || return
  diff -r -x __pycache__ -x __init__.py -x __init__.pyi catenary/v1 "$scratch/stubs/catenary/v1" ||
    { echo "the stubs differ from protos/: run make protos" && return 1; }
}

wire_compatible() {
  local tag
  tag=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || { echo "no release tag yet" && return 0; }
  "$bin/buf" breaking --against ".git#tag=$tag"
}

checks_typed() {
  (cd deploy/checks && "$bin/mypy" --strict --explicit-package-bases .)
}

part "ruff check" "$bin/ruff" check .
part "ruff format" "$bin/ruff" format --check .
part "mypy --strict" "$bin/mypy"
part "mypy --strict of benchmarks/" "$bin/mypy" --explicit-package-bases benchmarks
part "mypy --strict of deploy/checks/" checks_typed
part "mypy of tests/" "$bin/mypy" --config-file tests/mypy.ini tests
part "buf lint" "$bin/buf" lint
part "stubs match protos" stubs_current
part "wire compatible with the last release" wire_compatible
part "lock files match pyproject.toml" "$bin/python" deploy/checks/locks.py
part "generated pages of docs/ are current" "$bin/python" docs/generate.py --check
part "services import without torch" "$bin/python" deploy/checks/imports.py
part "laws of the house" "$bin/python" deploy/checks/layers.py
if [ ${#failed[@]} -gt 0 ]; then
  printf 'make check: failed: %s\n' "${failed[@]}"
  exit 1
fi
