"""The built-in task's trainers: order of updates, early termination, sampling, saved models."""

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


def rig(
    trainer, answer=lambda i, prompt: [20 + (sum(prompt) + i) % 9] * (1 + sum(prompt) % 3) + [EOS]
):
    """Replace generation by a fixed function of the agent and its prompt ids; pads after the end hold rubbish."""

    def rigged(i):
        def generate(input_ids, attention_mask, max_new_tokens, **_):
            prompts = [
                row[mask.bool()].tolist()
                for row, mask in zip(input_ids, attention_mask, strict=True)
            ]
            answers = [answer(i, prompt)[:max_new_tokens] for prompt in prompts]
            width = max(map(len, answers))
            padded = torch.tensor([a + [7] * (width - len(a)) for a in answers])
            return torch.cat([input_ids, padded], 1)

        return generate

    for i, agent in enumerate(trainer.agents):
        agent.generate = rigged(i)


def test_updates_come_by_turn_with_advantages_normalised_within_each():
    trainer = make_trainer(
        "iac-v", {"num_turns": 2, "rollout_buffer_size": 20, "train_batch_size": 4}
    )
    rig(trainer, lambda i, prompt: [20 + sum(prompt) % 5, EOS])
    for episode in trainer.collect(trainer.train_dataset, 0, trainer.generators, 1):
        for s in episode:
            trainer.buffers[s.agent_idx].append(s)
    steps = []
    trainer.actor_step = lambda i, batch, advantages: steps.append((batch, advantages))
    trainer.critic_step = lambda c, batch: None
    trainer.update(0)
    assert [[s.turn_idx for s in batch] for batch, _ in steps] == [
        [0] * 4,
        [0] * 4,
        [0] * 2,
        [1] * 4,
        [1] * 4,
        [1] * 2,
    ]
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
    config = GPT2Config(
        vocab_size=300,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_and_scoring_follow_the_same_distribution(gpt2, temperature):
    state = torch.get_rng_state()
    sampling, prompt = (1, temperature, 1.0, None, "float32"), [3, 4]
    generator = torch.Generator().manual_seed(1)
    gpt2.generation_config.top_k, gpt2.generation_config.repetition_penalty = (
        5,
        3.0,
    )  # what a checkpoint may ship
    gpt2.generation_config.suppress_tokens = list(range(2, 150))
    drawn = [a[0] for a in common.generate(gpt2, [prompt] * 3000, {1}, generator, sampling)]
    assert gpt2.generation_config.top_k == 5 and gpt2.generation_config.repetition_penalty == 3.0
    assert torch.equal(state, torch.get_rng_state())
    probs = (gpt2(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=300) / 3000
    assert len(set(drawn)) > 250  # no hidden top-k
    assert (
        counts - probs
    ).abs().sum() / 2 < 0.2  # 300 categories, 3000 draws: about 0.12 by chance
    scored = common.score(gpt2, [prompt], [[9]], temperature, "float32")[0]
    assert torch.allclose(scored[0, 0], probs[9].log(), atol=1e-5)
    few = common.generate(gpt2, [prompt] * 200, {1}, generator, (1, temperature, 1.0, 5, "float32"))
    assert len({a[0] for a in few}) <= 5


def test_saved_models_come_back(tmp_path):
    for variant in ("iac-q", "iac-shared-v", "maac-v"):
        folder = tmp_path / variant
        trainer = make_trainer(
            variant,
            {"agent_learning_rate": 1e-3, "critic_learning_rate": 1e-3},
            output_dir=str(folder),
        )
        trainer.train()
        ids = [[5, 6, 7], [8, 9]]
        for i in range(2):
            home = folder / "model" / f"agent_{i}"
            model, info = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
            assert (
                not info["missing_keys"]
                and not info["unexpected_keys"]
                and AutoTokenizer.from_pretrained(home)
            )
            assert all(
                torch.equal(p, q)
                for p, q in zip(model.parameters(), trainer.agents[i].parameters(), strict=True)
            )
        homes = [
            folder / "model" / f"{'agent' if 'shared' in variant else 'critic'}_{c}"
            for c in range(2)
        ]
        for critic, home in zip(trainer.critics, homes, strict=False):
            again = type(critic)(str(home), AutoModel.from_pretrained(home).eval(), None, 0)
            assert critic.value_head[-1].weight.abs().sum() > 0
            assert torch.allclose(again(ids, "float32"), critic(ids, "float32"), atol=1e-6)


# --------------------------------------------------------------------------------------------------------- probes


def train_critic(variant, rows, reward, formatters, num_turns=1, **args):
    """A trainer whose actors stand still, after its critic has learned from the rows."""
    options = {
        "agent_learning_rate": 0.0,
        "critic_learning_rate": 3e-3,
        "value_loss_coef": 1.0,
        "num_turns": num_turns,
    }
    options |= {"rollout_buffer_size": 20, "eval_interval": 0, "max_new_tokens": 1, **args}
    transition = lambda prompt, num_agents, **_: [prompt + " again"] * num_agents  # noqa: E731
    task = {
        "train_dataset": rows,
        "eval_dataset": None,
        "reward_func": reward,
        "formatters": formatters,
    }
    trainer = make_trainer(variant, options, **task, external_transition=transition)
    for start in range(0, len(rows), 20):
        for episode in trainer.collect(rows[start : start + 20], start, trainer.generators, 1):
            for s in episode:
                trainer.buffers[s.agent_idx].append(s)
        last = list(trainer.buffers[0])
        for i in range(2):
            trainer.update(i)
    return last


# ---------------------------------------------------------------------------------------------------------- twins
