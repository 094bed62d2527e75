"""The README says what is so: its files and flags exist, and its metrics are those that are logged."""

import re
import shlex
from dataclasses import fields

import pytest
import tyro
from conftest import ROOT
from library_models import VARIANTS, build, metrics

import iac
import maac

README = (ROOT / "README.md").read_text()
SOURCES = [(ROOT / name).read_text() for name in ("iac.py", "maac.py", "common.py")]
COMMANDS = re.findall(r"^    (\S.*)$", README, re.M)


def test_it_is_short():
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("file", [iac, maac])
def test_every_flag_exists(file):
    """In the twin that a command is for; elsewhere in the text in one of the two."""
    mine = [command for command in COMMANDS if f"python {file.__name__}.py" in command]
    assert len(mine) >= 3
    text = re.sub(
        r"^    (python tests/|ruff).*$", "", README, flags=re.M
    )  # which have flags of their own
    for flag in set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", text if file is iac else "\n".join(mine))
    ) - {"--help"}:
        name = flag[2:].removeprefix("no-").replace("-", "_")
        assert name in file.Args.__dataclass_fields__, flag


def test_one_line_sets_up_and_trains_and_one_sets_up_and_tests():
    setups = [command for command in COMMANDS if "venv" in command]
    assert len(setups) == 2
    for command, end in zip(setups, (["iac.py"], ["-m", "pytest", "-q", "tests"]), strict=True):
        install = command.split("&&")[1]
        assert all((ROOT / name).is_file() for name in re.findall(r"-r (\S+)", install))
        assert shlex.split(command.split("&&")[2])[1:] == end
    assert "tests/requirements.txt" in setups[1] and "-r requirements.txt" in setups[1]


def test_files_named_in_it_exist():
    for name in re.findall(r"`((?:tests/)?[\w/]+(?:\.py|\.txt|/)?)`", README):
        if name.startswith("tests/") or (name.endswith((".py", ".txt")) and name != "my_task.py"):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_metric_of_the_table_is_logged(variant, tmp_path):
    """That all logged ones are in the table is held by test_cli.py."""
    table = README[README.index("| metric |") : README.index("## Settings")]
    trainer = build(
        variant,
        tmp_path / "run",
        {"reference_kl_enabled": True, "eval_interval": 4, "logging_steps": 1},
    )
    trainer.eval_dataset = trainer.train_dataset
    trainer.train()
    logged = {re.sub(r"turn_\d", "turn_{t}", name) for row in metrics(trainer) for name in row}
    logged = {
        re.sub(r"(agent|critic)_\d", lambda m: m[1] + ("_{i}" if m[1] == "agent" else "_{c}"), n)
        for n in logged
    }
    for names in re.findall(r"^\| (`.*?) \| ", table, re.M):
        for name in re.findall(r"`([^`]+)`", names):
            if name == "eval/...":
                assert any(n.startswith("eval/") for n in logged)
            elif (variant, name) != (
                "iac_shared",
                "critic_{c}/grad_norm",
            ):  # one optimiser for both, as the table says
                assert name in logged, name


@pytest.mark.parametrize("file", [iac, maac])
def test_settings_it_speaks_of_have_the_values_it_gives(file):
    """5e-6 and 256 with a model of one's own."""
    args = tyro.cli(file.Args, args=["--agent-model", "some/model"])
    assert "learning rates 5e-6, 256 new tokens" in README.replace("\n", " ")
    assert (
        args.agent_learning_rate == args.critic_learning_rate == 5e-6 and args.max_new_tokens == 256
    )


def test_functions_named_in_it_exist():
    table = README[README.index("## I want to change") : README.index("## What it learns")]
    names = set(re.findall(r"`([a-zA-Z_]+)`", table))
    assert len(names) > 15
    for name in names:
        defined = re.compile(
            rf"^class {name}\b|^ *def {name}\(|^{name} = |self\.{name} = |^    {name}: |, {name}: ",
            re.M,
        )
        assert any(defined.search(text) for text in SOURCES), name


@pytest.mark.parametrize("file", [iac, maac])
def test_the_table_of_settings_gives_every_setting_with_its_default(file):
    table = README[README.index("| setting and default |") : README.index("On a CPU shared")]
    given = dict(
        re.findall(r"`(\w+)` ([\w.+-]+)", "\n".join(re.findall(r"^\| (`.*?) \| ", table, re.M)))
    )
    config = next(value for name, value in vars(file).items() if name.endswith("Config"))
    defaults = {field.name: str(field.default) for field in fields(config)}
    assert {name: given.get(name) for name in defaults} == defaults
    assert set(given) <= {field.name for field in fields(iac.IACConfig)}


def test_the_difference_it_shows_is_in_the_files():
    gone, new = re.search(r"```diff\n-(.*)\n\+(.*)\n```", README).groups()
    assert (
        gone in SOURCES[0]
        and gone not in SOURCES[1]
        and new in SOURCES[1]
        and new not in SOURCES[0]
    )
