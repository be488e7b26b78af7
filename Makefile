# Everything starts here; `make help` lists it. Each target sets up what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
RANKS ?= 2
CMAKE_ARGS ?=
CONFIGURE = cmake --preset $(1) -DLOCKSTEP_PYTHON="$$(cat build/torch_python)" $(CMAKE_ARGS) >build/configure.log || { cat build/configure.log; exit 1; }

.PHONY: help setup build demo test bench check quick-check format clean asan tsan

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## install what is missing: system packages, torch
	@tools/setup.sh build

build: setup ## configure and build everything
	@$(call CONFIGURE,dev)
	@cmake --build --preset dev -j $(JOBS)

demo: setup ## an all-reduce on local ranks, with its bandwidth (RANKS=2)
	@$(call CONFIGURE,dev)
	@cmake --build --preset dev -j $(JOBS) --target lockstep-run example_all_reduce
	build/bin/lockstep-run -n $(RANKS) build/examples/all_reduce

test: build ## build and run every test
	ctest --preset dev -j $(JOBS)

bench: setup ## one benchmark beside its peers: make bench NAME=x
	@test -n "$(NAME)" || { echo "usage: make bench NAME=x, one of: $(basename $(notdir $(wildcard benchmarks/*.cpp)))"; exit 2; }
	@test -e "benchmarks/$(NAME).cpp" || { echo "there is no benchmark '$(NAME)'; there is: $(basename $(notdir $(wildcard benchmarks/*.cpp)))"; exit 2; }
	@$(call CONFIGURE,dev)
	@cmake --build --preset dev -j $(JOBS) --target lockstep-run bench_$(NAME)
	@mkdir -p build/bench
	build/bench/bench_$(NAME) --output build/bench/$(NAME).json

quick-check: ## format, lint of changed files, layers, behaviour tables, headers on their own
	@tools/setup.sh check
	@tools/check.sh quick

check: ## format, lint, layers, headers, and every test under ASan + UBSan and under TSan
	@tools/setup.sh check
	@tools/check.sh all
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
	@git ls-files '*.h' '*.cpp' | xargs .venv/bin/clang-format -i

clean: ## remove everything that was built; the virtual environment stays
	rm -rf build build-*
