"""The example tasks: their rewards on numbers worked out by hand, and that the algorithms accept them."""

import runpy
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture(scope="module")
def tldr():
    return SimpleNamespace(**runpy.run_path(str(TASKS / "tldr.py")))


@pytest.fixture(scope="module")
def private():
    return SimpleNamespace(**runpy.run_path(str(TASKS / "private_numbers.py")))


# ---------------------------------------------------------------------------------------------------------- tldr.py


@pytest.mark.parametrize(
    ("lengths", "points"),
    [
        ((8, 8), 0.5),
        ((256, 256), 0.5),
        ((7, 20), None),
        ((20, 7), None),
        ((257, 20), None),
        ((20, 257), None),
    ],
)
def test_structure(tldr, lengths, points):
    assert tldr.structure_points(lengths) == points


@pytest.mark.parametrize(
    ("ratio", "points"),
    [
        (1.09, None),
        (1.1, 0),
        (1.35, 0.5),
        (1.59, 0.98),
        (1.6, 1),
        (2, 1),
        (3.2, 1),
        (4.1, 0.5),
        (5, 0),
        (5.01, None),
    ],
)
def test_length_ratio(tldr, ratio, points):
    assert tldr.length_points(ratio) == (points if points is None else pytest.approx(points, abs=1e-9))


@pytest.mark.parametrize(("ratio", "points"), [(1.29, None), (1.3, 0), (1.65, 0.25), (1.99, 0.493), (2, 0.5), (9, 0.5)])
def test_vocabulary(tldr, ratio, points):
    assert tldr.vocabulary_points(ratio) == (points if points is None else pytest.approx(points, abs=1e-3))


@pytest.mark.parametrize(
    ("kinds", "similarity", "points"),
    [
        *((0, 0, 0), (1, 0, 0.16), (2, 0, 0.18), (12, 0, 0.38), (13, 0, 0.4), (20, 0, 0.4)),
        *((0, 0.03, 0.6), (0, 0.5, 0.6), (0, 0.015, 0.3), (3, 0.01, 0.4)),
    ],
)
def test_style(tldr, kinds, similarity, points):
    assert tldr.style_points(kinds, similarity) == pytest.approx(points)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", 0),
        (
            "Some also-rans thuswise, whilst sifting butter yeti.",
            1,
        ),  # also; not so, thus, while, if, but, yet
        ("He was someone of note", 0),
        ("So, he left.", 1),
        ("Because so therefore", 1),  # one kind
        ("BECAUSE he left. However, for example, if so", 4),
        ("for  example", 0),
        (
            "In addition; such as; that is; thus; but; then; indeed; overall; likewise; though; unless; until",
            12,
        ),
    ],
)
def test_transition_words_are_whole_words(tldr, text, kinds):
    assert tldr.transition_kinds(text) == kinds


def test_there_are_twelve_kinds_and_none_shares_a_word(tldr):
    listed = [word for kind in tldr.TRANSITIONS.values() for word in kind.split("|")]
    assert len(tldr.TRANSITIONS) == 12 and len(listed) == len(set(listed))


def test_jaccard_ignores_stop_words_case_and_punctuation(tldr):
    assert tldr.jaccard("The red house, and it is", "a RED dog. is the") == pytest.approx(1 / 3)
    assert tldr.jaccard("the and it", "the and it") == 0
    assert tldr.jaccard("Don't stop", "don't") == pytest.approx(1 / 2)


EIGHT = "alpha beta gamma delta alpha beta gamma delta"  # 45 characters, 8 words, 4 distinct


@pytest.mark.parametrize(
    ("concise", "detailed", "levels"),
    [
        ("alpha beta", EIGHT, []),
        (EIGHT, EIGHT, [0.5]),  # length ratio 1
        (EIGHT, f"{EIGHT} {EIGHT}", [0.5, 1]),  # 91 / 45 characters, and no new word
        # 8 distinct words for 4, 4 in common of 8, "because" and "then"
        (EIGHT, f"{EIGHT} because then zeta omega {EIGHT}", [0.5, 1, 0.5, 0.4 * 0.45 + 0.6]),
        # 6 for 4: (1.5 - 1.3) / 0.7 / 2; one kind
        (EIGHT, f"{EIGHT} because zeta {EIGHT}", [0.5, 1, 1 / 7, 0.4 * 0.4 + 0.6]),
        (
            EIGHT,
            "one two three four five six seven eight " * 2,
            [0.5, 1, 0.5, 0],
        ),  # 80 / 45, nothing in common
    ],
)
def test_levels_stop_where_one_is_missed(tldr, concise, detailed, levels):
    assert tldr.levels(concise, detailed) == pytest.approx(levels)
    assert tldr.reward_func([concise, ""], [detailed, detailed]) == pytest.approx([sum(levels), 0])


