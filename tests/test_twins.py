"""iac.py and maac.py are twins, common.py holds no algorithm, every setting is read somewhere."""

import ast
import re
from dataclasses import fields

import pytest

import iac
import maac
from conftest import ROOT

TWINS = ["iac.py", "maac.py"]
SECTIONS = [
    "1 config",
    "2 buffer record",
    "3 critic",
    "4 targets, advantages and losses",
    "5 trainer",
    "6 the run",
    "7 the user's functions, the task",
    "8 command line",
]
# What the algorithms differ in: functions that one file lacks, or that are written otherwise
ALGORITHM = {
    "head_width",  # IAC: by one of two settings
    "critic_text",  # MAAC: what the one critic reads
    "load_critics",
    "compute_values",
    "value_loss",  # IAC: with a clip range
    "actor_step",  # IAC: with a shared backbone the critic's step is the agent's
    "critic_step",
    "save_model",
    "encode_prompts",  # IAC: the critic embeds the agent's ids
    "__init__",
    "__post_init__",
    "main",
}


def source(name):
    return (ROOT / name).read_text()


def functions(text):
    """{name with its class: its code} of all functions and classes, in their order."""
    found = {}

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = prefix + child.name
                code = "" if isinstance(child, ast.ClassDef) else ast.unparse(without_doc(child))
                found[name] = code
                walk(child, name + ".")
            else:
                walk(child, prefix)

    walk(ast.parse(text), "")
    return found


def without_doc(function):
    """The function without its docstring, which may name what it is about."""
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return function


def out_of_order(one, other):
    """The functions of both texts that do not stand in the same order in both."""
    names = [list(functions(text)) for text in (one, other)]
    shared = [[name for name in mine if name in theirs] for mine, theirs in (names, names[::-1])]
    return [pair for pair in zip(*shared, strict=True) if pair[0] != pair[1]]


def differing(one, other):
    """The names of functions that are not the same in both texts."""
    mine, theirs = functions(one), functions(other)
    return {name for name in mine | theirs if mine.get(name) != theirs.get(name)}


@pytest.mark.parametrize("name", TWINS)
def test_sections_stand_in_the_published_order(name):
    banners = re.findall(r"^# -{20,} (.+)$", source(name), re.M)
    assert banners == SECTIONS
    assert ast.get_docstring(ast.parse(source(name)))


def test_functions_of_the_same_name_stand_in_the_same_order():
    one, other = map(source, TWINS)
    assert len(functions(one)) > 60 and not out_of_order(one, other)
    moved = re.sub(r"(?s)(def policy_loss.*?\n\n\n)(.*?)(def explained_variance.*?\n\n\n)", r"\3\2\1", one)
    assert moved != one and out_of_order(moved, other)  # a function that has moved is seen


def test_what_differs_is_the_algorithm():
    one, other = map(source, TWINS)
    found = {name.split(".")[-1] for name in differing(one, other)}
    assert found <= ALGORITHM
    assert found >= {"load_critics", "compute_values", "critic_text", "value_loss"}
    changed = one.replace("active = list(range(len(episodes)))", "active = []")
    assert changed != one and "Trainer.rollout" in differing(changed, other)  # a slip is seen


def test_settings_of_the_same_name_are_the_same():
    own = [{f.name: (repr(f.type), f.default) for f in fields(file.Config)} for file in (iac, maac)]
    shared = own[0].keys() & own[1].keys()
    assert all(own[0][name] == own[1][name] for name in shared) and len(shared) > 30
    assert not own[1].keys() - own[0].keys()
    lines = [dict(re.findall(r"^    (\w+): .*?  # (.+)$", source(name), re.M)) for name in TWINS]  # with its comment
    differ = {name for name in shared & lines[0].keys() if lines[0][name] != lines[1].get(name)}
    assert differ <= {"critic_learning_rate", "critic_devices"}


# ---------------------------------------------------------------------------------------- common.py

FOREIGN = {
    *("reward", "rewards", "advantage", "advantages", "loss", "losses", "optimizer", "backward"),
    *("buffer", "discount", "target", "targets", "wandb", "json", "tqdm", "Config"),
    *("IACConfig", "MAACConfig", "save_pretrained"),
}


def test_common_holds_no_algorithm_and_sees_no_config():
    names, imported = set(), set()
    for node in ast.walk(ast.parse(source("common.py"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg)
    assert {"torch", "transformers"} <= imported and "Tensor" in names
    assert not imported & {"iac", "maac", "tyro", "wandb", "tqdm", "json", "pydantic"}
    assert not names & FOREIGN
    assert not re.search(r"\b(self\.)?args\.\w", source("common.py"))  # a config's fields


# ---------------------------------------------------------------------------- every setting is read


PARSED = ("args", "self.args", "given", "default")  # what variables with settings are called


def unread(text):
    """The fields of Config and Args that no code outside of these classes reads.

    A field is read as `args.field`, or its name is handed to a function that reads it.
    """
    tree, read, declared = ast.parse(text), set(), set()
    for part in tree.body:
        if isinstance(part, ast.ClassDef) and part.name in ("Config", "Args"):
            declared |= {node.target.id for node in part.body if isinstance(node, ast.AnnAssign)}
            continue
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if ast.unparse(node.value) in PARSED:
                    read.add(node.attr)
            elif isinstance(node, ast.Call):
                read |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    return declared - read


@pytest.mark.parametrize("name", TWINS)
def test_every_setting_is_read(name):
    file = {"iac.py": iac, "maac.py": maac}[name]
    assert len(fields(file.Args)) > 38 and unread(source(name)) == set()


@pytest.mark.parametrize("name", TWINS)
def test_a_setting_that_is_not_read_would_be_found(name):
    text = source(name)
    spare = re.sub(r"(?m)^(    seed: \w+ = 1)", r"    spare: int = 1\n\1", text)
    assert unread(spare) == {"spare"}
    for field in ("discount", "rollout_batch_size", "reference_devices", "wandb_entity", "top_k"):
        other = re.sub(rf"\bargs\.{field}\b", "args.another", text)
        other = re.sub(rf'\("{field}"', '("another"', other)
        assert unread(other) == {field}
