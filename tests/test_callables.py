"""The user's functions and data: rewards in every form, formatters, transitions, callbacks, datasets; whole tasks."""

import json
import runpy
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from commands import ENV, run
from library_models import MODULES, ROOT, ROWS, VARIANTS, build, collected, metrics, rig


def answer(i: int, k: int) -> str:
    """What agent i says in the k-th place of a batch, when generation is rigged."""
    return f"{'ab'[i % 2]}{i} says {k}"


# -------------------------------------------------------------------------------------------- rewards: how called


SEEN: list[dict] = []  # what the reward functions below were given


def note(**seen) -> float:
    SEEN.append(seen)
    return 0.25 * len(SEEN)


class Callable:
    def __call__(self, a, b, prompts=None):
        return note(a=a, b=b, prompts=prompts)

    def method(self, a, b, *, batch_items):
        return note(a=a, b=b, batch_items=batch_items)


def plain(a, b):
    return note(a=a, b=b)


def batch_items_last(a, b, batch_items):
    return note(a=a, b=b, batch_items=batch_items)


def batch_items_default(a, b, batch_items=None):
    return note(a=a, b=b, batch_items=batch_items)


def batch_items_between(a, batch_items, b):
    return note(a=a, b=b, batch_items=batch_items)


def both_after_another_default(a, b, scale=2.0, batch_items=None, prompts=None):
    return note(a=a, b=b, batch_items=batch_items, prompts=prompts, scale=scale)


def keyword_only(a, b, *, prompts, batch_items=None):
    return note(a=a, b=b, prompts=prompts, batch_items=batch_items)


def keywords(a, b, **kwargs):
    return note(
        a=a, b=b, prompts=kwargs.pop("prompts"), batch_items=kwargs.pop("batch_items"), rest=kwargs
    )


def prompts_first(prompts, a, b):
    return note(a=a, b=b, prompts=prompts)


def prompts_first_by_another_name(questions, a, b):
    return note(a=a, b=b, prompts=questions)


def starred(*completions, prompts=None):
    return note(a=completions[0], b=completions[1], prompts=prompts)


def starred_with_keywords(*completions, **kwargs):
    return keywords(*completions, **kwargs)


def list_of_lists(completions):
    return note(a=completions[0], b=completions[1])


def list_of_lists_and_items(completions, batch_items):
    return note(a=completions[0], b=completions[1], batch_items=batch_items)


def defaults_left_alone(a, b, weight=0.5, *, words=("x",)):
    return note(a=a, b=b, weight=weight, words=words)


def three(weight, a, b, batch_items):
    return note(a=a, b=b, batch_items=batch_items, weight=weight)


FORMS = [
    plain,
    batch_items_last,
    batch_items_default,
    batch_items_between,
    both_after_another_default,
    keyword_only,
]
FORMS += [
    keywords,
    prompts_first,
    prompts_first_by_another_name,
    starred,
    starred_with_keywords,
    list_of_lists,
]
FORMS += [
    list_of_lists_and_items,
    defaults_left_alone,
    Callable(),
    Callable().method,
    partial(three, 0.5),
]
FORMS += [partial(defaults_left_alone, weight=0.5), partial(keyword_only), lambda a, b: plain(a, b)]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: getattr(f, "__name__", type(f).__name__))
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_reward_is_called_as_its_signature_asks(variant, form, tmp_path, monkeypatch):
    SEEN.clear()
    formatters = [lambda x: f"first {x['prompt']}", lambda x: f"second {x['prompt']}"]
    args = {"num_generations": 2, "rollout_buffer_size": 6}
    given = {"formatters": formatters, "reward_func": form, "train_dataset": ROWS[:3]}
    trainer = build(variant, tmp_path / "run", args, **given)
    rig(monkeypatch, trainer, answer)
    samples = collected(trainer)
    trainer.train()
    assert len(SEEN) == 3  # once per item
    for k, seen in enumerate(SEEN):
        expected = {"prompts": [f"first name {k}", f"second name {k}"], "batch_items": [ROWS[k]]}
        expected |= {
            "a": [answer(0, 2 * k), answer(0, 2 * k + 1)],
            "b": [answer(1, 2 * k), answer(1, 2 * k + 1)],
        }
        expected |= {"weight": 0.5, "words": ("x",), "scale": 2.0, "rest": {}}
        assert seen == {name: expected[name] for name in seen} and type(seen["a"]) is list
        assert [s.reward for s in samples if s.row == k] == [0.25 * (k + 1)] * 4


