"""A run that is killed, stopped or broken off and then resumed ends as if nothing had happened.

"As if" is to the bit: rows, answers, weights, optimisers, counters, models.

The rewards draw from the global generators of random, numpy and torch, and these are set to
something else before each start: a run must not depend on what it finds there.
"""

import copy
import errno
import functools
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac
import maac
from commands import run, run_together

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "tests" / "tiny_lm")
FILES = {"iac": iac, "maac": maac}
VARIANTS = ["iac-v", "iac-q-shared", "maac-q"]
SETTINGS = {
    "num_turns": 2,
    "early_termination_threshold": 0.65,  # some of the episodes end early
    "num_train_epochs": 2,
    "rollout_buffer_size": 4,
    "max_new_tokens": 2,
    "eval_interval": 2,
    "eval_num_samples": 2,
    "eval_batch_size": 2,
    "logging_steps": 4,  # more than the last update of an epoch may have
    "reference_kl_enabled": True,
    "checkpoint_interval": 1,
    "agent_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
}
ROWS = [{"prompt": f"sum to {n}", "n": n} for n in (3, 7, 1, 9, 5)]
EVAL_ROWS = [{"prompt": f"sum to {n}", "n": n} for n in (12, 15)]
STOPS = (signal.SIGINT, signal.SIGTERM)


class Task:
    """The functions of a user.

    `trouble` = (name, phase, number, action): what happens in the number-th call of one of them in
    "training" or "evaluation".
    """

    def __init__(self, *trouble):
        self.trouble, self.calls, self.phase = trouble, Counter(), None

    def called(self, name):
        self.calls[name, self.phase] += 1
        if self.trouble[:3] == (name, self.phase, self.calls[name, self.phase]):
            self.trouble[3]()

    def formatter(self, item):
        self.phase = "evaluation" if item["n"] > 9 else "training"
        self.called("formatter")
        return f"agent 1 of 2: {item['prompt']} ="

    def reward_func(self, a, b):
        self.called("reward_func")
        noise = random.random() + np.random.random() + torch.rand(()).item()
        return [sum(map(sum, map(str.encode, texts))) % 7 / 7 + noise / 9 for texts in zip(a, b)]  # noqa: B905

    def reward_processor(self, reward):
        self.called("reward_processor")
        return reward - 0.1

    def external_transition(self, prompt, agent_completions, **_):
        self.called("external_transition")
        return [f"{prompt}, said {text}" for text in agent_completions]

    def metrics_callback(self, samples):
        self.called("metrics_callback")
        return {"answers": len(samples)}


FUNCTIONS = ["formatter", "reward_func", "reward_processor", "external_transition"]
FUNCTIONS += ["metrics_callback"]
load = functools.cache(lambda auto_class: auto_class.from_pretrained(TINY))


def build(variant, folder=None, args=None, task=None, **given):
    """A trainer on five rows; its models are copies of those that were loaded first."""
    name, critic_type, *shared = variant.split("-")
    settings = SETTINGS | {"critic_type": critic_type}
    settings |= {"use_separate_critic": False} if shared else {}
    task, agent, critic = task or Task(), load(AutoModelForCausalLM), load(AutoModel)
    arguments = {function: getattr(task, function) for function in FUNCTIONS}
    arguments["formatters"] = arguments.pop("formatter")
    arguments |= {"agents": [copy.deepcopy(agent) for _ in (0, 1)]}
    if not shared:
        count = 2 if name == "iac" else 1
        arguments["critics"] = [copy.deepcopy(critic) for _ in range(count)]
    arguments |= {"tokenizer": load(AutoTokenizer), "output_dir": folder and str(folder)}
    arguments |= {"train_dataset": ROWS, "eval_dataset": EVAL_ROWS}
    arguments["args"] = FILES[name].Config(**settings | (args or {}))
    trainer = FILES[name].Trainer(**arguments | given)
    trainer.task = task
    return trainer


def train(trainer, resume_from=None):
    """Whatever the global generators hold."""
    seed = time.time_ns()
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
    trainer.train(resume_from and str(resume_from))
    return trainer


