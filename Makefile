# Every target sets up what it needs, in .venv; Python >= 3.10 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The oldest laplace-torch that is supported, put before the newest one.
OLD_LAPLACE := .venv-laplace-0.2
# What the package promises of every version of laplace-torch.
CORE_TESTS := $(addprefix tests/test_,complement.py core_dense.py errors.py \
	backends.py exactness.py family.py layouts.py registration.py sampling.py state.py tuning_core.py \
	untouched.py)

# What other people's libraries are needed for, in an environment of their own.
CLIENTS := .venv-clients
CLIENT_TESTS := $(addprefix tests/test_,architectures.py clients.py collators.py \
	mean_field.py pages.py)

.PHONY: help demo results-demo docs test test-new test-old test-clients lint format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

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
	$(CLIENTS)/bin/python -m pip install --quiet -e ".[test,clients,paper]"
	@touch $@

demo: $(VENV)/.demo ## compare ELLA with the rest of the family on embedded data
	$(BIN)/python -W ignore -m laplace_ella demo

# The variable silences an announcement of mkdocs-material about other projects.
docs: $(VENV)/.docs ## build the documentation, site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

results-demo: $(VENV)/.demo ## write the demo's tables and figures into the repository
	$(BIN)/python -W ignore -m laplace_ella demo --out examples/paper/results/demo
	$(BIN)/python examples/paper/update_results.py

test: lint test-new test-old ## lint and test, with the newest and the oldest laplace-torch

test-new: $(VENV)/.test
	$(BIN)/python -m pytest -n auto tests laplace_ella

test-old: $(OLD_LAPLACE)/.done
	PYTHONPATH=$(OLD_LAPLACE) $(BIN)/python -m pytest -n auto $(CORE_TESTS)

test-clients: $(CLIENTS)/.done ## test with libraries that call us: Lightning UQ Box, BoTorch, ...
	$(CLIENTS)/bin/python -m pytest -n auto $(CLIENT_TESTS)

lint: $(VENV)/.test ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.test ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environments and the built site
	rm -rf $(VENV) $(OLD_LAPLACE) $(CLIENTS) site
