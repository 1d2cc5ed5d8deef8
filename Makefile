# Targets that need Pilotage install it into $(VENV) first; see scripts/install.sh.

VENV ?= .venv
STOCK_VENV ?= .venv-stock
BIN := $(VENV)/bin
STAMP := $(VENV)/.pilotage-installed
PYTHON_FILES := src tests benchmarks scripts
SEED ?= 0
BACKEND ?= local
TASKS ?= packages
ARGS ?=

# One thread a process: two OpenMP threads on a busy core cost a tiny model a factor of ten.
export OMP_NUM_THREADS = 1
export UV_PYTHON_DOWNLOADS = never

.DEFAULT_GOAL := help
.PHONY: help install demo test check format bench reference constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## find Python 3.12, make .venv and install Pilotage into it

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	@scripts/install.sh $(VENV)

demo: $(STAMP)  ## train the tiny policy with real agents on two cores; SEED=1, BACKEND=cortex or tinker, TASKS=factory
	@scripts/demo.sh $(BIN)/pilotage $(SEED) $(BACKEND) $(TASKS)

test: $(STAMP)  ## run every test; ARGS='-k proxy' for some
	@echo "fetching the official tokenizer and templates that some tests compare with"
	@$(BIN)/python scripts/fetch_test_tokenizers.py || echo "tests that need what is missing will be skipped"
	@echo "installing the public cortex-training client into $(STOCK_VENV), for the tests of the service"
	@scripts/install_stock_client.sh $(VENV) $(STOCK_VENV) || echo "tests that need it will be skipped"
	PILOTAGE_STOCK_PYTHON=$(abspath $(STOCK_VENV))/bin/python $(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

check: $(STAMP)  ## format, lint, types and layers
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)  ## format the code and apply safe fixes
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/ruff check --fix $(PYTHON_FILES)

bench: $(STAMP)  ## run every benchmark; docs/performance.md explains the numbers
	$(BIN)/python benchmarks/bench_rendering.py
	$(BIN)/python benchmarks/bench_proxy.py
	$(BIN)/python benchmarks/bench_sampler.py
	$(BIN)/python benchmarks/bench_training.py
	$(BIN)/python benchmarks/bench_async.py
	$(BIN)/python benchmarks/bench_driver.py
	$(BIN)/python benchmarks/bench_rollouts.py overhead
	$(BIN)/python benchmarks/bench_rollouts.py concurrent
	[ ! -d tasks/demo ] || $(BIN)/python benchmarks/bench_rollouts.py demo
	$(BIN)/python benchmarks/bench_service.py
	@scripts/install_stock_client.sh $(VENV) $(STOCK_VENV)
	$(BIN)/python benchmarks/bench_wire.py $(STOCK_VENV)/bin/python

reference: $(STAMP)  ## write the tables of docs/reference.md from the code
	$(BIN)/python scripts/write_reference.py

constraints: $(STAMP)  ## choose the newest versions that pyproject.toml allows, for constraints.txt
	$(BIN)/uv pip compile pyproject.toml --extra local --extra agents --extra dev --upgrade --python-version 3.12 --python-platform linux \
		--no-annotate --no-header --no-emit-index-url --quiet --output-file constraints.txt

clean:  ## remove the environment and every cache; runs/ and tasks/ stay
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
