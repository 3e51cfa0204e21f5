# hotset's commands for a fresh checkout. Needs Python 3.11+, a C++ compiler and make; everything else comes from
# the Python package index (cmake and ninja too).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
NATIVE := $(wildcard native/CMakeLists.txt native/src/* native/kernels/*)

.DEFAULT_GOAL := help
.PHONY: help build demo test test-oracles test-models test-kernels test-aarch64 test-numa test-numa-x86 test-numa-arm64
.PHONY: test-numa-64k lint docs bench-peers bench-peers-v4 bench-kernels clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/.built: $(VENV)/.made pyproject.toml $(NATIVE)
	$(PIP) install --no-build-isolation --editable '.[test,lint]'
	touch $@

build: $(VENV)/.built  ## build hotset into .venv

demo: build  ## fetch SmolLM2-135M (98 MB), plan it, chat one answer, measure its share of the memory bandwidth
	$(BIN)/hotset pull smollm2-135m
	$(BIN)/hotset plan smollm2-135m
	$(BIN)/hotset run smollm2-135m "What is the capital of France? Answer in one sentence." --stats
	$(BIN)/hotset bench smollm2-135m --context 128 --prefill 512 --sequences 1

test: build  ## the whole test suite: no network, no model
	$(BIN)/python -m pytest

test-oracles: build  ## families against transformers, live (needs .peers/oracle: see tests/golden/make_llama_golden.py)
	$(BIN)/python -m pytest -s tests/oracles

test-models: build  ## SmolLM2 against stored results of an independent implementation (fetches 98 MB)
	$(BIN)/hotset pull smollm2-135m
	$(BIN)/python -m pytest tests/models

test-kernels: build  ## every kernel set of this machine against a plain judge in C++
	$(BIN)/cmake -S native -B build/kernel-tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DHOTSET_KERNEL_TESTS=ON
	$(BIN)/cmake --build build/kernel-tests
	build/kernel-tests/kernel_tests

test-aarch64: build  ## the same cross-compiled for AArch64, under emulation; bits compared (g++-aarch64-linux-gnu, qemu-user-static)
	scripts/cross_aarch64.sh

test-numa: test-numa-x86 test-numa-arm64  ## placement inside emulated machines with several memory nodes (docs/guides/emulated_machines.md)

test-numa-x86: build  ## the same, x86-64 alone
	$(BIN)/python tools/numa/vm.py test x86-64
	$(BIN)/python tools/numa/vm.py test x86-64 --machine gh200x2-gpu -- --ignore=tests/test_answers.py

test-numa-arm64: build  ## the same, AArch64 alone (g++-aarch64-linux-gnu)
	$(BIN)/python tools/numa/vm.py test arm64
	$(BIN)/python tools/numa/vm.py test arm64 --machine gh200x2-gpu -- --ignore=tests/test_answers.py

test-numa-64k: build  ## AArch64 with pages of 64 KiB, as Grace has them; builds a kernel once, 10 minutes (flex, bison, bc)
	$(BIN)/python tools/numa/vm.py test arm64 --pages 64
	$(BIN)/python tools/numa/vm.py test arm64 --pages 64 --machine gh200x2-mig -- --ignore=tests/test_answers.py

lint: build  ## formatting, types, stale generated documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/gen_cli_docs.py --check

docs: build  ## regenerate docs/reference
	$(BIN)/python scripts/gen_cli_docs.py

bench-peers: build  ## side by side with llama-cpp-python and openvino-genai; writes docs/reference/peers.md
	$(BIN)/python benchmarks/peers.py --priority

bench-peers-v4: build  ## DeepSeek-V4 beside llama.cpp on its own conversion; writes docs/reference/peers-v4.md
	$(BIN)/python benchmarks/peers.py --v4 --priority

bench-kernels: build  ## one-token products of every format, as a share of the read bandwidth of the same run
	$(BIN)/python benchmarks/kernels.py

clean:  ## remove what was built (not models, not peers)
	rm -rf $(VENV) build dist
