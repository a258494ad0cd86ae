# Two commands for everyone: `make demo` and `make test`. Each sets itself up: a .venv here, versions pinned.
PYTHON ?= $(shell sh requirements/find-python)
VENV ?= .venv
BIN := $(VENV)/bin
PYVERSION := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null)
LOCK := requirements/py$(PYVERSION).txt
JOBS ?= auto
STAMP := $(VENV)/.ready

.PHONY: demo test test-full test-slow test-jax lint format bench bench-peers bench-report docs dist setup lock clean

demo: $(STAMP)
	$(BIN)/anybatch demo

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Every promise, with two sets of parameters for each test; then what CI runs beside it, which are more sets, up to eight,
# and the tests marked `full`; all other sets, and what takes hours; and what must hold on every JAX.
test: $(STAMP)
	$(PYTEST) -m "not full and not slow" --at-most 2 $(TESTS)

test-full: $(STAMP)
	$(PYTEST) -m "not slow" --beyond 2 --at-most 8 $(TESTS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(TESTS)
	$(PYTEST) -m "not slow" --beyond 2 $(TESTS)

test-jax: $(STAMP)
	$(PYTEST) -m "every_jax and not slow" --at-most 2 $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# At the size of a CPU; each file opens with its question, its commands and what was found.
bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/contrastive.py
	$(BIN)/python benchmarks/selections.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/accumulation.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/mesh_ways.py
	$(BIN)/python benchmarks/reading_cost.py

# These also run PyTorch, Opacus and jax_privacy: pip install -e ".[peers]"
bench-peers: $(STAMP)
	$(BIN)/python benchmarks/correctness.py
	$(BIN)/python benchmarks/clipping.py --small

# The tables and plots of the documentation and the README, from benchmarks/results.
bench-report: $(STAMP)
	$(BIN)/python benchmarks/report.py

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo "Built docs/_build/html/index.html"

# A wheel and an sdist, each installed and tried in a fresh environment.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	sh requirements/try-dist $(PYTHON) dist

setup: $(STAMP)

# The lock pins every package for this Python; it is the same for everyone until `make lock` renews it.
$(STAMP): pyproject.toml $(wildcard $(LOCK))
	@test -n "$(PYVERSION)" || { echo "anybatch is pinned for Python 3.11, 3.12 and 3.13, and none of them was found: install one, or name it, e.g. make test PYTHON=/opt/python3.12/bin/python"; exit 1; }
	@test -f $(LOCK) || { echo "No pinned versions for this Python ($(LOCK)): use 3.11, 3.12 or 3.13, e.g. make test PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock:
	sh requirements/lock $(PYTHON) $(LOCK)

clean:
	rm -rf $(VENV) .venv-* docs/_build .pytest_cache .mypy_cache .ruff_cache
