"""iac.py and maac.py are twins, common.py holds no algorithm, and all three stay short enough to be read."""

import ast
import re
from difflib import SequenceMatcher

import pytest
from conftest import ROOT

TWINS = ["iac.py", "maac.py"]
SECTIONS = [
    "1 config",
    "2 task",
    "3 critic",
    "4 buffer record",
    "5 targets, advantages and losses",
    "6 trainer",
]
SECTIONS += ["7 main"]
ALGORITHM = {
    "reward",
    "rewards",
    "advantage",
    "advantages",
    "loss",
    "losses",
    "optimizer",
    "backward",
    "buffer",
}
ALGORITHM |= {
    "discount",
    "target",
    "targets",
    "wandb",
    "json",
    "tqdm",
    "args",
    "config_class",
    "save_pretrained",
}


def source(name):
    return (ROOT / name).read_text()


def functions(text):
    """(name with its class, node) of all functions, in their order; those inside functions count too."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = prefix + re.sub("^(MA|I)AC", "", child.name)
                if isinstance(child, ast.FunctionDef):
                    yield name, child
                yield from walk(child, name + ".")
            else:
                yield from walk(child, prefix)

    return list(walk(ast.parse(text), ""))


def out_of_order(one, other):
    """The functions that both texts have, where they do not stand in the same order in both."""
    names = [[name for name, _ in functions(text)] for text in (one, other)]
    shared = [[name for name in mine if name in theirs] for mine, theirs in (names, names[::-1])]
    return [pair for pair in zip(*shared, strict=True) if pair[0] != pair[1]]


def test_the_twins_differ_in_at_most_15_percent_of_their_lines():
    one, other = (source(name).splitlines() for name in TWINS)
    same = sum(
        block.size
        for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    )
    assert len(one) + len(other) - 2 * same <= 0.15 * (len(one) + len(other))


@pytest.mark.parametrize("name", TWINS)
def test_sections_stand_in_the_published_order(name):
    banners = re.findall(r"^# -{20,} (.+)$", source(name), re.M)
    assert banners == SECTIONS
    assert ast.get_docstring(ast.parse(source(name)))


def test_functions_of_the_same_name_stand_in_the_same_order():
    one, other = map(source, TWINS)
    assert len(functions(one)) > 40 and not out_of_order(one, other)
    moved = re.sub(
        r"(?s)(def policy_loss.*?\n\n\n)(.*?)(def explained_variance.*?\n\n\n)", r"\3\2\1", one
    )
    assert moved != one and out_of_order(
        moved, other
    )  # the check does see a function that has moved


@pytest.mark.parametrize(("name", "most"), [("iac.py", 956), ("maac.py", 938), ("common.py", 274)])
def test_files_are_short(name, most):
    assert len(source(name).splitlines()) <= most


@pytest.mark.parametrize("name", [*TWINS, "common.py"])
def test_functions_fit_a_screen(name):
    lengths = {path: node.end_lineno - node.lineno + 1 for path, node in functions(source(name))}
    long = {
        path: n
        for path, n in lengths.items()
        if n > 60 and path.split(".")[-1] not in ("__init__", "train")
    }
    assert not long


def test_common_holds_no_algorithm_and_sees_no_config():
    tree, names, imported = ast.parse(source("common.py")), set(), set()
    for node in ast.walk(tree):
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
    assert not imported & {"iac", "maac", "tyro", "wandb", "tqdm", "json", "dataclasses"}
    assert not names & ALGORITHM
    assert [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] == [
        "Scores"
    ]  # a plain record