def break_off(trainer, error, resume_from=None):
    """A run of the trainer that ends in the error."""
    with pytest.raises(error):
        train(trainer, resume_from)
    trainer.task.trouble = ()
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(variant) -> the folder of a run that nothing stopped."""

    @functools.cache
    def folder(variant):
        path = tmp_path_factory.mktemp("whole") / variant
        train(build(variant, path))
        return path

    return folder


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def without_time(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


def state(folder):
    """The checkpoint in a folder, but for the settings that may change on the way."""
    found = torch.load(Path(folder) / "checkpoint" / "state.pt", weights_only=True)
    for name in ("num_train_epochs", "checkpoint_interval"):
        del found["settings"][name]
    return found


def same(one, other):
    """Equal to the bit, whatever it is."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def files(folder):
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_same_end(folder, whole):
    """Rows, answers, weights, optimisers, counters and models are those of the whole run."""
    assert without_time(folder) == without_time(whole)
    assert rows(folder, "completions.jsonl") == rows(whole, "completions.jsonl")
    one, other = state(folder), state(whole)
    assert [name for name in other if not same(one[name], other[name])] == []
    models = files(Path(whole) / "model")
    assert len(models) > 6 and files(Path(folder) / "model") == models
    assert not list(Path(folder).rglob("*.new"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_run_that_the_others_are_compared_with(variant, whole):
    """It has turns, epochs, early ends, buffers that are not full, and each evaluation once."""
    logged, answers = rows(whole(variant)), rows(whole(variant), "completions.jsonl")
    steps = [row["env_step"] for row in logged]
    assert steps == sorted(set(steps)) and steps[0] == 0
    evaluated = [row["env_step"] for row in logged if "eval/turn_1/reward_mean" in row]
    assert evaluated == sorted({row["env_step"] for row in answers}) and len(evaluated) > 3
    places = [tuple(row[k] for k in ("env_step", "row", "turn", "agent")) for row in answers]
    assert len(set(places)) == len(places) and {place[2] for place in places} == {1, 2}
    trained = [row for row in logged if "agent_0/policy_loss" in row]
    assert len(trained) < state(whole(variant))["counts"]["updates"]  # some rows are of two updates
    turns = [row["answers"] / 2 for row in trained]
    assert min(turns) < 2 and max(turns) > 1  # turns of an item
    assert sum("turn_2/reward_mean" in row for row in trained) > 2


# ------------------------------------------------------------------------------------------- kills


def play(variant, folder, kill_at=None):
    """What a user's script does: train in a folder or, if there is one, go on in it.

    SIGKILL comes as the program reaches a line of its file (kill_at[0]) for the kill_at[1]-th time.
    Prints how often each line was reached.
    """
    trainer, seen = build(variant, folder), Counter()
    path = sys.modules[type(trainer).__module__].__file__

    def trace_lines(frame, event, _):
        if event == "line":
            seen[frame.f_lineno] += 1
            if kill_at == [frame.f_lineno, seen[frame.f_lineno]]:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace_lines

    sys.settrace(lambda frame, *_: trace_lines if frame.f_code.co_filename == path else None)
    begun = os.path.exists(os.path.join(folder, "config.json"))
    train(trainer, folder if begun else None)
    sys.settrace(None)
    print(json.dumps(seen))


def fork(do, *arguments):
    """`do(*arguments)` of this file in a process of its own."""
    names = json.dumps([do, *map(str, arguments[:2]), *arguments[2:]])
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import test_saving_and_resuming as tests
do, *arguments = json.loads(sys.argv[1])
getattr(tests, do)(*arguments)
"""
    return run("-c", code, names)


@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_killed_at_random_lines_end_as_if_nothing_had_happened(variant, whole, tmp_path):
    """Any line of the program is as likely as any other, at any of the times that it is reached."""
    ended = fork("play", variant, tmp_path / "whole")
    assert ended.returncode == 0, ended.stderr
    reached = json.loads(ended.stdout.splitlines()[-1])
    assert_same_end(tmp_path / "whole", whole(variant))  # in another process
    rng, kills, resumed = random.Random(variant), 0, 0
    lines = rng.sample(sorted(reached), 4)
    while lines:
        folder = tmp_path / "run"
        while True:
            line = lines.pop() if lines else None
            number = line and rng.randint(1, reached[line])
            ended = fork("play", variant, folder, [int(line), number] if line else None)
            if ended.returncode != -signal.SIGKILL:
                break
            kills, resumed = kills + 1, resumed + (folder / "checkpoint").exists()
            if not (folder / "config.json").exists():
                shutil.rmtree(folder, ignore_errors=True)  # the folder was just being made
        assert ended.returncode == 0, ended.stderr
        assert_same_end(folder, whole(variant))
        shutil.rmtree(folder)
    assert kills >= 2 and resumed >= 1


def play_with_half_a_file(variant, folder, name):
    """Be killed as the third checkpoint, or a row of the file `name`, is half written."""
    if name == "state.pt":
        save, calls = torch.save, []

        def write_half(value, path):
            save(value, path)
            calls.append(path)
            if len(calls) == 3:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = write_half
        train(build(variant, folder))

    def write_half_a_row():
        with open(os.path.join(folder, name), "a") as file:
            file.write('{"env_step": 1, "eval/tu')
        os.kill(os.getpid(), signal.SIGKILL)

    train(build(variant, folder, task=Task("reward_func", "training", 9, write_half_a_row)))


@pytest.mark.parametrize(
    ("name", "variant"),
    [("state.pt", "iac-v"), ("metrics.jsonl", "maac-q"), ("completions.jsonl", "iac-q-shared")],
)
def test_half_a_file_is_not_gone_on_from(name, variant, whole, tmp_path):
    folder = tmp_path / "run"
    assert fork("play_with_half_a_file", variant, folder, name).returncode == -signal.SIGKILL
    assert state(folder)["counts"]["updates"] > 1  # the checkpoint before is whole
    train(build(variant), folder)
    assert_same_end(folder, whole(variant))


# ------------------------------------------------------------------------------ Ctrl-C and SIGTERM


def press(number):
    return lambda: os.kill(os.getpid(), number)


def at_step(trainer, number, action, optimizer=0):
    """Act before the number-th step of an agent's optimiser."""
    calls = []
    trainer.agent_optimizers[optimizer].register_step_pre_hook(
        lambda *_: calls.append(1) or (action() if len(calls) == number else None)
    )


@pytest.mark.parametrize(
    ("moment", "variant", "number"),
    [
        ("training", "iac-v", signal.SIGINT),
        ("training", "maac-q", signal.SIGTERM),
        ("evaluation", "iac-q-shared", signal.SIGTERM),
        ("update", "maac-q", signal.SIGINT),
        ("checkpoint", "iac-v", signal.SIGTERM),
    ],
)
def test_the_first_signal_stops_the_run_after_the_update(moment, variant, number, whole, tmp_path, monkeypatch, capsys):
    folder, handlers = tmp_path / "run", [signal.getsignal(s) for s in STOPS]
    trouble = ("reward_func", moment, 5, press(number))
    interval = {"checkpoint_interval": int(moment == "checkpoint")}
    trainer = build(variant, folder, interval, Task(*trouble))
    if moment == "update":
        at_step(trainer, 3, press(number))
    save = torch.save
    if moment == "checkpoint":
        monkeypatch.setattr(torch, "save", lambda *x: (press(number)(), save(*x)))
    break_off(trainer, KeyboardInterrupt)
    assert [signal.getsignal(s) for s in STOPS] == handlers
    assert f"--resume {folder} goes on from its last checkpoint" in capsys.readouterr().out
    assert len(trainer.buffer) == 0 and not (folder / "model").exists()
    left, whole_counts = state(folder), state(whole(variant))["counts"]
    assert 0 < left["counts"]["updates"] == trainer.counts.updates < whole_counts["updates"]
    weights = [x.state_dict() for x in (*trainer.agents, *trainer.critics)]
    assert same(left["weights"], weights)  # those after the update
    monkeypatch.setattr(torch, "save", save)
    train(build(variant), folder)
    assert_same_end(folder, whole(variant))


@pytest.mark.parametrize(
    ("moment", "variant", "number"),
    [
        ("training", "maac-q", signal.SIGINT),
        ("evaluation", "iac-v", signal.SIGTERM),
        ("update", "iac-q-shared", signal.SIGINT),
        ("checkpoint", "maac-q", signal.SIGTERM),
    ],
)
def test_the_second_signal_stops_the_run_at_once(moment, variant, number, whole, tmp_path, monkeypatch):
    """Where weights are only read their checkpoint is left, else the one before."""
    folder, reached = tmp_path / "run", []

    def press_twice():
        press(number)(), press(number)()
        reached.append("what comes after")

    interval = {"checkpoint_interval": int(moment in ("update", "checkpoint"))}
    trainer = build(variant, folder, interval, Task("reward_func", moment, 9, press_twice))
    if moment == "update":
        at_step(trainer, 5, press_twice, 1)
    save, saves = torch.save, []

    def press_while_saving(value, path):
        Path(path).write_bytes(b"half of it")
        saves.append(path)
        if len(saves) == 3:
            press_twice()
        save(value, path)

    if moment == "checkpoint":
        monkeypatch.setattr(torch, "save", press_while_saving)
    break_off(trainer, KeyboardInterrupt)
    assert reached == []
    assert state(folder)["counts"]["updates"] == trainer.counts.updates - (moment == "checkpoint")
    monkeypatch.setattr(torch, "save", save)
    train(build(variant), folder)
    assert_same_end(folder, whole(variant))


# ----------------------------------------------------------------------- errors in user's functions


class OfTheUsersOwn(Exception):
    """An error that the program knows nothing of."""


def fail():
    raise OfTheUsersOwn


@pytest.mark.parametrize("phase", ["training", "evaluation"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_error_in_a_users_function_leaves_a_checkpoint_of_the_last_update(function, phase, whole, tmp_path, capsys):
    """Nothing else does here; once it is mended, the run ends as if nothing had happened."""
    variant = VARIANTS[(FUNCTIONS.index(function) + len(phase)) % 3]
    folder, number = (
        tmp_path / "run",
        {"formatter": 11, "external_transition": 3, "reward_processor": 12},
    )
    number = number.get(function, 5)
    task = Task(function, phase, number, fail)
    trainer = break_off(build(variant, folder, {"checkpoint_interval": 0}, task), OfTheUsersOwn)
    assert f"--resume {folder} goes on from its last checkpoint" in capsys.readouterr().out
    left = state(folder)
    assert left["counts"]["updates"] == trainer.counts.updates > 0
    weights = [x.state_dict() for x in (*trainer.agents, *trainer.critics)]
    assert same(left["weights"], weights)  # none has moved since
    train(build(variant), folder)
    assert_same_end(folder, whole(variant))


@pytest.mark.parametrize(("variant", "kind"), [("iac-v", SystemExit), ("maac-q", MemoryError)])
def test_whatever_a_user_raises_is_what_comes_out(variant, kind, tmp_path):
    error = kind("of the user's own")

    def fail_so():
        raise error

    trainer = build(variant, tmp_path / "run", task=Task("reward_func", "training", 6, fail_so))
    with pytest.raises(kind) as caught:
        train(trainer)
    assert caught.value is error and state(tmp_path / "run")["counts"]["updates"] > 0


class Stream:
    """A dataset without a length that cannot be read at some place at first."""

    fails = True

    def __iter__(self):
        for row, item in enumerate(ROWS):
            if row == 4 and self.fails:
                raise OfTheUsersOwn
            yield item


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_an_error_of_the_dataset_leaves_a_checkpoint_of_the_last_update(variant, whole, tmp_path):
    folder, stream = tmp_path / "run", Stream()
    trainer = build(variant, folder, {"checkpoint_interval": 0}, train_dataset=stream)
    break_off(trainer, OfTheUsersOwn)
    assert state(folder)["counts"]["updates"] == trainer.counts.updates > 0
    stream.fails = False
    train(build(variant, train_dataset=stream), folder)
    assert without_time(folder) == without_time(whole(variant))
    assert same(state(folder)["weights"], state(whole(variant))["weights"])


BAD_ROWS = {
    "no n": ({"prompt": "sum to 5"}, r"row 4, turn 1, agent 0: .*'n'"),
    "None": (None, r"row 4, turn 1: .*must be a dict, got None"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_bad_row_costs_nothing_that_came_before(variant, case, tmp_path):
    """It is named when it comes, before a step is taken on what was answered with it."""
    folder, (bad, message) = tmp_path / "run", BAD_ROWS[case]
    given = {"train_dataset": [*ROWS[:4], bad]}
    trainer = build(variant, folder, {"checkpoint_interval": 0}, **given)
    with pytest.raises(ValueError, match=message):
        train(trainer)
    weights = [x.state_dict() for x in (*trainer.agents, *trainer.critics)]
    left = state(folder)
    assert left["counts"]["row"] <= 4 and left["counts"]["updates"] > 0
    assert same(left["weights"], weights)


@pytest.mark.parametrize(
    ("variant", "agent", "interval"),
    [("iac-v", 1, 2), ("iac-q-shared", 0, 1), ("maac-q", 1, 1), ("maac-q", 0, 0)],
)
def test_an_error_within_an_update_leaves_the_checkpoint_before(variant, agent, interval, whole, tmp_path):
    """Half an update is nothing to go on from; the same trainer goes on as well as a new one."""
    folder, kept = tmp_path / "run", []
    trainer = build(variant, folder, {"checkpoint_interval": interval})
    at_step(trainer, 6, lambda: kept.append(files(folder / "checkpoint")) or fail(), agent)
    break_off(trainer, OfTheUsersOwn)
    assert [files(folder / "checkpoint")] == kept and bool(kept[0]) == bool(interval)
    if interval:
        assert state(folder)["counts"]["updates"] <= trainer.counts.updates
        train(trainer, folder)
    else:
        with pytest.raises(ValueError, match=f"{folder} has no checkpoint: begin again"):
            train(trainer, folder)
        train(build(variant), folder)
    assert_same_end(folder, whole(variant))


# --------------------------------------------------------------------------- other ways to resume


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_trainer_can_go_on_after_an_error(variant, whole, tmp_path):
    """As in a notebook: mend what was wrong, and call train(resume_from=...) again."""
    trainer = build(variant, tmp_path / "run", task=Task("metrics_callback", "training", 5, fail))
    break_off(trainer, OfTheUsersOwn)
    trainer.task.trouble = (
        "reward_func",
        "evaluation",
        trainer.task.calls["reward_func", "evaluation"] + 4,
        fail,
    )
    break_off(trainer, OfTheUsersOwn, tmp_path / "run")
    train(trainer, tmp_path / "run")
    assert_same_end(tmp_path / "run", whole(variant))


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_run_broken_off_in_its_first_rollout_begins_again(variant, whole, tmp_path):
    """There is no checkpoint yet, only the folder: it is the folder of a run all the same."""
    for phase in ("evaluation", "training"):
        folder = tmp_path / phase
        trainer = build(variant, folder, task=Task("reward_func", phase, 1, fail))
        break_off(trainer, OfTheUsersOwn)
        assert not (folder / "checkpoint").exists()
        train(build(variant), folder)
        assert_same_end(folder, whole(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_a_finished_run_changes_nothing(variant, whole, tmp_path):
    shutil.copytree(whole(variant), tmp_path / "run")
    train(build(variant), tmp_path / "run")
    assert_same_end(tmp_path / "run", whole(variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("phase", ["training", "evaluation"])
def test_a_bare_checkpoint_goes_on_in_a_new_folder(variant, phase, whole, tmp_path):
    """It may be saved at any moment. The rows of the new folder are those that come after it."""
    elsewhere, new = tmp_path / "elsewhere", tmp_path / "new"

    def save():
        trainer.save_checkpoint(str(elsewhere))

    trainer = build(variant, tmp_path / "first", task=Task("reward_func", phase, 9, save))
    train(trainer)
    assert_same_end(tmp_path / "first", whole(variant))  # saving disturbs nothing
    before = files(elsewhere)
    task = Task("reward_func", "training", 4, fail)  # and the new run is resumed as any other
    break_off(build(variant, new, task=task), OfTheUsersOwn, elsewhere)
    train(build(variant), new)
    expected = without_time(whole(variant))
    assert 0 < len(rows(new)) < len(expected) and without_time(new) == expected[-len(rows(new)) :]
    answers = rows(whole(variant), "completions.jsonl")
    kept = [row for row in answers if row["env_step"] >= rows(new)[0]["env_step"]]
    assert rows(new, "completions.jsonl") == kept
    assert same(state(new), state(whole(variant))) and files(elsewhere) == before


def go_on_and_be_killed(variant, folder, checkpoint):
    """Be killed in the first rollout that comes after a bare checkpoint."""
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    trainer = build(variant, folder, task=Task("reward_func", "training", 1, kill))
    train(trainer, checkpoint)


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_run_from_a_bare_checkpoint_never_falls_back_behind_it(variant, whole, tmp_path):
    """Also where it is killed before it has written a checkpoint of its own."""
    elsewhere, new = str(tmp_path / "elsewhere"), tmp_path / "new"
    trainer = build(variant, tmp_path / "first")
    save = functools.partial(trainer.save_checkpoint, elsewhere)
    trainer.task.trouble = ("reward_func", "training", 9, save)
    train(trainer)
    ended = fork("go_on_and_be_killed", variant, new, elsewhere)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    try:
        train(build(variant), new)
    except ValueError as error:  # or else it is refused
        assert str(new) in str(error)
    else:
        expected = without_time(whole(variant))
        assert without_time(new) == expected[-len(rows(new)) :] and len(rows(new)) < len(expected)
        assert same(state(new), state(whole(variant)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_for_more_epochs(variant, whole, tmp_path):
    """Its last evaluation may be one that a longer run would not make; all else is the same."""
    folder = tmp_path / "run"
    train(build(variant, folder, {"num_train_epochs": 1, "checkpoint_interval": 0}))
    train(build(variant), folder)
    for settings in (json.loads((folder / "config.json").read_text()),):
        assert (settings["num_train_epochs"], settings["checkpoint_interval"]) == (2, 1)
    left, expected = state(folder), state(whole(variant))
    assert same(left["weights"], expected["weights"])
    assert same(left["optimizers"], expected["optimizers"])
    steps = [row["env_step"] for row in rows(folder)]
    assert steps == sorted(set(steps)) and steps[-1] == rows(whole(variant))[-1]["env_step"]
    with pytest.raises(ValueError, match=r"num_train_epochs=1: .* has done 2 already"):
        train(build(variant, args={"num_train_epochs": 1}), folder)


OTHERS = {
    "seed": 2,
    "agent_learning_rate": 5e-4,
    "max_new_tokens": 3,
    "reference_kl_coef": 0.2,
    "rollout_buffer_size": 3,
}
DATASETS = {
    "a row more": [*ROWS, {"prompt": "sum to 2", "n": 2}],
    "a row less": ROWS[:-1],
    "another order": ROWS[::-1],
    "another item": [*ROWS[:2], {"prompt": "sum to 2", "n": 2}, *ROWS[3:]],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_another_setting_and_another_dataset_are_refused_by_name(variant, whole, tmp_path):
    folder = whole(variant)
    before = files(folder)
    trainers = {name: build(variant, args={name: value}) for name, value in OTHERS.items()}
    for kind, dataset in DATASETS.items():
        trainers[f"train_dataset, {kind}"] = build(variant, train_dataset=dataset)
    for name, trainer in trainers.items():
        weights = copy.deepcopy([agent.state_dict() for agent in trainer.agents])
        for place in (folder, folder / "checkpoint"):
            trainer.output_dir = str(tmp_path / "new")
            with pytest.raises(ValueError, match=f"{place}.* {name.split(',')[0]}="):
                train(trainer, place)
        assert same(weights, [agent.state_dict() for agent in trainer.agents])
    assert files(folder) == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("own", "other"), [("iac-v", "maac-q"), ("maac-q", "iac-v")])
def test_a_run_of_the_other_algorithm_is_refused_and_left_as_it_is(own, other, whole, tmp_path):
    """Also before its first checkpoint, when there are only rows to lose."""
    for early in (False, True):
        folder = tmp_path / f"early {early}"
        shutil.copytree(whole(own), folder)
        if early:
            shutil.rmtree(folder / "checkpoint")
        before = files(folder)
        with pytest.raises(ValueError, match=f"{folder} is not the folder of a run of"):
            train(build(other), folder)
        assert files(folder) == before
    with pytest.raises(ValueError, match=r"algorithm="):
        train(build(other, tmp_path / "new"), whole(own) / "checkpoint")


NO_RUNS = {
    "nothing": None,
    "an empty folder": {},
    "a model": {"config.json": Path(TINY, "config.json").read_text()},
    "settings of somebody else": {"config.json": '{"seed": "abc", "lr": 0.1}', "metrics.jsonl": ""},
    "a list": {"config.json": '["algorithm"]'},
    "a number": {"config.json": "3"},
    "no JSON": {"config.json": "seed = 3\n"},
}


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_folder_that_holds_no_run_is_refused_and_left_as_it_is(variant, tmp_path):
    for case, content in NO_RUNS.items():
        folder = tmp_path / case
        for name, text in (content or {}).items():
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        before = files(tmp_path)
        with pytest.raises(ValueError, match=f"{folder} is not the folder of a run"):
            train(build(variant), folder)
        assert files(tmp_path) == before and folder.exists() == bool(content)


def cut(path):
    path.write_text(path.read_text()[:-9])


def cut_line_breaks(path):
    path.write_text(path.read_text()[:-1])


@pytest.mark.parametrize("damage", [cut, cut_line_breaks, Path.unlink])
@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_rows_with_a_torn_or_missing_end_are_gone_on_with(variant, damage, whole, tmp_path):
    """What is no whole line is dropped; what follows stands in lines of its own."""
    folder = tmp_path / "run"
    trainer = build(variant, folder, task=Task("reward_func", "training", 9, fail))
    break_off(trainer, OfTheUsersOwn)
    for name in ("metrics.jsonl", "completions.jsonl"):
        damage(folder / name)
    train(build(variant), folder)
    for name in ("metrics.jsonl", "completions.jsonl"):
        steps = [(row["env_step"], row.get("row"), row.get("turn"), row.get("agent")) for row in rows(folder, name)]
        assert len(set(steps)) == len(steps) > 0 and [s[0] for s in steps] == sorted(s[0] for s in steps)
    assert without_time(folder)[-1] == without_time(whole(variant))[-1]
    assert same(state(folder)["weights"], state(whole(variant))["weights"])


def test_a_dataset_that_is_used_up_does_not_silently_end_a_run_that_goes_on(tmp_path):
    task = Task("reward_func", "training", 5, fail)
    given = {"train_dataset": iter(ROWS), "args": {"num_train_epochs": 1}}
    trainer = break_off(build("iac-v", tmp_path / "run", task=task, **given), OfTheUsersOwn)
    with pytest.raises(ValueError, match="train_dataset has no rows"):
        train(trainer, tmp_path / "run")


# ------------------------------------------------------------------------------ folders and disks


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_folder_that_holds_files_is_refused(variant, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    train(build(variant, folder, {"num_train_epochs": 1}))  # an empty one is not
    before = files(folder)
    trainer = build(variant, folder)
    for again in (trainer, build(variant, folder)):
        with pytest.raises(ValueError, match=r"output_dir=.*holds files: name a new folder"):
            train(again)
    assert trainer.task.calls == {} and files(folder) == before


RUN = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import test_saving_and_resuming as tests
trainer = tests.build({variant!r})
tests.train(trainer)
print(trainer.output_dir)
"""


def test_runs_that_start_at_the_same_moment_have_folders_of_their_own(whole, tmp_path):
    codes = [RUN.format(tests=str(ROOT / "tests"), root=str(ROOT), variant=v) for v in ["iac-v"] * 3 + ["maac-q"]]
    ended = run_together(*[("-c", code) for code in codes], cwd=tmp_path)
    assert [process.returncode for process in ended] == [0] * 4, ended[0].stderr
    folders = [tmp_path / process.stdout.splitlines()[-1] for process in ended]
    assert len(set(folders)) == 4 and {f.parent for f in folders} == {tmp_path / "runs"}
    for folder, file in zip(folders, ["iac__v__1__"] * 3 + ["maac__q__1__"], strict=True):
        assert folder.name.startswith(file)
        assert_same_end(folder, whole("iac-v" if file[0] == "i" else "maac-q"))


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(variant, whole, tmp_path, monkeypatch):
    folder, save, saves = tmp_path / "run", torch.save, []

    def save_on_a_full_disk(value, path):
        save(value, path)
        saves.append(path)
        if len(saves) > 2:
            os.truncate(path, os.path.getsize(path) // 2)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save_on_a_full_disk)
    break_off(build(variant, folder), OSError)
    assert state(folder)["counts"]["updates"] == 2
    monkeypatch.setattr(torch, "save", save)
    train(build(variant), folder)
    assert_same_end(folder, whole(variant))


def play_as_nobody(variant, folder):
    task = Task("formatter", "evaluation", 1, lambda: print("something was asked"))
    trainer = build(variant, folder, task=task)
    if os.getuid() == 0:
        os.setgid(65534), os.setuid(65534)
    train(trainer)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start():
    with tempfile.TemporaryDirectory() as place:  # where nobody may enter, unlike tmp_path
        os.chmod(place, 0o755)
        file, closed = Path(place) / "file", Path(place) / "closed"
        file.write_text("a file")
        closed.mkdir(mode=0o555)
        for folder in (file, file / "run", closed, closed / "run"):
            ended = fork("play_as_nobody", "maac-q", folder)
            errors = re.findall(r"^\w*Error: .*$", ended.stderr, re.M)
            assert ended.returncode == 1 and any(str(folder) in error for error in errors)
            assert "something was asked" not in ended.stdout
        assert file.read_text() == "a file" and os.listdir(closed) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_saving_models_removes_nothing_of_others(variant, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    trainer = build(variant)
    trainer.save_model(str(tmp_path))
    saved = files(tmp_path)
    trainer.save_model(str(tmp_path))  # over itself
    assert files(tmp_path) == saved and saved["thesis.tex"] == b"all of it"
    heads = {path.split("/")[0] for path in saved if path.endswith("value_head.safetensors")}
    places = {"iac-v": {"critic_0", "critic_1"}, "maac-q": {"critic_0"}}
    assert heads == places.get(variant, {"agent_0", "agent_1"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_heads_are_float32_whatever_the_default_type(variant, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        trainer = build(variant, tmp_path / "run", {"num_train_epochs": 1})
        train(trainer)
    finally:
        torch.set_default_dtype(torch.float32)
    heads = [p for critic in trainer.critics for p in critic.value_head.parameters()]
    assert {p.dtype for p in heads} == {torch.float32} and any(p.any() for p in heads)


# ---------------------------------------------------------------------------------------- long runs


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_nothing_piles_up_over_40_updates(variant, tmp_path):
    """Tensors and objects that live after an update are as many as after those before."""
    settings = {"num_turns": 1, "max_new_tokens": 1, "num_train_epochs": 40}
    settings |= {"eval_interval": 8, "checkpoint_interval": 8, "logging_steps": 1}
    counted = []

    def count(samples):
        if samples[0].item["n"] < 10 and len(counted) < trainer.counts.updates // 8:
            gc.collect()
            alive = gc.get_objects()
            counted.append((sum(issubclass(type(x), torch.Tensor) for x in alive), len(alive)))
        return {"mine": len(samples)}

    given = {"train_dataset": ROWS[:1], "metrics_callback": count}
    trainer = build(variant, tmp_path / "run", settings, **given)
    train(trainer)
    tensors, objects = zip(*counted[1:], strict=True)
    assert len(tensors) >= 3 and len(set(tensors)) == 1
    assert max(objects) < min(objects) + 200
