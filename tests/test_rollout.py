"""Which items are answered together and when, in which order, and where an episode ends."""

import collections
import random

import numpy
import pytest
import torch

from conftest import answer, flat, watch

approx = pytest.approx
some = pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-shared", "maac-q"])
ROWS = [{"prompt": f"Row {n} " + "and so on " * (n % 3), "n": n} for n in range(10)]


def widths(trainer):
    """A list that fills with how many prompts agent 0 answers at once, "update" between."""
    seen, generate, step = [], trainer.agents[0].generate, trainer.agent_optimizers[0]

    def spy(input_ids, **given):
        seen.append(len(input_ids))
        return generate(input_ids=input_ids, **given)

    trainer.agents[0].generate = spy
    step.register_step_pre_hook(lambda *_: seen.append("update"))
    return seen


def per_update(seen):
    """[5, "update", 2, 3, "update"] -> [[5], [2, 3]]; an update in several steps counts once."""
    found, last = [[]], None
    for event in seen:
        if event != "update":
            found = [*found, []] if last == "update" else found
            found[-1].append(event)
        last = event
    return found


BATCHES = {
    "as many as the buffer lacks": ({"rollout_buffer_size": 4}, [[4], [4], [2]]),
    "a buffer larger than the dataset": ({"rollout_buffer_size": 64}, [[10]]),
    "a buffer that the epoch fills": ({"rollout_buffer_size": 5}, [[5], [5]]),
    "one at a time": ({"rollout_buffer_size": 1}, [[1]] * 10),
    "a bound": (
        {"rollout_buffer_size": 5, "rollout_batch_size": 3},
        [[3, 2], [3, 2]],
    ),
    "a bound that is never reached": (
        {"rollout_buffer_size": 4, "rollout_batch_size": 9},
        [[4], [4], [2]],
    ),
    "generations": (
        {"rollout_buffer_size": 8, "num_generations": 3},  # three items hold nine answers
        [[9], [9], [9], [3]],
    ),
    "a bound counts items": (
        {"rollout_buffer_size": 8, "num_generations": 3, "rollout_batch_size": 2},
        [[6, 3], [6, 3], [6, 3], [3]],
    ),
    "two turns": (
        {"rollout_buffer_size": 7, "num_turns": 2},  # four items hold eight answers
        [[4, 4], [4, 4], [2, 2]],
    ),
    "two epochs": (
        {"rollout_buffer_size": 7, "num_train_epochs": 2},
        [[7], [3], [7], [3]],
    ),
}


@some
@pytest.mark.parametrize("case", BATCHES)
def test_items_are_answered_together_up_to_the_next_update(variant, case, make_trainer, rig, tmp_path):
    """And never beyond the end of the epoch, where the leftovers are trained on."""
    args, expected = BATCHES[case]
    trainer = make_trainer(variant, tmp_path, args)
    rig(trainer, answer)
    seen = widths(trainer)
    trainer.train()
    assert per_update(seen) == expected and seen[-1] == "update"
    epochs, turns = args.get("num_train_epochs", 1), args.get("num_turns", 1)
    places = [(s.row, s.turn_idx, s.generation_idx) for s in trainer.samples if s.agent_idx == 0]
    once = [(row, t, g) for row in range(10) for t in range(turns) for g in range(args.get("num_generations", 1))]
    assert places == once * epochs  # every row, in the order of the dataset
    assert trainer.counts.updates == len(expected)
    assert trainer.counts.env_step == len(places) and not trainer.buffer


@some
def test_what_is_missing_when_episodes_end_early_is_collected_next(variant, make_trainer, rig, tmp_path):
    """Even rows end after one turn: four items leave two of eight answers to the next batch."""
    reward = lambda a, b, batch_items: float(batch_items[0]["n"] % 2 == 0)  # noqa: E731
    args = {"num_turns": 2, "early_termination_threshold": 0.5, "rollout_buffer_size": 8}
    trainer = make_trainer(variant, tmp_path, args, reward_func=reward)
    rig(trainer, answer)
    seen = widths(trainer)
    trainer.train()
    # rows 0-3: 6 answers, 2 missing: row 4 alone: 7; then row 5, two turns: 9. The rest: 6-9
    assert per_update(seen) == [[4, 2, 1, 1, 1], [4, 2]]
    turns = collections.Counter(s.row for s in trainer.samples if s.agent_idx == 0)
    assert turns == {row: 1 + row % 2 for row in range(10)}


