"""The core of both files: by-hand numbers, gradients against a brute-force computation, batched against one by one."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

import common
import iac
import maac

TINY = str(ROOT / "tests" / "tiny_lm")
FILES = {"iac": iac, "maac": maac}
VARIANTS = ["iac-v", "iac-q", "iac-shared-v", "iac-shared-q", "maac-v", "maac-q"]
EOS = 1  # of tiny_lm, where the digits are tokens 20 to 29


def make_trainer(variant, args=None, **kwargs):
    name, *rest = variant.split("-")
    file, options = (
        FILES[name],
        {"critic_type": rest[-1], "max_new_tokens": 4, "rollout_buffer_size": 4, **(args or {})},
    )
    if "shared" in rest:
        options["use_separate_critic"] = False
    else:
        kwargs.setdefault("critic_model", TINY)
    config = (file.IACConfig if name == "iac" else file.MAACConfig)(**options)
    task = file.number_task(config.num_agents, seed=0)
    task["train_dataset"] = task["train_dataset"][:10]
    trainer = file.IACTrainer if name == "iac" else file.MAACTrainer
    return trainer(**{"agent_model": TINY, "args": config, **task, **kwargs})


def rig(trainer, answer=lambda i, prompt: [20 + (sum(prompt) + i) % 9] * (1 + sum(prompt) % 3) + [EOS]):
    """Replace generation by a fixed function of the agent and its prompt ids; pads after the end hold rubbish."""

    def rigged(i):
        def generate(input_ids, attention_mask, max_new_tokens, **_):
            prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
            answers = [answer(i, prompt)[:max_new_tokens] for prompt in prompts]
            width = max(map(len, answers))
            padded = torch.tensor([a + [7] * (width - len(a)) for a in answers])
            return torch.cat([input_ids, padded], 1)

        return generate

    for i, agent in enumerate(trainer.agents):
        agent.generate = rigged(i)


# ------------------------------------------------------------------------------------------------- by-hand numbers


@pytest.mark.parametrize("file", [iac, maac])
def test_targets_and_advantages_by_hand(file):
    assert file.td_targets([2.0], [0.5], 0.9) == ([2.0], [1.5])
    targets, errors = file.td_targets([1.0, 2.0, 4.0], [0.5, 0.25, 1.0], 0.5)
    assert targets == [1.125, 2.5, 4.0] and errors == [0.625, 2.25, 3.0]
    normal = file.normalize_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert torch.allclose(normal, torch.tensor([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(3.5))
    assert file.normalize_advantages(torch.tensor([5.0])).tolist() == [5.0]
    assert file.normalize_advantages(torch.full((4,), 2.0)).tolist() == [0.0] * 4
    assert file.explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])) == [0.75]
    assert file.explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])) == []


@pytest.mark.parametrize("file", [iac, maac])
def test_losses_by_hand(file):
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    assert file.policy_loss(logprobs, torch.tensor([2.0, -1.0])).tolist() == [6.0, -0.5]
    reference = torch.tensor([[-101.0, 0.0], [-0.25, math.nan]])
    mask = torch.tensor([[True, True], [True, False]])
    assert file.reference_kl(logprobs, reference, mask).tolist() == [98.0, -0.25]


def test_value_loss_by_hand():
    values, targets, old = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 0.0, 1.2]), torch.tensor([0.5, 0.5, 1.0])
    assert iac.value_loss(values, targets, old, None).tolist() == pytest.approx([1.0, 1.0, 0.04])
    # C_clip = 0.7, 0.7, 1.0: further from 2 (1.69 > 1), nearer to 0 (the plain 1 counts), unclipped
    assert iac.value_loss(values, targets, old, 0.2).tolist() == pytest.approx([1.69, 1.0, 0.04])
    assert maac.value_loss(values, targets).tolist() == pytest.approx([1.0, 1.0, 0.04])


@pytest.mark.parametrize("file", [iac, maac])
def test_read_rewards(file):
    assert file.read_rewards(2, 2, 3, "") == [[2.0] * 3] * 2
    assert file.read_rewards([1, 2, 3], 2, 3, "") == [[1.0, 2.0, 3.0]] * 2
    assert file.read_rewards((1, 2), 2, 3, "") == [[1.0] * 3, [2.0] * 3]
    assert file.read_rewards([1, 2], 2, 2, "") == [[1.0, 2.0]] * 2  # per joint answer first
    assert file.read_rewards(torch.tensor([[1, 2, 3], [4, 5, 6]]), 2, 3, "") == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    for bad in ([1], [1, 2, 3, 4, 5], None, [1, None, 3], [1, math.nan, 3], [[1], [2]], "abc", [math.inf] * 3, {}):
        with pytest.raises(ValueError, match="row 7"):
            file.read_rewards(bad, 2, 3, "row 7")


@pytest.mark.parametrize("file", [iac, maac])
def test_call_reward_by_signature(file):
    seen = {}

    def record(**values):
        seen.clear()
        seen.update(values)

    def call(function):
        file.call_reward(function, [["a1"], ["b1"]], ["pa", "pb"], {"n": 3})
        return dict(seen)

    a, b, prompts, items = ["a1"], ["b1"], ["pa", "pb"], [{"n": 3}]
    assert call(lambda x, y: record(x=x, y=y)) == {"x": a, "y": b}
    assert call(lambda x, y, batch_items: record(x=x, y=y, i=batch_items)) == {"x": a, "y": b, "i": items}
    assert call(lambda x, y, scale=2, batch_items=None: record(s=scale, i=batch_items)) == {"s": 2, "i": items}
    assert call(lambda prompts, x, y: record(p=prompts, x=x, y=y)) == {"p": prompts, "x": a, "y": b}
    assert call(lambda q, x, y: record(p=q, x=x, y=y)) == {"p": prompts, "x": a, "y": b}
    assert call(lambda everything: record(e=everything)) == {"e": [a, b]}
    assert call(lambda everything, weight=1: record(e=everything, w=weight)) == {"e": [a, b], "w": 1}
    assert call(lambda *c, **k: record(c=c, **k)) == {"c": (a, b), "prompts": prompts, "batch_items": items}
    assert call(lambda *c, batch_items: record(c=c, i=batch_items)) == {"c": (a, b), "i": items}
    assert call(lambda prompts, *c: record(p=prompts, c=c)) == {"p": prompts, "c": (a, b)}
    assert call(lambda x, y, *, prompts=None: record(p=prompts)) == {"p": prompts}


def test_critic_text():
    assert maac.critic_text(["p", "q"], []) == "[agent 1]\np\n[agent 2]\nq"
    assert maac.critic_text(["p", "q"], ["3", "4"]).endswith("q\n[answer 1]\n3\n[answer 2]\n4")


@pytest.mark.parametrize("file", [iac, maac])
def test_number_task(file):
    task = file.number_task(2, seed=3)
    item, reward = {"prompt": "sum to 7", "n": 7}, task["reward_func"]
    assert [f(item) for f in task["formatters"]] == ["agent 1 of 2: sum to 7 =", "agent 2 of 2: sum to 7 ="]
    assert reward(["3", "I say 4", "9", ""], ["4", "3!", "9", "7"], batch_items=[item]) == [1.0, 1.0, 0.0, 0.0]
    assert reward(["3"], ["3"], batch_items=[item]) == [0.8]
    assert task["external_transition"](prompt="sum to 7", agent_completions=["3", "x"]) == ["sum to 7, said 3 ?"] * 2


# ------------------------------------------------------------------------------- one update against a brute force


def last_hidden(model, ids):
    return model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]


def brute_force(trainer, variant, samples):
    """Losses of one agent's buffer written down once more, one unpadded sample at a time: (actor, critic) sums."""
    args, actor_loss, critic_loss = trainer.args, 0.0, 0.0
    advantages = torch.tensor([s.target - s.old_value for s in samples])
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    for s, advantage in zip(samples, advantages, strict=True):
        i, ids = s.agent_idx, s.prompt_ids + s.completion_ids
        critic = trainer.critics[i % len(trainer.critics)]
        logits = trainer.agents[i](input_ids=torch.tensor([ids])).logits[0] / args.temperature
        logprobs = logits.log_softmax(-1)
        score = sum(logprobs[len(s.prompt_ids) + k - 1, token] for k, token in enumerate(s.completion_ids))
        actor_loss = actor_loss - score * advantage / len(samples)
        if "maac" in variant:
            tokenizer, joint = trainer.tokenizers[0], [x for x in trainer.all_samples if x.row == s.row]
            text = "\n".join(f"[agent {x.agent_idx + 1}]\n{x.prompt}" for x in joint)
            if args.critic_type == "q":
                text += "".join(f"\n[answer {x.agent_idx + 1}]\n{x.completion}" for x in joint)
            ids = tokenizer(text).input_ids
        elif args.critic_type == "v":
            ids = s.prompt_ids
        value = critic.value_head(last_hidden(critic.backbone, ids))[0]
        loss = (value - s.target) ** 2
        if "shared" in variant:
            clipped = s.old_value + torch.clamp(value - s.old_value, -args.value_clip_range, args.value_clip_range)
            loss = torch.maximum(loss, (clipped - s.target) ** 2)
        critic_loss = critic_loss + args.value_loss_coef * loss / len(samples)
    return actor_loss, critic_loss


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_one_update_equal_brute_force(variant, micro):
    args = {"rollout_buffer_size": 10, "temperature": 0.7, "max_grad_norm": None, "micro_batch_size": micro}
    trainer = make_trainer(variant, args)
    for critic in trainer.critics:  # a head of zeros would hide errors in the backbone's gradient
        torch.nn.init.normal_(critic.value_head[-1].weight, std=0.05)
    rig(trainer)
    episodes = trainer.collect(trainer.train_dataset, 0, trainer.generators, 1)
    trainer.all_samples = [s for episode in episodes for s in episode]
    for s in trainer.all_samples:  # shifted, so that value clipping bites
        s.old_value += 0.5 * math.sin(s.row)
        s.advantage = s.target - s.old_value
    for i in range(2):
        samples = [s for s in trainer.all_samples if s.agent_idx == i]
        actor_loss, critic_loss = brute_force(trainer, variant, samples)
        optimizers = [trainer.agent_optimizers[i], *trainer.critic_optimizers[i % len(trainer.critics) :][:1]]
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        expected = torch.autograd.grad(actor_loss + critic_loss, parameters, allow_unused=True)
        got = []
        for optimizer in optimizers:  # keep the gradients, leave the weights
            own = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.step = lambda own=own, got=got: got.extend([p.grad.clone() for p in own])
        trainer.buffers[i] = samples
        trainer.update(i)
        assert len(got) == len(expected)
        assert max((g - e).abs().max() for g, e in zip(got, expected, strict=True)) < 1e-5
        assert sum(g.abs().sum() for g in got) > 1


