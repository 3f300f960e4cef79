# `make train` and `make test` set up all they need. Everything lives in .venv, data/ and runs/.
PYTHON ?= python3
# On a machine without an NVIDIA GPU this avoids gigabytes of CUDA libraries:
#   make train TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

BIN := .venv/bin
RUNTIME := .venv/.runtime-installed
DEV := .venv/.dev-installed
FINETUNE := .venv/.finetune-installed
SITE := .venv/site
FAKE_TORCH ?= 2.14.1
FAKE := .venv/fake-cuda-$(FAKE_TORCH)
FAKE_TABLE := benchmarks/results/fake-cuda-$(FAKE_TORCH).md

.PHONY: help train finetune test pytest setup lint bench gpu gpu-wheelhouse soak fakecuda layouts others gluster transformers4 slurm manifests attack buckets oracles seeing grafana image docs site clean

help:            ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

train: $(RUNTIME)  ## train a small language model on Wikipedia text, about 2 minutes on 2 cores
	$(BIN)/perdure data prepare wikipedia --out data/wikipedia --train-bpe 4096
	@echo "To follow it, in another terminal: cd $(CURDIR) && $(BIN)/perdure watch runs/quickstart --port 8080"
	$(BIN)/perdure train recipes/quickstart.yaml
	@echo
	@echo "A continuation from the newest checkpoint:"
	@$(BIN)/perdure generate runs/quickstart --prompt "The river" --max-new-tokens 60
	@echo
	@echo "Next:"
	@echo "  $(BIN)/perdure watch runs/quickstart --port 8080                  the run as a page: prints its link"
	@echo "  $(BIN)/perdure watch runs/quickstart                              the same in this terminal"
	@echo "  $(BIN)/perdure ckpt show runs/quickstart                          what the checkpoint holds"
	@echo "  $(BIN)/perdure train recipes/quickstart.yaml run.steps=600        train on from it"
	@echo "  $(BIN)/perdure train recipes/quickstart.yaml run.dir=runs/ddp strategy.name=ddp"

finetune: $(FINETUNE)  ## a chat model of 135 M learns from real chats, with a rank killed on the way, on 2 cores
	$(BIN)/python examples/smollm2.py
	$(BIN)/perdure data prepare data/smalltalk.jsonl --chat --tokenizer models/smollm2 --validation-fraction 0.1 --out data/smalltalk
	$(BIN)/perdure data inspect data/smalltalk --sample 1
	$(BIN)/python -m examples.killed_rank 7 recipes/smollm2_sft.yaml
	$(BIN)/perdure report runs/smollm2_sft --check
	rm -rf out/smollm2_sft
	$(BIN)/perdure ckpt export runs/smollm2_sft out/smollm2_sft --merge --step best
	@echo
	@$(BIN)/python examples/smollm2.py "What is a computer?" models/smollm2 out/smollm2_sft

test: $(DEV)     ## lint, types and import contracts, beside the tests
	$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: $(DEV)
	$(BIN)/python -m pytest -n 4 --dist worksteal

setup: $(DEV)    ## make .venv with everything that the other targets need

