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

# An engine that was killed leaves its pid files behind, and dockerd refuses to start beside a number that lives, be it
# a zombie or another program.
forget_killed_engine() {
  local file pid
  for file in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
    [ -f "$file" ] || continue
    pid=$(cat "$file")
    if ! grep -qxE 'dockerd|containerd' "/proc/$pid/comm" 2>/dev/null || grep -q '^State:.Z' "/proc/$pid/status"; then
      rm -f "$file"
    fi
  done
}

start_engine() {
  command -v dockerd >/dev/null || apt_install docker.io iptables
  docker=$(command -v /usr/bin/docker || command -v docker)
  local log attempt pid _
  for attempt in 1 2 3; do
    forget_killed_engine
    log=$(mktemp -t dockerd-XXXXXX.log)
    # A session of its own, closed files: the engine outlives this script and keeps nobody's pipe open.
    setsid dockerd >"$log" 2>&1 </dev/null &
    pid=$!
    for _ in $(seq 1 60); do
      engine_answers && return
      kill -0 "$pid" 2>/dev/null || break
      sleep 1
    done
    echo "docker-engine: dockerd does not answer (try $attempt of 3); its last lines ($log):" >&2
    tail -n 5 "$log" >&2
    kill "$pid" 2>/dev/null || true
    sleep 2
  done
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
