# Everything is installed into .venv. `make demo` installs the package and its dependencies there;
# the first target that needs development tools adds those.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
RUNTIME := .venv/.runtime-installed
INSTALLED := .venv/.development-installed

.PHONY: demo test test-newest lint types unit dist docs examples gallery pictures schema completion simulated-gpu web web-check browser clean

demo: $(RUNTIME)
	$(BIN)/shardscope demo

# One process beside the two of the tests checks types, builds the site and the page's bundle.
test: lint browser
	$(MAKE) --jobs=2 unit types docs web-check

lint: $(INSTALLED)
	$(BIN)/ruff check src tests benchmarks examples docs/_hooks
	$(BIN)/ruff format --check src tests benchmarks examples docs/_hooks

types: $(INSTALLED)
	$(BIN)/mypy

# Tests that play ranks as threads of one process have processes of their own: after one, a model
# that is compiled while it is watched may be compiled once more, which other tests count.
PLAYED := tests/parallel tests/cli/test_parity_verb.py tests/integration/test_parity_on_real_ranks.py

unit: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(addprefix --ignore=,$(PLAYED))
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(PLAYED)

# The same tests with the newest torch that the package index has, in a venv of its own.
NEWEST := .venv-newest

test-newest: browser
	test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		-c $(NEWEST)/constraints.txt torch -e '.[data,dev,docs,ecosystem,mcp]'
	$(NEWEST)/bin/python -c 'import torch; print("torch", torch.__version__)'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest -n 2 --dist worksteal $(addprefix --ignore=,$(PLAYED))
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest -n 2 --dist worksteal $(PLAYED)

# The wheel and the sdist of the last commit, in dist/, after the checks of both have passed.
dist: $(INSTALLED)
	git diff --quiet HEAD || { echo "there are changes that are not committed; commit them first"; exit 2; }
	$(BIN)/pytest -q tests/test_wheel.py
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# The variable silences an advertisement of mkdocs-material's.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

examples: $(INSTALLED) browser
	OMP_NUM_THREADS=1 $(BIN)/python examples/regenerate.py

# The recordings and pictures of the large models in the site's gallery; it takes minutes.
gallery: $(INSTALLED) browser
	OMP_NUM_THREADS=1 $(BIN)/python examples/regenerate.py gallery

# The pictures of reports alone, after the page has changed.
pictures: $(INSTALLED) browser
	$(BIN)/python examples/regenerate.py pictures

schema: $(INSTALLED)
	$(BIN)/python -m shardscope.record.schema > docs/reference/recording.schema.json
	$(BIN)/python -m shardscope.report.query.results > docs/reference/tables.md
	$(BIN)/python -m shardscope.report.result.schema > docs/reference/result.schema.json

completion: $(INSTALLED)
	$(BIN)/python -m shardscope.cli.completion > src/shardscope/cli/completion.json

simulated-gpu: $(INSTALLED)
	$(BIN)/python -m shardscope._torch.cuda.calls > docs/reference/simulated-gpu.md

# The page's script and style, which are committed so that nobody else needs Node.
web:
	cd web && npm ci --no-audit --no-fund && npm run build

web-check:
	@if command -v npm > /dev/null; then web/check.sh; \
	else echo "npm is missing, so the page's bundle was not built again; its sources' hash was compared"; fi

# Tests of the page run in a real browser: Debian's, of the two packages the one without windows,
# which needs half of the processor's time.
CHROMIUM := chromium-headless-shell

browser:
	@command -v $(CHROMIUM) > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends $(CHROMIUM) fonts-dejavu-core; } > /dev/null \
		|| command -v chromium > /dev/null \
		|| { echo "tests of the page need Chromium; install it: apt-get install $(CHROMIUM)"; exit 2; }

$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardscope needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

# Byte-compiling uses all cores, which pip does not. Some packages contain templates that are not
# valid Python, so its exit code says nothing.
$(INSTALLED): $(RUNTIME)
	$(PIP) -e '.[data,dev,docs,ecosystem,mcp]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib > /dev/null 2>&1 || true
	@touch $@

clean:
	rm -rf .venv .venv-newest .mypy_cache .pytest_cache .ruff_cache site
