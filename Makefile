# make run, make test and make lint each do all the set-up: a virtual environment in .venv, rebuilt when
# pyproject.toml or constraints.txt change. PYTHON=... chooses another interpreter (3.11 or newer).
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
STAMP := .venv/.installed

.PHONY: help run test test-full lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make run        profile resnet18 on this CPU: estimate, measurement, advice, ridgeline-report.html"
	@echo "make test       run the tests, with a fixed tenth of the generated cases"
	@echo "make test-full  run the tests, with every generated case"
	@echo "make lint       ruff check, ruff format --check, mypy --strict"
	@echo "make docs       build the documentation into site/"
	@echo "make clean      remove .venv, caches and everything the targets above left behind"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ridgeline needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@echo "setting up .venv with $(PYTHON) (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/pip install -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP)
	@echo "profiling resnet18 on this CPU (calibrates it on first use)"
	@.venv/bin/ridgeline profile resnet18 --on cpu --html ridgeline-report.html

test: $(STAMP)
	@echo "running the tests (make test-full runs every generated case)"
	@.venv/bin/python -m pytest

test-full: $(STAMP)
	@echo "running the tests with every generated case"
	@RIDGELINE_FULL=1 .venv/bin/python -m pytest

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: $(STAMP)
	@PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/pip install -c constraints.txt mkdocs
	.venv/bin/mkdocs build --strict --site-dir site

clean:
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache site build dist src/*.egg-info ridgeline-report.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
