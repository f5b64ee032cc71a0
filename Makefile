# make demo    the main job on this machine's CPU: a real model, a real server, a verified and traced dataset
# make test    lint, types and all tests
# make ui      the Prefect and MLflow pages of what ran here
# make lint    ruff and mypy only
# make clean   remove .venv and all state
#
# Each builds .venv when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
UV := uv==0.13.9

.PHONY: demo test lint ui lock clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m deployments.demo

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ui: $(READY)
	$(BIN)/python -m flows ui

# PyTorch by pip, which finds a local CPU build where one is configured; the rest by uv, which is ten times faster.
# Bytecode is compiled here, by all cores, and not by four server processes at once when they start.
$(READY): pyproject.toml requirements-cpu.txt Makefile
	@echo "building $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile $(TORCH) $(UV)
	$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python --no-deps --compile-bytecode \
		--requirement requirements-cpu.txt
	@touch $@

# After a change was installed into .venv by hand: write down what is there now.
lock:
	@(sed -n '/^#/p' requirements-cpu.txt; $(BIN)/uv pip freeze --python $(BIN)/python | grep -v '^\(torch\|uv\|pip\|setuptools\)==') > $(VENV)/lock
	@mv $(VENV)/lock requirements-cpu.txt

clean:
	rm -rf $(VENV) .drillcore .mypy_cache .ruff_cache .pytest_cache
