"""init: the files it writes work as they stand; it runs nothing unless asked."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from shardscope.cli import ci_files, main
from shardscope.cli.ci_settings import read_settings
from shardscope.cli.source_scan import read_source
from shardscope.cli.target import isolated_argv, load_program
from shardscope.contract import read_contract

MODEL = """\
from dataclasses import dataclass

import torch
from torch import nn

MARK = open("imported", "w").close()


@dataclass
class ModelArgs:
    vocab_size: int = -1
    dim: int = 32
    num_layers: int = 2
    max_len: int = 16


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.norm = Norm(args.dim)
        self.up = nn.Linear(args.dim, 4 * args.dim)
        self.down = nn.Linear(4 * args.dim, args.dim)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs, dropout):
        super().__init__()
        assert args.vocab_size > 0
        self.positions = args.max_len
        self.tokens = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.output = nn.Linear(args.dim, args.vocab_size)

    def forward(self, tokens, targets):
        assert tokens.shape[1] <= self.positions
        assert tokens.shape == targets.shape
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Unused(nn.Module):
    pass
"""
VISION = """\
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Sequential):
    def __init__(self, in_channels, num_classes: int):
        super().__init__(
            nn.Conv2d(in_channels, 8, 3, stride=8), nn.Flatten(), nn.LazyLinear(num_classes)
        )


def shard(model, mesh):
    return fully_shard(model, mesh=mesh)
