"""What is sampled is what is scored: masks, positions, temperature, sampling filters, and where the critic is read."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import BaseModelOutputWithPast

import common
import iac
import maac

approx = pytest.approx
SHORT, LONG = [5, 6, 7], [20, 21, 22, 23, 24, 25, 26, 27, 28]  # prompts of 3 and of 9 tokens
ANSWERS = [[30, 31, 32, 1], [40, 41]]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sampling(max_new_tokens=1, temperature=1.0, top_p=1.0, top_k=None):
    return max_new_tokens, temperature, top_p, top_k, "float32"


def logits_of(model, ids):
    """Logits [L, V] of one unpadded sequence, straight from the model."""
    return model(input_ids=torch.tensor([ids])).logits[0].float()


def direct(model, prompt, answer, temperature=1.0):
    """The log-probability of each token of an answer, one unpadded sequence at a time."""
    logprobs = (logits_of(model, prompt + answer) / temperature).log_softmax(-1)
    return torch.stack([logprobs[len(prompt) - 1 + k, token] for k, token in enumerate(answer)])


def changed(model):
    """A copy with other weights."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator(3))
    return model


# ------------------------------------------------------------------------------------------------ padding


@torch.no_grad()
def test_padding_changes_no_score_and_no_value(model):
    reference, critic = changed(model), iac.Critic(None, changed(model).base_model, None, seed=0)
    torch.nn.init.normal_(critic.value_head[-1].weight, generator=generator())
    prompts = [SHORT, LONG]
    sequences = [*prompts, SHORT + ANSWERS[0], SHORT]
    values = critic(sequences, "float32")
    assert values[0] == values[3] != values[2]
    for sequence, value in zip(sequences, values, strict=True):
        hidden = critic.backbone(input_ids=torch.tensor([sequence])).last_hidden_state[0, -1]
        assert value.item() == approx(critic.value_head(hidden).item(), abs=1e-5)
    for scored in (model, reference):
        together, mask, hidden = common.score(scored, prompts, ANSWERS, 1.0, "float32", True)[:3]
        assert mask.tolist() == [[True] * 4, [True, True, False, False]] and together[
            1, 2:
        ].tolist() == [0.0, 0.0]
        for row, (prompt, answer) in enumerate(zip(prompts, ANSWERS, strict=True)):
            alone = common.score(scored, [prompt], [answer], 1.0, "float32")[0][0]
            assert torch.allclose(together[row, : len(answer)], alone, atol=1e-5)
            assert torch.allclose(alone, direct(scored, prompt, answer), atol=1e-5)
            states = scored.base_model(input_ids=torch.tensor([prompt + answer])).last_hidden_state[
                0
            ]
            assert torch.allclose(
                hidden[row, : len(answer) + 1], states[len(prompt) - 1 :], atol=1e-5
            )
    assert (
        common.score(reference, prompts, ANSWERS, 1.0, "float32")[0] - together
    ).abs().max() < 1e-6
    assert (common.score(model, prompts, ANSWERS, 1.0, "float32")[0] - together).abs().max() > 0.05


