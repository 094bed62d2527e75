"""The user's functions and data: rewards, formatters, chats, transitions, callbacks, datasets."""

import copy
import json
import math
import runpy
import sys
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

import iac
import maac
from conftest import END, ROOT

ROWS = [{"prompt": f"name {n}", "n": n} for n in range(6)]
BOTH = pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])


def said(i, k=0):
    """Agent i's part of the k-th joint answer to an item, where answers are rigged."""
    return f"{'ab'[i % 2]}{i} says {k}"


@pytest.fixture
def play(make_trainer, rig, tokenizer, tmp_path):
    """play(variant, args, **constructor_kwargs) -> a trainer that has trained on rigged answers."""
    number = count()

    def answer(i, ids, k):
        return [*tokenizer(said(i, k), add_special_tokens=False).input_ids, END]

    def train(variant, args=None, **given):
        args = {"max_new_tokens": 16} | (args or {})
        given = {"train_dataset": ROWS[:2]} | given
        trainer = make_trainer(variant, tmp_path / str(next(number)), args, **given)
        rig(trainer, answer)
        trainer.train()
        return trainer

    return train


def metrics(trainer):
    lines = (Path(trainer.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(trainer):
    models = [*trainer.agents, *trainer.critics]
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def prompts_of(trainer, turn, i):
    return [s.prompt for s in trainer.samples if s.turn_idx == turn and s.agent_idx == i]


# ---------------------------------------------------------------------------- rewards: how called

SEEN = []  # what the reward functions below were given


def note(**seen):
    SEEN.append(seen)
    return 0.25 * len(SEEN)


class Callable:
    def __call__(self, a, b, prompts=None):
        return note(a=a, b=b, prompts=prompts)

    def method(self, a, b, *, batch_items):
        return note(a=a, b=b, batch_items=batch_items)


def scaled_items_and_prompts(a, b, scale=2.0, batch_items=None, prompts=None):
    return note(a=a, b=b, scale=scale, batch_items=batch_items, prompts=prompts)


def keywords(a, b, **rest):
    given = {name: rest.pop(name) for name in ("prompts", "batch_items", "turn")}
    return note(a=a, b=b, rest=rest, **given)


def starred(*completions, prompts=None):
    return note(a=completions[0], b=completions[1], prompts=prompts)


def starred_with_keywords(*completions, **kwargs):
    return keywords(*completions, **kwargs)


def own_defaults(a, b, weight=0.5, *, words=("x",)):
    return note(a=a, b=b, weight=weight, words=words)


def weight_first(weight, a, b, batch_items):
    return note(a=a, b=b, weight=weight, batch_items=batch_items)


def positional_only(a, b, /, turn):
    return note(a=a, b=b, turn=turn)


FORMS = {
    "plain": lambda a, b: note(a=a, b=b),
    "positional only, turn": positional_only,
    "turn first": lambda turn, a, b: note(a=a, b=b, turn=turn),
    "turn with a default": lambda a, b, turn=7: note(a=a, b=b, turn=turn),
    "items last": lambda a, b, batch_items: note(a=a, b=b, batch_items=batch_items),
    "items with a default": lambda a, b, batch_items=None: note(a=a, b=b, batch_items=batch_items),
    "items in between": lambda a, batch_items, b: note(a=a, b=b, batch_items=batch_items),
    "after another default": scaled_items_and_prompts,
    "keyword only": lambda a, b, *, prompts, batch_items=None: note(a=a, b=b, prompts=prompts, batch_items=batch_items),
    "keywords": keywords,
    "prompts first": lambda prompts, a, b: note(a=a, b=b, prompts=prompts),
    "prompts by another name": lambda questions, a, b: note(a=a, b=b, prompts=questions),
    "starred": starred,
    "starred with keywords": starred_with_keywords,
    "all agents in one": lambda completions: note(a=completions[0], b=completions[1]),
    "all agents in one, and items": lambda texts, batch_items: note(a=texts[0], b=texts[1], batch_items=batch_items),
    "own defaults": own_defaults,
    "an object": Callable(),
    "a method": Callable().method,
    "partial": partial(weight_first, 0.5),
    "partial by name": partial(own_defaults, weight=0.5),
}


@pytest.mark.parametrize("form", FORMS)
@BOTH
def test_a_reward_function_is_called_as_its_signature_asks(variant, form, play):
    SEEN.clear()
    formatters = [lambda x: f"first {x['prompt']}", lambda x: f"second {x['prompt']}"]
    args = {"num_generations": 2, "rollout_buffer_size": 6}
    given = {"formatters": formatters, "reward_func": FORMS[form], "train_dataset": ROWS[:3]}
    trainer = play(variant, args, **given)
    assert len(SEEN) == 3  # once per item
    for k, seen in enumerate(SEEN):
        expected = {
            "a": [said(0, 0), said(0, 1)],
            "b": [said(1, 0), said(1, 1)],
            "prompts": [f"first name {k}", f"second name {k}"],
            "batch_items": [ROWS[k]],
            "turn": 1,
            "weight": 0.5,
            "words": ("x",),
            "scale": 2.0,
            "rest": {},
        }
        assert seen == {name: expected[name] for name in seen} and type(seen["a"]) is list
        assert [s.reward for s in trainer.samples if s.row == k] == [0.25 * (k + 1)] * 4


@pytest.mark.parametrize("num_agents", [1, 3])
def test_one_parameter_is_all_agents_unless_there_is_one_agent(num_agents, play):
    seen = []
    play("maac-v", {"num_agents": num_agents}, reward_func=lambda texts: seen.append(texts) or 1.0)
    own = [[said(i)] for i in range(num_agents)]
    assert seen[0] == (own[0] if num_agents == 1 else own)


def longer(prompt_history_per_agent, **_):
    return [f"{prompts[-1]} and on {i}" for i, prompts in enumerate(prompt_history_per_agent)]


@BOTH
def test_turns_count_from_one_and_have_prompts_of_their_own(variant, play):
    seen = []

    def reward_func(a, b, turn, prompts):
        seen.append((turn, prompts))
        return 0.5

    given = {"reward_func": reward_func, "external_transition": longer}
    trainer = play(variant, {"num_turns": 3}, train_dataset=ROWS[:1], **given)
    own = [[s.prompt for s in trainer.samples if s.turn_idx == t] for t in range(3)]
    assert seen == [(t + 1, own[t]) for t in range(3)] and len(set(map(tuple, own))) == 3


@BOTH
def test_a_function_without_a_signature_gets_the_answers(variant):
    module = iac if variant.startswith("iac") else maac
    assert module.call_reward(max, [["a"], ["b"]], ["prompt", "prompt"], {}, 1) == ["b"]


@BOTH
def test_a_column_of_the_dataset_is_no_parameter(variant, play):
    """As TRL would have it; by its place it would silently get answers, and the answers prompts."""
    for reward_func in (lambda a, b, n: 0.5, lambda n, a, b: 0.5, lambda a, n: 0.5):
        with pytest.raises(ValueError, match=r"'n'.*batch_items\[0\]\['n'\]"):
            play(variant, reward_func=reward_func)
    play(variant, reward_func=lambda a, b, n=3: float(n == 3))  # its own default
    play(variant, reward_func=lambda prompt, a, b: float(prompt[0] == "name 0"))


@BOTH
def test_an_error_of_the_users_own_is_neither_hidden_nor_retried(variant, play):
    calls = []

    def reward_func(a, b, batch_items):
        calls.append(batch_items)
        raise TypeError("reward_func() got an unexpected keyword argument 'batch_items'")

    with pytest.raises(TypeError, match="unexpected keyword"):
        play(variant, reward_func=reward_func)
    assert calls == [[ROWS[0]]]


# ---------------------------------------------------------------------- rewards: what they return

MATRIX = [[0.25, 0.5, 1.0], [2.0, 4.0, 8.0]]  # 2 agents x 3 joint answers
PER_ANSWER = [MATRIX[1]] * 2
PER_AGENT = [[0.25] * 3, [2.0] * 3]
RETURNS = [
    (0.5, [[0.5] * 3] * 2),
    (1, [[1.0] * 3] * 2),
    (np.float32(0.5), [[0.5] * 3] * 2),
    (torch.tensor(0.5), [[0.5] * 3] * 2),
    (MATRIX[1], PER_ANSWER),
    ([True, False, True], [[1.0, 0.0, 1.0]] * 2),
    (tuple(MATRIX[1]), PER_ANSWER),
    (np.array(MATRIX[1]), PER_ANSWER),
    ([torch.tensor(x) for x in MATRIX[1]], PER_ANSWER),
    (torch.tensor(MATRIX[1], dtype=torch.bfloat16), PER_ANSWER),
    (torch.tensor(MATRIX[1], requires_grad=True), PER_ANSWER),
    ([0.25, 2.0], PER_AGENT),
    (np.array([0.25, 2.0]), PER_AGENT),
    (MATRIX, MATRIX),
    (tuple(map(tuple, MATRIX)), MATRIX),
    ([np.array(row) for row in MATRIX], MATRIX),
    (np.array(MATRIX, dtype=np.float16), MATRIX),
    (torch.tensor(MATRIX), MATRIX),
]


@BOTH
def test_rewards_are_read_in_every_form(variant, play):
    """Row n's reward comes in the n-th form."""
    rows = [{"prompt": f"name {n}", "n": n} for n in range(len(RETURNS))]
    args = {"num_generations": 3, "rollout_buffer_size": 3}
    given = {"reward_func": lambda a, b, batch_items: RETURNS[batch_items[0]["n"]][0]}
    trainer = play(variant, args, train_dataset=rows, **given)
    logged = metrics(trainer)
    for n, (_, expected) in enumerate(RETURNS):
        own = [s for s in trainer.samples if s.row == n]
        places = [(s.agent_idx, s.generation_idx) for s in own]
        assert places == [(i, g) for i in (0, 1) for g in (0, 1, 2)]
        assert [s.reward for s in own] == [s.target for s in own] == expected[0] + expected[1], n
        for i in (0, 1):
            assert logged[n][f"agent_{i}/reward_mean"] == pytest.approx(sum(expected[i]) / 3)
        mean = sum(map(sum, expected)) / 6
        assert logged[n]["turn_1/reward_mean"] == pytest.approx(mean)


@BOTH
def test_a_flat_list_is_per_joint_answer_first(variant, play):
    trainer = play(variant, {"num_generations": 2}, reward_func=lambda a, b: [1.0, 3.0])
    assert {(s.generation_idx, s.reward) for s in trainer.samples} == {(0, 1.0), (1, 3.0)}


BAD_REWARDS = {  # of 2 agents and 4 joint answers -> words of the message
    "1 value": ([0.5], ["4", "1 values"]),
    "3 values": ([0.1, 0.2, 0.3], ["4", "3 values"]),
    "5 values": ([0.1] * 5, ["4", "5 values"]),
    "none at all": ([], ["4", "0 values"]),
    "None": (None, ["4", "None"]),
    "one None": ([0.1, None, 0.2, 0.3], ["4", "None"]),
    "NaN": ([0.1, math.nan, 0.2, 0.3], ["finite", "nan"]),
    "infinity": ([0.1, math.inf, 0.2, 0.3], ["finite", "inf"]),
    "a bare NaN": (math.nan, ["finite", "nan"]),
    "a text": ("good", ["4", "'good'"]),
    "texts": (["0.1"] * 4, ["4", "'0.1'"]),
    "a dict": ({"reward": 0.5}, ["4", "reward"]),
    "transposed": ([[0.1, 0.2]] * 4, ["2 lists of 4"]),
    "ragged": ([[0.1] * 4, [0.1] * 3], ["2 lists of 4"]),
    "three rows": ([[0.1] * 4] * 3, ["2 lists of 4"]),
    "NaN in a matrix": ([[0.1] * 4, [0.1] * 3 + [math.nan]], ["finite", "nan"]),
    "a tensor of 3": (torch.ones(3), ["4", "3 values"]),
    "an array of 3": (np.ones(3), ["4", "3 values"]),
    "a tensor that is NaN": (torch.tensor(math.nan), ["finite", "nan"]),
    "beyond float32": ([0.5, 0.5, 0.5, 1e39], ["finite", "1e+39"]),
    "its square beyond float32": ([0.5, 0.5, 0.5, 1e25], ["squared", "1e+25"]),
    "beyond any float": (10**400, ["finite"]),
}


@pytest.mark.parametrize("case", BAD_REWARDS)
@BOTH
def test_a_bad_reward_is_refused_by_row_and_turn(variant, case, make_trainer, tmp_path):
    """It comes for the second item of the first update: no weight has changed by then."""
    raw, words = BAD_REWARDS[case]

    def reward_func(a, b, batch_items):
        return raw if batch_items[0]["n"] == 1 else [0.1, 0.2, 0.3, 0.4]

    args = {"num_generations": 4, "rollout_buffer_size": 8}
    trainer = make_trainer(variant, tmp_path, args, reward_func=reward_func)
    before = weights(trainer).clone()
    with pytest.raises(ValueError) as error:
        trainer.train()
    for word in [*words, "row 1", "turn 1"]:
        assert word in str(error.value), str(error.value)
    assert torch.equal(weights(trainer), before)


@BOTH
def test_the_turn_of_a_bad_reward_is_named(variant, play):
    for bad in (None, [0.1, 0.2, 0.3]):
        with pytest.raises(ValueError, match="row 1, turn 2"):
            play(
                variant,
                {"num_turns": 2},
                reward_func=lambda a, b, turn, batch_items, bad=bad: (
                    bad if turn == 2 and batch_items[0]["n"] == 1 else 0.5
                ),
            )


@BOTH
def test_a_reward_processor_is_applied_to_every_reward(variant, play):
    seen = []

    def reward_processor(reward):
        seen.append(reward)
        return 10 * reward - 1

    given = {"reward_func": lambda a, b: [[0.5, 1.0], [1.5, 2.0]]}
    args = {"num_generations": 2}
    trainer = play(variant, args, reward_processor=reward_processor, **given)
    assert seen == [0.5, 1.0, 1.5, 2.0] * 2 and all(type(reward) is float for reward in seen)
    assert [s.reward for s in trainer.samples] == [4.0, 9.0, 14.0, 19.0] * 2
    assert metrics(trainer)[-1]["turn_1/reward_mean"] == 11.5
    trainer = play(variant, args, reward_processor=None, **given)
    assert [s.reward for s in trainer.samples] == [0.5, 1.0, 1.5, 2.0] * 2


@BOTH
def test_a_bad_processed_reward_is_refused_too(variant, play):
    for bad in (None, math.nan, "1", [0.5]):
        with pytest.raises(ValueError, match=r"row 0, turn 1, reward_processor"):
            play(variant, reward_processor=lambda reward, bad=bad: bad)


@pytest.mark.parametrize(("factor", "turns"), [(6, {0}), (5, {0, 1}), (4, {0, 1})])
@BOTH
def test_an_episode_ends_after_a_processed_reward_above_the_threshold(variant, factor, turns, make_trainer, tmp_path):
    """The KL penalty, which would take or add far more than the difference, has no part in it."""
    args = {"num_turns": 2, "early_termination_threshold": 5.0}
    args |= {"reference_kl_enabled": True, "reference_kl_coef": 50.0}
    given = {"reward_func": lambda a, b: 1.0, "reward_processor": lambda r: factor * r}
    trainer = make_trainer(variant, tmp_path, args, **given)
    for parameter in trainer.references[0].parameters():
        parameter.data.mul_(1.5)
    trainer.train()
    assert max(abs(s.reference_kl) for s in trainer.samples) > 0.1
    assert {s.turn_idx for s in trainer.samples} == turns


@BOTH
def test_the_threshold_is_for_the_mean_of_the_agents_and_free_of_rounding(variant, play):
    """0.1 + 0.1 + 0.1 is more than 3 * 0.1 by a rounding error, and not above the threshold."""
    args = {"num_agents": 3, "num_turns": 2, "early_termination_threshold": 0.1}
    for rewards, ends in ((0.1, False), ([0.0, 0.0, 0.4], True), ([0.2, 0.0, 0.0], False)):
        trainer = play(variant, args, reward_func=lambda *answers, r=rewards: r)
        assert ends == all(s.turn_idx == 0 for s in trainer.samples)


# ----------------------------------------------------------------------------- formatters, turns


def again(prompt, agent_completions, num_agents, **_):
    return [f"{prompt} again {i}: {' + '.join(agent_completions)}" for i in range(num_agents)]


SAID = f"{said(0)} + {said(1)}"


def test_formatters_are_one_for_all_or_one_for_each_or_none(variant, play):
    one, each = (lambda x: f"<{x['prompt']}>"), [lambda x, i=i: f"{i} {x['n']}" for i in (0, 1)]
    for formatters, expected in [
        (None, ["name 1", "name 1"]),
        (one, ["<name 1>"] * 2),
        (each, ["0 1", "1 1"]),
        (tuple(each), ["0 1", "1 1"]),
    ]:
        trainer = play(variant, formatters=formatters, train_dataset=ROWS[1:2])
        assert [s.prompt for s in trainer.samples] == expected


@BOTH
def test_the_transitions_prompts_replace_the_items_prompt(variant, play):
    """A formatter that names external_prompts is told its own agent's; None in the first turn."""
    rows = copy.deepcopy(ROWS[:2])
    formatters = [
        lambda x: f"{x['n']}: {x['prompt']} [{x.get('_original_prompt')}]",
        lambda x, external_prompts=None: f"{x['prompt']} | {external_prompts}",
    ]
    given = {"formatters": formatters, "external_transition": again, "train_dataset": rows}
    trainer = play(variant, {"num_turns": 2}, **given)
    assert prompts_of(trainer, 0, 0) == ["0: name 0 [None]", "1: name 1 [None]"]
    assert prompts_of(trainer, 0, 1) == ["name 0 | None", "name 1 | None"]
    one = [f"{k}: name {k} again 0: {SAID} [name {k}]" for k in (0, 1)]
    two = [f"name {k} again 1: {SAID}" for k in (0, 1)]
    assert prompts_of(trainer, 1, 0) == one
    assert prompts_of(trainer, 1, 1) == [f"{text} | {text}" for text in two]
    assert rows == ROWS[:2]


@BOTH
def test_a_formatter_may_demand_the_external_prompts_by_keyword(variant, play):
    given = {"formatters": lambda x, *, external_prompts: f"{x['n']} {external_prompts}"}
    trainer = play(variant, {"num_turns": 2}, external_transition=again, **given)
    assert prompts_of(trainer, 0, 0) == ["0 None", "1 None"]
    assert prompts_of(trainer, 1, 0) == [f"{k} name {k} again 0: {SAID}" for k in (0, 1)]


@BOTH
def test_with_passthrough_the_formatter_is_not_asked_again(variant, play):
    args = {"num_turns": 2, "external_prompt_passthrough": True}
    given = {"formatters": lambda x: f"* {x['prompt']}", "external_transition": again}
    trainer = play(variant, args, **given)
    assert prompts_of(trainer, 0, 0) == ["* name 0", "* name 1"]
    assert prompts_of(trainer, 1, 1) == [f"name {k} again 1: {SAID}" for k in (0, 1)]


@pytest.mark.parametrize("passthrough", [False, True])
@BOTH
def test_a_transition_gets_five_arguments_that_are_copies(variant, passthrough, play):
    calls = []

    def destructive(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        histories = [prompt_history_per_agent, response_history_per_agent]
        calls.append(json.loads(json.dumps([prompt, agent_completions, num_agents, *histories])))
        texts = [f"{prompt} after {len(response_history_per_agent[i])}" for i in range(num_agents)]
        agent_completions.clear()
        for history in histories:
            history[0].append("rubbish")
            history[1].clear()
        return texts

    args = {"num_turns": 3, "external_prompt_passthrough": passthrough}
    given = {"external_transition": destructive, "train_dataset": ROWS[:1]}
    given["formatters"] = [lambda x, i=i: f"{i}: {x['prompt']}" for i in (0, 1)]
    trainer = play(variant, args, **given)
    a, b, mark = said(0), said(1), ["", ""] if passthrough else ["0: ", "1: "]
    prompts = [[f"{i}: name 0", f"{mark[i]}name 0 after 1"] for i in (0, 1)]
    assert calls == [
        ["name 0", [a, b], 2, [prompts[0][:1], prompts[1][:1]], [[a], [b]]],
        ["name 0", [a, b], 2, prompts, [[a, a], [b, b]]],
    ]
    assert prompts_of(trainer, 2, 1) == [f"{mark[1]}name 0 after 2"]
    assert [s.completion for s in trainer.samples] == [a, b] * 3


@BOTH
def test_an_item_without_a_prompt_has_an_empty_one_for_the_transition(variant, play):
    seen = []

    def transition(prompt, num_agents, **_):
        seen.append(prompt)
        return ["more"] * num_agents

    given = {"formatters": lambda x: x.get("prompt", x["text"])}
    rows = [{"text": "a question"}]
    trainer = play(variant, {"num_turns": 2}, external_transition=transition, train_dataset=rows, **given)
    assert seen == [""] and [s.prompt for s in trainer.samples] == ["a question"] * 2 + ["more"] * 2


BAD_PROMPTS = {  # formatters or rows -> the message
    "missing key": ({"train_dataset": [*ROWS[:1], {"text": "x"}]}, "row 1, turn 1.*'prompt'"),
    "empty": ({"train_dataset": [*ROWS[:1], {"prompt": ""}]}, "row 1, turn 1, agent 0"),
    "blank": ({"train_dataset": [*ROWS[:1], {"prompt": " \n"}]}, "row 1, turn 1, agent 0"),
    "None": ({"formatters": [lambda x: "ok", lambda x: None]}, "row 0, turn 1, agent 1"),
    "a number": ({"formatters": lambda x: x["n"]}, "row 0, turn 1, agent 0"),
    "an empty chat": ({"formatters": lambda x: []}, "row 0, turn 1, agent 0"),
    "a list of texts": ({"formatters": lambda x: ["a", "b"]}, "row 0, turn 1, agent 0"),
    "no dict": ({"train_dataset": [*ROWS[:1], "text"]}, "row 1, turn 1.*'text'"),
    "None for a row": ({"train_dataset": [*ROWS[:1], None]}, "row 1, turn 1.*None"),
    "later turn": (
        {"formatters": lambda x: "" if "_original_prompt" in x and x["n"] else "ok"},
        "row 1, turn 2, agent 0",
    ),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
@BOTH
def test_a_bad_prompt_is_refused_by_row_turn_and_agent(variant, case, make_trainer, tmp_path):
    given, message = BAD_PROMPTS[case]
    args = {"num_turns": 2, "rollout_buffer_size": 8}
    trainer = make_trainer(variant, tmp_path, args, **{"train_dataset": ROWS[:2]} | given)
    before = weights(trainer).clone()
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("bad", [None, ["one"], ["a", 2], ["a", ""], "ab", ["a", "b", "c"], {}])
@BOTH
def test_a_bad_transition_is_refused_by_row_and_turn(variant, bad, passthrough, play):
    args = {"num_turns": 2, "external_prompt_passthrough": passthrough}
    with pytest.raises(ValueError, match=r"row 0, turn 2.*external_transition"):
        play(variant, args, external_transition=lambda **_: bad)


@BOTH
def test_a_wrong_number_of_formatters_names_the_setting_that_would_fit(variant, make_trainer, tmp_path):
    with pytest.raises(ValueError, match=r"3 formatters.*num_agents=2"):
        make_trainer(variant, tmp_path, formatters=[str] * 3)
    for bad in ([], [str], [str, 1], "ab", 3):
        with pytest.raises(ValueError, match="formatters"):
            make_trainer(variant, tmp_path, formatters=bad)


# ----------------------------------------------------------------------------------------- chats

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "name 5"}]
RENDERED = "<system>Be brief.<user>name 5<assistant>"


@pytest.fixture
def chatty(tokenizer):
    """T with a chat template."""
    tok = copy.deepcopy(tokenizer)
    tok.chat_template = TEMPLATE
    return tok


@pytest.mark.parametrize("chat_template", [False, True])
def test_a_chat_is_rendered_by_the_template_wherever_it_comes_from(variant, chat_template, chatty, play):
    seen = []

    def reward_func(a, b, prompts):
        seen.append(prompts)
        return 0.5

    rows = datasets.Dataset.from_list([{"prompt": CHAT}])
    given = {"tokenizer": chatty, "reward_func": reward_func}
    args = {"chat_template": chat_template}
    for more in ({"train_dataset": rows}, {"formatters": lambda x: CHAT}):
        trainer = play(variant, args, **{"train_dataset": ROWS[:1]} | given | more)
        assert {s.prompt for s in trainer.samples} == {RENDERED}
        assert {tuple(s.prompt_ids) for s in trainer.samples} == {tuple(chatty(RENDERED).input_ids)}
        assert seen.pop() == [RENDERED] * 2


@pytest.mark.parametrize("passthrough", [False, True])
@BOTH
def test_a_transition_may_return_chats(variant, passthrough, chatty, play):
    histories = []

    def transition(prompt, agent_completions, prompt_history_per_agent, **_):
        histories.append(prompt_history_per_agent)
        turns = [{"role": "assistant", "content": text} for text in agent_completions]
        return [[*prompt, turn, {"role": "user", "content": "more"}] for turn in turns]

    args = {"num_turns": 2, "external_prompt_passthrough": passthrough}
    given = {"external_transition": transition, "tokenizer": chatty}
    trainer = play(variant, args, train_dataset=[{"prompt": CHAT}], **given)
    assert histories == [[[RENDERED]] * 2]
    for i in (0, 1):
        later = RENDERED + f"{said(i)}<user>more<assistant>"
        assert prompts_of(trainer, 1, i) == [later]


@BOTH
def test_a_chat_that_a_transition_is_handed_is_a_copy(variant, chatty, play):
    """One that appends to it in place does not change the dataset, nor the next turn."""
    rows, seen = [{"prompt": copy.deepcopy(CHAT)}], []

    def transition(prompt, num_agents, **_):
        seen.append(len(prompt))
        prompt.append({"role": "user", "content": "more"})
        prompt[0]["content"] = "Be loud."
        return [prompt] * num_agents

    args = {"num_turns": 3, "num_train_epochs": 2}
    play(variant, args, train_dataset=rows, external_transition=transition, tokenizer=chatty)
    assert rows == [{"prompt": CHAT}] and seen == [2] * 4


@pytest.mark.parametrize("passthrough", [False, True])
@BOTH
def test_with_chat_template_a_text_is_one_user_message(variant, passthrough, chatty, play):
    """The reward and the transition deal with the text itself."""
    seen = []

    def reward_func(a, b, prompts):
        seen.append(prompts)
        return 0.5

    args = {"chat_template": True, "num_turns": 2, "external_prompt_passthrough": passthrough}
    given = {"tokenizer": chatty, "reward_func": reward_func, "external_transition": again}
    trainer = play(variant, args, train_dataset=ROWS[:1], **given)
    for turn, texts in enumerate([["name 0"] * 2, [f"name 0 again {i}: {SAID}" for i in (0, 1)]]):
        own = [s for s in trainer.samples if s.turn_idx == turn]
        assert [s.prompt for s in own] == seen[turn] == texts
        wrapped = [chatty(f"<user>{text}<assistant>").input_ids for text in texts]
        assert [s.prompt_ids for s in own] == wrapped


@BOTH
def test_chat_template_kwargs_go_to_every_rendering_of_every_agents_own_template(variant, chatty, play):
    other = copy.deepcopy(chatty)
    other.chat_template = "{{ mood }}:{{ messages[-1]['content'] }}"
    given = {"tokenizer": [chatty, other], "external_transition": again}
    given |= {"model_config": {"chat_template_kwargs": {"mood": "glad"}}}
    args = {"chat_template": True, "num_turns": 2}
    trainer = play(variant, args, train_dataset=ROWS[:1], **given)
    for s in trainer.samples:
        tok = [chatty, other][s.agent_idx]
        text = [f"<user>{s.prompt}<assistant>glad", f"glad:{s.prompt}"][s.agent_idx]
        assert s.prompt_ids == tok(text).input_ids


@BOTH
def test_no_template_to_render_with_is_an_error(variant, chatty, tokenizer, make_trainer, play):
    with pytest.raises(ValueError, match=r"chat_template=True.*agents\[1\]"):
        make_trainer(variant, Path(), {"chat_template": True}, tokenizer=[chatty, tokenizer])
    with pytest.raises(ValueError, match=r"chat.template"):
        play(variant, train_dataset=[{"prompt": CHAT}])


# -------------------------------------------------------------------------------------- datasets


class Stream:
    """Rows without a length and without access by number, as a database cursor has them."""

    def __iter__(self):
        yield from ROWS


class Mapped(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return ROWS[range(6)[index]]


class Iterated(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


DATASETS = {
    "list": lambda: list(ROWS),
    "tuple": lambda: tuple(ROWS),
    "datasets.Dataset": lambda: datasets.Dataset.from_list(ROWS),
    "datasets.IterableDataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "stream": Stream,
    "numpy array": lambda: np.array(ROWS),
    "torch Dataset": Mapped,
    "torch IterableDataset": Iterated,
    "values of a dict": lambda: dict(enumerate(ROWS)).values(),
}


@pytest.mark.parametrize("kind", DATASETS)
@BOTH
def test_datasets_of_every_kind_are_read_whole_in_two_epochs(variant, kind, play):
    seen = []

    def reward_func(a, b, batch_items):
        seen.append(batch_items[0])
        return len(seen) / 10

    args = {"num_train_epochs": 2, "eval_num_samples": 3}
    given = {"train_dataset": DATASETS[kind](), "eval_dataset": DATASETS[kind]()}
    trainer = play(variant, args, reward_func=reward_func, **given)
    assert seen == 2 * ROWS and metrics(trainer)[-1]["env_step"] == 12
    assert len(metrics(trainer)) == 4  # updates: a full buffer and the rest, twice
    seen.clear()
    trainer.evaluate()
    assert seen == ROWS[:3]


@BOTH
def test_an_iterator_serves_for_one_epoch_and_nowhere_else(variant, make_trainer, play, tmp_path):
    """Evaluations and further epochs would read on where the last one stopped."""
    trainer = play(variant, train_dataset=(row for row in ROWS))
    assert metrics(trainer)[-1]["env_step"] == len(ROWS)
    for given in ({"train_dataset": iter(ROWS)}, {"eval_dataset": (row for row in ROWS)}):
        (name,) = given
        with pytest.raises(ValueError, match=f"{name} is to be read several times"):
            make_trainer(variant, tmp_path, {"num_train_epochs": 2}, **given)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@BOTH
def test_what_is_no_sequence_of_rows_is_refused(variant, name, make_trainer, tmp_path):
    columns = {"prompt": ["a", "b"]}
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)})
    for bad in (columns, splits, splits["train"].to_pandas(), 3):
        with pytest.raises(ValueError, match=name):
            make_trainer(variant, tmp_path, **{name: bad})


@pytest.mark.parametrize("empty", [list, tuple, lambda: iter(()), lambda: None])
@BOTH
def test_nothing_to_train_on_is_an_error(variant, empty, play):
    with pytest.raises(ValueError, match="train_dataset"):
        play(variant, train_dataset=empty())


# ----------------------------------------------------------------------------- callback and tasks


@BOTH
def test_a_metrics_callback_gets_an_items_samples_and_is_logged(variant, play):
    calls = []

    def metrics_callback(samples):
        for s in samples:
            calls.append((s.item["n"], s.turn_idx, s.agent_idx, s.completion, s.prompt))
        return {"n": samples[0].item["n"], "style/letters": np.float32(len(samples[0].completion))}

    given = {"metrics_callback": metrics_callback, "external_transition": again}
    args = {"num_turns": 2, "rollout_buffer_size": 4}
    trainer = play(variant, args, train_dataset=ROWS[:4], **given)
    places = [(n, t, i, said(i)) for n in range(4) for t in (0, 1) for i in (0, 1)]
    assert [call[:4] for call in calls] == places and calls[2][4] == f"name 0 again 0: {SAID}"
    assert [row["n"] for row in metrics(trainer)] == [0.5, 2.5]
    assert {row["style/letters"] for row in metrics(trainer)} == {len(said(0))}


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_a_quick_start_of_comlrl_runs_with_only_its_import_changed(file, tmp_path, monkeypatch):
    script = ROOT / "tests" / "tasks" / "quick_start.py"
    assert script.read_text().count("from maac import MAACConfig, MAACTrainer\n") == 1
    if file == "iac":
        stand_in = SimpleNamespace(MAACConfig=iac.IACConfig, MAACTrainer=iac.IACTrainer)
        monkeypatch.setitem(sys.modules, "maac", stand_in)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"{file}__")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_step"] for row in rows if "turn_1/reward_mean" in row] == [4, 8]
    assert all(0 < row["turn_1/reward_mean"] < 8 for row in rows if "turn_1/reward_mean" in row)


