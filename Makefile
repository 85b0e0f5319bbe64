# Needs Linux and Python 3.11 or 3.12 (`make PYTHON=python3.12 demo`). With gcc or clang the optimizer kernel is compiled.
#
#   make demo     installs into .venv and fine-tunes the tiny model that the package ships
#   make test     installs into .venv and runs the tests        (make test PYTEST_ARGS="-k schedule -x")
#   make lint     ruff and mypy
#   make clean    removes .venv and what builds left behind
#
# TORCH is what pip is asked for, before everything else: builds of torch differ by accelerator and by gigabytes. The default
# is the version in constraints.txt, which from PyPI is a CUDA build on Linux. For another one, after `make clean`:
#   make demo TORCH=torch                                                                      the newest
#   make demo TORCH="torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"  no GPU: a small download
# For AMD, likewise with the index that pytorch.org names for the ROCm version.

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c $(VENV)/constraints.txt
# What an editable install is made from; all other sources are read in place.
INSTALLED_FROM := pyproject.toml setup.py kernels/native_build.py kernels/layer_adam.c

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/slideformer-ray quickstart

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# mypy finds packages by folder and knows nothing of setuptools' package-dir, so it is shown the installed layout, made of links.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	rm -rf build/typed && mkdir -p build/typed/slideformer_ray
	ln -s $(CURDIR)/slideformer_ray/* $(CURDIR)/actors $(CURDIR)/kernels build/typed/slideformer_ray/
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p slideformer_ray

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/*.so

# The second install must keep whatever torch this one chose, so torch's own pin is left out of .venv/constraints.txt.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 13) or sys.exit("Python 3.11 or 3.12 is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(INSTALLED_FROM)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch $(INSTALLED_FROM)
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.installed
