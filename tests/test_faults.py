"""The faults that programs of this kind have really had, each held by a test; and a table of every argument.

Entry of the list of faults -> the tests that hold it; those of this file carry the entry's number in their name.
"""

import ast
import copy
import hashlib
import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from library_models import (
    MODULES,
    ROWS,
    VARIANTS,
    build,
    collected,
    folder,
    metrics,
    model,
    rig,
    tokenizer,
    weights,
)
from tokenizers import processors
from torch import nn

import common

HERE = Path(__file__).parent
FAULTS = {
    "A01 end-of-text masking": [
        "test_faults.py::test_a01_the_end_token_is_trained_and_padding_is_not"
    ],
    "A02 padding and positions": [
        "test_faults.py::test_a02_scores_and_values_do_not_depend_on_the_neighbours"
    ],
    "A03 hidden sampling filters": ["test_faults.py::test_a03_nothing_filters_the_samples_unasked"],
    "A04 temperature": [
        "test_faults.py::test_a04_scores_are_those_of_the_distribution_that_was_sampled_from",
        "test_faults.py::test_a04_samples_are_drawn_from_the_distribution_that_scores_them",
        "test_faults.py::test_a04_temperature_on_the_command_line",
    ],
    "A05 KL overflow": [
        "test_faults.py::test_a05_kl_and_its_gradient_stay_finite",
        "test_faults.py::test_a05_kl_is_zero_before_the_first_update",
        "test_faults.py::test_a05_no_reference_model_without_need",
    ],
    "A06 half-precision load": [
        "test_library.py::test_a_bfloat16_checkpoint_is_trained_in_float32"
    ],
    "A07 spread of one sample": [
        "test_faults.py::test_a07_small_groups_stay_finite",
        "test_faults.py::test_a07_equal_rewards_give_no_advantage",
        "test_faults.py::test_a07_equal_advantages_are_0_whatever_their_number",
    ],
    "A08 critic off by one": ["test_faults.py::test_a08_the_critic_is_read_at_the_right_token"],
    "A09 critic with another tokenizer": [
        "test_library.py::test_a_gpt2_and_a_llama_with_tokenizers_of_their_own",
        "test_library.py::test_a_critic_with_another_tokenizer_is_refused_naming_both",
        "test_library.py::test_an_agent_with_another_models_tokenizer_is_refused",
    ],
    "A10 doubled begin token": [
        "test_faults.py::test_a10_there_is_one_begin_token_or_none",
        "test_faults.py::test_a10_an_end_token_is_not_taken_for_a_begin_token",
    ],
    "A11 prompt too long": ["test_faults.py::test_a11_of_a_long_prompt_the_end_is_kept"],
    "A12 fewer rows than the buffer": [
        "test_faults.py::test_a12_every_row_is_trained_on",
        "test_faults.py::test_a12_an_empty_dataset_is_an_error",
    ],
    "A13 reward: wrong count, None, NaN": [
        "test_faults.py::test_a13_a_bad_reward_is_refused_and_nothing_trained",
        "test_faults.py::test_a13_a_bad_processed_reward_is_refused_too",
    ],
    "A14 value head lost": [
        "test_library.py::test_critics_come_back_with_their_value_heads_in_a_fresh_process",
        "test_library.py::test_saved_agents_are_ordinary_models_with_their_tokenizers",
    ],
    "A15 two runs, one folder": [
        "test_cli.py::test_identical_runs_at_the_same_moment_get_folders_of_their_own",
        "test_faults.py::test_a15_a_run_keeps_out_of_a_folder_with_files",
        "test_library.py::test_saved_agents_are_ordinary_models_with_their_tokenizers",
    ],
    "A16 booleans on the command line": [
        "test_cli.py::test_booleans_have_an_on_and_an_off_form",
        "test_cli.py::test_commands_in_the_readme_and_docstrings_parse",
    ],
    "A17 wandb steps out of order": [
        "test_evaluation_logging.py::test_wandb_gets_the_rows_of_metrics_jsonl",
        "test_evaluation_logging.py::test_two_trainings_in_one_process_are_two_runs_also_after_an_exception",
    ],
    "A18 seeds": [
        "test_faults.py::test_a18_the_seed_decides_everything",
        "test_faults.py::test_a18_the_global_random_state_neither_matters_nor_changes",
        "test_evaluation_logging.py::test_logging_to_wandb_does_not_change_the_training",
    ],
}


