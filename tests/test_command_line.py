"""The real commands, on tiny_lm, in processes of their own."""

import json
import re
import shutil
import signal
import sys
from dataclasses import fields
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

import iac
import maac
from commands import ENV, run, run_together
from conftest import ROOT

FILES = {"iac.py": iac, "maac.py": maac}
TINY = str(ROOT / "tests" / "tiny_lm")

TASK = """
import os, signal
import {file}
globals().update({file}.number_task(int(os.environ.get("AGENTS", 2)), 0))
train_dataset, eval_dataset = train_dataset[:{rows}], eval_dataset[:4]
{more}
"""
STOPPING = """
calls, reward = [], reward_func
def reward_func(*completions, batch_items):
    calls.append(1)
    for number in os.environ.get("PRESS", "").split():
        if len(calls) == 20:
            os.kill(os.getpid(), int(number))
    return reward(*completions, batch_items=batch_items)
"""
QUICK = ["--num-train-epochs", 1, "--eval-num-samples", 4, "--eval-interval", 8]
QUICK += ["--rollout-buffer-size", 5, "--logging-steps", 4]


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def without_time(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


def files(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def settings(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def write_task(folder, script="iac.py", count=12, more=""):
    """The number task with a few rows, as a task file."""
    path = Path(folder) / "task.py"
    path.write_text(TASK.format(file=script[:-3], rows=count, more=more))
    return path


def succeed(*command, env=None, **options):
    """`run` of a command that ends well; it may import the two files wherever it is."""
    done = run(*command, env=ENV | {"PYTHONPATH": str(ROOT)} | (env or {}), **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


# --------------------------------------------------------------------------------- what a run leaves


@pytest.mark.parametrize(
    "line",
    [
        "iac.py --critic-type q --num-turns 2 --early-termination-threshold 0.9",
        "iac.py --no-use-separate-critic --num-generations 4 --value-head-hidden-dim 8",
        "iac.py --num-agents 3 --micro-batch-size 5 --no-advantage-normalization --dtype bfloat16",
        "maac.py --critic-type q --num-turns 2 --reference-kl-enabled --discount 0.9",
        "maac.py --num-agents 1 --num-generations 2 --top-k 5 --top-p 0.9 --temperature 2",
    ],
)
def test_commands_run_and_leave_their_files(line, tmp_path):
    script, *flags = line.split()
    agents = int(flags[flags.index("--num-agents") + 1]) if "--num-agents" in flags else 2
    turns, folder = 1 + ("--num-turns" in flags), tmp_path / "run"
    task = ["--task", write_task(tmp_path, script), "--output-dir", folder]
    done = succeed(script, *QUICK, *flags, *task, env={"AGENTS": str(agents)})
    assert f"The trained models are in {folder}/model" in done.stdout
    config, metrics = settings(folder), rows(folder)
    assert config["algorithm"] == script[:-3] and config["num_agents"] == agents
    assert config["train_batch_size"] == 5 and config["critic_type"] == "vq"["q" in flags]
    steps = [row["env_step"] for row in metrics]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] >= 12
    for row in (metrics[0], metrics[-1]):
        assert (
            {f"eval/turn_{t + 1}/reward_mean" for t in range(turns)}
            >= {name for name in row if re.fullmatch(r"eval/turn_\d/reward_mean", name)}
            != set()
        )
    last = metrics[-1]
    assert all(isinstance(value, int | float) and value == value for value in last.values())
    critics = ["critic_0"] if script == "maac.py" else [f"critic_{i}" for i in range(agents)]
    for i in range(agents):
        assert f"agent_{i}/policy_loss" in last
        assert (f"agent_{i}/reference_kl" in last) == ("--reference-kl-enabled" in flags)
        home = folder / "model" / f"agent_{i}"
        _, info = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(home)("7").input_ids == [27]
    heads = sorted(path.parent.name for path in (folder / "model").glob("*/value_head.safetensors"))
    shared = "--no-use-separate-critic" in flags
    assert heads == ([f"agent_{i}" for i in range(agents)] if shared else critics)
    answers = rows(folder, "completions.jsonl")
    assert {row["env_step"] for row in answers} >= {0, steps[-1]}
    assert {row["agent"] for row in answers} == set(range(agents))
    assert (folder / "checkpoint" / "state.pt").exists()


def test_a_run_has_a_folder_in_runs_where_it_is_started(tmp_path):
    """A script of another folder; and models that a run left are models for the next."""
    write_task(tmp_path)
    for script, critic in (("iac.py", "v"), ("maac.py", "q")):
        flags = [*QUICK, "--task", "task.py", "--critic-type", critic, "--seed", 7]
        succeed(ROOT / script, *flags, cwd=tmp_path)
        (folder,) = (tmp_path / "runs").glob(f"{script[:-3]}__{critic}__7__*")
        model = folder / "model"
        given = ["--agents", model / "agent_0", model / "agent_1", "--task", "task.py"]
        given += ["--critic-model", model / "critic_0", "--critic-type", critic]
        again = tmp_path / f"again {script}"
        succeed(ROOT / script, *QUICK, *given, "--output-dir", again, cwd=tmp_path)
        first = rows(again)[1]
        assert first["critic_0/value_mean"] != 0  # the head came with the folder
        assert settings(again)["agents"] == [str(model / f"agent_{i}") for i in (0, 1)]


# ------------------------------------------------------------------------------------------- flags


def other_values(field, default):
    """Words for a flag and what they stand for, other than its default."""
    kinds = {kind for part in get_args(field.type) or (field.type,) for kind in (part, *get_args(part))}
    name = field.name
    if "Literal" in str(field.type):
        value = next(x for x in get_args(field.type) if x not in (default, None))
        return [value], value
    if kinds & {list} or "list" in str(field.type):
        return ["cpu", "cpu:0"], ["cpu", "cpu:0"]
    if field.type is bool:
        return None, not default
    if "int" in str(kinds):
        return ["3"], 3
    if "float" in str(kinds):
        return ["0.25"], 0.25
    assert "str" in str(kinds), name
    return ["some text"], "some text"


@pytest.mark.parametrize("script", FILES)
def test_every_flag_arrives_at_its_setting(script):
    """The words of a flag, its underscored form, and None where a setting may be left open."""
    file = FILES[script]
    for field in fields(file.Args):
        default = getattr(file.Args(), field.name)
        words, value = other_values(field, default)
        flag = field.name.replace("_", "-")
        start = f"--no-{flag}" if words is None and default else f"--{flag}"
        with_mp = [] if field.name != "parallel_training" else ["--agent-devices", "cpu"]
        with_mp += ["--critic-devices", "cpu"] if with_mp else []
        same = ["--agent-devices", "cpu", "--critic-devices", "cpu", "--parallel-training", "mp"]
        more = same if field.name.endswith("_devices") else with_mp
        for form in (start, start[:2] + start[2:].replace("-", "_")):
            args = tyro.cli(file.Args, args=[*more, form, *(words or [])])
            assert getattr(args, field.name) == value, form
        if NoneType in get_args(field.type) and field.name != "train_batch_size":
            args = tyro.cli(file.Args, args=[f"--{flag}", "None"])
            assert getattr(args, field.name) is None


@pytest.mark.parametrize("script", FILES)
def test_booleans_have_an_on_and_an_off_form_from_both_defaults(script):
    Args = FILES[script].Args
    booleans = [field.name for field in fields(Args) if field.type is bool]
    assert len(booleans) >= 5
    for name in booleans:
        flag = name.replace("_", "-")
        for default in (True, False):
            for form, value in ((f"--{flag}", True), (f"--no-{flag}", False)):
                args = tyro.cli(Args, args=[form], default=Args(**{name: default}))
                assert getattr(args, name) is value


MANY = """
--agents TINY TINY --agent-model TINY --num-agents 2 --num-turns 1 --critic-type q --num-train-epochs 2
--agent-learning-rate 1e-4 --critic-learning-rate 2e-4 --value-loss-coef 0.5
--no-advantage-normalization --discount 0.9 --early-termination-threshold 0.8
--reference-kl-enabled --reference-kl-coef 0.2 --max-grad-norm 0.5 --seed 11 --max-new-tokens 4
--temperature 0.7 --top-p 0.8 --top-k 9 --num-generations 2 --external-prompt-passthrough
--rollout-buffer-size 6 --train-batch-size 3 --micro-batch-size 2 --rollout-batch-size 2
--dtype bfloat16 --parallel-training mp --agent-devices cpu cpu --critic-devices cpu
--reference-devices cpu --eval-interval 5 --eval-num-samples 3 --eval-batch-size 2
--logging-steps 7 --checkpoint-interval 1 --task task.py --output-dir run --critic-model TINY
--critics TINY --track --wandb-project of-mine --wandb-entity me
--chat-template --chat-template-kwargs {"how":"briefly"}
"""
MANY_OF_IAC = "--critic-value-head-hidden-dim 8 --value-head-hidden-dim 9 --value-clip-range 0.3"
TEMPLATE = "{% for m in messages %}{{ m['role'] }} ({{ how or 'at length' }}): {{ m['content'] }}{% endfor %}"


@pytest.fixture
def chatty(tmp_path):
    """tiny_lm with a chat template that shows an argument of its own."""
    folder = shutil.copytree(TINY, tmp_path / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("script", FILES)
def test_a_run_uses_all_flags_at_once_and_config_json_shows_them(script, chatty, tmp_path):
    write_task(tmp_path, script, 6)
    flags = MANY.replace("TINY", chatty).split()
    if script == "iac.py":
        place = flags.index("--critics") + 1
        flags[place:place] = [chatty]
        flags += MANY_OF_IAC.split()
    succeed(ROOT / script, *flags, cwd=tmp_path)
    found = settings(tmp_path / "run")
    for name, value in parsed(flags).items():
        assert found[name] == value, name
    untried = {"resume", "use_separate_critic"}  # see below, and above
    tried = {name.lstrip("-").removeprefix("no-").replace("-", "_") for name in flags if "--" in name}
    known = {field.name for field in fields(FILES[script].Args)}
    later = {"lora_rank", "gradient_checkpointing"}  # have tests of their own
    assert known - untried - later <= tried
    (log,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert log.stem == f"run-{found['run_id']}" and b"of-mine" in log.read_bytes()
    state = rows(tmp_path / "run")
    assert state[-1]["env_step"] == 24 and "agent_1/reference_kl" in state[-1]


def parsed(flags):
    """Flags as the settings that they mean, read by hand."""
    found = {}
    for flag, words in re.findall(r"--(\S+)((?: (?!--)\S+)*)", " ".join(map(str, flags))):
        values = []
        for word in words.split():
            number = re.fullmatch(r"[\d.]+(e-\d+)?", word)
            values.append((float(word) if "." in word or "e" in word else int(word)) if number else word)
        lists = ("agents", "critics", "agent-devices", "critic-devices", "reference-devices")
        value = (values if flag in lists else values[0]) if values else not flag.startswith("no-")
        found[flag.removeprefix("no-").replace("-", "_")] = value
    return found


BAD = {
    "--temperature 0": "temperature",
    "--num-agents two": "num-agents",
    "--critic-type w": "critic-type",
    "--seed -1": "seed",
    "--num-turns 2 --num-generations 2": "num_generations=2",
    "--advantage-normalization True": "True",
    "--no-such-flag 3": "no-such-flag",
    "--eval-interval": "eval-interval",
}


def in_turn(cases):
    """Each case with one of the two files."""
    return zip([*FILES] * len(cases), cases)  # noqa: B905


def test_a_bad_value_is_named_in_a_box_and_nothing_is_begun(tmp_path):
    commands = [(ROOT / script, *flags.split()) for script, flags in in_turn(BAD)]
    for done, word in zip(run_together(*commands, cwd=tmp_path), BAD.values(), strict=True):
        shown = (done.stdout + done.stderr).replace("_", "-")
        assert done.returncode == 2 and "\u256d" in shown and "Traceback" not in shown, shown
        assert word.replace("_", "-") in shown
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "--task none.py": "task='none.py' is no file here",
    "--chat-template": "chat_template=True: the tokenizer of agents[0] has none",
    "--agent-model nowhere": "agents[0]='nowhere'",
    "--agent-devices gpu7": "agent_devices=['gpu7']",
    "--resume nowhere": "nowhere is not the folder of a run of",
    f"--agents {TINY}": "agents lists 1 models, 2 are needed (num_agents=2)",
    "--chat-template-kwargs {bad": "chat_template_kwargs",
    "--chat-template-kwargs 3": "chat_template_kwargs",
}


def test_what_does_not_fit_is_the_last_line_and_nothing_is_begun(tmp_path):
    commands = [(ROOT / script, *flags.split()) for script, flags in in_turn(REFUSED)]
    ended = run_together(*commands, cwd=tmp_path)
    for done, words in zip(ended, REFUSED.values(), strict=True):
        last = [line for line in done.stderr.splitlines() if line.startswith("ValueError: ")]
        assert done.returncode == 1 and len(last) == 1, (done.args, done.stderr)
        assert words in last[0], done.args
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------- help


def defaults_in(text):
    """{flag: default} of a page of help, in any of tyro's layouts."""
    entries = re.split(r"\u2502 +--", re.sub(r"\u2502\s*\n", "\n", text))[1:]
    found = {}
    for entry in entries:
        shown = re.search(r"\(default: (.*?)\)", entry)
        found[re.match("[a-z-]+", entry)[0]] = shown and shown[1]
    return found


@pytest.mark.parametrize("script", FILES)
def test_help_and_config_json_show_the_values_in_force(script, tmp_path):
    """For the demo with both critic types, for a model of one's own, and for a run to resume."""
    write_task(tmp_path, script, 2)
    env = ENV | {"COLUMNS": "400", "PYTHONPATH": str(ROOT)}
    given = {
        "demo": ["--critic-type", "v"],
        "demo q": ["--critic-type", "q"],
        "own": ["--agent-model", TINY],
        "resumed": ["--resume", "own"],
    }
    changed = ["--task", "task.py", "--num-train-epochs", 1]
    commands = [(ROOT / script, *flags, "--help") for flags in given.values()]
    pages = dict(zip(given, run_together(*commands, cwd=tmp_path, env=env), strict=True))
    assert pages["resumed"].returncode == 1  # there is none yet
    commands = [
        (ROOT / script, *flags, *changed, "--output-dir", name) for name, flags in given.items() if name != "resumed"
    ]
    for done in run_together(*commands, cwd=tmp_path, env=env):
        assert done.returncode == 0, done.stderr
    pages["resumed"] = run(ROOT / script, "--resume", "own", "--help", cwd=tmp_path, env=env)
    exempt = {"num_train_epochs", "task", "output_dir", "agent_model", "critic_model"}
    for name, page in pages.items():
        assert page.returncode == 0, page.stderr
        found, shown = settings(tmp_path / ("own" if name == "resumed" else name)), defaults_in(page.stdout)
        names = {field.name for field in fields(FILES[script].Args)}
        assert set(shown) == {x.replace("_", "-") for x in names} and names < set(found)
        for setting in names - exempt - ({"resume"} if name == "resumed" else set()):
            value = shown[setting.replace("_", "-")]
            if setting == "train_batch_size" and name != "resumed":  # derived
                assert value == "None" and found[setting] == found["rollout_buffer_size"]
            elif setting != "critic_type":
                assert value == str(found[setting]), (name, setting)
        assert found["agent_model"] == TINY and found["task"] == "task.py"
    demo, own = settings(tmp_path / "demo"), settings(tmp_path / "own")
    assert demo["max_new_tokens"] < own["max_new_tokens"] == 256
    assert demo["agent_learning_rate"] > own["agent_learning_rate"] == 5e-6
    assert settings(tmp_path / "demo q")["critic_learning_rate"] < demo["critic_learning_rate"]
    assert shown["task"] == "task.py" and shown["num-train-epochs"] == "1"
    for flag in shown:  # each has its line of help
        assert re.search(rf"--{re.escape(flag)}\b.*\n?.* [a-z\"]+ .*\(default", page.stdout), flag


# -------------------------------------------------------------------------------------------- tasks


def test_a_task_file_may_import_its_neighbours_and_fix_agents_and_turns(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "my_rewards.py").write_text("def half(*answers): return 0.5\n")
    (tmp_path / "tasks" / "mine.py").write_text(
        "from my_rewards import half as reward_func\n"
        "num_agents, num_turns = 3, 2\n"
        "train_dataset = [{'prompt': f'sum to {n}'} for n in range(4)]\n"
        "def external_transition(prompt, **_): return [prompt] * 3\n"
        "def metrics_callback(samples): return {'turns': len(samples) / 3}\n"
        "unrelated = 1\n"
    )
    for script in FILES:
        folder = tmp_path / script
        flags = ["--task", "tasks/mine.py", "--output-dir", folder, "--num-train-epochs", 1]
        done = succeed(ROOT / script, *flags, cwd=tmp_path)
        assert "tasks/mine.py defines" in done.stdout and "unrelated" not in done.stdout
        assert "There is no eval_dataset: nothing is evaluated." in done.stdout
        found, (row,) = settings(folder), rows(folder)
        assert (found["num_agents"], found["num_turns"]) == (3, 2)
        assert row["turns"] == 2 and row["turn_2/reward_mean"] == 0.5 and "agent_2/entropy" in row


def test_prompts_go_through_the_chat_template_with_its_arguments(chatty, tmp_path):
    """The task's prompts are texts, then chats, which need no flag."""
    task, lengths = tmp_path / "chats.py", {}
    for kind, prompt in (("text", "'sum to 7'"), ("chat", "[{'role': 'user', 'content': 'sum to 7'}]")):
        task.write_text(
            f"train_dataset = eval_dataset = [{{'prompt': {prompt}}}] * 2\n"
            "def reward_func(a, b): return len(a[0]) / 9\n"
            "def metrics_callback(samples): return {'tokens': len(samples[0].prompt_ids)}\n"
        )
        for number, how in enumerate(([], ["--chat-template-kwargs", '{"how": "briefly"}'])):
            folder = tmp_path / f"{kind} {number}"
            flags = ["--agent-model", chatty, "--task", task, "--output-dir", folder, *how]
            flags += ["--max-new-tokens", 2] + (["--chat-template"] if kind == "text" else [])
            succeed("iac.py", *flags)
            lengths[kind, number] = rows(folder)[0]["eval/tokens"]
    plain, argued = len("user (at length): sum to 7"), len("user (briefly): sum to 7")
    assert lengths == {(k, n): (plain, argued)[n] for k in ("text", "chat") for n in (0, 1)}
    assert rows(tmp_path / "chat 1", "completions.jsonl")[0]["prompt"] == "user (briefly): sum to 7"


# ----------------------------------------------------------------------------- stopping and resuming


@pytest.mark.parametrize(
    ("script", "signals"),
    [
        ("iac.py", [signal.SIGINT]),
        ("maac.py", [signal.SIGTERM]),
        ("maac.py", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_a_stopped_command_ends_with_code_130_and_is_resumed(script, signals, tmp_path):
    """It says how to go on, shows no traceback, and ends as the one that was not stopped.

    With W&B offline: it is the same run there, and the flags need not be given again.
    """
    task = write_task(tmp_path, script, more=STOPPING)
    flags = [*QUICK, "--task", task, "--num-turns", 2, "--critic-type", "q", "--output-dir"]
    press = {"PRESS": " ".join(str(int(number)) for number in signals), "PYTHONPATH": str(ROOT)}
    folder = tmp_path / "run"
    done = run(script, *flags, folder, "--track", env=ENV | press)
    shown = done.stdout + done.stderr
    assert done.returncode == 130 and f"--resume {folder} goes on from its last check" in shown, shown
    assert "Traceback" not in shown and "KeyboardInterrupt" not in shown
    assert ("Stopping after this update" in shown) and not (folder / "model").exists()
    succeed(script, "--resume", folder)
    assert len({path.name for path in folder.glob("wandb/offline-run-*/run-*.wandb")}) == 1
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
    succeed(script, *flags, tmp_path / "whole")
    assert without_time(folder) == without_time(tmp_path / "whole")
    assert files(folder / "model") == files(tmp_path / "whole" / "model")
    answers = [rows(x, "completions.jsonl") for x in (folder, tmp_path / "whole")]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("script", FILES)
def test_flags_given_with_resume_win_or_are_refused_by_name(script, tmp_path):
    write_task(tmp_path, script)
    shutil.copy(tmp_path / "task.py", tmp_path / "other.py")
    shutil.copytree(TINY, tmp_path / "model")
    flags = [*QUICK, "--task", "task.py", "--output-dir"]
    succeed(ROOT / script, *flags, "run", cwd=tmp_path)
    others = {"--seed": "7", "--discount": "0.25", "--agent-model": "model", "--critic-model": "model"}
    others |= {"--task": "other.py", "--critic-type": "q"}
    others = dict([*others.items()][[*FILES].index(script) :: 2])  # in turn
    before = files(tmp_path / "run")
    commands = [(ROOT / script, "--resume", "run", *pair) for pair in others.items()]
    commands.append((ROOT / {"iac.py": "maac.py", "maac.py": "iac.py"}[script], "--resume", "run"))
    env = ENV | {"PYTHONPATH": str(ROOT)}
    names = [flag.lstrip("-").replace("-", "_") + "=" for flag in others]
    ended = run_together(*commands, cwd=tmp_path, env=env)
    for done, name in zip(ended, [*names, "run is not the folder of a run of"], strict=True):
        assert done.returncode == 1 and name in done.stderr.splitlines()[-1], done.stderr
    assert files(tmp_path / "run") == before
    succeed(ROOT / script, "--resume", "run", "--num-train-epochs", 2, cwd=tmp_path)
    assert settings(tmp_path / "run")["num_train_epochs"] == 2
    succeed(ROOT / script, *flags, "whole", "--num-train-epochs", 2, cwd=tmp_path)
    assert files(tmp_path / "run" / "model") == files(tmp_path / "whole" / "model")
    assert rows(tmp_path / "run")[-1]["env_step"] == 24
    fewer = run(ROOT / script, "--resume", "run", "--num-train-epochs", 1, cwd=tmp_path, env=env)
    assert fewer.returncode == 1 and "num_train_epochs=1: " in fewer.stderr.splitlines()[-1]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lost = run(ROOT / script, "--resume", tmp_path / "run", cwd=elsewhere, env=env)
    assert lost.returncode == 1 and "task='task.py' is no file here" in lost.stderr


# ------------------------------------------------------------------------------------- in notebooks


@pytest.mark.parametrize("script", FILES)
def test_a_notebook_whose_output_is_no_file_can_run_the_command(script, tmp_path, monkeypatch):
    task = write_task(tmp_path, script, 4)
    flags = [*QUICK, "--task", task, "--output-dir", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    screen = StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    FILES[script].main()
    assert "The trained models are in" in screen.getvalue()
