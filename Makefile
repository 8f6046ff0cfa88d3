# make parity   compare both packages with each other and with an fp64 oracle
# make test     every test that needs no GPU
#
# Both make .venv first. With an interpreter that has everything already, and no network:
#   make NO_VENV=1 PYTHON=/path/to/python3 test-gpu

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
PARITY_ARGS ?=
PYTEST_ARGS ?=
# Workers for the CPU tests; each holds jax and torch, so memory bounds their number.
WORKERS ?= -n auto --maxprocesses 8

ifdef NO_VENV
PYTHON ?= python3
RUN := $(PYTHON)
SETUP :=
else
RUN := $(VENV)/bin/python
SETUP := setup
endif

.PHONY: parity test test-gpu test-oldest lint types docs figures format setup clean

parity: $(SETUP)
	$(RUN) -m parity $(PARITY_ARGS)

test: $(SETUP)
	$(RUN) -m pytest $(WORKERS) $(PYTEST_ARGS)

# One process: JAX reserves most of a GPU's memory.
test-gpu: $(SETUP)
	$(RUN) -m pytest -m gpu $(PYTEST_ARGS)

test-oldest:
	@PYTHON='$(PYTHON)' EXTRAS=dev sh tools/setup.sh $(VENV_OLDEST) tools/oldest.txt
	$(VENV_OLDEST)/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS)

lint: $(SETUP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(SETUP)
	$(RUN) -m pyright

docs: $(SETUP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The measured parts of README and docs, and the figures, from the committed results.
figures: $(SETUP)
	$(RUN) tools/measured.py

format: $(SETUP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

setup:
	@PYTHON='$(PYTHON)' sh tools/setup.sh $(VENV)

clean:
	rm -rf $(VENV) $(VENV_OLDEST) build *.egg-info .pytest_cache .ruff_cache .hypothesis
