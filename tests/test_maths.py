"""The formulas against numbers worked out by hand; the forms of rewards and reward functions."""

import functools
import math

import numpy as np
import pytest
import torch

import iac
import maac

both = pytest.mark.parametrize("file", [iac, maac], ids=["iac", "maac"])
approx = pytest.approx
tensor = torch.tensor

# ---------------------------------------------------------------------- targets, advantages, losses


@both
@pytest.mark.parametrize(
    ("rewards", "values", "discount", "targets", "errors"),
    [
        ([2.0], [0.5], 0.9, [2.0], [1.5]),  # one turn: nothing follows
        ([1.0, 2.0], [0.5, 0.25], 1.0, [1.25, 2.0], [0.75, 1.75]),
        ([1.0, 2.0, 4.0], [0.5, 0.25, 1.0], 0.5, [1.125, 2.5, 4.0], [0.625, 2.25, 3.0]),
        (
            [1.0, 2.0],
            [0.5, 0.25],
            0.5,
            [1.125, 2.0],
            [0.625, 1.75],
        ),  # the same, ended early: a shorter list
        ([1.0, 2.0], [0.5, 0.25], 0.0, [1.0, 2.0], [0.5, 1.75]),
    ],
)
def test_td_targets(file, rewards, values, discount, targets, errors):
    assert file.td_targets(rewards, values, discount) == (targets, errors)


def test_targets_of_an_episode_that_ends_early(variant, make_trainer, tmp_path):
    """Rewards 1/2, 1/4, 1/8 in three turns; in even rows 1/2 and 1, which ends them.

    The critic says 1/4 throughout.
    """

    def reward(prompts, a, b, batch_items):
        turn = int(prompts[0][-1]) if "turn" in prompts[0] else 1
        return 1.0 if turn == 2 and batch_items[0]["n"] % 2 == 0 else 0.5**turn

    def transition(prompt_history_per_agent, num_agents, **_):
        return [f"turn {len(prompt_history_per_agent[0]) + 1}"] * num_agents

    args = {
        "num_turns": 3,
        "discount": 0.5,
        "early_termination_threshold": 0.5,
        "rollout_buffer_size": 99,
    }
    trainer = make_trainer(variant, tmp_path, args, reward_func=reward, external_transition=transition)
    for critic in trainer.critics:
        critic.value_head[-1].bias.data.fill_(0.25)
    trainer.train()
    episodes = [[s for s in trainer.samples if (s.row, s.agent_idx) == (row, i)] for row in range(10) for i in (0, 1)]
    for own in episodes:
        odd = own[0].row % 2
        assert [s.target for s in own] == approx([0.625, 0.375, 0.125] if odd else [0.625, 1.0])
        assert [s.advantage for s in own] == approx([0.375, 0.125, -0.125] if odd else [0.375, 0.75])
        assert [s.expected_return for s in own] == approx([0.875, 0.375, 0.125] if odd else [1.5, 1.0])


@both
@pytest.mark.parametrize(
    ("given", "normal"),
    [
        (
            [1.0, 2.0, 3.0, 6.0],
            [-1.0690450, -0.5345225, 0.0, 1.6035675],
        ),  # mean 3, population variance 3.5
        ([5.0], [5.0]),
        ([-3.0, -3.0, -3.0, -3.0], [0.0, 0.0, 0.0, 0.0]),
        ([0.0, 1e-7], [-0.05, 0.05]),  # a deviation of 5e-8 counts as 1e-6
    ],
)
def test_normalize_advantages(file, given, normal):
    assert file.normalize_advantages(tensor(given)).tolist() == approx(normal, abs=1e-6)


@both
def test_policy_loss(file):
    logprobs = tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    losses = file.policy_loss(logprobs, tensor([2.0, -1.0]))
    losses.sum().backward()
    assert losses.tolist() == [6.0, -0.5]
    assert logprobs.grad.tolist() == [
        [-2.0, -2.0],
        [1.0, 1.0],
    ]  # minus the advantage, at every token


@pytest.mark.parametrize(
    ("value", "target", "old_value", "plain", "clipped", "gradient"),
    [
        (
            1.0,
            2.0,
            0.5,
            1.0,
            1.69,
            0.0,
        ),  # C_clip 0.7 is further from 2: it counts, and no gradient passes the clip
        (0.0, -1.0, 0.5, 1.0, 1.69, 0.0),  # C_clip 0.3, the same from above
        (1.0, 0.0, 0.5, 1.0, 1.0, 2.0),  # C_clip 0.7 is nearer to 0: the plain error counts
        (1.0, 1.5, 1.125, 0.25, 0.25, -1.0),  # within 0.2 of C_old: C_clip = C
    ],
)
def test_value_loss(value, target, old_value, plain, clipped, gradient):
    value, target, old_value = (
        tensor([value], requires_grad=True),
        tensor([target]),
        tensor([old_value]),
    )
    assert iac.value_loss(value, target, old_value, None).tolist() == approx([plain])
    assert maac.value_loss(value, target).tolist() == approx([plain])
    loss = iac.value_loss(value, target, old_value, 0.2)
    assert loss.tolist() == approx([clipped])
    assert torch.autograd.grad(loss.sum(), value)[0].tolist() == approx([gradient])


