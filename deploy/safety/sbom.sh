#!/usr/bin/env bash
# Writes bills of materials (CycloneDX, JSON) into build/sbom/: one of each lock file, so of each image, with
# hashes; and one of .venv, with licences, what needs what, and the torch that no lock file names.
set -euo pipefail
cd "$(dirname "$0")/../.."
tool=(.venv/bin/python -W ignore -m cyclonedx_py)
options=(--pyproject pyproject.toml --output-format JSON --output-reproducible)
mkdir -p build/sbom
for name in gateway router tokenizer engine all; do
  "${tool[@]}" requirements "requirements/$name.lock" "${options[@]}" -o "build/sbom/$name.cdx.json"
done
"${tool[@]}" environment .venv "${options[@]}" -o build/sbom/environment.cdx.json
for file in build/sbom/*.cdx.json; do
  .venv/bin/python -c 'import json, sys; print(sys.argv[1], len(json.load(open(sys.argv[1]))["components"]), "packages")' "$file"
done
