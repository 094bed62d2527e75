"""Learning curves: run a study, variants x seeds, and write its results, figure and table beside this file.

    python tests/benchmark/learning.py                         list the studies
    python tests/benchmark/learning.py private_numbers         run what is not there yet, then draw
    python tests/benchmark/learning.py private_numbers --draw  draw the figure and the table from results/ again
    python tests/benchmark/learning.py kl temperature          several studies, one after the other
    python tests/benchmark/learning.py numbers --peer-python ../peer/bin/python      with comlrl too, from its own venv

A run is a command line of iac.py or maac.py in a process of its own with one thread. Its folder stays in --runs: there
an interrupted run goes on from its last checkpoint, and studies that hold the same run share it (delete the folder to
make it anew with other code). results/STUDY.json keeps the curves, results/STUDY.md the table and how it was made. The
study "tldr" needs tests/smollm2, see tests/fetch_smollm2.py; figures need matplotlib.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import speed

HERE = Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent.parent, HERE / "results"
PIECES = 32  # points that the training rows of a run are averaged to
DROPPED = (
    "/expected_return",
    "/policy_loss",
    "/finished_fraction",
    "/value_loss",
    "_prompts",
)  # metrics not kept
SHOWN = 3  # rows of the evaluation set whose answers are kept: the first ones, whatever they are

# -------------------------------------------------------------------------------------------------------- 1 studies

SEPARATE = {"file": "iac"}
SHARED = {"file": "iac", "use_separate_critic": False}
CENTRAL = {"file": "maac"}
BASES = {"IAC separate": SEPARATE, "IAC shared": SHARED, "MAAC": CENTRAL}


def crossed(bases, *choices):
    """Every base with every combination of the named choices: {"MAAC q": {...}, ...}."""
    variants = bases
    for choice in choices:
        variants = {
            f"{name} {label}".strip(): flags | more
            for name, flags in variants.items()
            for label, more in choice.items()
        }
    return variants


TYPES = {"v": {}, "q": {"critic_type": "q"}}
SHORT = {"num_train_epochs": 8, "eval_interval": 800}  # 12 800 joint answers
HALF = {"num_train_epochs": 4, "eval_interval": 400}  # as many in two turns
TURNS = {"1 turn": {}, "2 turns": {"num_turns": 2} | HALF}
PEER = {
    "comlrl IAC separate v 1 turn": {"file": "iac", "peer": True},
    "comlrl MAAC v 1 turn": {"file": "maac", "peer": True},
}
PRIVATE = {
    "task": "tests/tasks/private_numbers.py",
    "critic_learning_rate": 1e-3,
    "num_train_epochs": 6,
}
PRIVATE |= {
    "eval_interval": 200,
    "eval_num_samples": 100,
    "eval_batch_size": 100,
}  # all pairs of numbers
TLDR = {
    "task": "tests/tasks/tldr.py",
    "agent_model": "tests/smollm2",
    "chat_template": True,
    "max_new_tokens": 48,
    "temperature": 0.7,
    "agent_learning_rate": 5e-5,
    "critic_learning_rate": 5e-5,
    "num_generations": 4,
    "rollout_buffer_size": 8,
    "num_train_epochs": 1,
    "eval_interval": 6,
    "eval_num_samples": 32,
    "eval_batch_size": 32,
    "checkpoint_interval": 5,
}
IAC = {"IAC": SEPARATE}
ALGORITHMS = IAC | {"MAAC": CENTRAL}


def panel(metric, *words, x="env_step", title=None):
    """A panel shows a metric of the variants whose names hold all the words."""
    return {
        "metric": metric,
        "words": words,
        "x": x,
        "title": title or ", ".join([metric, *map(str.strip, words)]),
    }


LEVELS = ["tldr/structure", "tldr/length", "tldr/vocabulary", "tldr/style"]

STUDIES = {
    "numbers": {
        "title": "The number game: sum to n",
        "flags": SHORT,
        "variants": crossed(BASES, TYPES, TURNS) | PEER,
        "panels": [
            *(panel("reward", f" {kind} ", turns) for kind in "vq" for turns in TURNS),
            panel("training reward", " v ", "1 turn"),
            panel(
                "training reward",
                " v ",
                "1 turn",
                x="seconds",
                title="training reward, v, 1 turn, by seconds",
            ),
        ],
        "reach": 0.9,
    },
    "private_numbers": {
        "title": "Private numbers: what a round is worth depends on both numbers",
        "flags": PRIVATE,
        "variants": ALGORITHMS,
        "panels": [panel("earned"), panel("explained variance"), panel("advantage variance")],
        "reach": "IAC",
    },
    "tldr": {
        "title": "Two summaries of a post, SmolLM2-135M-Instruct",
        "seeds": [1],
        "flags": TLDR,
        "variants": ALGORITHMS,
        "panels": [
            panel("reward"),
            *map(panel, LEVELS),
            panel("tldr/words_1"),
            panel("tldr/words_2"),
        ],
    },
    "advantage_normalization": {
        "title": "Advantage normalisation",
        "lesson": "Without it the end is the same, but 0.9 is reached 30 % later.",
        "seeds": [1, 2, 3],
        "flags": SHORT,
        "variants": crossed(IAC, {"on": {}, "off": {"advantage_normalization": False}}),
        "panels": [panel("reward")],
        "reach": 0.9,
    },
    "discount": {
        "title": "Discount between two turns",
        "lesson": "Each round pays for itself, so looking ahead gains nothing; the run that fell back had discount 1.",
        "seeds": [1, 2, 3],
        "flags": SHORT | {"num_turns": 2} | HALF,
        "variants": crossed(IAC, {"discount 1": {}} | {f"discount {x}": {"discount": x} for x in (0.0, 0.5)}),
        "panels": [panel(f"turn_{t}/reward_mean") for t in (1, 2)],
        "reach": 0.9,
    },
    "kl": {
        "title": "Reference penalty",
        "lesson": "0.01 costs nothing; at 0.1 leaving the first policy costs more than the game pays.",
        "seeds": [1, 2, 3],
        "flags": SHORT,
        "variants": crossed(
            IAC,
            {"no penalty": {}}
            | {f"coefficient {x}": {"reference_kl_enabled": True, "reference_kl_coef": x} for x in (0.01, 0.1, 0.3)},
        ),
        "panels": [panel("reward"), panel("agent_0/reference_kl", "coefficient")],
        "reach": 0.9,
    },
    "temperature": {
        "title": "Temperature",
        "lesson": "Sampling and score share it: a low one sharpens both and learns faster, a high one slower.",
        "seeds": [1, 2, 3],
        "flags": SHORT,
        "variants": crossed(
            IAC,
            {"temperature 1": {}} | {f"temperature {x}": {"temperature": x} for x in (0.5, 1.5)},
        ),
        "panels": [panel("reward")],
        "reach": 0.9,
    },
    "buffer": {
        "title": "Buffer size",
        "lesson": "More and noisier updates win at equal answers, though each teaches less.",
        "seeds": [1, 2, 3],
        "flags": SHORT,
        "variants": crossed(IAC, {"buffer 64": {}} | {f"buffer {x}": {"rollout_buffer_size": x} for x in (16, 256)}),
        "panels": [panel("reward")],
        "reach": 0.9,
    },
}

# ----------------------------------------------------------------------------------------------------------- 2 runs


def command_line(variant, seed, folder):
    """The command of one run, as a list."""
    line = [
        sys.executable,
        f"{variant['file']}.py",
        "--seed",
        str(seed),
        "--output-dir",
        str(folder),
    ]
    for name, value in variant.items():
        flag = name.replace("_", "-")
        if name in ("file", "peer"):
            continue
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return line


def run_variant(variant, seed, folder, peer_python):
    """Make one run, or finish it, and return its curves."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    environment["PYTHONPATH"] = str(ROOT)
    if variant.get("peer"):
        line = [
            peer_python,
            str(Path(__file__).resolve()),
            "--peer-run",
            json.dumps(variant | {"seed": seed}),
        ]
        line[-1:] = [line[-1], "--peer-file", f"{folder}.jsonl"]
        if not folder.with_suffix(".done").exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(line, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
            folder.with_suffix(".done").touch()
        return read_peer(f"{folder}.jsonl")
    line = command_line(variant, seed, folder)
    if not (folder / "model").exists() and not (folder / "finished").exists():
        checkpoints = [folder / name for name in ("checkpoint", "checkpoint.old") if (folder / name).exists()]
        if checkpoints:
            line += ["--resume", str(folder)]
        elif folder.exists():
            shutil.rmtree(folder)  # a run that was interrupted before its first checkpoint
        with open(folder.parent / f"{folder.name}.log", "a") as log:
            subprocess.run(line, cwd=ROOT, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)
        (folder / "finished").touch()
    return read_run(folder)


def average(rows):
    """The mean of every number that all the rows hold."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


def tidy(rows):
    kept = [{name: x for name, x in row.items() if not name.endswith(DROPPED)} for row in rows]
    kept = [{name: x for name, x in row.items() if not name.startswith("time/")} for row in kept]
    return [{name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in row.items()} for row in kept]


def read_run(folder):
    """The curves of a run and its first answers: training rows averaged in pieces, evaluation rows as they are."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    train, evaluations, seconds, steps = [], [], 0.0, 0
    for row in rows:
        if "time/env_steps_per_second" in row:
            seconds += (row["env_step"] - steps) / row["time/env_steps_per_second"]
            steps = row["env_step"]
            wanted = {n: x for n, x in row.items() if not n.startswith(("eval/", "time/env_steps"))}
            train.append(wanted | {"seconds": seconds})
        if any(name.startswith("eval/") for name in row):
            wanted = {name[5:]: x for name, x in row.items() if name.startswith("eval/")}
            last = max(a["turn"] for a in answers)
            scores = [a["reward"] for a in answers if a["env_step"] == row["env_step"] and a["turn"] == last]
            spread = {
                "samples": len(scores) / len({a["agent"] for a in answers}),
                "deviation": statistics.pstdev(scores),
            }
            evaluations.append({"env_step": row["env_step"], "seconds": seconds} | wanted | spread)
    size = math.ceil(len(train) / PIECES)
    train = [average(train[start : start + size]) for start in range(0, len(train), size)]
    keep = ("env_step", "row", "turn", "agent", "prompt", "completion", "reward")
    ends = (evaluations[0]["env_step"], evaluations[-1]["env_step"]) if evaluations else ()
    kept = [{n: a[n] for n in keep} for a in answers if a["row"] < SHOWN and a["env_step"] in ends]
    curves = {"train": tidy(train), "eval": tidy(evaluations), "answers": kept}
    return curves | {"seconds": round(seconds, 1), "env_step": steps}


def read_peer(file):
    """The same of comlrl's run: every training reward with its time."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    size = math.ceil(len(rows) / PIECES)
    train = [average(rows[start : start + size]) for start in range(0, len(rows), size)]
    return {
        "train": tidy(train),
        "eval": [],
        "seconds": round(rows[-1]["seconds"], 1),
        "env_step": len(rows),
    }


def peer_run(variant, file):
    """One run of comlrl's trainer of the same name on the number game; called in comlrl's own Python."""
    import random
    import time
    import types

    import torch
    from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
    from datasets import Dataset
    from transformers import AutoTokenizer

    sys.modules.setdefault("tyro", types.ModuleType("tyro"))  # of iac.py only the task is wanted here
    import iac

    random.seed(variant["seed"])
    torch.manual_seed(variant["seed"])
    torch.set_num_threads(1)
    task, started, count = iac.number_task(2, variant["seed"]), time.perf_counter(), 0

    def reward_func(*answers, batch_items=None):
        nonlocal count
        rewards = task["reward_func"](*answers, batch_items=batch_items)
        count += 1
        row = {
            "env_step": count,
            "seconds": time.perf_counter() - started,
            "turn_1/reward_mean": rewards[0],
        }
        with open(file, "a") as out:
            out.write(json.dumps(row) + "\n")
        return rewards

    known = (
        "num_train_epochs",
        "rollout_buffer_size",
        "max_new_tokens",
        "agent_learning_rate",
        "critic_learning_rate",
    )
    flags = {name: value for name, value in (iac.DEMO | variant).items() if name in known}
    flags |= {
        "num_turns": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "early_termination_threshold": None,
        "eval_interval": 0,
    }
    flags["top_k"] = 0  # None would be the default of transformers, 50
    config, trainer = (IACConfig, IACTrainer) if variant["file"] == "iac" else (MAACConfig, MAACTrainer)
    Path(file).unlink(missing_ok=True)
    trainer(
        agent_model=iac.TINY_LM,
        critic_model=iac.TINY_LM,
        tokenizer=AutoTokenizer.from_pretrained(iac.TINY_LM),
        reward_func=reward_func,
        formatters=task["formatters"],
        model_config={"dtype": "float32"},
        args=config(num_agents=2, **flags),
        train_dataset=Dataset.from_list(task["train_dataset"]),
    ).train()


# --------------------------------------------------------------------------------------------- 3 figures and tables


def value(row, metric):
    """A metric of a row, None if it is not there; some have names of our own."""
    if metric in ("reward", "training reward"):  # of the last turn
        names = [name for name in row if name.startswith("turn_") and name.endswith("/reward_mean")]
        return row[max(names)] if names else None
    if metric == "explained variance":
        values = [x for name, x in row.items() if name.endswith("/explained_variance")]
        return statistics.fmean(values) if values else None
    if metric == "advantage variance":
        means = [x for name, x in row.items() if name.endswith("/advantage_mean")]
        return row["advantage_square"] - statistics.fmean(means) ** 2 if "advantage_square" in row and means else None
    return row.get(metric)


def curve(run, metric, x="env_step"):
    """Points (x, value): of the evaluations, or of training where only training knows the metric."""
    evaluated = metric == "reward" or any(metric in row for row in run["eval"])
    rows = run["eval"] if evaluated else run["train"]
    return [(row[x], value(row, metric)) for row in rows if value(row, metric) is not None]


def mean_and_spread(values):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values, digits):
    """Mean and spread as text."""
    mean, spread = mean_and_spread(values)
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if len(values) > 1 else "")


def draw(name, study, results, folder):
    """NAME.png: mean over the runs, and a band of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = study["panels"]
    columns = min(3 if len(panels) % 3 == 0 else 4, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.2 * columns, 3.1 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, spec in zip(axes.flat, panels, strict=False):
        for label, entry in results["variants"].items():
            wanted = all(word in f" {label} " for word in spec["words"])
            curves = [curve(run, spec["metric"], spec["x"]) for run in entry["runs"].values()] if wanted else []
            if not all(curves) or not curves:
                continue
            points = [zip(*column, strict=True) for column in zip(*curves, strict=False)]  # of all runs at one place
            points = [(statistics.fmean(x), *mean_and_spread(y)) for x, y in points]
            x, mean, spread = zip(*points, strict=True)
            axis.plot(x, mean, label=label, linewidth=1.5)
            low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
            axis.fill_between(x, low, high, alpha=0.2, linewidth=0)
        axis.set_title(spec["title"].replace("  ", " "), fontsize=10)
        axis.set_xlabel("joint answers" if spec["x"] == "env_step" else spec["x"], fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.suptitle(study["title"])
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=110)
    pyplot.close(figure)


def ends(run, metric):
    """First value, and the mean of the last three, of a run's evaluations; else of its training."""
    points = curve(run, metric) or curve(run, "training reward")
    return points[0][1], statistics.fmean(y for _, y in points[-3:])


def reached(run, metric, goal):
    """Joint answers after which the metric was first at the goal, None if it never was."""
    points = curve(run, metric) or curve(run, "training reward")
    return next((x for x, y in points if y >= goal), None)


def runs_of(results):
    """{variant: its runs}, of those variants that have some."""
    return {label: list(entry["runs"].values()) for label, entry in results["variants"].items() if entry["runs"]}


def table(name, study, results):
    """The markdown page of a study."""
    variants = runs_of(results)
    metric = study["panels"][0]["metric"]
    goal = study.get("reach")
    if isinstance(goal, str):
        goal = statistics.fmean(ends(run, metric)[1] for run in variants[goal]) if goal in variants else None
    page = [f"# {study['title']}", "", f"![curves]({name}.png)", ""]
    page += [
        f"Mean ± standard deviation over the runs; last: the mean of the last three points. Metric: {metric}.",
        "",
    ]
    page += [study["lesson"], ""] if "lesson" in study else []
    head = [
        "variant",
        "runs",
        "joint answers",
        "first",
        "last",
        f"answers to reach {goal:.3f}" if goal else "",
    ]
    head = [*filter(None, head), "explained variance at the end", "joint answers/s"]
    head = head[:-1] if name == "tldr" else head  # hours beside other work: seconds mean nothing
    page += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for label, runs in variants.items():
        columns = zip(*(ends(run, metric) for run in runs), strict=True)
        cells = [label, len(runs), runs[0]["env_step"], *(shown(column, 3) for column in columns)]
        if goal:
            steps = [reached(run, metric, goal) for run in runs]
            found = [x for x in steps if x is not None]
            missed = f", {len(steps) - len(found)} of {len(steps)} never" if len(found) < len(steps) else ""
            cells.append((shown(found, 0) if found else "-") + missed)
        explained = [y[-1][1] for run in runs if (y := curve(run, "explained variance"))]
        cells.append(shown(explained, 2) if explained else "-")
        cells.append(f"{statistics.fmean(run['env_step'] / run['seconds'] for run in runs):.3g}")
        cells = cells[: len(head)]
        page.append("| " + " | ".join(map(str, cells)) + " |")
    if name == "tldr":
        page += answers(variants)
    page += ["", "## How it was made", ""]
    made = {
        tuple(run[k] for k in ("command", "commit", "date", "machine")) for runs in variants.values() for run in runs
    }
    page += [f"- `{command}`, commit {commit}, {date}, {machine}" for command, commit, date, machine in sorted(made)]
    page += [
        "",
        f"Settings: `{json.dumps(study['flags'])}` and what the demo has otherwise; each variant besides:",
        "",
    ]
    for label in variants:
        flags = results["variants"][label]["flags"]
        page.append(f"- {label}: `{json.dumps({k: v for k, v in flags.items() if study['flags'].get(k) != v})}`")
    return "\n".join(page) + "\n"


def gain(run):
    """First evaluation and mean of the last five, with their standard errors as text, and the gain in those."""
    rows = [(value(row, "reward"), row["deviation"] / row["samples"] ** 0.5) for row in run["eval"]]
    late = rows[-5:]
    last, error = (
        statistics.fmean(m for m, _ in late),
        math.hypot(*(e for _, e in late)) / len(late),
    )
    sigma = (last - rows[0][0]) / math.hypot(error, rows[0][1])
    return f"{rows[0][0]:.3f} ± {rows[0][1]:.3f}", f"{last:.3f} ± {error:.3f}", sigma


def answers(variants):
    """Is the gain more than noise, and the answers to the first rows before and after, as they came."""
    page = [
        "",
        "| run | first evaluation | mean of the last five | gain in standard errors |",
        "| --- | --- | --- | --- |",
    ]
    for label, runs in variants.items():
        for run in runs:
            first, last, sigma = gain(run)
            page.append(f"| {label} | {first} | {last} | {sigma:.1f} |")
    page += ["", "Here ± is the standard error over the samples of an evaluation.", ""]
    for label, runs in variants.items():
        page += [
            f"## Answers, {label}",
            "",
            f"To the first {SHOWN} posts of the evaluation set, not selected.",
            "",
        ]
        first, last = (pick(x["env_step"] for x in runs[0]["answers"]) for pick in (min, max))
        for row in range(SHOWN):
            given = [x for x in runs[0]["answers"] if x["row"] == row]
            page += ["> " + given[0]["prompt"].split("\n\n")[0], ""]
            for step in (first, last):
                for x in (x for x in given if x["env_step"] == step):
                    who = "concise" if x["agent"] == 0 else "detailed"
                    text = " ".join(x["completion"].split())
                    page.append(f"- after {step}, {who} (reward {x['reward']:.2f}): {text}")
            page.append("")
    return page


def load_results(folder, name):
    """`runs_of` a study that may not have been made."""
    path = folder / f"{name}.json"
    return runs_of(json.loads(path.read_text())) if path.exists() else {}


def readme(folder):
    """The lines of the README that hold results, out of the JSON files in the folder."""
    numbers = load_results(folder, "numbers")
    lines = [
        "| number game | one round | answers to 0.9 | two rounds |",
        "| --- | --- | --- | --- |",
    ]
    for label in dict.fromkeys(label.removesuffix(" 1 turn").removesuffix(" 2 turns") for label in numbers):
        one, two = (numbers.get(f"{label} {turns}", []) for turns in TURNS)
        if not one or not one[0]["eval"]:
            continue
        steps = [reached(run, "reward", 0.9) for run in one]
        found = [x for x in steps if x is not None]
        cells = [label, shown([ends(run, "reward")[1] for run in one], 3)]
        cells.append((f"{statistics.fmean(found):.0f}" if found else "-") + f" ({len(found)} of {len(steps)} runs)")
        cells.append(shown([ends(run, "reward")[1] for run in two], 3) if two else "-")
        lines.append("| " + " | ".join(cells) + " |")
    late = [run["eval"][-1] for label, runs in numbers.items() if "2 turns" in label for run in runs]
    low = sorted(value(row, "reward") for row in late if value(row, "reward") < 0.9)
    ends_low = ", ".join(f"{x:.2f}" for x in low)
    lines += [
        "",
        f"- Two rounds: {len(low)} of {len(late)} runs fell back and ended at {ends_low}.",
    ]
    sides = []
    for label in [x for peer in numbers if peer.startswith("comlrl") for x in (peer, peer.removeprefix("comlrl "))]:
        last = [statistics.fmean(y for _, y in curve(run, "training reward")[-3:]) for run in numbers[label]]
        seconds = statistics.fmean(run["seconds"] for run in numbers[label])
        found = f"{shown(last, 3)} in {seconds:.0f} s ({len(last)} run{'s' * (len(last) > 1)})"
        sides.append(f"{label.removesuffix(' v 1 turn')} {found}")
    if sides:
        lines.append(f"- Training reward at the end, v, one round, beside other work: {', '.join(sides)}.")
    private = load_results(folder, "private_numbers")
    if private:
        explained = {
            label: shown([curve(x, "explained variance")[-1][1] for x in private[label]], 2) for label in private
        }
        goal = statistics.fmean(ends(run, "earned")[1] for run in private["IAC"])
        steps = statistics.fmean(reached(run, "earned", goal) for run in private["MAAC"])
        rewards = {label: shown([ends(run, "earned")[1] for run in private[label]], 3) for label in private}
        seen = f"explained variance {explained['MAAC']} with MAAC, {explained['IAC']} with IAC"
        seen += f"; reward {rewards['MAAC']} and {rewards['IAC']}"
        lines.append(f"- Private numbers: {seen}; MAAC reaches IAC's after {steps:.0f} answers.")
    gains = {label: gain(runs[0]) for label, runs in load_results(folder, "tldr").items()}
    found = [f"{label} {first} to {last}, by {sigma:.1f} errors" for label, (first, last, sigma) in gains.items()]
    lines.append(f"- Summaries, before and over the last five evaluations: {'; '.join(found)}.")
    for name, study in STUDIES.items():
        if "lesson" in study and (made := load_results(folder, name)):
            ends_of = {label.removeprefix("IAC "): [ends(run, "reward")[1] for run in made[label]] for label in made}
            found = ", ".join(f"{label} {shown(values, 3)}" for label, values in ends_of.items())
            lines.append(f"- {study['title']} (IAC, number game): {found}. {study['lesson']}")
    return lines


# ----------------------------------------------------------------------------------------------------------- 4 main


def run_study(name, study, options):
    """Make the runs that are missing, `--jobs` at a time, and write results/NAME.json after each."""
    path = options.results / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {"title": study["title"], "variants": {}}
    wanted, writing = [], threading.Lock()
    for label, variant in study["variants"].items():
        if options.only and label not in options.only:
            continue
        if variant.get("peer") and not options.peer_python:
            print(f"{label}: left out, there is no --peer-python")
            continue
        variant = study["flags"] | variant
        entry = results["variants"].setdefault(label, {"flags": variant, "runs": {}})
        if entry["flags"] != variant:  # runs of something else
            entry["flags"], entry["runs"] = variant, {}
        for seed in options.seeds or study.get("seeds", [1, 2, 3, 4, 5]):
            if str(seed) not in entry["runs"]:
                wanted.append((label, variant, seed))

    def make(label, variant, seed):
        key = hashlib.sha256(json.dumps(variant, sort_keys=True).encode()).hexdigest()[:8]
        folder = options.runs / f"{'peer-' * ('peer' in variant)}{variant['file']}-{key}" / f"seed_{seed}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        run = run_variant(variant, seed, folder, options.peer_python)
        with writing:
            entry = results["variants"][label]
            entry["runs"][str(seed)] = run | origin()
            entry["runs"] = dict(sorted(entry["runs"].items(), key=lambda item: int(item[0])))
            path.write_text(json.dumps(results, indent=None, separators=(",", ":")) + "\n")
        print(
            f"{name}, {label}, seed {seed}: {run['env_step']} joint answers in {run['seconds']} s",
            flush=True,
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for job in [pool.submit(make, *run) for run in wanted]:
                job.result()
        except BaseException:  # those that have not begun need not
            pool.shutdown(cancel_futures=True)
            raise
    return results


def origin():
    """Where a run comes from: commit, date, command (but for the folders named in it) and machine."""
    words, command = iter(sys.argv[1:]), "python tests/benchmark/learning.py"
    for word in words:
        if word in ("--runs", "--results", "--peer-python", "--jobs"):
            next(words)
        else:
            command += f" {shlex.quote(word)}"
    return {
        "commit": speed.commit() or "unknown",
        "date": datetime.date.today().isoformat(),
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, one thread",
    }


def parse(line=None):
    """The options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="study", help="which; none: list them")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the study's own")
    parser.add_argument("--only", nargs="+", help="names of variants; the others are left as they are")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--draw", action="store_true", help="make no runs")
    parser.add_argument("--readme", action="store_true", help="print the README's lines with results")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning", help="folder for the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON, figures and tables")
    parser.add_argument("--peer-python", help="Python of a virtual environment with comlrl==1.4.3")
    parser.add_argument("--peer-run", help=argparse.SUPPRESS)
    parser.add_argument("--peer-file", help=argparse.SUPPRESS)
    options = parser.parse_args(line)
    if unknown := [name for name in options.studies if name not in STUDIES]:
        parser.error(f"there is no study {unknown[0]!r}, but {', '.join(STUDIES)}")
    return options


def main():
    options = parse()
    if options.peer_run:
        peer_run(json.loads(options.peer_run), options.peer_file)
    elif options.readme:
        print("\n".join(readme(options.results)))
    elif not options.studies:
        for name, study in STUDIES.items():
            print(f"{name}: {study['title']}\n  " + "\n  ".join(study["variants"]))
    for name in options.studies:
        study = STUDIES[name]
        if not options.draw:
            run_study(name, study, options)
        results = json.loads((options.results / f"{name}.json").read_text())
        draw(name, study, results, options.results)
        page = table(name, study, results)
        (options.results / f"{name}.md").write_text(page)
        print(page)


if __name__ == "__main__":
    main()