@both
def test_reference_kl(file):
    """The plain log-ratio: +100 stays 100, -0.25 stays negative; padding is 0 on both sides."""
    logprobs = tensor([[-1.0, -2.0], [-0.5, 0.0]])
    reference = tensor([[-101.0, -2.0], [-0.25, 0.0]])
    assert file.reference_kl(logprobs, reference).tolist() == [100.0, -0.25]


@both
@pytest.mark.parametrize(
    ("values", "targets", "explained"),
    [
        ([1.0, 2.0], [1.0, 3.0], 0.75),  # residuals 0 and 1: 1 - 0.25 / 1
        ([0.0, 2.0], [1.0, 3.0], 1.0),  # a constant error explains all of the variance
        ([3.0, 1.0], [1.0, 3.0], -3.0),
        ([1.0, 2.0], [3.0, 3.0], math.nan),  # nothing to explain
    ],
)
def test_explained_variance(file, values, targets, explained):
    found = file.explained_variance(tensor(values), tensor(targets))
    assert found == approx(explained, nan_ok=True)


@both
def test_equal_advantages_become_exactly_zero(file):
    """Whatever their number and value: a rest of rounding would be scaled up to a step."""
    for count in (2, 3, 7, 33):
        for value in (0.1, -2.7, 1e4 / 3):
            assert not file.normalize_advantages(tensor([value] * count)).any()


# ------------------------------------------------------------------------------------------ rewards


@both
@pytest.mark.parametrize(
    ("raw", "N", "G", "rewards"),
    [
        (2, 2, 3, [[2, 2, 2], [2, 2, 2]]),  # one number
        (np.float32(0.5), 2, 1, [[0.5], [0.5]]),
        (torch.tensor(0.5, requires_grad=True), 2, 1, [[0.5], [0.5]]),
        ([4], 2, 1, [[4], [4]]),
        ([1, 2, 3], 2, 3, [[1, 2, 3], [1, 2, 3]]),  # one per joint answer
        ((1, 2), 2, 3, [[1, 1, 1], [2, 2, 2]]),  # one per agent
        ([1, 2], 2, 1, [[1], [2]]),
        ([1, 2], 2, 2, [[1, 2], [1, 2]]),  # either: one per joint answer
        ([1, 2, 3], 1, 3, [[1, 2, 3]]),
        ([4], 1, 3, [[4, 4, 4]]),  # one per agent, of which there is one
        (np.array([1, 2, 3]), 2, 3, [[1, 2, 3], [1, 2, 3]]),
        (torch.tensor([1, 2]), 2, 3, [[1, 1, 1], [2, 2, 2]]),
        ([torch.tensor(1.0), np.float64(2)], 2, 3, [[1, 1, 1], [2, 2, 2]]),
        (((1, 2, 3), [4, 5, 6]), 2, 3, [[1, 2, 3], [4, 5, 6]]),  # one per agent and joint answer
        (np.array([[1, 2], [4, 5]]), 2, 2, [[1, 2], [4, 5]]),
        (torch.tensor([[1.0], [4.0]], dtype=torch.bfloat16), 2, 1, [[1], [4]]),
    ],
)
def test_read_rewards(file, raw, N, G, rewards):
    assert file.read_rewards(raw, N, G, "here") == rewards


@both
@pytest.mark.parametrize(
    "raw",
    [
        [1],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [],
        None,
        [1, None, 3],
        [1, math.nan, 3],
        math.nan,
        -math.inf,
        [math.inf] * 3,
        [[1], [2]],
        [[1, 2], [3, 4], [5, 6]],
        [[1, 2, 3], [4, 5]],
        [[[1, 2, 3], [4, 5, 6]]],
        "1",
        ["a", "b", "c"],
        {},
        {"reward": 1},
        object(),
        10**400,
        1e39,
        [0.5, 1e39],
        1e25,
        torch.tensor([1.0, math.nan, 3.0]),
        np.ones((3, 2)),
    ],
    ids="{!r:.16}".format,  # without the address of object(): two processes collect the same tests
)
def test_read_rewards_refuses(file, raw):
    """Two agents, three joint answers; the message says where, what was expected, what came."""
    with pytest.raises(ValueError, match=r"row 7, turn 2") as error:
        file.read_rewards(raw, 2, 3, "row 7, turn 2")
    assert all(part in str(error.value) for part in ("3 numbers", "2 numbers", "2 lists of 3", repr(raw)[:20]))


