"""Nothing of the user's is lost, and nothing is read as something else without a word."""

import io
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from library_models import (
    MODULES,
    ROWS,
    TEXT,
    VARIANTS,
    build,
    collected,
    folder,
    metrics,
    tokenizer,
    weights,
)
from tokenizers import processors
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedTokenizerFast,
)

import common

# ----------------------------------------------------------------------------------------------------- saved models


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("place", ["the run", "a folder", "here"])
def test_saving_models_removes_nothing_of_others(variant, place, tmp_path, monkeypatch):
    trainer = build(variant, tmp_path / "run")
    trainer.train()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    monkeypatch.chdir(tmp_path / "mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="holds other things"):
        trainer.save_model(
            {"the run": trainer.output_dir, "a folder": str(tmp_path / "mine"), "here": "."}[place]
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_models_saved_again_are_whole_at_every_moment(tmp_path, monkeypatch):
    """Whenever something is removed or renamed, the old models or the new ones are whole, under one name or another."""
    trainer, path = build("iac", None), tmp_path / "saved"
    trainer.save_model(str(path))
    files = sorted(x.relative_to(path) for x in path.rglob("*"))
    seen = []

    def watched(function):
        def watch(*names, **options):
            function(*names, **options)
            whole = [
                sorted(x.relative_to(home) for x in home.rglob("*")) == files
                for home in tmp_path.iterdir()
            ]
            seen.append(
                any(whole) and (not path.exists() or whole[list(tmp_path.iterdir()).index(path)])
            )

        return watch

    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "unlink", watched(os.unlink))
    trainer.save_model(str(path))
    assert len(seen) >= 3 and all(seen) and [x.name for x in tmp_path.iterdir()] == ["saved"]


# -------------------------------------------------------------------------------------------------- vocabularies


def with_another_token(name, **options):
    """Tokenizer T with one more token than its models embed: `name`, put before no text."""
    tok = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("T").backend_tokenizer, bos_token="<s>", eos_token="</s>"
    )
    tok = PreTrainedTokenizerFast.from_pretrained(saved(tok, "plain"))
    tok.add_tokens([AddedToken(name, special=True)])
    assert len(tok) == len(tokenizer("T")) + 1 == tok.convert_tokens_to_ids(name) + 1
    for option, value in options.items():
        setattr(tok, option, value)
    return tok


def saved(tok, name):
    """The folder of a tokenizer."""
    path = f"{folder('G', 'T')}_{name}"
    tok.save_pretrained(path)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tokenizer_may_know_a_token_more_than_the_model_if_no_prompt_has_it(variant, tmp_path):
    """As that of Gemma 3 1B does, whose last token stands for an image."""
    tok = with_another_token("<image>")
    trainer = build(variant, tmp_path / "run", tokenizer=tok)
    start = weights(trainer).clone()
    trainer.train()
    assert not torch.equal(start, weights(trainer))
    rows = [{"prompt": "name 0"}, {"prompt": "name <image> 1"}]
    trainer = build(variant, tmp_path / "other", tokenizer=tok, train_dataset=rows)
    with pytest.raises(ValueError, match=r"row 1, turn 1, agent 0.*does not embed"):
        trainer.train()
    assert torch.equal(start, weights(trainer))


def test_a_critic_that_does_not_embed_a_token_of_a_prompt_is_named(tmp_path):
    tok = with_another_token("<image>")
    agents = [AutoModelForCausalLM.from_pretrained(folder("G", "T")) for _ in range(2)]
    for agent in agents:
        agent.resize_token_embeddings(len(tok))
    for variant, words in {"maac": "row 1, critic", "iac": "row 1, turn 1, agent 0"}.items():
        rows = [{"prompt": "name 0"}, {"prompt": "name <image> 1"}]
        trainer = build(
            variant, tmp_path / variant, agents=agents, tokenizer=tok, train_dataset=rows
        )
        with pytest.raises(ValueError, match=f"{words}.*does not embed"):
            trainer.train()


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_end_token_that_the_model_cannot_draw_is_refused(variant):
    with pytest.raises(ValueError, match=r"agents\[0\] embeds 280 tokens"):
        build(variant, None, tokenizer=with_another_token("<stop>", eos_token="<stop>"))


