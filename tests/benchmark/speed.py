"""Speed and memory of iac.py and maac.py, beside the package comlrl 1.4.3 and beside the bare tensor work.

    python tests/benchmark/speed.py                              the acceptance cases
    python tests/benchmark/speed.py --list                       the names of all cases
    python tests/benchmark/speed.py --cases 'tiny/maac-*' growth --repeats 5
    python tests/benchmark/speed.py --peer-python ../peer/bin/python

A case is a model, an algorithm and its settings. Its sides run in turn, each in a process of its own, and that
`--repeats` times; ratios are taken within a repeat. The sides:

    ours, ours-bf16      iac.py or maac.py, in float32 or with dtype="bfloat16" (autocast around float32 weights)
    comlrl               comlrl's trainer of the same name in float32, from a virtual environment (made if missing)
    comlrl-bf16          only with --sides: the same, weights and optimiser too in bfloat16
    floor, floor-bf16    what the algorithm cannot do without, in plain transformers: per agent and turn one batched
                         `generate`, values, then forward and backward of one mini-batch and a step of AdamW

All get the same weights, prompts, number of threads, sampling (temperature 1, nothing cut off) and mini-batches. The
prompts all differ, but for the cases ...-10prompts, where ours reads equal ones once to value them. The models are
copies without a stop token: every answer has its full length, as "tokens" shows. Evaluation, saving and gradient
clipping (which comlrl has not) are off, logging is one row at the end. Timed is the call of `train()`, after loading
and a warm-up on another model, in which torch imports what it puts off. "cpu" are processor seconds, which depend less
on what else the machine does than "seconds"; "peak_mb" is the process's largest resident memory, "added_mb" the
largest during training minus that just before it (from /proc: Linux only).

The cases growth/... vary one setting of ours on tiny_lm; the exponents are slopes of log cpu per update and log
added_mb over the log of the setting. SmolLM2-135M is made by tests/fetch_smollm2.py.
"""

import argparse
import datetime
import fnmatch
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parent, HERE.parent.parent
PEER = "comlrl==1.4.3"
PADS = {"tiny_lm": "<pad>", "smollm2": "<gh_stars>"}  # tokens that the models do not generate
LEARNING_RATE = 1e-5
NUMBERS = (
    "samples_per_s",
    "seconds",
    "cpu",
    "rollout",
    "update",
    "tokens",
    "peak_mb",
    "added_mb",
)  # of a run
ACCEPTANCE = ("tiny/iac-v-1gen", "tiny/maac-v-1gen", "tiny/*-10prompts", "smollm2/iac-v-1gen")

# ----------------------------------------------------------------------------------------------------------- 1 cases


@dataclass(frozen=True)
class Case:
    """What is run; `buffer` samples per agent make an update, of one mini-batch per turn."""

    name: str
    model: str = "tiny_lm"
    algorithm: str = "iac"  # "iac", "iac-shared" or "maac"
    critic_type: str = "v"
    generations: int = 1
    kl: bool = False
    agents: int = 2
    turns: int = 1
    buffer: int = 64
    new_tokens: int = 3
    prompts: int = 900  # different ones
    micro_batch: int | None = None
    updates: int = 8
    sides: tuple = ("ours", "comlrl", "floor")

    @property
    def items(self):  # dataset items per update
        return math.ceil(self.buffer / (self.generations * self.turns))

    @property
    def samples(self):  # joint answers
        return self.updates * self.items * self.generations * self.turns


