# make demo   installs polygon and runs its main job: cluster -> groups -> plan -> a short real training
# make test   installs polygon and runs all tests
# make gpu-check   measures all that needs a GPU on this machine's, into out/gpu-check.json
# Other targets: lint, validate, bench, mutants, clean.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out/demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread a process: ranks and test workers share the machine's cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint validate bench gpu-check mutants clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.installed: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/test.installed: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[train,recipes,web,test]'
	@touch $@

demo: $(VENV)/train.installed
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

test: $(VENV)/test.installed
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy polygon solvers runners comm/polygon_comm benchmarks

validate: $(VENV)/test.installed
	@mkdir -p out
	$(BIN)/python -m polygon.validate instances/measured/published_runs.json instances/measured/sailor_validation.json \
	  --profiles instances/measured/sailor_profiles.json --network instances/measured/sailor_network.json \
	  --plot out/validation.png --update README.md

bench: $(VENV)/test.installed
	$(BIN)/python benchmarks/schedule_kernel.py
	$(BIN)/python benchmarks/one_model.py

gpu-check: $(VENV)/test.installed
	$(BIN)/python -m benchmarks.gpu_check -o out/gpu-check.json

mutants: $(VENV)/test.installed
	$(BIN)/python benchmarks/mutants.py --jobs 2

clean:
	rm -rf $(VENV) out build *.egg-info
