"""What is sampled is what is scored: padding, masks, temperature, filters, prompts and seeds."""

import copy
import hashlib
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import common
import iac
import maac
from commands import ENV, run_alone
from conftest import BEGIN, END, VARIANTS

approx = pytest.approx
SHORT, LONG = [5, 6, 7], [20, 21, 22, 23, 24, 25, 26, 27, 28]  # prompts of 3 and of 9 tokens
ANSWERS = [[30, 31, 32, 1], [40, 41]]
FILES = pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sampling(max_new_tokens=1, temperature=1.0, top_p=1.0, top_k=None, dtype="float32"):
    return common.Sampling(max_new_tokens, temperature, top_p, top_k, dtype)


def logits_of(model, ids):
    """Logits [L, V] of one unpadded sequence, straight from the model."""
    return model(input_ids=torch.tensor([ids])).logits[0].float()


def direct(model, prompt, answer, temperature=1.0):
    """The log-probability of each token of an answer, one unpadded sequence at a time."""
    logprobs = (logits_of(model, prompt + answer) / temperature).log_softmax(-1)
    return torch.stack([logprobs[len(prompt) - 1 + k, token] for k, token in enumerate(answer)])


def changed(module):
    """The same module, its weights a little different."""
    noise = generator(3)
    for parameter in module.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=noise)
    return module


def metrics(trainer):
    lines = (Path(trainer.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(trainer):
    models = [*trainer.agents, *trainer.critics]
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


# --------------------------------------------------------------------------- padding and positions


@torch.no_grad()
def test_padding_changes_no_score_and_no_value(model):
    critic = iac.Critic(copy.deepcopy(model).base_model, None, None, seed=0)
    changed(critic)
    sequences = [SHORT, LONG, SHORT + ANSWERS[0], SHORT]
    values = critic(sequences, "float32")
    assert values[0] == values[3] != values[2]
    for sequence, value in zip(sequences, values, strict=True):
        hidden = critic.backbone(input_ids=torch.tensor([sequence])).last_hidden_state[0, -1]
        assert value.item() == approx(critic.value_head(hidden).item(), abs=1e-5)
        assert value.item() == approx(critic([sequence], "float32").item(), abs=1e-5)
    together = common.score(model, [SHORT, LONG], ANSWERS, 1.0, "float32")
    assert together.shape == (2, 4) and together[1, 2:].tolist() == [0.0, 0.0]
    for row, (prompt, answer) in enumerate(zip([SHORT, LONG], ANSWERS, strict=True)):
        alone = common.score(model, [prompt], [answer], 1.0, "float32")[0]
        assert torch.allclose(together[row, : len(answer)], alone, atol=1e-5)
        assert torch.allclose(alone, direct(model, prompt, answer), atol=1e-5)


@pytest.mark.parametrize("family", ["G", "L"])
def test_neighbours_change_no_number_of_a_run(variant, family, make_trainer, rig, tmp_path):
    """Prompts and answers of several lengths: all together, and one by one."""
    results = []
    answers = [[70, 80, 90, 100], [60, 1], [1]]
    for size in (None, 1):
        args = {"micro_batch_size": size, "rollout_batch_size": size, "reference_kl_enabled": True}
        args |= {"agent_learning_rate": 0.0, "critic_learning_rate": 0.0}
        args |= {"advantage_normalization": False, "rollout_buffer_size": 3}
        rows = [{"prompt": text} for text in ("abc", "abcdefghijklm", "zyxwvuts")]
        given = {"train_dataset": rows, "model": family}
        trainer = make_trainer(variant, tmp_path / str(size), args, **given)
        for module in (*trainer.references, *(critic.value_head for critic in trainer.critics)):
            changed(module)
        rig(trainer, lambda i, prompt, k: answers[sum(prompt) % 3])
        trainer.train()
        (row,) = metrics(trainer)
        numbers = [s.old_value for s in trainer.samples] + [s.advantage for s in trainer.samples]
        numbers += [s.reference_kl for s in trainer.samples]
        numbers += [row[name] for name in sorted(row) if not name.startswith("time/")]
        results.append(numbers)
        assert len({len(s.prompt_ids) for s in trainer.samples}) == 3
        assert len({len(s.completion_ids) for s in trainer.samples}) > 1
        assert min(abs(s.old_value) for s in trainer.samples) > 1e-3
        assert min(abs(s.reference_kl) for s in trainer.samples) > 1e-4
    assert results[0] == approx(results[1], abs=1e-4)


def test_the_end_token_counts_also_where_it_is_the_pad_token(model, monkeypatch):
    """pad = end = 1; [7, 8, 1] beside an answer that never ends; the prompt holds a 1 as well."""
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
        hook = model.lm_head.register_forward_hook(lambda m, x, output: logits.append(output))
        logprobs = common.score(model, [prompt] * 2, answers, 1.0, "float32")
        hook.remove()
        gradient = torch.autograd.grad(logprobs.sum(), logits[0])[0]
        return logprobs, gradient[:, -6:-1]  # [B, K, V]

    logprobs, gradient = gradients()
    trained = (gradient.abs().sum(-1) > 0).tolist()
    assert trained == [[True, True, True, False, False], [True] * 5]
    assert gradient[0, 2, 1] > 0.5  # raising the end token's logit raises the score
    assert torch.allclose(logprobs[0, :3], direct(model, prompt, [7, 8, 1]), atol=1e-5)
    other_prompt = common.score(model, [[5, 2, 6]], [[7, 8, 1]], 1.0, "float32")[0]
    assert (other_prompt - logprobs[0, :3]).abs().min() > 1e-6  # the 1 in it is read

    def pad_with_55(*arguments):
        inputs = pad(*arguments)
        ids = inputs["input_ids"].where(inputs["attention_mask"].bool(), 55)
        return inputs | {"input_ids": ids}

    pad = common.pad
    monkeypatch.setattr(common, "pad", pad_with_55)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), (logprobs, gradient), strict=True))


