# Everything a developer types. `make serve` on a fresh clone builds .venv, fetches the model and starts the server.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first Python of a version we test. torch's wheels are found for 3.11 first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
STAMP := .venv/.installed
TRITON := .venv/.triton
KERNELS := .venv/.kernels
ARGS ?=

.PHONY: help serve fetch test check lint format soak bench bench-scheduler bench-peers gpu-compile gpu-dry fuzz mutation depth-0 screenshots system-deps clean

help:
	@echo "make serve         start tritonserver with SmolLM2 (ARGS='--model FOLDER --dtype bf16' for another)"
	@echo "make check         format, lint, types, import rules, unit tests"
	@echo "make test          all of it: also property, numeric, contract, case, simulation and end-to-end tests"
	@echo "make format        write the format and the safe lint fixes"
	@echo "make fuzz          property tests with many more examples and 10,000 random cancels, over an hour (ARGS='-k cancels' for a part)"
	@echo "make mutation      reverts each rule of scheduler and running engine and shows that its test fails (ARGS='rule-9')"
	@echo "make depth-0       all tests with \`overlap\` off where they do not choose it themselves (ARGS='tests/sim')"
	@echo "make soak          minutes of load on the real model"
	@echo "make bench         benchmarks (ARGS='...')"
	@echo "make bench-scheduler   the scheduler alone: cost, growth, orders, retraction (ARGS='--quick')"
	@echo "make bench-peers   ours beside other engines (ARGS='--engines llm,openvino --cases 128/128@1,4')"
	@echo "make system-deps   what the operating system must have (Debian, Ubuntu; as root); BROWSER=no: to serve, not to test"
	@echo "make gpu-compile   every launch of the GPU kernels to machine code of A100, H100 and B200, without a GPU: some minutes"
	@echo "make gpu-dry       the proof for a GPU (tests/gpu/README.md) as far as it goes without one"
	@echo "make screenshots   the pictures of the gateway's page in docs/images/"
	@echo "make clean         remove .venv and everything built"

# Installed with pip, whose exact versions are in constraints.txt. Editing either file installs again.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: run 'make system-deps' or set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "can not make .venv: run 'make system-deps'"; exit 1; }
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e '.[server,load,dev]'
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check --no-deps -c constraints.txt xgrammar apache-tvm-ffi
	@echo "compiling on all cores, which pip would do on one"
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # some packages ship files that are no Python
	@touch $@

# The language of the GPU kernels, whose tests run in its interpreter: 290 MB, 1 GB unpacked, 4 to 20 seconds, and of
# no use to who serves on a CPU. A torch for CUDA has brought the version that it needs.
$(TRITON): $(STAMP)
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/python -m pip install --no-compile --disable-pip-version-check --no-deps triton==3.9.0
	@touch $@

# The kernels for this processor, in the cache folder: half a minute on two cores, and again after an edit of them.
# Without a compiler, or on a processor that they do not know, a line says so and torch's are used (docs/kernels.md).
$(KERNELS): $(STAMP) $(wildcard minisgl_backend/kernels/native/*.py minisgl_backend/kernels/native/src/*)
	@$(BIN)/python -m minisgl_backend.kernels.native.build \
		"$$($(BIN)/python -c 'from minisgl_backend.models.locate import cache_folder; print(cache_folder())')"
	@touch $@

serve: $(KERNELS)
	exec $(BIN)/minisgl serve $(ARGS)

fetch: $(STAMP)
	$(BIN)/minisgl fetch smollm2 && $(BIN)/minisgl fetch smollm2-gguf

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint $(KERNELS)
	$(BIN)/pytest tests/unit -n 2 --dist loadfile -m "not slow and not gpu and not e2e" $(ARGS)

# One run of pytest holds the unit tests and all others, so its closing line counts everything. Two files at a time:
# tests of servers wait most of their time. `ARGS='-n 0'` runs one after the other.
test: lint fetch $(TRITON) $(KERNELS)
	$(BIN)/pytest -n 2 --dist loadfile -m "not gpu and not soak" $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(STAMP)
	HYPOTHESIS_PROFILE=fuzz MINISGL_FUZZ_OBJECTS=$${MINISGL_FUZZ_OBJECTS:-1000000} MINISGL_FUZZ_STREAMS=$${MINISGL_FUZZ_STREAMS:-10000} \
		MINISGL_CANCELS=$${MINISGL_CANCELS:-10000} $(BIN)/pytest tests/property tests/sim/test_cancels.py tests/sim/test_overlap.py $(ARGS)

mutation: $(KERNELS)
	$(BIN)/python -m tests.mutation $(ARGS)

depth-0: $(KERNELS) fetch
	$(BIN)/python -m tests.mutation.depth_0 -m "not gpu and not soak" $(ARGS)

soak: $(KERNELS) fetch
	$(BIN)/pytest tests/soak -s $(ARGS)

bench: $(KERNELS) fetch
	$(BIN)/python -m load.bench.path $(ARGS)

bench-scheduler: $(STAMP)
	$(BIN)/python -m load.bench.scheduler $(ARGS)

# The peers are installed apart: python -m load.peers.install_openvino, and so on (docs/performance.md).
bench-peers: $(KERNELS) fetch
	$(BIN)/python -m load.bench.peers $(ARGS)

# Without a GPU: every kernel launch of the models' shapes through the compiler, and the proof (tests/gpu) run dry.
gpu-compile: $(TRITON)
	$(BIN)/python -m tests.gpu.compilation --all $(ARGS)

gpu-dry: $(TRITON)
	PYTHON=$(BIN)/python tests/gpu/run.sh build/gpu-dry $(ARGS)

screenshots: $(STAMP) fetch
	$(BIN)/python scripts/screenshots.py $(ARGS)

system-deps:
	@scripts/system-deps "$(PYTHON)" $(if $(filter no,$(BROWSER)),no-browser)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