@pytest.mark.parametrize("given", ["agents", "critic_model", "critics"])
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_a_model_in_memory_that_came_with_another_tokenizer_is_refused(variant, given):
    other = [AutoModelForCausalLM.from_pretrained(folder("G", "U")) for _ in range(2)]
    arguments = {
        "agents": {"agents": other, "tokenizer": tokenizer("T")},
        "critic_model": {"critic_model": other[0]},
    }
    arguments["critics"] = {"critics": other if variant == "iac" else other[:1]}
    with pytest.raises(ValueError, match="comes with the tokenizer"):
        build(variant, None, **arguments[given])


@pytest.mark.parametrize("declared", [True, False])
def test_whatever_a_tokenizer_puts_before_a_text_stands_there_once(declared):
    """GLM puts two tokens there; others one that is not declared as begin token."""
    tok = with_another_token("<mask>", bos_token="<s>" if declared else None)
    first, second = tok.convert_tokens_to_ids(["<mask>", "<s>"])
    specials = [("<mask>", first), ("<s>", second), ("</s>", tok.eos_token_id)]
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<mask> <s> $A </s>", special_tokens=specials
    )
    plain = tok("name 7", add_special_tokens=False).input_ids
    texts = ["name 7", "<mask><s>name 7"]
    assert common.encode(tok, texts, ["", ""], len(tok)) == [[first, second, *plain]] * 2


# -------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_that_are_called_max_seq_len_are_respected(variant, tmp_path):
    """As MPT calls them."""
    tok = tokenizer("T")
    config = MptConfig(d_model=32, n_heads=2, n_layers=2, max_seq_len=64, vocab_size=len(tok))
    agents = [MptForCausalLM(config).eval() for _ in range(2)]
    given = {} if variant == "iac_shared" else {"critic_model": MptForCausalLM(config)}
    rows = [{"prompt": TEXT[: 40 * n]} for n in range(1, 9)]
    trainer = build(
        variant, tmp_path / "run", agents=agents, tokenizer=tok, train_dataset=rows, **given
    )
    samples = collected(trainer)
    with pytest.warns(UserWarning, match="its end is kept"):
        trainer.train()
    assert max(len(s.prompt_ids) for s in samples) == 60 and trainer.truncated > 0


