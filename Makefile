# `make demo` and `make test` are all a newcomer needs; both make the environment first.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format env model bench fuzz soak verbs simulate mutants gpu-check clean

SEEDS ?= 1000
START ?= 0

env: .venv/installed

# Made again when pyproject.toml changes; everything comes from the package registry.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Callboard needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The default model, checked and cached outside the repository.
model: env
	@$(BIN)/callboard fetch-model

demo: model
	$(BIN)/python docs/examples/demo.py

test: model
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/check

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: model
	$(BIN)/python docs/benchmarks/actors.py
	$(BIN)/python docs/benchmarks/zmq_socket.py
	$(BIN)/python docs/benchmarks/scheduling.py
	$(BIN)/python docs/benchmarks/coordinator.py
	$(BIN)/python docs/benchmarks/steps.py

# Nonsense at a server's port; see docs/benchmarks/README.md.
FRAMES ?= 1000000
fuzz: env
	$(BIN)/python docs/benchmarks/fuzz.py --frames $(FRAMES)

# Kills replicas at random for some minutes, and counts what is lost.
soak: env
	$(BIN)/python docs/benchmarks/soak.py

# Every verb in every state, and PAUSE under load; see docs/benchmarks/README.md.
verbs: model
	$(BIN)/python docs/benchmarks/verbs.py

# The whole tree under many schedules and faults; see docs/how-to/simulate.md.
simulate: env
	$(BIN)/python -m tests.simulation.run --seeds $(SEEDS) --start $(START)

mutants: env
	$(BIN)/python -m tests.simulation.run --mutants

# Needs a CUDA machine and whatever torch and flash-attn it has; see docs/how-to/gpu-check.md.
gpu-check:
	$(PYTHON) docs/benchmarks/gpu_check.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
