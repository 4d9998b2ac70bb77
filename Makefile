# The only list of commands. Everything runs in .venv, which any target makes when it is missing or out of date.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO := checkpoints/demo
MODEL ?= checkpoints/distilbert_agnews
BUILD_FLAGS ?=
# Where `make lock` finds PyTorch's build for CPUs.
TORCH_CPU ?= --torch-backend cpu
LOCK := $(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --generate-hashes --only-binary :all: \
	--no-emit-index-url --custom-compile-command "make lock"

.PHONY: help install demo demo-elastic test test-all lint format docs bench bench-serving image image-torch lock sbom clean

help:             ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(INSTALLED) ## Make .venv and install everything that training, serving and the tests need

# torch comes first and alone: asked for together with the rest, pip may bring a build of several gigabytes.
$(INSTALLED): requirements.txt pyproject.toml inference/engines/native/kernels.c
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(PIP_FLAGS) "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)"
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[dev]"
	touch $@

demo: $(INSTALLED) ## Train with two processes on the built-in sample, evaluate, export to int8, serve, ask three headlines
	PYTHON=$(BIN)/python training/run_ddp.sh 2 --dataset sample --model tiny --epochs 8 --batch_size 16 \
		--device cpu --output_dir $(DEMO) --resume none
	$(BIN)/python -m training.evaluate $(DEMO)
	$(BIN)/python -m inference.export $(DEMO)
	$(BIN)/python deployment/demo.py $(DEMO)

demo-elastic: $(INSTALLED) ## Kill a rank of a run, lose a machine, let another one join, and compare the end with a run left alone
	$(BIN)/python deployment/demo_elastic.py

test: $(INSTALLED) ## Run the tests (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(INSTALLED) ## Run the tests with the slower matrix
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[dev,docs,ray,deepspeed,wandb,mlflow,trackio]"
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(INSTALLED) ## Check style and types of mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## Put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## Build the documentation as a site, in site/
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

bench: $(INSTALLED) ## Measure training throughput against the usual recipes and write benchmarks/*.md
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[bench]"
	$(BIN)/python -m benchmarks.training_throughput

bench-serving: $(INSTALLED) ## Measure the server of MODEL=folder beside others and write benchmarks/serving.md
	$(BIN)/python -m benchmarks.serving_load --model $(MODEL)

image: $(INSTALLED) ## Build the image that serves MODEL=folder, with docker, podman or buildah (BUILD_FLAGS are theirs)
	$(BIN)/python deployment/build_image.py --model $(MODEL) -- $(BUILD_FLAGS)

image-torch: $(INSTALLED) ## Build the image for training jobs and for serving on GPUs
	$(BIN)/python deployment/build_image.py --torch cuda -- $(BUILD_FLAGS)

# The tokenizer's library needs the hub's client only to download. The locks for PyTorch are for Linux on x86-64.
lock: $(INSTALLED) ## Pin what the images install, with hashes, in deployment/requirements*.txt
	echo huggingface-hub | $(LOCK) deployment/requirements.in --constraints requirements.txt --universal \
		--excludes /dev/stdin --output-file deployment/requirements.txt
	$(LOCK) requirements.txt --constraints deployment/requirements.txt --python-platform x86_64-manylinux_2_28 \
		$(TORCH_CPU) --no-emit-package torch --output-file deployment/requirements-torch.txt
	grep ^torch== requirements.txt | $(LOCK) - --constraints deployment/requirements-torch.txt \
		--python-platform x86_64-manylinux_2_28 --output-file deployment/requirements-torch-cuda.txt
	grep ^torch== requirements.txt | $(LOCK) - --constraints deployment/requirements-torch.txt \
		--python-platform x86_64-manylinux_2_28 $(TORCH_CPU) --output-file deployment/requirements-torch-cpu.txt

sbom: $(INSTALLED) ## Write into build/sbom what the images hold, and what is known against it
	$(BIN)/python deployment/write_sbom.py

clean:            ## Remove .venv and what tools leave; checkpoints stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
