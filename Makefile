# Make targets; `make` alone lists them. PYTHON and TORCH matter to `make setup` only (see README, Install).
PYTHON ?= python3
TORCH ?= cpu
export TORCH TORCH_INDEX_URL

BIN := .venv/bin
STAMP := .venv/.slipstream-setup

# Math libraries that spin while they wait starve the other processes of a small machine.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo check test test-system clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   the environment in .venv, with progress; does nothing when it is up to date"
	@echo "make demo    setup, then three questions to a split deployment on this machine; MODEL=smollm2: to a model that speaks English"
	@echo "make check   style, types, import rules, generated files, size"
	@echo "make test    setup, then the tests that need neither root nor a GPU"
	@echo "make test-system   setup, then the tests that need root (network namespaces), system packages or minutes"
	@echo "make clean   remove .venv and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup
	@$(PYTHON) scripts/setup

demo: setup
	@$(BIN)/slipstream demo $(if $(MODEL),--model $(MODEL))

check: setup
	@scripts/check

test: setup
	@scripts/test

test-system: setup
	@scripts/test-system

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