def test_the_end_token_counts_also_where_it_is_the_pad_token(model, monkeypatch):
    """pad = end = 1; one answer is [7, 8, 1], one never ends. The prompt holds a 1 that is no padding either."""
    prompt, pads = [5, 1, 6], [1, 1]

    def generate(input_ids, **_):
        return torch.cat([input_ids, torch.tensor([[7, 8, 1, *pads], [7, 8, 9, 10, 11]])], 1)

    monkeypatch.setattr(model, "generate", generate)
    answers = common.generate(model, [prompt] * 2, {1}, generator(), sampling(5))
    pads = [55, 1]  # nothing is read off what stands behind the end
    assert common.generate(model, [prompt] * 2, {1}, generator(), sampling(5)) == answers
    assert answers == [[7, 8, 1], [7, 8, 9, 10, 11]]

    def gradients():
        logits = []
        hook = model.lm_head.register_forward_hook(
            lambda module, inputs, output: logits.append(output)
        )
        scores = common.score(model, [prompt] * 2, answers, 1.0, "float32")
        logprobs, mask = scores.logprobs, scores.mask
        hook.remove()
        return (
            logprobs,
            mask,
            torch.autograd.grad(logprobs.sum(), logits[0])[0][:, -6:-1],
        )  # [B, K, V]

    logprobs, mask, gradient = gradients()
    assert (
        mask.sum(-1).tolist() == [3, 5] and (gradient.abs().sum(-1) > 0).tolist() == mask.tolist()
    )
    assert gradient[0, 2, 1] > 0.5  # raising the end token's logit raises the score
    assert torch.allclose(logprobs[0, :3], direct(model, prompt, [7, 8, 1]), atol=1e-5)
    other_end = common.score(model, [prompt], [[7, 8, 2]], 1.0, "float32")[0]
    other_prompt = common.score(model, [[5, 2, 6]], [[7, 8, 1]], 1.0, "float32")[0]
    assert (
        (other_end[0, :2] - logprobs[0, :2]).abs().max()
        < 1e-6
        < (other_prompt[0] - logprobs[0, :3]).abs().min()
    )

    def pad_with_55(*arguments):
        inputs = pad(*arguments)
        return inputs | {
            "input_ids": inputs["input_ids"].where(inputs["attention_mask"].bool(), 55)
        }

    pad = common.pad
    monkeypatch.setattr(common, "pad", pad_with_55)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(), (logprobs, mask, gradient), strict=True)
    )


# ------------------------------------------------------------------------- sampling and scoring, one distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_are_divided_by_the_temperature(model, temperature):
    drawn = common.generate(model, [SHORT, LONG], {1}, generator(), sampling(6, temperature))
    logprobs = common.score(model, [SHORT, LONG], drawn, temperature, "float32")[0]
    for row, (prompt, answer) in enumerate(zip([SHORT, LONG], drawn, strict=True)):
        assert torch.allclose(
            logprobs[row, : len(answer)], direct(model, prompt, answer, temperature), atol=1e-5
        )


