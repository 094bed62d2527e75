"""The settings: what they may be, what is refused by its name, and what goes together."""

import copy
import dataclasses
import functools
import json
import math
import operator
import random
from pathlib import Path

import pytest
import torch
import tyro
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import iac
import maac
from conftest import ROOT

CONFIGS = [iac.IACConfig, maac.MAACConfig]
both = pytest.mark.parametrize("config", CONFIGS, ids=["iac", "maac"])

# Every field by the kind of its values; that of IAC alone is among them
COUNTS = {"num_agents", "num_turns", "num_train_epochs", "rollout_buffer_size", "max_new_tokens"}
COUNTS |= {"num_generations", "eval_batch_size", "logging_steps"}
SIZES = {"train_batch_size", "micro_batch_size", "rollout_batch_size", "top_k", "lora_rank"}
SIZES |= {"critic_value_head_hidden_dim", "value_head_hidden_dim"}  # counts, or None
NATURAL = {"eval_interval", "eval_num_samples", "checkpoint_interval", "seed"}
WEIGHTS = {"agent_learning_rate", "critic_learning_rate", "value_loss_coef", "reference_kl_coef"}
POSITIVE = {"temperature", "top_p", "max_grad_norm", "value_clip_range"}
ANY = {"early_termination_threshold"}
FRACTIONS = {"top_p", "discount"}
NUMBERS = WEIGHTS | POSITIVE | ANY | FRACTIONS
SWITCHES = {"advantage_normalization", "external_prompt_passthrough", "reference_kl_enabled"}
SWITCHES |= {"use_separate_critic", "chat_template", "gradient_checkpointing"}
CHOICES = {"critic_type", "dtype", "parallel_training"}
DEVICES = {"agent_devices", "critic_devices", "reference_devices"}
KINDS = COUNTS | SIZES | NATURAL | NUMBERS | SWITCHES | CHOICES | DEVICES
OPTIONAL = SIZES | DEVICES | ANY | {"max_grad_norm", "value_clip_range"}
NULL = {"critic_type", "critic_learning_rate", "parallel_training"}  # None is a word for a default


