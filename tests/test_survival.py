"""What a run survives: kills, full disks, Ctrl-C and errors of the user's; and that its memory does not creep.

Starting Python takes seconds, so a driver process imports everything once and forks a child for each run: that is a
process of its own, with an end of its own. The rewards draw from the global generators of random, numpy and torch.
"""

import copy
import errno
import functools
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ENV
from commands import run as run_command
from test_cli import rows, without_time
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac
import maac

HERE = Path(__file__).parent
TINY = str(HERE / "tiny_lm")
FILES = {"iac": iac, "maac": maac}
VARIANTS = ["iac-v", "iac-q-shared", "maac-q"]
KILLS = int(os.environ.get("SURVIVAL_KILLS", 7))  # of each variant, at random moments
SETTINGS = {
    "num_turns": 2,
    "num_train_epochs": 2,
    "rollout_buffer_size": 4,  # two rows of two turns: the last of three rows is an update of its own
    "max_new_tokens": 2,
    "eval_interval": 2,
    "eval_num_samples": 1,
    "reference_kl_enabled": True,
    "checkpoint_interval": 1,
    "agent_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
}


def value_of(*texts):
    """A number for a joint answer, and on top of it what the user's generators hold."""
    return (
        sum(sum(text.encode()) % 7 for text in texts) / 7
        + random.random()
        + np.random.random()
        + torch.rand(()).item()
    )


def seed_everything(seed):
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)


load = functools.cache(lambda auto_class: auto_class.from_pretrained(TINY))


def make(variant, output_dir=None, args=None, **given):
    """A trainer on three rows; its models are copies of those that were loaded first."""
    name, critic_type, *shared = variant.split("-")
    file = FILES[name]
    settings = (
        SETTINGS
        | {"critic_type": critic_type}
        | ({"use_separate_critic": False} if shared else {})
        | (args or {})
    )
    config = (iac.IACConfig if name == "iac" else maac.MAACConfig)(**settings)
    task = file.number_task(config.num_agents, 0)
    task |= {"train_dataset": task["train_dataset"][:3], "eval_dataset": task["eval_dataset"][:2]}
    task["reward_func"] = lambda a, b: [value_of(*texts) for texts in zip(a, b, strict=True)]
    if "agents" not in given:
        task["agents"] = [
            copy.deepcopy(load(AutoModelForCausalLM)) for _ in range(config.num_agents)
        ]
    if not shared and "critics" not in given:
        count = config.num_agents if name == "iac" else 1
        task["critics"] = [copy.deepcopy(load(AutoModel)) for _ in range(count)]
    task |= {"tokenizer": load(AutoTokenizer), "output_dir": output_dir and str(output_dir)}
    return (iac.IACTrainer if name == "iac" else maac.MAACTrainer)(
        **task | {"args": config} | given
    )


def start(trainer, folder):
    """What a user's script does: seed, then train in a folder or, if it was killed before, go on in it."""
    begun = os.path.isdir(folder) and os.listdir(folder)
    has_checkpoint = os.path.exists(os.path.join(folder, "checkpoint", "state.pt"))
    seed_everything(
        time.time_ns() if has_checkpoint else 5
    )  # the states come with the checkpoint, if there is one
    trainer.output_dir = None if begun else str(folder)
    trainer.train(str(folder) if begun else None)


def weights(trainer):
    return torch.cat(
        [p.detach().flatten() for m in [*trainer.agents, *trainer.critics] for p in m.parameters()]
    )


def state(folder):
    """The checkpoint in a folder, but for what two equal runs do not share."""
    found = torch.load(Path(folder) / "checkpoint" / "state.pt", weights_only=True)
    for name in ("output_dir", "resume", "track"):
        found["settings"].pop(name, None)  # the command's, which a trainer's settings lack
    return {name: value for name, value in found.items() if name not in ("run_id", "sizes")}


def same(one, other):
    """Equal to the bit, whatever it is."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same_end(folder, whole, settings=()):
    """Rows, completions, weights, optimisers and generators are those of the run that was never stopped.

    The one may have had other `settings`.
    """
    assert without_time(folder) == without_time(whole)
    assert completions(folder) == completions(whole)
    one, other = state(folder), state(whole)
    other["settings"] = other["settings"] | dict(settings)
    assert (
        one.keys() == other.keys()
        and [name for name in one if not same(one[name], other[name])] == []
    )
    files = sorted(
        path.relative_to(whole) for path in (Path(whole) / "model").rglob("*") if path.is_file()
    )
    assert files and all(
        (Path(folder) / path).read_bytes() == (Path(whole) / path).read_bytes() for path in files
    )


def completions(folder):
    """The evaluations' rows; a run without evaluation may have no file for them."""
    return (
        rows(folder, "completions.jsonl") if (Path(folder) / "completions.jsonl").exists() else []
    )


