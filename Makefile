# Each target does its own set-up: a virtual environment in .venv, then the installation, then the run.
# pip's own settings are honoured: PIP_CONSTRAINT=constraints.txt make test

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
DEMO_ARGS ?=
# DeepSpeed installs without a CUDA toolkit where it compiles nothing.
export DS_BUILD_OPS ?= 0
export DS_IGNORE_CUDA_DETECTION ?= 1
# Workers with one thread each: the models of the tests are too small to use more.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-minimum lint docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# One stamp per set of extras; reinstalled when the package's requirements change. The installation is editable,
# so edits to the code need none.
$(VENV)/.installed-%: pyproject.toml
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

# Threads that wait sleep: by default they spin, which slows the demo several times on a machine that is busy elsewhere.
demo: $(VENV)/.installed-examples ## pretrain a small Llama under AdamW and under Muon; loss table and demo-out/curves.png
	OMP_WAIT_POLICY=passive $(RUN) examples/pretrain_demo.py $(DEMO_ARGS)

# Two tiers, which pyproject.toml describes. `make test-all TIERS=second_tier` leaves out what `make test` has run.
TIERS ?= not products

test: $(VENV)/.installed-test ## run the first tier of the tests, which proves every feature
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test ## run both tiers: also every pair of options, and every command of the documentation
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest $(PYTEST_ARGS) -m '$(TIERS)'

# The oldest supported versions, in an environment of their own; tests/minimum.txt names them. torch is apart from the others
# since PIP_CONSTRAINT may fix it: MINIMUM_TORCH=torch==2.13.0.
MINIMUM_TORCH ?= torch==$(shell sed -n 's/.*"torch>=\(.*\)".*/\1/p' pyproject.toml).0
MINIMUM := $(VENV)-minimum
MINIMUM_ARGS ?= -n logical --maxprocesses 4 --dist worksteal tests/project/test_versions.py tests/engine/test_step.py tests/state/test_state.py \
	tests/routing/test_route.py tests/integrations/test_registration.py tests/integrations/test_optim_args.py \
	tests/integrations/test_trainer.py tests/integrations/test_plugin.py tests/checkpoint/test_files.py

$(MINIMUM)/.installed: pyproject.toml tests/minimum.txt
	@test -x $(MINIMUM)/bin/python || $(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check -e . -r tests/minimum.txt '$(MINIMUM_TORCH)'
	@touch $@

test-minimum: $(MINIMUM)/.installed ## run a part of the tests with the oldest supported transformers and accelerate
	HF_EMOPT_MINIMUM=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest $(MINIMUM_ARGS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.installed-dev ## build the documentation into site/
	$(RUN) -m mkdocs build --strict

clean: ## remove the virtual environment and what the targets wrote
	rm -rf $(VENV) $(MINIMUM) demo-out site build