@pytest.mark.parametrize(("rows", "buffer", "updates"), [(10, 4, 3), (3, 8, 1), (8, 4, 2)])
def test_every_row_is_trained_on(variant, rows, buffer, updates, make_trainer, rig, tmp_path):
    """Leftovers too, at the end of every epoch: by gradients, in every agent."""
    args = {"rollout_buffer_size": buffer, "num_train_epochs": 2}
    trainer = make_trainer(variant, tmp_path, args, train_dataset=ROWS[:rows])
    rig(trainer, answer)
    events = watch(trainer)
    trainer.train()
    for i in (0, 1):
        passes = [e[3] for e in events if e[:3] == ("pass", f"agent {i}", True)]
        own = [s for s in trainer.samples if s.agent_idx == i]
        assert [s.row for s in own] == [*range(rows)] * 2
        trained = collections.Counter(ids for sequences in passes for ids in sequences)
        assert trained == collections.Counter((*s.prompt_ids, *s.completion_ids) for s in own)
    assert trainer.counts.updates == 2 * updates


@some
@pytest.mark.parametrize(("threshold", "turns"), [(0.49, 1), (0.5, 3), (None, 3), (-1.0, 1), (9.0, 3)])
def test_an_episode_ends_when_the_mean_reward_exceeds_the_threshold(
    variant, threshold, turns, make_trainer, rig, tmp_path
):
    """The processed reward's, over agents, before the KL penalty."""
    args = {"num_turns": 3, "early_termination_threshold": threshold}
    args |= {"reference_kl_enabled": True, "reference_kl_coef": 100.0}
    given = {"reward_func": lambda a, b: [1.25, 1.75], "reward_processor": lambda r: r - 1}
    trainer = make_trainer(variant, tmp_path, args, train_dataset=ROWS[:2], **given)
    rig(trainer, answer)
    trainer.train()
    for row in (0, 1):
        own = [s for s in trainer.samples if s.row == row]
        assert [(s.turn_idx, s.agent_idx) for s in own] == [(t, i) for t in range(turns) for i in (0, 1)]
        assert [s.reward for s in own] == [0.25, 0.75] * turns


@some
def test_each_episode_goes_on_from_its_own_answers(variant, make_trainer, rig, tmp_path):
    """Some drop out of the batch: the others must not be taken for their neighbours."""
    asked = []

    def transition(prompt, agent_completions, num_agents, **_):
        asked.append((prompt, tuple(agent_completions)))
        return [f"{prompt} {i}: {text}" for i, text in enumerate(agent_completions)]

    reward = lambda a, b, batch_items, turn: float(batch_items[0]["n"] % 3 == turn)  # noqa: E731
    args = {"num_turns": 3, "early_termination_threshold": 0.5, "rollout_buffer_size": 99}
    given = {"reward_func": reward, "external_transition": transition}
    trainer = make_trainer(variant, tmp_path, args, "tiny_lm", **given)
    rig(trainer, lambda i, prompt, k: [20 + sum(prompt) % 9, 20 + (sum(prompt) + i) % 10])
    trainer.train()
    by_place = {(s.row, s.turn_idx, s.agent_idx): s for s in trainer.samples}
    turns = [max(t for r, t, _ in by_place if r == row) + 1 for row in range(10)]
    assert turns == [[3, 1, 2][row % 3] for row in range(10)]
    for (row, t, i), s in by_place.items():
        assert s.item == ROWS[row] and s.reward == (row % 3 == t + 1)
        if t:
            before = [by_place[row, t - 1, j] for j in (0, 1)]
            assert (ROWS[row]["prompt"], tuple(x.completion for x in before)) in asked
            assert s.prompt == f"{ROWS[row]['prompt']} {i}: {before[i].completion}"
    assert len(asked) == sum(turns) - 10  # nobody is asked what comes after the end


