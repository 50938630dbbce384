# Two commands on a machine with only Python (>= 3.10) and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Processes that run tests, each with ranks of its own, which compute on one thread each.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: demo test test-fast lint clean

demo: $(STAMP)
	$(BIN)/python -m hyper_cp demo

# Everything: compiled models, wide worlds and the examples under torchrun too.
test: $(STAMP)
	$(PYTEST)

# Without the tests that are marked slow.
test-fast: $(STAMP)
	$(PYTEST) -m 'not slow'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch is pinned in constraints.txt: a loose one pulls gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,viz,dev,hf]'
	touch $@

clean:
	rm -rf $(VENV)
