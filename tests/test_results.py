"""The figures in the README are those of the committed results, and the commands beside them are real."""

import json
import re
import shlex
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmark"))

import learning
import speed

README = (ROOT / "README.md").read_text()
MADE = sorted(
    path.stem for path in learning.RESULTS.glob("*.json") if not path.stem.startswith("speed")
)


def test_the_readme_shows_the_committed_results_and_no_others():
    lines = README[
        README.index("## What it learns") : README.index("## How it relates")
    ].splitlines()
    made = [*learning.readme(learning.RESULTS), *speed.readme(learning.RESULTS)]
    result = re.compile(r"^\|.*\d|^- ")
    shown, wanted = ([x for x in some if result.search(x)] for some in (lines, made))
    assert shown == wanted and len(shown) > 8
    assert [line for line in made if line and line not in lines] == []


def test_the_commands_beside_them_parse_and_name_what_there_is():
    commands = [
        shlex.split(line) for line in re.findall(r"^    (python tests/benchmark/.*)$", README, re.M)
    ]
    studies = [
        x
        for words in commands
        if words[1].endswith("learning.py")
        for x in learning.parse(words[2:]).studies
    ]
    assert set(MADE) <= set(studies) <= set(learning.STUDIES)
    cases = [speed.parse(words[2:]).cases for words in commands if words[1].endswith("speed.py")]
    assert len(cases) > 1 and all(cases)


@pytest.mark.parametrize("name", MADE)
def test_pages_are_made_of_the_results_and_those_of_the_studies_as_they_are(name):
    study, results = (
        learning.STUDIES[name],
        json.loads((learning.RESULTS / f"{name}.json").read_text()),
    )
    assert (learning.RESULTS / f"{name}.md").read_text() == learning.table(name, study, results)
    assert (learning.RESULTS / f"{name}.png").stat().st_size > 10_000
    for label, entry in results["variants"].items():
        assert entry["flags"] == study["flags"] | study["variants"][label], label
        for run in entry["runs"].values():
            assert re.fullmatch("[0-9a-f]{7,}", run["commit"])
            assert name in learning.parse(shlex.split(run["command"])[2:]).studies
