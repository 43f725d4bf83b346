#!/usr/bin/env bash
# Checks types, lint and tests of the page's front end, and that the committed bundle is up to date.
set -euo pipefail
cd "$(dirname "$0")"
bundle=../src/shardscope/report/bundle
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

# Install only if the lock file is newer than what is installed, so that no network is needed.
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --no-audit --no-fund --loglevel error
npm run --silent check
npm test --silent
npm run --silent build -- --outDir "$built" --logLevel warn
diff -rq "$built" "$bundle" --exclude=__init__.py --exclude=__pycache__ || {
  echo "the committed bundle is out of date: run `make web` and commit it"
  exit 1
}