def all_cases():
    large = {"model": "smollm2", "buffer": 8, "new_tokens": 32, "updates": 2}
    large["sides"] = ("ours", "ours-bf16", "comlrl", "floor", "floor-bf16")
    cases, small = [], Case("", buffer=16, new_tokens=32, updates=4, sides=("ours",))
    for prefix, base in {"tiny": {}, "smollm2": large}.items():
        for algorithm in ("iac", "iac-shared", "maac"):
            for q, generations, kl in [(q, g, kl) for q in "vq" for g in (1, 4) for kl in (False, True)]:
                settings = base | {
                    "algorithm": algorithm,
                    "critic_type": q,
                    "generations": generations,
                    "kl": kl,
                }
                cases.append(Case(f"{prefix}/{algorithm}-{q}-{generations}gen{'-kl' * kl}", **settings))
    cases += [Case(f"tiny/{a}-v-1gen-10prompts", algorithm=a, prompts=10) for a in ("iac", "maac")]
    for x in (1, 2, 3, 4):
        cases += [replace(small, name=f"growth/agents-of-{a}/{x}", agents=x, algorithm=a) for a in ("iac", "maac")]
        cases.append(replace(small, name=f"growth/turns/{x}", turns=x, buffer=16 * x))  # the same items per update
        cases.append(replace(small, name=f"growth/buffer/{4 << x}", buffer=4 << x))
        cases.append(replace(small, name=f"growth/new-tokens/{8 << x}", new_tokens=8 << x))
        cases.append(replace(small, name=f"growth/buffer-with-micro-8/{4 << x}", buffer=4 << x, micro_batch=8))
    return cases


def formatter(case, agent):
    """Item -> prompt of an agent: as in the built-in task, or about 60 tokens for the larger model; all differ."""
    if case.model == "tiny_lm":
        return lambda item: f"agent {agent + 1} of {case.agents}: {item['prompt']} ="
    tale = "The river rose in the night and by morning the bridge was gone. Nobody in the village knew who had seen it"
    tale += " last, or whether the old mill still stood behind the hill, and so they sent two people out to look. Tell"
    return lambda item: f"{item['prompt']}. You are {agent + 1} of {case.agents}. {tale[: -(item['n'] % 60) - 1]}"


def dataset(case):
    numbers = [1000 - case.prompts + k * 7 % case.prompts for k in range(case.updates * case.items)]
    return [{"prompt": f"sum to {n}", "n": n} for n in numbers]


def reward(*completions):
    """One number per joint answer, out of its letters."""
    return [sum(map(ord, "".join(joint))) % 11 / 10 for joint in zip(*completions, strict=True)]


def endless_copy(model, folder):
    """A copy of a model folder without a stop token; of the large files only links."""
    folder.mkdir()
    for source in (TESTS / model).iterdir():
        if source.suffix != ".json" or source.name == "tokenizer.json":
            (folder / source.name).symlink_to(source)
            continue
        content = json.loads(source.read_text())
        content = {key: x for key, x in content.items() if "eos" not in key and not key.startswith("pad_token")}
        content |= {"pad_token": PADS[model]} if source.name == "tokenizer_config.json" else {}
        (folder / source.name).write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------- 2 one side, in a process


def settings(case, folder):
    """What ours and comlrl have in common: arguments of the configuration and of the trainer."""
    config = {
        "num_agents": case.agents, "num_turns": case.turns, "num_generations": case.generations,
        "critic_type": case.critic_type, "reference_kl_enabled": case.kl, "rollout_buffer_size": case.buffer,
        "max_new_tokens": case.new_tokens, "temperature": 1.0, "top_p": 1.0, "num_train_epochs": 1,
        "agent_learning_rate": LEARNING_RATE, "critic_learning_rate": LEARNING_RATE,
        "early_termination_threshold": None, "eval_interval": 0, "logging_steps": 10**9,
    }  # fmt: skip
    arguments = {
        "agent_model": folder, "reward_func": reward, "formatters": [formatter(case, i) for i in range(case.agents)],
        "train_dataset": dataset(case), "external_transition": lambda prompt, num_agents, **_: [prompt] * num_agents,
    }  # fmt: skip
    config |= {} if case.algorithm == "maac" else {"use_separate_critic": case.algorithm == "iac"}
    arguments |= {} if case.algorithm == "iac-shared" else {"critic_model": folder}
    return config, arguments


