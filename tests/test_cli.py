"""The real commands, on tiny_lm, in processes of their own."""

import ast
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from commands import ENV, run, run_alone, run_together
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import iac
import maac

QUICK = [
    "--num-train-epochs",
    "1",
    "--eval-num-samples",
    "8",
    "--eval-interval",
    "800",
    "--logging-steps",
    "100",
]


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def without_time(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


@pytest.fixture
def short_task(tmp_path):
    """The number task with 24 rows, as a task file."""
    path = tmp_path / "task.py"
    path.write_text(
        "import iac\n"
        "globals().update(iac.number_task(int(__import__('os').environ.get('AGENTS', 2)), 0))\n"
        "train_dataset, eval_dataset = train_dataset[:24], eval_dataset[:8]\n"
    )
    return path


@pytest.mark.parametrize(
    "line",
    [
        "iac.py",
        "iac.py --critic-type q --num-turns 2 --early-termination-threshold 0.9",
        "iac.py --no-use-separate-critic --reference-kl-enabled --num-generations 4 --value-head-hidden-dim 8",
        "iac.py --num-agents 1 --critic-type q",
        "iac.py --num-agents 3 --micro-batch-size 5 --no-advantage-normalization --dtype bfloat16",
        "maac.py",
        "maac.py --critic-type q --num-turns 2 --reference-kl-enabled --discount 0.9",
        "maac.py --num-agents 4 --num-generations 2 --top-k 5 --top-p 0.9 --temperature 2",
    ],
)
def test_commands_run_and_leave_their_files(line, tmp_path, short_task):
    script, *flags = line.split()
    agents = int(flags[flags.index("--num-agents") + 1]) if "--num-agents" in flags else 2
    folder, env = tmp_path / "run", {**ENV, "AGENTS": str(agents), "PYTHONPATH": str(ROOT)}
    result = run(
        script,
        *QUICK,
        *flags,
        "--task",
        short_task,
        "--rollout-buffer-size",
        10,
        "--output-dir",
        folder,
        env=env,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    config, metrics = json.loads((folder / "config.json").read_text()), rows(folder)
    assert config["train_batch_size"] == 10 and config["num_agents"] == agents
    steps = [row["env_step"] for row in metrics]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] >= 24
    assert "eval/turn_1/reward_mean" in metrics[0] and "eval/turn_1/reward_mean" in metrics[-1]
    last = metrics[-1]
    assert all(isinstance(value, int | float) and value == value for value in last.values())
    for i in range(agents):
        assert f"agent_{i}/policy_loss" in last and (f"agent_{i}/reference_kl" in last) == (
            "kl-enabled" in line
        )
        home = folder / "model" / f"agent_{i}"
        _, info = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(home)("7").input_ids == [27]
    heads = sorted(str(p.parent.name) for p in (folder / "model").glob("*/value_head.safetensors"))
    critics = ["critic_0"] if script == "maac.py" else [f"critic_{i}" for i in range(agents)]
    assert heads == ([f"agent_{i}" for i in range(agents)] if "separate" in line else critics)
    completions = rows(folder, "completions.jsonl")
    assert {c["env_step"] for c in completions} >= {0, steps[-1]} and {
        c["agent"] for c in completions
    } == set(range(agents))


@pytest.mark.parametrize("script", ["iac.py", "maac.py"])
def test_same_seed_same_metrics_and_evaluation_changes_nothing(script, tmp_path, short_task):
    def train(name, *flags, run=run):
        command = [
            script,
            *QUICK,
            "--task",
            short_task,
            "--rollout-buffer-size",
            10,
            "--logging-steps",
            1,
        ]
        result = run(
            *command, "--output-dir", tmp_path / name, *flags, env={**ENV, "PYTHONPATH": str(ROOT)}
        )
        assert result.returncode == 0, result.stderr[-2000:]
        return without_time(tmp_path / name)

    first, again, other = train("first"), train("again", run=run_alone), train("other", "--seed", 2)
    assert first == again and first[-1] != other[-1]
    without = train("without", "--eval-interval", 0)
    often = train("often", "--eval-interval", 3)
    for metrics in (first, often):
        training = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics]
        assert [row for row in training if len(row) > 1] == without
    assert (
        sum("eval/turn_1/reward_mean" in row for row in often) == 9
    )  # before, after every third of 24 rows
    assert not any(k.startswith("eval/") for row in without for k in row)


