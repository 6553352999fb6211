# `make demo` and `make test` do all the set-up themselves, in .venv or in the virtual environment that is active.
# `make <target> PYTHON=python3` uses that interpreter as it is and installs nothing.
# `make demo ARGS="--prompt Hello"` passes arguments on to the driver.

TORCH_CPU_VERSION := 2.13.0
TORCH_CPU_INDEX   := https://download.pytorch.org/whl/cpu
SYSTEM_PYTHON     ?= python3
VENV              ?= $(or $(VIRTUAL_ENV),.venv)
WORKERS           ?= auto
# Compiled test modules are kept even where the environment says otherwise: rewriting their assertions takes every
# worker seconds. With worksteal a worker starts with neighbouring tests, which share imports and fixtures.
PYTEST             = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
                     $(PYTHON) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

ifndef PYTHON
PYTHON     := $(VENV)/bin/python
runtime    := $(VENV)/.dsv4-runtime
test_tools := $(VENV)/.dsv4-test
dev_tools  := $(VENV)/.dsv4-dev
endif

.PHONY: demo test exhaustive check lint types fast format setup clean

demo: $(runtime)            ## the embedded model answers a prompt
	$(PYTHON) single_shot_inference.py $(ARGS)

test: $(test_tools)         ## every test that this machine can run, some cases of those that have many
	$(PYTEST) -q $(ARGS)

exhaustive: $(test_tools)   ## all cases
	$(PYTEST) -q --exhaustive $(ARGS)

check: $(dev_tools)         ## lint, format, types and the fast tests side by side: about seven minutes
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target lint types fast

lint: $(dev_tools)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(dev_tools)
	$(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"

fast: $(dev_tools)
	$(PYTEST) -q -m "not slow and not gpu" --hypothesis-profile quick --durations 8 --durations-min 2 $(ARGS)

format: $(dev_tools)        ## rewrite the files as the formatter and the safe fixes want them
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

setup: $(dev_tools)         ## everything a contributor needs, and the commit hook
	$(PYTHON) -m pre_commit install

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(SYSTEM_PYTHON) -m venv $(VENV)

# Without an NVIDIA GPU the CPU build of torch comes along: the default build brings gigabytes of CUDA libraries.
# Modules are compiled when they are first imported: most of them never are.
INSTALL       := $(PYTHON) -m pip install -q --no-compile
extras-runtime = $(if $(shell command -v nvidia-smi 2>/dev/null),[cuda])
extras-test   := [test]
extras-dev    := [dev]

$(VENV)/.dsv4-%: pyproject.toml | $(VENV)/bin/python
	@if command -v nvidia-smi >/dev/null || $(PYTHON) -c 'import torch' 2>/dev/null; then \
		$(INSTALL) -e ".$(extras-$*)"; \
	else \
		echo "installing torch $(TORCH_CPU_VERSION) for the CPU"; \
		$(INSTALL) "torch==$(TORCH_CPU_VERSION)+cpu" -e ".$(extras-$*)" 2>/dev/null || { \
			$(INSTALL) --no-deps --retries 1 -i $(TORCH_CPU_INDEX) "torch==$(TORCH_CPU_VERSION)" \
			|| echo "no CPU build found, the default build of torch follows"; \
			$(INSTALL) -e ".$(extras-$*)"; \
		}; \
	fi
	@touch $@ $(runtime)
