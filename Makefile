# One command per task. `make help` lists them; the other commands run `make setup` first.

PYTHON ?=
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test phantom test-phantom check docs wheel bench baseline-check torture clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## Create .venv with all dependencies; instant if nothing changed (PYTHON=python3.12 selects another Python, TORCH=cpu or cuda a build of torch)
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/setup.sh $(VENV)

quickstart: setup  ## Train both experts of a tiny Wan2.2 on drawn shapes, and compare samples before and after (minutes)
	@$(BIN)/supertuner quickstart

test: setup  ## Run the test suite in two processes (WORKERS=0: in one)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(or $(WORKERS),2) --dist loadfile

phantom: setup  ## Create .venv-phantom: torch's CUDA build on fake libraries, for a machine without a GPU (docs/phantom.md)
	@scripts/setup_phantom.sh $(VENV) .venv-phantom

test-phantom: phantom  ## Run the tests that need CUDA tensors on the phantom; TESTS=tests/phantom/test_bytes.py runs only that file
	@scripts/phantom_python.sh -m pytest -m '$(MARKED)' $(or $(TESTS),tests/phantom)

check: setup  ## Check lint, format, types, and wheels for aarch64
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_aarch64.py

docs: setup  ## Build the documentation site in build/site; broken links and references are errors
	@$(BIN)/mkdocs build --quiet

wheel: setup  ## Build sdist and wheel in dist/, install the wheel into an empty environment and try it
	@scripts/try_wheel.sh $(BIN)/python dist

bench: setup  ## Run the benchmarks and record their figures (minutes); BENCH="gather" runs only that one, BENCH=--outdated those older than their code
	@scripts/setup_bench.sh $(VENV) .venv-bench
	@.venv-bench/bin/python benchmarks/run.py --record $(BENCH)

baseline-check: setup  ## Compare the quickstart's training with a plain loop, by the ratios in baseline/ (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/baseline_quickstart.py

torture: setup  ## Run the long fault-injection tests (minutes)
	@$(BIN)/python -m pytest -m torture

clean:  ## Remove what these commands created, except your runs and .venv
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .venv-bench .venv-phantom quickstart benchmarks/results
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
