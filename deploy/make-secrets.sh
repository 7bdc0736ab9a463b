#!/usr/bin/env bash
# Writes the secrets of docker-compose.yml into deploy/secrets (or DIRECTORY), once: existing ones are kept.
#   deploy/make-secrets.sh [DIRECTORY]
set -euo pipefail
directory=${1:-$(dirname "$0")/secrets}
mkdir -p "$directory"
# Only the owner enters the directory. The files themselves must be readable for the containers' users, to whom
# Docker mounts them as they are.
chmod 700 "$directory"
for role in client engine; do
  file=$directory/$role
  if [ ! -s "$file" ]; then
    (umask 077 && head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n' >"$file" && echo >>"$file")
    echo "make-secrets: wrote $file"
  fi
  chmod 444 "$file"
done
