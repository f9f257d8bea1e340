# `make help` lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
BIN := .venv/bin
MODELS := .cache/models
EMU_MODELS := $(patsubst %,tests/emu/test_%.py,\
  model decode_loop prefill_weights deploy device_script tune tune_boards)
BESIDE := tests/codegen tests/schedules tests/tuning tests/cli tests/frontend tests/runtime tests/bench
.DEFAULT_GOAL := help

.PHONY: help demo test quick check fix clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[compile]'
	@touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[compile,cuda,tune,grammar,store]' --group dev
	@touch $@

demo: .venv/installed  ## compile SmolLM2-135M and let it answer
	$(BIN)/python tests/models.py $(MODELS) --only smollm2
	$(BIN)/xpuc compile $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf -o $(MODELS)/smollm2.xpuc
	$(BIN)/xpuc run $(MODELS)/smollm2.xpuc -p "Why is the sky blue?" -n 48 --temp 0

# Two processes at a time, a core for each: at first the halves of tests/emu, models and kernels.
test: .venv/dev  ## the whole suite, slow tests included (fetches two small models)
	$(BIN)/python tests/models.py $(MODELS)
	@{ $(BIN)/pytest -m "not hardware" tests/emu $(addprefix --ignore=,$(EMU_MODELS)); emu=$$?; \
	  $(BIN)/pytest -m "not hardware" $(BESIDE) && exit $$emu; } >.cache/beside.log 2>&1 & beside=$$!; \
	trap "kill 0" INT TERM; \
	$(BIN)/pytest -m "not hardware" $(EMU_MODELS); emu=$$?; \
	$(BIN)/pytest -m "not hardware" $(addprefix --ignore=,$(BESIDE)) && passed=$$emu || passed=1; \
	wait $$beside || passed=1; cat .cache/beside.log; exit $$passed

quick: .venv/dev  ## the tests that take a moment
	$(BIN)/pytest

check: .venv/dev  ## format, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: .venv/dev  ## format and mend what lint can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the venv, caches and build products
	rm -rf .venv .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
