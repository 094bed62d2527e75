"""Several processes, started by torchrun, do what one process does.

Started by torchrun this file is the script that plays all scenarios, one after the other in the
same processes; then the tests look at what the runs left. A single process, pytest itself, plays
some of them too, to compare: there answers hold no chance (top_k 1).
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import common
import iac
import maac

KILLS = int(os.environ.get("PROCESS_KILLS", 2))  # of one run
SETTINGS = {
    "top_k": 1,
    "max_new_tokens": 3,
    "rollout_buffer_size": 5,  # of 11 rows, so that the last update has one sample
    "train_batch_size": 3,  # so that mini-batches have 3, 2 and 1
    "eval_interval": 6,
    "eval_num_samples": 3,
    "agent_learning_rate": 1e-4,  # small: where gradients are 0, AdamW steps on rounding errors
    "critic_learning_rate": 1e-4,
    "max_grad_norm": 1.0,
}
RUNS = {  # name: file, settings
    "iac": (iac, {}),
    "shared": (iac, {"use_separate_critic": False, "critic_type": "q", "micro_batch_size": 1}),
    "maac": (maac, {"num_generations": 2, "eval_batch_size": 2}),
    "turns": (
        maac,
        {
            "num_turns": 2,
            "early_termination_threshold": 0.5,
            "critic_type": "q",
            "reference_kl_enabled": True,
            "rollout_batch_size": 2,
        },
    ),
    "adapters": (
        iac,
        {"lora_rank": 4, "gradient_checkpointing": True, "reference_kl_enabled": True},
    ),
}


def make(file, folder, settings=None, **given):
    """A trainer of two tiny agents on eleven rows of the number task."""
    args = file.Config(**SETTINGS | (settings or {}))
    task = file.number_task(2, 1)
    task |= {"train_dataset": task["train_dataset"][:11], "eval_dataset": task["eval_dataset"][:3]}
    if "agents" not in given:
        task["agent_model"] = file.TINY_LM
        if getattr(args, "use_separate_critic", True):
            task["critic_model"] = file.TINY_LM
    return file.Trainer(**task | {"args": args, "output_dir": str(folder)} | given)


def with_sgd(trainer):
    """The trainer with plain gradient descent in AdamW's place."""
    made = {}
    for optimizers in (trainer.agent_optimizers, trainer.critic_optimizers):
        for i, optimizer in enumerate(optimizers):
            if optimizer not in made:
                parameters = optimizer.param_groups[0]["params"]
                made[optimizer] = torch.optim.SGD(parameters, lr=0.01)
            optimizers[i] = made[optimizer]
    return trainer


# ----------------------------------------------------------------------------------- what is played


def play_equality(home):
    for name, (file, settings) in RUNS.items():
        make(file, home / name, settings).train()
        whole = settings | {"rollout_buffer_size": 99}
        trainer = with_sgd(make(file, home / f"{name}-sgd", whole))
        trainer.train()


def play_twice(home):
    """The same seed twice, with sampled answers."""
    for name in ("one", "other"):
        make(iac, home / name, {"top_k": None}).train()


def fails_in(process, row=8):
    """A reward function that raises at a row, but in one process only."""
    task = iac.number_task(2, 1)

    def reward_func(a, b, batch_items):
        if common.rank() == process and batch_items[0] is rows[row]:
            raise OSError("the judge is out")
        return task["reward_func"](a, b, batch_items=batch_items)

    rows = task["train_dataset"][:11]
    return {"reward_func": reward_func, "train_dataset": rows}


def play_error(home):
    """A reward raises where row 8 is played; both go on, one of them in all processes."""
    for process in range(common.world_size()):
        trainer = make(iac, home / f"error-{process}", **fails_in(process, row=5 + process))
        with pytest.raises((OSError, RuntimeError)) as caught:
            trainer.train()
        told = {"process": common.rank(), "error": repr(caught.value)}
        (home / f"told-{process}-{common.rank()}.json").write_text(json.dumps(told))
    common.gather(None)
    if common.rank() == 0:
        shutil.copytree(home / "error-1", home / "for-one")
    common.gather(None)
    make(iac, None).train(str(home / "error-1"))


def play_evaluation_error(home):
    def reward_func(a, b):
        assert common.rank() == 0, "only the first can judge"
        return [0.5] * len(a)

    trainer = make(iac, home / "unused", reward_func=reward_func)
    with pytest.raises((AssertionError, RuntimeError), match="only the first can judge"):
        trainer.evaluate()


