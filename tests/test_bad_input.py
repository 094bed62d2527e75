"""Bad input: an error that names the field, row or agent, before the first weight changes."""

import math
import warnings

import pytest
import torch
from test_core import TINY, iac, maac, make_trainer, rig
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIGS = [iac.IACConfig, maac.MAACConfig]
COUNTS = [
    "num_agents",
    "num_turns",
    "num_train_epochs",
    "rollout_buffer_size",
    "max_new_tokens",
    "num_generations",
]
COUNTS += [
    "eval_batch_size",
    "logging_steps",
    "train_batch_size",
    "micro_batch_size",
    "rollout_batch_size",
    "top_k",
]
BAD_FIELDS = [(name, value) for name in COUNTS for value in (0, -1, 1.5, "3", True, math.nan)]
BAD_FIELDS += [
    (name, -1) for name in ("eval_interval", "eval_num_samples", "checkpoint_interval", "seed")
]
BAD_FIELDS += [
    (name, None)
    for name in ("num_agents", "eval_interval", "temperature", "agent_learning_rate", "seed")
]
for rate in ("agent_learning_rate", "critic_learning_rate", "value_loss_coef", "reference_kl_coef"):
    BAD_FIELDS += [(rate, value) for value in (-1e-6, math.nan, math.inf, "1e-3", True)]