def test_a_task_written_for_comlrl_runs_as_it_is(variant, make_trainer, tmp_path):
    task = runpy.run_path(str(ROOT / "tests" / "tasks" / "ports.py"))
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func", "reward_processor")
    names += ("external_transition", "metrics_callback")
    args = {"num_turns": 2, "rollout_buffer_size": 6, "num_train_epochs": 2, "eval_interval": 6}
    given = {name: task[name] for name in names}
    trainer = make_trainer(variant, tmp_path, args, model="tiny_lm", **given)
    trainer.train()
    trained = [row for row in metrics(trainer) if "turn_1/reward_mean" in row]
    assert [row["env_step"] for row in trained] == [6, 12, 18, 24]
    for row in trained:
        assert row["second_turn_share"] == 0.5 and "agent_1/policy_loss" in row
        assert all(0 <= row[f"turn_{t}/reward_mean"] <= 1 for t in (1, 2))
    lines = (Path(trainer.output_dir) / "completions.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    one, two = (next(a for a in answers if a["agent"] == 1 and a["turn"] == t) for t in (1, 2))
    assert one["prompt"] == "At length. Describe the number 0."
    assert two["prompt"].startswith("At length. Describe the number 0. Agent 2, you all said:")
    assert one["completion"] in two["prompt"]