def test_what_the_pads_hold_changes_no_weight(variant, make_trainer, tokenizer, tmp_path):
    """With a tokenizer whose pad token is its end token; another answer does change the weights."""
    tok = copy.deepcopy(tokenizer)
    tok.pad_token = tok.eos_token
    results = []
    for number, end in enumerate(([1, 1, 1], [1, 9, 200], [1, 0, 1], [9, 1, 1])):
        args = {"rollout_buffer_size": 2, "max_new_tokens": 5}
        rows = [{"prompt": f"name<end>{n}"} for n in ("one", "two and more")]
        given = {"train_dataset": rows, "tokenizer": tok}
        trainer = make_trainer(variant, tmp_path / str(number), args, **given)
        rigged = torch.tensor([[7, 8, *end], [7, 8, 9, 10, 11]])
        for agent in trainer.agents:
            agent.generate = lambda input_ids, rigged=rigged, **_: torch.cat([input_ids, rigged], 1)
        trainer.train()
        assert all(END in s.prompt_ids[1:-1] for s in trainer.samples)
        assert metrics(trainer)[0]["agent_0/completion_tokens"] == (4.5 if number == 3 else 4)
        results.append(weights(trainer).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_at_padding_has_no_effect(llama, rubbish):
    """Neither on the scores, nor on their gradient, nor on the estimate of the KL."""

    def gradient():
        llama.zero_grad()
        scores = common.score(llama, [SHORT, LONG], ANSWERS, 1.0, "float32")
        iac.reference_kl(scores, scores.detach() - 1).sum().backward()
        return scores.detach(), llama.model.norm.weight.grad.clone()

    def spoil(module, args, kwargs, output):
        output.logits = output.logits.masked_fill(is_pad[..., None], rubbish)

    scores, grad = gradient()
    is_pad = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    llama.register_forward_hook(spoil, with_kwargs=True)
    spoilt, spoilt_grad = gradient()
    assert torch.equal(spoilt, scores) and spoilt.isfinite().all()
    assert torch.equal(spoilt_grad, grad) and grad.abs().max() > 0


# ------------------------------------------------------ sampling and scoring, the same distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_are_divided_by_the_temperature(model, temperature):
    drawn = common.generate(model, [SHORT, LONG], {1}, generator(), sampling(6, temperature))
    logprobs = common.score(model, [SHORT, LONG], drawn, temperature, "float32")
    for row, (prompt, answer) in enumerate(zip([SHORT, LONG], drawn, strict=True)):
        by_hand = direct(model, prompt, answer, temperature)
        assert torch.allclose(logprobs[row, : len(answer)], by_hand, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 2])