class Ambiguous:
    """Stands for an array: comparing it gives no truth value."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("ambiguous")

    __hash__ = None


def bad_values(name):
    """What the field cannot be."""
    wrong = [{}, {1: 2}, object(), b"v", 1j, int, Ambiguous(), [[]], math.nan, math.inf, -math.inf]
    if name not in OPTIONAL | NULL:
        wrong.append(None)
    if name in COUNTS | SIZES | NATURAL:
        wrong += [-1, -(10**30), 1.0, 0.5, True, False, "1", "", [1]]
        wrong += [0] * (name not in NATURAL)
    elif name in NUMBERS:
        wrong += [True, False, "0.5", "", [1], 10**400]
        wrong += [-1e-9, -1, -5.0] * (name not in ANY)
        wrong += [0, 0.0] * (name in POSITIVE)
        wrong += [1.001, 2] * (name in FRACTIONS)
    elif name in SWITCHES:
        wrong += [0, 1, 0.0, "true", "False", "", "text"]
    elif name in CHOICES:
        wrong += ["", "text", "fp32", "float16", "ddp", "auto", 0, 1, True, ["v"]]
    elif name in DEVICES:
        wrong += [[], (), "", [""], [None], [3], 0, True, {"cpu": 1}, [["cpu"]], ("cpu", 1)]
    return wrong


def names(config):
    return [field.name for field in dataclasses.fields(config)]


@both
def test_every_field_is_tried(config):
    assert len(names(config)) > 30 and set(names(config)) <= KINDS
    assert min(len(bad_values(name)) for name in KINDS) > 10


FIELDS = [(config, name) for config in CONFIGS for name in names(config)]


@pytest.mark.parametrize(("config", "name"), FIELDS, ids=[f"{c.__module__}-{name}" for c, name in FIELDS])
def test_a_bad_value_is_refused_by_the_name_of_its_field(config, name):
    for value in bad_values(name):
        with pytest.raises(ValueError, match=rf"(?m)^{name}\b") as caught:
            config(**{name: value})
            pytest.fail(f"{name}={value!r} was taken")
        message = str(caught.value)
        assert len(message) < 1000 * (1 + isinstance(value, list | tuple)), message
        if isinstance(value, str | float | bool):
            assert repr(value) in message, message


@both
def test_a_bad_value_is_refused_when_it_is_assigned(config):
    args = config()
    for name, value in [("num_agents", 0), ("temperature", math.nan), ("critic_type", "w")]:
        with pytest.raises(ValueError, match=name):
            setattr(args, name, value)


@both
def test_an_unknown_field_is_refused_by_its_name(config):
    with pytest.raises((TypeError, ValueError), match="num_agent"):
        config(num_agent=2)
    other = {iac.IACConfig: "no_such_setting", maac.MAACConfig: "use_separate_critic"}[config]
    with pytest.raises((TypeError, ValueError), match=other):
        config(**{other: True})


@both
def test_what_may_be_zero(config):
    """A count cannot; a rate, a weight, an interval, a seed and a threshold can."""
    zero = NATURAL | WEIGHTS | ANY | {"discount"}
    for name in set(names(config)) & zero:
        assert getattr(config(**{name: 0}), name) == 0
    for name in set(names(config)) & (COUNTS | SIZES | POSITIVE):
        with pytest.raises(ValueError, match=rf"(?m)^{name}\b"):
            config(**{name: 0})


@both
def test_whole_numbers_serve_as_numbers_and_the_largest_are_taken(config):
    args = config(temperature=2, top_p=1, discount=1, early_termination_threshold=-3)
    assert (args.temperature, args.top_p, args.discount) == (2.0, 1.0, 1.0)
    assert isinstance(args.temperature, float) and args.early_termination_threshold == -3.0
    assert config(seed=2**64, eval_interval=10**12).seed == 2**64
    for name in set(names(config)) & OPTIONAL - {"train_batch_size"}:
        assert getattr(config(**{name: None}), name) is None


DEFAULTS = {
    "num_agents": 2,
    "num_turns": 1,
    "critic_type": "v",
    "num_train_epochs": 1,
    "agent_learning_rate": 5e-6,
    "critic_learning_rate": 5e-6,
    "value_loss_coef": 0.6,
    "advantage_normalization": True,
    "rollout_buffer_size": 8,
    "train_batch_size": 8,
    "max_new_tokens": 256,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "num_generations": 1,
    "external_prompt_passthrough": False,
    "discount": 1.0,
    "early_termination_threshold": None,
    "eval_interval": 16,
    "eval_num_samples": 4,
    "eval_batch_size": 1,
    "logging_steps": 1,
    "parallel_training": "none",
    "agent_devices": None,
    "critic_devices": None,
    "reference_devices": None,
    "reference_kl_enabled": False,
    "reference_kl_coef": 0.1,
    "max_grad_norm": 1.0,
    "micro_batch_size": None,
    "rollout_batch_size": None,
    "chat_template": False,
    "dtype": "float32",
    "seed": 1,
    "checkpoint_interval": 0,
    "lora_rank": None,
    "gradient_checkpointing": False,
}
IAC_ONLY = {
    "use_separate_critic": True,
    "value_clip_range": 0.2,
    "critic_value_head_hidden_dim": None,
    "value_head_hidden_dim": None,
}


@both
def test_defaults(config):
    expected = DEFAULTS | (IAC_ONLY if config is iac.IACConfig else {})
    found = dataclasses.asdict(config())
    assert {name: found[name] for name in expected} == expected
    assert (set(found) & set(IAC_ONLY)) == (set(IAC_ONLY) if config is iac.IACConfig else set())
    given = {name: found[name] for name in found if name != "train_batch_size"}
    assert dataclasses.asdict(config(**given)) == found  # all are taken when they are given


@both
def test_train_batch_size_is_the_buffer_size_unless_given(config):
    assert config(rollout_buffer_size=12).train_batch_size == 12
    assert config(rollout_buffer_size=12, train_batch_size=5).train_batch_size == 5


@both
def test_values_as_yaml_files_of_comlrl_have_them(config):
    args = config(critic_type=None, parallel_training="null", agent_learning_rate=1e-4)
    assert (args.critic_type, args.parallel_training) == ("v", "none")
    assert config(agent_learning_rate=1e-4, critic_learning_rate=None).critic_learning_rate == 1e-4
    devices = {"agent_devices": ["cpu"], "critic_devices": ["cpu"]}
    args = config(critic_type=" Q", parallel_training="MP", **devices)
    assert (args.critic_type, args.parallel_training) == ("q", "mp")
    assert config(parallel_training=None).parallel_training == "none"


@both
def test_devices_are_one_name_or_several(config):
    args = config(parallel_training="mp", agent_devices="cpu:1", critic_devices=("cpu:0",))
    assert (args.agent_devices, args.critic_devices) == (["cpu:1"], ["cpu:0"])
    assert config(agent_devices="cpu", reference_devices=["cpu"]).agent_devices == ["cpu"]


MP = {"parallel_training": "mp", "agent_devices": ["cpu:0"], "critic_devices": ["cpu:0"]}
APART = {
    "turns and generations": ({"num_turns": 2, "num_generations": 3}, "num_generations=3"),
    "mp without agent_devices": (MP | {"agent_devices": None}, "agent_devices=None"),
    "mp without critic_devices": (MP | {"critic_devices": None}, "critic_devices=None"),
    "none with two agent_devices": ({"agent_devices": ["cpu:0", "cpu:1"]}, "agent_devices="),
    "none with two critic_devices": ({"critic_devices": ["cpu:0", "cpu"]}, "critic_devices="),
    "none with two references": ({"reference_devices": ["cpu:0", "cpu"]}, "reference_devices="),
    "none with two kinds": ({"agent_devices": ["cpu"], "critic_devices": ["cpu:1"]}, "critic_dev"),
}


@both
@pytest.mark.parametrize("case", APART)
def test_what_does_not_go_together_is_refused_by_name(config, case):
    settings, message = APART[case]
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_mp_with_a_shared_backbone_needs_no_critic_devices():
    args = iac.IACConfig(**MP | {"critic_devices": None}, use_separate_critic=False)
    assert args.critic_devices is None


# ------------------------------------------------------------------------- arguments of the trainer


ROWS = [{"prompt": f"name {n}", "n": n} for n in range(8)]


class Frame:
    """Stands for a table of pandas: len(), [column] and iter() are there, but not rows as dicts."""

    def __len__(self):
        return len(ROWS)

    def keys(self):
        return ["prompt"]

    def __iter__(self):
        return iter(self.keys())

    def __getitem__(self, column):
        return {"prompt": [row["prompt"] for row in ROWS]}[column]


BAD_ARGUMENTS = {
    "agent_model": ["/no/such/model"],
    "formatters": [3, "prompt", [], [len] * 3, [None] * 2],
    "tokenizer": ["a/name", [None, None], []],
    "reward_func": [None, 0.5, "reward"],
    "reward_processor": [0.5, "float"],
    "metrics_callback": [0.5, [len]],
    "external_transition": ["next", 1],
    "train_dataset": [5, {"prompt": ["one", "two"]}, {"train": ROWS}, Frame()],
    "eval_dataset": [5, {"prompt": ["one", "two"]}, Frame()],
    "model_config": ["model_kwargs", ["model_kwargs"], 3, {"a_typo": {}}],
    "wandb_config": ["project", 3],
    "critics": [["one"] * 3, "name", [5, 5]],
}


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-q"])
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_an_argument_of_a_wrong_kind_is_refused_by_name(variant, name, make_trainer, tmp_path):
    for value in BAD_ARGUMENTS[name]:
        with pytest.raises(ValueError, match=f"{name}|agents.0.") as caught:
            make_trainer(variant, tmp_path, **{name: value})
            pytest.fail(f"{name}={value!r} was taken")
        assert "agents[0]" not in str(caught.value) or name == "agent_model"
        assert not (tmp_path / "run").exists()


def test_agents_are_refused_by_name(variant, make_trainer, folders, llama, tokenizer, tmp_path):
    L, cases = folders["L"], [(["/no/such/model"] * 2, r"agents\[0\]"), ([], "agents")]
    cases += [([L] * 3, "num_agents=2"), ([None] * 2, r"agents\[0\]"), (llama, "agents")]
    cases += [([llama, llama], r"agents\[0\] and agents\[1\]"), ([L, 5], r"agents\[1\]")]
    for agents, message in cases:
        with pytest.raises(ValueError, match=message):
            make_trainer(variant, tmp_path, agents=agents, tokenizer=tokenizer)


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
def test_args_are_of_this_algorithm(variant, make_trainer, folders, tmp_path):
    """The other's settings hold some that would be ignored, and a dict holds no defaults."""
    file, other = (iac, maac.MAACConfig) if "iac" in variant else (maac, iac.IACConfig)
    given = {"agent_model": folders["L"], "critic_model": folders["L"], "reward_func": len}
    for args in (other(max_new_tokens=4), {"num_agents": 2}, "iac"):
        with pytest.raises((ValueError, TypeError, AttributeError), match=r"args|attribute"):
            file.Trainer(args=args, output_dir=str(tmp_path / "run"), **given)


