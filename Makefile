# make demo    a real recipe, end to end, in ./demo; the second time everything is fresh
# make test    lint, types, and every test
# make lint    only what needs no test
# make bench   the table of docs/benchmarks.md, measured here
# make docs    write the generated parts of docs/ anew
# make release accept what the released recipes are now (fixtures/recipes.lock)
# make clean   away with everything that is made; earlier results in ./demo too

PYTHON ?= python3
BIN    := .venv/bin
# Nothing is fetched from a hub while a recipe or a test runs.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of programs: each module is compiled once, also where the caller's environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint bench docs release clean
.DEFAULT_GOAL := test

# torch comes first and alone: what follows then finds the pinned one and brings no other.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recipe needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,preference,images,dev]'
	touch $@

demo: .venv/.ready
	@mkdir -p demo
	$(BIN)/recipe run sft@1 -C demo --preset smoke --python current

# Real servers and processes on a machine that others use, too: what failed is tried once more, alone, and fails for good if it fails again.
# Four at a time on two cores, for many wait for a server or a disk; in the order of the folders, so that long trainings do not come last.
test: lint
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.cache/peers/.ready:
	$(PYTHON) -m venv .cache/peers
	.cache/peers/bin/pip install --quiet ninja doit snakemake dvc
	touch $@

bench: .venv/.ready .cache/peers/.ready
	$(BIN)/python benchmarks/peers.py --bin .cache/peers/bin
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/pack.py --bin .cache/peers/bin
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/remote.py

docs: .venv/.ready
	$(BIN)/python -m docs.generate

release: .venv/.ready
	$(BIN)/python -m tests.test_released_recipes

clean:
	rm -rf .venv demo out dist build .cache .recipe .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