@pytest.fixture
def eight():
    """A GPT-2 of 8 tokens with plain preferences, and a generation config that would change all of them."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        sizes = {"vocab_size": 8, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(initializer_range=0.2, **sizes)).eval()
    shipped = {
        "top_k": 2,
        "top_p": 0.3,
        "temperature": 0.1,
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
    }
    shipped |= {
        "suppress_tokens": [3],
        "forced_eos_token_id": 4,
        "eos_token_id": 6,
        "min_new_tokens": 1,
    }
    model.generation_config.update(**shipped)
    return model


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies(eight, temperature):
    """Pairs of tokens, drawn beside a longer prompt, come as often as softmax(logits / T) says: a chi-square test."""
    draws, prompt = 4000, [3, 4]
    prompts = [prompt] * draws + [[1, 2, 3, 4, 5]]
    pairs = common.generate(eight, prompts, set(), generator(), sampling(2, temperature))[:draws]
    counts = torch.zeros(8, 8).index_put_(
        tuple(torch.tensor(pairs).T), torch.ones(draws), accumulate=True
    )
    with torch.no_grad():
        first = (logits_of(eight, prompt)[-1] / temperature).softmax(-1)
        second = (
            torch.stack([logits_of(eight, [*prompt, token])[-1] for token in range(8)])
            / temperature
        )
        padded = (logits_of(eight, [0, 0, 0, *prompt])[-1] / temperature).softmax(-1)
    expected = draws * first[:, None] * second.softmax(-1)
    assert (
        expected.max() > 3 * expected.mean() and (first - padded).abs().sum() > 0.5
    )  # much can go wrong
    often = expected >= 5
    cells = torch.stack([counts[often], expected[often]])
    rest = torch.stack([counts[~often].sum(), expected[~often].sum()])
    cells = torch.cat([cells, rest[:, None]], 1) if rest[1] >= 5 else cells
    freedom = cells.shape[1] - 1
    assert ((cells[0] - cells[1]) ** 2 / cells[1]).sum() < freedom + 5 * (
        2 * freedom
    ) ** 0.5  # 5 deviations


def test_no_filter_by_default_and_those_asked_for(model):
    """Near-uniform over 300 tokens: all of them are drawn, or the 5 likeliest, or those of the nucleus."""
    assert [(c().temperature, c().top_p, c().top_k) for c in (iac.IACConfig, maac.MAACConfig)] == [
        (1.0, 1.0, None)
    ] * 2
    model.lm_head.weight.data *= 0.1
    logits = logits_of(model, SHORT)[-1]

    def drawn(count, **options):
        return {
            answer[0]
            for answer in common.generate(
                model, [SHORT] * count, {1}, generator(), sampling(**options)
            )
        }

    assert len(drawn(1200)) > 250
    assert drawn(300, top_k=5) == set(logits.topk(5).indices.tolist())
    ordered = logits.softmax(-1).sort(descending=True)
    nucleus = ordered.indices[: int((ordered.values.cumsum(0) < 0.1).sum()) + 1].tolist()
    assert 20 < len(nucleus) < 35 and drawn(600, top_p=0.1) == set(nucleus)


def test_generate_leaves_no_trace(eight, monkeypatch):
    def broken(input_ids=None, attention_mask=None, **_):
        raise RuntimeError("out of memory, say")

    def draw(seed):
        return common.generate(eight, [[3, 4]] * 20, {6}, generator(seed), sampling(8))

    shipped, state = copy.deepcopy(eight.generation_config.to_dict()), torch.get_rng_state()
    assert draw(0) == draw(0) != draw(1)
    assert eight.generation_config.to_dict() == shipped and shipped["top_k"] == 2
    monkeypatch.setattr(eight, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        draw(0)
    assert eight.generation_config.to_dict() == shipped
    assert torch.equal(torch.get_rng_state(), state)


def test_the_checkpoints_generation_config_is_saved_as_it_came(
    gpt2, tokenizer, make_trainer, tmp_path
):
    gpt2.generation_config.update(
        do_sample=True, top_k=7, repetition_penalty=1.3, eos_token_id=[1, 9]
    )
    gpt2.save_pretrained(tmp_path / "shipped")
    tokenizer.save_pretrained(tmp_path / "shipped")
    source = str(tmp_path / "shipped")
    trainer = make_trainer("iac-v-separate", tmp_path, agent_model=source, critic_model=source)
    trainer.train()
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model" / "agent_0"
    ).generation_config
    assert (again.top_k, again.repetition_penalty, again.eos_token_id) == (7, 1.3, [1, 9])


def test_every_stop_id_ends_an_answer(eight, gpt2, tokenizer):
    answers = common.generate(eight, [[3, 4], [1, 2, 3]] * 50, {2, 5}, generator(), sampling(6))
    assert {answer[-1] for answer in answers if len(answer) < 6} == {2, 5}
    assert {len(answer) for answer in answers} == {1, 2, 3, 4, 5, 6}
    assert not any({2, 5} & set(answer[:-1]) for answer in answers)
    assert all(
        len(a) == 6 for a in common.generate(eight, [[3, 4]] * 50, set(), generator(), sampling(6))
    )
    passes, hook = [], eight.register_forward_hook(lambda *_: passes.append(1))
    common.generate(eight, [[3, 4]] * 50, set(range(8)), generator(), sampling(6))
    hook.remove()
    assert len(passes) == 1  # no pass once all have ended
    for given, stops in (
        ([5, 7], {1, 5, 7}),
        (9, {1, 9}),
        (None, {1}),
    ):  # the tokenizer's own end token is 1
        gpt2.generation_config.eos_token_id = given
        assert common.stop_ids(gpt2, tokenizer) == stops


def test_a_stop_token_is_kept_but_not_shown(variant, llama, tokenizer, make_trainer, rig, tmp_path):
    """Of the two stop ids 1 and 99 the second is an ordinary token; an answer may also end with the last token."""
    llama.generation_config.eos_token_id = [1, 99]
    trainer = make_trainer(
        variant, tmp_path, agents=[llama, copy.deepcopy(llama)], tokenizer=tokenizer
    )
    answers = [[70, 71, 1], [70, 71, 72, 73, 74], [1], [70, 71, 72, 99], [70, 99]]
    rig(trainer, lambda i, prompt, k: answers[sum(prompt) % 5])
    trainer.train()
    kinds = {(tuple(s.completion_ids), s.completion, s.finished) for s in trainer.samples}
    assert kinds == {
        ((70, 71, 1), tokenizer.decode([70, 71]), True),
        ((70, 71, 72, 73), tokenizer.decode([70, 71, 72, 73]), False),
        ((1,), "", True),
        ((70, 71, 72, 99), tokenizer.decode([70, 71, 72]), True),
        ((70, 99), tokenizer.decode([70]), True),
    }


def test_agents_draw_independently(variant, make_trainer, tmp_path):
    """Two copies of one model with one prompt: neither the agents nor the rows of a batch answer alike."""
    args = {"rollout_buffer_size": 99, "max_new_tokens": 3}
    trainer = make_trainer(variant, tmp_path, args, train_dataset=[{"prompt": "same"}] * 20)
    trainer.train()
    assert len({tuple(s.completion_ids) for s in trainer.samples}) > 36


# ------------------------------------------------------------------------------------------------ critic and KL


def count_tokens(backbone):
    """Make a backbone's hidden state at each position (real tokens seen so far) / 10, and nothing else."""

    def forward(input_ids=None, attention_mask=None, **_):
        hidden = torch.zeros(*input_ids.shape, 32)
        hidden[..., 0] = attention_mask.cumsum(-1) / 10
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=(hidden,))

    backbone.forward = forward


