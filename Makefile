# Each target sets itself up on a fresh machine with Python 3.11, make and a C++ compiler.
#   make demo    train a small Llama across a ring of 4 processes on this CPU, and show that the ring changes nothing
#   make test    all tests that need no GPU
#   make lint    ruff, format, types;   make wheel    what a wheel claims;   make mutants    faults that tests must see
# torch is installed first and pinned; on a GPU machine choose the build that fits it: make test TORCH=torch==2.11.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
.PHONY: demo test lint wheel mutants clean

$(VENV)/ready: pyproject.toml
	@command -v c++ >/dev/null || { echo "no C++ compiler (c++) was found, torch.compile needs one: install g++"; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ringflash needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

demo: $(VENV)/ready
	rm -rf runs/demo/checkpoints runs/demo/one_process/checkpoints
	$(BIN)/python -m launch configs/demo.toml
	@echo "the first steps again, on one process:"
	OMP_NUM_THREADS=1 $(BIN)/python -m launch configs/demo.toml --set metrics.dir=runs/demo --set train.name=one_process \
		--set train.steps=5 --set parallel.ring=1 --set launch.processes_per_node=1 --set metrics.wandb=disabled
	$(BIN)/python -m train.report runs/demo

test: $(VENV)/ready
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/ready
	$(BIN)/python tests/check_wheel.py

mutants: $(VENV)/ready
	$(BIN)/python tests/mutants.py

clean:
	rm -rf $(VENV) build dist *.egg-info runs