def prepare_ours(case, dtype, folder):
    """A function that trains, and one that afterwards tells the seconds of rollout and update and the mean tokens."""
    sys.path.insert(0, str(ROOT))
    name, (config, arguments) = case.algorithm.split("-")[0], settings(case, folder)
    module = __import__(name)
    config |= {"max_grad_norm": None, "dtype": dtype}
    config |= {"micro_batch_size": case.micro_batch, "rollout_batch_size": case.micro_batch}
    config = getattr(module, f"{name.upper()}Config")(**config)
    trainer = getattr(module, f"{name.upper()}Trainer")(**arguments, args=config, output_dir=f"{folder}/run")
    trainer.save_checkpoint = trainer.save_model = lambda path: None  # comlrl saves nothing either

    def tell():
        row = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
        assert row["env_step"] == case.samples, row["env_step"]
        seconds = case.samples / row["time/env_steps_per_second"]
        tokens = statistics.fmean(row[f"agent_{i}/completion_tokens"] for i in range(case.agents))
        return {part: row[f"time/{part}"] * seconds for part in ("rollout", "update")} | {"tokens": tokens}

    return trainer.train, tell


def prepare_comlrl(case, dtype, folder):
    """The same for comlrl."""
    from comlrl.trainers import actor_critic
    from transformers import AutoTokenizer

    name, (config, arguments) = case.algorithm.split("-")[0].upper(), settings(case, folder)
    config = getattr(actor_critic, f"{name}Config")(**config, top_k=0)  # None would be transformers' default, 50
    arguments |= {
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "model_config": {"dtype": dtype},
    }
    trainer = getattr(actor_critic, f"{name}Trainer")(**arguments, args=config)
    trainer.verbose = False  # no progress bar
    seconds, lengths = {"rollout": 0.0, "update": 0.0}, []

    def timed(part, function):
        def wrapped(*args):
            started = time.perf_counter()
            result = function(*args)
            seconds[part] += time.perf_counter() - started
            lengths.extend(sample.response_len for sample in result or ())
            return result

        return wrapped

    trainer._collect_rollouts = timed("rollout", trainer._collect_rollouts)
    trainer._drain_ready_agent_buffers = timed("update", trainer._drain_ready_agent_buffers)

    def tell():
        assert trainer.env_step == case.samples, trainer.env_step
        return seconds | {"tokens": statistics.fmean(lengths)}

    return trainer.train, tell


