# Everything starts here; `make help` lists it. Each target sets up what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# As many compilers at once as there are cores, and memory for: one takes up to 1.5 GB.
JOBS ?= $(shell awk -v cores="$$(nproc)" '/^MemAvailable/ {n = int($$2 / 1500000); print n < 1 ? 1 : n < cores ? n : cores}' /proc/meminfo)
RANKS ?= 2
ARGS ?=
CMAKE_ARGS ?=

# A cmake that tools/setup.sh had to install goes before the system's.
export PATH := $(CURDIR)/.venv/cmake/bin:$(PATH)
# Where else headers are, separated by spaces or colons; tools/setup.sh looks there too.
LOCKSTEP_EXTRA_INCLUDES ?=
export CMAKE_INCLUDE_PATH := $(subst $(subst ,, ),:,$(strip $(abspath $(subst :, ,$(LOCKSTEP_EXTRA_INCLUDES))) $(CMAKE_INCLUDE_PATH)))

# torch is looked for anew each time, since LOCKSTEP_PYTHON may name another one today.
define CONFIGURE
cmake --preset $(1) -ULOCKSTEP_TORCH_CMAKE_DIR -DLOCKSTEP_PYTHON="$$(cat build/torch_python)" \
  $(if $(LOCKSTEP_GOOGLETEST_DIR),-DLOCKSTEP_GOOGLETEST_DIR="$(abspath $(LOCKSTEP_GOOGLETEST_DIR))") $(CMAKE_ARGS) \
  >build/configure.log || { cat build/configure.log; exit 1; }
endef

.PHONY: help setup configure build python python-install demo test bench check quick-check format clean asan tsan

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## install what is missing: system packages, torch
	@tools/setup.sh build

configure: setup ## let CMake prepare the build
	@$(call CONFIGURE,dev)

build: configure ## build everything
	@cmake --build --preset dev -j $(JOBS)

python: configure ## the Python plugin: import lockstep_torch
	@cmake --build --preset dev -j $(JOBS) --target lockstep_python_plugin
	@echo 'Built build/python/lockstep_torch. Use it with PYTHONPATH=$(CURDIR)/build/python, or run: make python-install'

python-install: python ## copy the plugin into site-packages of the Python it was built for
	@cmake --install build --component python

demo: configure ## train a small GPT on local ranks, a minute (RANKS=2 ARGS="--steps 500 --backend gloo")
	@cmake --build --preset dev -j $(JOBS) --target lockstep-run example_gpt
	build/examples/gpt --ranks $(RANKS) $(ARGS)

test: build ## build and run every test, or some: make test ARGS="-R threads_ddp"
	ctest --preset dev -j $(JOBS) $(ARGS) || { python3 -B tools/failed_tests.py build; exit 1; }

bench: configure ## one benchmark beside its peers: make bench NAME=x
	@test -n "$(NAME)" || { echo "usage: make bench NAME=x, one of: $(basename $(notdir $(wildcard benchmarks/*.cpp)))"; exit 2; }
	@test -e "benchmarks/$(NAME).cpp" || { echo "there is no benchmark '$(NAME)'; there is: $(basename $(notdir $(wildcard benchmarks/*.cpp)))"; exit 2; }
	@cmake --build --preset dev -j $(JOBS) --target lockstep-run bench_$(NAME)
	@mkdir -p build/bench
	build/bench/bench_$(NAME) --output build/bench/$(NAME).json

quick-check: ## format, lint of changed files, layers, behaviour tables, headers on their own
	@tools/setup.sh check
	@$(call CONFIGURE,dev)
	@JOBS=$(JOBS) tools/check.sh quick

check: ## format, lint, layers, headers, and every test under ASan + UBSan and under TSan
	@tools/setup.sh check
	@$(call CONFIGURE,dev)
	@JOBS=$(JOBS) tools/check.sh all
	@$(MAKE) asan tsan

asan: setup ## every test under AddressSanitizer and UBSan
	@$(call CONFIGURE,asan)
	@cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS)

tsan: setup ## the tests of code that has threads under ThreadSanitizer
	@$(call CONFIGURE,tsan)
	@cmake --build --preset tsan -j $(JOBS)
	ctest --preset tsan -j $(JOBS) -L 'unit|threads' -E 'install_tree|gloo_headers'

format: ## rewrite all C++ files with clang-format
	@tools/setup.sh check
	@tools/check.sh format

clean: ## remove everything that was built; the virtual environment stays
	rm -rf build build-*
