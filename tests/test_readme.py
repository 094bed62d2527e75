"""The README says what is so: its commands, flags, files, names, metrics and defaults exist."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import tyro

import commands
import iac
import maac
from conftest import ROOT

README = (ROOT / "README.md").read_text()
SOURCES = {name: (ROOT / name).read_text() for name in ("iac.py", "maac.py", "common.py")}
COMMANDS = [
    line.split("  ")[0].strip() for line in re.findall(r"^    ((?:python|\.venv|env_|python3).*)$", README, re.M)
]
TASK = re.search(r"```python\n(.*?)```", README, re.S)[1]


def parse(words):
    """The settings that a command line of one of the two files gives."""
    module = {"iac.py": iac, "maac.py": maac}[words[1]]
    return tyro.cli(module.Args, args=words[2:], console_outputs=False)


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match(r"python (iac|maac)\.py", c)])
def test_every_command_of_the_two_files_parses(command):
    words = shlex.split(command.replace("tests/smollm2", "tests/tiny_lm"))
    if "--help" in words:
        words.remove("--help")
    args = parse(words)
    if args.task and args.task != "my_task.py":
        assert (ROOT / args.task).is_file()


def test_there_are_commands_of_both_files():
    assert sum("python iac.py" in command for command in COMMANDS) > 4
    assert sum("python maac.py" in command for command in COMMANDS) > 3


def test_one_line_sets_up_and_trains_and_one_sets_up_and_tests():
    setups = [command for command in COMMANDS if "venv" in command]
    ends = ["iac.py"], ["-m", "pytest", "-q", "tests"]
    for command, end in zip(setups, ends, strict=True):
        _, install, last = command.split("&&")
        assert all((ROOT / name).is_file() for name in re.findall(r"-r (\S+)", install))
        assert shlex.split(last)[1:] == end
    assert "tests/requirements.txt" in setups[1] and "-r requirements.txt" in setups[1]


def test_every_flag_it_speaks_of_exists():
    known = iac.Args.__dataclass_fields__.keys()
    ours = re.sub(r"^    (python tests/|torchrun|srun).*$", "", README, flags=re.M)
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", ours)) - {"help"}
    assert len(flags) > 10
    for flag in flags:
        assert flag.removeprefix("no-").replace("-", "_") in known, flag


def test_files_it_names_exist():
    names = re.findall(r"`((?:tests/)[\w/]+(?:\.py|\.txt)?/?)`", README)
    names += re.findall(r"\]\((tests/[^)]+)\)", README)
    assert len(names) > 4
    for name in names:
        assert (ROOT / name).exists() or name == "tests/smollm2", name


def test_functions_it_names_exist():
    table = README[README.index("## Change it") : README.index("## Results")]
    names = set(re.findall(r"`([a-zA-Z_]+)`", table))
    assert len(names) > 15
    text = "\n".join(SOURCES.values())
    for name in names:
        defined = rf"^class {name}\b|^ *def {name}\(|^{name} = |^    {name}: "
        assert re.search(defined, text, re.M), name


def test_the_constructor_has_the_arguments_it_names():
    table = README[README.index("| name | what |") : README.index("As a library")]
    names = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert names == set(iac.TASK) == set(maac.TASK)


def test_the_difference_it_shows_is_in_the_files():
    gone, new = re.search(r"```diff\n-(.*)\n\+(.*)\n```", README).groups()
    assert gone in SOURCES["iac.py"] and gone not in SOURCES["maac.py"]
    assert new in SOURCES["maac.py"] and new not in SOURCES["iac.py"]


def test_the_defaults_it_gives_are_those_in_force():
    args = iac.Args()
    assert "learning rates 5e-6, 256 new tokens" in README
    assert args.agent_learning_rate == args.critic_learning_rate == 5e-6
    assert args.max_new_tokens == 256
    assert "Defaults: 1 epoch, 1 turn, temperature and top-p 1, early termination off" in README
    assert (args.num_train_epochs, args.num_turns, args.temperature, args.top_p) == (1, 1, 1, 1)
    assert args.early_termination_threshold is None


def test_its_task_is_complete_and_both_files_run_it(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    task = runpy.run_path(str(tmp_path / "my_task.py"))
    answers = ["3", "no", "3", "8"], ["6", "6", "4", "3"]
    assert task["reward_func"](*answers) == pytest.approx([1, 0, 1 - 2 / 5, 0])
    short = ["--num-train-epochs", "1", "--eval-interval", "0", "--rollout-buffer-size", "800"]
    lines = [[ROOT / name, "--task", "my_task.py", "--output-dir", name[:-3], *short] for name in ("iac.py", "maac.py")]
    for done in commands.run_together(*lines, cwd=tmp_path):
        assert done.returncode == 0, done.stderr
        assert "my_task.py defines" in done.stdout


def test_the_metrics_of_its_table_are_those_that_are_logged(tmp_path):
    """In both directions, with a reference penalty, so that all of them are there."""
    table = README[README.index("| metric |") : README.index("## Change it")]
    listed = set(re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \| ", table, re.M))))
    flags = ["--num-train-epochs", "1", "--rollout-buffer-size", "800", "--reference-kl-enabled"]
    lines = [[name, "--output-dir", tmp_path / name, *flags] for name in ("iac.py", "maac.py")]
    for name, done in zip(("iac.py", "maac.py"), commands.run_together(*lines), strict=True):
        assert done.returncode == 0, done.stderr
        text = Path(tmp_path / name / "metrics.jsonl").read_text()
        logged = {metric for line in text.splitlines() for metric in json.loads(line)}
        logged = {re.sub(r"turn_\d", "turn_{t}", metric) for metric in logged}
        logged = {re.sub(r"agent_\d", "agent_{i}", metric) for metric in logged}
        logged = {re.sub(r"critic_\d", "critic_{c}", metric) for metric in logged}
        logged = {"eval/..." if metric.startswith("eval/") else metric for metric in logged}
        assert logged - {"env_step"} == listed
