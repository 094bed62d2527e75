"""Two agents summarise a post, unseen by each other: agent 1 briefly, agent 2 at length.

The writing task of the work on LLM collaboration (arXiv 2508.04652, 2601.21972). The reward adds up four levels, at
most 3.0 points, and stops at the first one that is missed:

    structure   0.5   both answers have 8 to 256 words, else the total is 0
    length      1.0   the second answer has 1.6 to 3.2 times the characters of the first; less outside, down to 0 at
                      1.1 and 5.0; beyond them stop
    vocabulary  0.5   it has at least 2 times as many distinct words; less below, down to 0 at 1.3; below stop
    style       1.0   0.4 for transition words in it (because, however, for example, ...), the more kinds the better,
                      and 0.6 for words in common, without stop words: Jaccard similarity of 0.03 is enough

Transition words count as whole words only: the "so" in "some" is none. The posts are our own; with the environment
variable TLDR_DATASET=trl-lib/tldr those of that dataset are taken from the hub.
"""

import os
import re
from pathlib import Path

TRANSITIONS = {
    "elaboration": "additionally|also|besides|furthermore|in addition|moreover",
    "examples": "for example|for instance|including|namely|such as",
    "explanation": "in other words|specifically|that is|that means|this means",
    "cause and effect": "as a result|because|consequently|due to|hence|since|so|therefore|thus",
    "contrast": "but|however|in contrast|instead|on the other hand|unlike|whereas|yet",
    "sequence": "finally|first|firstly|lastly|next|second|secondly|then|third",
    "emphasis": "above all|certainly|clearly|especially|in fact|indeed|particularly",
    "summary": "in conclusion|in short|in summary|overall|to conclude|to sum up|to summarize",
    "comparison": "as well as|compared to|in the same way|just as|likewise|similarly",
    "concession": "although|despite|even though|in spite of|nevertheless|nonetheless|though",
    "condition": "as long as|if|in case|otherwise|provided that|unless",
    "time": "after|afterwards|as soon as|before|during|later|meanwhile|until|when|while",
}
STOP_WORDS = """
    a about after again all also am an and any are as at be because been before being but by can could did do does for
    from had has have he her here hers him his how i if in into is it its just me more most my no nor not now of off on
    once only or other our out over own she should so some such than that the their them then there these they this
    those through to too under until up very was we were what when where which while who whom why will with would you
    your
"""


def words(text):
    return set(re.findall(r"\w+(?:['\u2019]\w+)*", text.lower()))


def transition_kinds(text):
    """How many of the kinds of transition words occur in a text."""
    return sum(bool(re.search(rf"\b(?:{kind})\b", text.lower())) for kind in TRANSITIONS.values())


def jaccard(a, b):
    a, b = words(a) - words(STOP_WORDS), words(b) - words(STOP_WORDS)
    return len(a & b) / len(a | b) if a | b else 0.0


def structure_points(lengths):
    return 0.5 if all(8 <= length <= 256 for length in lengths) else None


def length_points(ratio):
    if 1.1 <= ratio < 1.6:
        return (ratio - 1.1) / 0.5
    if 3.2 < ratio <= 5.0:
        return 1 - (ratio - 3.2) / 1.8
    return 1.0 if 1.6 <= ratio <= 3.2 else None


def vocabulary_points(ratio):
    return min(0.5, 0.5 * (ratio - 1.3) / 0.7) if ratio >= 1.3 else None


def style_points(kinds, similarity):
    transitions = min(1.0, 0.4 + min(0.05 * (kinds - 1), 0.6)) if kinds else 0.0
    return 0.4 * transitions + 0.6 * min(similarity, 0.03) / 0.03


def levels(concise, detailed):
    """Points of the levels that were reached; a level that is missed and those behind it are left out."""
    points = [structure_points([len(text.split()) for text in (concise, detailed)])]
    if points[-1] is not None:
        points.append(length_points(len(detailed) / len(concise)))
    if points[-1] is not None:
        points.append(vocabulary_points(len(words(detailed)) / max(1, len(words(concise)))))
    if points[-1] is not None:
        points.append(style_points(transition_kinds(detailed), jaccard(concise, detailed)))
    return [value for value in points if value is not None]


def reward_func(concise, detailed):
    return [sum(levels(*joint)) for joint in zip(concise, detailed, strict=True)]


def metrics_callback(samples):
    """The levels, and what they are made of, averaged over the joint answers to a post."""
    texts = [[s.completion for s in samples if s.agent_idx == i] for i in (0, 1)]
    rows = []
    for concise, detailed in zip(*texts, strict=True):
        points = [*levels(concise, detailed), 0, 0, 0, 0][:4]
        ratios = [
            len(detailed) / max(1, len(concise)),
            len(words(detailed)) / max(1, len(words(concise))),
        ]
        lengths, style = [len(concise.split()), len(detailed.split())], [transition_kinds(detailed)]
        rows.append([*points, *lengths, *ratios, *style, jaccard(concise, detailed)])
    names = "structure length vocabulary style words_1 words_2 length_ratio vocabulary_ratio transition_kinds jaccard"
    columns = zip(names.split(), zip(*rows, strict=True), strict=True)
    return {f"tldr/{name}": sum(column) / len(rows) for name, column in columns}


def concise_prompt(item):
    return f"{item['prompt']}\n\nWrite a concise summary of this post."


def detailed_prompt(item):
    return f"{item['prompt']}\n\nWrite a detailed summary of this post."


formatters = [concise_prompt, detailed_prompt]

if os.environ.get("TLDR_DATASET"):
    from datasets import load_dataset

    dataset = load_dataset(os.environ["TLDR_DATASET"])
    train_dataset, eval_dataset = dataset["train"], dataset["validation"]
else:
    posts = (Path(__file__).parent / "tldr_posts.txt").read_text(encoding="utf-8").strip().split("\n\n")
    train_dataset = [{"prompt": post} for post in posts[:32]]
    eval_dataset = [{"prompt": post} for post in posts[32:]] * 3  # 16 posts, each answered three times
