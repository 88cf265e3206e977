# Needs python 3.11 or newer and make; everything else is installed into .venv and the user's cache folder.
SHELL := /bin/bash
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.complete
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rollout-service
ACCEPTANCE ?= ../shared/acceptance
PIP := $(PY) -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.PHONY: help env engine demo demo-trl demo-tools demo-distill test acceptance compose-test soak soak-replicas mutants check format bench bench-scaling bench-staleness lock clean clean-all

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | while IFS='|' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

env: $(READY)  ## the service's environment, .venv, from the lock

$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("rollout-service needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "making .venv (some minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements/dev.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

engine: $(READY)  ## the environment of the real vLLM CPU server, in the user's cache folder (3.5 GB)
	@$(PY) -m examples.engine.environment

demo: $(READY)  ## engine, service and trainer with a live table (ENGINE=sim: without vLLM; KEEP=1: leave it running)
	@$(PY) -m examples.cpu_grpo.demo

demo-trl: $(READY)  ## the same with TRL's own AsyncGRPOTrainer (ENGINE=sim, KEEP=1 as above)
	@$(PY) -m examples.trl_async_grpo.demo

demo-tools: $(READY)  ## an agent that learns to call its calculator
	@$(PY) -m examples.cpu_tools.demo

demo-distill: $(READY)  ## on-policy distillation from a teacher's logprobs
	@$(PY) -m examples.cpu_distill.demo

test: $(READY)  ## all tests, those on a real vLLM server included
	@$(PY) -m examples.engine.environment; code=$$?; \
	if [ $$code -eq 0 ]; then export REQUIRE_VLLM=1; elif [ $$code -ne 3 ]; then exit $$code; fi; \
	$(PY) -m tests.shards --durations 40
	@$(MAKE) --no-print-directory acceptance

# From an empty folder and without this project's pytest settings: the kit brings its own and its folder is read-only.
acceptance: $(READY)  ## the contract's black-box tests, where they stand beside this folder
	@if [ -d "$(ACCEPTANCE)" ]; then \
	  folder=$$(mktemp -d) && cd "$$folder" && trap 'rm -rf "$$folder"' EXIT && \
	  ROLLOUT_SERVICE="$(CURDIR)/.venv/bin/rollout-service" PYTHONDONTWRITEBYTECODE=1 \
	  "$(CURDIR)/$(PY)" -m pytest -q --timeout 120 -p no:cacheprovider -c /dev/null -o asyncio_default_fixture_loop_scope=function --rootdir "$$folder" "$(abspath $(ACCEPTANCE))"; \
	else echo "no acceptance kit at $(ACCEPTANCE)"; fi

check: $(READY)  ## lint, format, types, import rules, bandit, known faults of what we depend on
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy rollout_service trainer_client examples $(wildcard benchmarks)
	@.venv/bin/lint-imports
	@.venv/bin/bandit -q -c pyproject.toml -r rollout_service trainer_client
	@$(PY) -m tests.audit

format: $(READY)  ## mend what the linter and the formatter can mend
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: $(READY)  ## every figure beside the others as one table, and bench.json; half an hour (ROUNDS=5, ONLY=throughput,memory, QUICK=1)
	@$(PY) -m benchmarks --rounds $(or $(ROUNDS),$(if $(QUICK),1,5)) $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

bench-scaling: $(READY)  ## how cost grows with rollouts in flight, group size, length and outstanding groups (45 minutes; ROUNDS=)
	@$(PY) -m benchmarks.scaling --rounds $(or $(ROUNDS),3)

bench-staleness: $(READY)  ## what staleness costs, simulated: the table and the picture of docs/staleness.md
	@$(PY) -m benchmarks.staleness

compose-test: $(READY)  ## docker compose on the Docker engine the environment names: up with a real vLLM, submit, lease, ack, scrape, down (PROFILE=replicas)
	@$(PY) -m tests.compose.run $(if $(PROFILE),--profile $(PROFILE))

soak: $(READY)  ## the long proofs: 300 kills, two runs of 1,000 prompts, a million groups (KILLS=, PROMPTS=, GROUPS=), tests marked long
	@$(PY) -m pytest -m long
	@$(PY) -m tests.durability.soak --kills $(or $(KILLS),300) --prompts $(or $(PROMPTS),1000)
	@$(PY) -m benchmarks.soak_groups --groups $(or $(GROUPS),1000000)

soak-replicas: $(READY)  ## replicas killed at random, 300 times, and one every 5 s for two minutes (KILLS=); 250 simulated runs of replicas
	@REPLICA_FIRST_SEED=24 REPLICA_SEEDS=250 $(PY) -m pytest -q tests/simulation/test_replica_simulation.py
	@$(PY) -m pytest -m long tests/replicas_chaos; code=$$?; [ $$code -eq 0 ] || [ $$code -eq 5 ]
	@$(PY) -m tests.replicas_chaos.soak --kills $(or $(KILLS),300)

mutants: $(READY)  ## take each safeguard away in a copy and see its test fail
	@$(PY) -m mutants.run

lock: $(READY)  ## resolve both locks anew
	@CUSTOM_COMPILE_COMMAND="make lock" .venv/bin/pip-compile -q --upgrade --extra dev --allow-unsafe --strip-extras --annotation-style line \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o requirements/dev.txt pyproject.toml
	@sed -i.bak -E 's/^torch==([0-9.]+)\+cpu/torch==\1/' requirements/dev.txt && rm requirements/dev.txt.bak  # any build will do
	@$(PY) -m examples.engine.environment --lock

clean:  ## remove .venv and what tools left in this folder
	rm -rf .venv build dist bench.json .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean  ## the engine's environments in the user's cache folder too
	rm -rf "$(CACHE)"/engine-* "$(CACHE)"/calculator-*
