# Each target sets up what it needs by itself: .venv is made once, and again when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# Two processes on two cores: one thread each, and idle OpenMP threads must not spin (it costs 5-30x when cores are shared).
# transformers warns of image processors that nothing here uses.
ENV := OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error

.PHONY: demo test test-slow test-nightly lint bench evidence docs clean

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[dev]"
	touch $@

$(VENV)/.bench: $(STAMP)
	$(INSTALL) ".[dev,bench]"
	touch $@

demo: $(STAMP)
	$(ENV) $(BIN)/python examples/sd35_marble.py --preset tiny --output runs/demo --overwrite
	@echo "Open runs/demo/report.html"

test: $(STAMP)
	$(ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(STAMP)
	$(ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow

test-nightly: $(STAMP)
	$(ENV) OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# Hours. Stop it and start it again as you like: what is finished is kept in runs/evidence.
evidence: $(VENV)/.bench
	$(ENV) OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.evidence

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
