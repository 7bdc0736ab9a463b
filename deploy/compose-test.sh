#!/usr/bin/env bash
# Tests docker-compose.yml with a real Docker engine: builds the images, starts two of each service, and
# runs deploy/compose_test.py against them. `make compose-test`. Leaves images and build cache, nothing else.
#   CATENARY_WHEELS  directory with a torch wheel for the engine image (default: what pip finds without an index)
#   CATENARY_CA      authorities that builds trust (default: the host's, if there are any)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
export DOCKER_BUILDKIT=1
export COMPOSE_PROJECT_NAME=catenary-test
export CATENARY_TAG=test
export CATENARY_GATEWAY_PORTS=127.0.0.1:18000-18009
export CATENARY_ROUTER_PORT=127.0.0.1:17050-17059
export CATENARY_TOKENIZER_PORTS=127.0.0.1:17071-17079
export CATENARY_HEALTH_INTERVAL=3s
export CATENARY_METRICS_PORT=9464
export COMPOSE_PROFILES=cpu
# Two engines share this machine: each gets a small pool and one core instead of all.
export CATENARY_KV_CACHE_GIB=0.5
export CATENARY_DEVICE_THREADS=1
ca=${CATENARY_CA:-/etc/ssl/certs/ca-certificates.crt}
[ -s "$ca" ] || ca=/dev/null
export CATENARY_CA=$ca

scratch=$(mktemp -d)
export CATENARY_SECRETS=$scratch/secrets
wheels=deploy/docker/wheels
staged=()
compose() { "$bin/docker-compose" --ansi never --progress quiet "$@"; }

finish() {
  local code=$?
  if [ "$code" != 0 ]; then
    echo "compose-test: failed; the last lines of each service:" >&2
    compose ps -a >&2 || true
    compose logs --no-color --tail 25 >&2 || true
  fi
  compose down --volumes --timeout 5 >/dev/null 2>&1 || true
  [ ${#staged[@]} = 0 ] || rm -f "${staged[@]}"
  rm -rf "$scratch"
  exit "$code"
}

step() { echo "compose-test: $* ($SECONDS s)"; }

stage_torch() { # puts a torch wheel where the engine's build looks for one
  local source=${CATENARY_WHEELS:-$scratch/wheels} version wheel
  if [ -z "${CATENARY_WHEELS:-}" ]; then
    # Exactly what this machine tests with. A build with a local version (+cpu) is only where pip was told to look;
    # where that is nowhere, the image's build takes torch from the index.
    version=$("$bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    "$bin/python" -m pip --disable-pip-version-check download -qq --no-deps --only-binary :all: \
      --python-version 3.11 -d "$source" "torch==$version" >/dev/null 2>&1 || return 0
  fi
  for wheel in "$source"/torch-*.whl; do
    [ -e "$wheel" ] && [ ! -e "$wheels/${wheel##*/}" ] || continue
    staged+=("$wheels/${wheel##*/}")
    cp "$wheel" "$wheels/"
  done
}

build() { # build IMAGE DOCKERFILE [OPTION...]
  local image=$1 file=$2
  shift 2
  docker build -q --network host --secret "id=ca,src=$ca" "$@" \
    -f "deploy/docker/$file.Dockerfile" -t "catenary-$image:$CATENARY_TAG" . >/dev/null
}

deploy/docker-engine.sh "${BASE_IMAGE:-python:3.11-slim}"
# The engine's own client knows BuildKit; another one on PATH may need a plugin for it.
if [ -x /usr/bin/docker ]; then
  mkdir "$scratch/bin"
  ln -s /usr/bin/docker "$scratch/bin/docker"
  export PATH=$scratch/bin:$PATH
fi
trap finish EXIT
deploy/make-secrets.sh "$CATENARY_SECRETS" >/dev/null
compose config --quiet
compose down --volumes --timeout 5 >/dev/null 2>&1 || true
step "building"
stage_torch
for service in router tokenizer gateway; do
  build "$service" "$service" --build-arg "BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim}"
done
build engine engine --target cpu --build-arg "BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim}" \
  --build-arg "TORCH_INDEX=${TORCH_INDEX:-}"
# The target for Gaudi builds on a stand-in for the vendor's image, and an engine says what it lacks there.
build gaudi-stub gaudi-stub --build-arg "BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim}" \
  --build-arg "TORCH_INDEX=${TORCH_INDEX:-}"
build engine-hpu engine --target hpu --build-arg "GAUDI_IMAGE=catenary-gaudi-stub:$CATENARY_TAG"
"$bin/python" deploy/hpu_image_test.py "catenary-engine-hpu:$CATENARY_TAG"
step "starting"
compose up --detach --no-build --scale router=2 --scale engine=2 --scale gateway=2 --scale tokenizer=2
"$bin/python" deploy/compose_test.py
step "passed"