def test_several_turns_need_a_transition(variant, make_trainer, tmp_path):
    with pytest.raises(ValueError, match="external_transition"):
        make_trainer(variant, tmp_path, {"num_turns": 2}, external_transition=None)


def test_a_formatter_without_a_signature_works(make_trainer, tmp_path):
    """operator.itemgetter("prompt") is the shortest formatter there is; none is known of it."""
    trainer = make_trainer("maac-v", tmp_path, formatters=operator.itemgetter("prompt"))
    trainer.train()
    assert [s.prompt for s in trainer.samples[::2]] == [r["prompt"] for r in trainer.train_dataset]


@pytest.mark.parametrize("variant", ["iac-q-separate", "maac-v"])
def test_config_json_holds_every_setting_as_it_was_used(variant, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path, {"temperature": 2}, train_dataset=ROWS[:1])
    trainer.train()
    found = json.loads((tmp_path / "run" / "config.json").read_text())
    assert found["algorithm"] == variant.split("-")[0] and found["temperature"] == 2.0
    used = dataclasses.asdict(trainer.args)
    assert {name: found[name] for name in used} == used
    assert found["train_batch_size"] == found["rollout_buffer_size"] == 4  # derived


FLAGS = ["--num-agents two", "--temperature nan", "--seed -1", "--advantage-normalization True"]