def test_the_loss_is_of_the_distribution_that_was_sampled_from(variant, temperature, make_trainer, tmp_path):
    args = {"temperature": temperature, "advantage_normalization": False}
    trainer = make_trainer(variant, tmp_path, args)
    trainer.train_dataset = trainer.train_dataset[:4]
    start = copy.deepcopy(trainer.agents)
    trainer.train()
    (row,) = metrics(trainer)
    for i in (0, 1):
        losses, surprise = [], []
        for s in (s for s in trainer.samples if s.agent_idx == i):
            logprobs = direct(start[i], s.prompt_ids, s.completion_ids, temperature)
            losses.append(-logprobs.sum().item() * s.advantage)
            surprise += (-logprobs).tolist()
        assert row[f"agent_{i}/policy_loss"] == approx(sum(losses) / 4, abs=1e-4)
        assert row[f"agent_{i}/entropy"] == approx(sum(surprise) / len(surprise), abs=1e-4)


@pytest.fixture
def eight():
    """A GPT-2 of 8 tokens that prefers some; its generation config would change all of it."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        sizes = {"vocab_size": 8, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(initializer_range=0.2, **sizes)).eval()
    model.generation_config.update(
        top_k=2,
        top_p=0.3,
        temperature=0.1,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        suppress_tokens=[3],
        forced_eos_token_id=4,
        eos_token_id=6,
        min_new_tokens=1,
    )
    return model


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_answers_come_as_often_as_the_softmax_says(eight, temperature):
    """Pairs of tokens, drawn beside a longer prompt: a chi-square test."""
    draws, prompt = 4000, [3, 4]
    prompts = [prompt] * draws + [[1, 2, 3, 4, 5]]
    pairs = common.generate(eight, prompts, set(), generator(), sampling(2, temperature))[:draws]
    counts = torch.zeros(8, 8)
    counts.index_put_(tuple(torch.tensor(pairs).T), torch.ones(draws), accumulate=True)
    with torch.no_grad():
        first = (logits_of(eight, prompt)[-1] / temperature).softmax(-1)
        after = torch.stack([logits_of(eight, [*prompt, token])[-1] for token in range(8)])
        padded = (logits_of(eight, [0, 0, 0, *prompt])[-1] / temperature).softmax(-1)
    expected = draws * first[:, None] * (after / temperature).softmax(-1)
    assert expected.max() > 3 * expected.mean() and (first - padded).abs().sum() > 0.5
    often = expected >= 5
    cells = torch.stack([counts[often], expected[often]])
    rest = torch.stack([counts[~often].sum(), expected[~often].sum()])
    cells = torch.cat([cells, rest[:, None]], 1) if rest[1] >= 5 else cells
    freedom = cells.shape[1] - 1
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # 5 deviations


def test_no_filter_by_default_and_those_asked_for(model):
    """Near-uniform over 300 tokens: all are drawn, or the 5 likeliest, or those of the nucleus."""
    model.lm_head.weight.data *= 0.1
    logits = logits_of(model, SHORT)[-1]

    def drawn(count, **options):
        prompts = [SHORT] * count
        answers = common.generate(model, prompts, {1}, generator(), sampling(**options))
        return {answer[0] for answer in answers}

    assert len(drawn(1200)) > 250
    assert drawn(300, top_k=5) == set(logits.topk(5).indices.tolist())
    ordered = logits.softmax(-1).sort(descending=True)
    nucleus = ordered.indices[: int((ordered.values.cumsum(0) < 0.1).sum()) + 1].tolist()
    assert 20 < len(nucleus) < 35 and drawn(600, top_p=0.1) == set(nucleus)


@FILES
def test_a_run_samples_from_all_tokens_unless_told_otherwise(variant, gpt2, tokenizer, make_trainer, tmp_path):
    """Whatever the checkpoint's generation config would have."""
    gpt2.lm_head.weight.data *= 1e-4
    suppressed = {"suppress_tokens": list(range(2, 100))}
    gpt2.generation_config.update(top_k=20, top_p=0.5, do_sample=True, **suppressed)
    source = str(tmp_path / "uniform")
    gpt2.save_pretrained(source)
    tokenizer.save_pretrained(source)
    distinct = []
    for options in ({}, {"top_k": 5}, {"top_p": 0.1}):
        args = {"max_new_tokens": 1, "eval_num_samples": 1200, "eval_batch_size": 1200} | options
        given = {"agent_model": source, "critic_model": source}
        given |= {"eval_dataset": [{"prompt": "name 1"}] * 1200, "reward_func": lambda a, b: 0.5}
        trainer = make_trainer(variant, tmp_path / str(len(distinct)), args, **given)
        trainer.evaluate()
        distinct.append(len({s.completion_ids[0] for s in trainer.samples if s.agent_idx == 0}))
    assert distinct[0] > 250 and distinct[1] == 5 and 20 < distinct[2] < 40


