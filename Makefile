# Every target sets up .venv by itself, from a fresh clone, with Python 3.11 or newer, git and make; when that is done it does nothing.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

# The first of these that runs (a pyenv shim may stand on the PATH and not run) and is new enough.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
BIN := .venv/bin
STAMP := .venv/.installed

# torch first and alone: it is by far the largest, and the constraints then only have to hold the rest still.
# The venv is kept when only the pins changed; pip then brings what differs. The pip that comes with an older Python takes three times
# as long to choose the versions. Compiling all modules would take more time than the rest of it, and three of four are never
# imported: what most programs import is compiled, and the rest on first use. "Quiet" twice: a package index that knows only some of
# the packages is no news.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "sqlstream needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "setting up .venv with $(PYTHON) (once; torch is large)"; $(PYTHON) -m venv .venv; }
	@$(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile -c constraints.txt --upgrade pip torch==2.13.0
	@$(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import torch.utils.data, sqlstream.stream.dataset, sqlstream.cli.main, pandas, moto.server'
	@touch $@

.PHONY: help install servers demo test test-frameworks test-lowest lint wheel bench
help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 22

install: $(STAMP)  ## Set up .venv, if it is not there or not as pyproject.toml and constraints.txt say

demo: $(STAMP)  ## Stream a small made-up dataset from a local S3 server under a tight cache limit, and say what happened
	@$(BIN)/sqlstream demo $(ARGS)

servers:
	@scripts/install_servers.sh

# Three tests at a time, also on two cores: most of them wait for processes, servers and deaths. A file's tests come one after the other.
# The files that take longest come first (tests/conftest.py). Each of those many processes would compile the package and the tests
# anew without bytecode on disk, which some container images switch off.
test: $(STAMP) servers  ## Run the tests; ARGS="tests/cli -k stats" runs some
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed

$(FRAMEWORKS_STAMP): tests/frameworks/requirements.txt pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "sqlstream needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(FRAMEWORKS)/bin/pip || { echo "setting up $(FRAMEWORKS) with $(PYTHON) (once; torch is large)"; $(PYTHON) -m venv $(FRAMEWORKS); }
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -r tests/frameworks/requirements.txt
	@touch $@

test-frameworks: $(FRAMEWORKS_STAMP) servers  ## Run the tests with real Accelerate, Lightning, Paddle, torchdata, WebDataset and wids, in a venv of their own
	@$(FRAMEWORKS)/bin/python -m pytest tests/frameworks $(ARGS)

LOWEST := .venv-lowest
# uv chooses the versions in seconds; pip looks at some hundred of botocore, for a quarter of an hour.
LOWEST_STAMP := $(LOWEST)/.installed

$(LOWEST_STAMP): scripts/lowest_constraints.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "sqlstream needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(LOWEST)/bin/pip || { echo "setting up $(LOWEST) with $(PYTHON) (once; torch is large)"; $(PYTHON) -m venv $(LOWEST); }
	@$(LOWEST)/bin/pip install --quiet --quiet --disable-pip-version-check --upgrade pip packaging torch==2.13.0 uv
	@$(LOWEST)/bin/python scripts/lowest_constraints.py > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python -c $(LOWEST)/constraints.txt -e '.[dev]'
	@touch $@

test-lowest: $(LOWEST_STAMP) servers  ## Run the tests with the lowest versions that pyproject.toml allows (but torch), in a venv of their own
	@env -u PYTHONDONTWRITEBYTECODE $(LOWEST)/bin/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## Check format, style, types and the floors of the architecture
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

wheel: $(STAMP)  ## Build dist/*.whl, the alembic migrations inside
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist .

BENCH := .venv-bench
BENCH_STAMP := $(BENCH)/.installed

# The peers' own pins contradict each other: packages that ask for what others exclude are installed without their dependencies.
$(BENCH_STAMP): benchmarks/peers/requirements.txt benchmarks/peers/requirements-no-deps.txt pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "sqlstream needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BENCH)/bin/pip || { echo "setting up $(BENCH) with $(PYTHON) (once; about 1.6 GB)"; $(PYTHON) -m venv $(BENCH); }
	@$(BENCH)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(BENCH)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fast,image,demo]'
	@$(BENCH)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt
	@$(BENCH)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements-no-deps.txt
	@touch $@

ROUNDS ?= 5
PROFILED := users-warm-bytes-0 users-random warm-bytes-0 random cold-s3-20 squeeze start-1000000 lazy resume flat-1000000
bench: $(BENCH_STAMP) servers  ## Measure against the peers, write docs/benchmarks.md; ONLY="warm random", ROUNDS=3, SDS=path
	@$(BENCH)/bin/python -m benchmarks.peers --rounds $(ROUNDS) $(if $(ONLY),--only $(ONLY)) $(if $(SDS),--sds $(SDS)) $(ARGS)
	@$(if $(ONLY)$(ARGS),:,$(BENCH)/bin/python -m benchmarks.peers.profile $(PROFILED))
	@$(if $(ONLY)$(ARGS),:,$(BENCH)/bin/python -m benchmarks.peers.profile --num-workers 2 users-warm-bytes-2 users-cold-http-20-2000 warm-bytes-2 warm-tensors)