def prepare_floor(case, dtype, folder):
    """The same for the tensor work alone, with random numbers for advantages and targets."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    N, G, K, q = case.agents, case.generations, case.new_tokens, case.critic_type == "q"
    maac, shared, B = (
        case.algorithm == "maac",
        case.algorithm == "iac-shared",
        case.items * case.generations,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(N + N * case.kl)]
    agents, references, C = models[:N], models[N:], 1 if maac else N
    critics = [a.model if shared else AutoModel.from_pretrained(folder, dtype=torch.float32) for a in agents[:C]]
    heads = [torch.nn.Linear(critic.config.hidden_size, 1) for critic in critics]
    sampling = GenerationConfig(max_new_tokens=K, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    seconds, rows = {"rollout": 0.0, "update": 0.0}, dataset(case)

    pairs = [torch.nn.ModuleList(pair) for pair in zip(agents if shared else critics, heads, strict=True)]
    agent_optimizers, critic_optimizers = (
        [torch.optim.AdamW(x.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True) for x in modules]
        for modules in ((pairs, []) if shared else (agents, pairs))
    )

    def inputs(texts, *answers):
        """Prompts padded on the left, with answers [B, K] behind them."""
        x = tokenizer(texts, return_tensors="pt", padding=True)
        ids, mask = (
            torch.cat([x.input_ids, *answers], 1),
            [x.attention_mask, *map(torch.ones_like, answers)],
        )
        mask = torch.cat(mask, 1)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }

    def value(c, x):
        with cast:
            hidden = critics[c](**x, use_cache=False).last_hidden_state[:, -1]
        return heads[c](hidden.float())[:, 0]

    def score(model, x, answers):
        """Log-probabilities [B], and the last layer [B, K + 1, D] from the end of the prompt on."""
        with cast:
            hidden = model.model(**x, use_cache=False).last_hidden_state[:, -K - 1 :]
            logits = model.lm_head(hidden[:, :-1])
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), answers.flatten(), reduction="none")
        return -losses.view_as(answers).sum(1), hidden

    def rollout(items):
        """Play one turn; returns what the actors and the critics read in the update, and the answers."""
        prompts = [[f(item) for item in items for _ in range(G)] for f in (formatter(case, i) for i in range(N))]
        answers = []
        for i in range(N):
            x = inputs(prompts[i])
            with cast:
                x = agents[i].generate(x["input_ids"], attention_mask=x["attention_mask"], generation_config=sampling)
            answers.append(x[:, -K:])
        actor_inputs = [inputs(prompts[i], answers[i]) for i in range(N)]
        if maac:
            joint = ["\n".join(f"[agent {i + 1}]\n{p}" for i, p in enumerate(p)) for p in zip(*prompts, strict=True)]
            critic_inputs = [inputs(joint, *answers) if q else inputs(joint[::G])]
        else:
            critic_inputs = actor_inputs if q else [inputs(own[::G]) for own in prompts]
        for c in range(C):
            value(c, critic_inputs[c])
        for i, reference in enumerate(references):
            (
                score(agents[i], actor_inputs[i], answers[i]),
                score(reference, actor_inputs[i], answers[i]),
            )
        return actor_inputs, critic_inputs, answers

    def update(actor_inputs, critic_inputs, answers):
        for i in range(N):
            logprobs, hidden = score(agents[i], actor_inputs[i], answers[i])
            loss = (logprobs * torch.randn(B)).mean()
            if shared:
                loss = loss + (heads[i](hidden[:, -1 if q else 0].float())[:, 0] - torch.rand(B)).square().mean()
            loss.backward()
            agent_optimizers[i].step(), agent_optimizers[i].zero_grad()
            if not shared:
                values = value(i % C, critic_inputs[i % C]).repeat_interleave(1 if q else G)
                (values - torch.rand(B)).square().mean().backward()
                critic_optimizers[i % C].step(), critic_optimizers[i % C].zero_grad()

    def train():
        for start in range(0, len(rows), case.items):
            started = time.perf_counter()
            with torch.no_grad():
                batches = [rollout(rows[start : start + case.items]) for _ in range(case.turns)]
            collected = time.perf_counter()
            while batches:
                update(*batches.pop(0))
            seconds["rollout"] += collected - started
            seconds["update"] += time.perf_counter() - collected

    return train, lambda: seconds | {"tokens": K}


def child(case, side, folder, threads):
    """Run one side of a case in this process and print what was measured as the last line."""
    import torch
    from transformers import AutoModelForCausalLM

    def resident(field):  # VmRSS, now, or VmHWM, the peak, in MB
        return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1024

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    dtype = "bfloat16" if side.endswith("-bf16") else "float32"
    prepare = {"ours": prepare_ours, "comlrl": prepare_comlrl, "floor": prepare_floor}[side.split("-")[0]]
    train, tell = prepare(case, dtype, folder)
    warm, ids = (
        AutoModelForCausalLM.from_pretrained(TESTS / "tiny_lm"),
        torch.arange(3, 19).view(2, 8),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        warm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True)
        warm(ids).logits.float().logsumexp(-1).mean().backward()
    torch.optim.AdamW(warm.parameters()).step()
    del warm
    loaded, peak = resident("VmRSS"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    started, cpu = time.perf_counter(), time.process_time()
    train()
    seconds, cpu, trained = (
        time.perf_counter() - started,
        time.process_time() - cpu,
        resident("VmHWM"),
    )
    row = {"samples_per_s": case.samples / seconds, "seconds": seconds, "cpu": cpu} | tell()
    row |= {"peak_mb": max(peak, trained), "added_mb": trained - loaded}
    print(json.dumps({name: round(x, 4) for name, x in row.items()}))


# ------------------------------------------------------------------------------------------------- 3 the comparison


def make_peer(folder):
    """The Python of comlrl's virtual environment, made with this one's versions of torch and transformers."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {PEER} in {folder.name} ...", file=sys.stderr)
        pins = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers")]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", PEER, *pins], check=True)
    return python