def contents(folder):
    return {
        str(path): path.is_file() and path.read_bytes() for path in sorted(Path(folder).rglob("*"))
    }


# ----------------------------------------------------------------------------------------------------- the driver

Ended = namedtuple(
    "Ended", "code text seconds"
)  # exit code, minus a signal's number; what was printed; how long


def drive():
    """The driver process. It never calls backward: autograd does not work in a child of a process that did."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread that could hold the lock at a fork
    tqdm.set_lock(
        threading.RLock()
    )  # its own is one for all processes: if one dies holding it, all wait
    trainer_of = functools.cache(make)
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in jobs:
        job = json.loads(line)
        given = job["given"]
        if "variant" in given:
            given["trainer"] = trainer_of(
                given.pop("variant")
            )  # the child's own copy, which comes with the fork
        began, pid = time.monotonic(), os.fork()
        if pid == 0:
            code = 1
            try:
                for fd in (1, 2):
                    os.dup2(os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
                globals()[job["do"]](**given)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        while (end := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if job["kill_after"] is not None and time.monotonic() - began > job["kill_after"]:
                os.kill(pid, signal.SIGKILL)
                end = os.waitpid(pid, 0)
                break
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(end[1])
        print(json.dumps([code, time.monotonic() - began]), file=answers, flush=True)


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """fork(function's name, kill_after=seconds, **its arguments) -> Ended; `variant` becomes a new `trainer`."""
    env = ENV | {"TOKENIZERS_PARALLELISM": "false"}
    command, pipe = (
        [sys.executable, "-c", "import test_survival; test_survival.drive()"],
        subprocess.PIPE,
    )
    driver = subprocess.Popen(command, cwd=HERE, env=env, stdin=pipe, stdout=pipe, text=True)
    log = tmp_path_factory.mktemp("logs") / "log"

    def run(do, kill_after=None, **given):
        log.write_text("")
        job = {"do": do, "kill_after": kill_after, "log": str(log), "given": given}
        print(json.dumps(job, default=str), file=driver.stdin, flush=True)
        code, seconds = json.loads(driver.stdout.readline())
        return Ended(code, log.read_text(), seconds)

    yield run
    driver.stdin.close()
    driver.wait()


@pytest.fixture(scope="module")
def whole(fork, tmp_path_factory):
    """whole(variant) -> folder of the run that nothing stopped, and the seconds that it took."""

    @functools.cache
    def run(variant):
        folder = tmp_path_factory.mktemp("whole") / variant
        ended = fork("play", variant=variant, folder=folder)
        assert ended.code == 0, ended.text
        return folder, ended.seconds

    return run


def play(trainer, folder, trouble=None, number=0):
    """Train, with trouble of that name at its `number`-th occasion."""
    if trouble:
        TROUBLES[trouble](trainer, number)
    start(trainer, folder)


# ---------------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_killed_at_random_moments_end_as_if_nothing_had_happened(
    variant, fork, whole, tmp_path
):
    """SIGKILL, resume, SIGKILL, resume, ...: first a run that is killed once, then runs killed again and again."""
    folder, seconds = whole(variant)
    rng, kills, begun, number = random.Random(variant), 0, 0, 0
    while kills < KILLS:
        number += 1
        run, limit, own = tmp_path / str(number), 1 if number == 1 else 30, 0
        while True:
            ended = fork("play", rng.uniform(0, seconds if own == 0 else seconds / 3) if own < limit else None,
                         variant=variant, folder=run)  # fmt: skip
            if ended.code != -signal.SIGKILL:
                break
            own, begun = own + 1, begun + run.exists()
        assert ended.code == 0, ended.text
        assert_same_end(run, folder)
        kills += own
        shutil.rmtree(run)
    assert begun > KILLS / 2  # the others came before there was a folder


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def at(number, owner, name, trouble, before=False):
    """Let the trouble come after (or before, or in) the number-th call of owner.name."""
    function, calls = getattr(owner, name), []

    def replaced(*args, **kwargs):
        calls.append(1)
        if before and len(calls) == number:
            return trouble(function, *args, **kwargs)
        result = function(*args, **kwargs)
        if len(calls) == number:
            trouble(*args, **kwargs)
        return result

    setattr(owner, name, replaced)