def play_refusals(home):
    placed = {"parallel_training": "mp", "agent_devices": ["cpu"], "critic_devices": ["cpu"]}
    for file in (iac, maac):
        with pytest.raises(ValueError, match=r"parallel_training='mp'.*torchrun"):
            make(file, home / "unused", placed)
    rows = iac.number_task(2, 1)["train_dataset"][common.rank() :][:11]
    with pytest.raises(ValueError, match=r"the processes disagree on .'train_dataset'"):
        make(iac, home / "unused", train_dataset=rows).train()
    assert not (home / "unused").exists()


def play_random_weights(home):
    """Models made in memory, other ones in each process, train as those of process 0."""
    torch.manual_seed(common.rank())
    config = AutoConfig.from_pretrained(iac.TINY_LM)
    agents = [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    tokenizer = AutoTokenizer.from_pretrained(iac.TINY_LM)
    given = {"agents": agents, "tokenizer": tokenizer}
    trainer = make(iac, home / "random", {"use_separate_critic": False}, **given)
    trainer.train()
    weights = [p.detach() for model in trainer.agents for p in model.parameters()]
    for other in common.gather(weights):
        assert all(map(torch.equal, weights, other))


def play_sums(home):
    """Gradients of several shapes and types, some of them missing, in pieces."""
    common.PIECE, rank, W = 4, common.rank(), common.world_size()
    shapes = [(3, 2), (5,), (), (2, 2), (1,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters[3] = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    for k, p in enumerate(parameters):
        if k == 4 or k != rank:
            p.grad = torch.full_like(p, k + rank)
    parameters[4].grad = None
    common.sum_gradients(parameters)
    for k, p in enumerate(parameters):
        total = sum(k + r for r in range(W) if r != k) if k < 4 else 0
        assert torch.equal(p.grad, torch.full_like(p, total))
    assert common.own_share(range(7)) == range(rank, 7, W) and common.gather(rank) == [*range(W)]


def main(home, names):
    for name in names.split(","):
        globals()[f"play_{name}"](home)
    (home / "played").touch()


# ---------------------------------------------------------------------------------------- the tests


def torchrun(W, *command):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", W]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*map(str, line), *map(str, command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    try:
        text, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, text


PLAYED = {1: "equality", 3: "equality,sums"}
PLAYED[2] = "equality,sums,twice,error,evaluation_error,refusals,random_weights"


@pytest.fixture
def played(tmp_path_factory):
    """played(W): the folder where W processes played, once for all of pytest's workers."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent

    def play(W):
        home = place / f"processes-{W}"
        with FileLock(f"{home}.lock"):
            if not home.exists():
                home.mkdir()
                if W == 1:
                    main(home, PLAYED[W])
                else:
                    code, text = end(torchrun(W, __file__, home, PLAYED[W]))
                    (home / "output").write_text(text)
        if W > 1:
            assert (home / "played").exists(), (home / "output").read_text()[-5000:]
        return home

    return play


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def without_time(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


def assert_same(folder, other, tolerance):
    """Rows, answers and weights are the same to the tolerance, and the counts exactly."""
    assert (folder / "completions.jsonl").read_text() == (other / "completions.jsonl").read_text()
    ours, theirs = without_time(folder), without_time(other)
    assert len(ours) == len(theirs) > 1
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, abs=tolerance, rel=tolerance)
    ours, theirs = (torch.load(x / "checkpoint" / "state.pt") for x in (folder, other))
    assert ours["counts"] == theirs["counts"] and ours["metrics"].keys() == theirs["metrics"].keys()
    for one, two in zip(ours["weights"], theirs["weights"], strict=True):
        for name in one:
            assert (one[name] - two[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_an_epoch_is_that_of_one_process(W, name, played):
    assert_same(played(W) / name, played(1) / name, 1e-5)


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_step_of_gradient_descent_is_that_of_one_process(W, name, played):
    assert_same(played(W) / f"{name}-sgd", played(1) / f"{name}-sgd", 1e-6)


def test_the_same_seed_is_the_same_to_the_bit(played):
    one, other = played(2) / "one", played(2) / "other"
    assert without_time(one) == without_time(other)
    assert_same(one, other, 0)
    answers = [row["completion"] for row in rows(one, "completions.jsonl")]
    greedy = [row["completion"] for row in rows(played(2) / "iac", "completions.jsonl")]
    assert answers != greedy  # there was chance in it


def test_processes_draw_different_answers(tmp_path, monkeypatch):
    trainer, drawn = make(iac, tmp_path, {"top_k": None}), []
    monkeypatch.setattr(common, "world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(common, "rank", lambda rank=rank: rank)
        items = [(row, trainer.train_dataset[0]) for row in range(16)]
        episodes = trainer.rollout(common.own_share(items), 1, ("train", 0))
        drawn.append([s.completion for episode in episodes for joint in episode for s in joint])
    assert len(drawn[0]) == len(drawn[1]) and drawn[0] != drawn[1]


def test_an_error_in_one_process_ends_all_and_leaves_the_last_update(played):
    home = played(2)
    for process in (0, 1):
        for rank in (0, 1):
            told = json.loads((home / f"told-{process}-{rank}.json").read_text())
            kind = "OSError" if rank == process else "RuntimeError"
            assert told["error"].startswith(kind) and "the judge is out" in told["error"]
    assert torch.load(home / "for-one" / "checkpoint" / "state.pt")["counts"]["updates"] == 1
    assert_same(home / "error-1", played(1) / "iac", 1e-5)  # two processes went on
    make(iac, None).train(str(home / "for-one"))  # and one does
    assert_same(home / "for-one", played(1) / "iac", 1e-5)


def test_only_the_first_process_shows_anything(played):
    text = (played(3) / "output").read_text()
    assert text.count("The files of this run are in") == 2 * len(RUNS)
    assert text.count("The trained models are in") == 2 * len(RUNS)


TASK = """
import os, time
from pathlib import Path
import iac
task = iac.number_task(2, 1)
train_dataset, eval_dataset = task["train_dataset"][:ROWS], task["eval_dataset"][:2]
formatters = task["formatters"]
home = Path(__file__).parent
(home / f"process-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))

def reward_func(a, b, batch_items):
    time.sleep(float(os.environ.get("SLOWLY", 0)))
    return task["reward_func"](a, b, batch_items=batch_items)
"""


def wait_for(condition, process):
    started = time.monotonic()
    while not condition():
        assert process.poll() is None and time.monotonic() < started + 200, end(process)[1][-5000:]
        time.sleep(0.05)


def test_the_command_survives_kills_and_goes_on_with_one_process(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK.replace("ROWS", f"{20 * KILLS}"))
    monkeypatch.setenv("SLOWLY", "0.4")
    folder, settings = tmp_path / "run", {"task": tmp_path / "task.py", "output_dir": "?"}
    settings |= SETTINGS | {"checkpoint_interval": 1, "num_train_epochs": 1, "eval_interval": 30}
    flags = []
    for name, value in settings.items():
        flags += [f"--{name.replace('_', '-')}", str(value).replace("?", str(folder))]
    checkpoint = folder / "checkpoint" / "state.pt"
    for kill in range(KILLS):
        before = checkpoint.exists() and torch.load(checkpoint)["counts"]["updates"]
        process = torchrun(2, "iac.py", *(["--resume", folder] if kill else flags))

        def went_on(before=before):
            return checkpoint.exists() and torch.load(checkpoint)["counts"]["updates"] > before

        wait_for(went_on, process)
        time.sleep(random.random())
        victim = tmp_path / f"process-{(kill + 1) % 2}"
        os.kill(int(victim.read_text()), signal.SIGKILL)
        killed = time.monotonic()
        code, text = end(process)
        seconds = time.monotonic() - killed
        print(f"kill {kill}: exit code {code} after {seconds:.1f} s")  # with pytest -s
        assert code != 0 and seconds < 60, text[-5000:]
        torch.load(checkpoint)
        for other in (0, 1):
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / f"process-{other}").read_text()), 0)
    environment = os.environ | {"SLOWLY": "0"}
    command = [sys.executable, "iac.py", "--resume"]
    two = tmp_path / "two"
    if KILLS > 2:  # takes longer: with two processes too
        shutil.copytree(folder, two)
    subprocess.run([*command, str(folder)], cwd=ROOT, env=environment, check=True)
    monkeypatch.setenv("SLOWLY", "0")
    if KILLS > 2:
        code, text = end(torchrun(2, "iac.py", "--resume", two))
        assert code == 0, text[-5000:]
        assert_same(two, folder, 1e-5)
    task = iac.load_task(str(tmp_path / "task.py"))
    make(iac, tmp_path / "whole", {"eval_interval": 30, "checkpoint_interval": 1}, **task).train()
    assert_same(folder, tmp_path / "whole", 1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
