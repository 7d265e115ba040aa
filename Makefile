# `make` or `make help` lists the targets: each says beside its name what it does.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out/demo
# Modules are compiled when they are first imported, and kept: most of what is installed never is. Where the environment
# forbids to keep them every process compiles torch anew, which takes twice as long as to import it.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# One thread a process: ranks and test workers share the machine's cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo kernels targets test quick nightly lint validate bench gpu-check mutants wheel sbom images release site pages coverage clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/plan.installed: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/train.installed: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/test.installed: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[train,recipes,web,test,site$(ALSO)]'
	@touch $@

targets: $(VENV)/targets.installed ## install Megatron-LM's and torchtitan's parsers, which then read our exports in the tests

# Beside the environment and without what they ask for: no import of them is ever ours, their parsers read our exports.
# Megatron-LM's wheels say Python 3.12 for one word of `typing`, which its reader brings.
$(VENV)/targets.installed: $(BIN)/python tests/target_programs.txt
	rm -rf $(VENV)/targets
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target $(VENV)/targets \
	  --requirement tests/target_programs.txt
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target $(VENV)/targets \
	  --ignore-requires-python --python-version 3.12 --only-binary :all: megatron-core==0.19.2
	@touch $@

$(VENV)/site.installed: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[site]'
	@touch $@

$(VENV)/sweeps.installed: $(VENV)/test.installed
	$(PIP) --editable '.[sweeps]'
	@touch $@

demo: $(VENV)/train.installed ## install polygon and run its main job: cluster -> groups -> plan -> a short real training
	@mkdir -p $(OUT)
	@echo '== 1/4  group the seven data centers into stages (ant colony)'
	$(BIN)/python -m polygon.init instances/ptafm-7dc.yaml --model gpt3-1.3b --global-batch 1024 --seq-len 2048 \
	  -o $(OUT)/groups.json
	@echo '== 2/4  search the plan'
	$(BIN)/python -m polygon.search $(OUT)/groups.json -o $(OUT)/plan.json
	@echo '== 3/4  predicted timeline'
	$(BIN)/python -m polygon.evaluate $(OUT)/plan.json --trace $(OUT)/predicted.json --json > $(OUT)/estimate.json
	@echo '== 4/4  rehearse the plan: at most 8 local ranks train a small model on English text'
	$(BIN)/python -m runners.launch $(OUT)/plan.json --rehearse --max-ranks 8 --steps 60 --log-dir $(OUT)/run
	@echo 'Predicted timeline: $(OUT)/predicted.json   measured: $(OUT)/run/trace.json   (open in ui.perfetto.dev)'

# Once, where every worker of the tests would do it otherwise.
kernels: $(VENV)/plan.installed ## compile the planner's kernels
	$(BIN)/python -m polygon kernels

test: $(VENV)/test.installed kernels ## install polygon and run all tests
	$(BIN)/python -m pytest -n 4 --dist worksteal

quick: $(VENV)/test.installed kernels ## tests that take little time, before a commit
	$(BIN)/python -m pytest -n 4 --dist worksteal --quick

nightly: $(VENV)/test.installed kernels pages ## all tests with ten times as many cases, and with what is tried at night alone (hours)
	$(BIN)/python -m pytest -n 4 --dist worksteal --hypothesis-profile=nightly

lint: $(VENV)/test.installed ## ruff, import-linter and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy polygon solvers runners comm/polygon_comm benchmarks

validate: $(VENV)/test.installed ## hold the predictions against published runs; rewrites the table in README.md
	@mkdir -p out
	$(BIN)/python -m polygon.validate instances/measured/published_runs.json instances/measured/sailor_validation.json \
	  --profiles instances/measured/sailor_profiles.json --network instances/measured/sailor_network.json \
	  --plot out/validation.png --update README.md

bench: $(VENV)/test.installed ## time the schedule kernel and compare the models of a step
	$(BIN)/python benchmarks/schedule_kernel.py
	$(BIN)/python benchmarks/one_model.py

gpu-check: $(VENV)/test.installed ## measure all that needs a GPU on this machine's, into out/gpu-check.json
	$(BIN)/python -m benchmarks.gpu_check -o out/gpu-check.json

mutants: $(VENV)/test.installed ## put small faults into the code and list those that no test notices (hours)
	$(BIN)/python benchmarks/mutants.py --jobs 2

site: $(VENV)/site.installed ## build the documentation into out/site, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pages: $(VENV)/sweeps.installed ## do what README, tutorial and how-tos say, in empty folders, and run the other pages' commands
	$(BIN)/python -m tests.docs.page_commands README.md docs/tutorial.md docs/concepts.md docs/overhead.md docs/how-to/*.md
	$(BIN)/python -m tests.docs.example_lines

wheel: $(VENV)/plan.installed ## build dist/polygon_train-*.whl, install it alone and plan with it in an empty folder
	@rm -rf out/wheel && mkdir -p out/wheel/empty
	$(PIP) setuptools wheel
	POLYGON_SHIP_KERNELS=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir dist .
	$(PYTHON) -m venv --without-pip out/wheel/venv
	env -u PYTHONPATH $(BIN)/python -m pip --python out/wheel/venv/bin/python install --quiet --disable-pip-version-check \
	  "$$(ls -t dist/*.whl | head -1)[plots,web]"
	cd out/wheel/empty && env -u PYTHONPATH ../venv/bin/python ../../../docs/six_lines.py

sbom: wheel ## list all that the wheel holds and installs into dist/sbom.cdx.json (CycloneDX)
	$(PYTHON) -m venv out/wheel/tools
	out/wheel/tools/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7,<8'
	env -u PYTHONPATH out/wheel/tools/bin/cyclonedx-py environment --output-reproducible -o out/wheel/environment.cdx.json out/wheel/venv/bin/python
	env -u PYTHONPATH out/wheel/tools/bin/python benchmarks/sbom.py out/wheel/environment.cdx.json -o dist/sbom.cdx.json

images: ## build the planner's and the trainer's container, where a registry is at hand
	@command -v docker >/dev/null || { echo 'images: found no docker, expected it and a registry at hand' >&2; exit 1; }
	@docker info >/dev/null 2>&1 || { echo 'images: found no Docker daemon that answers, expected one (docker info)' >&2; exit 1; }
	docker build --file docker/planner.Dockerfile --tag polygon .
	docker build --file docker/trainer.Dockerfile --tag polygon-train .

release: lint test site pages sbom ## all that must hold before a release; the wheel and its bill of materials are in dist/

coverage: $(VENV)/test.installed ## how much of the public names is documented, beside two other solvers
	$(BIN)/python -m benchmarks.docstrings

clean: ## remove the environment and what was built
	rm -rf $(VENV) out build dist *.egg-info
