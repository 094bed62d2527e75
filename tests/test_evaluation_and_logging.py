"""When there is an evaluation, what is logged, and that neither changes the training."""

import copy
import functools
import io
import json
import os
import random
import re
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from pytest import approx
from transformers import MptConfig, MptForCausalLM
from wandb.proto.wandb_internal_pb2 import Record

import common
from commands import run
from conftest import answer, optimizers, stir

EVAL = [{"prompt": f"eval {n}", "n": n} for n in range(5)]
ROWS = [{"prompt": f"Row {n} " + "and so on " * (n % 3), "n": n} for n in range(10)]


def rows(trainer, name="metrics.jsonl"):
    return [json.loads(line) for line in Path(trainer.output_dir, name).read_text().splitlines()]


def training_part(trainer):
    """The rows of training, without times."""
    left_out = ("eval/", "time/")
    parts = [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows(trainer)]
    return [row for row in parts if len(row) > 1]


def weights(trainer):
    models = [*trainer.agents, *trainer.critics]
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def noisy_reward(a, b):
    """It draws from all the generators that a user's function may know."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return [noise + len(text) / 10 for text in a]


# -------------------------------------------------------------------------------------- evaluation


def test_training_is_the_same_with_evaluation_on_and_off(variant, make_trainer, tmp_path):
    """Answers, metrics and weights, to the bit, whatever the user's functions draw."""
    on = {"eval_interval": 3, "eval_num_samples": 4, "eval_batch_size": 2}
    cases = {
        "on": (on, EVAL),
        "often": (on | {"eval_interval": 1, "eval_num_samples": 1}, EVAL),
        "off": [(on | {"eval_interval": 0}, EVAL), (on, None)]["v" in variant],
    }
    trainers = {}
    for name, (args, eval_dataset) in cases.items():
        given = {"eval_dataset": eval_dataset, "reward_func": noisy_reward}
        trainers[name] = make_trainer(variant, tmp_path / name, args, **given)
        trainers[name].train()
    for name, trainer in trainers.items():
        evaluated = [row for row in rows(trainer) if "eval/turn_1/reward_mean" in row]
        assert bool(evaluated) == (name in ("on", "often"))
        assert training_part(trainer) == training_part(trainers["on"])
        assert torch.equal(weights(trainer), weights(trainers["on"]))


@pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-shared", "maac-q"])
def test_evaluating_by_hand_changes_no_training(variant, make_trainer, tmp_path):
    """Before it, between the steps of an update, and in a function of the user."""
    given = {"eval_dataset": EVAL, "reward_func": noisy_reward}
    quiet, busy = (make_trainer(variant, tmp_path / name, **given) for name in ("quiet", "busy"))
    hook = busy.agent_optimizers[1].register_step_post_hook
    hook(lambda *_: busy.evaluate())
    first = busy.evaluate()
    quiet.train(), busy.train()
    assert training_part(quiet) == training_part(busy)
    assert torch.equal(weights(quiet), weights(busy))
    assert first == make_trainer(variant, tmp_path, **given).evaluate()  # the seed decides
    assert not (tmp_path / "run").exists()  # there is no run to write to


