"""Random settings: those that are valid train without an error or a number that is not finite, the others are refused.

By default 40 valid ones are tried and 300 invalid ones; FUZZ=300 tries as many valid ones as that.
"""

import copy
import functools
import math
import os
import random

import pytest
import torch
from test_cli import rows
from test_core import TINY
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac
import maac

COUNT = int(os.environ.get("FUZZ", 40))
BATCHES = 10  # tests that they are split among
load = functools.cache(lambda auto_class: auto_class.from_pretrained(TINY))


def say_more(prompt, agent_completions, num_agents, **_):
    return [f"{prompt}, said {' '.join(agent_completions)}"] * num_agents


def reward_func(*completions, batch_items):
    """Between 1 and 2 for each joint answer, or for one in five items the same number for all."""
    if batch_items[0]["n"] % 5 == 0:
        return 0.5
    return [
        1 + sum(sum(text.encode()) % 7 for text in joint) / 7 / len(joint)
        for joint in zip(*completions, strict=True)
    ]


def valid(rng):
    """(algorithm, settings): every setting that has no say in where things run, at random."""
    maybe = lambda value, other=None: value if rng.random() < 0.5 else other  # noqa: E731
    turns, file = rng.choice([1, 1, 2, 3]), rng.choice(["iac", "maac"])
    settings = {
        "num_agents": rng.randint(1, 4),
        "num_turns": turns,
        "num_generations": 1 if turns > 1 else rng.choice([1, 2, 5]),
        "critic_type": rng.choice("vq"),
        "agent_learning_rate": rng.choice([0.0, 1e-6, 3e-4, 1e-2]),
        "critic_learning_rate": rng.choice([0, 1e-5, 1e-2]),
        "value_loss_coef": rng.choice([0.0, 0.6, 10.0]),
        "advantage_normalization": rng.random() < 0.5,
        "rollout_buffer_size": rng.randint(1, 6),
        "train_batch_size": maybe(rng.randint(1, 7)),
        "micro_batch_size": maybe(rng.randint(1, 3)),
        "rollout_batch_size": maybe(rng.randint(1, 3)),
        "max_new_tokens": rng.randint(1, 4),
        "temperature": rng.choice([0.05, 0.7, 1, 3.0, 100.0]),
        "top_p": rng.choice([1.0, 0.9, 0.3, 1e-3]),
        "top_k": maybe(rng.choice([1, 2, 5, 1000])),
        "external_prompt_passthrough": rng.random() < 0.5,
        "discount": rng.choice([0, 0.5, 0.99, 1.0]),
        "early_termination_threshold": maybe(rng.choice([-1.0, 0.5, 1.3, 1.6, 2.0])),
        "reference_kl_enabled": rng.random() < 0.5,
        "reference_kl_coef": rng.choice([0.0, 0.1, 3.0]),
        "max_grad_norm": maybe(rng.choice([1e-3, 1.0, 100.0])),
        "eval_interval": rng.choice([0, 1, 2, 5]),
        "eval_num_samples": rng.randint(0, 2),
        "eval_batch_size": rng.randint(1, 3),
        "logging_steps": rng.choice([1, 2, 7]),
        "checkpoint_interval": rng.choice([0, 0, 1]),
        "dtype": rng.choice(["float32", "float32", "bfloat16"]),
        "seed": rng.randrange(1000),
    }
    if file == "iac":
        settings |= {
            "use_separate_critic": rng.random() < 0.5,
            "value_clip_range": maybe(rng.choice([0.01, 0.2, 5.0])),
            "critic_value_head_hidden_dim": maybe(rng.choice([1, 8])),
            "value_head_hidden_dim": maybe(rng.choice([1, 8])),
        }
    return file, settings