lint: $(DEV)     ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV)    ## every benchmark, against its peer
	for name in $(basename $(notdir $(wildcard benchmarks/*.py))); do $(BIN)/python -m benchmarks.$$name || exit 1; done

gpu:             ## measure the GPU of this machine for 520 s; again: on from there (docs/gpu.md)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu

gpu-wheelhouse:  ## packages for `make gpu` on a machine without a registry, in .gpu/wheels
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --wheelhouse 3.12

soak: $(DEV) $(FINETUNE)  ## long randomised tests: kills, resumes, 200 seeded faults: about an hour
	SOAK=1 $(BIN)/python -m pytest

layouts: $(DEV)  ## every layout of model parallelism beside one process: a table of differences
	SOAK=1 $(BIN)/python -m pytest -k same_curve_as_one_process tests/distributed/test_*_parallel.py

others: $(DEV)   ## Hugging Face's Trainer, Lightning's and a loop of accelerate through twenty kills each, a lost node and a join
	SOAK=1 $(BIN)/python -m pytest -s tests/distributed/test_others.py

gluster: $(DEV)  ## save to a GlusterFS of its own (root, glusterfs-server), with proof and picture
	tests/opt_in/gluster.sh --svg docs/images/writers.svg

transformers4: $(DEV)  ## the Hugging Face tests once more, under transformers 4.57
	$(BIN)/pip install -q --target .venv/transformers4 transformers==4.57.6
	PYTHONPATH=.venv/transformers4 $(BIN)/python -m pytest tests/distributed/test_hugging_face.py tests/trainer/models

fakecuda: $(FAKE)/.installed  ## train on a fake CUDA runtime, with torch's CUDA build in a venv of its own (5 GB, g++); FAKE_TORCH=2.11.0: an older one
	SOAK=1 VENV=$(FAKE) FAKE_CUDA_TABLE=$(FAKE_TABLE) tests/fake_cuda/run.sh python -m pytest -n 2 --dist worksteal tests/fake_cuda tests/gpu tests/distributed/test_hidden_costs.py

slurm: $(DEV)    ## train under a Slurm of its own (root, slurm-wlm, munge), through requeues and lost nodes
	tests/opt_in/slurm.sh

manifests: $(DEV) ## hold what `perdure launch skypilot` writes against SkyPilot's schema (0.6 GB)
	test -x .venv/manifests/bin/python || $(PYTHON) -m venv .venv/manifests
	.venv/manifests/bin/pip install -q skypilot==0.14.1
	.venv/manifests/bin/python -m tests.opt_in.manifests $(BIN)/perdure

attack: $(DEV)   ## another user and another machine try to get into real runs (root)
	tests/opt_in/attack.sh

buckets: $(DEV)  ## train in gs:// and az://, against Azurite and Google's storage-testbench (root, npm, git)
	tests/opt_in/buckets.sh

oracles: $(DEV) $(FINETUNE)  ## hold fine-tuning against trl, bitsandbytes and tokenizers of published models (npm, 0.8 GB)
	tests/opt_in/oracles.sh

seeing:          ## pictures of the page of a run that was killed, and a live page that follows it (chromium, chromium-driver)
	tests/opt_in/seeing.sh

grafana: $(DEV)  ## ask every query of docs/grafana.json of a Prometheus (prometheus, prometheus-node-exporter)
	$(BIN)/pip install -q --no-deps --target .venv/grafana 'grafana-foundation-sdk==1769699998!10.1.0'
	PYTHONPATH=.venv/grafana $(BIN)/python -m tests.opt_in.grafana

image:           ## build the Dockerfile on Ubuntu instead of NVIDIA's image, and train in it (root, buildah, debootstrap)
	tests/opt_in/image.sh

docs: $(DEV)     ## regenerate what is made from the code
	$(BIN)/perdure recipe reference > docs/recipe.md
	$(BIN)/perdure recipe schema > recipes/schema.json
	$(BIN)/python docs/rooms.py
	$(BIN)/python docs/schedules.py
	$(BIN)/python docs/included.py
	$(BIN)/python docs/api.py
	$(BIN)/python docs/glossary.py
	$(BIN)/python docs/versions.py

site: $(SITE)/.installed  ## build the docs as a site, in site/; a link or an anchor that is not there is an error
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build
	@echo "site/index.html"

clean:           ## remove .venv, data/, runs/ and site/
	rm -rf .venv data runs site

$(RUNTIME): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and "Perdure needs Python 3.11 to 3.14; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	@touch $@

$(FINETUNE): $(RUNTIME) Makefile
	$(BIN)/python -m pip install --quiet 'transformers>=5,<6' 'gguf>=0.17' accelerate
	@touch $@

$(SITE)/.installed: Makefile
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet mkdocs-material==9.8.1
	@touch $@

$(FAKE)/.installed: pyproject.toml
	test -x $(FAKE)/bin/python || $(PYTHON) -m venv $(FAKE)
	$(FAKE)/bin/python -m pip install --quiet torch==$(FAKE_TORCH) 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
	$(FAKE)/bin/python -m pip install --quiet --editable '.[all,fp8,transformers]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

$(DEV): $(RUNTIME)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