def test_the_most_there_is(tldr):
    concise = "my neighbour plays drums all night without end"  # 8 words, 46 characters
    detailed = "neighbour " + " ".join(kind.split("|")[0] for kind in tldr.TRANSITIONS.values())  # all twelve kinds
    assert tldr.levels(concise, detailed) == pytest.approx([0.5, 1, 0.5, 0.4 * 0.95 + 0.6])


def test_posts_and_metrics(tldr):
    posts = [row["prompt"] for row in tldr.train_dataset + tldr.eval_dataset]
    assert len(tldr.train_dataset) == 32 and len(tldr.eval_dataset) == 48 and len(set(posts)) == 48
    assert not {row["prompt"] for row in tldr.train_dataset} & {row["prompt"] for row in tldr.eval_dataset}
    assert all(40 <= len(post.split()) <= 90 for post in posts)
    assert len({formatter(tldr.train_dataset[0]) for formatter in tldr.formatters}) == 2
    answers = [EIGHT, "x", f"{EIGHT} because then zeta omega {EIGHT}", EIGHT]
    samples = [SimpleNamespace(agent_idx=k // 2, completion=text) for k, text in enumerate(answers)]
    metrics = tldr.metrics_callback(samples)  # two joint answers, the second one without points
    levels = [metrics[f"tldr/{name}"] for name in ("structure", "length", "vocabulary", "style")]
    assert levels == pytest.approx([0.25, 0.5, 0.25, 0.39]) and metrics["tldr/words_1"] == 4.5
    assert sum(levels) == pytest.approx(sum(tldr.reward_func(answers[:2], answers[2:])) / 2)


# ------------------------------------------------------------------------------------------------ private_numbers.py


@pytest.mark.parametrize(
    ("text", "number", "points"),
    [
        ("7", 7, 1),
        (" 7 or 3", 7, 1),
        ("5", 7, 0.6),
        ("9", 7, 0.6),
        ("1", 7, 0),
        ("12", 7, 0),
        ("", 0, 0),
        ("?", 3, 0),
    ],
)
def test_closeness(private, text, number, points):
    assert private.closeness(text, number) == pytest.approx(points)


def test_windfall(private):
    """Mean 0, the deviation it promises, and hardly to be guessed from one number."""
    values = {pair: private.windfall(pair) for pair in private.PAIRS}
    assert statistics.fmean(values.values()) == pytest.approx(0)
    assert statistics.pstdev(values.values()) == pytest.approx(private.WINDFALL)
    # the mean squared difference of two digits is 16.5; a pair of equal numbers is that far below it
    assert values[3, 3] == pytest.approx(-16.5 * private.SCALE) and values[0, 9] == pytest.approx(64.5 * private.SCALE)
    guesses = [statistics.fmean(values[own, other] for other in range(10)) for own in range(10)]
    assert statistics.pvariance(guesses) / private.WINDFALL**2 == pytest.approx(0.14, abs=0.005)


def test_each_agent_is_shown_its_own_number_only(private):
    prompts = [formatter({"numbers": [3, 8]}) for formatter in private.formatters]
    assert prompts == ["agent 1 of 2: sum to 3 =", "agent 2 of 2: sum to 8 ="]
    assert sorted(map(tuple, (item["numbers"] for item in private.eval_dataset))) == private.PAIRS


def test_private_reward_and_metrics(private):
    item = {"numbers": [3, 3]}
    rewards = private.reward_func(["3", "1"], ["3", "4"], batch_items=[item])
    assert rewards == pytest.approx([1 - 16.5 * private.SCALE, 0.7 - 16.5 * private.SCALE])
    samples = [SimpleNamespace(item=item, reward=r, advantage=a) for r, a in zip(rewards, (2, -1), strict=True)]
    assert private.metrics_callback(samples) == pytest.approx({"earned": 0.85, "advantage_square": 2.5})
