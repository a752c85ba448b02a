# `make` lists the targets. Every one sets up what it needs, and costs nothing when that is there.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# These tests wait more than they compute: four at a time keep two cores busy. The engine's share one engine, so they are one.
FAST := $(BIN)/python -m pytest -m "not engine" --numprocesses 4 --dist worksteal

.PHONY: help demo setup test test-fast check docs format bench bench-peers bench-ledger bench-fleet lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## the main job on this machine: a real engine, the gateway and a load test with prefix caching on and off
	@$(BIN)/kvgate demo

setup: ## both environments: .venv (kvgate) and .venv-engine (vLLM for the CPU)
	@scripts/setup
	@scripts/setup-engine

test: ## every test, those against a real vLLM included
	@scripts/setup dev
	@scripts/setup-engine
	@$(BIN)/python -m bench.debian redis-server
	@$(FAST)
	@$(BIN)/python -m pytest -m engine

test-fast: ## the tests that need no engine
	@scripts/setup dev
	@$(BIN)/python -m bench.debian redis-server
	@$(FAST)

check: ## format, lint, types, and documents in step with the code
	@scripts/setup dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@if [ -d tests/docs ]; then $(BIN)/python -m pytest -q tests/docs; fi

docs: ## write the pages of docs/ that are made from the code
	@scripts/setup dev
	@$(BIN)/python docs/pages.py

format: ## put the code into shape
	@scripts/setup dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: ## measure the gateway beside nginx, and write the table under docs/results
	@scripts/setup dev
	@$(BIN)/python -m bench

bench-peers: ## the same beside other routers; BENCH="--quick" and the like reach python -m bench
	@scripts/setup dev
	@scripts/setup-peers
	@$(BIN)/python -m bench peers $(BENCH)

bench-ledger: ## the CPU of making prompts and of matching them, over 64 replicas
	@scripts/setup dev
	@scripts/setup-engine
	@$(BIN)/python -m bench render
	@$(BIN)/python -m bench index

bench-fleet: ## where prompts go, on eight simulated engines beside other routers; TRACE=FILE is in Mooncake's format
	@test -n "$(TRACE)" || { echo "make bench-fleet: name the trace, as in TRACE=conversation_trace.jsonl" >&2; exit 2; }
	@scripts/setup dev
	@scripts/setup-peers vllm-router sglang-router
	@$(BIN)/python -m bench fleet --trace "$(TRACE)" $(BENCH)

# Needs uv (any recent version). The locks are universal: one file for Linux and macOS, Python 3.11 to 3.13.
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url
lock: ## resolve requirements/*.lock anew
	@command -v uv >/dev/null || { echo "make lock: uv is missing: install it and run this again" >&2; exit 2; }
	@cd requirements && $(COMPILE) ../pyproject.toml -o runtime.lock
	@cd requirements && $(COMPILE) --extra dev -c runtime.lock ../pyproject.toml -o dev.lock
	@cd requirements && $(COMPILE) -c dev.lock build.in -o build.lock
	@cd requirements && $(COMPILE) --override engine.overrides engine.in -o engine.lock
	@cd requirements && for peer in bench/*.in; do $(COMPILE) "$$peer" -o "$${peer%.in}.lock"; done

clean: ## remove the environments and everything generated; the converted model in your cache directory stays
	@rm -rf .venv .venv-engine .venv-bench .venv*.lock .venv*.lock.d out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
