# make demo    the main job on this machine's CPU: a real model, a real server, a verified and traced dataset
# make test    lint, types and tests: what CI runs
# make test-all  the slow tests, too: more versions and ways to serve, a soak
# make ui      the Prefect and MLflow pages of what ran here
# make lint    ruff and mypy only
# make clean   remove the environments and all state
#
# Each builds the environment that it needs when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
UV := uv==0.13.9
OLDER := .venv-sglang-0.5.17
OLDER_REQUIREMENTS := requirements-sglang-0.5.17.txt
OLDER_READY := $(OLDER)/.ready
SITE := -c 'import site; print(*site.getsitepackages())'

.PHONY: demo test test-all lint ui lock clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m deployments.demo

test: lint $(OLDER_READY)
	$(BIN)/python -m pytest -m "not slow" --durations=12

test-all: lint $(OLDER_READY)
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

# An older SGLang over .venv: its own packages come first on the path, as for importlib.metadata, and .venv's after them.
$(OLDER_READY): $(OLDER_REQUIREMENTS) $(READY)
	@echo "building $(OLDER)"
	$(BIN)/python -m venv --clear --without-pip $(OLDER)
	$(BIN)/uv pip install --quiet --system-certs --python $(OLDER)/bin/python --no-deps --compile-bytecode \
		--requirement $(OLDER_REQUIREMENTS)
	@$(BIN)/python $(SITE) > $$($(OLDER)/bin/python $(SITE))/base.pth
	@touch $@

# After a change was installed into .venv by hand: write down what is there now.
lock:
	@(sed -n '/^#/p' requirements-cpu.txt; $(BIN)/uv pip freeze --python $(BIN)/python | grep -v '^\(torch\|uv\|pip\|setuptools\)==') > $(VENV)/lock
	@mv $(VENV)/lock requirements-cpu.txt

clean:
	rm -rf $(VENV) $(OLDER) .drillcore .mypy_cache .ruff_cache .pytest_cache
