# Everything happens in .venv, which the first target makes; nothing else on the machine changes.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint types unit schema clean

demo: $(INSTALLED)
	$(BIN)/shardscope demo

test: lint types unit

lint: $(INSTALLED)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

schema: $(INSTALLED)
	$(BIN)/python -m shardscope.record.schema > docs/reference/recording.schema.json

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardscope needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
