# Every target sets itself up: the first one on a fresh machine creates .venv and installs from pyproject.toml
# with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow lint docs bench shipped clean

demo: $(VENV)/.demo
	$(BIN)/metamd demo

test: lint docs $(VENV)/.clients
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/.clients
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/ruff format --check src tests benchmarks scripts examples
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/step.py

shipped: $(VENV)/.dev
	$(BIN)/python benchmarks/ship.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ".[demo]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ".[docs]"
	touch $@

$(VENV)/.clients: $(VENV)/.dev
	$(INSTALL) --editable ".[dev,clients,ray]"
	touch $@

clean:
	rm -rf $(VENV) build dist site
