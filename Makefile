# Everything runs in .venv; repeated calls do only what is missing.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
ARGS ?=
PDSERVE_CACHE_DIR ?= $(HOME)/.cache/pdserve
export PDSERVE_CACHE_DIR

VENV := .venv
RUN := $(VENV)/bin/python -m
DEPS := $(VENV)/.dependencies-installed
MODEL := $(PDSERVE_CACHE_DIR)/models/smollm2-135m-instruct/model.gguf
PROTOS := $(sort $(wildcard proto/pdserve/v1/*.proto))

.DEFAULT_GOAL := help
BENCH_DIR ?= bench-results

.PHONY: help setup serve bench bench-full test test-slow check format proto proto-check settings-docs conformance-docs clean

help:
	@echo 'make setup      create .venv, install pinned dependencies, fetch the model, compile kernels'
	@echo 'make serve      set up, then serve: HTTP on 127.0.0.1:8000, gRPC on 127.0.0.1:50051; ARGS="…" are flags'
	@echo 'make test       set up, then run the tests; PYTEST_ARGS="…" are flags'
	@echo 'make bench      apart or together? long prompts over running streams, two rates; results in bench-results/'
	@echo 'make bench-full more rates and repeats, traces, goodput search and capacity: hours, may be broken off'
	@echo 'make test-slow  set up, then run the slow tests'
	@echo 'make check      formatting, lint, types, import contracts, generated code'
	@echo 'make format     format and fix what can be fixed'
	@echo 'make proto      regenerate pdserve/v1 from proto/'
	@echo 'make settings-docs  rewrite docs/settings.md'
	@echo 'make conformance-docs  rewrite the tables of docs/conformance.md'
	@echo 'make clean      remove .venv and caches of tools (not the model)'

setup: $(DEPS) $(MODEL)
	@$(RUN) pdserve_kernels.compile_all

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'pdserve needs Python 3.11 or newer; name one: make PYTHON=python3.12 …' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(DEPS): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) pip install --upgrade 'pip>=25.1'
	$(RUN) pip install $(PIP_ARGS) --constraint constraints.txt --group dev --editable '.[bench]'
	@touch $@

$(MODEL): | $(DEPS)
	$(RUN) pdserve.cli model fetch

serve: setup
	@exec $(RUN) pdserve.cli serve $(ARGS)

bench: setup
	$(RUN) pdserve.cli bench compare --folder $(BENCH_DIR)/mixed $(ARGS)

bench-full: setup
	bench/full.sh $(BENCH_DIR)/full

test: setup
	$(RUN) pytest -m 'not slow' $(PYTEST_ARGS)

test-slow: setup
	$(RUN) pytest -m slow $(PYTEST_ARGS)

check: $(DEPS) proto-check
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) pyright
	$(VENV)/bin/lint-imports

format: $(DEPS)
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

# $(call generate,FOLDER)
generate = PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(RUN) grpc_tools.protoc -I proto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

proto: $(DEPS)
	rm -f pdserve/v1/*_pb2*.py pdserve/v1/*_pb2*.pyi
	$(call generate,.)

settings-docs: $(DEPS)
	$(RUN) pdserve.serving.settings_docs > docs/settings.md

conformance-docs: $(DEPS)
	$(RUN) tests.clients.page

proto-check: $(DEPS)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,"$$fresh") \
		&& diff -ru -x __init__.py -x __pycache__ pdserve/v1 "$$fresh/pdserve/v1" \
		&& echo 'generated code is up to date' \
		|| { echo 'pdserve/v1 differs from proto/: run make proto' >&2; exit 1; }

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
