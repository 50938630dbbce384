# Two commands on a machine with only Python (>= 3.11) and make: `make demo` and `make test`.
# The system's Python, if it is recent and can make environments and build extensions: distributions build it with
# profile-guided optimization, pyenv does not, and the tests take a fifth longer without. `make test PYTHON=python3.12`
# takes another one. constraints.txt has packages for Python 3.11 to 3.14.
CAN := import ensurepip, os, sys, sysconfig; sys.exit(not ((3, 11) <= sys.version_info < (3, 15) and os.path.exists(sysconfig.get_path("include") + "/Python.h")))
ifndef PYTHON
PYTHON := $(shell /usr/bin/python3 -c '$(CAN)' 2>/dev/null && echo /usr/bin/python3 || echo python3)
endif
# Where environments lie, and the torch in them: the pinned one, or `make test TORCH=2.15.0` for another, in its own.
ENVS ?= .
TORCH ?=
VENV := $(ENVS)/.venv$(if $(TORCH),-$(TORCH))
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# The pages have an environment of their own: what builds them is not needed to test.
DOCS := $(ENVS)/.venv-docs
# Processes that run tests, each with ranks of its own, which compute on one thread each.
WORKERS ?= 2
# torchtitan's model files need these only. It depends on an older huggingface_hub than transformers, so pip would
# find no environment for both.
TITAN := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0
# Other libraries that `make bench` and `make scenarios` measure, those of the extra `bench`, and what they import.
PEERS ?= deepspeed hjson msgpack py-cpuinfo ninja axolotl-ringmaster yunchang
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: demo test test-fast bench scenarios peers lint docs release-check clean

demo: $(STAMP)
	$(BIN)/python -m hyper_cp demo

# Everything: compiled models, wide worlds and the examples under torchrun too.
test: $(STAMP)
	$(PYTEST)

# Without the tests that are marked slow.
test-fast: $(STAMP)
	$(PYTEST) -m 'not slow'

# Every mode beside its peers, about 17 minutes; writes the table and the plot of docs/measured/performance.md.
bench: peers
	PYTHONPATH=$(VENV)-peers $(BIN)/python -m benchmarks --write

# Work in which libraries differ, about 10 minutes; writes docs/measured/scenarios.md and the table of the README.
scenarios: peers
	PYTHONPATH=$(VENV)-peers $(BIN)/python -m benchmarks.scenarios --write

# A peer that cannot be installed is skipped, and the tables say so. They lie beside the environment, not in it, since others
# find them there (accelerate turns to DeepSpeed), and without what they depend on, which would pull CUDA packages.
peers: $(STAMP)
	for package in $(PEERS); do \
		test -e $(VENV)-peers/.$$package || { $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
			--upgrade --target $(VENV)-peers $$package && touch $(VENV)-peers/.$$package; } || true; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent tests/public_types.py
	$(BIN)/lint-imports

# The pages in site/; a warning, such as a link to nowhere, is an error. Docstrings are read, not imported: torch is not needed.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$(sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	touch $@

# The wheel and the sdist in dist/, and the demo and examples/train.py in an empty environment that has the wheel.
release-check: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(PYTHON) -m venv dist/env
	dist/env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd dist && env/bin/hyper-cp demo --steps 2 --html demo.html && env/bin/hyper-cp tiles --modes && env/bin/hyper-cp doctor
	cp examples/train.py dist/train.py
	cd dist && env/bin/torchrun --nproc-per-node 2 train.py

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
	rm -rf $(VENV) $(VENV)-peers $(DOCS) site