def make(file, settings, output_dir=None, rng=random, **given):
    """A trainer on as many rows as two updates take, with copies of models that were loaded once."""
    config = (iac.IACConfig if file == "iac" else maac.MAACConfig)(**settings)
    G, T = config.num_generations, config.num_turns
    shortest = 1 if config.early_termination_threshold is not None else T  # turns of an episode
    needed = math.ceil(config.rollout_buffer_size / (G * shortest))  # rows of the first update
    length = needed + rng.randint(1, needed)
    N, separate = config.num_agents, file == "maac" or config.use_separate_critic
    task = {
        "agents": [copy.deepcopy(load(AutoModelForCausalLM)) for _ in range(N)],
        "tokenizer": load(AutoTokenizer),
        "formatters": [lambda x, i=i: f"agent {i + 1} of {N}: {x['prompt']} =" for i in range(N)],
        "train_dataset": [
            {"prompt": f"sum to {n}", "n": n} for n in (rng.randrange(10) for _ in range(length))
        ],
        "eval_dataset": rng.choice([None, [{"prompt": "sum to 3", "n": 3}] * 3]),
        "reward_func": reward_func,
        "external_transition": say_more,
        "output_dir": output_dir and str(output_dir),
    }
    if separate:
        count = N if file == "iac" else 1
        task["critics"] = [copy.deepcopy(load(AutoModel)) for _ in range(count)]
        if file == "iac" and rng.random() < 0.2:  # one for all
            task["critic_model"] = task.pop("critics")[0]
    if file == "maac" and rng.random() < 0.5:
        task["model_config"] = {"critic_value_head_hidden_dim": rng.choice([1, 8])}
    return (iac.IACTrainer if file == "iac" else maac.MAACTrainer)(
        **{"args": config} | task | given
    )


@pytest.mark.parametrize("batch", range(BATCHES))
def test_valid_settings_train(batch, tmp_path):
    for number in range(batch, COUNT, BATCHES):
        rng = random.Random(f"valid {number}")
        file, settings = valid(rng)
        described = f"number {number}: {file} {settings}"
        trainer = make(file, settings, tmp_path / str(number), rng)
        models = [*trainer.agents, *trainer.critics]
        before = [p.detach().clone() for model in models for p in model.parameters()]
        try:
            trainer.train()
        except Exception as error:
            raise AssertionError(described) from error
        after = [p for model in models for p in model.parameters()]
        assert all(p.isfinite().all() for p in after), described
        moved = any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))
        actors = settings["agent_learning_rate"] > 0
        shared = not settings.get("use_separate_critic", True)
        critics = settings["value_loss_coef"] > 0 and (
            actors if shared else settings["critic_learning_rate"] > 0
        )
        assert critics <= moved <= (actors or critics), (
            described
        )  # equal rewards give the actors nothing to learn
        metrics = rows(trainer.output_dir)
        early = settings["early_termination_threshold"] is not None
        assert trainer.updates == 2 or (early and trainer.updates > 2), described
        assert "agent_0/policy_loss" in metrics[-1], described
        assert all(math.isfinite(value) for row in metrics for value in row.values()), described


# -------------------------------------------------------------------------------------------------------- invalid

OPTIONAL = {
    "train_batch_size",
    "micro_batch_size",
    "rollout_batch_size",
    "top_k",
    "max_grad_norm",
    "value_clip_range",
}
OPTIONAL |= {"early_termination_threshold", "critic_value_head_hidden_dim", "value_head_hidden_dim"}
COUNTS = {
    "num_agents",
    "num_turns",
    "num_generations",
    "rollout_buffer_size",
    "train_batch_size",
    "micro_batch_size",
}
COUNTS |= {
    "rollout_batch_size",
    "max_new_tokens",
    "top_k",
    "eval_batch_size",
    "num_train_epochs",
    "logging_steps",
}
COUNTS |= {"critic_value_head_hidden_dim", "value_head_hidden_dim"}
NATURAL = {"eval_interval", "eval_num_samples", "checkpoint_interval", "seed"}
SWITCHES = {
    "advantage_normalization",
    "external_prompt_passthrough",
    "reference_kl_enabled",
    "use_separate_critic",
}
CHOICES = {"critic_type", "dtype", "parallel_training"}
DEVICES = {"agent_devices", "critic_devices", "reference_devices"}
NUMBERS = {
    "agent_learning_rate",
    "critic_learning_rate",
    "value_loss_coef",
    "temperature",
    "top_p",
    "discount",
}
NUMBERS |= {"early_termination_threshold", "reference_kl_coef", "max_grad_norm", "value_clip_range"}