@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_critic_is_read_at_the_last_token(variant, length, pads, make_trainer, rig, tmp_path):
    """Prompt of 4 tokens, reward 1: V says 0.4, the TD error is 0.6; Q after 3 more tokens says 0.7, and it is 0.3."""
    rows = [{"prompt": "zzz"}, {"prompt": "yyyyy"}][
        : 1 + pads // 2
    ]  # 4 and 6 tokens with the begin token
    args = {"max_new_tokens": 5, "agent_learning_rate": 0.0, "critic_learning_rate": 0.0}
    args |= (
        {"reference_kl_enabled": True, "reference_kl_coef": 1e-9} if length == 3 else {}
    )  # shared: another path
    given = {"train_dataset": rows, "reward_func": lambda *_, **__: 1.0}
    trainer = make_trainer(variant, tmp_path, args, **given)
    rig(trainer, lambda i, prompt, k: ([70] * (length - 1) + [1]) if len(prompt) == 4 else [70] * 5)
    for critic in trainer.critics:
        count_tokens(critic.backbone)
        critic.value_head[-1].weight.data[0, 0] = 1.0
    trainer.train()
    for s in trainer.samples[:2]:
        assert len(s.prompt_ids) == 4 and len(s.completion_ids) == length
        tokens = 4 + (length if "-q" in variant else 0)
        if "maac" in variant:
            answers = (
                "".join(f"\n[answer {i}]\n{s.completion}" for i in (1, 2))
                if "-q" in variant
                else ""
            )
            tokens = len(
                trainer.tokenizers[0](f"[agent 1]\nzzz\n[agent 2]\nzzz{answers}").input_ids
            )
        assert s.old_value == approx(tokens / 10) and s.target == approx(1.0)  # the reward, once
        assert s.advantage == approx(1 - tokens / 10)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for c in range(len(trainer.critics)):  # the update reads it where collection did
        errors = [
            s.advantage**2 for s in trainer.samples if s.agent_idx % len(trainer.critics) == c
        ]
        assert row[f"critic_{c}/value_loss"] == approx(sum(errors) / len(errors), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_kl_is_exactly_zero_before_the_first_update(variant, temperature, make_trainer, tmp_path):
    args = {"reference_kl_enabled": True, "temperature": temperature}
    trainer = make_trainer(variant, tmp_path, args)
    trainer.train()
    kl = [s.reference_kl for s in trainer.samples]
    assert kl[:8] == [0.0] * 8 and all(
        abs(x) > 1e-4 for x in kl[8:]
    )  # 4 items of 2 agents to the first update
    assert [s.target for s in trainer.samples] == approx(
        [s.reward - 0.1 * s.reference_kl for s in trainer.samples]
    )