@pytest.mark.parametrize("file", [iac, maac])
@pytest.mark.parametrize("flags", FLAGS)
def test_a_bad_flag_is_named_and_ends_the_command_with_code_2(file, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        tyro.cli(file.Args, args=flags.split())
    printed = capsys.readouterr()
    text = (printed.out + printed.err).replace("_", "-")
    assert stop.value.code == 2
    assert flags.split()[0].strip("-") in text or flags.split()[1] in text


# -------------------------------------------------------------------- random settings, as they come

TINY = str(ROOT / "tests" / "tiny_lm")
load = functools.cache(lambda auto_class: auto_class.from_pretrained(TINY))


def score_each(*completions, batch_items):
    """Between 1 and 2 for each joint answer, or for one in five items the same number for all."""
    if batch_items[0]["n"] % 5 == 0:
        return 0.5
    joints = zip(*completions, strict=True)
    return [1 + sum(sum(text.encode()) % 7 for text in joint) / 7 / len(joint) for joint in joints]


def repeat(prompt, agent_completions, num_agents, **_):
    return [f"{prompt}, said {' '.join(agent_completions)}"] * num_agents


def draw_settings(rng):
    """(algorithm, settings): every setting that has no say in where things run, at random."""
    maybe = lambda value: value if rng.random() < 0.5 else None  # noqa: E731
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


def build(file, settings, rng, output_dir):
    """A trainer on as many rows as two updates take, with copies of models loaded once."""
    config = (iac.IACConfig if file == "iac" else maac.MAACConfig)(**settings)
    G, T, N = config.num_generations, config.num_turns, config.num_agents
    shortest = 1 if config.early_termination_threshold is not None else T  # turns of an episode
    needed = math.ceil(config.rollout_buffer_size / (G * shortest))  # rows of the first update
    numbers = [rng.randrange(10) for _ in range(needed + rng.randint(1, needed))]
    given = {
        "agents": [copy.deepcopy(load(AutoModelForCausalLM)) for _ in range(N)],
        "tokenizer": load(AutoTokenizer),
        "formatters": [lambda x, i=i: f"agent {i + 1} of {N}: {x['prompt']} =" for i in range(N)],
        "train_dataset": [{"prompt": f"sum to {n}", "n": n} for n in numbers],
        "eval_dataset": rng.choice([None, [{"prompt": "sum to 3", "n": 3}] * 3]),
    }
    if file == "maac" or config.use_separate_critic:
        count = N if file == "iac" else 1
        given["critics"] = [copy.deepcopy(load(AutoModel)) for _ in range(count)]
        if file == "iac" and rng.random() < 0.2:  # one for all
            given["critic_model"] = given.pop("critics")[0]
    if file == "maac" and rng.random() < 0.5:
        given["model_config"] = {"critic_value_head_hidden_dim": rng.choice([1, 8])}
    return (iac.IACTrainer if file == "iac" else maac.MAACTrainer)(
        args=config,
        reward_func=score_each,
        external_transition=repeat,
        output_dir=str(output_dir),
        **given,
    )


def snapshot(trainer):
    parts = [*trainer.agents, *trainer.critics]
    return torch.cat([p.detach().flatten() for part in parts for p in part.parameters()])


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
@pytest.mark.parametrize("seed", [10**17, 2**64])
def test_a_large_seed_works_or_is_refused_by_name(variant, seed, make_trainer, tmp_path):
    try:
        make_trainer(variant, tmp_path, {"seed": seed}, train_dataset=ROWS[:1]).train()
    except ValueError as error:
        assert "seed" in str(error)


@pytest.mark.parametrize("number", range(24))
def test_random_settings_train(number, tmp_path):
    """No error, every number finite, and what has a learning rate and something to learn moves."""
    rng = random.Random(f"settings {number}")
    file, settings = draw_settings(rng)
    trainer = build(file, settings, rng, tmp_path / "run")
    before = snapshot(trainer)
    trainer.train()
    after = snapshot(trainer)
    assert after.isfinite().all()
    shared = not settings.get("use_separate_critic", True)
    actors = settings["agent_learning_rate"] > 0
    rate = settings["agent_learning_rate" if shared else "critic_learning_rate"]
    critics = settings["value_loss_coef"] > 0 and rate > 0
    moved = not torch.equal(before, after)
    assert critics <= moved <= (actors or critics)  # equal rewards may give actors nothing to learn
    early = settings["early_termination_threshold"] is not None
    assert trainer.counts.updates == 2 or (early and trainer.counts.updates > 2)
    lines = Path(trainer.output_dir, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert "agent_0/policy_loss" in rows[-1]
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_random_settings_with_one_that_is_bad_are_refused_by_its_name():
    """Beside settings of all kinds, not just beside the defaults."""
    for number in range(200):
        rng = random.Random(f"bad {number}")
        file, settings = draw_settings(rng)
        config = iac.IACConfig if file == "iac" else maac.MAACConfig
        name = rng.choice(names(config))
        value = rng.choice(bad_values(name))
        with pytest.raises(ValueError, match=rf"(?m)^{name}\b"):
            config(**settings | {name: value})
            pytest.fail(f"number {number}: {name}={value!r} was taken beside {settings}")