def bad_value(rng, name):
    """A value that the setting cannot have."""
    wrong: list = ["1", [1], {}, 1j, object(), b"1"]
    if name not in OPTIONAL and name not in DEVICES:
        wrong.append(None)
    if name in COUNTS | NATURAL:
        wrong += [-1, -(10**30), 1.0, 0.5, math.nan, math.inf, True] + [0] * (name in COUNTS)
    elif name in NUMBERS:
        wrong += [math.nan, math.inf, -math.inf, True]
        wrong += [-1e-9, -1, -5.0] * (name != "early_termination_threshold")
        wrong += [0, 0.0] * (name in ("temperature", "top_p", "max_grad_norm", "value_clip_range"))
        wrong += [1.001, 2] * (name in ("top_p", "discount"))
    elif name in SWITCHES:
        wrong += [0, 1, "true", "False", math.nan]
    elif name in CHOICES:
        wrong = [None, "", "V", "fp32", "float16", "ddp", 1, True, ["v"], b"v"]
    else:
        wrong = [[], "", [""], [None], [0], 0, {"cpu": 1}, [["cpu"]], ("cpu", 1)]
    return rng.choice(wrong)


def bad_settings(rng):
    """Settings of which one is out of place: (file, settings, what the message names)."""
    file, settings = valid(rng)
    names = sorted(COUNTS | NATURAL | SWITCHES | CHOICES | DEVICES | NUMBERS)
    config = iac.IACConfig if file == "iac" else maac.MAACConfig
    name = rng.choice([name for name in names if name in config.__dataclass_fields__])
    return file, settings | {name: bad_value(rng, name)}, rf"^{name}="


def bad_pair(rng):
    """Settings that do not fit together."""
    file, settings = valid(rng)
    change, message = rng.choice(
        [
            ({"num_turns": 2, "num_generations": 3}, "num_generations=3"),
            ({"parallel_training": "mp"}, "agent_devices=None"),
            ({"parallel_training": "mp", "critic_devices": ["cpu"]}, "agent_devices=None"),
        ]
    )
    return file, settings | change, message


def bad_argument(rng):
    """Arguments of the trainer: (file, settings, what the message names, arguments)."""
    file, settings = valid(rng)
    N, model = settings["num_agents"], load(AutoModelForCausalLM)
    separate = settings.get("use_separate_critic", True)
    cases = {
        "formatters": [[len] * (N + 1), [], "prompt", 3, [None] * N],
        "reward_func": [None, 0.5, "reward"],
        "reward_processor": [0.5, "float"],
        "metrics_callback": [0.5, [len]],
        "external_transition": ["next", 1] + [None] * (settings["num_turns"] > 1),
        "tokenizer": [None, "a/name", [load(AutoTokenizer)] * (N + 1), [], [None] * N],
        "train_dataset": [5, {"prompt": ["a"]}, 0.5],
        "eval_dataset": [5, {"prompt": ["a"]}],
        "agents": [[], [model] * (N + 1), [None] * N, [5] * N, "folder", model],
        "agent_model": [TINY],  # agents are given too
        "model_config": [3, {"a_typo": {}}, {"model_kwargs": None}, {"tokenizer_kwargs": [1]}],
        "wandb_config": ["project", 3],
        "args": [{"num_agents": N}, "iac", maac.MAACConfig() if file == "iac" else iac.IACConfig()],
    }
    if file == "maac" or not separate:
        cases["critics"] = [[load(AutoModel)] * (2 if file == "maac" else N)]
    if N > 1:
        cases["agents"].append([copy.deepcopy(model)] * N)  # one model twice
    name = rng.choice(sorted(cases))
    return file, settings, name, {name: rng.choice(cases[name])}


@pytest.mark.parametrize("batch", range(BATCHES))
def test_invalid_settings_are_refused_by_name(batch, tmp_path):
    kinds = [bad_settings] * 6 + [bad_pair] + [bad_argument] * 3
    for number in range(batch, 300, BATCHES):
        rng = random.Random(f"invalid {number}")
        file, settings, message, *given = kinds[number // BATCHES % len(kinds)](rng)
        with pytest.raises(ValueError, match=message) as caught:
            trainer = make(file, settings, tmp_path / str(number), random.Random(0), **dict(*given))
            pytest.fail(f"number {number}: {message}, {given}, {settings} made {trainer}")
        assert len(str(caught.value)) < 1000, number
        assert not (tmp_path / str(number)).exists()
