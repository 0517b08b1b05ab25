# Two commands set everything up: `make demo` and `make test`. Python 3.11 or newer is all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint check docs clean

demo: $(VENV)/.ready
	$(BIN)/fedslr demo --fresh --out runs/demo

test: $(VENV)/.ready
	$(BIN)/pytest -n auto

.PHONY: build
build:
	rm -rf dist build/wheel-venv build/empty
	$(PYTHON) -m venv build/tools
	build/tools/bin/$(INSTALL) build twine check-wheel-contents
	PIP_CONSTRAINT=constraints.txt build/tools/bin/python -m build
	build/tools/bin/twine check --strict dist/*
	build/tools/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/$(INSTALL) dist/*.whl
	mkdir build/empty
	cd build/empty && ../wheel-venv/bin/fedslr --version && ../wheel-venv/bin/fedslr demo

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/rooms.py --check
	$(BIN)/python scripts/sentences.py --limit 1

check: lint test

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W -n -E --keep-going -b html docs build/docs

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedslr needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) --editable '.[dev,deploy,export]'
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/$(INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) runs build docs/generated dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