def test_generating_leaves_no_trace(eight, monkeypatch):
    """The generation config is the checkpoint's again, and no global random number was drawn."""

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


def test_the_checkpoints_generation_config_is_saved_as_it_came(gpt2, tokenizer, make_trainer, tmp_path):
    shipped = {"top_k": 7, "repetition_penalty": 1.3, "eos_token_id": [1, 9]}
    gpt2.generation_config.update(do_sample=True, **shipped)
    source = str(tmp_path / "shipped")
    gpt2.save_pretrained(source)
    tokenizer.save_pretrained(source)
    trainer = make_trainer("iac-v-separate", tmp_path, agent_model=source, critic_model=source)
    trainer.train()
    home = f"{trainer.output_dir}/model/agent_0"
    again = AutoModelForCausalLM.from_pretrained(home).generation_config
    assert {name: getattr(again, name) for name in shipped} == shipped


# ----------------------------------------------------------------------------- where answers end


def test_every_stop_id_ends_an_answer(eight):
    prompts = [[3, 4], [1, 2, 3]] * 50
    answers = common.generate(eight, prompts, {2, 5}, generator(), sampling(6))
    assert {answer[-1] for answer in answers if len(answer) < 6} == {2, 5}
    assert {len(answer) for answer in answers} == {1, 2, 3, 4, 5, 6}
    assert not any({2, 5} & set(answer[:-1]) for answer in answers)
    endless = common.generate(eight, prompts, set(), generator(), sampling(6))
    assert all(len(answer) == 6 for answer in endless)
    passes, hook = [], eight.register_forward_hook(lambda *_: passes.append(1))
    common.generate(eight, prompts, set(range(8)), generator(), sampling(6))
    hook.remove()
    assert len(passes) == 1  # no pass once all have ended


@pytest.mark.parametrize(("given", "stops"), [([5, 7], {1, 5, 7}), (9, {1, 9}), (None, {1}), (1, {1})])
def test_stop_ids_are_the_generation_configs_and_the_tokenizers_own(gpt2, tokenizer, given, stops):
    gpt2.generation_config.eos_token_id = given
    assert common.stop_ids(gpt2, tokenizer) == stops


