#!/usr/bin/env bash
# Puts into build/gpu-packages what deploy/gpu/check.py needs and a CUDA image may lack, as locked, for its Python.
# A machine without a network gets the directory beside the checkout.
set -euo pipefail
cd "$(dirname "$0")/../.."
python_version=${1:-3.12}
target=build/gpu-packages
names='annotated-types grpcio grpcio-health-checking grpcio-reflection msgspec prometheus-client protobuf psutil pydantic
  pydantic-core pydantic-settings python-dotenv pyyaml structlog typing-extensions typing-inspection uvloop'
chosen=$(mktemp)
trap 'rm -f "$chosen"' EXIT
# A package's lines in a lock file begin with its name; its hashes are indented.
awk -v names="$names" '
  BEGIN { split(names, list); for (i in list) wanted[list[i]] = 1 }
  /^[a-z]/ { split($0, part, "=="); keep = part[1] in wanted }
  keep' requirements/engine.lock >"$chosen"
rm -rf "$target"
${UV:-.venv/bin/uv} pip install -q --target "$target" --python-version "$python_version" \
  --python-platform x86_64-manylinux_2_28 --only-binary :all: --no-deps --require-hashes -r "$chosen"
du -sh "$target"