@pytest.mark.parametrize("num_agents", [1, 3])
def test_one_positional_parameter_is_all_agents_unless_there_is_one_agent(
    num_agents, tmp_path, monkeypatch
):
    seen = []
    trainer = build(
        "maac",
        tmp_path,
        {"num_agents": num_agents},
        reward_func=lambda texts: seen.append(texts) or 1.0,
    )
    rig(monkeypatch, trainer, answer)
    trainer.train()
    own = [[answer(i, 0)] for i in range(num_agents)]
    assert seen[0] == (own[0] if num_agents == 1 else own)


def test_an_error_of_the_users_own_is_neither_hidden_nor_retried(tmp_path):
    calls = []

    def reward_func(a, b, batch_items):
        calls.append(batch_items)
        raise TypeError(
            "reward_func() got an unexpected keyword argument 'batch_items'"
        )  # looks like a wrong call

    trainer = build("iac", tmp_path, reward_func=reward_func)
    with pytest.raises(TypeError, match="unexpected keyword"):
        trainer.train()
    assert calls == [[ROWS[0]]]


# ------------------------------------------------------------------------------------- rewards: what they return


MATRIX = [[0.25, 0.5, 1.0], [2.0, 4.0, 8.0]]  # 2 agents x 3 joint answers
RETURNS = {
    "number": (0.5, [[0.5] * 3] * 2),
    "integer": (1, [[1.0] * 3] * 2),
    "numpy scalar": (np.float32(0.5), [[0.5] * 3] * 2),
    "tensor scalar": (torch.tensor(0.5), [[0.5] * 3] * 2),
    "per generation": (MATRIX[1], [MATRIX[1]] * 2),
    "booleans": ([True, False, True], [[1.0, 0.0, 1.0]] * 2),
    "per generation, tuple": (tuple(MATRIX[1]), [MATRIX[1]] * 2),
    "per generation, array": (np.array(MATRIX[1]), [MATRIX[1]] * 2),
    "per generation, tensors in a list": ([torch.tensor(x) for x in MATRIX[1]], [MATRIX[1]] * 2),
    "per generation, bfloat16": (torch.tensor(MATRIX[1], dtype=torch.bfloat16), [MATRIX[1]] * 2),
    "per generation, with gradient": (torch.tensor(MATRIX[1], requires_grad=True), [MATRIX[1]] * 2),
    "per agent": ([0.25, 2.0], [[0.25] * 3, [2.0] * 3]),
    "per agent, array": (np.array([0.25, 2.0]), [[0.25] * 3, [2.0] * 3]),
    "matrix": (MATRIX, MATRIX),
    "matrix, tuples": (tuple(map(tuple, MATRIX)), MATRIX),
    "matrix, arrays in a list": ([np.array(row) for row in MATRIX], MATRIX),
    "matrix, array": (np.array(MATRIX, dtype=np.float16), MATRIX),
    "matrix, tensor": (torch.tensor(MATRIX), MATRIX),
}