# ------------------------------------------------------------------------------------------- training and going on


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_changes_nothing_where_the_users_functions_draw_random_numbers(
    variant, tmp_path
):
    def noisy(*completions):
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return [noise + len(text) / 10 for text in completions[0]]

    ends, seeds = [], (random.seed, np.random.seed, torch.manual_seed)
    for name, args in {"with": {"eval_interval": 2}, "without": {"eval_interval": 0}}.items():
        for seed in seeds:
            seed(3)
        trainer = build(variant, tmp_path / name, args, reward_func=noisy, eval_dataset=ROWS)
        trainer.train()
        ends.append(weights(trainer))
    assert torch.equal(*ends)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_interrupt_does_not_cost_the_checkpoint(variant, tmp_path, monkeypatch):
    def reward_func(*completions, batch_items):
        if batch_items[0]["n"] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.1 * batch_items[0]["n"]

    def slow(value, path, save=torch.save):
        with open(path, "wb") as file:
            file.write(b"half of it")
        os.kill(os.getpid(), signal.SIGINT)
        save(value, path)

    trainer = build(variant, tmp_path / "run", reward_func=reward_func)
    monkeypatch.setattr(torch, "save", slow)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    state = torch.load(tmp_path / "run" / "checkpoint" / "state.pt", weights_only=True)
    assert state["updates"] == 1 and state["items_done"] == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_log_that_became_shorter_is_gone_on_with_as_it_is(variant, tmp_path):
    build(variant, tmp_path / "run").train()
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "moved")
    trainer = build(variant, None, {"num_train_epochs": 2})
    trainer.train(str(tmp_path / "run"))
    assert [row["env_step"] for row in metrics(trainer)] == [8, 12, 16][-len(metrics(trainer)) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dataset_that_is_used_up_does_not_end_a_run_that_goes_on(variant, tmp_path):
    def reward_func(*completions, batch_items):
        if batch_items[0]["n"] == 6:
            raise OSError("not now")
        return 0.1 * batch_items[0]["n"]

    trainer = build(variant, tmp_path / "run", reward_func=reward_func, train_dataset=iter(ROWS))
    with pytest.raises(OSError, match="not now"):
        trainer.train()
    with pytest.raises(ValueError, match=r"train_dataset.*read again"):
        trainer.train(str(tmp_path / "run"))


class Rows:
    """A dataset without a length, one row of which is None."""

    def __init__(self, gap):
        self.gap = gap

    def __iter__(self):
        return (None if n == self.gap else row for n, row in enumerate(ROWS))


@pytest.mark.parametrize("gap", range(1, 8))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_that_is_none_is_an_error_wherever_it_stands(variant, gap, tmp_path):
    with pytest.raises(ValueError, match=f"row {gap}.*must be a dict, got None"):
        build(variant, tmp_path / "run", train_dataset=Rows(gap)).train()


# -------------------------------------------------------------------------------------------------- command line

TASK = """
train_dataset = [{"prompt": f"name \\u2192 {n}", "n": n} for n in range(4)]
eval_dataset = train_dataset
reward_func = lambda a, b, batch_items: batch_items[0]["n"] / 4
"""


def command(monkeypatch, file, *flags):
    """Run the command line of a file in this process."""
    monkeypatch.setattr(sys, "argv", [f"{file}.py", *flags])
    MODULES[file].main()


@pytest.fixture
def task(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return str(tmp_path / "task.py")


def short(tmp_path, task):
    """Flags of a run of one update, whose tokenizer knows every character."""
    flags = {
        "--agent-model": folder("G", "T"),
        "--task": task,
        "--output-dir": str(tmp_path / "run"),
    }
    flags |= {"--rollout-buffer-size": "4", "--max-new-tokens": "2", "--eval-interval": "4"}
    return [x for pair in flags.items() for x in pair]


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_what_the_terminal_cannot_show_does_not_stop_a_run(file, tmp_path, task, monkeypatch):
    screen = io.BytesIO()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(screen, encoding="latin-1", write_through=True)
    )
    command(monkeypatch, file, *short(tmp_path, task))
    assert "name \\u2192 2" in screen.getvalue().decode("latin-1")


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a_notebook_whose_output_is_no_file_can_run_the_command(file, tmp_path, task, monkeypatch):
    screen = io.StringIO()  # like a notebook's, it cannot be reconfigured
    monkeypatch.setattr(sys, "stdout", screen)
    command(monkeypatch, file, *short(tmp_path, task))
    assert "The trained models are in" in screen.getvalue()


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a_run_is_not_resumed_for_fewer_epochs_nor_where_its_task_is_not(
    file, tmp_path, task, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command(monkeypatch, file, *short(tmp_path, "task.py"), "--num-train-epochs", "2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"num_train_epochs=1: .* has done 2 already"):
        command(monkeypatch, file, "--resume", "run", "--num-train-epochs", "1")
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(ValueError, match=r"task='task.py' is no file here .*resume"):
        command(monkeypatch, file, "--resume", str(tmp_path / "run"))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change", ["--agent-model", "--task", "--critic-model"])
@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a_run_is_not_resumed_with_another_model_or_task(file, change, tmp_path, task, monkeypatch):
    command(monkeypatch, file, *short(tmp_path, task))
    run = tmp_path / "run"
    (tmp_path / "other.py").write_text(TASK)
    shutil.copytree(folder("G", "T"), tmp_path / "copy")
    other = {"--task": str(tmp_path / "other.py")}.get(change, str(tmp_path / "copy"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    more = ["--resume", str(run), "--num-train-epochs", "2"]
    with pytest.raises(ValueError, match=change.lstrip("-").replace("-", "_") + "="):
        command(monkeypatch, file, *more, change, other)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    command(monkeypatch, file, *more)
    assert [
        json.loads(line)["env_step"] for line in Path(run, "metrics.jsonl").read_text().splitlines()
    ] == [0, 4, 8]
