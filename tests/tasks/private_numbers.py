"""Each of two agents is shown a number of its own and is to name it; how good a round can be depends on both numbers.

The reward is how close the answers are to the numbers, at most 1, plus a windfall that no answer changes: high where
the two numbers lie far apart, low where they are close, 0 on average. It hides the share of the reward that an answer
earned, unless the critic knows both numbers. MAAC's critic does, and subtracts the windfall; IAC's sees one prompt,
from which it can hardly be guessed (14 per cent of its variance), so that it stays in the advantages as noise.

The prompts are those that tests/tiny_lm knows ("sum to 7"), which it at first answers with any
number from 0 to the one that it is shown.
"""

import random
import re
import statistics

WINDFALL = 1.5  # its standard deviation; that of the rest of the reward is about 0.2 at the beginning
PAIRS = [(a, b) for a in range(10) for b in range(10)]
MEAN = statistics.fmean((a - b) ** 2 for a, b in PAIRS)
SCALE = WINDFALL / statistics.pstdev((a - b) ** 2 for a, b in PAIRS)

eval_dataset = [{"numbers": list(pair)} for pair in PAIRS]
train_dataset = [{"numbers": list(pair)} for pair in random.Random(0).choices(PAIRS, k=1600)]
formatters = [lambda item, i=i: f"agent {i + 1} of 2: sum to {item['numbers'][i]} =" for i in range(2)]


def closeness(text, number):
    answer = re.search(r"\d{1,4}", text)
    return max(0.0, 1 - abs(int(answer[0]) - number) / 5) if answer else 0.0


def windfall(numbers):
    return SCALE * ((numbers[0] - numbers[1]) ** 2 - MEAN)


def reward_func(first, second, batch_items):
    a, b = batch_items[0]["numbers"]
    return [(closeness(x, a) + closeness(y, b)) / 2 + windfall((a, b)) for x, y in zip(first, second, strict=True)]


def metrics_callback(samples):
    """Of an item: the reward without the windfall, and squared advantages to get their variance from."""
    earned = [s.reward - windfall(s.item["numbers"]) for s in samples]
    return {
        "earned": statistics.fmean(earned),
        "advantage_square": statistics.fmean(s.advantage**2 for s in samples),
    }
