"""The settings: every one refuses what it cannot mean, is read somewhere, and is shown with the value in force."""

import ast
import json
import math
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import tyro
from commands import ENV, ROOT, run

import iac
import maac

FILES = [iac, maac]
CONFIGS = {iac: iac.IACConfig, maac: maac.MAACConfig}
NEVER = [
    "text",
    [1],
    {},
    object(),
    math.nan,
    math.inf,
    -math.inf,
    -1e400,
    b"v",
]  # no setting has such a value


def bad_values(field):
    """What a field of its type must refuse."""
    kinds = get_args(field.type) or (field.type,)
    values = NEVER + ([] if type(None) in kinds else [None])
    if get_origin(field.type) is Literal:
        return [*values, "", "V", 0, True, 1.0]
    if bool in kinds:
        return [*values, 0, 1, 0.0, "True", "false", ""]
    if int in kinds:
        return [*values, -1, 1.0, 1.5, True, False, "1", ""]
    if float in kinds:
        return [*values, True, False, "0.5", ""] + (
            [-1e-9] if field.name != "early_termination_threshold" else []
        )
    devices = [
        value for value in values if value not in ("text", [1])
    ]  # a name is known to be wrong when it is used
    return [*devices, 0, 1, True, "", [], ()]


CASES = [
    (file, field.name, value)
    for file in FILES
    for field in fields(CONFIGS[file])
    for value in bad_values(field)
]


@pytest.mark.parametrize("file", FILES)
def test_no_field_is_left_out(file):
    tried = {
        name: sum(case[:2] == (file, name) for case in CASES)
        for name in CONFIGS[file].__dataclass_fields__
    }
    assert len(tried) > 25 and min(tried.values()) >= 10