# What follows returns what it was handed, under the names of the first form.


class Scorer:
    def __call__(self, a, b, batch_items):
        return {"a": a, "b": b, "items": batch_items}

    def method(self, a, b, *, prompts):
        return {"a": a, "b": b, "prompts": prompts}


def keywords(a, b, **kwargs):
    return {
        "a": a,
        "b": b,
        "prompts": kwargs.pop("prompts"),
        "items": kwargs.pop("batch_items"),
        "turn": kwargs.pop("turn"),
        "rest": kwargs,
    }


def defaults_between(a, b, scale=2, prompts=None, size=3, batch_items=None):
    return {"a": a, "b": b, "prompts": prompts, "items": batch_items, "rest": (scale, size)}


def positional_only(a, b, /, batch_items):
    return {"a": a, "b": b, "items": batch_items}


def weighted(a, b, weight, batch_items):
    return {"a": a, "b": b, "weight": weight, "items": batch_items}


def prompts_and_all(prompts, completions, **kwargs):
    return {"all": completions, "prompts": prompts, "items": kwargs["batch_items"]}


A, B, PROMPTS, ITEMS = ["a1", "a2"], ["b1", "b2"], ["pa", "pb"], [{"n": 3}]
AB, STAR, GIVEN = {"a": A, "b": B}, {"all": (A, B)}, {"prompts": PROMPTS, "items": ITEMS}
FORMS = [
    (lambda a, b: {"a": a, "b": b}, AB),
    (lambda a, b, batch_items: {"a": a, "b": b, "items": batch_items}, AB | {"items": ITEMS}),
    (lambda a, b, batch_items=None: {"a": a, "b": b, "items": batch_items}, AB | {"items": ITEMS}),
    (lambda a, batch_items, b: {"a": a, "b": b, "items": batch_items}, AB | {"items": ITEMS}),
    (lambda batch_items, a, b: {"a": a, "b": b, "items": batch_items}, AB | {"items": ITEMS}),
    (
        lambda a, b, *, batch_items, prompts=(): {
            "a": a,
            "b": b,
            "items": batch_items,
            "prompts": prompts,
        },
        AB | GIVEN,
    ),
    (lambda prompts, a, b: {"a": a, "b": b, "prompts": prompts}, AB | {"prompts": PROMPTS}),
    (lambda a, b, prompts: {"a": a, "b": b, "prompts": prompts}, AB | {"prompts": PROMPTS}),
    (lambda questions, a, b: {"a": a, "b": b, "prompts": questions}, AB | {"prompts": PROMPTS}),
    (lambda a, b, scale=2: {"a": a, "b": b, "scale": scale}, AB | {"scale": 2}),
    (defaults_between, AB | GIVEN | {"rest": (2, 3)}),
    (lambda a, b, *, scale=2: {"a": a, "b": b, "scale": scale}, AB | {"scale": 2}),
    (keywords, AB | GIVEN | {"turn": 2, "rest": {}}),
    (lambda *answers: {"all": answers}, STAR),
    (
        lambda *answers, prompts, batch_items=0: {
            "all": answers,
            "prompts": prompts,
            "items": batch_items,
        },
        STAR | GIVEN,
    ),
    (
        lambda *answers, **kwargs: {"all": answers} | kwargs,
        STAR | {"prompts": PROMPTS, "batch_items": ITEMS, "turn": 2},
    ),
    (lambda prompts, *answers: {"all": answers, "prompts": prompts}, STAR | {"prompts": PROMPTS}),
    (lambda answers: {"all": answers}, {"all": [A, B]}),
    (lambda answers, weight=1: {"all": answers, "weight": weight}, {"all": [A, B], "weight": 1}),
    (
        lambda answers, batch_items: {"all": answers, "items": batch_items},
        {"all": [A, B], "items": ITEMS},
    ),
    (prompts_and_all, {"all": [A, B]} | GIVEN),
    (positional_only, AB | {"items": ITEMS}),
    (functools.partial(weighted, weight=2), AB | {"weight": 2, "items": ITEMS}),
    (lambda a, b, turn: {"a": a, "b": b, "turn": turn}, AB | {"turn": 2}),
    (
        lambda turn, prompts, a, b: {"a": a, "b": b, "turn": turn, "prompts": prompts},
        AB | {"turn": 2, "prompts": PROMPTS},
    ),
    (lambda a, b, *, turn=0: {"a": a, "b": b, "turn": turn}, AB | {"turn": 2}),
    (Scorer(), AB | {"items": ITEMS}),
    (Scorer().method, AB | {"prompts": PROMPTS}),
]


