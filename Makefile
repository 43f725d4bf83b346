# Everything happens in .venv, which the first target makes; nothing else on the machine changes.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint types unit schema clean

demo: $(INSTALLED)
	$(BIN)/shardscope demo

# Types are checked while tests run: one process beside two, most of them waiting now and then.
test: lint
	$(MAKE) --jobs=2 types unit

lint: $(INSTALLED)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(INSTALLED)
	$(BIN)/mypy

# Tests that play ranks as threads of one process have processes of their own: after one, a model
# that is compiled while it is watched may be compiled once more, which other tests count.
PLAYED := tests/parallel tests/cli/test_parity_verb.py tests/integration/test_parity_on_real_ranks.py

unit: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(addprefix --ignore=,$(PLAYED))
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(PLAYED)

schema: $(INSTALLED)
	$(BIN)/python -m shardscope.record.schema > docs/reference/recording.schema.json

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardscope needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,docs,ecosystem]'
	# On all cores, where pip compiles on one; a few packages bring files that are not Python.
	-$(BIN)/python -m compileall -qq -j 0 .venv/lib
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
