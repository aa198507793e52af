# Every target sets up what it needs: a virtual environment with the tested versions of all packages.
PYTHON ?= python3
VENV := .venv
VENV_OLDEST := .venv-oldest
BIN := $(VENV)/bin
# A plugin in a distribution of its own, which the tests find as that of a third party.
EXAMPLE := examples/memstore-numpy-backend

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest faults coverage audit lint format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## Read four books of the Bible with a small model, and answer from them in a new process
	$(BIN)/memstore demo

test: lint  ## Run the linter, the type checker and all tests
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal

test-oldest: $(VENV_OLDEST)/.installed  ## Run all tests with the oldest supported packages
	$(VENV_OLDEST)/bin/python -m pytest --numprocesses=auto --dist=worksteal

lint: $(VENV)/.installed  ## Run the linter, the format check and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

faults: $(VENV)/.installed  ## Try ten times as many faults as the tests do: kills and damage
	$(BIN)/python -m pytest tests/faults --full --numprocesses=auto --dist=worksteal

coverage: $(VENV)/.installed  ## Run all tests, and say which lines of memstore/ none of them runs
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --cov=memstore --cov-report=term-missing:skip-covered

audit: $(VENV)/.audit/.installed  ## Ask PyPI's advisories about the pinned versions of all packages
	@$(VENV)/.audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip || { \
		echo "The pins are not known to be clean. An advisory above: raise that pin in constraints.txt. 'could not be audited', or" \
			"no connection: this index does not serve advisories; nothing was learnt. Repeat where PyPI itself can be reached." >&2; \
		exit 1; }

format: $(VENV)/.installed  ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove the virtual environments and everything that was built
	rm -rf $(VENV) $(VENV_OLDEST) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.audit/.installed: constraints.txt
	$(PYTHON) -m venv $(VENV)/.audit
	$(VENV)/.audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	@touch $@

$(VENV)/.installed: constraints.txt
$(VENV_OLDEST)/.installed: constraints-oldest.txt
%/.installed: pyproject.toml $(EXAMPLE)/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "memstore needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is not one. Name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
		exit 1; }
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(filter constraints%,$^) --editable '.[dev,demo]' \
		--editable $(EXAMPLE)
	@touch $@