def test_every_fault_has_tests_that_exist():
    assert [name.split()[0] for name in FAULTS] == [f"A{number:02}" for number in range(1, 19)]
    for file, test in (name.split("::") for names in FAULTS.values() for name in names):
        body = ast.parse((HERE / file).read_text()).body
        assert test in [node.name for node in body if isinstance(node, ast.FunctionDef)], (
            file,
            test,
        )
    own = [
        node.name
        for node in ast.parse(Path(__file__).read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    listed = {name.split("::")[1] for names in FAULTS.values() for name in names}
    assert {name for name in own if name.startswith("test_a")} - listed == set()


def answer_with(monkeypatch, ids: list[list[int]]) -> None:
    """Every generation gives these completions, one for each row of a batch, for all agents."""
    monkeypatch.setattr(
        common, "generate_all", lambda agents, *_: [[list(row) for row in ids] for _ in agents]
    )


def tildes(tokens: int, name: str = "T") -> str:
    """A text of that many tokens with T or U, which merged no ~ with anything; T's begin token is one of them."""
    text = "~" * (tokens - (name == "T"))
    assert len(tokenizer(name)(text).input_ids) == tokens
    return text


# --------------------------------------------------------------------------------------------- generation, scoring


@pytest.mark.parametrize("variant", VARIANTS)
def test_a01_the_end_token_is_trained_and_padding_is_not(variant, tmp_path, monkeypatch):
    """pad = end = 1: [7, 8, 1] and two pads beside [7, 8, 9, 10, 11], whatever the pads hold."""
    tok = copy.deepcopy(tokenizer("T"))
    tok.pad_token = tok.eos_token
    assert tok.pad_token_id == tok.eos_token_id == 1
    rows, results = [{"prompt": "name</s>one"}, {"prompt": "name</s>two"}], []
    for number, pads in enumerate(([1, 1], [9, 200], [0, 1])):
        args = {"rollout_buffer_size": 2, "max_new_tokens": 5, "advantage_normalization": False}
        given = {
            "train_dataset": rows,
            "tokenizer": tok,
            "reward_func": lambda a, b: 1.0 + len(a[0]),
        }
        trainer, logits, masks = build(variant, tmp_path / str(number), args, **given), [], []
        rigged = torch.tensor([[7, 8, 1, *pads], [7, 8, 9, 10, 11]])
        for agent in trainer.agents:

            def generate(input_ids, rigged=rigged, **_):
                return torch.cat([input_ids, rigged], -1)

            monkeypatch.setattr(agent, "generate", generate)

        def note_logits(module, inputs, output, seen=logits):
            if output.requires_grad:
                output.retain_grad()
                seen.append(output)

        def note_mask(module, args, kwargs, seen=masks):
            seen.append((kwargs["input_ids"], kwargs["attention_mask"]))

        trainer.agents[0].lm_head.register_forward_hook(note_logits)
        trainer.agents[0].register_forward_pre_hook(note_mask, with_kwargs=True)
        samples = collected(trainer)
        trainer.train()
        assert [s.completion_ids for s in samples if s.agent_idx == 0] == [
            [7, 8, 1],
            [7, 8, 9, 10, 11],
        ]
        assert metrics(trainer)[0]["agent_0/completion_tokens"] == 4
        order = (
            [0, 1] if masks[-1][0][0, -1] != 11 else [1, 0]
        )  # of the two samples in the shuffled mini-batch
        trained = logits[0].grad[:, :-1].abs().sum(-1)[order] > 0  # [B, K]
        assert trained.tolist() == [[True, True, True, False, False], [True] * 5]
        assert logits[0].grad[order[0], 2, 1].abs() > 1e-4  # the end token itself
        assert all(1 in s.prompt_ids[1:-1] for s in samples)
        seen = [(ids[mask.bool()].tolist().count(1)) for ids, mask in zip(*masks[-1], strict=True)]
        assert sorted(seen) == [
            1,
            2,
        ]  # in the middle of both prompts, and at the end of one completion
        results.append((weights(trainer), [row["agent_0/policy_loss"] for row in metrics(trainer)]))
    for other, losses in results[1:]:
        assert torch.equal(other, results[0][0]) and losses == results[0][1]


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("family", ["G", "L"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a02_scores_and_values_do_not_depend_on_the_neighbours(
    variant, family, critic_type, tmp_path, monkeypatch
):
    """Prompts of 3 and 9 tokens with completions of 5 and 2: actor, reference and critic, together and one by one."""
    source = folder(family, "T")
    given = {"agent_model": source} | ({} if variant == "iac_shared" else {"critic_model": source})
    trainer = build(
        variant, tmp_path, {"critic_type": critic_type, "reference_kl_enabled": True}, **given
    )
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in (*trainer.references, *(critic.value_head for critic in trainer.critics)):
            for p in module.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=noise))
    items, answers = [{"prompt": tildes(3)}, {"prompt": tildes(9)}], [[70, 80, 90, 100, 1], [60, 1]]
    answer_with(monkeypatch, answers)
    together = [s for episode in trainer.collect(items, 0, trainer.generators, 1) for s in episode]
    alone = []
    for item, answer in zip(items, answers, strict=True):
        answer_with(monkeypatch, [answer])
        alone += trainer.collect([item], 0, trainer.generators, 1)[0]
    assert sorted({len(s.prompt_ids) for s in together}) == [3, 9]
    for i in (0, 1):
        pairs = [(s, x) for s, x in zip(together, alone, strict=True) if s.agent_idx == i]
        logprobs, mask, *_ = trainer.score(trainer.agents[i], [s for s, _ in pairs])
        assert mask.sum(-1).tolist() == [5, 2]
        for row, (s, x) in enumerate(pairs):
            assert s.old_value == pytest.approx(x.old_value, abs=1e-4) and abs(s.old_value) > 1e-3
            assert (
                s.reference_kl == pytest.approx(x.reference_kl, abs=1e-4)
                and abs(s.reference_kl) > 1e-3
            )
            single = trainer.score(trainer.agents[i], [x])[0][0]
            torch.testing.assert_close(logprobs[row, : len(single)], single, atol=1e-4, rtol=0)
            ids = torch.tensor([s.prompt_ids + s.completion_ids])  # and without any padding or mask
            z = trainer.agents[i](ids).logits[0, len(s.prompt_ids) - 1 : -1]
            plain = z.log_softmax(-1)[range(len(s.completion_ids)), s.completion_ids]
            torch.testing.assert_close(single, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a03_nothing_filters_the_samples_unasked(file, tmp_path):
    """1200 tokens of a nearly uniform model; what the checkpoint's generation config asks for is set aside."""
    agent = model("G", tokenizer("T"))
    with torch.no_grad():
        agent.transformer.wte.weight.mul_(1e-4)
    agent.generation_config.update(
        top_k=20, top_p=0.5, do_sample=True, suppress_tokens=list(range(100))
    )
    distinct = []
    for top_k in (None, 5):
        given = {
            "agent_model": copy.deepcopy(agent),
            "tokenizer": tokenizer("T"),
            "reward_func": lambda a: 0.5,
        }
        args = {"num_agents": 1, "num_generations": 1200, "max_new_tokens": 1, "top_k": top_k}
        trainer = build(file, tmp_path, args, **given)
        (episode,) = trainer.collect(ROWS[:1], 0, trainer.generators, 1200, train=False)
        distinct.append(len({s.completion_ids[0] for s in episode}))
    assert distinct[0] > 250 and distinct[1] == 5


@pytest.mark.parametrize("temperature", [0.5, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a04_scores_are_those_of_the_distribution_that_was_sampled_from(
    variant, temperature, tmp_path, monkeypatch
):
    trainer, scored = (
        build(variant, tmp_path, {"temperature": temperature}, train_dataset=ROWS[:4]),
        [],
    )
    start, module = copy.deepcopy(trainer.agents), MODULES[variant]
    loss = module.policy_loss
    monkeypatch.setattr(
        module,
        "policy_loss",
        lambda logprobs, A: scored.append(logprobs.detach()) or loss(logprobs, A),
    )
    samples, step = collected(trainer), trainer.actor_step
    batches = []
    trainer.actor_step = lambda i, batch, A: batches.append((i, batch)) or step(i, batch, A)
    trainer.train()
    assert len(scored) == 2 and len(samples) == 8
    for logprobs, (i, batch) in zip(scored, batches, strict=True):
        for row, s in zip(logprobs, batch, strict=True):
            z = start[i](torch.tensor([s.prompt_ids + s.completion_ids])).logits[
                0, len(s.prompt_ids) - 1 : -1
            ]
            by_hand = (z / temperature).log_softmax(-1)[
                range(len(s.completion_ids)), s.completion_ids
            ]
            torch.testing.assert_close(row[: len(by_hand)], by_hand, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a04_samples_are_drawn_from_the_distribution_that_scores_them(file, temperature, tmp_path):
    """The mean score of 4000 one-token completions is the negative entropy of that distribution, and of no other."""
    agent = model("G", tokenizer("T"))
    with torch.no_grad():
        agent.transformer.wte.weight.mul_(5.0)
    given = {"agent_model": agent, "tokenizer": tokenizer("T"), "reward_func": lambda a: 0.5}
    args = {
        "num_agents": 1,
        "num_generations": 4000,
        "max_new_tokens": 1,
        "temperature": temperature,
    }
    trainer = build(file, tmp_path, args, **given)
    (episode,) = trainer.collect(ROWS[:1], 0, trainer.generators, 4000, train=False)
    logprobs = (
        (agent(torch.tensor([episode[0].prompt_ids])).logits[0, -1] / temperature)
        .log_softmax(-1)
        .detach()
    )
    drawn = logprobs[[s.completion_ids[0] for s in episode]]
    entropy = -(logprobs.exp() * logprobs).sum()
    assert 0.5 < entropy < 5.6 and abs(drawn.mean() + entropy) < 4 * drawn.std() / 4000**0.5


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a04_temperature_on_the_command_line(file, monkeypatch):
    """2 is 2.0, and 0 is refused by name, before any model is loaded."""
    seen = []

    def stub(**given):
        return SimpleNamespace(train=lambda *_, **__: seen.append(given["args"].temperature))

    monkeypatch.setattr(MODULES[file], f"{file.upper()}Trainer", stub)
    monkeypatch.setattr(sys, "argv", [f"{file}.py", "--temperature", "2"])
    MODULES[file].main()
    assert seen == [2.0] and type(seen[0]) is float
    for bad in ("0", "-1", "nan", "inf"):
        monkeypatch.setattr(sys, "argv", [f"{file}.py", f"--temperature={bad}"])
        with pytest.raises((ValueError, SystemExit)) as error:
            MODULES[file].main()
        assert (
            error.type is ValueError and "temperature" in str(error.value)
        ) or error.value.code not in (0, None)
    assert len(seen) == 1


# -------------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a05_kl_and_its_gradient_stay_finite(file):
    """A log-ratio of +100 and of -100 at one real position; NaN and infinity at padded ones."""
    for ratio in (100.0, -100.0):
        logprobs = torch.tensor([[0.0, ratio, 0.0, torch.nan, torch.inf]], requires_grad=True)
        mask = torch.tensor([[True, True, True, False, False]])
        kl = MODULES[file].reference_kl(logprobs, torch.zeros(1, 5), mask)
        kl.sum().backward()
        assert kl.tolist() == [ratio] and logprobs.grad.isfinite().all()
        assert logprobs.grad[0, 3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a05_kl_is_zero_before_the_first_update(variant, temperature, tmp_path):
    """And not after it; that it lowers the target is in the numbers of the same samples."""
    args = {
        "reference_kl_enabled": True,
        "reference_kl_coef": 0.5,
        "temperature": temperature,
        "discount": 0.0,
    }
    trainer = build(variant, tmp_path, args)
    samples = collected(trainer)
    trainer.train()
    first, second = samples[:8], samples[8:]
    assert {s.reference_kl for s in first} == {0.0} and all(s.reference_kl != 0 for s in second)
    for s in samples:
        assert s.target == pytest.approx(s.reward - 0.5 * s.reference_kl)
    own = [s.reference_kl for s in second if s.agent_idx == 1]
    assert metrics(trainer)[1]["agent_1/reference_kl"] == pytest.approx(sum(own) / len(own))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a05_no_reference_model_without_need(variant, tmp_path):
    for args in (
        {},
        {"reference_kl_enabled": True, "reference_kl_coef": 0.0},
        {"reference_kl_coef": 0.5},
    ):
        assert build(variant, tmp_path, args).references == []
    trainer = build(variant, tmp_path / "run", {"reference_kl_enabled": True})
    before = torch.cat([p.flatten() for m in trainer.references for p in m.parameters()])
    trainer.train()
    assert torch.equal(
        before, torch.cat([p.flatten() for m in trainer.references for p in m.parameters()])
    )


# --------------------------------------------------------------------------------------------- advantages, critics


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("rows", "batch"), [(3, 1), (5, 4), (1, 4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a07_small_groups_stay_finite(variant, rows, batch, normalized, tmp_path):
    args = {
        "advantage_normalization": normalized,
        "rollout_buffer_size": batch,
        "reference_kl_enabled": True,
    }
    trainer = build(variant, tmp_path, args, train_dataset=ROWS[:rows])
    before = copy.deepcopy(trainer.agents)
    trainer.train()
    assert weights(trainer).isfinite().all()
    for agent, old in zip(trainer.agents, before, strict=True):  # a group of one is trained on too
        assert any(
            (p != q).any() for p, q in zip(agent.parameters(), old.parameters(), strict=True)
        )
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in metrics(trainer))
    assert len(metrics(trainer)) == -(-rows // batch)


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_a07_equal_rewards_give_no_advantage(variant, tmp_path):
    """With normalisation equal surprises are no reason to change an actor; without, they are.

    The mean of seven times 0.7 is another number in float32, and AdamW makes a whole step of the smallest gradient.
    """
    for normalized in (True, False):
        args = {
            "advantage_normalization": normalized,
            "critic_learning_rate": 1e-6,
            "rollout_buffer_size": 7,
        }
        given = {"reward_func": lambda a, b: 0.7, "train_dataset": ROWS[:7]}
        trainer = build(variant, tmp_path / str(normalized), args, **given)
        before = copy.deepcopy(trainer.agents[1].state_dict())
        trainer.train()
        same = all(
            torch.equal(p, before[name]) for name, p in trainer.agents[1].state_dict().items()
        )
        assert (
            same == normalized and (metrics(trainer)[0]["agent_1/policy_loss"] == 0) == normalized
        )
        assert metrics(trainer)[0]["critic_0/value_loss"] == pytest.approx(0.49, rel=1e-2)


@pytest.mark.parametrize("variant", ["iac", "maac"])
@pytest.mark.parametrize("value", [0.7, -10.1, 100.3, 1e-7, 1e7 / 3])
def test_a07_equal_advantages_are_0_whatever_their_number(variant, value):
    for size in [*range(2, 130), 256, 1000]:
        column = torch.tensor([[value, 0.0, value]] * size).T[0]  # as in `update`
        assert not MODULES[variant].normalize_advantages(column).any(), size
        assert MODULES[variant].explained_variance(torch.randn(size), column) == [], size


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_early_termination_takes_a_mean_reward_above_the_threshold(variant, tmp_path):
    """It has to exceed it: 0.1 + 0.1 + 0.1 is more than 3 * 0.1 by a rounding error."""
    args = {
        "num_agents": 3,
        "num_turns": 2,
        "early_termination_threshold": 0.1,
        "max_new_tokens": 1,
    }
    trainer = build(
        variant, tmp_path, args, reward_func=lambda *answers: 0.1, external_transition=again
    )
    samples = collected(trainer)
    trainer.train()
    assert sum(s.turn_idx == 1 for s in samples) == 3 * len(ROWS)


class Counter(nn.Module):
    """A model whose hidden state at each position is (real tokens seen so far) / 10."""

    def __init__(self):
        super().__init__()
        self.device, self.config = (
            torch.device("cpu"),
            SimpleNamespace(get_text_config=SimpleNamespace),
        )
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, attention_mask, logits_to_keep=1, **_):
        hidden = attention_mask.cumsum(-1)[:, :, None] / 10 + 0 * self.anchor
        logits = (0 * hidden).expand(-1, -1, 300)[:, -logits_to_keep:]
        return SimpleNamespace(last_hidden_state=hidden, hidden_states=(hidden,), logits=logits)


@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("variant", ["iac", "iac_shared", "iac_shared with references", "maac"])
def test_a08_the_critic_is_read_at_the_right_token(
    variant, critic_type, pads, length, tmp_path, monkeypatch
):
    """A prompt of 4 tokens and a reward of 1: with v the TD error is 0.6, with q and a completion of 3 it is 0.3."""
    references, variant = variant.endswith("references"), variant.split()[0]
    args = {"critic_type": critic_type, "advantage_normalization": False, "rollout_buffer_size": 2}
    trainer = build(variant, tmp_path, args, reward_func=lambda a, b: 1.0)
    trainer.references = [Counter(), Counter()] if references else []
    for critic in trainer.critics:
        critic.backbone, critic.value_head = Counter(), nn.Identity()
    for i in range(2 if variant == "iac_shared" else 0):
        trainer.agents[i] = Counter()
    text, answer = tildes(4), [70, 80, 90, 100] if length == 4 else [70, 80, 1][-length:]
    answer_with(monkeypatch, [answer, answer])
    items = [{"prompt": text}, {"prompt": tildes(4 + pads)}]
    samples = trainer.collect(items, 0, trainer.generators, 1)[0]  # of the first item
    seen = 4 + (length if critic_type == "q" else 0)
    if variant == "maac":
        T = tokenizer("T")
        said = T.decode(answer, skip_special_tokens=True)
        joint = f"[agent 1]\n{text}\n[agent 2]\n{text}"
        joint += f"\n[answer 1]\n{said}\n[answer 2]\n{said}" if critic_type == "q" else ""
        seen = len(T(joint).input_ids)
    for s in samples:
        assert len(s.completion_ids) == length and s.target == s.reward == 1.0
        assert s.advantage == pytest.approx(1 - seen / 10, abs=1e-6)
    if variant == "iac_shared":  # and the same in the pass that trains
        logprobs, _, hidden = trainer.score(trainer.agents[0], samples[:1], return_hidden=True)[:3]
        assert trainer.values(0, samples[:1], hidden).tolist() == pytest.approx([seen / 10])
        assert logprobs.shape == (1, length)


# --------------------------------------------------------------------------------------------------------- prompts


TEMPLATE = (
    "{{ bos_token }}[{{ messages[0]['content'] }}]{% if add_generation_prompt %} ={% endif %}"
)


def test_a10_an_end_token_is_not_taken_for_a_begin_token():
    """Where both are the same token, and the tokenizer puts it at the end only."""
    tok = copy.deepcopy(tokenizer("T"))
    tok.bos_token = tok.eos_token
    single = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tok.eos_token_id)]
    )
    tok.backend_tokenizer.post_processor = single
    assert tok("name").input_ids[-1] == tok.eos_token_id
    assert common.encode(tok, ["name"], [""], len(tok)) == [tok("name").input_ids[:-1]]


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize(
    "name", ["T, template", "T, template with no begin token", "T", "U", "U, template"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a10_there_is_one_begin_token_or_none(variant, name, critic_type, tmp_path, monkeypatch):
    """T puts a begin token before every text, and the template writes one too; U has none."""
    tok, source = copy.deepcopy(tokenizer(name[0])), folder("G", name[0])
    tok.chat_template = TEMPLATE.replace(
        "{{ bos_token }}", "" if name[0] == "U" or "no begin" in name else "<s>"
    )
    args = {
        "chat_template": "template" in name,
        "reference_kl_enabled": True,
        "critic_type": critic_type,
    }
    given = {"agent_model": source, "tokenizer": tok, "train_dataset": ROWS[5:6]}
    given |= {} if variant == "iac_shared" else {"critic_model": source}
    trainer, seen = build(variant, tmp_path, args, **given), []
    bodies = [critic.backbone for critic in trainer.critics]
    for m in [*trainer.agents, *trainer.references, *bodies]:
        m.get_input_embeddings().register_forward_pre_hook(
            lambda _, ids: seen.append(ids[0].tolist())
        )
    rig(monkeypatch, trainer, lambda i, k: "seven")
    samples = collected(trainer)
    trainer.train()
    assert len(seen) >= 6
    begin = [tok.bos_token_id] if name[0] == "T" else []
    for (row,) in seen:  # one row at a time, so that there is no padding
        assert row[: len(begin)] == begin and row.count(0) == len(begin)
    text = "[name 5] =" if "template" in name else "name 5"
    assert all(
        s.prompt_ids == begin + tok(text, add_special_tokens=False).input_ids for s in samples
    )
    if name[0] == "U":
        assert tok.bos_token_id is None


@pytest.mark.parametrize(
    ("name", "tokens"), [("T", 56), ("T", 57), ("T", 64), ("T", 70), ("U", 70)]
)
@pytest.mark.parametrize(("company", "critic_type"), [(0, "v"), (1, "q")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a11_of_a_long_prompt_the_end_is_kept(
    variant, company, name, tokens, critic_type, tmp_path, recwarn
):
    """64 positions, 8 new tokens: 56 fit; longer ones keep a begin token and their end, and there is a warning."""
    tok, sizes = tokenizer(name), {"positions": 64}
    given = {"agents": [model("G", tok, i, **sizes) for i in (1, 2)], "tokenizer": tok}
    if variant != "iac_shared":
        given["critics"] = [
            model("G", tok, i, **sizes) for i in ((3,) if variant == "maac" else (3, 4))
        ]
    text = tildes(tokens, name)[:-3] + "|||"
    given["train_dataset"] = [{"prompt": text}, {"prompt": "short"}][: 1 + company]
    args = {"max_new_tokens": 8, "critic_type": critic_type, "reference_kl_enabled": True}
    trainer = build(variant, tmp_path, args, **given)
    samples = collected(trainer)
    trainer.train()
    whole = tok(text).input_ids
    own, kept = (
        [s for s in samples if s.row == 0],
        whole[-56:] if name == "U" else [0, *whole[1:][-55:]],
    )
    assert all(s.prompt_ids == kept for s in own)
    assert all(1 <= len(s.completion_ids) <= 8 for s in samples) and all(
        len(s.critic_ids) <= 64 for s in own
    )
    row = metrics(trainer)[-1]
    assert row["truncated_prompts"] == (2 if tokens > 56 else 0) and row["env_step"] == 1 + company
    warned = [w for w in recwarn if "its end is kept" in str(w.message)]
    assert bool(warned) == (
        tokens > 56 or variant == "maac"
    )  # two such prompts are too long for the one critic


# ------------------------------------------------------------------------------------------------ data and rewards


@pytest.mark.parametrize(
    ("rows", "buffer", "batch", "updates"),
    [(3, 8, None, 1), (3, 8, 2, 1), (8, 4, None, 2), (10, 4, 3, 3), (1, 8, None, 1)],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a12_every_row_is_trained_on(variant, rows, buffer, batch, updates, tmp_path):
    """In each of two epochs; the reward function sees each row once, and so do the optimisers."""
    rewarded, trained = [], []
    data = [{"prompt": f"name {n}", "n": n} for n in range(rows)]

    def reward_func(a, b, batch_items):
        rewarded.append(batch_items[0]["n"])
        return len(a[0]) / 10

    args = {"rollout_buffer_size": buffer, "num_train_epochs": 2, "train_batch_size": batch}
    trainer = build(variant, tmp_path, args, reward_func=reward_func, train_dataset=data)
    step = trainer.actor_step
    trainer.actor_step = lambda i, batch, A: (
        trained.extend((i, s.row) for s in batch) or step(i, batch, A)
    )
    before = weights(trainer)
    trainer.train()
    assert rewarded == 2 * list(range(rows)) and (weights(trainer) != before).any()
    assert sorted(trained) == sorted(2 * [(i, n) for i in (0, 1) for n in range(rows)])
    assert len([row for row in metrics(trainer) if "agent_0/policy_loss" in row]) == 2 * updates


@pytest.mark.parametrize("empty", [list, lambda: iter(()), lambda: (), lambda: None])
@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a12_an_empty_dataset_is_an_error(file, empty, tmp_path):
    trainer = build(file, tmp_path, train_dataset=empty())
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()


BAD_REWARDS = {
    "1 value": ([0.5], ["4", "1 values"]),
    "3 values": ([0.1, 0.2, 0.3], ["4", "3 values"]),
    "5 values": ([0.1] * 5, ["4", "5 values"]),
    "none at all": ([], ["4", "0 values"]),
    "None": (None, ["4", "None"]),
    "one None": ([0.1, None, 0.2, 0.3], ["4", "None"]),
    "NaN": ([0.1, float("nan"), 0.2, 0.3], ["finite", "nan"]),
    "infinity": ([0.1, float("inf"), 0.2, 0.3], ["finite", "inf"]),
    "a bare NaN": (float("nan"), ["finite", "nan"]),
    "text": (["0.1"] * 4, ["4", "'0.1'"]),
    "a dict": ({"reward": 0.5}, ["4", "reward"]),
    "transposed": ([[0.1, 0.2]] * 4, ["2 lists of 4"]),
    "matrix with a hole": ([[0.1] * 4, [0.1] * 3], ["2 lists of 4"]),
    "three rows": ([[0.1] * 4] * 3, ["2 lists of 4"]),
    "NaN in a matrix": ([[0.1] * 4, [0.1] * 3 + [float("nan")]], ["finite", "nan"]),
    "a tensor of 3": (torch.ones(3), ["4", "3 values"]),
    "an array of 3": (np.ones(3), ["4", "3 values"]),
    "a tensor that is a bare NaN": (torch.tensor(float("nan")), ["finite", "nan"]),
}


@pytest.mark.parametrize("case", BAD_REWARDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a13_a_bad_reward_is_refused_and_nothing_trained(variant, case, tmp_path):
    """Four joint answers per item; the bad reward comes for the second item of the first update."""
    raw, words = BAD_REWARDS[case]
    args = {"num_generations": 4, "rollout_buffer_size": 8}

    def reward_func(a, b, batch_items):
        return raw if batch_items[0]["n"] == 1 else [0.1, 0.2, 0.3, 0.4]

    trainer = build(variant, tmp_path, args, reward_func=reward_func)
    before = weights(trainer)
    with pytest.raises(ValueError) as error:
        trainer.train()
    assert all(word in str(error.value) for word in [*words, "row 1", "turn 1"]), str(error.value)
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a13_a_bad_processed_reward_is_refused_too(file, tmp_path):
    for number, bad in enumerate((None, float("nan"), "1", [0.5])):
        trainer = build(file, tmp_path / str(number), reward_processor=lambda reward, bad=bad: bad)
        with pytest.raises(ValueError, match=r"row 0.*reward_processor"):
            trainer.train()


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a15_a_run_keeps_out_of_a_folder_with_files(file, tmp_path):
    (tmp_path / "run").mkdir()  # an empty one is welcome
    build(file, tmp_path / "run").train()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    trainer = build(file, tmp_path / "run")
    start = weights(trainer)
    with pytest.raises(ValueError, match="output_dir"):
        trainer.train()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert torch.equal(weights(trainer), start)


# ----------------------------------------------------------------------------------------------------------- seeds


PLAY = """
import hashlib, json, random, sys, tempfile
import numpy, torch
from library_models import VARIANTS, build, collected, metrics
torch.manual_seed(int(sys.argv[1])), random.seed(int(sys.argv[1])), numpy.random.seed(int(sys.argv[1]))

def digest(modules):
    numbers = [p.detach().numpy().tobytes() for m in modules for p in m.parameters()]
    return hashlib.sha256(b"".join(numbers)).hexdigest()

for variant in VARIANTS:
    for seed in (1, 2):
        with tempfile.TemporaryDirectory() as place:
            head = {} if variant == "maac" else {"critic_value_head_hidden_dim": 8, "value_head_hidden_dim": 8}
            given = {"model_config": {"critic_value_head_hidden_dim": 8}} if variant == "maac" else {}
            args = {"seed": seed, "num_train_epochs": 2, "train_batch_size": 2} | head
            trainer = build(variant, place + "/run", args, **given)
            heads, samples = digest(c.value_head for c in trainer.critics), collected(trainer)
            trainer.train()
            rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics(trainer)]
            drawn = [[s.row, s.completion_ids, s.old_value] for s in samples]
            print(json.dumps([variant, seed, heads, drawn, rows, digest([*trainer.agents, *trainer.critics])]))
"""


def test_a18_the_seed_decides_everything():
    """Two fresh processes, with other global seeds and other hashes: equal heads, completions, metrics and weights."""
    outputs = []
    for number in ("1", "2"):
        command, env = [sys.executable, "-c", PLAY, number], os.environ | {"PYTHONHASHSEED": number}
        done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(
            [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        )
    assert len(outputs[0]) == 2 * len(VARIANTS) and outputs[0] == outputs[1]
    for one, two in zip(outputs[0][::2], outputs[0][1::2], strict=True):
        assert one[0] == two[0] and all(
            one[k] != two[k] for k in range(2, 6)
        )  # heads, draws, metrics, weights
        assert [row for row, *_ in one[3]] == [
            row for row, *_ in two[3]
        ]  # the data come in their own order
        assert len(one[4]) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_a18_the_global_random_state_neither_matters_nor_changes(variant, tmp_path):
    results = []
    for number in (1, 2):
        torch.manual_seed(number)
        state = torch.get_rng_state()
        trainer = build(variant, tmp_path / str(number), {"reference_kl_enabled": True})
        assert torch.equal(state, torch.get_rng_state())
        trainer.train()
        assert torch.equal(state, torch.get_rng_state())
        results.append(hashlib.sha256(weights(trainer).numpy().tobytes()).hexdigest())
    assert results[0] == results[1]


# -------------------------------------------------------------------------------------------- every argument there is


def again(prompt, agent_completions, num_agents, **_):
    return [f"{prompt} again"] * num_agents


TURNS = {"num_turns": 2, "rollout_buffer_size": 8, "external_transition": again}
MP = {"parallel_training": "mp", "agent_devices": ["cpu:0"], "critic_devices": ["cpu:0"]}
KL = {"reference_kl_enabled": True, "num_train_epochs": 2}
SETTINGS = {  # field -> two values whose outcomes must differ, and what else must be so for that
    "num_agents": (2, 3, {}),
    "num_turns": (1, 2, {"external_transition": again}),
    "critic_type": ("v", "q", {}),
    "use_separate_critic": (True, False, {"only": "iac"}),
    "num_train_epochs": (1, 2, {}),
    "agent_learning_rate": (1e-3, 2e-3, {}),
    "critic_learning_rate": (1e-3, 2e-3, {}),
    "value_loss_coef": (0.6, 0.3, {}),
    "value_clip_range": (0.2, 1e-3, {"only": "iac_shared", "train_batch_size": 1}),
    "advantage_normalization": (True, False, {}),
    "rollout_buffer_size": (4, 2, {}),
    "train_batch_size": (None, 2, {}),
    "micro_batch_size": (None, 2, {}),
    "rollout_batch_size": (None, 2, {}),
    "chat_template": (False, True, {}),
    "max_new_tokens": (4, 3, {}),
    "temperature": (1.0, 1.5, {}),
    "top_p": (1.0, 0.5, {}),
    "top_k": (None, 5, {}),
    "num_generations": (1, 2, {}),
    "external_prompt_passthrough": (
        False,
        True,
        TURNS | {"formatters": lambda x: f"* {x['prompt']}"},
    ),
    "discount": (1.0, 0.5, TURNS),
    "early_termination_threshold": (None, 0.1, TURNS),
    "reference_kl_enabled": (False, True, {"num_train_epochs": 2}),
    "reference_kl_coef": (0.1, 0.5, KL),
    "critic_value_head_hidden_dim": (None, 8, {"only": "iac"}),
    "value_head_hidden_dim": (None, 8, {"only": "iac_shared"}),
    "max_grad_norm": (1.0, 1e-6, {}),
    "eval_interval": (2, 4, {"eval_dataset": ROWS}),
    "eval_num_samples": (4, 3, {"eval_dataset": ROWS}),
    "eval_batch_size": (1, 2, {"eval_dataset": ROWS}),
    "logging_steps": (1, 8, {}),
    "checkpoint_interval": (0, 1, {}),
    "parallel_training": (
        "none",
        "mp",
        {"agent_devices": ["cpu"], "critic_devices": ["cpu"], "named": "cpu"},
    ),
    "agent_devices": (["cpu:0"], ["cpu:0", "cpu:1"], MP),
    "critic_devices": (["cpu:0"], ["cpu:1"], MP),
    "reference_devices": (["cpu:0"], ["cpu:1"], MP | KL),
    "dtype": ("float32", "bfloat16", {}),
    "seed": (1, 2, {}),
}
GROUPS = {"iac": ["iac"], "iac_shared": ["iac_shared"], "separate": ["iac", "maac"]}
ARGUMENTS = {  # of the constructor -> the file that exercises it
    "agent_model": "test_library.py",
    "agents": "test_library.py",
    "critic_model": "test_library.py",
    "critics": "test_library.py",
    "tokenizer": "test_library.py",
    "model_config": "test_library.py",
    "reward_func": "test_callables.py",
    "reward_processor": "test_callables.py",
    "formatters": "test_callables.py",
    "external_transition": "test_callables.py",
    "metrics_callback": "test_callables.py",
    "train_dataset": "test_callables.py",
    "args": "test_placement.py",
    "eval_dataset": "test_evaluation_logging.py",
    "wandb_config": "test_evaluation_logging.py",
    "output_dir": "test_faults.py",
}


OUTCOMES: dict = {}  # by variant, settings and arguments


def outcome(variant, path, args, monkeypatch, again=True, **given) -> list:
    """All that a training does that could be told from outside: draws, numbers, batch sizes, devices, files.

    Without `again` one that has the same settings as an earlier one is not repeated.
    """
    sizes, devices, saves, to, pad = [], [], [], nn.Module.to, common.pad
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "to", lambda m, *a, **k: devices.append(a) or to(m, *a, **k))
        patch.setattr(
            common, "pad", lambda prompts, *rest: sizes.append(len(prompts)) or pad(prompts, *rest)
        )
        tok = copy.deepcopy(tokenizer("T"))
        tok.chat_template = TEMPLATE
        trainer = build(variant, path, args, tokenizer=tok, **given)
        key = (variant, repr(trainer.args), repr(given))
        if key in OUTCOMES and not again:
            return OUTCOMES[key]
        save, samples = trainer.save_checkpoint, collected(trainer)
        trainer.save_checkpoint = lambda folder: saves.append(1) or save(folder)
        trainer.train()
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics(trainer)]
    drawn = [[s.prompt, s.completion_ids, s.old_value, s.target] for s in samples]
    devices = [str(place) for args in devices for place in args if isinstance(place, torch.device)]
    OUTCOMES[key] = [drawn, rows, sizes, devices, saves, weights(trainer).tolist()]
    return OUTCOMES[key]


@pytest.mark.parametrize("field", SETTINGS)
def test_every_setting_makes_a_difference(field, tmp_path, monkeypatch):
    """A field that is never read would leave everything as it is."""
    one, two, context = SETTINGS[field]
    context = dict(context)
    variants = GROUPS[context.pop("only", "separate")]
    named = context.pop("named", None)
    given = {name: context.pop(name) for name in ARGUMENTS if name in context}
    given |= {} if "eval_dataset" in given else {"eval_dataset": ROWS[:1]}
    for variant in variants:
        results = []
        for number, value in enumerate((one, two)):
            args = {"eval_num_samples": 4, "eval_interval": 4} | context | {field: value}
            if field == "use_separate_critic" and not value:
                variant = "iac_shared"
            if named and value == "mp":
                args["agent_devices"] = ["cpu:0", "cpu:1"]  # which "none" would refuse
            home = tmp_path / f"{variant}{number}"
            results.append(outcome(variant, home, args, monkeypatch, again=False, **given))
        assert results[0] != results[1], variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_settings_make_no_difference(variant, tmp_path, monkeypatch):
    """So that the test above means something."""
    assert outcome(variant, tmp_path / "1", {}, monkeypatch) == outcome(
        variant, tmp_path / "2", {}, monkeypatch
    )


def test_every_argument_is_exercised():
    for module, kind in ((MODULES["iac"], "IAC"), (MODULES["maac"], "MAAC")):
        settings = {field.name for field in fields(getattr(module, f"{kind}Config"))}
        assert settings <= SETTINGS.keys(), settings - SETTINGS.keys()
        arguments = set(inspect.signature(getattr(module, f"{kind}Trainer")).parameters)
        assert arguments == ARGUMENTS.keys(), arguments ^ ARGUMENTS.keys()
    both = {
        f.name
        for kind in (MODULES["iac"].IACConfig, MODULES["maac"].MAACConfig)
        for f in fields(kind)
    }
    assert both == SETTINGS.keys(), SETTINGS.keys() - both
    for name, file in ARGUMENTS.items():
        assert name in (HERE / file).read_text(), (name, file)
