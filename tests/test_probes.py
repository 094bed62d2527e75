"""Tasks with known answers, each for one part of the algorithms, on tests/tiny_lm.

Where the critic is what is tested the actors stand still, or hardly move where they share its
backbone.
"""

import statistics

import pytest

approx = pytest.approx


@pytest.fixture
def learn(make_trainer, tmp_path):
    """learn(variant, rows, args, ...) -> the samples of the last 60 rows, after training on all."""

    def train(variant, rows, args=None, **given):
        settings = {
            "agent_learning_rate": 0.0,
            "critic_learning_rate": 2e-3,
            "value_loss_coef": 1.0,
            "max_new_tokens": 1,
            "rollout_buffer_size": 20,
            "max_grad_norm": None,
        }
        if "shared" in variant:  # one learning rate for both: the actor's loss is to weigh little
            settings |= {"agent_learning_rate": 1.5e-3, "value_loss_coef": 100.0}
            settings |= {"value_clip_range": None}
        settings |= args or {}
        trainer = make_trainer(variant, tmp_path, settings, "tiny_lm", train_dataset=rows, **given)
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
    samples = learn(variant, [{"prompt": "go"}] * 400, reward_func=lambda a, b: 0.7)
    assert statistics.fmean(abs(s.old_value - 0.7) for s in samples) < 0.15


def test_own_prompt_and_the_other_agents(variant, learn):
    """Agent 1 alone is shown the reward in advance: MAAC's critic knows it, of IAC's agent 1's."""
    rows = [{"own": 3 * n % 8, "other": n // 8 * 5 % 4} for n in range(1000)]
    formatters = [lambda item: f"see {item['own']}", lambda item: f"see {item['other']}"]
    reward = lambda a, b, batch_items: float(batch_items[0]["other"])  # noqa: E731
    samples = learn(variant, rows, reward_func=reward, formatters=formatters)
    assert explained(samples, 1) > 0.7
    assert explained(samples, 0) > 0.7 if "maac" in variant else -0.3 < explained(samples, 0) < 0.2


def test_own_answer(learn):
    """The reward is told by the answers: Q reads them."""
    reward = lambda a, b: [[float(text in "0123456789") for text in own] for own in (a, b)]  # noqa: E731
    formatter = lambda item: "agent 1 of 2: sum to 9 ="  # noqa: E731
    given = {"reward_func": reward, "formatters": formatter}
    samples = learn("iac-q-separate", [{}] * 600, {"temperature": 3.0}, **given)
    assert min(explained(samples, 0), explained(samples, 1)) > 0.6


def test_discount(variant, learn):
    """Reward 1 in the second of two turns, discount 0.5: the first is worth 0.5, the second 1."""
    args = {"num_turns": 2, "discount": 0.5, "rollout_buffer_size": 40}
    again = lambda prompt, num_agents, **_: [f"{prompt} again"] * num_agents  # noqa: E731
    given = {"reward_func": lambda a, b, turn: float(turn == 2), "external_transition": again}
    samples = learn(variant, [{"prompt": "go"}] * 500, args, **given)
    for turn, value in enumerate((0.5, 1.0)):
        own = [s for s in samples if s.turn_idx == turn]
        assert statistics.fmean(s.old_value for s in own) == approx(value, abs=0.1)
        assert statistics.fmean(s.target for s in own) == approx(value, abs=0.1)


@pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
def test_actors_learn_what_pays_a_turn_later(variant, learn):
    """First answers from 0 to 4 are paid for in the second turn: values must carry it back."""

    def transition(prompt, agent_completions, num_agents, **_):
        return [f"{prompt}, said {' '.join(agent_completions)}"] * num_agents

    def reward(a, b, prompts):
        said = prompts[0].partition("said ")[2].split()
        return sum(text in "01234" for text in said) / 2

    formatters = [lambda x, i=i: f"agent {i} of 2: {x['prompt']} =" for i in (1, 2)]
    args = {"num_turns": 2, "rollout_buffer_size": 64}
    args |= {"agent_learning_rate": 1e-3, "critic_learning_rate": 3e-3}
    given = {"external_transition": transition, "formatters": formatters}
    rows = [{"prompt": "sum to 9"}] * 800
    samples = learn(variant, rows, args, reward_func=reward, **given)
    assert statistics.fmean(s.reward for s in samples if s.turn_idx == 1) > 0.85  # untrained: 0.5