"""


def init(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", *arguments])


def test_a_target_for_a_decoder_runs_and_its_contract_is_recorded(here: Path) -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/decoder.py").write_text(MODEL)
    result = init("pkg/decoder.py", "--contract", "--mesh", "dp=4", "--ci", "pre-commit")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "found Decoder in pkg/decoder.py. It also has Unused: choose with --model.",
        "saved shardscope_target.py",
        "saved .pre-commit-config.yaml",
        "`shardscope trace shardscope_target.py --mesh dp=4` runs",
        "saved shardscope.toml",
        "next: shardscope ci",
    ]
    text = Path("shardscope_target.py").read_text()
    assert "from pkg.decoder import Decoder, ModelArgs" in text
    assert "BATCH, SEQUENCE = 4, 16" in text  # no longer than max_len
    assert "args=ModelArgs(vocab_size=256),  # guessed" in text
    # The contract is that of FSDP with a group for each layer: two layers and the root.
    kinds = {
        limit.kinds: limit.most
        for limit in read_contract("shardscope.toml").limits
        if limit.module == "layers.*" and limit.figure == "count"
    }
    assert {kind for (kind,) in kinds} == {"all_gather", "reduce_scatter"}
    settings = read_settings("shardscope.toml")
    assert [command.text for command in settings.commands] == [
        "trace shardscope_target.py --mesh dp=4"
    ]
    (hook,) = yaml.safe_load(Path(".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    words = [*shlex.split(hook["entry"])[1:], "unrelated.py"]
    Path("unrelated.py").touch()
    checked = CliRunner().invoke(main, words)
    assert checked.exit_code == 0, checked.stderr
    assert "not part of the recorded programs" in checked.stdout


def test_nothing_is_run_unless_asked_and_nothing_is_overwritten(here: Path) -> None:
    Path("decoder.py").write_text(MODEL)
    assert init("decoder.py", "--ci", "gitlab", "--install", "wheels/x.whl").exit_code == 0
    assert not Path("imported").exists()
    settings = read_settings("shardscope.toml")
    assert settings.contract is None
    before = {path: path.read_bytes() for path in here.iterdir()}
    refusals = {
        "decoder.py": "already exists, and init overwrites nothing. Remove it first",
        "decoder.py -o other.py --ci pre-commit": 'not a target that is new. Add "trace other',
        "--contract --ci gitlab --install x -- train.py": "'.gitlab-ci.yml' already exists",
        "-- train.py": "'shardscope.toml' says what to record already",
    }
    for arguments, sentence in refusals.items():
        result = init(*shlex.split(arguments))
        assert result.exit_code == 2
        assert sentence in result.stderr
    assert {path: path.read_bytes() for path in here.iterdir()} == before
    job = yaml.safe_load(Path(".gitlab-ci.yml").read_text())["shardscope"]
    assert "shardscope ci --output shardscope-ci" in job["script"]
    assert job["artifacts"]["reports"]["codequality"].endswith("gl-code-quality-report.json")


def test_a_contract_is_added_to_a_target_that_init_wrote_before(here: Path) -> None:
    Path("decoder.py").write_text(MODEL)
    assert init("decoder.py", "--mesh", "dp=4", "--ci", "pre-commit").exit_code == 0
    edited = Path("shardscope_target.py").read_text().replace("BATCH, SEQUENCE = 4", "BATCH, S = 2")
    Path("shardscope_target.py").write_text(edited.replace("SEQUENCE", "S"))
    with Path("shardscope.toml").open("a") as file:
        file.write('fail_on = ["worse"]  # mine\n')
    result = init("decoder.py", "--contract")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "shardscope_target.py is a target of decoder.py already, and is used as it is.",
        "`shardscope trace shardscope_target.py --mesh dp=4` runs",
        "saved shardscope.toml (added what it lacked)",
        "next: shardscope ci",
    ]
    settings = read_settings("shardscope.toml")
    assert settings.contract is not None
    assert settings.fail_on == ("worse",)
    assert "# mine" in Path("shardscope.toml").read_text()
    assert "BATCH, S = 2" in Path("shardscope_target.py").read_text()
    assert "has limits already" in init("decoder.py", "--contract").stderr


def test_limits_that_were_recorded_by_hand_get_what_ci_records(here: Path) -> None:
    Path("decoder.py").write_text(MODEL)
    assert init("decoder.py").exit_code == 0
    Path("shardscope.toml").write_text("[contract]\ngaps = 0  # mine\n")
    assert init("decoder.py", "--ci", "pre-commit").exit_code == 0
    text = Path("shardscope.toml").read_text()
    assert text.startswith("[contract]\ngaps = 0  # mine\n\n[ci]\n")
    assert read_settings("shardscope.toml").commands[0].words[:2] == (
        "trace", "shardscope_target.py",
    )  # fmt: skip


def test_a_target_of_another_model_is_not_used(here: Path) -> None:
    Path("decoder.py").write_text(MODEL)
    Path("other.py").write_text(MODEL)
    assert init("decoder.py").exit_code == 0
    for arguments in (["other.py"], ["decoder.py", "--model", "Block"]):
        result = init(*arguments, "--contract")
        assert result.exit_code == 2
        assert "'shardscope_target.py' already exists" in result.stderr


def test_a_target_uses_the_files_own_sharding_and_images_for_convolutions(here: Path) -> None:
    Path("src").mkdir()
    Path("src/vision.py").write_text(VISION)
    result = init("src/vision.py", "-o", "target.py")
    assert result.exit_code == 0, result.stderr
    text = Path("target.py").read_text()
    assert "    return shard(model, mesh)\n" in text
    with isolated_argv("target.py"):
        program = load_program("target.py")
        model = program.model()
        batch = program.batch(model)
        assert batch.shape == (4, 3, 64, 64)
        assert model(batch).shape == (4, 10)


def test_a_function_that_builds_the_model_is_preferred_and_a_name_can_be_given(
    here: Path,
) -> None:
    text = f"{MODEL}\n\ndef build_model(size=2):\n    return nn.Linear(size, 3)\n"
    Path("decoder.py").write_text(text)
    assert read_source(Path("decoder.py")).find_models() == ["build_model", "Decoder", "Unused"]
    assert init("decoder.py", "-o", "built.py").exit_code == 0
    with isolated_argv("built.py"):
        program = load_program("built.py")
        model = program.model()
        assert model(program.batch(model)).shape == (4, 3)
    assert init("decoder.py", "-o", "chosen.py", "--model", "Block").exit_code == 0
    assert "    return Block(args=ModelArgs(vocab_size=256))  # guessed\n" in (
        Path("chosen.py").read_text()
    )


SEVERAL_INPUTS = {
    "Translator": """
    def __init__(self, src_vocab: int, tgt_vocab: int, d_model: int = 8):
        super().__init__()
        self.source = nn.Embedding(src_vocab, d_model)
        self.target = nn.Embedding(tgt_vocab, d_model)

    def forward(self, source, translation, mask):
        assert mask is None
        return self.source(source) + self.target(translation)
""",
    "Recommender": """
    def __init__(self, num_dense: int, cardinalities: list[int]):
        super().__init__()
        self.bottom = nn.Linear(num_dense, 8)
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, 8) for size in cardinalities)

    def forward(self, dense, sparse):
        return self.bottom(dense) + sum(
            table(sparse[:, index, None]) for index, table in enumerate(self.tables)
        )
""",
    "Denoiser": """
    def __init__(self, channels=3, dim=8):
        super().__init__()
        self.convolution = nn.Conv2d(channels, dim, 3)
        self.steps = nn.Embedding(1000, dim)

    def forward(self, image, timesteps):
        return self.convolution(image) + self.steps(timesteps)[:, :, None, None]