@pytest.mark.parametrize("form", RETURNS)
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_reward_is_read_in_every_form(variant, form, tmp_path):
    raw, expected = RETURNS[form]
    args = {"num_generations": 3, "rollout_buffer_size": 6}
    trainer = build(variant, tmp_path, args, reward_func=lambda a, b: raw, train_dataset=ROWS[:2])
    samples = collected(trainer)
    trainer.train()
    assert [s.reward for s in samples] == 2 * (expected[0] + expected[1])
    assert [(s.agent_idx, s.generation_idx) for s in samples] == 2 * [
        (i, g) for i in (0, 1) for g in (0, 1, 2)
    ]
    assert all(s.target == s.reward for s in samples)
    for i in (0, 1):
        assert metrics(trainer)[0][f"agent_{i}/reward_mean"] == pytest.approx(sum(expected[i]) / 3)
    assert metrics(trainer)[0]["turn_1/reward_mean"] == pytest.approx(sum(map(sum, expected)) / 6)


def test_a_flat_list_is_per_generation_first(tmp_path):
    trainer = build("maac", tmp_path, {"num_generations": 2}, reward_func=lambda a, b: [1.0, 3.0])
    samples = collected(trainer)
    trainer.train()
    assert {(s.generation_idx, s.reward) for s in samples} == {(0, 1.0), (1, 3.0)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reward_processor_is_applied_to_every_reward(variant, tmp_path):
    seen = []

    def reward_processor(reward):
        seen.append(reward)
        return 10 * reward - 1

    args = {"num_generations": 2, "eval_interval": 0}
    given = {
        "reward_func": lambda a, b: [[0.5, 1.0], [1.5, 2.0]],
        "reward_processor": reward_processor,
    }
    trainer = build(variant, tmp_path, args, **given, train_dataset=ROWS[:2])
    samples = collected(trainer)
    trainer.train()
    assert seen == [0.5, 1.0, 1.5, 2.0] * 2 and all(type(reward) is float for reward in seen)
    assert [s.reward for s in samples] == [s.target for s in samples] == [4.0, 9.0, 14.0, 19.0] * 2
    assert metrics(trainer)[-1]["turn_1/reward_mean"] == 11.5


# ------------------------------------------------------------------------------------------ formatters and turns


def upper(item, external_prompts=None):
    """A formatter that is told of the transition's prompts, and uses them."""
    return f"{item['prompt']} | {external_prompts}"


def play(variant, path, monkeypatch, **given):
    """Two turns of two items with rigged answers; the samples."""
    args = {"num_turns": 2, "rollout_buffer_size": 4} | given.pop("args", {})
    given = {"external_transition": transition, "train_dataset": ROWS[:2]} | given
    trainer = build(variant, path, args, **given)
    rig(monkeypatch, trainer, answer)
    samples = collected(trainer)
    trainer.train()
    return trainer, samples


def transition(
    prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent
):
    return [f"{prompt} again {i}: {' + '.join(agent_completions)}" for i in range(num_agents)]


def prompts_of(samples, turn: int, i: int) -> list[str]:
    return [s.prompt for s in samples if s.turn_idx == turn and s.agent_idx == i]


@pytest.mark.parametrize("variant", VARIANTS)
def test_formatters_one_for_all_or_one_for_each_or_none(variant, tmp_path):
    one, each = (lambda x: f"<{x['prompt']}>"), [lambda x, i=i: f"{i} {x['n']}" for i in (0, 1)]
    for number, (formatters, expected) in enumerate(
        [
            (None, ["name 1", "name 1"]),
            (one, ["<name 1>"] * 2),
            (each, ["0 1", "1 1"]),
            (tuple(each), ["0 1", "1 1"]),
        ]
    ):
        trainer = build(
            variant, tmp_path / str(number), formatters=formatters, train_dataset=ROWS[1:2]
        )
        samples = collected(trainer)
        trainer.train()
        assert [s.prompt for s in samples] == expected


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_the_transitions_prompts_replace_the_items_prompt(variant, tmp_path, monkeypatch):
    formatters = [lambda x: f"{x['n']}: {x['prompt']} [{x.get('_original_prompt')}]", upper]
    rewarded = []

    def reward_func(a, b, prompts, batch_items):
        rewarded.append((prompts, batch_items))
        return 1.0

    trainer, samples = play(
        variant, tmp_path, monkeypatch, formatters=formatters, reward_func=reward_func
    )
    said = [f"{answer(0, k)} + {answer(1, k)}" for k in (0, 1)]
    assert prompts_of(samples, 0, 0) == ["0: name 0 [None]", "1: name 1 [None]"]
    assert prompts_of(samples, 0, 1) == ["name 0 | None", "name 1 | None"]
    assert prompts_of(samples, 1, 0) == [
        f"{k}: name {k} again 0: {said[k]} [name {k}]" for k in (0, 1)
    ]
    own = [f"name {k} again 1: {said[k]}" for k in (0, 1)]
    assert prompts_of(samples, 1, 1) == [f"{text} | {text}" for text in own]
    assert rewarded[2][0] == [
        prompts_of(samples, 1, 0)[0],
        prompts_of(samples, 1, 1)[0],
    ]  # row 0, turn 2
    assert [{"prompt": f"name {n}", "n": n} for n in range(8)] == ROWS  # the dataset is as it was


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_with_passthrough_the_formatter_is_not_asked_again(variant, tmp_path, monkeypatch):
    args = {"external_prompt_passthrough": True}
    trainer, samples = play(
        variant, tmp_path, monkeypatch, formatters=lambda x: f"* {x['prompt']}", args=args
    )
    assert prompts_of(samples, 0, 0) == ["* name 0", "* name 1"]
    assert prompts_of(samples, 1, 1) == [
        f"name {k} again 1: {answer(0, k)} + {answer(1, k)}" for k in (0, 1)
    ]


@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_transition_gets_five_arguments_that_are_copies(
    variant, passthrough, tmp_path, monkeypatch
):
    calls = []

    def destructive(
        prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent
    ):
        histories = [prompt_history_per_agent, response_history_per_agent]
        calls.append(json.loads(json.dumps([prompt, agent_completions, num_agents, *histories])))
        texts = [f"{prompt} after {len(response_history_per_agent[i])}" for i in range(num_agents)]
        agent_completions.clear()
        for history in histories:
            history[0].append("rubbish")
            history[1].clear()
        return texts

    args = {"num_turns": 3, "external_prompt_passthrough": passthrough}
    given = {"external_transition": destructive, "train_dataset": ROWS[:1], "args": args}
    given["formatters"] = [lambda x, i=i: f"{i}: {x['prompt']}" for i in (0, 1)]
    _, samples = play(variant, tmp_path / "run", monkeypatch, **given)
    a, b, mark = answer(0, 0), answer(1, 0), ["", ""] if passthrough else ["0: ", "1: "]
    prompts = [[f"{i}: name 0", f"{mark[i]}name 0 after 1"] for i in (0, 1)]
    assert calls == [
        ["name 0", [a, b], 2, [prompts[0][:1], prompts[1][:1]], [[a], [b]]],
        ["name 0", [a, b], 2, prompts, [[a, a], [b, b]]],
    ]
    assert prompts_of(samples, 2, 1) == [f"{mark[1]}name 0 after 2"]
    assert [s.completion for s in samples] == [a, b] * 3


# -------------------------------------------------------------------------------- early termination and callbacks


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_episode_ends_after_a_turn_above_the_threshold(variant, tmp_path):
    """Even rows get more than the threshold, row 1 and 5 just the threshold, row 3 and 7 have agents that differ."""
    rewarded = []

    def reward_func(a, b, batch_items):
        n = batch_items[0]["n"]
        rewarded.append(n)
        return 0.75 if n % 2 == 0 else 0.5 if n % 4 == 1 else [0.0, 0.9]

    args = {
        "num_turns": 3,
        "early_termination_threshold": 0.5,
        "discount": 0.5,
        "rollout_buffer_size": 8,
    }
    trainer = build(
        variant, tmp_path, args, reward_func=reward_func, external_transition=transition
    )
    samples = collected(trainer)
    trainer.train()
    turns = {n: sorted({s.turn_idx for s in samples if s.row == n}) for n in range(8)}
    assert turns == {n: [0] if n % 2 == 0 else [0, 1, 2] for n in range(8)}
    assert sorted(rewarded) == sorted([0, 2, 4, 6] + [1, 3, 5, 7] * 3)
    assert metrics(trainer)[-1]["env_step"] == 16
    for s in samples:
        after = [
            x
            for x in samples
            if (x.row, x.agent_idx, x.turn_idx) == (s.row, s.agent_idx, s.turn_idx + 1)
        ]
        assert s.target == pytest.approx(s.reward + sum(0.5 * x.old_value for x in after))
        assert s.advantage == pytest.approx(s.target - s.old_value)


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_the_threshold_reads_the_processed_reward_before_the_kl_penalty(variant, tmp_path):
    args = {
        "num_turns": 2,
        "early_termination_threshold": 5.0,
        "reference_kl_enabled": True,
        "reference_kl_coef": 50.0,
    }
    given = {"reward_func": lambda a, b: 1.0, "external_transition": transition}
    for factor, turns in ((6, {0}), (4, {0, 1})):
        trainer = build(
            variant,
            tmp_path / str(factor),
            args,
            reward_processor=lambda r, f=factor: f * r,
            **given,
        )
        for parameter in trainer.references[0].parameters():
            parameter.data.mul_(1.5)
        samples = collected(trainer)
        trainer.train()
        assert any(abs(s.reference_kl) > 0.1 for s in samples)
        assert {s.turn_idx for s in samples} == turns


@pytest.mark.parametrize("variant", VARIANTS)
def test_metrics_callback_gets_an_items_samples_and_is_logged(variant, tmp_path):
    calls = []

    def metrics_callback(samples):
        calls.append(
            [
                (s.agent_idx, s.turn_idx, s.generation_idx, s.item["n"], s.completion)
                for s in samples
            ]
        )
        return {
            "n": samples[0].item["n"],
            "style/letters": np.float32(sum(len(s.completion) for s in samples)),
        }

    args = {
        "eval_interval": 4,
        "eval_num_samples": 2,
        "num_generations": 2,
        "rollout_buffer_size": 8,
    }
    trainer = build(
        variant, tmp_path, args, metrics_callback=metrics_callback, eval_dataset=ROWS[4:]
    )
    trainer.train()
    rows = metrics(trainer)
    assert [row["n"] for row in rows if "n" in row] == [1.5, 5.5]  # rows 0 to 3, rows 4 to 7
    assert [row["eval/n"] for row in rows if "eval/n" in row] == [4.5] * 3
    letters = [sum(len(text) for *_, text in call) for call in calls[2:6]]
    assert next(row["style/letters"] for row in rows if "n" in row) == pytest.approx(
        sum(letters) / 4
    )
    assert [c[:4] for c in calls[2]] == [(i, 0, g, 0) for i in (0, 1) for g in (0, 1)]


# -------------------------------------------------------------------------------------------------------- datasets


class Stream:
    """As a database cursor or an open file would be: rows, but no length and no access by number."""

    def __iter__(self):
        yield from ROWS[:6]


class Mapped(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return ROWS[range(6)[index]]


class Iterated(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS[:6])


DATASETS = {
    "list": lambda: ROWS[:6],
    "tuple": lambda: tuple(ROWS[:6]),
    "datasets.Dataset": lambda: datasets.Dataset.from_list(ROWS[:6]),
    "datasets.IterableDataset": lambda: datasets.IterableDataset.from_generator(
        lambda: iter(ROWS[:6])
    ),
    "Dataset.to_iterable_dataset": lambda: datasets.Dataset.from_list(
        ROWS[:6]
    ).to_iterable_dataset(),
    "stream": Stream,
    "numpy array": lambda: np.array(ROWS[:6]),
    "torch Dataset": Mapped,
    "torch IterableDataset": Iterated,
}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_datasets_of_every_kind_are_read_whole_in_two_epochs(variant, kind, tmp_path):
    seen = []

    def reward_func(a, b, batch_items):
        seen.append(batch_items[0])
        return len(a[0]) / 10

    args = {"num_train_epochs": 2, "eval_num_samples": 3, "eval_interval": 0}
    given = {"train_dataset": DATASETS[kind](), "eval_dataset": DATASETS[kind]()}
    trainer = build(variant, tmp_path, args, reward_func=reward_func, **given)
    trainer.train()
    assert seen == 2 * ROWS[:6] and metrics(trainer)[-1]["env_step"] == 12
    assert len(metrics(trainer)) == 4  # updates: a full buffer and the rest, twice
    seen.clear()
    trainer.evaluate()
    assert seen == ROWS[:3]


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_a_generator_serves_for_one_epoch_and_nowhere_else(variant, tmp_path):
    """Evaluations and further epochs would read on where the last one stopped."""
    trainer = build(variant, tmp_path / "one", train_dataset=(row for row in ROWS))
    trainer.train()
    assert metrics(trainer)[-1]["env_step"] == len(ROWS)
    with pytest.raises(ValueError, match="train_dataset is to be read several times"):
        build(
            variant, tmp_path / "two", {"num_train_epochs": 2}, train_dataset=(row for row in ROWS)
        )
    with pytest.raises(ValueError, match="eval_dataset is to be read several times"):
        build(variant, tmp_path / "two", eval_dataset=iter(ROWS))


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_a_reward_function_without_a_signature_gets_the_agents_answers(variant):
    assert MODULES[variant].call_reward(max, [["a"], ["b"]], ["prompt", "prompt"], {}) == ["b"]


# ----------------------------------------------------------------------------------------------------- whole tasks


@pytest.mark.parametrize("file", ["maac", "iac"])
def test_the_quick_start_runs_with_only_its_import_line_changed(file, tmp_path):
    code = (ROOT / "tests" / "tasks" / "quick_start.py").read_text()
    line = "from maac import MAACConfig, MAACTrainer\n"
    assert code.count(line) == 1
    (tmp_path / "tiny_lm").symlink_to(ROOT / "tests" / "tiny_lm")
    (tmp_path / "tasks").mkdir()
    if file == "iac":
        code = code.replace(
            line, "from iac import IACConfig as MAACConfig, IACTrainer as MAACTrainer\n"
        )
    (tmp_path / "tasks" / "quick_start.py").write_text(code)
    done = run(
        tmp_path / "tasks" / "quick_start.py", cwd=tmp_path, env=ENV | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_step"] for row in rows if "turn_1/reward_mean" in row] == [4, 8]
    assert all(0 < row["turn_1/reward_mean"] < 8 for row in rows)


@pytest.mark.parametrize("file", ["iac", "maac"])
def test_the_ports_run_from_the_command_line(file, tmp_path):
    flags = "--num-turns 2 --max-new-tokens 4 --rollout-buffer-size 6 --num-train-epochs 2 --eval-interval 6"
    task = [
        "--task",
        str(ROOT / "tests" / "tasks" / "ports.py"),
        "--output-dir",
        str(tmp_path / "run"),
    ]
    done = run(ROOT / f"{file}.py", *task, *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if "turn_1/reward_mean" in row]
    assert [row["env_step"] for row in trained] == [6, 12, 18, 24]
    assert all(row["second_turn_share"] == 0.5 and "agent_1/policy_loss" in row for row in trained)
    assert all(0 <= row[f"turn_{t}/reward_mean"] <= 1 for row in trained for t in (1, 2))
    answers = [
        json.loads(line)
        for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    ]
    task = runpy.run_path(task[1])
    one, two = (next(a for a in answers if a["agent"] == 1 and a["turn"] == t) for t in (1, 2))
    assert one["prompt"] == "At length. Describe the number 0."
    assert two["prompt"].startswith("At length. Describe the number 0. Agent 2, you all said:")
    assert one["completion"] in two["prompt"]