def test_identical_runs_at_the_same_moment_get_folders_of_their_own(tmp_path, short_task):
    command, env = [ROOT / "iac.py", *QUICK, "--task", short_task], {**ENV, "PYTHONPATH": str(ROOT)}
    runs = run_together(*[command] * 4, cwd=tmp_path, env=env)
    assert [process.returncode for process in runs] == [0] * 4
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 4 and all(
        (f / "model" / "agent_1" / "model.safetensors").exists() for f in folders
    )
    assert run("iac.py", "--task", short_task, "--output-dir", folders[0], env=env).returncode != 0


def test_help_shows_the_values_in_force():
    demo, real = (
        run("iac.py", "--help").stdout,
        run("iac.py", "--agent-model", "some/model", "--help").stdout,
    )
    assert (
        "default: 64" in demo
        and "default: 256" in real
        and "default: 0.0003" in demo
        and "default: 5e-06" in real
    )


@pytest.mark.parametrize("file", [iac, maac])
def test_booleans_have_an_on_and_an_off_form(file):
    import tyro

    for field in fields(file.Args):
        if field.type is bool:
            flag = field.name.replace("_", "-")
            for default in (True, False):
                for form, value in ((f"--{flag}", True), (f"--no-{flag}", False)):
                    args = tyro.cli(
                        file.Args, args=[form], default=file.Args(**{field.name: default})
                    )
                    assert getattr(args, field.name) is value
    result = run(f"{file.__name__}.py", "--advantage-normalization", "True")
    assert result.returncode == 2
    assert run(f"{file.__name__}.py", "--temperature", "0").returncode != 0


@pytest.mark.parametrize("file", [iac, maac])
def test_every_setting_is_read(file):
    tree = ast.parse(Path(file.__file__).read_text())
    config = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    )
    args_class = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"
    )
    declared = {id(node) for c in (config, args_class) for node in ast.walk(c)}
    used = set()
    for node in ast.walk(tree):
        if id(node) not in declared and isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif (
            id(node) not in declared
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
        ):
            used.add(node.value)
    unread = {field.name for field in fields(file.Args)} - used
    assert not unread


# --------------------------------------------------------------------------------------------------------- README


def readme_commands():
    text = (ROOT / "README.md").read_text() + iac.__doc__ + maac.__doc__
    return sorted(set(re.findall(r"^    (?:.*&& \S*)?(python (?:iac|maac)\.py.*)$", text, re.M)))


@pytest.mark.parametrize("command", readme_commands())
def test_commands_in_the_readme_and_docstrings_parse(command):
    import tyro

    _, script, *flags = shlex.split(re.split(r"\s{3,}", command)[0])
    if "--help" not in flags:
        args = tyro.cli({"iac.py": iac, "maac.py": maac}[script].Args, args=flags)
        assert args.num_agents == 2


def test_the_readme_task_runs_and_its_metrics_are_defined(tmp_path):
    text = (ROOT / "README.md").read_text()
    shorter = "train_dataset = train_dataset[:320]\n"
    (tmp_path / "my_task.py").write_text(
        re.search(r"```python\n(.*?)```", text, re.S).group(1) + shorter
    )
    flags = [*QUICK, "--reference-kl-enabled", "--task", tmp_path / "my_task.py"]
    result = run("maac.py", *flags, "--output-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr[-2000:]
    defined = text[text.index("| metric |") : text.index("## Settings")]
    for name in rows(tmp_path / "run")[-1]:
        name = re.sub(
            r"turn_\d",
            "turn_{t}",
            re.sub(r"agent_\d", "agent_{i}", re.sub(r"critic_\d", "critic_{c}", name)),
        )
        assert f"`{name}`" in defined or name.startswith("eval/"), name


def test_names_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    names = {field.name for field in fields(iac.Args)}
    settings = text[text.index("## Settings") : text.index("## I want to change")]
    for name in re.findall(r"`([a-z_]+)`", settings):
        assert name in names | {"bfloat16", "model_config"}, name
