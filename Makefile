# Every entry works alone on a fresh clone: it first creates .venv (once) and installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SAMPLES := $(patsubst samples/%/,%,$(sort $(dir $(wildcard samples/*/train.py samples/*/run.sh))))

.PHONY: help init install tests tests-all lint format bench clean samples/ $(addprefix samples/,$(SAMPLES))

help:
	@echo "make init          create .venv and install the development requirements"
	@echo "make install       install the package into .venv"
	@echo "make samples/      list the samples;  make samples/<name> runs one"
	@echo "make tests         the tests (under 15 minutes on 2 cores);  make tests-all adds the slow ones"
	@echo "make lint          ruff and mypy;  make format rewrites"
	@echo "make bench         the benchmarks, as ratios"

init: $(READY)

$(READY): requirements-dev.txt pyproject.toml
	@echo "── setting up $(VENV) (once; a few minutes, mostly downloading torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "── 1/3 pip";                      $(BIN)/python -m pip install --quiet --upgrade pip
	@echo "── 2/3 development requirements"; $(BIN)/python -m pip install --progress-bar on -r requirements-dev.txt
	@echo "── 3/3 gemini itself (editable)"; $(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

install: $(READY)
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@echo "installed: $(BIN)/gemini_python and $(BIN)/gemini"

samples/:
	@for name in $(SAMPLES); do printf "  make samples/%-10s %s\n" "$$name" "$$(head -n 1 samples/$$name/README.md)"; done

$(addprefix samples/,$(SAMPLES)): $(READY)
	@if [ -x $@/run.sh ]; then BIN=$(abspath $(BIN)) $@/run.sh $(ARGS); else $(BIN)/python samples/compare.py $@/$(or $(SCRIPT),train).py $(ARGS); fi

samples/%:
	@echo "no sample is called '$*'; these exist:" >&2; $(MAKE) --no-print-directory samples/ >&2; exit 2

tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests

tests-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	@missed=; for file in benchmarks/bench_*.py; do \
	    echo "── $$file"; $(BIN)/python $$file || missed="$$missed $$file"; \
	done; test -z "$$missed" || { echo "limits missed in:$$missed" >&2; exit 1; }

clean:
	rm -rf $(VENV) .gemini build dist *.egg-info