def test_a_stop_token_is_kept_but_not_shown(variant, llama, tokenizer, make_trainer, rig, tmp_path):
    """Of the two the second is an ordinary token; an empty answer is an empty text."""
    llama.generation_config.eos_token_id = [1, 99]
    given = {"agents": [llama, copy.deepcopy(llama)], "tokenizer": tokenizer}
    seen = []
    given["reward_func"] = lambda a, b: seen.append(a[0]) or len(a[0])
    trainer = make_trainer(variant, tmp_path, **given)
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
    assert seen == [s.completion for s in trainer.samples if s.agent_idx == 0] and "" in seen


def test_nothing_but_empty_answers_trains(variant, make_trainer, rig, tmp_path):
    seen = []
    given = {"reward_func": lambda a, b: seen.append((a, b)) or len(seen) / 10}
    trainer = make_trainer(variant, tmp_path, **given)
    rig(trainer, lambda i, prompt, k: [END])
    before = weights(trainer).clone()
    trainer.train()
    assert set(map(str, seen)) == {"([''], [''])"}
    assert (weights(trainer) != before).any() and weights(trainer).isfinite().all()


# ------------------------------------------------------------------------------------- the KL term


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_kl_is_exactly_zero_before_the_first_update(variant, temperature, make_trainer, tmp_path):
    """And not after it; it lowers the target, and is logged. The reference does not learn."""
    args = {"reference_kl_enabled": True, "reference_kl_coef": 0.5, "temperature": temperature}
    trainer = make_trainer(variant, tmp_path, args)
    start = copy.deepcopy(trainer.references)
    trainer.train()
    kl = [s.reference_kl for s in trainer.samples]
    assert kl[:8] == [0.0] * 8 and all(abs(x) > 1e-4 for x in kl[8:])  # 4 items of 2 agents
    for s in trainer.samples:
        assert s.target == approx(s.reward - 0.5 * s.reference_kl)
    own = [s.reference_kl for s in trainer.samples[8:16] if s.agent_idx == 1]
    assert metrics(trainer)[1]["agent_1/reference_kl"] == approx(sum(own) / len(own))
    for one, two in zip(start, trainer.references, strict=True):
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("module", [iac, maac])
def test_kl_of_far_apart_models_and_its_gradient_are_finite(module):
    for ratio in (100.0, -100.0):
        logprobs = torch.tensor([[0.0, ratio, 0.0]], requires_grad=True)
        kl = module.reference_kl(logprobs, torch.zeros(1, 3))
        kl.sum().backward()
        assert kl.tolist() == [ratio] and logprobs.grad.tolist() == [[1.0, 1.0, 1.0]]


def test_no_reference_model_is_loaded_without_need(variant, make_trainer, tmp_path):
    off = {"reference_kl_enabled": True, "reference_kl_coef": 0.0}
    for args in ({}, off, {"reference_kl_coef": 0.5}):
        assert make_trainer(variant, tmp_path, args).references == []


# ----------------------------------------------------------------------------------------- prompts

TEMPLATE = "{{ begin }}[{{ messages[0]['content'] }}]{% if add_generation_prompt %} ={% endif %}"