""",
}


@pytest.mark.parametrize("name", SEVERAL_INPUTS)
def test_further_inputs_are_guessed_by_their_names(name: str, here: Path) -> None:
    text = f"from torch import nn\n\n\nclass {name}(nn.Module):{SEVERAL_INPUTS[name]}"
    module = f"several_{name.lower()}.py"  # imported ones are cached by name
    Path(module).write_text(text)
    assert init(module, "-o", "target.py").exit_code == 0
    assert re.search("return inputs, .*# guessed", Path("target.py").read_text())
    with isolated_argv("target.py"):
        program = load_program("target.py")
        model = program.model()
        model(*program.batch(model))


def test_a_model_of_a_library_is_recognized_by_its_base_or_its_name(here: Path) -> None:
    Path("hub.py").write_text(
        "from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel\n"
        "class Mine(GPT2LMHeadModel): ...\n"
        "class Settings(BaseModel): ...\n"
        "config = GPT2Config()\n"
        "model = AutoModelForCausalLM.from_config(config)\n"
    )
    assert read_source(Path("hub.py")).find_models() == ["model", "Mine"]


def test_a_program_needs_no_target_and_gets_a_workflow(here: Path) -> None:
    Path("requirements.txt").touch()
    result = init(
        *("--ci", "github", "--install", "shardscope @ git+https://example.com/x"),
        *("--", "train.py", "--name", "a b"),
    )
    assert result.exit_code == 0, result.stderr
    (command,) = read_settings("shardscope.toml").commands
    assert command.words == ("run", "--", "train.py", "--name", "a b")
    workflow = yaml.safe_load(Path(".github/workflows/shardscope.yml").read_text())
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}
    steps = workflow["jobs"]["shardscope"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    assert runs == [
        "pip install 'shardscope @ git+https://example.com/x' -r requirements.txt",
        "shardscope ci --output shardscope-ci --comment",
    ]
    # Files for a further service need nothing else.
    assert init("--ci", "pre-commit").exit_code == 0


def test_ci_installs_the_repository_that_shardscope_was_installed_from(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = {
        "files": '{"url": "file:///checkout", "dir_info": {"editable": true}}',
        "git": '{"url": "https://example.com/x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
    }
    Path("shardscope.toml").write_text("[ci]\nrecord = ['demo']\n")
    for kind, text in origins.items():
        info = here / kind / "shardscope-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardscope\nVersion: 0\n")
        (info / "direct_url.json").write_text(text)
        installed = importlib.metadata.Distribution.at(info)
        monkeypatch.setattr(ci_files, "distribution", lambda _, installed=installed: installed)
        result = init("--ci", "github")
        if kind == "files":
            assert result.exit_code == 2
            assert "there is no telling which shardscope CI is to install" in result.stderr
            assert not Path(".github").exists()
    assert "pip install 'shardscope @ git+https://example.com/x@abc'\n" in (
        Path(".github/workflows/shardscope.yml").read_text()
    )


def test_a_target_that_fails_when_it_is_run_is_kept_and_explained(here: Path) -> None:
    Path("strict.py").write_text(MODEL.replace("args.vocab_size > 0", "dropout == 'none'"))
    result = init("strict.py", "--run")
    assert result.exit_code == 2
    assert "model() failed: AssertionError" in result.stderr
    assert "Correct shardscope_target.py, first where it says guessed" in result.stderr
    assert Path("shardscope_target.py").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to write for. Give the file with your model"),
        (["gone.py"], "gone.py does not exist. Give the path of a Python file with a model."),
        (["empty.py"], "empty.py has no subclass of nn.Module, no model and no function"),
        (["broken.py"], "broken.py, line 2 cannot be read: '(' was never closed."),
        (["loop.py"], "loop.py is a program: importing it would run it. Put it after --"),
        (["decoder.py", "--model", "Decodr"], "Did you mean 'Decoder'?"),
        (["decoder.py", "--", "train.py"], "init got decoder.py before -- and a program after it."),
        (["not-a-name.py"], "not-a-name.py cannot be imported by that name. Rename it"),
        (["--ci", "pre-commit"], "there is nothing to record: 'shardscope.toml' has no list"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    here: Path, arguments: list[str], sentence: str
) -> None:
    Path("empty.py").touch()
    Path("broken.py").write_text("x = 1\ny = (\n")
    Path("loop.py").write_text(f"{MODEL}\nfor step in range(3):\n    pass\n")
    Path("decoder.py").write_text(MODEL)
    Path("not-a-name.py").write_text(MODEL)
    files = set(here.iterdir())
    result = init(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert set(here.iterdir()) == files


def test_a_file_that_is_a_target_gets_a_contract_of_its_own(here: Path) -> None:
    Path("train.py").write_text("def model():\n    pass\n\n\ndef batch(model):\n    pass\n")
    result = init("train.py")
    assert result.stdout.splitlines() == [
        "train.py is a target already: it defines model() and batch().",
        "next: shardscope trace train.py --mesh dp=8",
    ]
    assert list(here.iterdir()) == [here / "train.py"]
