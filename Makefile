# make demo    the main job on this machine's CPU: a real model, a real server, a verified and traced dataset
# make drafter an EAGLE-3 drafter trained on states of ours, measured beside spoiled ones
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
TRAINERS := .venv-trainers
TRAINERS_REQUIREMENTS := requirements-trainers.txt
TRAINERS_READY := $(TRAINERS)/.ready
SITE := -c 'import site; print(*site.getsitepackages())'

.PHONY: demo drafter test test-all lint ui lock clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m deployments.demo

drafter: $(READY) $(TRAINERS_READY)
	$(BIN)/python -m deployments.drafter

test: lint $(OLDER_READY) $(TRAINERS_READY)
	$(BIN)/python -m pytest -m "not slow" --durations=12

test-all: lint $(OLDER_READY) $(TRAINERS_READY)
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

# Over .venv: an older SGLang, and the trainers that read our exports. Their own packages come first on the path, as for
# importlib.metadata, and .venv's after them.
$(OLDER_READY): $(OLDER_REQUIREMENTS) $(READY)
	$(call over_venv,$(OLDER),$(OLDER_REQUIREMENTS))

$(TRAINERS_READY): $(TRAINERS_REQUIREMENTS) $(READY)
	$(call over_venv,$(TRAINERS),$(TRAINERS_REQUIREMENTS))

define over_venv
	@echo "building $(1)"
	$(BIN)/python -m venv --clear --without-pip $(1)
	$(BIN)/uv pip install --quiet --system-certs --python $(1)/bin/python --no-deps --compile-bytecode --requirement $(2)
	@$(BIN)/python $(SITE) > $$($(1)/bin/python $(SITE))/base.pth
	@touch $@
endef

# After a change was installed into .venv by hand: write down what is there now.
lock:
	@(sed -n '/^#/p' requirements-cpu.txt; $(BIN)/uv pip freeze --python $(BIN)/python | grep -v '^\(torch\|uv\|pip\|setuptools\)==') > $(VENV)/lock
	@mv $(VENV)/lock requirements-cpu.txt

clean:
	rm -rf $(VENV) $(OLDER) $(TRAINERS) .drillcore .mypy_cache .ruff_cache .pytest_cache
