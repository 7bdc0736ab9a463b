#!/usr/bin/env bash
# Makes sure that a Docker engine answers and that the base image exists, so that compose-test runs on a machine
# that has neither. With an engine at hand it does nothing but pull or find the image. Safe to run again.
#   deploy/docker-engine.sh [BASE_IMAGE]
# Needs root and Debian only where there is no engine; where no image registry can be reached, the base image is made
# from Debian's packages with debootstrap.
set -euo pipefail
base=${1:-python:3.11-slim}
docker=$(command -v /usr/bin/docker || command -v docker || true)

apt_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
    echo "docker-engine: $* is missing and can only be installed by root on Debian or Ubuntu" >&2
    exit 1
  }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

engine_answers() { [ -n "$docker" ] && "$docker" info >/dev/null 2>&1; }

start_engine() {
  command -v dockerd >/dev/null || apt_install docker.io iptables
  docker=$(command -v /usr/bin/docker || command -v docker)
  local log
  log=$(mktemp -t dockerd-XXXXXX.log)
  # A session of its own, closed files: the engine outlives this script and keeps nobody's pipe open.
  setsid dockerd >"$log" 2>&1 </dev/null &
  local _
  for _ in $(seq 1 60); do
    engine_answers && return
    sleep 1
  done
  echo "docker-engine: dockerd did not answer within 60 s; its last lines ($log):" >&2
  tail -n 15 "$log" >&2
  exit 1
}

make_base_image() {
  command -v debootstrap >/dev/null || apt_install debootstrap
  local root
  root=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$root'" EXIT
  debootstrap --variant=minbase \
    --include=python3,python3-venv,python3-pip,python-is-python3,ca-certificates bookworm "$root" >/dev/null
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar -C "$root" -c . | "$docker" import - "$base" >/dev/null
}

engine_answers || start_engine
if ! "$docker" image inspect "$base" >/dev/null 2>&1; then
  timeout 120 "$docker" pull -q "$base" >/dev/null 2>&1 || make_base_image
fi
"$docker" image inspect --format "docker-engine: ready, base image {{.RepoTags}}" "$base"
