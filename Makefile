# Two commands on a machine with only Python (>= 3.10) and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-all lint clean

demo: $(STAMP)
	$(BIN)/python -m hyper_cp demo

test: $(STAMP)
	$(BIN)/python -m pytest

# The slow ones too: compiled models, more ranks, the examples under torchrun.
test-all: $(STAMP)
	$(BIN)/python -m pytest -m ''

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch is pinned in constraints.txt: a loose one pulls gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,viz,dev,hf]'
	touch $@

clean:
	rm -rf $(VENV)
