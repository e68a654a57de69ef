# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs; `make setup` is quick when there is nothing to do.
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
T ?=

.PHONY: help setup demo test test-quick bench lint format fuzz native clean

help:
	@echo "make setup       system packages and .venv (needs root for apt)"
	@echo "make demo        the main job on real input, from nothing to the result tables (BACKEND=fncall or microvm: a part of it in those)"
	@echo "make test        every test, in CI's order"
	@echo "make test-quick  without the slow ones; make test-quick T=tests/unit for a part"
	@echo "make lint        style, types and import rules only"
	@echo "make bench       each bound of SPECIFICATION.md, measured"
	@echo "make fuzz        the parsers of hostile input, longer than the tests do"
	@echo "make format      let the formatter have its way"

setup:
	@bash tools/setup.sh

demo: setup
	$(PY) -m examples.demo $(if $(BACKEND),--backend $(BACKEND))

test: setup
	@bash tools/run_tests.sh

test-quick: setup
	$(PYTEST) -m "not slow" $(T)

bench: setup
	.venv/bin/dsec bench all --plot artifacts/

lint: setup
	$(PYTEST) tests/style

format: setup
	$(PY) -m ruff check --fix . ; $(PY) -m ruff format .

fuzz: setup
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) --timeout=0 tests/fuzz

native: setup
	$(PY) hatch_build.py

clean:
	rm -rf .venv build dist artifacts src/opendsec/_native .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks tools -name __pycache__ -prune -exec rm -rf {} +
