# make run    execute the walk; reports in build/reports
# make lab    open the notebooks in JupyterLab
# make test   run every test, notebooks included
# make bench  score the micro teacher on held-out scenes and compare with data/bench; fetches the photographs once
# make lint   check style and format
# make clean  remove what the walk and the tests left (build/ and caches; .venv stays)
#
# Each sets up .venv first. Nothing but Python 3.11, 3.12 or 3.13 is needed, and after the setup no network.
#
#   PYTHON=/path/to/python3.12    the interpreter to build .venv with
#   TORCH="torch==2.14.1 torchvision==0.29.1"
#   TORCH="torch torchvision --index-url https://download.pytorch.org/whl/cpu"
#                                 a torch and torchvision of your own choice (a matching pair, any build)
#   WALK="notebooks/01_operator_audit.ipynb"    the notebooks that `make run` executes
#   SOURCES=build/sources           where the photographs of the bench are kept
#   PYTEST_ARGS="-k images"       more for pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
CANDIDATES := python3 python3.13 python3.12 python3.11
TORCH ?= $(shell sed -nE 's/^ *"(torch(vision)?[<>=!~][^"]*)".*/\1/p' pyproject.toml)
WALK ?=
WORKERS ?= 2
SOURCES ?= build/sources
PYTEST_ARGS ?=

# A candidate must start (a version manager leaves shims that do not), be new enough and have venv with pip.
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
NO_PYTHON := No Python 3.11, 3.12 or 3.13 with its venv module was found (tried: $(or $(PYTHON),$(CANDIDATES))); \
install one (Debian and Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3.12
# The compiler's wheel is built for glibc 2.35; on an older one pip would refuse the whole installation.
HAS_NPU := import platform as p; print(",npu" if [int(n) for n in (p.libc_ver()[1] or "0").split(".")] >= [2, 35] else "")
PAIR := import torch, torchvision; torchvision.ops.nms; \
print(f"torch {torch.__version__} and torchvision {torchvision.__version__} are ready")
NO_PAIR := torch and torchvision are not of one build; name a matching pair with TORCH, as the head of the Makefile shows
quote = $(foreach word,$(1),'$(subst ',,$(subst ",,$(word)))')

.PHONY: help setup run lab test bench lint clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(READY)

# `ready` is written last, so that an installation which was interrupted is done again.
$(READY): pyproject.toml
	@rm -f $@; \
	if ! $(BIN)/python -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	  for python in $(or $(PYTHON),$(CANDIDATES)); do \
	    if $$python -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then echo '$(NO_PYTHON)' >&2; exit 1; fi; \
	  echo "Creating $(VENV) with $$($$found --version)"; \
	  $$found -m venv --clear $(VENV); \
	fi
	@echo "Installing torch and torchvision, then everything else, into $(VENV): several minutes, once"
	@$(PIP) install $(call quote,$(TORCH))
	@$(PIP) install --quiet --editable ".[notebooks,test,dev$$($(BIN)/python -c '$(HAS_NPU)')]"
	@$(BIN)/python -c '$(PAIR)' || { echo '$(NO_PAIR)' >&2; exit 1; }
	@touch $@

run: $(READY)
	@$(BIN)/python -m lumen_lab.walk $(WALK)

lab: $(READY)
	@$(BIN)/python -m jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/01_operator_audit.ipynb

test: $(READY)
	@$(BIN)/python -m pytest --nbmake --nbmake-timeout=900 -n $(WORKERS) --dist loadfile --no-loadscope-reorder notebooks tests $(PYTEST_ARGS)

bench: $(READY)
	@$(BIN)/python -m lumen_lab.bench --fetch $(SOURCES)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

clean:
	rm -rf build .pytest_cache .ruff_cache
	find . -name $(VENV) -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -print0 | xargs -0 rm -rf
