# Every target is enough on a fresh clone: it makes .venv in the checkout first, and does nothing when current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# as many processes as there are cores for this one
WORKERS ?= $(shell nproc)
STAMP := $(VENV)/.installed

# compiled once, not by each process that a test starts
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test check lint audit docs pages models parity soak triton clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,report,trl]'
	touch $(STAMP)

demo: setup
	$(BIN)/megatrain quickstart

test: setup
	$(BIN)/python -m tests.host_device.build
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test docs audit

# Known faults of the packages in use. Where no index can be asked, a line says that it was skipped.
audit: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit >/dev/null 2>&1 || true
	@$(BIN)/python -m tests.audit

# The site in build/site; `make test` builds it too.
docs: setup
	$(BIN)/mkdocs build --strict --quiet

# What is generated from the code, in docs/.
pages: setup
	$(BIN)/python -c "from megatrain.config.page import *; write_configuration_page()"
	$(BIN)/python -c "from megatrain.cli.page import *; write_cli_page()"

# Checks each family of docs/models.md from file to file, and writes the page; five minutes on one core.
models: setup
	$(BIN)/python -m benchmarks.models

# 0.7 GB, which `make setup` leaves out: without it the tests of kernels are skipped.
triton: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton

# The full products behind the pairs and samples of `make test`; two to three hours on 2 cores.
parity: triton
	$(BIN)/python -m tests.host_device.build
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m parity

# What takes long: runs that are struck 900 times, chains of 100 resumes, a run of 100,000 steps, rows of 131,072 tokens that are
# trained through kills, 10,000 states of a power cut, a million odd inputs. Three hours on one idle core.
soak: setup
	$(BIN)/python -m pytest -q -m soak

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
