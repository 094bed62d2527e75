"""Arguments of a wrong kind and what user functions may wrongly return: an error that names them, nothing trained."""

import operator

import pytest
import torch
from library_models import ROWS, build, folder, tokenizer

import iac
import maac

VARIANTS = ["iac", "iac_shared", "maac"]
CONFIGS = [iac.IACConfig, maac.MAACConfig]


class Frame:
    """Stands for a table of pandas: len(), [column] and iter() are all there, but none is about rows as dicts."""

    def __len__(self):
        return len(ROWS)

    def keys(self):
        return ["prompt"]

    def __iter__(self):
        return iter(self.keys())

    def __getitem__(self, column):
        return {"prompt": [row["prompt"] for row in ROWS]}[column]


class Numbers:
    """Stands for an array: comparing it gives no truth value."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("ambiguous")

    __hash__ = None


BAD_SETTINGS = [
    ("num_agents", Numbers()),
    ("temperature", 10**400),
    ("num_turns", 10**400),
    ("num_agents", int),
]
BAD_SETTINGS += [
    ("advantage_normalization", bool),
    ("agent_devices", [3]),
    ("agent_devices", [None]),
]
BAD_SETTINGS += [("reference_devices", ["cpu", True]), ("critic_devices", [["cpu"]])]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("name", "value"), BAD_SETTINGS, ids=[f"{n}-{type(v).__name__}" for n, v in BAD_SETTINGS]
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(config, name, value):
    with pytest.raises(ValueError, match=rf"^{name}="):
        config(**{name: value})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [10**17, 2**64])
def test_a_large_seed_works_or_is_refused_by_name(variant, seed, tmp_path):
    try:
        build(variant, tmp_path / "run", {"seed": seed}).train()
    except ValueError as error:
        assert "seed" in str(error)


BAD_ARGUMENTS = {
    "/no/such/model as agent_model": {"agent_model": "/no/such/model"},
    "formatters": {"formatters": 3},
    "tokenizer": {"tokenizer": "a/name"},
    "tokenizer in a list": {"tokenizer": [None, tokenizer("T")]},
    "args a dict": {"config": {"num_agents": 2}},
    "args of the twin": {"config": "twin"},
    "model_config text": {"model_config": "model_kwargs"},
    "model_config list": {"model_config": ["model_kwargs"]},
    "model_config kwargs None": {"model_config": {"model_kwargs": None}},
}


@pytest.mark.parametrize("variant", ["iac", "maac"])
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_an_argument_of_a_wrong_kind_is_refused_by_name(variant, case, tmp_path):
    arguments = {
        "agent_model": folder("G", "T"),
        "critic_model": folder("G", "T"),
        "reward_func": lambda a, b: 0.0,
    }
    arguments |= {"train_dataset": ROWS, "output_dir": str(tmp_path / "run")} | BAD_ARGUMENTS[case]
    twin = {"iac": maac.MAACConfig, "maac": iac.IACConfig}[variant]
    config = arguments.pop("config", None)
    arguments["args"] = twin() if config == "twin" else config
    with pytest.raises(ValueError, match=case.split()[0]):
        {"iac": iac.IACTrainer, "maac": maac.MAACTrainer}[variant](**arguments)


BAD_TASKS = {
    "a number as train_dataset": ({"train_dataset": 5}, "train_dataset"),
    "columns as train_dataset": ({"train_dataset": {"prompt": ["one", "two"]}}, "train_dataset"),
    "splits as train_dataset": ({"train_dataset": {"train": ROWS}}, "train_dataset"),
    "a table as train_dataset": ({"train_dataset": Frame()}, "train_dataset"),
    "a number as eval_dataset": ({"eval_dataset": 5}, "eval_dataset"),
    "a table as eval_dataset": ({"eval_dataset": Frame()}, "eval_dataset"),
    "columns as eval_dataset": ({"eval_dataset": {"prompt": ["one", "two"]}}, "eval_dataset"),
    "None from metrics_callback": ({"metrics_callback": lambda samples: None}, "metrics_callback"),
    "text from metrics_callback": (
        {"metrics_callback": lambda samples: {"mine": "high"}},
        "metrics_callback",
    ),
    "an integer without bounds as reward": ({"reward_func": lambda a, b: 10**400}, "row 0, turn 1"),
    "infinite in float32": ({"reward_func": lambda a, b: 1e39}, "row 0, turn 1"),
    "infinite when squared, in a critic's loss": (
        {"reward_func": lambda a, b: 1e25},
        "row 0, turn 1",
    ),
    "infinite in float32 for one agent": (
        {"reward_func": lambda a, b: [0.5, 1e39]},
        "row 0, turn 1",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_bad_task_is_refused_and_nothing_trained(variant, case, tmp_path):
    changes, message = BAD_TASKS[case]
    if case.endswith("_dataset"):
        with pytest.raises(ValueError, match=message):
            build(variant, tmp_path / "run", **changes)
        return
    trainer = build(variant, tmp_path / "run", **changes)
    parts = [*trainer.agents, *trainer.critics]
    before = torch.cat([p.detach().flatten().clone() for part in parts for p in part.parameters()])
    with pytest.raises(Exception) as caught:
        trainer.train()
    assert torch.equal(
        before, torch.cat([p.detach().flatten() for part in parts for p in part.parameters()])
    )
    assert isinstance(caught.value, ValueError) and message in str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_formatter_without_a_signature_works(variant, tmp_path):
    """operator.itemgetter("prompt") is the shortest formatter there is; inspect knows no signature of it."""
    build(variant, tmp_path / "run", formatters=operator.itemgetter("prompt")).train()