def run_side(case, side, python, threads):
    """Run one side in a process of its own; returns [] if it fails, else its row in a list."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory() as scratch:
        endless_copy(case.model, Path(scratch, "model"))
        line = [
            python,
            __file__,
            "--child",
            json.dumps([asdict(case), side, f"{scratch}/model", threads]),
        ]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(
            f"{case.name} {side} failed ({done.returncode}):\n{done.stderr[-2000:]}",
            file=sys.stderr,
        )
        return []
    row = {"case": case.name, "side": side} | json.loads(done.stdout.splitlines()[-1])
    print(f"{case.name} {side}: {row['samples_per_s']:.3g} joint samples/s", file=sys.stderr)
    return [row]


def medians(runs):
    """A row for each case and side."""
    rows = []
    for case, side in dict.fromkeys((run["case"], run["side"]) for run in runs):
        some = [run for run in runs if (run["case"], run["side"]) == (case, side)]
        numbers = {name: statistics.median(run[name] for run in some) for name in NUMBERS}
        rows.append({"case": case, "side": side} | numbers)
    return rows


def ratios(runs):
    """Ratios of two sides within a repeat, of each number [median, smallest, largest]."""
    rows, by = [], {(run["case"], run["side"], run["repeat"]): run for run in runs}
    for case, a in dict.fromkeys((run["case"], run["side"]) for run in runs if run["side"].startswith("ours")):
        for b in ("comlrl", a.replace("ours", "floor")):
            pairs = [(run, by[case, b, r]) for (*key, r), run in by.items() if key == [case, a] and (case, b, r) in by]
            row = {"case": case, "median, min, max of": f"{a} / {b}"}
            for name in NUMBERS if pairs else ():
                x = [mine[name] / other[name] for mine, other in pairs]
                row[name] = [statistics.median(x), min(x), max(x)]
            rows += [row] if pairs else []
    return rows


def growth(medians, cases):
    """Slopes of log CPU seconds per update and of log added MB over the log of what is varied."""
    rows, by = [], {row["case"]: row for row in medians if row["side"] == "ours"}
    for what in dict.fromkeys(case.name.split("/")[1] for case in cases if case.name.startswith("growth/")):
        some = [case for case in cases if case.name.startswith(f"growth/{what}/") and case.name in by]
        x = [int(case.name.split("/")[2]) for case in some]
        cpu = [by[case.name]["cpu"] / case.updates for case in some]
        memory = [by[case.name]["added_mb"] for case in some]
        logs = [[math.log(max(value, 0.01)) for value in axis] for axis in (x, cpu, memory)]
        slopes = [statistics.linear_regression(logs[0], y).slope if len(x) > 1 else math.nan for y in logs[1:]]
        numbers = {
            "values": x,
            "cpu": cpu,
            "cpu_exponent": slopes[0],
            "mb": memory,
            "mb_exponent": slopes[1],
        }
        rows.append({"varied": what} | numbers)
    return rows


def commit():
    """What is checked out, and whether code was changed since."""
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    changed = run(["git", "status", "--porcelain", "-uno", "*.py"]).stdout
    return run(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() + " with changes" * bool(changed)


def describe(threads):
    """Machine, date and commit."""
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} CPUs ({(names or [platform.machine()])[0]}), {memory:.0f} GB, {platform.system()}"
    software = f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    about = {
        "machine": machine,
        "software": f"{software}, against {PEER}",
        "threads per process": threads,
    }
    return about | {"date": datetime.date.today().isoformat(), "commit": commit()}


def table(rows):
    """Print a markdown table of dicts with the same keys."""

    def text_of(x):
        return ", ".join(map(text_of, x)) if isinstance(x, list) else f"{x:.3g}" if isinstance(x, float) else str(x)

    for line in [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else ():
        print(f"| {' | '.join(map(text_of, line))} |")
    print()


def has_bfloat16():
    """Whether this CPU multiplies bfloat16 matrices by instructions of its own."""
    import torch

    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def readme(folder):
    """The README's table, out of the JSON files speed*.json in the folder; spreads are smallest and largest."""
    head = [
        "case",
        "answers/s",
        "times comlrl's",
        "CPU time to bare tensor work",
        "peak memory to comlrl's",
        "threads",
    ]
    lines, notes = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)], []
    for path in sorted(folder.glob("speed*.json"), reverse=True):
        result = json.loads(path.read_text())
        by = {(row["case"], row["median, min, max of"]): row for row in result["ratios"]}
        for row in result["medians"]:
            peer, floor = (
                by.get((row["case"], "ours / comlrl")),
                by.get((row["case"], "ours / floor")),
            )
            if row["side"] != "ours" or not peer or not floor:
                continue
            cells = [
                f"{row['case']}, {result['cases'][row['case']]['agents']} agents",
                f"{row['samples_per_s']:.3g}",
            ]
            for x in (peer["samples_per_s"], floor["cpu"], peer["peak_mb"]):
                cells.append(f"{x[0]:.3g} ({x[1]:.3g} to {x[2]:.3g})")
            lines.append("| " + " | ".join([*cells, str(result["about"]["threads per process"])]) + " |")
        if by := {row["varied"]: row for row in result["growth"]}:
            powers = ", ".join(f"{x.replace('-', ' ')} {row['cpu_exponent']:.2f}" for x, row in by.items())
            memory = f"memory, buffer with micro 8, {by['buffer-with-micro-8']['mb_exponent']:.2f}"
            notes += ["", f"- Growth, exponents of CPU time per update: {powers}; of {memory}."]
    return lines + notes


