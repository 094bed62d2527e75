"""Each patch in recipes/ applies to the files as they are, runs, and has the effect it is for."""

import copy
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

import common
import iac
import maac
from conftest import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "tests" / "recipes").glob("*.patch"))


def test_the_readme_names_each():
    named = re.findall(r"tests/recipes/(\w+)\.patch", (ROOT / "README.md").read_text())
    assert sorted(set(named)) == RECIPES and len(RECIPES) == 6


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """patched(recipe, name): the module of that name with the patch applied, made as users would."""

    def make(recipe, name):
        for file in ("iac.py", "maac.py", "common.py"):
            shutil.copy(ROOT / file, tmp_path)
        patch = ROOT / "tests" / "recipes" / f"{recipe}.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
        module = types.ModuleType(f"{name}_{recipe}")
        module.__file__ = str(ROOT / f"{name}.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        text = (tmp_path / f"{name}.py").read_text()
        exec(compile(text, f"{name}.py, {recipe}", "exec"), module.__dict__)
        return module

    return make


def build(module, tmp_path, folders, turns=1, **settings):
    """A trainer of two L's on eight rows, one update of eight joint answers in an epoch."""
    base = {"num_turns": turns, "max_new_tokens": 4, "rollout_buffer_size": 8 * turns}
    base |= {"eval_interval": 0, "agent_learning_rate": 1e-2, "critic_learning_rate": 1e-2}
    return module.Trainer(
        agent_model=folders["L"],
        critic_model=folders["L"],
        reward_func=lambda *completions: [sum(map(len, zip(*completions, strict=True))) % 3 / 3],
        external_transition=lambda prompt, num_agents, **_: [f"{prompt} more"] * num_agents,
        train_dataset=[{"prompt": f"Row {n}", "n": n} for n in range(8)],
        args=module.Config(**base | settings),
        output_dir=str(tmp_path / "run"),
    )


def vary_rewards(trainer):
    """Rewards that differ between rows."""
    trainer.reward_func = lambda *texts, batch_items: float(batch_items[0]["n"] % 3)
    return trainer


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_ppo_begins_with_ratios_of_1_and_clips_later(name, patched, tmp_path, folders):
    module = patched("ppo", name)
    trainer = vary_rewards(build(module, tmp_path, folders, update_epochs=3))
    ratios, loss = [], module.policy_loss

    def spy(logprobs, old, advantages, clip):
        ratios.append((logprobs.detach() - old)[~old.isnan()].exp())
        return loss(logprobs, old, advantages, clip)

    module.policy_loss = spy
    trainer.train()
    assert len(ratios) == 6  # two agents, three epochs
    for own in (ratios[:3], ratios[3:]):
        assert torch.allclose(own[0], torch.ones_like(own[0]), atol=1e-5)
        assert (own[1] - 1).abs().max() > 0.2  # beyond the clip range


def test_ppos_loss_by_hand(patched):
    policy_loss = patched("ppo", "iac").policy_loss
    nan = torch.nan
    logprobs = torch.tensor([[0.5, 0.0], [-1.0, 0.1]], requires_grad=True)
    old = torch.tensor([[0.0, nan], [0.0, 0.0]])
    losses = policy_loss(logprobs, old, torch.tensor([2.0, -1.0]), 0.2)
    first = -2 * 1.2  # the ratio e^0.5 is clipped: the gain ends at 1.2
    second = 0.8 + torch.tensor(0.1).exp().item()  # e^-1 is clipped at 0.8, e^0.1 is not
    assert losses.tolist() == pytest.approx([first, second])
    losses.sum().backward()
    assert logprobs.grad[0].tolist() == [0, 0] and logprobs.grad[1, 0] == 0
    assert logprobs.grad[1, 1].item() == pytest.approx(torch.tensor(0.1).exp().item())


def test_gae_lies_between_the_td_error_and_the_return(patched):
    gae_targets = patched("gae", "iac").gae_targets
    rewards, values = [1.0, 2.0, 4.0], [0.5, 0.25, 1.0]
    _, td_errors = iac.td_targets(rewards, values, 0.9)
    assert gae_targets(rewards, values, 0.9, 0.0)[1] == pytest.approx(td_errors)
    returns = [1 + 0.9 * 2 + 0.81 * 4, 2 + 0.9 * 4, 4]
    targets, advantages = gae_targets(rewards, values, 0.9, 1.0)
    assert targets == pytest.approx(returns)
    assert advantages == pytest.approx([y - v for y, v in zip(returns, values, strict=True)])
    last = td_errors[2]
    middle = td_errors[1] + 0.9 * 0.5 * last
    advantages = gae_targets(rewards, values, 0.9, 0.5)[1]
    assert advantages == pytest.approx([td_errors[0] + 0.45 * middle, middle, last])


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_gae_is_what_a_run_uses(name, patched, tmp_path, folders):
    trainer = build(patched("gae", name), tmp_path, folders, turns=2, gae_lambda=1.0)
    samples = []
    trainer.metrics_callback = lambda own: samples.extend(own) or {}
    vary_rewards(trainer).train()
    first = [s for s in samples if s.turn_idx == 0]
    assert len(first) == 16
    for s in first:
        assert s.target == pytest.approx(s.expected_return)  # discount 1, lambda 1


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_the_entropy_bonus_raises_the_entropy(name, patched, tmp_path, folders):
    ends = []
    for coefficient in (0.0, 1.0):
        module = patched("entropy_bonus", name)
        folder = tmp_path / str(coefficient)
        folder.mkdir()
        trainer = build(module, folder, folders, entropy_coef=coefficient, num_train_epochs=2)
        vary_rewards(trainer).train()
        prompts = [trainer.tokenizers[0]("Row 1").input_ids]
        with torch.no_grad():
            logits, _, _ = common.completion_logits(trainer.agents[0], prompts, [[5, 6, 7]], 1.0, "float32")
        scores = logits.log_softmax(-1)
        ends.append(-(scores.exp() * scores).sum(-1).mean().item())
    assert ends[1] > ends[0]


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_the_learning_rate_falls_with_the_updates(name, patched, tmp_path, folders):
    module = patched("learning_rate_schedule", name)
    trainer = build(module, tmp_path, folders, schedule_updates=4, num_train_epochs=5)
    rates = []
    optimizer = trainer.agent_optimizers[1]
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    vary_rewards(trainer).train()
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2, 0])


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_the_critic_reads_the_hint(name, patched, tmp_path, folders):
    trainer = build(patched("critic_reads_more", name), tmp_path, folders)
    samples = []
    trainer.metrics_callback = lambda own: samples.extend(own) or {}
    vary_rewards(trainer).train()
    for s in samples:
        read = trainer.tokenizers[0].decode(s.critic_ids, skip_special_tokens=True)
        assert read.startswith(f"n is {s.item['n']}\n") and s.prompt in read