FORMS = {  # two agents, three joint answers
    "one per agent": ([-1, 2], [[-1, -1, -1], [2, 2, 2]]),
    "one per joint answer": ([1, 2, 3], [[1, 2, 3], [1, 2, 3]]),
    "a matrix": ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
}


@some
@pytest.mark.parametrize(("raw", "expected"), FORMS.values(), ids=FORMS)
def test_rewards_reach_their_agent_and_their_answer(variant, raw, expected, make_trainer, rig, tmp_path):
    args, given = {"num_generations": 3}, {"train_dataset": ROWS[:3]}
    trainer = make_trainer(variant, tmp_path, args, reward_func=lambda a, b: raw, **given)
    rig(trainer, answer)
    trainer.train()
    for row in range(3):
        for i in (0, 1):
            own = [s for s in trainer.samples if (s.row, s.agent_idx) == (row, i)]
            assert [s.generation_idx for s in own] == [0, 1, 2]
            assert [s.reward for s in own] == [s.target for s in own] == expected[i]


@some
def test_answers_of_one_generation_meet_in_the_reward(variant, make_trainer, rig, tmp_path):
    """It is called once for each item and reads the k-th answers of both agents together."""
    joint, calls = {}, []

    def reward(a, b, batch_items):
        n = batch_items[0]["n"]
        calls.append(n)
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            joint[n, k] = (x, y, 100 * n + 10 * k + len(x) + len(y) / 100)
        return [joint[n, k][2] for k in range(3)]

    args = {"num_generations": 3, "rollout_buffer_size": 7}
    trainer = make_trainer(variant, tmp_path, args, reward_func=reward)
    rig(trainer, answer)
    trainer.train()
    assert calls == list(range(10)) and len({x for x, _, _ in joint.values()}) > 20
    for s in trainer.samples:
        own = joint[s.row, s.generation_idx]
        assert (s.completion, s.reward) == (own[s.agent_idx], approx(own[2]))


@some
@pytest.mark.parametrize("num_agents", [1, 3])
def test_any_number_of_agents(variant, num_agents, make_trainer, rig, tmp_path):
    args = {"num_agents": num_agents, "num_turns": 2}
    reward = lambda *completions: [float(len(own[0])) for own in completions]  # noqa: E731
    trainer = make_trainer(variant, tmp_path, args, reward_func=reward)
    rig(trainer, answer)
    before = [flat([agent]) for agent in trainer.agents]
    trainer.train()
    assert [s.agent_idx for s in trainer.samples] == [*range(num_agents)] * 20
    assert all(s.reward == len(s.completion) for s in trainer.samples)
    for old, agent in zip(before, trainer.agents, strict=True):
        assert not torch.equal(old, flat([agent]))


# ----------------------------------------------------------------------------------- random numbers


def answers(trainer):
    trainer.train()
    return [(s.row, s.agent_idx, s.generation_idx, tuple(s.completion_ids)) for s in trainer.samples]


@some
def test_answers_are_drawn_anew_for_every_purpose(variant, make_trainer, tmp_path):
    """Weights stand still, all prompts are the same: what comes out differs by chance alone."""
    args = {"agent_learning_rate": 0.0, "critic_learning_rate": 0.0, "num_train_epochs": 2}
    args |= {"num_generations": 2, "rollout_buffer_size": 4, "max_new_tokens": 8}
    given = {"train_dataset": [{"prompt": "the same"}] * 4}
    drawn = answers(make_trainer(variant, tmp_path / "1", args, **given))
    assert len(drawn) == 2 * 4 * 2 * 2  # epochs, rows, agents, generations
    assert len({ids for *_, ids in drawn}) > len(drawn) - 3
    assert drawn == answers(make_trainer(variant, tmp_path / "2", args, **given))
    other = answers(make_trainer(variant, tmp_path / "3", args | {"seed": 2}, **given))
    assert not {ids for *_, ids in drawn} & {ids for *_, ids in other if len(ids) > 3}