@both
@pytest.mark.parametrize(("function", "seen"), FORMS)
def test_call_reward(file, function, seen):
    assert file.call_reward(function, [list(A), list(B)], list(PROMPTS), ITEMS[0], 2) == seen


@both
def test_call_reward_with_one_and_with_three_agents(file):
    one, three = [["a1"]], [["a1"], ["b1"], ["c1"]]
    own = file.call_reward(lambda a: a, one, ["pa"], {}, 1)
    assert own == ["a1"]  # the agent's own list, not a list of lists
    assert file.call_reward(lambda p, a: (p, a), one, ["pa"], {}, 1) == (["pa"], ["a1"])
    assert file.call_reward(lambda a, b, c: [a, b, c], three, ["p"] * 3, {}, 1) == three
    assert file.call_reward(lambda everything: everything, three, ["p"] * 3, {}, 1) == three


@both
def test_call_reward_lets_an_error_through_at_once(file):
    calls = []

    def broken(a, b, batch_items=None):
        calls.append(a)
        raise TypeError("unexpected keyword argument 'batch_items'")

    with pytest.raises(TypeError, match="unexpected keyword"):
        file.call_reward(broken, [A, B], PROMPTS, ITEMS[0], 1)
    assert len(calls) == 1


@both
def test_a_column_of_the_data_as_a_required_parameter_is_refused(file):
    """By place it would get answers, or the prompts: the message says how to read the column."""
    for function in (lambda first, second, n: 0, lambda n, second: 0, lambda n: 0):
        with pytest.raises(ValueError, match=r"batch_items\[0\]\['n'\]"):
            file.call_reward(function, [A, B], PROMPTS, {"n": 3, "prompt": "p"}, 1)
    for function in (lambda a, b, n=4: n, lambda a, b, *, n=4: n):  # a default is the user's own
        assert file.call_reward(function, [A, B], PROMPTS, {"n": 3}, 1) == 4
    assert file.call_reward(lambda prompt, a, b: prompt, [A, B], PROMPTS, {"prompt": 1}, 1) == PROMPTS


# ---------------------------------------------------------------------- the task, the critic's text


@both
def test_number_task(file):
    task, item = file.number_task(2, seed=3), {"prompt": "sum to 7", "n": 7}
    reward = task["reward_func"]
    assert [f(item) for f in task["formatters"]] == [
        "agent 1 of 2: sum to 7 =",
        "agent 2 of 2: sum to 7 =",
    ]
    assert reward(["3"], ["4"], batch_items=[item]) == [1.0]
    assert reward(["3", "I say 4.", "9", "", "99"], ["3", "3!", "9", "7", "x"], batch_items=[item]) == approx(
        [0.8, 1.0, 0.0, 0.0, 0.0]  # 6 is 1 off; 7; 18 is 11 off; no number; no number
    )
    assert task["external_transition"](prompt="sum to 7", agent_completions=["3", "x"]) == ["sum to 7, said 3 ?"] * 2
    rows = task["train_dataset"] + task["eval_dataset"]
    assert all(row["prompt"] == f"sum to {row['n']}" for row in rows) and {row["n"] for row in rows} == set(range(10))
    assert file.number_task(2, seed=3)["train_dataset"] == task["train_dataset"]
    assert file.number_task(2, seed=4)["train_dataset"] != task["train_dataset"]


@both
def test_number_task_of_one_and_of_three(file):
    item = {"prompt": "sum to 7", "n": 7}
    assert file.number_task(1, 0)["formatters"][0](item) == "agent 1 of 1: sum to 7 ="
    assert file.number_task(1, 0)["reward_func"](["7", "5"], batch_items=[item]) == approx([1.0, 0.6])
    three = file.number_task(3, 0)
    assert three["formatters"][2](item) == "agent 3 of 3: sum to 7 ="
    assert three["reward_func"](["1"], ["2"], ["3"], batch_items=[item]) == approx([0.8])
    said = three["external_transition"](prompt="sum to 7", agent_completions=["1", "2", "3"])
    assert said == ["sum to 7, said 1 2 3"] * 3


def test_critic_text():
    assert maac.critic_text(["p", "q"], []) == "[agent 1]\np\n[agent 2]\nq"
    assert maac.critic_text(["p", "q"], ["3", ""]) == "[agent 1]\np\n[agent 2]\nq\n[answer 1]\n3\n[answer 2]\n"
