"""The committed results are whole, their pages are made of them, and the README quotes them."""

import json
import re
import shlex
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmark"))

import learning
import speed

import plot

README = (ROOT / "README.md").read_text()
PATHS = sorted(learning.RESULTS.glob("*.json"))
MADE = [path.stem for path in PATHS if not path.stem.startswith("speed")]


@pytest.mark.parametrize("name", MADE)
def test_pages_are_made_of_the_results_and_those_of_the_studies_as_they_are(name):
    study = learning.STUDIES[name]
    results = json.loads((learning.RESULTS / f"{name}.json").read_text())
    assert (learning.RESULTS / f"{name}.md").read_text() == learning.table(name, study, results)
    assert (learning.RESULTS / f"{name}.png").stat().st_size > 10_000
    for label, entry in results["variants"].items():
        assert entry["flags"] == study["flags"] | study["variants"][label], label
        for run in entry["runs"].values():
            assert re.fullmatch("[0-9a-f]{7,}", run["commit"])
            assert name in learning.parse(shlex.split(run["command"])[2:]).studies


def test_the_readme_quotes_the_private_numbers_as_measured():
    page = (learning.RESULTS / "private_numbers.md").read_text()
    for variant in ("IAC", "MAAC"):
        row = re.search(rf"^\| {variant} \|.*$", page, re.M)[0]
        reward, explained = row.split("|")[5].strip(), row.split("|")[7].split("±")[0].strip()
        assert reward in README and explained in README


def test_the_readme_quotes_the_speed_as_measured():
    lines = "\n".join(speed.readme(learning.RESULTS))
    assert re.search(r"smollm2/iac-v-1gen.*\| 2\.9 ", lines)
    ratios = [float(x) for x in re.findall(r"tiny/\w+-v-1gen, 2 agents \| \S+ \| ([\d.]+) ", lines)]
    assert len(ratios) == 2 and 7 < min(ratios) < 7.5 and 12.9 < max(ratios) < 13.5
    assert "7 to 13 times as fast, on SmolLM2 with a buffer of 8 2.9 times" in README


def write_run(folder, values):
    """A run whose metrics.jsonl has these evaluation rewards."""
    folder.mkdir()
    rows = [{"env_step": 10 * n, "eval/turn_1/reward_mean": x} for n, x in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_plot_averages_the_runs_of_a_label(tmp_path, monkeypatch):
    write_run(tmp_path / "a", [0, 1, 2])
    write_run(tmp_path / "b", [2, 1, 0])
    rows = [plot.read_rows(tmp_path / name) for name in "ab"]
    assert plot.last_reward(rows[0]) == "eval/turn_1/reward_mean"
    curves = [plot.curve(each, "eval/turn_1/reward_mean") for each in rows]
    assert curves[0] == [(0, 0), (10, 1), (20, 2)]
    assert plot.band(curves) == [(0, 1, 1), (10, 1, 0), (20, 1, 1)]
    thin = plot.curve(rows[0], "eval/turn_1/reward_mean", pieces=2)
    assert thin == [(10, 0.5), (20, 2)]
    picture = tmp_path / "c.png"
    runs = f"both={tmp_path / 'a'},{tmp_path / 'b'}"
    monkeypatch.setattr(sys, "argv", ["plot.py", runs, "--output", str(picture)])
    plot.main()
    assert picture.stat().st_size > 5_000


def test_plot_names_a_metric_that_is_not_there(tmp_path):
    write_run(tmp_path / "a", [0, 1])
    with pytest.raises(SystemExit, match="nothing"):
        plot.draw({"a": [plot.read_rows(tmp_path / "a")]}, ["nothing"], tmp_path / "x.png")
