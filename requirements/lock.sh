#!/usr/bin/env bash
# Writes the lock files: every version with its hashes and no index address, so that any mirror serves.
# torch is in none of them: which build fits depends on the device (make setup, deploy/docker).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
compile() { # compile OUT INPUT... : one lock file
  local out=$1
  shift
  "$uv" pip compile "$@" --generate-hashes --universal --python-version 3.11 --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links -q -o "requirements/$out.lock"
}
services=(--extra gateway --extra redis --extra router --extra tokenizer --extra engine --extra cli --extra bench --extra otel)
compile all pyproject.toml "${services[@]}" --extra dev requirements/torch-deps.in
compile gateway pyproject.toml --extra gateway --extra redis --extra otel -c requirements/all.lock
for service in router tokenizer; do
  compile "$service" pyproject.toml --extra "$service" --extra otel -c requirements/all.lock
done
compile engine pyproject.toml --extra engine --extra otel requirements/torch-deps.in -c requirements/all.lock
compile xgrammar requirements/xgrammar.in --no-deps