def test_the_counterfactual_baseline_against_brute_force(patched, tmp_path, folders):
    module = patched("counterfactual_baseline", "maac")
    trainer = build(module, tmp_path, folders, critic_type="q", counterfactual_answers=3)
    with torch.no_grad():
        trainer.critics[0].value_head[-1].weight.normal_(0, 1)
    critic = copy.deepcopy(trainer.critics[0])
    drawn, generate, samples = [], common.generate, []

    def spy(*arguments):
        drawn.append(generate(*arguments))
        return drawn[-1]

    trainer.metrics_callback = lambda own: samples.extend(own) or {}
    module.common = types.SimpleNamespace(**vars(common) | {"generate": spy})
    vary_rewards(trainer).train()
    assert len(drawn) == 2 and len(drawn[0]) == 8 * 3
    tok = trainer.tokenizers[0]
    for s in samples:
        joint = sorted((x for x in samples if x.row == s.row), key=lambda x: x.agent_idx)
        values = []
        for ids in drawn[s.agent_idx][3 * s.row : 3 * s.row + 3]:
            answers = [x.completion for x in joint]
            answers[s.agent_idx] = tok.decode(ids, skip_special_tokens=True)
            text = maac.critic_text([x.prompt for x in joint], answers)
            with torch.no_grad():
                values.append(critic([tok(text).input_ids], "float32").item())
        assert s.baseline == pytest.approx(sum(values) / 3, abs=1e-5)
        assert s.advantage == pytest.approx(s.old_value - s.baseline)
    assert len({round(s.baseline, 4) for s in samples}) > 8