# ------------------------------------------------------------------------------------ batched against one by one


@pytest.mark.parametrize("options", [{}, {"num_generations": 3}, {"num_turns": 2, "early_termination_threshold": 0.3}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_batched_collection_equals_one_item_at_a_time(variant, options, tmp_path):
    def run(rollout_batch_size, folder):
        options_now = {"rollout_batch_size": rollout_batch_size, "eval_interval": 3, "eval_num_samples": 2, **options}
        trainer = make_trainer(variant, options_now, output_dir=str(tmp_path / folder))
        rig(trainer)
        steps, update = [], trainer.update

        def spy(i):
            for s in trainer.buffers[i]:
                numbers = (s.reward, s.old_value, s.target, s.advantage, s.expected_return)
                steps.append((i, s.row, s.turn_idx, s.generation_idx, s.prompt, s.completion, s.critic_ids, numbers))
            steps.append(("update", i, trainer.env_step))
            update(i)

        trainer.update = spy
        trainer.train()
        return steps

    one, batched = run(1, "one"), run(None, "batched")
    assert len(one) == len(batched) > 20
    for a, b in zip(one, batched, strict=True):
        assert a[:-1] == b[:-1]
        assert a[-1] == pytest.approx(b[-1], abs=1e-5)
    rows = [(s[1], s[2], s[3]) for s in one if s[0] == 0]
    assert {row for row, _, _ in rows} == set(range(10)) and len(set(rows)) == len(rows)


def test_updates_come_by_turn_with_advantages_normalised_within_each():
    trainer = make_trainer("iac-v", {"num_turns": 2, "rollout_buffer_size": 20, "train_batch_size": 4})
    rig(trainer, lambda i, prompt: [20 + sum(prompt) % 5, EOS])
    for episode in trainer.collect(trainer.train_dataset, 0, trainer.generators, 1):
        for s in episode:
            trainer.buffers[s.agent_idx].append(s)
    steps = []
    trainer.actor_step = lambda i, batch, advantages: steps.append((batch, advantages))
    trainer.critic_step = lambda c, batch: None
    trainer.update(0)
    assert [[s.turn_idx for s in batch] for batch, _ in steps] == [[0] * 4, [0] * 4, [0] * 2, [1] * 4, [1] * 4, [1] * 2]
    for group in (steps[:3], steps[3:]):
        advantages = torch.cat([a for _, a in group])
        assert advantages.abs().max() > 0.9
        raw = torch.tensor([s.target - s.old_value for batch, _ in group for s in batch])
        assert torch.allclose(advantages, (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)
    assert [s.row for batch, _ in steps[:3] for s in batch] != list(range(10))  # shuffled


@pytest.mark.parametrize(("threshold", "turns"), [(0.49, 1), (0.5, 2), (None, 2)])
def test_an_episode_ends_when_the_mean_reward_exceeds_the_threshold(threshold, turns):
    args = {"num_turns": 2, "early_termination_threshold": threshold, "reference_kl_enabled": True}
    trainer = make_trainer("iac-v", args, reward_func=lambda a, b: [0.25, 0.75])
    episode = trainer.collect(trainer.train_dataset[:1], 0, trainer.generators, 1)[0]
    assert len(episode) == 2 * turns and [s.reward for s in episode[:2]] == [0.25, 0.75]


# --------------------------------------------------------------------------------------------- scoring, sampling


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).eval()


def test_padding_does_not_change_scores_or_values(gpt2):
    prompts, completions = [[5, 6, 7], list(range(10, 19))], [[20, 21, 1], [30]]
    together, mask, hidden = common.score(gpt2, prompts, completions, 1.0, "float32", True)
    values = common.last_hidden(gpt2.transformer, [prompts[0], prompts[1], prompts[0]], "float32")
    assert torch.equal(values[0], values[2]) and mask.tolist() == [[True] * 3, [True, False, False]]
    for row in range(2):
        alone, _, own_hidden = common.score(gpt2, [prompts[row]], [completions[row]], 1.0, "float32", True)
        K = len(completions[row])
        assert torch.allclose(together[row, :K], alone[0], atol=1e-5) and not together[row, K:].any()
        assert torch.allclose(hidden[row, : K + 1], own_hidden[0], atol=1e-5)
        assert torch.allclose(
            values[row], common.last_hidden(gpt2.transformer, [prompts[row]], "float32")[0], atol=1e-5
        )
        logits = gpt2(torch.tensor([prompts[row] + completions[row]])).logits[0].log_softmax(-1)
        direct = [logits[len(prompts[row]) + k - 1, token] for k, token in enumerate(completions[row])]
        assert torch.allclose(alone[0], torch.stack(direct), atol=1e-5)


def test_end_token_is_scored_also_where_it_is_the_pad_token(gpt2):
    prompt = [5, 1, 6]  # the end token inside a prompt is a token like any other
    gpt2.generate = lambda input_ids, **_: torch.cat([input_ids, torch.tensor([[7, 8, 1, 1, 1], [7, 8, 9, 10, 11]])], 1)
    sampling = (5, 1.0, 1.0, None, "float32")
    answers = common.generate(gpt2, [prompt, prompt], {1}, torch.Generator(), sampling)
    del gpt2.generate
    assert answers == [[7, 8, 1], [7, 8, 9, 10, 11]]
    logprobs, mask, _ = common.score(gpt2, [prompt, prompt], answers, 1.0, "float32")
    assert mask.sum(-1).tolist() == [3, 5]
    gradient = torch.autograd.grad(logprobs[0].sum(), gpt2.lm_head.weight)[0]
    alone = torch.autograd.grad(common.score(gpt2, [prompt], [[7, 8]], 1.0, "float32")[0].sum(), gpt2.lm_head.weight)[0]
    assert (gradient - alone)[1].abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_and_scoring_follow_the_same_distribution(gpt2, temperature):
    state = torch.get_rng_state()
    sampling, prompt = (1, temperature, 1.0, None, "float32"), [3, 4]
    generator = torch.Generator().manual_seed(1)
    gpt2.generation_config.top_k, gpt2.generation_config.repetition_penalty = 5, 3.0  # what a checkpoint may ship
    gpt2.generation_config.suppress_tokens = list(range(2, 150))
    drawn = [a[0] for a in common.generate(gpt2, [prompt] * 3000, {1}, generator, sampling)]
    assert gpt2.generation_config.top_k == 5 and gpt2.generation_config.repetition_penalty == 3.0
    assert torch.equal(state, torch.get_rng_state())
    probs = (gpt2(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=300) / 3000
    assert len(set(drawn)) > 250  # no hidden top-k
    assert (counts - probs).abs().sum() / 2 < 0.2  # 300 categories, 3000 draws: about 0.12 by chance
    scored = common.score(gpt2, [prompt], [[9]], temperature, "float32")[0]
    assert torch.allclose(scored[0, 0], probs[9].log(), atol=1e-5)
    few = common.generate(gpt2, [prompt] * 200, {1}, generator, (1, temperature, 1.0, 5, "float32"))
    assert len({a[0] for a in few}) <= 5


def test_saved_models_come_back(tmp_path):
    for variant in ("iac-q", "iac-shared-v", "maac-v"):
        folder = tmp_path / variant
        trainer = make_trainer(
            variant, {"agent_learning_rate": 1e-3, "critic_learning_rate": 1e-3}, output_dir=str(folder)
        )
        trainer.train()
        ids = [[5, 6, 7], [8, 9]]
        for i in range(2):
            home = folder / "model" / f"agent_{i}"
            model, info = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"] and AutoTokenizer.from_pretrained(home)
            assert all(
                torch.equal(p, q) for p, q in zip(model.parameters(), trainer.agents[i].parameters(), strict=True)
            )
        homes = [folder / "model" / f"{'agent' if 'shared' in variant else 'critic'}_{c}" for c in range(2)]
        for critic, home in zip(trainer.critics, homes, strict=False):
            again = type(critic)(str(home), AutoModel.from_pretrained(home).eval(), None, 0)
            assert critic.value_head[-1].weight.abs().sum() > 0
            assert torch.allclose(again(ids, "float32"), critic(ids, "float32"), atol=1e-6)


# --------------------------------------------------------------------------------------------------------- probes


def train_critic(variant, rows, reward, formatters, num_turns=1, **args):
    """A trainer whose actors stand still, after its critic has learned from the rows."""
    options = {"agent_learning_rate": 0.0, "critic_learning_rate": 3e-3, "value_loss_coef": 1.0, "num_turns": num_turns}
    options |= {"rollout_buffer_size": 20, "eval_interval": 0, "max_new_tokens": 1, **args}
    transition = lambda prompt, num_agents, **_: [prompt + " again"] * num_agents  # noqa: E731
    task = {"train_dataset": rows, "eval_dataset": None, "reward_func": reward, "formatters": formatters}
    trainer = make_trainer(variant, options, **task, external_transition=transition)
    for start in range(0, len(rows), 20):
        for episode in trainer.collect(rows[start : start + 20], start, trainer.generators, 1):
            for s in episode:
                trainer.buffers[s.agent_idx].append(s)
        last = list(trainer.buffers[0])
        for i in range(2):
            trainer.update(i)
    return last


def test_probe_own_and_other_prompt():
    """The return depends on what only agent 1 is shown: MAAC's critic sees it, the critic of IAC's agent 0 cannot."""
    rows = [{"prompt": "?", "secret": k % 2} for k in range(2000)]
    formatters = [lambda item: "what", lambda item: f"know {item['secret']}"]
    reward = lambda a, b, batch_items: float(batch_items[0]["secret"])  # noqa: E731
    for variant, right in (("maac-v", True), ("iac-v", False)):
        last = train_critic(variant, rows, reward, formatters)
        error = sum(abs(s.old_value - s.target) for s in last) / len(last)
        assert error < 0.1 if right else 0.4 < error < 0.6
    swapped = train_critic("iac-v", rows, reward, formatters[::-1])  # now agent 0 is shown it
    assert sum(abs(s.old_value - s.target) for s in swapped) / len(swapped) < 0.1


@pytest.mark.parametrize("variant", ["iac-v", "maac-v"])
def test_probe_discount_between_turns(variant):
    """Reward 1 in the second of two turns, discount 0.5: the first turn is worth 0.5."""
    turns = {"n": 0}

    def reward(a, b, prompts):
        turns["n"] += 1
        return float("again" in prompts[0])

    rows, formatters = [{"prompt": "go"}] * 1600, [lambda item: item["prompt"]] * 2
    last = train_critic(variant, rows, reward, formatters, 2, discount=0.5, rollout_buffer_size=40)
    for turn, value in ((0, 0.5), (1, 1.0)):
        values = [s.old_value for s in last if s.turn_idx == turn]
        assert sum(values) / len(values) == pytest.approx(value, abs=0.1)


# ---------------------------------------------------------------------------------------------------------- twins


def test_twins_differ_only_where_the_algorithms_do():
    texts = [(ROOT / f"{name}.py").read_text().splitlines() for name in FILES]
    import difflib

    changed = [line for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[0] in "+-"][2:]
    assert len(changed) <= 0.15 * sum(map(len, texts))
    banners = [[line.lstrip("# -") for line in text if line.startswith("# ---")] for text in texts]
    assert banners[0] == banners[1] and len(banners[0]) == 7


@pytest.mark.parametrize("file", [iac, maac])
def test_every_config_field_is_read(file):
    import dataclasses
    import re

    source = Path(file.__file__).read_text()
    for field in dataclasses.fields(file.Args):
        if field.name == "wandb_entity" or field.name.endswith("_devices"):
            reads = re.findall(rf'args\.{field.name}|"{field.name}": [NC]', source)
        else:
            reads = re.findall(rf"(?:args|self)\.{field.name}\b|\"{field.name}\", \"|\"{field.name}\"\)", source)
        assert reads, f"{field.name} is never read"
