# Every target readies the machine first (Python packages, compiler): _build/environment.py.
PYTHON ?= python3
READY := $(PYTHON) _build/environment.py
# One unit stands for all when a change only needs to be seen to compile.
CHECK_HEAD_DIMS ?= 128
CHECK_DTYPES ?= bf16
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run train test build bench bench-backward bench-fp8 accuracy plots readme build-time
.PHONY: compile-check clean

help:  ## show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

run:  ## encode real sentences with a real model on this machine's best backend
	@$(READY) run -- python examples/encode_sentences.py $(ARGS)

train:  ## train a small GPT on these kernels beside PyTorch's attention
	@$(READY) bench -- python examples/train_gpt.py $(ARGS)

test:  ## all tests that this machine can run (ARGS="-k causal" picks some)
	@$(READY) test -- python -m pytest $(ARGS)

build:  ## compile every kernel and the binding into the source tree, GPU or not
	@$(READY) build

bench:  ## measure the forward against the peers (needs the GPU); writes benchmarks/results
	@$(READY) bench -- python benchmarks/forward.py $(ARGS)

bench-backward:  ## measure the backward likewise; writes benchmarks/results/backward-*.json
	@$(READY) bench -- python benchmarks/backward.py $(ARGS)

bench-fp8:  ## measure the e4m3 forward likewise; writes benchmarks/results/fp8-*.json
	@$(READY) bench -- python benchmarks/fp8.py $(ARGS)

accuracy:  ## errors of FP8 attention against float64, random inputs and a model's activations
	@$(READY) run -- python -m flash_attn3.accuracy $(ARGS)
	@$(READY) run -- python examples/fp8_activations.py

build-time:  ## time and memory of a full build; writes benchmarks/results/build-*.json
	@$(READY) build -- python benchmarks/build_time.py $(ARGS)

plots:  ## draw forward-*.json and backward-*.json of benchmarks/results, a picture beside each
	@$(READY) plots -- python benchmarks/plot.py $(ARGS)

readme:  ## put the figures of benchmarks/results into README.md
	@$(PYTHON) benchmarks/readme_table.py

compile-check:  ## compile one unit (CHECK_HEAD_DIMS, CHECK_DTYPES), check its machine code
	@FLASH_ATTN3_HEAD_DIMS=$(CHECK_HEAD_DIMS) FLASH_ATTN3_DTYPES=$(CHECK_DTYPES) \
	  FLASH_ATTN3_SASS_LIBRARY=build/check/kernels.so $(READY) compile-check -- \
	  python -m pytest tests/test_sass.py $(ARGS)

clean:  ## remove what builds leave in the source tree (.venv stays)
	rm -rf build dist *.egg-info .pytest_cache flash_attn3/*.so flash_attn3/_build_info.py
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
