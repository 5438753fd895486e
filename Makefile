# Every target sets up what it needs, in .venv; Python >= 3.10 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The oldest laplace-torch that is supported, put before the newest one.
OLD_LAPLACE := .venv-laplace-0.2
# What the package promises of every version of laplace-torch.
CORE_TESTS := $(addprefix tests/test_,basis.py complement.py errors.py exact.py \
	family.py fit.py leave_one_out.py links.py posterior.py practice.py \
	state.py tuning.py)

# What other people's libraries are needed for, in an environment of their own.
CLIENTS := .venv-clients
CLIENT_TESTS := $(addprefix tests/test_,examples.py pages.py)

# The lower bounds of pyproject.toml, in an environment of their own.
OLDEST := .venv-oldest
OLDEST_PYTHON ?= python3.10
OLDEST_VERSIONS := torch==2.3.0 numpy==1.26.4 laplace-torch==0.2.2.2 \
	"curvlinops-for-pytorch<3"

# What makes the files to release, and where they are installed to see that they work.
BUILD := .venv-build
WHEEL := .venv-wheel

GALLERY := $(filter-out %/style.py,$(wildcard examples/gallery/*.py))

.PHONY: help demo results-demo gallery outputs docs test test-new test-old test-oldest test-clients \
	lint format build clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; name one: make PYTHON=python3.11 ..."; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	# Kernels of notebooks say nothing but errors.
	mkdir -p $(VENV)/etc/ipython
	echo 'c.IPKernelApp.log_level = 40' > $(VENV)/etc/ipython/ipython_kernel_config.py
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[test]"
	@touch $@

$(OLD_LAPLACE)/.done: pyproject.toml $(VENV)/.test
	rm -rf $(OLD_LAPLACE)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLD_LAPLACE) \
		"laplace-torch==0.2.2.2" "curvlinops-for-pytorch<3"
	@touch $@

$(CLIENTS)/.done: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -e ".[test,clients]"
	@touch $@

$(OLDEST)/.done: pyproject.toml
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' || \
		{ echo "Python 3.10 is needed: make test-oldest OLDEST_PYTHON=/path/to/it"; \
		exit 1; }
	$(OLDEST_PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(OLDEST_VERSIONS) -e . \
		"pytest>=8" pytest-xdist
	@touch $@

$(BUILD)/.done: | $(BIN)/python
	$(BIN)/python -m venv --clear $(BUILD)
	$(BUILD)/bin/python -m pip install --quiet build twine
	@touch $@

demo: $(VENV)/.demo ## compare all methods on three small problems, into demo/
	$(BIN)/python -W ignore examples/demo.py demo

# The variable silences an announcement of mkdocs-material about other projects.
docs: $(VENV)/.docs ## build the documentation, site/index.html
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore $(BIN)/mkdocs build --quiet --strict

outputs: $(VENV)/.docs ## write what the code of README and site prints into the pages
	$(BIN)/python -W ignore docs/hooks/outputs.py README.md docs/*.md

results-demo: $(VENV)/.demo ## write the demo's tables and figures into the repository
	$(BIN)/python -W ignore examples/demo.py examples/paper/results/demo

gallery: $(VENV)/.demo ## draw the pictures of the gallery again
	for script in $(GALLERY); do $(BIN)/python -W ignore $$script || exit 1; done

test: lint test-new test-old ## lint and test, with the newest and the oldest laplace-torch

test-new: $(VENV)/.test
	$(BIN)/python -m pytest -n auto tests laplace_ella

test-old: $(OLD_LAPLACE)/.done
	PYTHONPATH=$(OLD_LAPLACE) $(BIN)/python -m pytest -n auto $(CORE_TESTS)

test-oldest: $(OLDEST)/.done ## test with the oldest Python, torch and numpy
	$(OLDEST)/bin/python -m pytest -n auto $(CORE_TESTS)

test-clients: $(CLIENTS)/.done ## test with other libraries: timm, transformers, BoTorch, ...
	$(CLIENTS)/bin/python -m pytest -n auto $(CLIENT_TESTS)

lint: $(VENV)/.test ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.test ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(BUILD)/.done ## make sdist and wheel in dist/, and try the wheel as a user would
	rm -rf build dist *.egg-info
	$(BUILD)/bin/python -m build
	$(BUILD)/bin/twine check --strict dist/*
	$(BUILD)/bin/python tests/check_distribution.py contents dist
	$(BIN)/python -m venv --clear $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet dist/*.whl
	$(WHEEL)/bin/python -m pip check
	$(WHEEL)/bin/laplace-ella --help > /dev/null
	$(WHEEL)/bin/python tests/check_distribution.py installed

clean: ## remove the environments, the built site and the built packages
	rm -rf $(VENV) $(OLD_LAPLACE) $(OLDEST) $(CLIENTS) $(BUILD) $(WHEEL) site build dist \
		demo
