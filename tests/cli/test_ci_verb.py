"""ci: what it records, what it refuses, and how it comments; the action's test runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from checked_programs import make_checked, write_program
from checked_repository import git, make_repository
from github_api import Comments, serve_comments
from shardscope.cli import main
from shardscope.cli.ci_comment import (
    CIResult,
    PullRequest,
    find_pull_request,
    render_comment,
    summarize_result,
)
from shardscope.cli.ci_runs import checked_out
from shardscope.cli.ci_settings import is_affected, parse_command, read_settings
from shardscope.errors import ShardscopeError
from shardscope.record import Severity


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_DIFF_BASE_SHA", "GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is nothing to record: 'shardscope.toml' has no list of commands."),
        ("[contract]\ngaps = 0", "there is nothing to record"),
        ("[ci]\nrecord = []", "shardscope.toml, line 2: record is empty."),
        ("[ci]\nrecords = ['x']", "line 2: Unknown key 'records' in [ci]. Did you mean 'record'?"),
        ("[ci]\nrecord = ['show x']", "'show x' saves no recording."),
        ("[ci]\nrecord = ['trce x.py']", "Did you mean 'trace'?"),
        ("[ci]\nrecord = ['trace x.py -o y']", "names its output, which shardscope ci chooses."),
        ('[ci]\nrecord = ["trace \'x"]', "is no command line (No closing quotation)."),
        ("[ci]\nrecord = ['demo']\ntolerance = 'much'", "--tolerance must be a percentage"),
        ("[ci]\nrecord = ['demo']\nfail_on = ['wors']", "Did you mean 'worse'?"),
        ("[contract]\ngap = 0\n[ci]\nrecord = ['demo']", "line 2: Unknown key 'gap'"),
        ("ci = 3", "line 1: ci is 3. Make it a table: [ci]"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_their_line(
    here: Path, text: str | None, sentence: str
) -> None:
    if text is not None:
        Path("shardscope.toml").write_text(text)
    result = CliRunner().invoke(main, ["ci"])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_options_replace_the_settings_and_empty_ones_do_not(here: Path) -> None:
    Path("limits.toml").write_text(
        "[ci]\nrecord = ['run --nnodes 2 -- train.py -o x']\nfail_on = 'worse'\ntolerance = '5%'"
    )
    settings = read_settings("limits.toml", records=[""], fail_on=[""], tolerance="")
    (command,) = settings.commands
    assert command.with_output("out.json.gz") == [
        *("run", "-o", "out.json.gz", "--force"),
        *("--nnodes", "2", "--", "train.py", "-o", "x"),
    ]
    assert (settings.fail_on, settings.tolerance, settings.contract) == (("worse",), "5%", None)
    settings = read_settings("limits.toml", records=["\ntrace a.py\nshardscope memory b.py\n"])
    assert [command.verb for command in settings.commands] == ["trace", "memory"]


def test_a_program_that_fails_is_reported_with_what_it_printed(here: Path) -> None:
    result = CliRunner().invoke(main, ["ci", "--record", "trace gone.py --mesh dp=2"])
    assert result.exit_code == 2
    first, last = result.stderr.splitlines()
    assert first.startswith("shardscope: gone.py does not exist.")
    assert "`shardscope trace gone.py --mesh dp=2` recorded nothing" in last


def test_the_base_is_where_the_branch_left_and_is_removed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = make_repository(tmp_path)
    origin = tmp_path / "origin"
    left = git("rev-parse", "main", cwd=origin)
    git("checkout", "--quiet", "main", cwd=origin)
    (origin / "later.py").touch()
    git("add", "later.py", cwd=origin)
    git("commit", "--quiet", "--message=later", cwd=origin)
    monkeypatch.chdir(origin / "pkg")
    git("checkout", "--quiet", "feature", cwd=origin)
    monkeypatch.syspath_prepend(origin / "pkg")
    with checked_out("main") as base:
        assert base.commit == left
        assert base.folder.name == "pkg"
        assert (base.folder / "sizes.py").read_text() == "BATCH = 8\n"
        # What Python would import from the checkout comes from the base.
        assert str(base.folder) in base.environment["PYTHONPATH"].split(":")
    assert not base.folder.exists()
    assert len(git("worktree", "list", cwd=origin).splitlines()) == 1
    # A shallow clone lacks the branch, fetches it, and has no common ancestor.
    monkeypatch.chdir(clone)
    with checked_out("main") as base:
        assert base.commit == git("rev-parse", "main", cwd=origin)
    with (
        pytest.raises(ShardscopeError, match="git knows no commit 'nowhere'"),
        checked_out("nowhere"),
    ):
        pass
    with pytest.raises(ShardscopeError, match="git knows no commit '--all'"), checked_out("--all"):
        pass


def test_which_changed_files_matter_follows_imports(here: Path) -> None:
    Path("pkg").mkdir()
    for name, text in {
        "train.py": "def model():\n    from pkg import parts\n",
        "pkg/__init__.py": "",
        "pkg/parts.py": "from . import sizes\nfrom .deep.er import x\n",
        "pkg/sizes.py": "",
        "pkg/other.py": "",
        "dynamic.py": "import importlib\nimportlib.import_module(name)\n",
    }.items():
        Path(name).write_text(text)
    commands = [parse_command("trace train.py --mesh dp=2")]
    for name in ("train.py", "pkg/__init__.py", "pkg/parts.py", "pkg/sizes.py", "shardscope.toml"):
        assert is_affected(commands, [name]), name
    assert not is_affected(commands, ["pkg/other.py", "dynamic.py"])
    assert is_affected([parse_command("run -m pkg.parts")], ["pkg/sizes.py"])
    assert not is_affected([parse_command("run -m pkg.parts")], ["train.py"])
    # Where the source does not tell, everything matters.
    assert is_affected([parse_command("trace dynamic.py")], ["pkg/other.py"])
    assert is_affected([parse_command("trace gone.py")], ["pkg/other.py"])


def test_a_first_comment_is_created_and_one_without_permission_is_a_sentence() -> None:
    with serve_comments(Comments(["hello"])) as comments:
        request = PullRequest(comments.url, "octo/model", 7, "secret")
        body = "<!-- shardscope ci -->\n\nnew"
        assert request.write_comment(body) == "wrote a comment on pull request 7"
        assert comments.bodies == {0: "hello", 1: body}
        assert request.write_comment(f"{body}er") == "updated the comment on pull request 7"
        assert comments.bodies == {0: "hello", 1: f"{body}er"}
        comments.may_write = False
        sentence = request.write_comment(body)
    assert sentence.startswith("no comment on pull request 7: the token may not write it (HTTP 403")
    assert "secret" not in sentence
    assert request.write_comment(body).startswith("no comment on pull request 7: GitHub did not")


def test_without_a_pull_request_there_is_a_sentence(here: Path) -> None:
    assert "GITHUB_API_URL" in str(find_pull_request({}))
    Path("event.json").write_text("{}")
    environment = {
        **dict.fromkeys(("GITHUB_API_URL", "GITHUB_REPOSITORY", "GITHUB_TOKEN"), "x"),
        "GITHUB_EVENT_PATH": "event.json",
    }
    assert find_pull_request(environment) == (
        "no comment: this job was not started by a pull request"
    )


def test_a_contract_can_be_recorded_into_a_file_that_only_has_commands(here: Path) -> None:
    from sample_recordings import make_recording
    from shardscope.record import save

    save(make_recording(), "run.json")
    Path("shardscope.toml").write_text("[ci]\nrecord = ['demo']  # fast\n")
    result = CliRunner().invoke(main, ["contract", "record", "run.json", "--force"])
    assert result.exit_code == 0, result.stderr
    text = Path("shardscope.toml").read_text()
    assert text.startswith("[ci]\nrecord = ['demo']  # fast\n")
    assert read_settings("shardscope.toml").contract is not None


def test_ranks_that_diverge_fail_with_their_line_and_remedy(here: Path) -> None:
    write_program(Path("wrong.py"), condition="dist.get_rank() == 0")
    command = "check --nproc-per-node 2 --steps 2 --data -- wrong.py"
    result = CliRunner().invoke(main, ["ci", "--no-base", "--record", command, "-o", "runs"])
    assert result.exit_code == 1
    assert result.stdout.endswith("shardscope ci: ranks diverge (1 finding)\n")
    assert "| `divergence` |" in Path("runs/comment.md").read_text()
    sarif = Path("runs/shardscope.sarif").read_text()
    assert '"ruleId": "divergence"' in sarif
    assert '"level": "error"' in sarif
    assert "wrong.py" in sarif


def test_ranks_that_may_diverge_fail_too() -> None:
    findings = make_checked(Severity.WARNING).findings
    result = CIResult(contract=None, violations=(), changes=(), divergences=findings)
    assert result.is_failed
    assert summarize_result(result) == "ranks diverge (1 finding)"
    row = next(line for line in render_comment(result).splitlines() if "possible-div" in line)
    assert "`train.py:12`" in row
    assert "Let all ranks decide the same" in row