def parse(line=None):
    """The options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["acceptance"], help="patterns, or: acceptance, growth, all")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--sides", nargs="+", help="by default those that belong to the case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, help="joint answers per run, rounded up to whole updates")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--peer-python", help="a Python that has comlrl, instead of a virtual environment made here")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "speed.json")
    parser.add_argument("--readme", action="store_true", help="print the README's table out of the results and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(line)


def main():
    args = parse()
    if args.child:
        case, *others = json.loads(args.child)
        return child(Case(**case), *others)
    if args.readme:
        return print("\n".join(readme(args.output.parent)))
    if args.list:
        return print("\n".join(case.name for case in all_cases()))
    groups = {"acceptance": ACCEPTANCE, "growth": ["growth/*"], "all": ["*"]}
    patterns = [pattern for name in args.cases for pattern in groups.get(name, [name])]
    cases = [case for case in all_cases() if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    if not cases:
        sys.exit("there is no such case, see --list")
    if any(case.model == "smollm2" for case in cases) and not (TESTS / "smollm2").exists():
        print("skipped: all cases on SmolLM2, as tests/smollm2 is missing (python tests/fetch_smollm2.py makes it)")
        cases = [case for case in cases if case.model != "smollm2"]
    if args.samples:
        cases = [replace(case, updates=math.ceil(args.samples / case.buffer)) for case in cases]
    if args.sides:
        cases = [replace(case, sides=args.sides) for case in cases]
    elif any("bf16" in side for case in cases for side in case.sides) and not has_bfloat16():
        print("skipped: bfloat16, which this CPU has no instructions for (--sides takes it all the same)")
        cases = [replace(case, sides=[side for side in case.sides if "bf16" not in side]) for case in cases]
    python = dict.fromkeys((side for case in cases for side in case.sides), sys.executable)
    for side in [side for side in python if side.startswith("comlrl")]:
        python[side] = os.path.abspath(args.peer_python or make_peer(HERE / ".venv-comlrl"))
    order = [(repeat, case, side) for repeat in range(args.repeats) for case in cases for side in case.sides]
    runs = []
    for repeat, case, side in order:
        runs += [{"repeat": repeat} | row for row in run_side(case, side, python[side], args.threads)]
    if not runs:
        return sys.exit("nothing was measured")
    result = {"about": describe(args.threads), "medians": medians(runs), "ratios": ratios(runs)}
    result["growth"] = growth(result["medians"], cases)
    print("\n" + "\n".join(f"{name}: {x}" for name, x in result["about"].items()) + "\n")
    table(result["medians"]), table(result["ratios"]), table(result["growth"])
    result |= {
        "runs": runs,
        "cases": {case.name: asdict(case) | {"samples": case.samples} for case in cases},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(len(runs) < len(order))


if __name__ == "__main__":
    main()
