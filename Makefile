# make demo      measure this CPU, plan a small GPT for 4 processes on it, run the script, compare its
#                losses, and the step times of three layouts with those predicted
# make test      run the tests, in WORKERS processes of about 2 GiB each
# make check     format, lint, types
# make bench     print timings
# make parity    train every model under every layout on gloo, compare with one process
# make bench-emulated  run layouts on clusters of network namespaces, compare with the predictions
# make validate  price the published runs, say how far off the cost model is
# make exports   read the files of plan export and the launch files with their targets' own parsers
# make targets   install these frameworks
# make dist      build the wheel into dist/
# The first of them makes .venv and installs what it needs into it; later ones reuse it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(shell cksum pyproject.toml | cut -d ' ' -f 1)
# What the planner needs, and what its tests need beside.
READY := $(VENV)/ready-$(STAMP)
DEV := $(VENV)/dev-$(STAMP)
TARGETS := $(VENV)/targets
DEMO := plans/demo
MACHINE := plans/machine.toml
WORKERS ?= 2

.PHONY: demo test check bench bench-emulated parity validate targets exports dist
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/plan profile --quick --processes 4 --out $(MACHINE) --force
	$(BIN)/plan examples/gpt.py --gpus 4 --cluster $(MACHINE) --dtype float32 --out $(DEMO) --force
	$(BIN)/python examples/compare_losses.py $(DEMO) --processes 4 --steps 3
	$(BIN)/python examples/compare_layouts.py $(DEMO) --cluster $(MACHINE)

test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/bench/mypy.ini

bench: $(DEV)
	$(BIN)/python -m pytest tests/bench -m bench -s

bench-emulated: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/emulated/experiment.py

parity: $(DEV)
	$(BIN)/python tests/bench/parity.py

validate: $(DEV)
	$(BIN)/python tests/bench/validation_table.py

targets: $(TARGETS)/ready

exports: $(TARGETS)/ready
	$(TARGETS)/bin/python -m pytest tests/export -rs

dist: $(READY)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# All that is installed is compiled at once, on all cores, where pip takes one; files for other
# versions of Python are not.
PIP_INSTALL := -m pip install --no-compile
COMPILE := -m compileall -qq -j 0

# torch first and pinned: what it brings must not be decided by the other packages.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) -e .
	$(BIN)/python $(COMPILE) $(VENV)/lib planner || true
	@rm -f $(VENV)/ready-*
	@touch $@

$(DEV): $(READY)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	$(BIN)/python $(COMPILE) $(VENV)/lib || true
	@rm -f $(VENV)/dev-*
	@touch $@

# Apart from $(VENV): transformers does other things where these are installed.
$(TARGETS)/ready: $(READY)
	test -x $(TARGETS)/bin/python || $(PYTHON) -m venv $(TARGETS)
	$(TARGETS)/bin/python $(PIP_INSTALL) torch==2.13.0
	$(TARGETS)/bin/python $(PIP_INSTALL) -e '.[dev,targets]'
	$(TARGETS)/bin/python $(COMPILE) $(TARGETS)/lib || true
	@touch $@
