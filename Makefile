# make quickstart    train, evaluate before and after, print a table
# make ablation      compare the estimators over seeds (hours; resumable)
# make test          run the tests
# make venv          only make the environment
# make test-parity   install torch (CPU) and compare with transformers live
# make lint          isort, pyink and ruff, as pre-commit runs them
#
# PYTHON=python3.12 picks the interpreter, SEED=1 the seed of the quick start,
# ARGS='...' is passed on to pytest, to the training or to the comparison.

PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
ARGS ?=
# Where torch without CUDA is; where it cannot be reached, pip goes on without.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
# Compiled programs are kept between runs.
CACHE := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5

.PHONY: venv test test-parity quickstart ablation lint clean

quickstart: $(STAMP)
	$(CACHE) $(VENV)/bin/python -m hgpo_jax.train \
	    --gin_file=runs/quickstart.gin \
	    --gin_bindings='Experiment.seed = $(SEED)' \
	    --run_dir=runs/quickstart-seed$(SEED) $(ARGS)

ablation: $(STAMP)
	$(CACHE) $(VENV)/bin/python -m benchmarks.ablation --out=runs/ablation $(ARGS)

test: $(STAMP)
	$(CACHE) $(VENV)/bin/python -m pytest $(ARGS)

# torch is no dependency, not even of the tests; only this comparison has it.
test-parity: $(VENV)/.torch
	$(VENV)/bin/python -m pytest tests/parity $(ARGS)

venv: $(STAMP)

# The stamp is written last: an environment without it was left half made,
# and one older than what it was made from is out of date. Both start afresh.
$(STAMP): setup.py constraints.txt
	@sh scripts/preflight.sh "$(PYTHON)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	touch $(STAMP)

$(VENV)/.torch: $(STAMP)
	$(PIP) install --quiet --retries 1 -c constraints.txt torch==2.13.0 \
	    --extra-index-url $(TORCH_INDEX)
	touch $@

lint: $(STAMP)
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(VENV)/bin/isort --check-only hgpo_jax launch tests setup.py
	$(VENV)/bin/pyink --check hgpo_jax launch tests setup.py
	$(VENV)/bin/ruff check hgpo_jax launch tests setup.py

clean:
	rm -rf $(VENV) .cache build *.egg-info