@pytest.fixture(scope="module")
def bare():
    """Another byte-level tokenizer: 300 ids in another order, an end token, no begin token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    names = [f"<{n}>" for n in range(43)] + ["<stop>", *letters]
    backend = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<stop>")


@pytest.mark.parametrize("kind", ["T", "T by template", "T by a template that begins", "bare"])
def test_there_is_one_begin_token_or_none(variant, kind, tokenizer, bare, llama, make_trainer, tmp_path):
    """In what agents, references and critics read: T's are put before every text, bare has none."""
    tok = copy.deepcopy(bare if kind == "bare" else tokenizer)
    begin = "<begin>" if "begins" in kind else ""
    tok.chat_template = TEMPLATE.replace("{{ begin }}", begin)
    args = {"chat_template": "template" in kind, "reference_kl_enabled": True}
    config = copy.deepcopy(llama.config)
    config.name_or_path = ""  # of no folder, so that any tokenizer may be theirs
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [LlamaForCausalLM(config) for _ in range(3)]
    given = {"tokenizer": tok, "agents": models[:2]}
    given |= {} if "shared" in variant else {"critic_model": models[2]}
    given["train_dataset"] = [{"prompt": "name 5"}]
    trainer, seen = make_trainer(variant, tmp_path, args, **given), []
    bodies = [critic.backbone for critic in trainer.critics]
    for model in [*trainer.agents, *trainer.references, *bodies]:
        model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: seen.append(ids[0][0].tolist()))
    trainer.train()
    first = tok("a").input_ids[:-1]
    assert first == ([] if kind == "bare" else [BEGIN]) and len(seen) > 6
    text = "[name 5] =" if "template" in kind else "name 5"
    ids = tok(text, add_special_tokens=False).input_ids
    assert all(s.prompt_ids == first + ids for s in trainer.samples)
    for row in seen:  # one row at a time, so that there is no padding
        if len(row) > 1:  # not the next token of an answer
            assert row[: len(first)] == first and row[1] != BEGIN


def test_what_stands_before_every_text_stands_there_once(tokenizer):
    """Be it two tokens; an end token that is put after a text is left out, whatever its name."""

    def with_post_processor(single, **names):
        tok = copy.deepcopy(tokenizer)
        ids = [("<begin>", BEGIN), ("<end>", END)]
        post = processors.TemplateProcessing(single=single, special_tokens=ids)
        tok.backend_tokenizer.post_processor = post
        for name, value in names.items():
            setattr(tok, name, value)
        return tok

    def encode(tok, text):
        return common.encode(tok, [text], ["place"], 300)[0]

    bare = tokenizer("name", add_special_tokens=False).input_ids
    two = with_post_processor("<begin> <end> $A")
    assert encode(two, "name") == encode(two, "<begin><end>name") == [BEGIN, END, *bare]
    both = with_post_processor("<begin> $A <end>")
    assert encode(both, "name") == encode(both, "<begin>name") == [BEGIN, *bare]
    after = with_post_processor("$A <end>", bos_token="<end>")
    assert encode(after, "name") == bare
    assert encode(after, "name<end>") == [*bare, END]  # the text's own


@FILES
def test_ids_without_an_embedding_are_refused_by_row_when_they_come(variant, tokenizer, make_trainer, tmp_path):
    """A token that was added to the tokenizer only does no harm until a text holds it."""
    tok = copy.deepcopy(tokenizer)
    tok.add_tokens(["<new>"])
    rows = [{"prompt": "old"}, {"prompt": "a <new> one"}]
    trainer = make_trainer(variant, tmp_path, tokenizer=tok, train_dataset=rows)
    before = weights(trainer).clone()
    with pytest.raises(ValueError, match=r"row 1, turn 1, agent 0.*<new>"):
        trainer.train()
    assert torch.equal(weights(trainer), before)
    trainer = make_trainer(variant, tmp_path / "fine", tokenizer=tok, train_dataset=rows[:1])
    trainer.train()
    assert len(trainer.samples) == 2


