# Two commands on a machine with only Python (>= 3.10) and make: `make demo` and `make test`.
PYTHON ?= python3
# Where environments lie, and the torch in them: the pinned one, or `make test TORCH=2.15.0` for another, in its own.
ENVS ?= .
TORCH ?=
VENV := $(ENVS)/.venv$(if $(TORCH),-$(TORCH))
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Processes that run tests, each with ranks of its own, which compute on one thread each.
WORKERS ?= 2
# torchtitan's model files need these only. It depends on an older huggingface_hub than transformers, so pip would
# find no environment for both.
TITAN := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0
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

# torch is pinned in constraints.txt: a loose one pulls gigabytes of CUDA packages, and so does TORCH=. Another torch
# may want another triton.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' constraints.txt > $(PINS))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[test,viz,dev,hf,recipes]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TITAN)
	touch $@

clean:
	rm -rf $(VENV)