def half_a_file(function, value, path):
    function(value, path)
    os.truncate(path, os.path.getsize(path) // 2)


def half_a_row(name, row, trainer):
    with open(os.path.join(trainer.output_dir, name), "a") as file:
        file.write(json.dumps(row)[:20])
    die()


TROUBLES = {
    "in a rollout": lambda trainer, n: at(n, trainer, "appraise", die),
    "in an update": lambda trainer, n: at(n, trainer, "optimizer_step", die),
    "in an evaluation": lambda trainer, n: at(n, trainer, "evaluate", die, before=True),
    "after a row": lambda trainer, n: at(n, trainer, "write", die),
    "in a row": lambda trainer, n: at(
        n, trainer, "write", lambda write, name, row: half_a_row(name, row, trainer), before=True
    ),
    "in a checkpoint": lambda trainer, n: at(
        n, torch, "save", lambda *args: (half_a_file(*args), die()), before=True
    ),
    "before a checkpoint has its name": lambda trainer, n: at(
        n + 1, os, "replace", die, before=True
    ),  # 1: config.json
    "after a checkpoint has its name": lambda trainer, n: at(n + 1, os, "replace", die),
    "in a model": lambda trainer, n: at(n, trainer.agents[1], "save_pretrained", die),
    "before a model has its name": lambda trainer, n: at(n, os, "rename", die, before=True),
    "after a model has its name": lambda trainer, n: at(n, os, "rename", die),
}
MOMENTS = [
    ("in a rollout", 1),
    ("in a rollout", 6),
    ("in an update", 11),
    ("in an evaluation", 1),
    ("in a row", 1),
]
MOMENTS += [
    ("in an evaluation", 3),
    ("after a row", 4),
    ("in a row", 8),
    ("in a checkpoint", 3),
    ("in a model", 1),
]
MOMENTS += [("before a checkpoint has its name", 1), ("after a checkpoint has its name", 1)]
MOMENTS += [("before a model has its name", 1)]


@pytest.mark.parametrize(("moment", "number"), MOMENTS)
def test_a_run_killed_at_a_bad_moment_ends_as_if_nothing_had_happened(
    moment, number, fork, whole, tmp_path
):
    """And what stands under a final name is whole at that moment."""
    variant, run = VARIANTS[MOMENTS.index((moment, number)) % 3], tmp_path / "run"
    assert (
        fork("play", variant=variant, folder=run, trouble=moment, number=number).code
        == -signal.SIGKILL
    )
    assert json.loads((run / "config.json").read_text())["num_turns"] == 2
    if (run / "checkpoint" / "state.pt").exists():
        assert state(run)["items_done"] > 0
    if (run / "model").exists():
        names = [
            {str(path.relative_to(f)) for path in (f / "model").rglob("*")}
            for f in (run, whole(variant)[0])
        ]
        assert names[0] == names[1]
    ended = fork("play", variant=variant, folder=run)
    assert ended.code == 0, ended.text
    assert_same_end(run, whole(variant)[0])


def test_a_run_without_evaluation_that_is_killed_in_its_first_rollout_starts_again(fork, tmp_path):
    """There is no row and no checkpoint yet, only the folder: it is the folder of a run all the same."""
    for variant in ("iac-v", "maac-q"):
        run = tmp_path / variant
        given = {"variant": variant, "folder": run}
        assert (
            fork("play_without_evaluation", trouble="in a rollout", number=1, **given).code
            == -signal.SIGKILL
        )
        ended = fork("play_without_evaluation", **given)
        assert ended.code == 0, ended.text
        ended = fork(
            "play_without_evaluation", variant=variant, folder=tmp_path / f"{variant}-whole"
        )
        assert_same_end(run, tmp_path / f"{variant}-whole")


def play_without_evaluation(trainer, folder, **trouble):
    trainer.args.eval_interval = 0
    play(trainer, folder, **trouble)
    assert completions(folder) == []


# --------------------------------------------------------------------------------------------------- command line

TASK = f"""
import os, random, sys, time
import numpy, torch
sys.path.insert(0, {str(HERE)!r})
from test_survival import seed_everything, value_of
import iac
seed_everything(5)
globals().update(iac.number_task(2, 0))
train_dataset, eval_dataset = train_dataset[:3], eval_dataset[:2]
def reward_func(a, b):
    time.sleep(float(os.environ.get("PAUSE", 0)))
    return [value_of(*texts) for texts in zip(a, b, strict=True)]
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path / "task.py"


def flags(settings):
    named = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [
        str(x)
        for flag, value in named.items()
        for x in ((flag,) if value is True else (flag, value))
    ]


def command(file, *argv, pause=0.0):
    """The real command, in a process group of its own."""
    line, env = (
        [sys.executable, f"{file}.py", *map(str, argv)],
        ENV | {"PAUSE": str(pause), "WANDB_MODE": "offline"},
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(
        line,
        cwd=HERE.parent,
        env=env,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process, run, updates):
    """Until the run has that many updates behind it."""
    patience = time.monotonic() + 120
    while (
        not (run / "metrics.jsonl").exists()
        or (run / "metrics.jsonl").read_text().count("agent_0/policy_loss") < updates
    ):
        assert process.poll() is None and time.monotonic() < patience, process.communicate()[0]
        time.sleep(0.01)


def test_the_command_is_killed_then_interrupted_then_ends_as_if_nothing_had_happened(
    tmp_path, task
):
    """SIGKILL; --resume; Ctrl-C (of iac) or SIGTERM (of maac), which closes the run with a checkpoint; --resume.

    Ctrl-C reaches the whole process group, that of W&B too. Both algorithms at the same time.
    """
    from test_evaluation_logging import history, records

    argv = [*flags(SETTINGS), "--task", str(task), "--output-dir"]

    def play(file):
        run = tmp_path / file
        process = command(file, *argv, run, "--track", pause=0.1)
        wait_for(process, run, 1)
        process.kill()
        process.wait()
        (killed,) = run.rglob("run-*.wandb")
        assert not (run / "model").exists() and 1 <= state(run)["updates"] <= 2
        process = command(file, "--resume", run, pause=0.1)
        wait_for(process, run, 3)
        os.killpg(process.pid, signal.SIGINT) if file == "iac" else os.kill(
            process.pid, signal.SIGTERM
        )
        text = process.communicate(timeout=100)[0]
        assert process.returncode == 130 and f"--resume {run}" in text, text
        assert (
            "Traceback" not in text
            and "KeyboardInterrupt" not in text
            and not (run / "model").exists()
        )
        done = state(run)
        assert done["updates"] >= 3 and done["items_done"] == [2, 3, 5, 6][done["updates"] - 1]
        (log,) = set(run.rglob("run-*.wandb")) - {killed}
        assert killed.stem == log.stem  # run-<id>: the same W&B run
        steps = [row["_step"] for row in history(log.parent)]  # waits until the run is closed
        assert records(log)[-1].exit.exit_code == 1
        written = [
            r["env_step"] for r in rows(run)
        ]  # the signal may fall between its last row and W&B's
        assert steps in (written[-len(steps) :], written[-len(steps) - 1 : -1])

    with ThreadPoolExecutor() as pool:
        list(pool.map(play, FILES))
    for file in FILES:
        ended = run_command(f"{file}.py", "--resume", tmp_path / file, "--no-track")
        assert ended.returncode == 0, ended.stderr
        ended = run_command(f"{file}.py", *argv, tmp_path / f"{file}-whole")
        assert ended.returncode == 0, ended.stderr
        assert_same_end(tmp_path / file, tmp_path / f"{file}-whole")


def test_flags_given_with_resume_win_over_those_of_the_folder(tmp_path, task):
    argv, run = (
        [*flags(SETTINGS | {"num_train_epochs": 1}), "--task", str(task), "--output-dir"],
        tmp_path / "run",
    )
    assert run_command("iac.py", *argv, run).returncode == 0
    for flag, name in (
        ("--seed", "seed"),
        ("--discount", "discount"),
        ("--agent-learning-rate", "agent_learning_rate"),
    ):
        before = contents(run)
        ended = run_command("iac.py", "--resume", run, flag, "0.5" if flag != "--seed" else "7")
        assert (
            ended.returncode == 1 and f"with {name}=" in ended.stderr and str(run) in ended.stderr
        ), ended.stderr
        assert contents(run) == before
    ended = run_command("iac.py", "--resume", run, "--num-train-epochs", 2)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((run / "config.json").read_text())["num_train_epochs"] == 2
    assert run_command("iac.py", *argv, tmp_path / "whole", "--num-train-epochs", 2).returncode == 0
    assert_same_end(run, tmp_path / "whole")


NO_RUNS = {
    "nothing": None,
    "an empty folder": {},
    "a model": {
        name: (Path(TINY) / name).read_text() for name in ("config.json", "generation_config.json")
    },
    "settings of somebody else": {"config.json": '{"seed": "abc", "agents": 3, "lr": 0.1}'},
    "a list": {"config.json": '["seed"]'},
    "a number": {"config.json": "3"},
    "no JSON": {"config.json": "seed = 3\n"},
    "metrics of somebody else": {"metrics.jsonl": '{"loss": 1.0}\n'},
    "a run of somebody else": {
        "config.json": '{"seed": 3, "lr": 0.1}',
        "metrics.jsonl": '{"loss": 1.0}\n',
    },
}


@pytest.mark.parametrize("case", NO_RUNS)
def test_resuming_a_folder_that_holds_no_run_is_an_error_and_touches_nothing(case, tmp_path, task):
    file, folder = ["iac", "maac"][len(case) % 2], tmp_path / "folder"
    if NO_RUNS[case] is not None:
        folder.mkdir()
        for name, text in NO_RUNS[case].items():
            (folder / name).write_text(text)
    before = contents(tmp_path)
    ended = run_command(f"{file}.py", *flags(SETTINGS), "--task", task, "--resume", folder)
    assert ended.returncode not in (0, -signal.SIGKILL) and contents(tmp_path) == before
    last = ended.stderr.splitlines()[-1]  # says what is wrong with which folder
    assert str(folder) in last, ended.stderr


def test_a_run_of_the_other_algorithm_is_refused_and_left_as_it_is(fork, whole, tmp_path):
    """Also before its first checkpoint, when there are only rows to lose."""
    for own, other in (("iac-v", "maac-q"), ("maac-q", "iac-v")):
        for early in (False, True):
            run = tmp_path / f"{own}-{early}"
            shutil.copytree(whole(own)[0], run)
            if early:
                shutil.rmtree(run / "checkpoint"), shutil.rmtree(run / "model")
            before = contents(run)
            ended = fork("play", variant=other, folder=run)
            assert ended.code == 1 and str(run) in ended.text.splitlines()[-1], (
                own,
                early,
                ended.text,
            )
            assert contents(run) == before


# ------------------------------------------------------------------------------------------- other ways to resume


@pytest.mark.parametrize("variant", ["iac-q-shared", "maac-q"])
def test_another_setting_is_refused_by_name_and_more_epochs_are_not(variant, fork, whole, tmp_path):
    run = tmp_path / "run"
    ended = fork("play_with", variant=variant, folder=run, settings={"num_train_epochs": 1})
    assert ended.code == 0, ended.text
    before = contents(run)
    for name, value in {
        "seed": 2,
        "agent_learning_rate": 5e-4,
        "max_new_tokens": 3,
        "reference_kl_coef": 0.2,
    }.items():
        trainer = make(variant, args={name: value})
        at_first, theirs = weights(trainer), getattr(make(variant).args, name)
        with pytest.raises(ValueError, match=f"{run}.*{name}={theirs!r}"):
            trainer.train(resume_from=str(run))
        assert contents(run) == before and torch.equal(weights(trainer), at_first)
    ended = fork("play_with", variant=variant, folder=run, settings={"checkpoint_interval": 2})
    assert ended.code == 0, ended.text
    config = json.loads((run / "config.json").read_text())
    assert (config["num_train_epochs"], config["checkpoint_interval"]) == (2, 2)
    assert_same_end(run, whole(variant)[0], settings={"checkpoint_interval": 2})


def play_with(trainer, folder, settings):
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    play(trainer, folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_a_finished_run_changes_nothing(variant, fork, whole, tmp_path):
    folder, _ = whole(variant)
    shutil.copytree(folder, tmp_path / "run")
    ended = fork("play", variant=variant, folder=tmp_path / "run")
    assert ended.code == 0, ended.text
    assert_same_end(tmp_path / "run", folder)


@pytest.mark.parametrize("variant", ["iac-q-shared", "maac-q"])
def test_a_checkpoint_saved_elsewhere_goes_on_in_a_new_folder(variant, fork, whole, tmp_path):
    """Its first row is the next one; and that new run is killed and resumed like any other."""
    folder, elsewhere, run = whole(variant)[0], tmp_path / "elsewhere", tmp_path / "run"
    ended = fork("save_elsewhere", variant=variant, folder=tmp_path / "first", elsewhere=elsewhere)
    assert ended.code == 0, ended.text
    before = contents(elsewhere)
    ended = fork(
        "go_on_from",
        variant=variant,
        elsewhere=elsewhere,
        folder=run,
        number=6 if "shared" in variant else 12,
    )
    assert ended.code == -signal.SIGKILL
    ended = fork("play", variant=variant, folder=run)
    assert ended.code == 0, ended.text
    expected = without_time(folder)
    assert without_time(run) == expected[-len(rows(run)) :] and 0 < len(rows(run)) < len(expected)
    assert same(state(run), state(folder)) and contents(elsewhere) == before
    assert_same_end(tmp_path / "first", folder)  # saving does not disturb the run that saves


def save_elsewhere(trainer, folder, elsewhere):
    at(5, trainer, "appraise", lambda *_: trainer.save_checkpoint(elsewhere))
    play(trainer, folder)


def go_on_from(trainer, elsewhere, folder, number):
    TROUBLES["in an update"](trainer, number)  # in the second one from there
    trainer.output_dir = folder
    trainer.train(elsewhere)


def stopped_by_an_error(variant, folder, number, name):
    """A trainer whose run ended in an error of the number-th call of that method, which works again."""
    trainer = make(variant, folder)
    untroubled = getattr(trainer, name)
    at(number, trainer, name, lambda *_: 1 / 0, before=True)
    seed_everything(5)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    setattr(trainer, name, untroubled)
    return trainer


@pytest.mark.parametrize(
    ("variant", "number", "name"),
    [
        ("iac-v", 6, "add_metrics"),
        ("iac-q-shared", 6, "optimizer_step"),
        ("maac-q", 11, "optimizer_step"),
    ],
)
def test_the_same_trainer_can_go_on_after_an_error(variant, number, name, whole, tmp_path):
    """As in a notebook: mend what was wrong, and call train(resume_from=...) again."""
    run = tmp_path / "run"
    stopped_by_an_error(variant, run, number, name).train(resume_from=str(run))
    assert_same_end(run, whole(variant)[0])


@pytest.mark.parametrize(
    ("variant", "number", "name"), [("iac-v", 5, "optimizer_step"), ("maac-q", 1, "appraise")]
)
def test_the_same_trainer_begins_again_as_a_new_one_or_not_at_all(
    variant, number, name, whole, tmp_path
):
    """Its run stopped before there was a checkpoint, and it has drawn, or stepped too, since it was made."""
    run = tmp_path / "run"
    trainer = stopped_by_an_error(variant, run, number, name)
    seed_everything(5)
    try:
        trainer.train(resume_from=str(run))
    except ValueError as error:
        assert str(run) in str(error)
        trainer = make(variant)
        trainer.train(resume_from=str(run))
    assert_same_end(run, whole(variant)[0])


@pytest.mark.parametrize(("variant", "mode"), [("iac-v", "offline"), ("maac-q", "disabled")])
def test_a_resumed_run_is_the_same_wandb_run(variant, mode, whole, tmp_path, monkeypatch):
    """And W&B takes no number from the generators that the user's rewards draw from."""
    import wandb

    seen, init = [], wandb.init

    def spy(**options):
        run = init(**options)
        seen.append(
            (options["id"], options["resume"], run.id if mode == "offline" else options["id"])
        )
        return run

    monkeypatch.setattr(wandb, "init", spy)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run, config = tmp_path / mode, {"mode": mode, "project": "p", "dir": str(tmp_path)}
    trainer = make(variant, run, wandb_config=config)
    at(6, trainer, "appraise", lambda *_: 1 / 0, before=True)
    seed_everything(5)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    make(variant, wandb_config=config).train(resume_from=str(run))
    assert_same_end(run, whole(variant)[0])
    assert (
        len(seen) == 2 and seen[0] == seen[1] and seen[0][1] == "allow" and seen[0][0] == seen[0][2]
    )


# ------------------------------------------------------------------------------------------------- failing to save


def full_disk(save, value, path):
    save(value, path)
    os.truncate(path, os.path.getsize(path) // 2)
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied")


def file_size_limit(save, value, path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    save(value, path)


def unsaveable(save, value, path):
    save(value | {"generators": [lambda: 0]}, path)


TROUBLES |= {
    "no space": lambda trainer, n: [
        at(n + more, torch, "save", full_disk, before=True) for more in (0, 1)
    ],
    "a file may not grow": lambda trainer, n: at(n, torch, "save", file_size_limit, before=True),
    "what cannot be saved": lambda trainer, n: [
        at(n + more, torch, "save", unsaveable, before=True) for more in (0, 1)
    ],
    "no permission": lambda trainer, n: [
        at(n + 1 + more, os, "replace", refuse, before=True) for more in (0, 1)
    ],
}  # more: the attempt to leave a checkpoint as the run stops fails as well


@pytest.mark.parametrize(
    ("trouble", "variant"),
    [
        ("no space", "iac-v"),
        ("no space", "maac-q"),
        ("a file may not grow", "iac-q-shared"),
        ("a file may not grow", "maac-q"),
        ("what cannot be saved", "iac-v"),
        ("no permission", "maac-q"),
    ],
)
def test_a_checkpoint_that_fails_leaves_the_one_before(trouble, variant, fork, whole, tmp_path):
    run = tmp_path / "run"
    ended = fork("play", variant=variant, folder=run, trouble=trouble, number=3)
    assert (
        ended.code == 1 and str(run / "checkpoint" / "state.pt") in ended.text.splitlines()[-1]
    ), ended.text
    assert state(run)["updates"] == 2
    ended = fork("play", variant=variant, folder=run)
    assert ended.code == 0, ended.text
    assert_same_end(run, whole(variant)[0])
    assert not list(run.rglob("*.new"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that holds one checkpoint, but not two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(size, capture_output=True).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_full_leaves_the_checkpoint_before(fork, whole, small_disk, tmp_path):
    run = small_disk / "run"
    ended = fork("play", variant="iac-v", folder=run)
    assert (
        ended.code == 1 and str(run / "checkpoint" / "state.pt") in ended.text.splitlines()[-1]
    ), ended.text
    assert state(run)["updates"] == 1
    shutil.copytree(run, tmp_path / "run")
    ended = fork("play", variant="iac-v", folder=tmp_path / "run")
    assert ended.code == 0, ended.text
    assert_same_end(tmp_path / "run", whole("iac-v")[0])


def play_as_nobody(trainer, folder):
    if os.getuid() == 0:
        os.setgid(65534), os.setuid(65534)
    trainer.reward_func = lambda a, b: print("the reward function was called")
    start(trainer, folder)


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(variant, fork):
    with tempfile.TemporaryDirectory() as place:  # where nobody may enter, unlike tmp_path
        os.chmod(place, 0o755)
        file, closed = Path(place) / "file", Path(place) / "closed"
        file.write_text("a file")
        closed.mkdir(mode=0o555)
        for folder in (file, file / "run", closed, closed / "run", Path("/proc/run")):
            ended = fork("play_as_nobody", variant=variant, folder=folder)
            assert ended.code == 1 and str(folder) in ended.text.splitlines()[-1], ended.text
            assert "the reward function was called" not in ended.text
        assert file.read_text() == "a file" and os.listdir(closed) == []


# --------------------------------------------------------------------------------------------- Ctrl-C and SIGTERM


@pytest.mark.parametrize(
    ("moment", "variant", "number"),
    [
        ("rollout", "iac-v", signal.SIGINT),
        ("rollout", "maac-q", signal.SIGTERM),
        ("update", "iac-v", signal.SIGTERM),
        ("update", "maac-q", signal.SIGINT),
        ("update twice", "iac-v", signal.SIGINT),
        ("checkpoint", "maac-q", signal.SIGINT),
        ("evaluation", "iac-v", signal.SIGTERM),
    ],
)
def test_a_signal_stops_a_rollout_at_once_and_an_update_when_it_is_done(
    moment, variant, number, whole, tmp_path
):
    run, calls = tmp_path / "run", []
    trainer, handlers = (
        make(variant, run),
        [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
    )

    def press(*args):
        for _ in range(1 + (moment == "update twice")):
            os.kill(os.getpid(), number)
        calls.append(1)  # is reached if the signal waits
        return args[0](*args[1:])

    owner, name, count = {
        "rollout": (trainer, "appraise", 6),
        "update": (trainer, "optimizer_step", 11),
        "update twice": (trainer, "optimizer_step", 11),
        "checkpoint": (torch, "save", 3),
        "evaluation": (trainer, "evaluate", 3),
    }[moment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, getattr(owner, name))  # to be put back
        at(count, owner, name, press, before=True)
        seed_everything(5)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert bool(calls) == (moment == "update")
    done = state(run)
    assert done["updates"] == {"update twice": trainer.updates}.get(moment, trainer.updates) > 0
    if (
        moment != "update twice"
    ):  # what was completed is in the checkpoint, also what came after the periodic one
        assert same(done["weights"], [x.state_dict() for x in trainer.stateful])
    make(variant).train(resume_from=str(run))
    assert_same_end(run, whole(variant)[0])


# ------------------------------------------------------------------------------------------------ bad rewards, errors

BAD_REWARDS = {
    "raises": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    "NaN": (lambda: float("nan"), "nan"),
    "None": (lambda: None, "got None"),
    "a wrong count": (lambda: [1.0, 2.0, 3.0], "got 3 values"),
}


def play_with_bad_reward(trainer, folder, case, number):
    """Prints whether the weights have moved since the items were drawn that the bad reward was for.

    Only the error itself leaves a checkpoint.
    """
    trainer.args.checkpoint_interval = 0
    good, calls, marks = trainer.reward_func, [], []
    collect = trainer.collect
    trainer.collect = lambda *args, **kwargs: (
        marks.append(weights(trainer)) or collect(*args, **kwargs)
    )

    def reward_func(a, b):
        calls.append(1)
        return BAD_REWARDS[case][0]() if len(calls) == number else good(a, b)

    trainer.reward_func = reward_func
    try:
        start(trainer, folder)
    finally:
        print(
            "the weights stand still"
            if torch.equal(marks[-1], weights(trainer))
            else "the weights have moved"
        )


@pytest.mark.parametrize(
    ("case", "number"), [*((case, n) for case in BAD_REWARDS for n in (1, 7)), ("raises", 9)]
)
def test_a_bad_reward_is_on_screen_and_costs_no_step_and_the_run_goes_on_once_it_is_mended(
    case, number, fork, whole, tmp_path
):
    variant, run = VARIANTS[(list(BAD_REWARDS).index(case) + number) % 3], tmp_path / "run"
    ended = fork("play_with_bad_reward", variant=variant, folder=run, case=case, number=number)
    assert (
        ended.code == 1 and BAD_REWARDS[case][1] in ended.text and f"--resume {run}" in ended.text
    ), ended.text
    assert "the weights stand still" in ended.text
    assert (run / "checkpoint" / "state.pt").exists() == (number > 1)
    ended = fork("play", variant=variant, folder=run)
    assert ended.code == 0, ended.text
    assert_same_end(run, whole(variant)[0])


@pytest.mark.parametrize("variant", ["iac-q-shared", "maac-q"])
def test_an_error_in_an_update_leaves_the_last_periodic_checkpoint(variant, whole, tmp_path):
    """Half of an update is nothing to go on from."""
    run = tmp_path / "run"
    trainer, kept = make(variant, run, {"checkpoint_interval": 2}), []
    at(
        2,
        trainer,
        "save_checkpoint",
        lambda *_: pytest.fail("half an update was saved"),
        before=True,
    )
    at(1, trainer, "save_checkpoint", lambda *_: kept.append(contents(run / "checkpoint")))
    at(10 if "shared" in variant else 19, trainer, "optimizer_step", lambda *_: 1 / 0)
    seed_everything(5)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [contents(run / "checkpoint")] == kept and state(run)["updates"] == 2
    make(variant, args={"checkpoint_interval": 2}).train(resume_from=str(run))
    assert_same_end(run, whole(variant)[0], settings={"checkpoint_interval": 2})


# -------------------------------------------------------------------------------------------------------- memory


def creep(variant_name, folder):
    """Print, after each 20th update, how many tensors and objects live and how much memory they take, in MB."""
    args = {
        "num_agents": 1,
        "num_turns": 1,
        "rollout_buffer_size": 1,
        "max_new_tokens": 1,
        "num_train_epochs": 200,
    }
    args |= {"eval_interval": 15, "checkpoint_interval": 15}  # of one update per epoch
    given = {
        "reward_func": lambda a: value_of(*a),
        "metrics_callback": lambda episode: {"mine": len(episode)},
    }
    given["train_dataset"] = [{"prompt": "sum to 7", "n": 7}]
    trainer, page = make(variant_name, folder, args, **given), resource.getpagesize()
    report = trainer.report

    def counting():
        report()
        if trainer.updates % 20 == 0 and not trainer.buffers[0]:
            gc.collect()
            alive = gc.get_objects()
            tensors = sum(isinstance(x, torch.Tensor) for x in alive)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20
            print("counted", [trainer.updates, tensors, len(alive), resident])

    trainer.report = counting
    trainer.train()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc here")
@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
def test_memory_does_not_creep_over_200_updates(variant, fork, tmp_path):
    ended = fork("creep", variant_name=variant, folder=tmp_path / "run")
    assert ended.code == 0, ended.text[-3000:]
    counts = [json.loads(found) for found in re.findall(r"counted (\[.*?\])", ended.text)]
    updates, tensors, objects, resident = zip(*counts, strict=True)
    assert updates[-10:] == tuple(range(20, 201, 20)), updates
    assert len(set(tensors[-10:])) == 1, tensors
    assert max(objects[-9:]) < objects[-10] + 200, objects
    assert max(resident[-9:]) < resident[-10] + 6, resident