@pytest.mark.parametrize(
    ("count", "interval", "points"),
    [
        (6, 2, [0, 4, 6]),
        (7, 3, [0, 4, 7]),
        (10, 5, [0, 8, 10]),
        (10, 7, [0, 8, 10]),
        (3, 16, [0, 3]),
        (8, 4, [0, 4, 8]),
        (4, 0, []),
    ],
)
@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-q"])
def test_evaluation_points_and_items(variant, count, interval, points, make_trainer, tmp_path):
    """Before the first batch, after the update that reaches a multiple, and once after training.

    Each time the same first items, with one joint answer; updates are of four items here.
    """
    calls, updates, at = [], [], []

    def reward_func(a, b, batch_items):
        item = batch_items[0]["prompt"]
        calls.append(item)
        if item == "eval 0":
            at.append(len(updates))
        assert len(a) == len(b) == (1 if "eval" in item else 2)
        return len(a[0]) / 10

    args = {"eval_interval": interval, "eval_num_samples": 3, "num_generations": 2}
    args |= {"rollout_buffer_size": 8}
    given = {"reward_func": reward_func, "train_dataset": ROWS[:count], "eval_dataset": EVAL}
    trainer = make_trainer(variant, tmp_path, args, **given)
    trainer.agent_optimizers[1].register_step_post_hook(lambda *_: updates.append(1))
    trainer.train()
    assert at == [-(-point // 4) for point in points]
    assert [c for c in calls if "eval" in c] == ["eval 0", "eval 1", "eval 2"] * len(points)
    assert [c for c in calls if "Row" in c] == [row["prompt"] for row in ROWS[:count]]
    logged = [row["env_step"] for row in rows(trainer) if "eval/turn_1/reward_mean" in row]
    assert logged == [2 * point for point in points]


@pytest.mark.parametrize(("size", "batches"), [(1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_eval_batch_size_is_how_many_items_are_answered_together(size, batches, make_trainer, tmp_path, monkeypatch):
    seen, generate_all = [], common.generate_all

    def spy(models, prompts, *rest):
        seen.append(len(prompts[0]))
        return generate_all(models, prompts, *rest)

    monkeypatch.setattr(common, "generate_all", spy)
    args = {"eval_batch_size": size, "eval_num_samples": 9}  # there are five
    result = make_trainer("maac-v", tmp_path, args, eval_dataset=EVAL).evaluate()
    assert seen == batches
    assert result.keys() >= {"eval/turn_1/reward_mean", "eval/turn_1/expected_return"}


def test_evaluation_reports_what_the_reward_function_saw(variant, make_trainer, tmp_path, rig):
    """Means and answers over two turns, against a spy on the reward function."""
    calls = []

    def reward_func(a, b, prompts, batch_items):
        reward = [len(a[0]) / 10, len(b[0]) / 20]
        calls.append((batch_items[0], prompts, [a[0], b[0]], reward))
        return reward

    args = {"num_turns": 2, "eval_interval": 4, "eval_num_samples": 3, "rollout_buffer_size": 8}
    given = {"reward_func": reward_func, "eval_dataset": EVAL}
    given["metrics_callback"] = lambda samples: {"of mine": samples[0].item["n"]}
    trainer = make_trainer(variant, tmp_path, args, **given)
    rig(trainer, answer)
    trainer.train()
    first = [c for c in calls if c[0]["prompt"].startswith("eval")][:6]
    assert [c[0]["n"] for c in first] == [0, 0, 1, 1, 2, 2]
    turns = [[sum(c[3][i] for c in first[t::2]) / 3 for i in (0, 1)] for t in (0, 1)]
    lengths = {i: [s for c in first for s in [c[2][i]]] for i in (0, 1)}
    row = rows(trainer)[0]
    expected = {
        "env_step": 0,
        "eval/turn_1/reward_mean": sum(turns[0]) / 2,
        "eval/turn_2/reward_mean": sum(turns[1]) / 2,
        "eval/turn_1/expected_return": sum(turns[0]) / 2 + sum(turns[1]) / 2,
        "eval/turn_2/expected_return": sum(turns[1]) / 2,
        "eval/agent_0/reward_mean": (turns[0][0] + turns[1][0]) / 2,
        "eval/agent_1/reward_mean": (turns[0][1] + turns[1][1]) / 2,
        "eval/of mine": 1.0,
    }
    for name, value in expected.items():
        assert row.pop(name) == approx(value), name
    names = {f"eval/agent_{i}/{x}" for i in (0, 1) for x in ("completion_tokens", "finished_fraction")}
    assert row.keys() == names
    for i in (0, 1):
        assert 0 < row[f"eval/agent_{i}/finished_fraction"] <= 1
        assert len(lengths[i]) == 6 and 1 <= row[f"eval/agent_{i}/completion_tokens"] <= 4
    written = [row for row in rows(trainer, "completions.jsonl") if row["env_step"] == 0]
    wanted = []
    for number, (item, prompts, texts, reward) in enumerate(first):
        for i in (0, 1):
            place = {"env_step": 0, "row": item["n"], "turn": 1 + number % 2, "agent": i}
            answers = {"prompt": prompts[i], "completion": texts[i], "reward": reward[i]}
            wanted.append(place | answers)
    assert written == wanted


# ----------------------------------------------------------------------------------------- metrics


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def by_hand(samples, agents, trainer, temperature, normalized):
    """All metrics of an update but the gradient norms, from its samples and the agents."""
    turns, row = sorted({s.turn_idx for s in samples}), {"truncated_prompts": 0}
    for turn in turns:
        group = [s for s in samples if s.turn_idx == turn]
        returns = []
        for s in group:
            own = [x for x in samples if (x.row, x.agent_idx) == (s.row, s.agent_idx)]
            returns.append(sum(x.reward for x in own if x.turn_idx >= turn))
        row[f"turn_{turn + 1}/reward_mean"] = mean(s.reward for s in group)
        row[f"turn_{turn + 1}/expected_return"] = mean(returns)
    explained = {}
    for i, agent in enumerate(agents):
        own, losses, surprise = [s for s in samples if s.agent_idx == i], [], []
        for turn in turns:
            group = [s for s in own if s.turn_idx == turn]
            A = torch.tensor([s.target - s.old_value for s in group], dtype=torch.float64)
            if normalized:
                A = (A - A.mean()) / A.std(correction=0)
            for s, a in zip(group, A.tolist(), strict=True):
                ids = torch.tensor([s.prompt_ids + s.completion_ids])
                logits = agent(ids).logits[0, len(s.prompt_ids) - 1 : -1].double() / temperature
                logprobs = logits.log_softmax(-1)[range(len(s.completion_ids)), s.completion_ids]
                losses.append(-logprobs.sum().item() * a)
                surprise += (-logprobs).tolist()
            y, v = (torch.tensor([getattr(s, k) for s in group]) for k in ("target", "old_value"))
            share = 1 - (y - v).var(correction=0) / y.var(correction=0)
            explained.setdefault(trainer.critics[i], []).append((share.item(), group))
        row |= {
            f"agent_{i}/reward_mean": mean(s.reward for s in own),
            f"agent_{i}/completion_tokens": mean(len(s.completion_ids) for s in own),
            f"agent_{i}/finished_fraction": mean(s.completion_ids[-1] == 1 for s in own),
            f"agent_{i}/reference_kl": mean(s.reference_kl for s in own),
            f"agent_{i}/advantage_mean": mean(s.target - s.old_value for s in own),
            f"agent_{i}/policy_loss": mean(losses),
            f"agent_{i}/entropy": mean(surprise),
        }
    for c, groups in enumerate(explained.values()):
        read = [s for _, group in groups for s in group]
        row |= {
            f"critic_{c}/value_mean": mean(s.old_value for s in read),
            f"critic_{c}/value_loss": mean((s.target - s.old_value) ** 2 for s in read),
            f"critic_{c}/explained_variance": mean(share for share, _ in groups),
        }
    return row


@pytest.mark.filterwarnings("ignore:a text is longer")
@pytest.mark.parametrize("normalized", [True, False])
def test_every_metric_has_its_name_and_its_value(variant, normalized, make_trainer, rig, tmp_path, folders):
    """Two turns, three updates, at a learning rate so small that the weights stay as they are."""
    args = {"agent_learning_rate": 1e-30, "critic_learning_rate": 1e-30, "num_turns": 2}
    args |= {"temperature": 0.8, "rollout_buffer_size": 8, "reference_kl_enabled": True}
    args |= {"advantage_normalization": normalized, "micro_batch_size": 3}
    critic = {} if "shared" in variant else {"critic_model": folders["G"]}  # unlike the actors
    logged = {}
    for clip in (None, 0.01)[: 1 + normalized]:  # what is logged is the norm before clipping
        place = tmp_path / str(clip)
        trainer = make_trainer(variant, place, args | {"max_grad_norm": clip}, **critic)
        stir(trainer), rig(trainer, answer)
        norms = {}

        def see(optimizer, *_, norms=norms):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            grads = torch.cat([g.flatten() for g in grads if g is not None])
            norms.setdefault(optimizer, []).append(grads.norm().item())

        for optimizer in optimizers(trainer).values():
            optimizer.register_step_pre_hook(see)
        start = copy.deepcopy(trainer.agents)
        trainer.train()
        logged[clip] = [
            {k: v for k, v in row.items() if not k.startswith(("time/", "env_step"))} for row in rows(trainer)
        ]
        if clip is None:
            unclipped, samples, steps = norms, trainer.samples, optimizers(trainer)
            timed = rows(trainer)
            agents, first = start, trainer
    assert not normalized or logged[0.01] == logged[None]
    assert [row["env_step"] for row in timed] == [8, 16, 20]
    fractions = set()
    for number, row in enumerate(logged[None]):
        own = [s for s in samples if s.row // 4 == number]
        expected = by_hand(own, agents, first, 0.8, normalized)
        for name, optimizer in steps.items():
            seen = unclipped[optimizer]
            share = len(seen) // 3
            part = seen[number * share : (number + 1) * share]
            expected[f"{name.replace(' ', '_')}/grad_norm"] = mean(part)
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == approx(value, rel=2e-4, abs=2e-5), name
        fractions |= {row[f"agent_{i}/finished_fraction"] for i in (0, 1)}
        assert abs(expected["agent_1/reference_kl"]) > 0.001
        assert len({*expected.values()}) > len(expected) * 0.8  # nothing agrees by chance
        shares = [timed[number][f"time/{part}"] for part in ("rollout", "update")]
        assert timed[number]["time/env_steps_per_second"] > 0
        assert min(shares) > 0 and sum(shares) <= 1
    assert any(0 < fraction < 1 for fraction in fractions)


@pytest.mark.parametrize(("steps", "logged"), [(1, [4, 8, 10]), (4, [4, 8, 10]), (6, [8, 10]), (99, [10])])
@pytest.mark.parametrize("variant", ["iac-v-shared", "maac-v"])
def test_logging_steps_are_the_joint_answers_between_two_rows_at_least(variant, steps, logged, make_trainer, tmp_path):
    """A row is of everything since the row before; the last one comes at the end of training."""
    trainer = make_trainer(variant, tmp_path, {"logging_steps": steps})
    trainer.train()
    assert [row["env_step"] for row in rows(trainer)] == logged
    for start, row in zip([0, *logged], rows(trainer), strict=False):
        own = [s for s in trainer.samples if start <= s.row < row["env_step"]]
        assert row["turn_1/reward_mean"] == approx(mean(s.reward for s in own))
        second = [s.advantage for s in own if s.agent_idx == 1]
        assert row["agent_1/advantage_mean"] == approx(mean(second))


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-q"])
def test_cut_prompts_are_counted_over_the_run(variant, make_trainer, tmp_path):
    """Those of both agents, not those of an evaluation."""
    dataset = [{"prompt": "x " * 400}, *ROWS[:5]]
    given = {"train_dataset": dataset, "eval_dataset": dataset, "model": "G"}
    trainer = make_trainer(variant, tmp_path, {"eval_interval": 2}, **given)
    with pytest.warns(UserWarning, match="its end is kept"):
        trainer.train()
    counts = [row["truncated_prompts"] for row in rows(trainer) if "truncated_prompts" in row]
    assert counts == [2, 2]


def test_positions_that_are_called_max_seq_len_are_respected(make_trainer, tokenizer, tmp_path):
    """As MPT calls them; every prompt that does not fit is counted."""
    size = {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}
    models = [MptForCausalLM(MptConfig(vocab_size=300, **size)) for _ in range(3)]
    given = {"agents": models[:2], "critic_model": models[2], "tokenizer": tokenizer}
    given["train_dataset"] = [{"prompt": "a name and a word " * n} for n in (1, 9, 20)]
    trainer = make_trainer("maac-v", tmp_path, **given)
    with pytest.warns(UserWarning, match="its end is kept"):
        trainer.train()
    assert max(len(s.prompt_ids) for s in trainer.samples) == 60
    assert rows(trainer)[-1]["truncated_prompts"] == 4


@pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-shared", "maac-v"])
def test_what_is_not_finite_is_not_logged(variant, make_trainer, tmp_path):
    """Targets that do not vary have no variance to explain; a callback may have nothing to say."""

    def metrics_callback(samples):
        n = samples[0].item["n"]
        return {"never": float("nan"), "huge": float("inf"), "even": n if n % 2 == 0 else np.nan}

    given = {"reward_func": lambda a, b: 0.5, "metrics_callback": metrics_callback}
    trainer = make_trainer(variant, tmp_path, {"eval_interval": 4}, eval_dataset=EVAL, **given)
    trainer.train()
    text = Path(trainer.output_dir, "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    names = {name for row in rows(trainer) for name in row}
    assert "critic_0/value_loss" in names
    assert not {"critic_0/explained_variance", "never", "eval/huge", "huge"} & names
    assert [row["even"] for row in rows(trainer) if "even" in row] == [1, 5, 8]
    assert rows(trainer)[0]["eval/even"] == 1


@pytest.mark.parametrize("variant", ["iac-q-shared", "maac-q"])
def test_a_metrics_callback_gets_all_samples_of_an_item(variant, make_trainer, tmp_path):
    """In order of turn and agent, with all that is known of them when they are trained on."""
    seen = []
    args = {"num_turns": 2, "rollout_buffer_size": 8}
    given = {"metrics_callback": lambda samples: seen.append(samples) or {"a/b": len(samples)}}
    trainer = make_trainer(variant, tmp_path, args, **given)
    trainer.train()
    assert [samples[0].row for samples in seen] == list(range(10))
    for samples in seen:
        places = [(s.row, s.turn_idx, s.agent_idx) for s in samples]
        assert places == [(samples[0].row, t, i) for t in (0, 1) for i in (0, 1)]
        for s in samples:
            assert s.item == ROWS[s.row] and s.prompt_ids and s.completion_ids and s.critic_ids
            assert s.advantage == approx(s.target - s.old_value)
            assert s.metadata["batch_item"] is s.item and s.returns == s.expected_return
            assert s.response_len == len(s.completion_ids)
    assert [row["a/b"] for row in rows(trainer)] == [4, 4, 4]


@pytest.mark.parametrize("answer", [None, 3, {"a": "much"}, {"a": [1, 2]}, ["a"]])
@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-q"])
def test_a_metrics_callback_that_returns_no_numbers_is_named(variant, answer, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path, metrics_callback=lambda samples: answer)
    with pytest.raises(ValueError, match="metrics_callback must return a dict of numbers"):
        trainer.train()


# --------------------------------------------------------------------------------------------- W&B


def records(file):
    """What an offline run wrote: blocks of 32 KiB, of pieces with a header of 7 bytes each."""
    data, place, message, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        message, place = message + data[place + 7 : place + 7 + size], place + 7 + size
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        if kind in (1, 4):  # a whole message, or the last piece of one
            found.append(Record.FromString(message))
            message = b""
    return found


def history(path):
    """The rows and the exit code of the one run stored below a folder.

    Its last piece is written a moment after the run's end.
    """
    (file,) = [p for p in Path(path).rglob("*.wandb") if "latest-run" not in str(p)]
    patience = time.monotonic() + 60
    while not (found := records(file)) or not found[-1].HasField("exit"):
        assert time.monotonic() < patience, "the run was not finished"
        time.sleep(0.05)
    items = [record.history.item for record in found if record.HasField("history")]
    stored = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in items]
    return stored, found[-1].exit.exit_code


@pytest.fixture
def spied(monkeypatch):
    """Every run that wandb.init makes: the rows it got, the steps, the options, its end."""
    runs, init = [], wandb.init

    @functools.wraps(init)  # its signature is read
    def spy(**options):
        made = init(**options)
        log, finish = made.log, made.finish
        seen = {"run": made, "rows": [], "steps": [], "finished": [], "options": options}
        runs.append(seen)

        def log_spy(row, step=None, **kwargs):
            seen["rows"].append(row), seen["steps"].append(step)
            log(row, step=step, **kwargs)

        def finish_spy(exit_code=None):
            seen["finished"].append(exit_code)
            finish(exit_code=exit_code)

        monkeypatch.setattr(made, "log", log_spy, raising=False)
        monkeypatch.setattr(made, "finish", finish_spy, raising=False)
        return made

    monkeypatch.setattr(wandb, "init", spy)
    monkeypatch.setenv("WANDB_SILENT", "true")
    return runs


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-q"])
def test_wandb_gets_the_rows_of_metrics_jsonl_in_order(variant, make_trainer, tmp_path, spied):
    """Two agents, two turns, six updates, an evaluation every two: all of it arrives."""
    args = {"num_turns": 2, "eval_interval": 4, "eval_num_samples": 2, "num_train_epochs": 2}
    config = {"project": "p", "name": "n", "tags": ["a"], "group": "g", "mode": "offline"}
    config |= {"dir": str(tmp_path / "not there" / "wandb")}
    given = {"eval_dataset": EVAL, "wandb_config": config, "train_dataset": ROWS[:6]}
    trainer = make_trainer(variant, tmp_path, args | {"rollout_buffer_size": 4}, **given)
    trainer.train()
    (seen,) = spied
    written = rows(trainer)
    assert seen["rows"] == [{k: v for k, v in row.items() if k != "env_step"} for row in written]
    assert seen["steps"] == sorted({row["env_step"] for row in written})
    assert sum("agent_1/policy_loss" in row for row in written) == 6
    assert sum("eval/turn_2/reward_mean" in row for row in written) == 4
    stored, code = history(config["dir"])
    assert [row["_step"] for row in stored] == seen["steps"] and code == 0
    assert [{k: v for k, v in row.items() if k[0] != "_"} for row in stored] == seen["rows"]
    assert seen["run"].name == "n" and seen["run"].group == "g" and seen["finished"] == [0]
    assert seen["options"]["config"]["num_turns"] == 2 and wandb.run is None


@pytest.mark.parametrize("variant", ["iac-q-shared", "maac-v"])
def test_an_error_ends_the_wandb_run_and_it_is_the_same_one_once_resumed(variant, make_trainer, tmp_path, spied):
    """Another training in the same process is a run of its own, and one of the user's stays."""
    own = wandb.init(mode="offline", dir=str(tmp_path / "own"))
    calls = []

    def reward_func(a, b):
        calls.append(a)
        if len(calls) == 6:  # after the first update
            raise KeyError("of the user's own")
        return len(a[0]) / 10

    given = {"reward_func": reward_func, "wandb_config": {"mode": "offline", "project": "p"}}
    trainer = make_trainer(variant, tmp_path / "first", **given)
    with pytest.raises(KeyError, match="of the user's own"):
        trainer.train()
    stored, code = history(trainer.output_dir)  # the folder of a run is the default
    assert ([row["_step"] for row in stored], code) == ([4], 1)
    make_trainer(variant, tmp_path, **given).train(trainer.output_dir)
    other = make_trainer(variant, tmp_path / "second", **given)
    other.train()
    assert [row["_step"] for row in history(other.output_dir)[0]] == [4, 8, 10]
    mine, first, resumed, second = spied
    assert [x["finished"] for x in spied] == [[], [1], [0], [0]]
    assert [x["steps"] for x in spied] == [[], [4], [8, 10], [4, 8, 10]]
    assert first["run"].id == resumed["run"].id and resumed["options"]["resume"] == "allow"
    assert len({mine["run"].id, first["run"].id, second["run"].id}) == 3
    own.finish()


def test_logging_to_wandb_changes_no_training_and_without_it_nothing_is_touched(make_trainer, tmp_path, spied):
    for mode in ("disabled", "offline"):
        trainers = [
            make_trainer("maac-q", tmp_path / f"{mode} {name}", wandb_config=config, reward_func=noisy_reward)
            for name, config in {"plain": None, "logged": {"mode": mode}}.items()
        ]
        for number, trainer in enumerate(trainers):
            before = len(spied)
            trainer.train()
            assert len(spied) - before == number
        assert training_part(trainers[0]) == training_part(trainers[1])
        assert torch.equal(*map(weights, trainers))
        assert not list(Path(trainers[0].output_dir).rglob("*.wandb"))


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
def test_wandb_config_as_users_of_comlrl_write_it(variant, make_trainer, tmp_path, spied):
    sections = {"dataset": {"name": "d"}, "trainer": {"lr": 1}, "output": {"verbose": False}}
    config = {"project": "p", "run_name": "n", "entity": None, "dir": str(tmp_path / "w")}
    config |= {"mode": "offline", "config_sections": sections, "output_dir": "of my own"}
    with pytest.warns(UserWarning, match=r"wandb_config: \['output_dir'\] are not known"):
        trainer = make_trainer(variant, tmp_path, wandb_config=config)
    trainer.train()
    (seen,) = spied
    assert seen["run"].name == "n" and "entity" not in seen["options"]
    got = seen["options"]["config"]
    assert {k: got[k] for k in sections} == sections and got["rollout_buffer_size"] == 4
    assert trainer.verbose is False


BAD = [
    (3, "wandb_config must be a dict"),
    ({"project": 3}, "project=3"),
    ({"dir": ["a"]}, "dir="),
    ({"config_sections": ["a"]}, "config_sections"),
    ({"config": "a"}, "config"),
]


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
def test_what_is_wrong_with_wandb_config_is_found_at_construction(variant, make_trainer, tmp_path):
    for config, words in BAD:
        with pytest.raises(ValueError, match=re.escape(words)):
            make_trainer(variant, tmp_path, wandb_config=config)


@pytest.mark.parametrize("error", ["UsageError", "CommError"])
def test_without_a_network_the_run_goes_on_offline_and_says_so(error, make_trainer, tmp_path, monkeypatch, capsys):
    init, modes = wandb.init, []

    @functools.wraps(init)
    def refuse(**options):
        modes.append(options.get("mode"))
        if options.get("mode") != "offline":
            raise getattr(wandb.errors, error)("cannot be reached")
        return init(**options)

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = make_trainer("iac-v-separate", tmp_path, wandb_config={"project": "p"})
    trainer.train()
    assert modes == [None, "offline"] and len(history(trainer.output_dir)[0]) == 3
    shown = capsys.readouterr().out
    assert shown.count("goes on offline") == 1 and "cannot be reached" in shown


WITHOUT_LOGIN = """
import iac
task = iac.number_task(2, 0)
task |= {"train_dataset": task["train_dataset"][:4], "eval_dataset": None}
args = iac.IACConfig(max_new_tokens=2, rollout_buffer_size=4)
given = {"agent_model": iac.TINY_LM, "critic_model": iac.TINY_LM, "wandb_config": {"project": "p"}}
iac.IACTrainer(args=args, output_dir=OUTPUT, **given, **task).train()
"""


def test_without_a_login_nothing_is_asked_and_nothing_hangs(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"HOME": str(tmp_path)}
    code = WITHOUT_LOGIN.replace("OUTPUT", repr(str(tmp_path / "run")))
    done = run("-c", code, env=env)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("goes on offline") == 1
    assert len(history(tmp_path / "run")[0]) == 1


# --------------------------------------------------------------------------------- what is shown


def shown_by(trainer, capsys):
    capsys.readouterr()
    trainer.train()
    return capsys.readouterr()


@pytest.mark.parametrize("variant", ["iac-q-shared", "maac-v"])
def test_a_quiet_run_shows_neither_bar_nor_answers_and_writes_all(variant, make_trainer, tmp_path, capsys):
    given, args = {"eval_dataset": EVAL}, {"eval_interval": 4}
    loud = make_trainer(variant, tmp_path / "loud", args, **given)
    shown = shown_by(loud, capsys)
    assert "item/s" in shown.err and "'eval 0' -> " in shown.out
    assert re.search(r"env_step 4: eval/turn_1/reward_mean \d\.\d{3}", shown.out)
    assert "reward=" in shown.err and "10/10" in shown.err
    quiet = make_trainer(variant, tmp_path / "quiet", args, **given)
    quiet.verbose = False
    shown = shown_by(quiet, capsys)
    assert shown.err == "" and "->" not in shown.out
    assert training_part(quiet) == training_part(loud)
    assert rows(quiet, "completions.jsonl") == rows(loud, "completions.jsonl")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "a notebook's", "closed"])
@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-q"])
def test_what_a_console_cannot_show_does_not_end_a_run(variant, encoding, make_trainer, tmp_path, monkeypatch):
    raw = io.BytesIO()
    screen = io.StringIO()
    if "-" in encoding or encoding == "ascii":
        screen = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    if encoding == "closed":
        screen.close()
    dataset = [{"prompt": f"name \u2192 {n} \U0001f600"} for n in range(4)]
    given = {"train_dataset": dataset, "eval_dataset": dataset}
    trainer = make_trainer(variant, tmp_path, {"eval_interval": 4}, **given)
    monkeypatch.setattr(sys, "stdout", screen)
    trainer.train()
    monkeypatch.undo()
    assert len(rows(trainer)) == 2 and rows(trainer, "completions.jsonl")
    if encoding == "a notebook's":
        assert "name \u2192 2" in screen.getvalue()
    elif encoding != "closed":
        assert "name \\\\u2192 2" in raw.getvalue().decode(encoding) or "\\u2192" in raw.getvalue().decode(encoding)
