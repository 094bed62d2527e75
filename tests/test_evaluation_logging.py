"""When there is an evaluation, what is logged, and that neither changes the training."""

import copy
import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
import wandb
from commands import run
from library_models import ROWS, VARIANTS, build, collected, folder, metrics
from wandb.proto.wandb_internal_pb2 import Record

import common

EVAL = [{"prompt": f"eval {n}", "n": n} for n in range(5)]
CLOCK = ("time/", "env_step")


def training_part(trainer) -> list[dict]:
    """The rows of training, without times."""
    rows = [
        {k: v for k, v in row.items() if not k.startswith(("eval/", "time/"))}
        for row in metrics(trainer)
    ]
    return [row for row in rows if len(row) > 1]


def weights(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for m in [*trainer.agents, *trainer.critics] for p in m.parameters()]


# -------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    "off", ["eval_interval 0", "no eval_dataset", "eval_num_samples 0", "another eval_interval"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_with_evaluation_on_and_off(variant, off, tmp_path):
    """Completions, metrics and weights, to the bit: an evaluation takes no random number from training."""
    on = {"eval_interval": 3, "eval_num_samples": 4, "eval_batch_size": 2}
    change = {
        "eval_interval 0": {"eval_interval": 0},
        "eval_num_samples 0": {"eval_num_samples": 0},
    }
    change |= {"another eval_interval": {"eval_interval": 2}}
    trainers, samples = [], []
    for name, args, eval_dataset in [
        ("on", on, EVAL),
        ("off", on | change.get(off, {}), None if off == "no eval_dataset" else EVAL),
    ]:
        trainers.append(build(variant, tmp_path / name, args, eval_dataset=eval_dataset))
        samples.append(collected(trainers[-1]))
        trainers[-1].train()
    assert [s.completion_ids for s in samples[0]] == [s.completion_ids for s in samples[1]]
    assert training_part(trainers[0]) == training_part(trainers[1])
    assert all(torch.equal(p, q) for p, q in zip(*map(weights, trainers), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluating_by_hand_changes_neither_training_nor_the_global_random_state(variant, tmp_path):
    quiet, busy = (build(variant, tmp_path / name, eval_dataset=EVAL) for name in ("quiet", "busy"))
    update, state = busy.update, torch.get_rng_state()
    busy.update = lambda i: (busy.evaluate(), update(i), busy.evaluate())
    busy.evaluate()
    quiet.train(), busy.train()
    assert training_part(quiet) == training_part(busy)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("rows", "interval", "points"),
    [
        (6, 2, [0, 2, 4, 6]),
        (7, 3, [0, 3, 6, 7]),
        (3, 16, [0, 3]),
        (4, 1, [0, 1, 2, 3, 4]),
        (4, 0, []),
    ],
)
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_evaluation_points_and_items(variant, rows, interval, points, tmp_path):
    """Before the first batch, every eval_interval batches, once after training; each time the same first items.

    It sees the weights that one item at a time would give: those after the update that the last item completed.
    """
    calls, updates, at = [], [], []

    def reward_func(a, b, batch_items):
        calls.append(batch_items[0]["prompt"])
        assert (
            len(a) == len(b) == (1 if "eval" in calls[-1] else 2)
        )  # evaluation takes one joint answer
        return len(a[0]) / 10

    args = {
        "eval_interval": interval,
        "eval_num_samples": 3,
        "num_generations": 2,
        "rollout_buffer_size": 8,
    }
    given = {"reward_func": reward_func, "train_dataset": ROWS[:rows], "eval_dataset": EVAL}
    trainer = build(variant, tmp_path, args, **given)
    update, evaluate = trainer.update, trainer.evaluate
    trainer.update = lambda i: updates.append(i) or update(i)
    trainer.evaluate = lambda: at.append(updates.count(0)) or evaluate()
    trainer.train()
    assert at == [
        point // 4 + (point == rows and rows % 4 > 0) for point in points
    ]  # 4 items fill the buffer
    assert [c for c in calls if "eval" in c] == ["eval 0", "eval 1", "eval 2"] * len(points)
    logged = [row["env_step"] for row in metrics(trainer) if "eval/turn_1/reward_mean" in row]
    assert logged == [2 * point for point in points]
    assert [c for c in calls if "name" in c] == [row["prompt"] for row in ROWS[:rows]]


@pytest.mark.parametrize(("size", "batches"), [(1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_eval_batch_size_is_how_many_items_are_generated_together(
    size, batches, tmp_path, monkeypatch
):
    seen, generate_all = [], common.generate_all

    def spy(models, prompts, *rest):
        seen.append(len(prompts[0]))
        return generate_all(models, prompts, *rest)

    monkeypatch.setattr(common, "generate_all", spy)
    args = {"eval_batch_size": size, "eval_num_samples": 5}
    result = build("maac", tmp_path, args, eval_dataset=EVAL).evaluate()
    assert seen == batches and result.keys() >= {
        "eval/turn_1/reward_mean",
        "eval/turn_1/expected_return",
    }
    assert not (tmp_path / "metrics.jsonl").exists()  # there is no run to write to


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_reports_what_the_reward_function_saw(variant, tmp_path):
    """eval/ metrics and completions.jsonl, over two turns, against a spy on the reward function."""
    calls = []

    def reward_func(a, b, prompts, batch_items):
        reward = [len(a[0]) / 10, len(b[0]) / 20]
        calls.append((batch_items[0], prompts, [a[0], b[0]], reward))
        return reward

    def transition(prompt, agent_completions, num_agents, **_):
        return [f"{prompt}!"] * num_agents

    args = {"num_turns": 2, "eval_interval": 4, "eval_num_samples": 3, "rollout_buffer_size": 8}
    given = {"reward_func": reward_func, "external_transition": transition, "eval_dataset": EVAL}
    trainer = build(variant, tmp_path, args, **given)
    trainer.train()
    first = [c for c in calls if c[0]["prompt"].startswith("eval")][
        :6
    ]  # of three items, in batches of one
    assert [c[0]["n"] for c in first] == [0, 0, 1, 1, 2, 2]
    row = metrics(trainer)[0]
    means = [
        [sum(c[3][i] for c in first[t::2]) / 3 for i in (0, 1)] for t in (0, 1)
    ]  # [turn][agent]
    assert row["eval/turn_1/reward_mean"] == pytest.approx(sum(means[0]) / 2)
    assert row["eval/turn_2/reward_mean"] == pytest.approx(sum(means[1]) / 2)
    assert row["eval/turn_1/expected_return"] == pytest.approx(
        sum(means[0]) / 2 + sum(means[1]) / 2
    )
    assert row["eval/turn_2/expected_return"] == pytest.approx(sum(means[1]) / 2)
    assert row["eval/agent_1/reward_mean"] == pytest.approx((means[0][1] + means[1][1]) / 2)
    written = [
        json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()
    ][:12]
    for number, (item, prompts, texts, reward) in enumerate(first):
        for i in (0, 1):
            expected = {
                "env_step": 0,
                "row": item["n"],
                "turn": 1 + number % 2,
                "agent": i,
                "prompt": prompts[i],
            }
            assert expected | {"completion": texts[i], "reward": reward[i]} in written


# ----------------------------------------------------------------------------------------------------------- metrics


def by_hand(samples, trainer, start, args) -> dict[str, float]:
    """All metrics of one update but the gradient norms, from its samples and the agents as they were."""
    N, turns, row = len(start), sorted({s.turn_idx for s in samples}), {}

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    for turn in turns:
        group = [s for s in samples if s.turn_idx == turn]
        later = [
            sum(
                x.reward
                for x in samples
                if (x.row, x.agent_idx) == (s.row, s.agent_idx) and x.turn_idx >= turn
            )
            for s in group
        ]
        row[f"turn_{turn + 1}/reward_mean"] = mean(s.reward for s in group)
        row[f"turn_{turn + 1}/expected_return"] = mean(later)
    for i in range(N):
        own, losses = [s for s in samples if s.agent_idx == i], []
        for turn in turns:
            group = [s for s in own if s.turn_idx == turn]
            raw = torch.tensor([s.target - s.old_value for s in group], dtype=torch.float64)
            if args["advantage_normalization"]:
                raw = (raw - raw.mean()) / raw.std(correction=0)
            for s, A in zip(group, raw.tolist(), strict=True):
                ids = torch.tensor([s.prompt_ids + s.completion_ids])
                logits = (
                    start[i](ids).logits[0, len(s.prompt_ids) - 1 : -1].double()
                    / args["temperature"]
                )
                logprobs = logits.log_softmax(-1)[range(len(s.completion_ids)), s.completion_ids]
                losses.append(-logprobs.sum().item() * A)
        stops = {
            trainer.agents[i].generation_config.eos_token_id,
            trainer.tokenizers[i].eos_token_id,
        }
        row |= {
            f"agent_{i}/reward_mean": mean(s.reward for s in own),
            f"agent_{i}/completion_tokens": mean(len(s.completion_ids) for s in own),
            f"agent_{i}/finished_fraction": mean(s.completion_ids[-1] in stops for s in own),
            f"agent_{i}/reference_kl": mean(s.reference_kl for s in own),
            f"agent_{i}/advantage_mean": mean(s.target - s.old_value for s in own),
            f"agent_{i}/policy_loss": mean(losses),
        }
    C = len(trainer.critics)
    for c in range(C):
        read = [
            [s for s in samples if s.agent_idx == i and s.turn_idx == t]
            for i in range(c, N, C)
            for t in turns
        ]
        y, v = (
            torch.tensor([[getattr(s, name) for s in g] for g in read]).double()
            for name in ("target", "old_value")
        )
        explained = 1 - (y - v).var(-1, correction=0) / y.var(-1, correction=0)
        row |= {
            f"critic_{c}/value_mean": v.mean().item(),
            f"critic_{c}/value_loss": ((y - v) ** 2).mean().item(),
            f"critic_{c}/explained_variance": explained.mean().item(),
        }
    return row


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_metric_has_its_name_and_its_value(variant, normalized, tmp_path):
    """Two updates at a learning rate so small that the weights stay as they are, so that all can be done by hand."""
    args = {
        "agent_learning_rate": 1e-30,
        "critic_learning_rate": 1e-30,
        "num_turns": 2,
        "temperature": 0.8,
    }
    args |= {
        "rollout_buffer_size": 8,
        "advantage_normalization": normalized,
        "reference_kl_enabled": True,
    }
    args |= {"max_grad_norm": 0.01, "max_new_tokens": 6}
    given = {
        "external_transition": lambda prompt, agent_completions, **_: [
            f"{prompt} {t}" for t in agent_completions
        ]
    }
    if variant != "iac_shared":  # a body unlike the actors', so that nothing agrees by chance
        given["critic_model"] = folder("L", "T")
    trainer = build(variant, tmp_path, args, **given)
    with torch.no_grad():
        for module in [critic.value_head for critic in trainer.critics] + trainer.references:
            for p in module.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
        end = trainer.agents[0].transformer.wte.weight[1]
        trainer.agents[0].transformer.ln_f.bias.add_(
            2.5 * end / (end @ end)
        )  # now it stops at times
    start, norms = copy.deepcopy(trainer.agents), {}
    samples, optimizer_step = collected(trainer), trainer.optimizer_step

    def spy(name, optimizer):
        grads = [
            p.grad.flatten()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norms.setdefault(name, []).append(torch.cat(grads).norm().item())
        optimizer_step(name, optimizer)

    trainer.optimizer_step = spy
    trainer.train()
    rows, half = metrics(trainer), len(samples) // 2
    assert [row["env_step"] for row in rows] == [8, 16]
    for number, (row, own) in enumerate(zip(rows, (samples[:half], samples[half:]), strict=True)):
        expected = by_hand(own, trainer, start, args)
        for name, seen in norms.items():
            per_update = len(seen) // 2
            expected[name] = sum(seen[number * per_update : (number + 1) * per_update]) / per_update
        got = {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        assert got.pop("truncated_prompts") == 0
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        assert (
            expected["agent_0/finished_fraction"] not in (0, 1)
            and abs(expected["agent_1/reference_kl"]) > 0.01
        )
        assert (
            abs(expected["critic_0/explained_variance"]) > 1e-3
            and len({*expected.values()}) > len(expected) * 0.8
        )
        shares = [row["time/rollout"], row["time/update"]]
        assert row["time/env_steps_per_second"] > 0 and min(shares) > 0 and sum(shares) <= 1
    names = {name.split("/")[0] for name in rows[0]}
    assert {"turn_1", "turn_2", "agent_0", "agent_1", "critic_0", "time"} <= names
    assert ("critic_1" in names) == (variant != "maac")


@pytest.mark.parametrize(
    ("steps", "logged"), [(1, [4, 8, 12, 14]), (4, [4, 8, 12, 14]), (6, [8, 14]), (99, [14])]
)
def test_logging_steps_are_the_joint_answers_between_two_rows_at_least(steps, logged, tmp_path):
    """A row holds the means of everything since the row before; the last one comes at the end of training."""
    args = {"logging_steps": steps, "num_train_epochs": 1}
    trainer = build(
        "iac", tmp_path, args, train_dataset=[{"prompt": f"row {n}"} for n in range(14)]
    )
    samples = collected(trainer)
    trainer.train()
    rows = metrics(trainer)
    assert [row["env_step"] for row in rows] == logged
    for start, row in zip([0, *logged], rows, strict=False):
        own = [s for s in samples if start <= s.row < row["env_step"]]
        assert row["turn_1/reward_mean"] == pytest.approx(sum(s.reward for s in own) / len(own))
        assert row["agent_1/advantage_mean"] == pytest.approx(
            sum(s.advantage for s in own if s.agent_idx) / len(own) * 2
        )


def test_a_cut_prompt_is_counted_in_the_log(tmp_path):
    rows = [{"prompt": "x " * 400}, *ROWS[:3]]
    with pytest.warns(UserWarning, match="its end is kept"):
        trainer = build(
            "iac", tmp_path, train_dataset=rows, eval_dataset=rows, args={"eval_interval": 2}
        )
        trainer.train()
    assert [row["truncated_prompts"] for row in metrics(trainer) if "truncated_prompts" in row] == [
        2
    ]  # two agents


# --------------------------------------------------------------------------------------------------------------- W&B


def records(file: Path) -> list[Record]:
    """What an offline run wrote: a log of 32 KiB blocks, of pieces of messages with a header of 7 bytes each."""
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


def history(path) -> list[dict]:
    """The stored rows of the one run below a folder; its last piece is written a moment after the run's end."""
    (file,) = [p for p in Path(path).rglob("*.wandb") if "latest-run" not in str(p)]
    patience = time.monotonic() + 20
    while not (found := records(file)) or not found[-1].HasField("exit"):
        assert time.monotonic() < patience, "the run was not finished"
        time.sleep(0.05)
    items = [record.history.item for record in found if record.HasField("history")]
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in items
    ]


@pytest.fixture
def spied(monkeypatch):
    """Every run that wandb.init makes, each with the rows it was given, the steps, and whether it was finished."""
    runs, init = [], wandb.init

    def spy(**options):
        run = init(**options)
        log, finish, seen = (
            run.log,
            run.finish,
            {"run": run, "rows": [], "steps": [], "finished": 0, "options": options},
        )
        runs.append(seen)

        def log_spy(row, step=None, **kwargs):
            seen["rows"].append(row), seen["steps"].append(step)
            log(row, step=step, **kwargs)

        def finish_spy(*args, **kwargs):
            seen["finished"] += 1
            finish(*args, **kwargs)

        monkeypatch.setattr(run, "log", log_spy, raising=False)
        monkeypatch.setattr(run, "finish", finish_spy, raising=False)
        return run

    monkeypatch.setattr(wandb, "init", spy)
    monkeypatch.setenv("WANDB_SILENT", "true")
    return runs


TWO_TURNS = {
    "num_turns": 2,
    "eval_interval": 8,
    "eval_num_samples": 2,
    "num_train_epochs": 3,
    "rollout_buffer_size": 8,
}


def again(prompt, agent_completions, num_agents, **_):
    return [f"{prompt} again"] * num_agents


@pytest.mark.parametrize("mode", ["offline", "disabled"])
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_wandb_gets_the_rows_of_metrics_jsonl(variant, mode, tmp_path, spied):
    """A17: two agents, two turns, 6 updates, an evaluation every 2 updates: everything arrives, in order."""
    config = {
        "project": "p",
        "name": "n",
        "tags": ["a"],
        "group": "g",
        "mode": mode,
        "dir": str(tmp_path / "wandb"),
    }
    given = {"external_transition": again, "eval_dataset": EVAL, "wandb_config": config}
    trainer = build(variant, tmp_path / "run", TWO_TURNS, **given)
    trainer.train()
    rows, (seen,) = metrics(trainer), spied
    assert seen["rows"] == [{k: v for k, v in row.items() if k != "env_step"} for row in rows]
    assert (
        seen["steps"]
        == [row["env_step"] for row in rows]
        == sorted({row["env_step"] for row in rows})
    )
    assert sum("agent_1/policy_loss" in row for row in rows) == 6
    assert (
        sum("eval/turn_2/reward_mean" in row for row in rows) == 4
    )  # before, after 2, 4 and 6 updates
    assert {k: seen["options"][k] for k in config} == config and seen["finished"] == 1
    assert seen["options"]["config"]["num_turns"] == 2
    if mode == "offline":
        stored = history(tmp_path / "wandb")
        assert [row["_step"] for row in stored] == seen["steps"]
        assert [{k: v for k, v in row.items() if k[0] != "_"} for row in stored] == seen["rows"]
        assert seen["run"].name == "n" and seen["run"].group == "g"


def test_wandb_folder_is_in_output_dir_by_default(tmp_path, spied):
    build("maac", tmp_path / "run", wandb_config={"mode": "offline"}).train()
    assert len(history(tmp_path / "run")) == 2


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_two_trainings_in_one_process_are_two_runs_also_after_an_exception(
    variant, tmp_path, spied
):
    """A17: and the second run's steps begin at its own 0."""
    calls = []

    def reward_func(a, b):
        calls.append(a)
        if len(calls) == 6:  # after the first update
            raise KeyError("of the user's own")
        return len(a[0]) / 10

    config = {"mode": "offline", "project": "p"}
    for name in ("first", "second"):
        trainer = build(variant, tmp_path / name, reward_func=reward_func, wandb_config=config)
        if name == "first":
            with pytest.raises(KeyError, match="of the user's own"):
                trainer.train()
        else:
            trainer.train()
    first, second = spied
    assert first["run"].id != second["run"].id and first["finished"] == second["finished"] == 1
    assert first["steps"] == [4] and second["steps"] == [4, 8]
    assert [row["_step"] for row in history(tmp_path / "first")] == [4]
    assert [row["_step"] for row in history(tmp_path / "second")] == [4, 8]
    assert wandb.run is None


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_what_is_no_number_in_json_is_an_error_and_not_written(variant, tmp_path):
    trainer = build(variant, tmp_path / "run", metrics_callback=lambda samples: {"huge": 1e308})
    with pytest.raises(ValueError, match="not JSON compliant"):
        trainer.train()
    assert metrics(trainer) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_heads_are_float32_whatever_the_default_type(variant, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        build(variant, tmp_path / "run").train()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_wandb_run_of_the_users_own_is_left_alone(tmp_path, spied):
    own = wandb.init(mode="offline", dir=str(tmp_path))
    build("iac", tmp_path / "run", wandb_config={"mode": "offline"}).train()
    mine, trained = spied
    assert (
        trained["run"].id != own.id
        and (mine["finished"], trained["finished"]) == (0, 1)
        and mine["rows"] == []
    )
    own.finish()


def test_logging_to_wandb_does_not_change_the_training(tmp_path):
    """A18."""
    plain = build("maac", tmp_path / "plain")
    logged = build(
        "maac",
        tmp_path / "logged",
        wandb_config={"mode": "offline", "settings": wandb.Settings(silent=True)},
    )
    plain.train(), logged.train()
    assert training_part(plain) == training_part(logged)
    assert not list((tmp_path / "plain").rglob("*.wandb"))


def test_without_a_login_the_run_goes_on_offline_and_says_so(tmp_path):
    code = f"""
from library_models import build, metrics
trainer = build("iac", {str(tmp_path / "run")!r}, wandb_config={{"project": "p"}})
trainer.train()
print(len(metrics(trainer)), "rows")
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {
        "HOME": str(tmp_path)
    }
    done = run("-c", code, cwd=Path(__file__).parent, env=env)
    assert done.returncode == 0, done.stderr
    assert "2 rows" in done.stdout
    assert (done.stdout + done.stderr).count("goes on offline") == 1
    assert len(history(tmp_path / "run")) == 2


def test_without_wandb_config_wandb_is_not_touched(tmp_path, spied):
    build("iac", tmp_path / "run").train()
    assert spied == []
