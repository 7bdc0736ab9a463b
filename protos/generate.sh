#!/usr/bin/env bash
# Writes the Python stubs of protos/ below OUT (default: the repository). `make check` runs it into a scratch
# directory and compares.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
out=${1:-.}
mkdir -p "$out/catenary/v1"
PATH="$PWD/$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  protos/catenary/v1/*.proto