BAD_FIELDS += [("temperature", value) for value in (0, -1.0, math.inf, math.nan)]
BAD_FIELDS += [("top_p", value) for value in (0, 1.1, math.nan)] + [
    ("discount", value) for value in (-0.1, 1.5)
]
BAD_FIELDS += [
    ("max_grad_norm", 0),
    ("max_grad_norm", -1),
    ("early_termination_threshold", math.nan),
]
BAD_FIELDS += [
    ("critic_type", "w"),
    ("critic_type", 1),
    ("parallel_training", "ddp"),
    ("dtype", "float16"),
]
BAD_FIELDS += [
    ("advantage_normalization", 1),
    ("reference_kl_enabled", "yes"),
    ("external_prompt_passthrough", None),
]
BAD_FIELDS += [
    ("agent_devices", 3),
    ("agent_devices", []),
    ("critic_devices", ""),
    ("chat_template", 0),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_bad_setting(config, name, value):
    with pytest.raises(ValueError, match=name):
        config(**{name: value})


@pytest.mark.parametrize("config", CONFIGS)
def test_settings_that_do_not_go_together(config):
    with pytest.raises(ValueError, match="num_generations"):
        config(num_turns=2, num_generations=2)
    with pytest.raises(ValueError, match="agent_devices"):
        config(parallel_training="mp")
    with pytest.raises(ValueError, match="critic_devices"):
        config(parallel_training="mp", agent_devices=["cpu"])
    assert config(temperature=2).temperature == 2.0 and isinstance(
        config(temperature=2).temperature, float
    )
    assert config(rollout_buffer_size=5).train_batch_size == 5


def model():
    return AutoModelForCausalLM.from_pretrained(TINY)


ONE, TOK = object(), AutoTokenizer.from_pretrained(TINY)
BAD_ARGUMENTS = {
    "reward_func missing": ({"reward_func": None}, "reward_func"),
    "reward_func no function": ({"reward_func": 3}, "reward_func"),
    "reward_processor": ({"reward_processor": 2}, "reward_processor"),
    "metrics_callback": ({"metrics_callback": "x"}, "metrics_callback"),
    "formatters count": ({"formatters": [str]}, "formatters"),
    "formatters empty": ({"formatters": []}, "formatters"),
    "formatters no function": ({"formatters": [str, 1]}, r"formatters\[1\]"),
    "no agents": ({"agent_model": None}, "agent_model or agents"),
    "both": ({"agents": [TINY, TINY], "tokenizer": TOK}, "agent_model or agents"),
    "agents count": ({"agent_model": None, "agents": [TINY], "tokenizer": TOK}, "agents"),
    "agents a string": ({"agent_model": None, "agents": TINY, "tokenizer": TOK}, "agents"),
    "agents a number": (
        {"agent_model": None, "agents": [TINY, 1], "tokenizer": TOK},
        r"agents\[1\]",
    ),
    "agents without tokenizer": ({"agent_model": None, "agents": [TINY, TINY]}, "tokenizer"),
    "tokenizer count": ({"tokenizer": [TOK] * 3}, "tokenizer"),
    "no such model": ({"agent_model": "/no/such/model", "tokenizer": TOK}, "agents"),
    "no such critic": ({"critic_model": "/no/such/model"}, "critics"),
    "critics and critic": ({"critics": [TINY, TINY]}, "critic_model or critics"),
    "critics count": ({"critic_model": None, "critics": [TINY] * 3}, "critics"),
    "critic missing": ({"critic_model": None}, "critic_model or critics"),
    "model_config": ({"model_config": {"tokenizer_kwarg": {}}}, "tokenizer_kwarg"),
}


@pytest.mark.parametrize("variant", ["iac-v", "maac-v"])
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_argument(variant, case):
    arguments, message = BAD_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        make_trainer(variant, **arguments)


@pytest.mark.parametrize("variant", ["iac-v", "maac-v"])
def test_one_model_in_two_places(variant):
    one, other = model(), model()
    with pytest.raises(ValueError, match=r"agents\[0\] and agents\[1\]"):
        make_trainer(variant, agent_model=None, agents=[one, one], tokenizer=TOK)
    with pytest.raises(ValueError, match=r"agents\[1\] and critics\[0\]"):
        make_trainer(
            variant, agent_model=None, agents=[one, other], tokenizer=TOK, critic_model=other
        )
    with pytest.raises(ValueError, match="agent_model"):
        make_trainer(variant, agent_model=one, tokenizer=TOK)


def test_a_critic_beside_a_shared_backbone():
    with pytest.raises(ValueError, match="critic_model"):
        make_trainer("iac-shared-v", critic_model=TINY)


@pytest.mark.parametrize("variant", ["iac-v", "maac-v"])
def test_settings_that_do_not_fit_the_models(variant):
    with pytest.raises(ValueError, match="max_new_tokens"):
        make_trainer(variant, {"max_new_tokens": 512})
    with pytest.raises(ValueError, match="agent_devices"):
        make_trainer(variant, {"agent_devices": ["nonsense:0"]})
    with pytest.raises(ValueError, match="external_transition"):
        make_trainer(variant, {"num_turns": 2}, external_transition=None)


GOOD = [{"prompt": f"row {k}"} for k in range(6)]
CALLS = {"n": 0}


def at_call_7(value):
    """A reward function that is fine six times and then returns `value`."""

    def reward(a, b):
        CALLS["n"] += 1
        return [0.5] if CALLS["n"] < 3 else value

    return reward


def raising(a, b):
    raise ZeroDivisionError("the user's own")


BAD_TASKS = {
    "no dataset": ({"train_dataset": None}, ValueError, "train_dataset"),
    "empty dataset": ({"train_dataset": []}, ValueError, "train_dataset"),
    "empty iterable": ({"train_dataset": iter([])}, ValueError, "train_dataset"),
    "row no dict": ({"train_dataset": [*GOOD, "text"]}, ValueError, "row 6"),
    "missing key": (
        {"train_dataset": [*GOOD, {"text": "x"}]},
        ValueError,
        r"row 6, turn 1, agent 0.*'prompt'",
    ),
    "empty prompt": (
        {"train_dataset": [*GOOD, {"prompt": "  "}]},
        ValueError,
        "row 6, turn 1, agent 0",
    ),
    "prompt None": (
        {"formatters": [lambda x: "ok", lambda x: None]},
        ValueError,
        "row 0, turn 1, agent 1",
    ),
    "prompt a number": ({"formatters": lambda x: 3}, ValueError, "agent 0"),
    "reward None": ({"reward_func": at_call_7(None)}, ValueError, "row 2, turn 1"),
    "reward one None": ({"reward_func": at_call_7([None])}, ValueError, "row 2, turn 1"),
    "reward NaN": ({"reward_func": at_call_7([math.nan])}, ValueError, "row 2, turn 1"),
    "reward infinite": ({"reward_func": at_call_7(math.inf)}, ValueError, "row 2, turn 1"),
    "reward too many": ({"reward_func": at_call_7([1, 2, 3])}, ValueError, "row 2.*3 values"),
    "reward none at all": ({"reward_func": at_call_7([])}, ValueError, "row 2.*0 values"),
    "reward text": ({"reward_func": at_call_7("good")}, ValueError, "row 2"),
    "reward ragged": ({"reward_func": at_call_7([[1], [1, 2]])}, ValueError, "row 2"),
    "processor NaN": ({"reward_processor": lambda r: math.nan}, ValueError, "reward_processor"),
    "user's own error": ({"reward_func": raising}, ZeroDivisionError, "the user's own"),
}


@pytest.mark.parametrize("variant", ["iac-v", "maac-q"])
@pytest.mark.parametrize("case", BAD_TASKS)
def test_bad_task(variant, case, tmp_path):
    changes, error, message = BAD_TASKS[case]
    CALLS["n"] = 0
    task = {
        "train_dataset": GOOD,
        "eval_dataset": None,
        "formatters": None,
        "reward_func": lambda a, b: [0.5],
    }
    trainer = make_trainer(variant, **{**task, **changes}, output_dir=str(tmp_path / "run"))
    before = [
        p.clone() for model in [*trainer.agents, *trainer.critics] for p in model.parameters()
    ]
    with pytest.raises(error, match=message):
        trainer.train()
    after = [p for model in [*trainer.agents, *trainer.critics] for p in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("answer", [None, ["one"], ["a", 2], ["a", ""], "ab"])
def test_bad_transition(answer, tmp_path):
    trainer = make_trainer(
        "iac-v", {"num_turns": 2}, output_dir=str(tmp_path / "run"), eval_dataset=None
    )
    trainer.external_transition = lambda **_: answer
    with pytest.raises(ValueError, match=r"row 0, turn 2.*external_transition"):
        trainer.train()


def test_output_dir_with_files_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="output_dir"):
        make_trainer("iac-v", output_dir=str(tmp_path)).train()
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("variant", ["iac-q", "iac-shared-v", "maac-q"])
def test_of_a_prompt_that_is_too_long_the_end_is_kept(variant, tmp_path):
    rows = [{"prompt": "x" * 600 + "end"}, {"prompt": "short"}]
    task = {
        "train_dataset": rows,
        "eval_dataset": None,
        "formatters": None,
        "reward_func": lambda a, b: [0.5],
    }
    trainer = make_trainer(variant, **task, output_dir=str(tmp_path / "run"))
    rig(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("once")
        episodes = trainer.collect(rows, 0, trainer.generators, 1)
    ids = episodes[0][0].prompt_ids
    assert len(ids) == 512 - 4 and TOK.decode(ids).endswith("xend") and trainer.truncated == 2
    assert (
        all(len(s.critic_ids) <= 512 for s in episodes[0])
        and TOK.decode(episodes[1][0].prompt_ids) == "short"
    )
    assert sum("longer than its model" in str(w.message) for w in caught) == 1
    trainer.train()


def test_empty_completion_reaches_the_reward_as_an_empty_string(tmp_path):
    seen = []
    trainer = make_trainer(
        "iac-q", output_dir=str(tmp_path / "run"), reward_func=lambda a, b: seen.append(a) or [0.0]
    )
    rig(trainer, lambda i, prompt: [1])
    trainer.train()
    assert seen and all(a == [""] for a in seen)


@pytest.mark.parametrize(
    ("file", "other"), [(iac, maac.MAACConfig()), (maac, iac.IACConfig()), (iac, {}), (maac, {})]
)
def test_arguments_of_the_other_algorithm_are_refused(file, other):
    trainer = file.IACTrainer if file is iac else file.MAACTrainer
    with pytest.raises(ValueError, match="args must be"):
        trainer(agent_model=TINY, critic_model=TINY, reward_func=lambda a, b: [0.5], args=other)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_type_is_no_value(config):
    for name, value in (
        ("num_agents", int),
        ("advantage_normalization", bool),
        ("temperature", float),
    ):
        with pytest.raises(ValueError, match=name):
            config(**{name: value})


@pytest.mark.parametrize("file", [iac, maac])
@pytest.mark.parametrize("raw", [[0.5, 1e39], 10**400])
def test_a_reward_beyond_float32_is_refused_before_any_agent_trains(file, raw):
    with pytest.raises(ValueError, match="row 7"):
        file.read_rewards(raw, 2, 1, "row 7")
