"""Curves of one or several runs out of their metrics.jsonl, as a picture.

    python tests/plot.py runs/A runs/B                        the reward of both, in runs.png
    python tests/plot.py iac=runs/A maac=runs/B --metrics critic_0/explained_variance
    python tests/plot.py IAC=runs/i1,runs/i2 MAAC=runs/m1 --metrics earned --output a.png

A run may be given a label; runs of one label, after commas, become a mean and a band of one
standard deviation. --metrics takes several, each in a panel of its own; by default the evaluation's
reward in the last turn. Needs matplotlib.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt

PIECES = 40  # points of a curve: what lies between two of them is averaged


def read_rows(folder):
    """The rows of a run."""
    path = Path(folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(rows, metric, pieces=PIECES):
    """Points (env_step, value) of a metric, thinned to averages of equally many rows."""
    points = [(row["env_step"], row[metric]) for row in rows if metric in row]
    size = math.ceil(len(points) / pieces) if points else 1
    batches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(batch[-1][0], statistics.fmean(y for _, y in batch)) for batch in batches]


def band(curves):
    """(env_step, mean, standard deviation) of curves, where at least half of them have a point."""
    values = defaultdict(list)
    for points in curves:
        for x, y in points:
            values[x].append(y)
    enough = {x: ys for x, ys in sorted(values.items()) if 2 * len(ys) >= len(curves)}
    return [(x, statistics.fmean(ys), statistics.pstdev(ys)) for x, ys in enough.items()]


def last_reward(rows):
    """The name of the evaluation's reward in the last turn, or of training's if there is none."""
    names = sorted({name for row in rows for name in row if name.endswith("/reward_mean")})
    turns = [name for name in names if name.startswith("eval/turn_")]
    return (turns or [name for name in names if name.startswith("turn_")])[-1]


def draw(groups, metrics, output, title=None):
    """A panel for each metric, a curve for each label of groups {label: [rows of a run]}."""
    figure, axes = plt.subplots(1, len(metrics), figsize=(5 * len(metrics), 3.6), squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=True):
        for label, runs in groups.items():
            points = band([curve(rows, metric) for rows in runs])
            if not points:
                raise SystemExit(f"{label} has no metric {metric!r}")
            x, mean, deviation = zip(*points, strict=True)
            (line,) = axis.plot(x, mean, label=f"{label} ({len(runs)})" if len(runs) > 1 else label)
            low = [m - d for m, d in zip(mean, deviation, strict=True)]
            high = [m + d for m, d in zip(mean, deviation, strict=True)]
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set_xlabel("env_step (joint answers)")
        axis.set_title(metric, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders of runs: FOLDER, or LABEL=FOLDER,FOLDER")
    parser.add_argument("--metrics", nargs="+", help="names as in metrics.jsonl")
    parser.add_argument("--output", default="runs.png", help="the picture (default: runs.png)")
    parser.add_argument("--title")
    args = parser.parse_args()
    groups = {}
    for given in args.runs:
        label, equals, folders = given.rpartition("=")
        label = label if equals else Path(folders).name
        groups.setdefault(label, []).extend(read_rows(folder) for folder in folders.split(","))
    first = next(iter(groups.values()))[0]
    draw(groups, args.metrics or [last_reward(first)], args.output, args.title)
    print(args.output)


if __name__ == "__main__":
    main()
