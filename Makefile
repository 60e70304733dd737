# make demo   the whole pipeline on a tiny model and rendered tiles
# make test   the tests, on the CPU
# make test-slow   those that take long, beside them
# ARMS=all    make demo also trains without the filter, and in-batch with as much compute
# VENV=DIR    an environment to use or create (default .venv)

VENV ?= .venv
PYTHON ?= python3
DEMO ?= demo
SEED ?= 0
ARMS ?=
JOBS ?= 2
BIN := $(VENV)/bin

.PHONY: demo test test-install test-slow lint clean

$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch torchvision
	$(BIN)/python -m pip install --quiet --editable ".[test,plots]"
	touch $@

# In one command: ms-swift asks for older transformers and peft, which pip would otherwise install first and then replace.
$(BIN)/.installed-tests: pyproject.toml requirements-swift.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch torchvision --requirement requirements-swift.txt --editable ".[test,plots]"
	touch $(BIN)/.installed $@

test-install: $(BIN)/.installed-tests

demo: $(BIN)/.installed
	VENV=$(VENV) DEMO=$(DEMO) SEED=$(SEED) ARMS=$(ARMS) bash recipes/demo.sh

# One thread a process: two processes share two cores, and gloo ranks must not fight over them.
test: $(BIN)/.installed-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow" tests

# Whole programs in fresh processes, again and again.
test-slow: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m slow tests

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf demo build *.egg-info .pytest_cache .ruff_cache .hypothesis