@pytest.mark.parametrize(("tokens", "company"), [(56, 0), (57, 0), (57, 1), (64, 0), (70, 1)])
def test_of_a_prompt_that_is_too_long_the_end_is_kept(variant, tokens, company, tokenizer, make_trainer, tmp_path):
    """64 positions, 8 new tokens: 56 fit. Others keep a begin token and the end; it is counted."""
    text = "~" * (tokens - 4) + "|||"
    assert len(tokenizer(text).input_ids) == tokens
    rows = [{"prompt": text}, {"prompt": "short"}][: 1 + company]
    args = {"max_new_tokens": 8, "reference_kl_enabled": True}
    trainer = make_trainer(variant, tmp_path, args, model="G", train_dataset=rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    whole = tokenizer(text).input_ids
    kept = whole if tokens <= 56 else [BEGIN, *whole[-55:]]
    own = [s for s in trainer.samples if s.row == 0]
    assert all(s.prompt_ids == kept and s.truncated == (tokens > 56) for s in own)
    assert all(1 <= len(s.completion_ids) <= 8 for s in trainer.samples)
    assert all(len(s.critic_ids) <= 64 for s in trainer.samples)
    if "maac" in variant:  # two such prompts are too long for the one critic
        assert {len(s.critic_ids) for s in own} == {64}
        assert all(s.critic_ids[0] == BEGIN for s in own)
    row = metrics(trainer)[-1]
    assert row["truncated_prompts"] == (2 if tokens > 56 else 0) and row["env_step"] == len(rows)
    warned = any("its end is kept" in str(w.message) for w in caught)
    assert warned == (tokens > 56 or "maac" in variant)


def test_without_a_begin_token_the_end_is_all_that_is_kept(bare, tokenizer):
    with pytest.warns(UserWarning, match="its end is kept"):
        assert common.keep_end([5, 6, 7, 8], 3, bare) == [6, 7, 8]
    with pytest.warns(UserWarning, match="its end is kept"):
        assert common.keep_end([BEGIN, 6, 7, 8], 3, tokenizer) == [BEGIN, 7, 8]
    assert common.keep_end([5, 6, 7], 3, bare) == [5, 6, 7]


@FILES
def test_more_new_tokens_than_positions_are_refused_at_construction(variant, make_trainer, tmp_path):
    for count in (64, 65):
        with pytest.raises(ValueError, match=f"max_new_tokens={count}"):
            make_trainer(variant, tmp_path, {"max_new_tokens": count}, model="G")
    make_trainer(variant, tmp_path, {"max_new_tokens": 63}, model="G").train()


# ------------------------------------------------------------------------------------------- seeds


def test_agents_and_rows_draw_independently(variant, make_trainer, tmp_path):
    """Two copies of one model with one prompt: no two agents, rows or epochs answer alike."""
    args = {"rollout_buffer_size": 99, "max_new_tokens": 3, "num_train_epochs": 2}
    args |= {"agent_learning_rate": 0.0}
    trainer = make_trainer(variant, tmp_path, args, train_dataset=[{"prompt": "same"}] * 10)
    trainer.train()
    assert len({tuple(s.completion_ids) for s in trainer.samples}) > 36


PLAY = """
import json, sys
sys.path[:0] = ["tests", "."]
from test_scoring_and_generation import play_all
print(json.dumps(play_all(json.loads(sys.argv[1]), sys.argv[2])))
"""


def play(variant, seed, source, place, callback=lambda own: {}):
    """All that a run is made of: value heads, draws, rows of metrics and final weights."""
    name, critic_type, *kind = variant.split("-")
    module = iac if name == "iac" else maac
    settings = {"use_separate_critic": kind == ["separate"]} if kind else {}
    if kind:
        settings |= {"critic_value_head_hidden_dim": 8, "value_head_hidden_dim": 8}
    settings |= {"critic_type": critic_type, "seed": seed, "max_new_tokens": 4}
    settings |= {"rollout_buffer_size": 4, "train_batch_size": 2, "num_train_epochs": 2}
    settings |= {"eval_interval": 4, "agent_learning_rate": 1e-3, "critic_learning_rate": 1e-2}
    rows = [{"prompt": f"name {n}"} for n in range(8)]
    samples = []

    def reward_func(*answers):
        return sum(len(own[0]) * (i + 1) for i, own in enumerate(answers)) / 10

    given = {} if kind == ["shared"] else {"critic_model": source}
    given |= {} if kind else {"model_config": {"critic_value_head_hidden_dim": 8}}
    trainer = module.Trainer(
        agent_model=source,
        reward_func=reward_func,
        args=module.Config(**settings),
        train_dataset=rows,
        eval_dataset=rows[:2],
        metrics_callback=lambda own: samples.extend(own) or callback(own),
        output_dir=str(place),
        **given,
    )
    heads = digest(critic.value_head for critic in trainer.critics)
    trainer.train()
    logged = []
    for row in metrics(trainer):
        logged.append({k: v for k, v in row.items() if not k.startswith("time/")})
    drawn = [[s.row, s.completion_ids, s.old_value] for s in samples]
    return [heads, drawn, logged, digest([*trainer.agents, *trainer.critics])]


def digest(modules):
    numbers = [p.detach().numpy().tobytes() for module in modules for p in module.parameters()]
    return hashlib.sha256(b"".join(numbers)).hexdigest()


def play_all(source, place):
    return [play(v, seed, source, f"{place}/{v}-{seed}") for v in VARIANTS for seed in (1, 2)]


def test_the_seed_decides_everything(folders, tmp_path):
    """Another process, with other hashes and another global random state, does the very same."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    own = play_all(folders["L"], tmp_path / "own")
    env = ENV | {"PYTHONHASHSEED": "7"}
    done = run_alone("-c", PLAY, json.dumps(folders["L"]), tmp_path / "other", env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == own
    for one, two in zip(own[::2], own[1::2], strict=True):
        assert all(one[k] != two[k] for k in range(4))  # heads, draws, metrics, weights
        assert [row for row, *_ in one[1]] == [row for row, *_ in two[1]]  # rows in their own order


@FILES
def test_the_global_random_state_does_not_matter(variant, folders, tmp_path):
    """Neither where a run starts, nor where a user's function draws from it or seeds it anew."""

    def seeding(samples):
        torch.manual_seed(len(samples)), random.seed(0), np.random.seed(0)
        return {}

    results = []
    for number, callback in enumerate((lambda own: {}, lambda own: {}, seeding)):
        torch.manual_seed(number), random.seed(number), np.random.seed(number)
        results.append(play(variant, 1, folders["L"], tmp_path / str(number), callback))
    assert results[0] == results[1] == results[2]


# ------------------------------------------------------------------------------------------- types


def test_bfloat16_is_arithmetic_around_float32_weights(variant, make_trainer, tmp_path):
    """Every model's layers compute in it, value heads do not; what is learned stays float32."""
    dtypes, values = {}, {}

    def note(dtype, name):
        def see(module, inputs, output):
            dtypes.setdefault((dtype, name), output.dtype)

        return see

    for dtype in ("float32", "bfloat16"):
        args = {"dtype": dtype, "reference_kl_enabled": True, "rollout_buffer_size": 10}
        trainer = make_trainer(variant, tmp_path / dtype, args)
        parts = {
            "agent": trainer.agents[0].lm_head,
            "reference": trainer.references[0].lm_head,
            "critic": trainer.critics[0].backbone.layers[0].mlp.up_proj,
            "head": trainer.critics[0].value_head,
        }
        for name, part in parts.items():
            part.register_forward_hook(note(dtype, name))
        changed(trainer.critics[0].value_head)
        before = weights(trainer).clone()
        trainer.train()
        models = [*trainer.agents, *trainer.critics]
        assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
        assert ((weights(trainer) - before) != 0).float().mean() > 0.5
        values[dtype] = trainer.samples[0].old_value
    low, full = torch.bfloat16, torch.float32
    assert {dtypes["float32", name] for name in parts} == {full}
    assert [dtypes["bfloat16", name] for name in parts] == [low, low, low, full]
    if "-v" in variant:  # the prompts are the same, and so, nearly, are their values
        assert values["float32"] != values["bfloat16"] == approx(values["float32"], abs=0.05)


def test_scores_are_float32_also_under_bfloat16(llama):
    """A log-probability summed over many tokens would be rounded to three digits."""
    scores = common.score(llama, [SHORT, LONG], ANSWERS, 1.0, "bfloat16")
    exact = common.score(llama, [SHORT, LONG], ANSWERS, 1.0, "float32")
    assert scores.dtype == torch.float32 and not torch.equal(scores, exact)
    assert torch.allclose(scores, exact, atol=0.1)
