# All targets run in .venv. `setup` makes it, and again only when a pinned dependency changes.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
DEMO := runs/demo
STUDY := runs/study_demo

# One target at a time, even with -j: else `make clean test` would delete .venv while making it.
.NOTPARALLEL:

.PHONY: help setup demo study test test-changed torture lint docs clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP)  ## create .venv with pinned dependencies; does nothing if it is up to date

demo: $(SETUP)  ## train short, test long on Shakespeare (6 minutes on 2 cores)
	$(BIN)/pretrain data build configs/demo.toml
	$(BIN)/launcher local configs/demo.toml --nproc 2
	$(BIN)/launcher local configs/demo.toml --nproc 2 \
	    --set position.method=sinusoidal --set run.directory=$(DEMO)/sinusoidal
	rm -rf $(DEMO)/hf
	$(BIN)/pretrain export $(DEMO)/alibi $(DEMO)/hf
	$(BIN)/pretrain evaluate $(DEMO)/alibi $(DEMO)/sinusoidal --max-tokens 16384 \
	    --out $(DEMO)/report/curve.json

study: $(SETUP)  ## train four methods at 64 and 128 tokens and judge the claims (20 minutes)
	$(BIN)/pretrain study configs/studies/demo.toml --nproc 2

test: $(SETUP)  ## run all tests; as root on Debian, also installs Slurm for its tests
	tests/slurm/install.sh
	tests/all.sh $(BIN)/python

test-changed: $(SETUP)  ## run the tests that import code changed since main, or since SINCE=COMMIT
	$(BIN)/python tests/changed.py $(SINCE)

torture: $(SETUP)  ## run the further cases that `make test` leaves out; takes hours
	$(BIN)/python -m pytest -m torture

lint: $(SETUP)  ## check style and format (ruff) and types (mypy --strict)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(SETUP)  ## build the documentation site in site/ (mkdocs-material)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'open site/index.html, or with search: $(BIN)/python -m http.server --directory site'

clean:  ## remove .venv, caches, runs/demo and runs/study_demo; keeps other runs
	rm -rf .venv $(DEMO) $(STUDY) .pytest_cache .ruff_cache .mypy_cache build site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SETUP): pyproject.toml constraints.txt requirements-demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo 'error: $(PYTHON) is missing, or not Python 3.11, 3.12 or 3.13.' \
	        'Name another, as in: make setup PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	        apt-get update -q && apt-get install -q -y python3-venv; } || { \
	    echo 'error: $(PYTHON) cannot make virtual environments: apt-get install python3-venv' >&2; \
	    exit 1; }
	$(PYTHON) -m venv .venv
	@# pip 23, which Debian 12 has, takes twice as long to choose what to install.
	$(BIN)/pip install --no-compile 'pip>=25,<27'
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[test,data,wandb,lint,docs]'
	$(BIN)/pip install --no-compile --no-deps --require-hashes -r requirements-demo.txt
	@# Where PYTHONDONTWRITEBYTECODE is set, every rank would compile what it imports, for seconds.
	@# pip compiles on one core, this on all. Some libraries have files for other versions of Python.
	@# Tests of libraries, pip and most models of transformers, a third of all, are rarely imported.
	@$(BIN)/python -m compileall -q pretrain launcher kernels
	@$(BIN)/python -m compileall -qq -j 0 \
	    -x '/(tests?|pip)/|/transformers/models/(?!__init__|auto/|bloom/|mpt/)' .venv/lib || true
	@touch $@
