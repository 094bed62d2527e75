"""Tasks with known answers, each for one part of the algorithms, on tests/tiny_lm.

Where the critic is what is tested the actors stand still, or hardly move where they share its backbone.
"""

import statistics

import pytest

approx = pytest.approx
TURN = {"external_transition": lambda prompt, num_agents, **_: [f"{prompt} again"] * num_agents}


@pytest.fixture
def learn(make_trainer, tmp_path):
    """learn(variant, rows, args, ...) -> the samples of the last 60 rows, after training on all."""

    def train(variant, rows, args=None, **given):
        settings = {
            "agent_learning_rate": 0.0,
            "critic_learning_rate": 2e-3,
            "value_loss_coef": 1.0,
        }
        settings |= {"max_new_tokens": 1, "rollout_buffer_size": 20, "max_grad_norm": None}
        if (
            "shared" in variant
        ):  # one learning rate for both: the actor's loss is made to weigh little
            settings |= {
                "agent_learning_rate": 1.5e-3,
                "value_loss_coef": 100.0,
                "value_clip_range": None,
            }
        trainer = make_trainer(
            variant, tmp_path, settings | (args or {}), "tiny_lm", train_dataset=rows, **given
        )
        trainer.train()
        return [s for s in trainer.samples if s.row >= len(rows) - 60]

    return train


def explained(samples, agent):
    """The share of the targets' variance that agent's critic foresaw."""
    own = [s for s in samples if s.agent_idx == agent]
    errors = [s.target - s.old_value for s in own]
    return 1 - statistics.pvariance(errors) / statistics.pvariance([s.target for s in own])


def test_value_only(variant, learn):
    """A constant reward: the critic comes to say it."""
    samples = learn(variant, [{"prompt": "go"}] * 600, reward_func=lambda a, b: 0.7)
    assert statistics.fmean(abs(s.old_value - 0.7) for s in samples) < 0.15


def test_own_prompt(variant, learn):
    """Agent 0 is shown what the reward will be: its critic foresees it."""
    rows = [{"n": n % 5} for n in range(800)]
    formatters = [lambda item: f"it is {item['n']}", lambda item: "go"]
    reward = lambda a, b, batch_items: batch_items[0]["n"] / 2  # noqa: E731
    samples = learn(variant, rows, reward_func=reward, formatters=formatters)
    assert explained(samples, 0) > 0.6


def test_other_agents_prompt(variant, learn):
    """Agent 1 alone is shown what the reward will be. MAAC's critic knows it for both, IAC's only for agent 1."""
    rows = [{"own": 3 * n % 8, "other": n // 8 * 5 % 4} for n in range(1000)]
    formatters = [lambda item: f"see {item['own']}", lambda item: f"see {item['other']}"]
    reward = lambda a, b, batch_items: float(batch_items[0]["other"])  # noqa: E731
    samples = learn(variant, rows, reward_func=reward, formatters=formatters)
    assert explained(samples, 1) > 0.7
    assert explained(samples, 0) > 0.7 if "maac" in variant else -0.3 < explained(samples, 0) < 0.2


def test_discount(variant, learn):
    """Reward 1 in the second of two turns, discount 0.5: the first turn is worth 0.5, the second 1."""
    args = {"num_turns": 2, "discount": 0.5, "rollout_buffer_size": 40}
    reward = lambda a, b, prompts: float("again" in prompts[0])  # noqa: E731
    samples = learn(variant, [{"prompt": "go"}] * 500, args, reward_func=reward, **TURN)
    for turn, value in enumerate((0.5, 1.0)):
        assert statistics.fmean(s.old_value for s in samples if s.turn_idx == turn) == approx(
            value, abs=0.1
        )
        assert statistics.fmean(s.target for s in samples if s.turn_idx == turn) == approx(
            value, abs=0.1
        )


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
def test_actors_learn_what_pays_a_turn_later(variant, learn):
    """First answers from 0 to 4 are paid for in the second turn, whose prompts show them: values must carry it back."""

    def transition(prompt, agent_completions, num_agents, **_):
        return [f"{prompt}, said {' '.join(agent_completions)}"] * num_agents

    def reward(a, b, prompts):
        said = prompts[0].partition("said ")[2].split()
        return sum(answer in "01234" for answer in said) / 2

    rows = [{"prompt": "sum to 9"}] * 800
    formatters = [lambda x, i=i: f"agent {i} of 2: {x['prompt']} =" for i in (1, 2)]
    args = {
        "num_turns": 2,
        "rollout_buffer_size": 64,
        "agent_learning_rate": 1e-3,
        "critic_learning_rate": 3e-3,
    }
    samples = learn(
        variant,
        rows,
        args,
        reward_func=reward,
        external_transition=transition,
        formatters=formatters,
    )
    assert statistics.fmean(s.reward for s in samples if s.turn_idx == 1) > 0.85  # untrained: 0.5
