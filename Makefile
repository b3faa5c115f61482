# Every target is a script in ci/, so that what runs in CI also runs by hand, one step at a time.
# `make` alone lists the targets. ARGS goes on to the program that a target ends in: `make demo ARGS=--json`.

.DEFAULT_GOAL := help
.PHONY: help demo test lint test-rust test-python test-gpu model soak wheel aarch64 bench bench-gpu install clean distclean
# One step at a time, also under `make -j`: cargo uses every core by itself.
.NOTPARALLEL:

ARGS ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: ## build and install the wheel in .venv, then run `ec-shared-region demo`
	@ci/demo.sh $(ARGS)

test: ## run every test and lint; what CI runs
	@ci/test.sh all

lint: ## run the lints only: rustfmt, clippy, rustdoc, ruff, mypy, stubtest
	@ci/test.sh lint

test-rust: ## run the tests of the Rust core only
	@ci/test.sh rust

test-python: ## run the Python tests only, on the installed wheel; ARGS goes to pytest
	@ci/test.sh python $(ARGS)

test-gpu: ## run the tests that need a GPU; ARGS goes to pytest
	@ci/test.sh python -m gpu $(ARGS)

model: ## check the model of the protocol in every configuration; ARGS is a part of a configuration's name
	@ci/model.sh $(ARGS)

soak: ## processes race and die for as long as you like: ARGS="--kills 10000", "--seed 7", "--originals", --help
	@ci/soak.sh $(ARGS)

wheel: ## build a manylinux_2_17 wheel for this machine's processor into dist/, and inspect it
	@ci/wheel.sh

aarch64: ## cross-build the aarch64 wheel into dist/, and inspect it (it is not run)
	@ci/aarch64.sh

bench: ## run the criterion benches, then the table beside the stock way: ARGS="--quick", "--rows P2,P8", "--check", --help
	@ci/bench.sh $(ARGS)

bench-gpu: ## registration and copies on this machine's GPU; ARGS goes to benches/gpu.py
	@ci/bench_gpu.sh $(ARGS)

install: ## build and install the wheel in .venv, and stop there
	@ci/install.sh

clean: ## remove what was built; .venv stays, since it holds torch
	@ci/clean.sh

distclean: ## remove what was built, and .venv
	@ci/clean.sh --venv