@pytest.mark.parametrize(
    ("file", "name", "value"), CASES, ids=[f"{f.__name__}-{n}-{v!r:.20}" for f, n, v in CASES]
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(file, name, value):
    with pytest.raises(ValueError, match=rf"^{name}="):
        CONFIGS[file](**{name: value})


@pytest.mark.parametrize("file", FILES)
def test_zero_is_refused_where_it_means_nothing(file):
    off = {
        "eval_interval",
        "eval_num_samples",
        "checkpoint_interval",
        "seed",
        "discount",
        "value_loss_coef",
    }
    off |= {"agent_learning_rate", "critic_learning_rate"}
    off |= {"reference_kl_coef", "early_termination_threshold"}
    for field in fields(CONFIGS[file]):
        kinds = get_args(field.type) or (field.type,)
        if int in kinds or float in kinds:
            if field.name in off:
                assert getattr(CONFIGS[file](**{field.name: 0}), field.name) == 0
            else:
                with pytest.raises(ValueError, match=rf"^{field.name}="):
                    CONFIGS[file](**{field.name: 0})


@pytest.mark.parametrize("file", FILES)
def test_every_default_is_accepted_when_it_is_given(file):
    for field in fields(CONFIGS[file]):
        assert field.default is not MISSING
        assert getattr(CONFIGS[file](**{field.name: field.default}), field.name) in (
            field.default,
            8,
        )


# ----------------------------------------------------------------------------------------------------------- reading


def unread(source):
    """The fields of the config and of Args that no code reads: `x.field`, or the field's name in a list of names.

    Only args (or the config itself) can be what it is read from, so that `self.agents` is no use of a field `agents`.
    """
    tree = ast.parse(source)
    classes = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and re.fullmatch("(.*AC)?(Config|Args)", node.name)
    ]
    declared = [node for c in classes for node in c.body if isinstance(node, ast.AnnAssign)]
    read, own = set(), {id(node) for c in classes for node in ast.walk(c)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base = ast.unparse(node.value)
            if base in ("args", "self.args") or (base == "self" and id(node) in own):
                read.add(node.attr)
    for node in ast.walk(tree):  # getattr(args, name) for names that stand beside it
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and ast.unparse(node.args[0]) == "args"
        ):
            function = next(
                f
                for f in ast.walk(tree)
                if isinstance(f, ast.FunctionDef) and any(n is node for n in ast.walk(f))
            )
            read |= {
                n.value
                for n in ast.walk(function)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
    return {node.target.id for node in declared} - read


@pytest.mark.parametrize("file", FILES)
def test_every_setting_is_read(file):
    assert len(fields(file.Args)) > 38 and not unread(Path(file.__file__).read_text())


@pytest.mark.parametrize("file", FILES)
def test_a_setting_that_is_not_read_would_be_found(file):
    source = Path(file.__file__).read_text()
    more = source.replace("    seed: int = 1", "    spare: int = 1\n    seed: int = 1", 1)
    assert unread(more) == {"spare"}
    for field in fields(
        file.Args
    ):  # every use of the field is given another name, one field after the other
        mutant = re.sub(rf"\b(args\.|self\.){field.name}\b", r"\1another", source)
        mutant = re.sub(rf'"{field.name}"', '"another"', mutant)
        assert unread(mutant) == {field.name}


@pytest.mark.parametrize("file", FILES)
def test_the_tiny_model_is_named_in_the_demo_only(file):
    lines = Path(file.__file__).read_text().splitlines()
    named = [line for line in lines if re.search("tiny.?lm", line, re.I)]
    assert (
        len(named) == 3
        and named[0].startswith("TINY_LM = ")
        and named[1].startswith("DEMO = dict(")
    )
    assert named[2].lstrip().startswith("agent_model=TINY_LM")
    tiny = {"vocab_size": 99, "hidden_size": 64, "positions": 512}
    assert not [
        line
        for line in lines
        if re.search(rf"\b({'|'.join(map(str, tiny.values()))})\b", line)
        and "DEMO" not in line
        and "rollout_buffer_size=64" not in line
    ]


# ------------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("own_model", [False, True])
def test_help_and_config_json_show_the_values_in_force(file, own_model, tmp_path):
    """The same settings in the help, in the trainer and in config.json, for the demo and for a model of one's own."""
    (tmp_path / "task.py").write_text(
        f"import {file.__name__}\n"
        f"globals().update({file.__name__}.number_task(2, 0))\n"
        "train_dataset, eval_dataset = train_dataset[:2], eval_dataset[:1]\n"
    )
    model = ["--agent-model", ROOT / "tests" / "tiny_lm"] if own_model else []
    env = ENV | {"COLUMNS": "400", "PYTHONPATH": str(ROOT)}
    shown = run(ROOT / f"{file.__name__}.py", *model, "--help", cwd=tmp_path, env=env)
    assert shown.returncode == 0
    entries = re.split(r"│ +--", re.sub(r"│\s*\n", "\n", shown.stdout))[
        1:
    ]  # one for each flag, in any tyro's layout
    defaults = {re.match("[a-z-]+", e)[0]: re.search(r"\(default: (.*?)\)", e)[1] for e in entries}
    trained = run(
        ROOT / f"{file.__name__}.py",
        *model,
        "--task",
        "task.py",
        "--num-train-epochs",
        1,
        "--output-dir",
        "run",
        cwd=tmp_path,
        env=env,
    )
    assert trained.returncode == 0, trained.stderr[-2000:]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config.pop("algorithm") == file.__name__
    assert set(config) == {field.name for field in fields(file.Args)}
    assert set(defaults) == {name.replace("_", "-") for name in config}
    for name in set(config) - {
        "num_train_epochs",
        "task",
        "output_dir",
        "agent_model",
        "critic_model",
    }:
        shown_value = defaults[name.replace("_", "-")]
        if name == "train_batch_size":  # derived
            assert shown_value == "None" and config[name] == config["rollout_buffer_size"]
        else:
            assert shown_value == str(config[name]), name
    assert config["rollout_buffer_size"] == (8 if own_model else 64)
    assert config["agent_model"] == str(ROOT / "tests" / "tiny_lm")
    assert (
        config["num_train_epochs"] == 1
        and config["task"] == "task.py"
        and config["output_dir"] == "run"
    )


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-normalization True",
        "--advantage-normalization=True",
        "--no-advantage-normalization=False",
        "--track 1",
        "--critic-type w",
        "--num-agents two",
        "--num-agents 2.5",
        "--no-such-flag 3",
        "--temperature",
    ],
)
def test_other_forms_stop_with_a_message_and_exit_code_2(file, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        tyro.cli(file.Args, args=flags.split())
    printed = capsys.readouterr()
    assert stop.value.code == 2 and re.split("[ =]", flags)[-1] in printed.out + printed.err