@some
def test_every_turn_draws_anew(variant, make_trainer, tmp_path):
    """The same prompts in both turns: what comes out differs by chance alone."""
    same = lambda prompt, num_agents, **_: ["the same"] * num_agents  # noqa: E731
    args = {"num_turns": 2, "external_prompt_passthrough": True, "max_new_tokens": 8}
    given = {"train_dataset": [{"prompt": "the same"}] * 4, "external_transition": same}
    args |= {"rollout_buffer_size": 8}
    drawn = answers(make_trainer(variant, tmp_path, args, **given))
    assert len(drawn) == 16 and len({ids for *_, ids in drawn}) > 13


@some
def test_functions_of_the_user_may_draw_random_numbers(variant, make_trainer, rig, tmp_path):
    """They draw the same in every run, other ones in every batch, and do not disturb sampling."""

    def reward(a, b):
        return random.random() + numpy.random.rand() + torch.rand(1).item()

    def run(name, reward_func):
        torch.manual_seed(len(name)), random.seed(len(name))
        given = {"reward_func": reward_func, "train_dataset": ROWS[:6]}
        still = {"agent_learning_rate": 0.0, "rollout_buffer_size": 2}
        trainer = make_trainer(variant, tmp_path / name, still, **given)
        return answers(trainer), [s.reward for s in trainer.samples if s.agent_idx == 0]

    (drawn, first), (again, second) = run("one", reward), run("another", reward)
    assert drawn == again and first == second and len(set(first)) == 6
    assert run("plain", lambda a, b: 0.5)[0] == drawn


# --------------------------------------------------------------------------------------- the record


@some
def test_what_a_sample_says_of_its_place_and_its_text(variant, make_trainer, rig, tmp_path):
    """The callback gets an item's samples together: by turn, agent and generation."""
    seen = []
    callback = lambda samples: seen.append(list(samples)) or {}  # noqa: E731
    args = {"num_generations": 2, "rollout_buffer_size": 7}
    trainer = make_trainer(variant, tmp_path, args, metrics_callback=callback)
    rig(trainer, answer)
    trainer.train()
    assert [samples[0].row for samples in seen] == list(range(10))
    for samples in seen:
        places = [(s.turn_idx, s.agent_idx, s.generation_idx) for s in samples]
        assert places == [(0, i, g) for i in (0, 1) for g in (0, 1)]
        for s in samples:
            tokenizer = trainer.tokenizers[s.agent_idx]
            assert s.item == ROWS[s.row] and s.prompt == ROWS[s.row]["prompt"]
            assert s.prompt_ids == tokenizer(s.prompt).input_ids and not s.truncated
            ids = answer(s.agent_idx, s.prompt_ids, s.generation_idx)
            assert s.completion_ids == ids and s.finished == (ids[-1] == 1)
            assert s.completion == tokenizer.decode([x for x in ids if x != 1])


BAD = {"None": None, "a text": {"mine": "high"}, "a list": [1.0], "a number": 0.5}


@some
@pytest.mark.parametrize("returned", BAD.values(), ids=BAD)
def test_a_callback_that_returns_no_numbers_is_named_and_nothing_trained(
    variant, returned, make_trainer, rig, tmp_path
):
    trainer = make_trainer(variant, tmp_path, metrics_callback=lambda samples: returned)
    rig(trainer, answer)
    parts = [*trainer.agents, *trainer.critics]
    before = flat(parts)
    with pytest.raises(ValueError, match="metrics_callback"):
        trainer.train()
    assert torch.equal(before, flat(parts))


@some
def test_a_bad_reward_is_named_by_row_and_turn_before_a_step_on_its_batch(variant, make_trainer, rig, tmp_path):
    """Rows 0 to 3 are trained on; row 6 of the next four spoils that batch and no other."""
    reward = lambda a, b, batch_items: None if batch_items[0]["n"] == 6 else 0.5 + len(a[0])  # noqa: E731
    trainer = make_trainer(variant, tmp_path, reward_func=reward)
    rig(trainer, answer)
    events = watch(trainer)
    with pytest.raises(ValueError, match="row 6, turn 1"):
        trainer.train()
    assert trainer.counts.updates == 1 and trainer.counts.row == 4
    assert events.count(("step", "agent 0")) == events.count(("step", "agent 1")) == 1
    assert (tmp_path / "run/checkpoint/state.pt").exists()
