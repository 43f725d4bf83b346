"""The files that `shardscope init --ci` writes for GitHub Actions, GitLab CI and pre-commit."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import distribution
from pathlib import Path

from shardscope.errors import TargetError

_GITHUB = """\
# Checks the contract of shardscope.toml, and compares each pull request with its base.
name: shardscope

on:
  pull_request:

permissions:
  contents: read
  pull-requests: write # for the comment; pull requests from forks get none, and a notice

jobs:
  shardscope:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v5
        with:
          fetch-depth: 0 # to find where the branch left its base
      - uses: actions/setup-python@v6
        with:
          python-version: "3.12"
      - run: pip install {requirements}
      - run: shardscope ci --output shardscope-ci --comment
        env:
          GITHUB_TOKEN: ${{{{ github.token }}}}
      - uses: actions/upload-artifact@v6
        if: always()
        with:
          name: shardscope
          path: shardscope-ci
"""
_GITLAB = """\
# Checks the contract of shardscope.toml, and compares each merge request with its base.
shardscope:
  image: python:3.12
  variables:
    GIT_DEPTH: "0" # to find where the branch left its base
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
  script:
    - pip install {requirements}
    - shardscope ci --output shardscope-ci
  artifacts:
    when: always
    paths:
      - shardscope-ci
    reports:
      codequality: shardscope-ci/gl-code-quality-report.json
"""
_PRE_COMMIT = """\
# Checks the contract of shardscope.toml before a commit that affects it.
repos:
  - repo: local
    hooks:
      - id: shardscope
        name: check the shardscope contract
        entry: shardscope ci --no-base
        language: system # it imports your model, so it runs in your environment
        types_or: [python, toml]
        require_serial: true
"""
CI_FILES = {
    "github": (".github/workflows/shardscope.yml", _GITHUB),
    "gitlab": (".gitlab-ci.yml", _GITLAB),
    "pre-commit": (".pre-commit-config.yaml", _PRE_COMMIT),
}
"""The path and the text of each file, by the name that `--ci` takes."""


def render_ci_file(name: str, install: str | None) -> tuple[Path, str]:
    """The path of a file and its text; it installs what the current folder's program needs.

    `install` is the requirement of shardscope itself; without it, the repository that it was
    installed from here.
    """
    path, text = CI_FILES[name]
    if name == "pre-commit":
        return Path(path), text
    requirements = [shlex.quote(install or _find_requirement())]
    if Path("requirements.txt").is_file():
        requirements.append("-r requirements.txt")
    if Path("pyproject.toml").is_file() or Path("setup.py").is_file():
        requirements.append("-e .")
    return Path(path), text.format(requirements=" ".join(requirements))


def _find_requirement() -> str:
    """The repository and the commit that shardscope was installed from, as pip noted them."""
    note = distribution("shardscope").read_text("direct_url.json") or "{}"
    origin = json.loads(note)
    commit = origin.get("vcs_info", {}).get("commit_id")
    if commit is None:
        raise TargetError(
            "there is no telling which shardscope CI is to install: it is not on the package "
            "index, and was installed here from files. Name a wheel in your repository, or a "
            "repository: --install wheels/shardscope.whl."
        )
    return f"shardscope @ git+{origin['url']}@{commit}"
