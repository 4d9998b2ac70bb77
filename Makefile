# The only list of commands. Everything runs in .venv, which any target makes when it is missing or out of date.
PYTHON ?= python3
# Set it to cpu on a Linux machine without a GPU: PyTorch is then 200 MB to download instead of 3 GB.
TORCH_BACKEND ?=
# What make test-all runs, if not all tests.
TESTS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
DEMO := checkpoints/demo
MODEL ?= checkpoints/distilbert_agnews
# Rows for the benchmarks of gpu-check: a folder with AG News' train.csv and test.csv.
GPU_DATA ?= common/sample_news
GPU_TESTS := tests/training/test_gpu_runs.py tests/training/parallelism/test_gpu_strategies.py tests/inference/test_gpu_serving.py
BUILD_FLAGS ?=
# Where the inputs of `make measure` lie, as in its --help.
MEASURE_FLAGS ?=
# Where `make lock` and `make test-locked` find PyTorch's build for CPUs.
TORCH_CPU ?= --torch-backend cpu
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)
LOCK := $(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --generate-hashes --only-binary :all: \
	--no-emit-index-url --custom-compile-command "make lock"
FOR_X86 := --python-platform x86_64-manylinux_2_28
# What an image may have besides, by the name of the extra in pyproject.toml.
EXTRAS := otel s3 postgres ray
# Prints what an extra of pyproject.toml asks for.
extra = $(BIN)/python -c "import sys, tomllib; \
	print(*tomllib.load(sys.stdin.buffer)['project']['optional-dependencies']['$(1)'], sep='\n')" <pyproject.toml
# uv installs several times faster than pip, but does not read pip.conf: if it finds no packages, pip may.
comma := ,
define install
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --editable "$(1)" || \
		{ echo "uv could not install this (see above); trying pip, which takes longer ..."; \
		$(BIN)/pip install --quiet --editable "$(1)"; }
endef

.PHONY: help demo-begin install install-dev install-locked demo serve demo-elastic loop-demo test test-all test-locked gpu-check lint format docs bench measure bench-serving image image-torch lock base sbom clean

# The digit after ## is the group that a target is listed in.
help: ##1 Show this list
	@list() { echo "$$1"; sed -n "s/^\([a-z-]*\):.*##$$2 /  \1\t/p" $(MAKEFILE_LIST) | expand -t 18; }; \
	list Start: 1; echo; list Work: 2; echo; list Release: 3

install: $(INSTALLED) ##1 Make .venv and install what training and serving need
	@echo "Installed. Next: source .venv/bin/activate"

install-dev: $(INSTALLED_DEV) ##2 The same as install, and what the tests need

# PyTorch comes first and by itself: asked for together with the rest, an installer may take a build of several gigabytes.
# pip installs it, since pip.conf may name a mirror or a folder of wheels.
$(INSTALLED): requirements.txt pyproject.toml $(wildcard inference/engines/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1 || true): Python 3.11 or newer is needed; name one, as make PYTHON=python3.12" >&2; exit 2; }
	@[ -x $(BIN)/python ] || { echo "Install 1/3: a Python environment in .venv"; $(PYTHON) -m venv .venv; }
	@$(BIN)/pip install --quiet --disable-pip-version-check "uv>=0.10"
	@echo "Install 2/3: $(TORCH)"
	@if [ -n "$(TORCH_BACKEND)" ]; then $(BIN)/uv pip install --python $(BIN)/python --torch-backend "$(TORCH_BACKEND)" "$(TORCH)"; \
	else $(BIN)/pip install --disable-pip-version-check --progress-bar on "$(TORCH)"; fi
	@echo "Install 3/3: transformers, FastAPI, ONNX Runtime and about 80 more; compiles the int8 kernels"
	$(call install,.)
	@$(BIN)/python -c 'from inference.engines import native; print("Serving: " + native.is_supported()[1])'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	@echo "Install: what only the tests need, about 120 packages"
	$(call install,.[dev])
	@touch $@

# Each file is checked before any of its code runs. On Linux on x86-64, as the locks of PyTorch.
install-locked: ##3 Install what the locks name into a new .venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement deployment/requirements-uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps $(TORCH_CPU) \
		--requirement deployment/requirements-torch-cpu.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps --requirement deployment/requirements-torch.txt
	$(BIN)/python deployment/compile_kernels.py

demo-begin:
	@echo "Installs into .venv if need be, then trains, evaluates, exports and serves a small news classifier on this machine's CPU."
	@echo "About 2 minutes on 2 cores with nothing installed yet and a fast network; 1.6 GB of disk. make clean removes .venv."

demo: demo-begin $(INSTALLED) ##1 Train on the built-in sample, evaluate, export, serve, ask
	@echo "Demo 1/4: train with two processes"
	PYTHON=$(BIN)/python training/run_ddp.sh 2 --dataset sample --model starter --epochs 3 --batch_size 16 \
		--device cpu --output_dir $(DEMO) --resume none
	@echo "Demo 2/4: evaluate on the test rows"
	$(BIN)/python -m training.evaluate $(DEMO)
	@echo "Demo 3/4: export to int8"
	$(BIN)/python -m inference.export $(DEMO)
	@echo "Demo 4/4: serve, and ask three headlines"
	$(BIN)/python deployment/demo.py $(DEMO)

serve: $(INSTALLED) ##1 Serve the included news classifier on port 7860, until Ctrl-C
	@echo "Once it is ready, try it at http://localhost:7860/demo; Ctrl-C stops it"
	$(BIN)/python -m inference.serve --port 7860

demo-elastic: $(INSTALLED) ##1 Kill a rank, lose a machine, add one: the run goes on
	$(BIN)/python deployment/demo_elastic.py

loop-demo: $(INSTALLED) ##1 See a model grow old, be reviewed, retrained and replaced
	$(BIN)/python deployment/demo_loop.py

# Four tests at a time on two cores: with three, the cores were busy for 63% of the time, since many tests wait for
# processes. A worker that is done takes tests from the others.
test: $(INSTALLED_DEV) ##2 Run the tests (about 15 minutes on 2 cores)
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow and not gpu" --durations=20 --durations-min=8

test-all: $(INSTALLED_DEV) ##2 Run the tests with the slower matrix
	$(call install,.[dev$(comma)docs$(comma)ray$(comma)deepspeed$(comma)wandb$(comma)mlflow$(comma)trackio])
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

LOCKED := $(BIN)/uv pip install --quiet --python build/locked/bin/python
test-locked: $(INSTALLED) ##3 Test serving with the versions that the images install
	mkdir -p build/lock
	$(PYTHON) -m venv --without-pip --clear build/locked
	$(LOCKED) --require-hashes --no-deps $(TORCH_CPU) --requirement deployment/requirements-torch-cpu.txt
	for part in torch $(EXTRAS:%=with-%); do \
		$(LOCKED) --require-hashes --no-deps --requirement deployment/requirements-$$part.txt || exit 2; done
	sed 's/ .*//; /==/!d' deployment/requirements-torch.txt deployment/requirements-with-*.txt >build/lock/versions.txt
	$(call extra,dev) >build/lock/dev.in
	$(LOCKED) --constraints build/lock/versions.txt --requirement build/lock/dev.in
	build/locked/bin/python deployment/compile_kernels.py
	PYTHONPATH=$(CURDIR) build/locked/bin/python -m pytest -n 3 --dist worksteal -m "not slow and not gpu" tests/inference tests/deployment

# PyTorch is asked for GPUs without a CUDA context, which a process that forks must not have.
gpu-check: $(INSTALLED_DEV) ##2 Run what needs a GPU, and measure on it (10 minutes)
	PYTORCH_NVML_BASED_CUDA_CHECK=1 $(BIN)/python -m pytest -rs -m gpu $(GPU_TESTS)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -m benchmarks.one_or_two_processes --device gpu --data $(GPU_DATA) && \
		CUDA_VISIBLE_DEVICES=0 $(BIN)/python -m benchmarks.training_throughput --device gpu --dataset $(GPU_DATA); \
	else echo "Left out: the GPU tables of benchmarks/one_or_two_processes.md and benchmarks/training_throughput.md," \
		"since this machine has no CUDA GPU."; fi

lint: $(INSTALLED_DEV) ##2 Check style and types of mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_DEV) ##2 Put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ##2 Build the documentation as a site, in site/
	$(call install,.[docs])
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

bench: $(INSTALLED) ##2 Measure training against the usual recipes
	$(call install,.[bench])
	$(BIN)/python -m benchmarks.training_throughput

measure: $(INSTALLED) ##2 Measure again, in one night, what needs no hours of training
	$(call install,.[bench])
	$(BIN)/python -m benchmarks.measure $(MEASURE_FLAGS)

bench-serving: $(INSTALLED) ##2 Measure the server of MODEL=folder beside others
	$(BIN)/python -m benchmarks.serving_load --model $(MODEL)

image: $(INSTALLED) ##3 Build the image that serves MODEL=folder (see BUILD_FLAGS)
	$(BIN)/python deployment/build_image.py --model $(MODEL) -- $(BUILD_FLAGS)

image-torch: $(INSTALLED) ##3 Build the image for training and for serving on GPUs
	$(BIN)/python deployment/build_image.py --torch cuda -- $(BUILD_FLAGS)

# First all packages are resolved together, so that the locks agree: an image may be built from several of them. The
# tokenizer's library needs the hub's client only to download. The locks for PyTorch are for Linux on x86-64.
lock: $(INSTALLED) ##3 Pin what the images install, with hashes
	mkdir -p build/lock
	for extra in $(EXTRAS); do $(call extra,$$extra) >build/lock/$$extra.in || exit 2; done
	$(LOCK) requirements.txt $(EXTRAS:%=build/lock/%.in) $(FOR_X86) $(TORCH_CPU) --no-emit-package torch \
		--output-file build/lock/all.txt
	echo huggingface-hub | $(LOCK) deployment/requirements.in --constraints build/lock/all.txt --universal \
		--excludes /dev/stdin --output-file deployment/requirements.txt
	$(LOCK) requirements.txt --constraints build/lock/all.txt $(FOR_X86) $(TORCH_CPU) --no-emit-package torch \
		--output-file deployment/requirements-torch.txt
	grep ^torch== requirements.txt >build/lock/torch.in
	$(LOCK) build/lock/torch.in --constraints build/lock/all.txt $(FOR_X86) --output-file deployment/requirements-torch-cuda.txt
	$(LOCK) build/lock/torch.in --constraints build/lock/all.txt $(FOR_X86) $(TORCH_CPU) \
		--output-file deployment/requirements-torch-cpu.txt
	echo "uv>=0.10" | $(LOCK) - --universal --output-file deployment/requirements-uv.txt
	set -e; for extra in $(EXTRAS); do $(LOCK) build/lock/$$extra.in --constraints build/lock/all.txt --universal \
		--output-file deployment/requirements-with-$$extra.txt; done

base: $(INSTALLED) ##3 Pin the base images to what their tags name now
	$(BIN)/python deployment/pin_base_images.py

sbom: $(INSTALLED_DEV) ##3 List what the locks or IMAGE=name hold, and its known flaws
	$(BIN)/python deployment/write_sbom.py $(if $(IMAGE),--image $(IMAGE))

clean:            ##2 Remove .venv and what tools leave; checkpoints stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
