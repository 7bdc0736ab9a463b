# What a person types. `make` alone prints the list.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --warn-undefined-variables

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.catenary-setup
# torch is in no lock file, since the right build depends on the device. TORCH_INDEX names another package index for
# it, for example that of the CPU builds; TORCH another release.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Options for `catenary up`, as in: make serve ARGS="--port 9000 --engines 2"
ARGS ?=
# Tests to run, as in: make test TESTS=tests/unit
TESTS ?= tests
# Mutations to run, as in: make mutants MUTANTS=dynamo-limit
MUTANTS ?=
# OpenMP threads that spin while they wait would starve the services that the tests run beside them.
export OMP_WAIT_POLICY ?= PASSIVE
# All tests run in several processes, two at a time; what TESTS names in one.
RUN_TESTS = $(BIN)/python $(if $(filter tests,$(TESTS)),tests/lanes.py,-m pytest $(TESTS))

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: $(STAMP) ## Create .venv with everything that Catenary needs (once)

$(STAMP): pyproject.toml requirements/all.lock requirements/models.lock requirements/xgrammar.lock deploy/setup.sh
	@TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' deploy/setup.sh $(VENV)
	@touch $@

.PHONY: serve
serve: setup ## Serve a small chat model on http://127.0.0.1:8000 (ARGS="--port 9000")
	@exec $(BIN)/catenary up $(ARGS)

.PHONY: chat
chat: setup ## Talk to a running server from the terminal
	@exec $(BIN)/catenary chat $(ARGS)

.PHONY: test
test: setup ## Run all tests but the ones that take minutes
	$(RUN_TESTS) -m "not long"

.PHONY: test-long
test-long: setup ## Run the tests that take minutes
	$(RUN_TESTS) -m long

.PHONY: chaos
chaos: setup ## Kill engines, routers and clients under load, and count what completes exactly (minutes)
	$(BIN)/python -m pytest tests/chaos

.PHONY: gpu-check
gpu-check: setup ## Test the cuda device on an NVIDIA GPU (a few minutes; says so where there is none)
	$(BIN)/python deploy/gpu/check.py

.PHONY: mutants
mutants: setup ## Break the HPU code in stored ways: each time a test must notice (MUTANTS="name")
	$(BIN)/python deploy/mutants/run.py $(MUTANTS)

.PHONY: bench-smoke
bench-smoke: setup ## Speed of this tree against the recorded one (2 minutes, prints ratios)
	$(BIN)/python -m benchmarks.smoke

.PHONY: check
check: setup ## Lint, types, contract, locks, generated files, import rules
	deploy/checks/run.sh

.PHONY: format
format: setup ## Format the code
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

.PHONY: protos
protos: setup ## Generate the Python stubs of protos/
	protos/generate.sh

.PHONY: docs
docs: setup ## Generate the pages of docs/ that come from options, tables and tests
	$(BIN)/python docs/generate.py

.PHONY: house
house: setup ## Count the source: files, lines, circles (ARGS="--against REV", ARGS=chat)
	@$(BIN)/python deploy/checks/house.py $(ARGS)

.PHONY: surface
surface: setup ## Store what users see anew, after a change of it (tests/data/surface)
	$(BIN)/python -m tests.support.surface

.PHONY: lock
lock: setup ## Resolve the lock files of requirements/ anew (needs a package index)
	requirements/lock.sh

.PHONY: sbom
sbom: setup ## Write bills of materials (CycloneDX) of the lock files and of .venv into build/sbom
	deploy/safety/sbom.sh

.PHONY: audit
audit: setup ## Compare the locked requirements with published vulnerabilities (prints; fails nothing)
	$(BIN)/python deploy/safety/audit.py

.PHONY: compose-test
compose-test: setup ## Test docker-compose.yml with a real Docker engine (root on Debian: starts one)
	deploy/compose-test.sh

.PHONY: clean
clean: ## Remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
