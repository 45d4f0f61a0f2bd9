# Every entry works alone on a fresh clone: it first creates .venv (once) and installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(VENV)/.ready-run
RUN_TF := $(VENV)/.ready-run-tensorflow
READY  := $(VENV)/.ready
LOCK   := requirements-dev.lock
SAMPLES := $(patsubst samples/%/,%,$(sort $(dir $(wildcard samples/*/train.py samples/*/run.sh))))
MORE   := samples/bert samples/dump_ast
WITH_TF := $(filter %_tf,$(addprefix samples/,$(SAMPLES)))
# The core tests: what torch and transformers can break, in a few minutes.
CORE   := $(wildcard tests/test_*.py) tests/capture tests/codegen tests/ir tests/pipe tests/random_numbers \
          tests/samples/test_mnist.py tests/snapshot tests/step tests/cache/test_graph_cache.py \
          tests/launcher/test_script_api.py tests/batch_analysis/test_model_losses.py \
          tests/batch_analysis/test_transformer_losses.py tests/runtime/deferred \
          tests/runtime/pipelined/step_executor tests/runtime/worker tests/runtime/eager/test_classic_training.py \
          tests/runtime/eager/test_remote_call.py tests/runtime/transport/test_generated_imports.py \
          tests/runtime/transport/test_package_functions.py tests/runtime/transport/test_tensor_transport.py
# The versions of the lock, which are those of one Python; another Python gets the newest that its torch goes with.
LOCKED  = $$($(BIN)/python -c 'import sys; own = "Python %d.%d" % sys.version_info[:2]; \
            has = open("$(LOCK)").readline().endswith(own + "\n"); \
            print("-c $(LOCK)" if has else ""); \
            has or print("── $(LOCK) is not for " + own + ": versions are the newest that fit", file=sys.stderr)')

.PHONY: help init lock install tests tests-quick tests-all tests-newest tests-torch lint format bench docs clean samples/ $(addprefix samples/,$(SAMPLES))

help:
	@echo "make init          create .venv and install the development requirements, by the versions of $(LOCK)"
	@echo "make lock          write $(LOCK) again, from requirements-dev.txt"
	@echo "make install       install the package into .venv"
	@echo "make samples/      list the samples;  make samples/<name> runs one (MODE=sharding or hybrid: on shards)"
	@echo "make tests         the tests (under 15 minutes on 2 cores);  make tests-all adds the slow ones"
	@echo "make tests-quick   the unit tests, which start no process (under 2 minutes)"
	@echo "make tests-newest  the core tests on the newest torch and transformers, in .venv-newest"
	@echo "make tests-torch VERSION=2.15.0   the core tests on another torch, in .venv-torch-2.15.0"
	@echo "make lint          ruff and mypy;  make format rewrites"
	@echo "make bench         the benchmarks, as ratios;  make docs writes the site to build/site"

init: $(READY)

$(RUN): pyproject.toml requirements-dev.txt $(LOCK)
	@echo "── setting up $(VENV) (once; a few minutes, mostly downloading torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "── gemini itself (editable) and what it runs with"
	@$(BIN)/python -m pip install --progress-bar on $(LOCKED) $$(grep '^torch==' requirements-dev.txt) --editable '.[samples,report]'
	@touch $@

$(RUN_TF): $(RUN)
	@echo "── TensorFlow, for the samples that use it"
	@$(BIN)/python -m pip install --progress-bar on $(LOCKED) $$(grep '^torch==' requirements-dev.txt) --editable '.[samples,report,tensorflow]'
	@touch $@

$(READY): $(RUN)
	@echo "── development requirements"
	@$(BIN)/python -m pip install --progress-bar on $(LOCKED) -r requirements-dev.txt
	@touch $@

# Packages that torch itself pins (CUDA, triton) are left out, and so is the kind of torch (+cpu).
lock:
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv $$folder && \
	    $$folder/bin/python -m pip install --progress-bar on -r requirements-dev.txt && \
	    { $$folder/bin/python -c 'import sys; print("# Made by make lock, for Python %d.%d" % sys.version_info[:2])'; \
	      $$folder/bin/python -m pip freeze --exclude-editable | sed -e 's/^\(torch==[^+]*\)+.*/\1/' \
	          -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d'; } > $$folder/lock && cp $$folder/lock $(LOCK)

install: $(RUN)
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@echo "installed: $(BIN)/gemini_python and $(BIN)/gemini"

samples/:
	@for name in $(SAMPLES); do printf "  make samples/%-10s %s\n" "$$name" "$$(head -n 1 samples/$$name/README.md)"; done

$(MORE): $(READY)
$(WITH_TF): $(RUN_TF)
$(addprefix samples/,$(SAMPLES)): $(RUN)
	@if [ -x $@/run.sh ]; then BIN=$(abspath $(BIN)) $@/run.sh $(ARGS); else MODE=$(MODE) $(BIN)/python samples/compare.py $@/$(or $(SCRIPT),train).py $(ARGS); fi

samples/%:
	@echo "no sample is called '$*'; these exist:" >&2; $(MAKE) --no-print-directory samples/ >&2; exit 2

tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests

tests-quick: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "unit and not slow" tests

tests-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

# An environment of its own, $(1), with this torch, $(2), in the place of the one that is pinned; $(3): pip's options.
define core_tests
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@grep -v '^torch==' requirements-dev.txt > $(1)/requirements.txt
	@grep -v '^torch==' $(LOCK) > $(1)/constraints.txt
	@$(1)/bin/python -m pip install --progress-bar on $(3) '$(2)' -r $(1)/requirements.txt
	@$(1)/bin/python -m pip install --quiet --no-deps --editable .
	OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n 2 -m "not slow" $(CORE)
endef

tests-newest:
	$(call core_tests,.venv-newest,torch,--upgrade)

tests-torch:
	@test -n "$(VERSION)" || { echo "no VERSION is given; write make tests-torch VERSION=2.15.0" >&2; exit 2; }
	$(call core_tests,.venv-torch-$(VERSION),torch==$(VERSION),-c .venv-torch-$(VERSION)/constraints.txt)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/site
	@echo "the site: build/site/index.html"

bench: $(READY)
	@missed=; for file in benchmarks/bench_*.py; do \
	    echo "── $$file"; $(BIN)/python $$file || missed="$$missed $$file"; \
	done; test -z "$$missed" || { echo "limits missed in:$$missed" >&2; exit 1; }

clean:
	rm -rf $(VENV) .venv-newest .venv-torch-* .gemini build dist *.egg-info
