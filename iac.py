"""IAC: independent actor-critic for several language models that answer together, in one file.

N agents, each a language model, read a prompt each and answer; one reward scores the joint answer. Every agent i has a
critic of its own that reads what agent i reads: the other agents are part of its environment. (In maac.py one critic
reads everything, for all agents; `diff iac.py maac.py` shows the difference.)

    policy     log pi_i(a_i|h_i) = sum_k log softmax(z_k / temperature)[a_k]   h_i: prompt, a_i: answer with stop token
    reward     r_t = R_t - reference_kl_coef * KL_t,  R = reward_processor(reward_func(...))
               KL_t = sum_k [log pi_i(a_k) - log pi_i^ref(a_k)], one-sample estimate; if reference_kl_enabled
    critic     critic_type "v": C(t) = V_i(h_i), read at the end of the prompt
               critic_type "q": C(t) = Q_i(h_i, a_i), read at the end of the answer
    target     y_t = r_t + discount * C_old(t + 1),  y_T = r_T at the last collected turn T
    advantage  A_t = y_t - C_old(t), the TD error, normalised over the samples of one agent and turn
    losses     actor   -mean_b log pi_i(a_b|h_b) * A_b
               critic  value_loss_coef * mean_b (C(b) - y_b)^2

The critic is a model of its own, or with --no-use-separate-critic a value head on the actor's backbone: then one pass
gives scores and values where both are needed, one optimiser steps on both losses, and the squared error is clipped:
max((C - y)^2, (C_clip - y)^2) with C_clip = C_old + clip(C - C_old, -value_clip_range, value_clip_range).

C_old, targets and advantages are fixed at collection; a sample is trained on once. Left out on purpose: importance
ratios, GAE (a target looks one turn ahead), an entropy bonus, dropout. With "q" the same TD error drives the actor, but
Q(h, a) depends on the action and is no baseline: as it fits, the advantage r - Q shrinks to noise. Let it learn slowly.

    python iac.py                                      the demo: two tiny models name numbers that sum to n
    python iac.py --agent-model Qwen/Qwen3-0.6B --chat-template --task my_task.py

Letters: N agents, G generations, T turns, B samples, P prompt tokens, K completion tokens, D hidden width.
"""

import copy
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers
import tyro
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

import common

# ------------------------------------------------------------------------------------------------------- 1 config


@dataclass
class IACConfig:
    """Every setting of the algorithm; the defaults suit a pretrained language model."""

    num_agents: int = 2  # models that answer together
    num_turns: int = 1  # rounds of answers per episode; more than 1 needs an external_transition
    critic_type: Literal["v", "q"] = "v"  # "v": V(h), read after the prompt; "q": Q(h, a), read after the answer
    use_separate_critic: bool = True  # a critic model per agent, or a value head on the actor's own backbone
    num_train_epochs: int = 1  # passes over train_dataset
    agent_learning_rate: float = 5e-6  # AdamW step size of the actors (with a shared backbone: of the critics too)
    critic_learning_rate: float = 5e-6  # AdamW step size of the critics
    value_loss_coef: float = 0.6  # weight of the critic loss
    advantage_normalization: bool = True  # mean 0 and standard deviation 1 within each agent and turn
    rollout_buffer_size: int = 8  # an update starts once each agent has this many samples
    train_batch_size: int | None = None  # samples per optimiser step; None = rollout_buffer_size
    micro_batch_size: int | None = None  # samples that go through a model at once, same gradient; None = all
    rollout_batch_size: int | None = None  # dataset items generated together; None = all up to the next update
    chat_template: bool = False  # wrap prompts in the tokenizer's chat template
    max_new_tokens: int = 256  # length limit of an answer
    temperature: float = 1.0  # of sampling and scoring
    top_p: float = 1.0  # nucleus sampling; 1 = off
    top_k: int | None = None  # sample from the k likeliest tokens; None = off
    num_generations: int = 1  # joint answers per item; more than 1 needs num_turns 1
    external_prompt_passthrough: bool = False  # take the transition's prompts as they are, without the formatter
    discount: float = 1.0  # per turn
    early_termination_threshold: float | None = None  # an episode ends after a turn with a mean reward above this
    reference_kl_enabled: bool = False  # penalise the distance from the initial models
    reference_kl_coef: float = 0.1  # weight of that penalty
    critic_value_head_hidden_dim: int | None = None  # separate critic: width of a tanh layer; None = a linear head
    value_head_hidden_dim: int | None = None  # shared backbone: the same
    value_clip_range: float | None = 0.2  # shared backbone: how far a value may move from C_old; None = off
    max_grad_norm: float | None = 1.0  # gradient clipping per model; None = off
    eval_interval: int = 16  # dataset items between evaluations; 0 = never evaluate
    eval_num_samples: int = 4  # dataset items per evaluation
    eval_batch_size: int = 1  # dataset items generated together in evaluation
    logging_steps: int = 1  # at least this many joint answers between two logged rows
    checkpoint_interval: int = 0  # updates between checkpoints; 0 = one at the end
    parallel_training: Literal["none", "mp"] = "none"  # "none": one device for all; "mp": the devices named below
    agent_devices: list[str] | None = None  # one for all agents or one for each
    critic_devices: list[str] | None = None  # one for all critics or one for each
    reference_devices: list[str] | None = None  # of the reference models; None = the agents'
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; weights are float32 either way
    seed: int = 1  # of sampling, of shuffling mini-batches, of value heads

    def __post_init__(self) -> None:
        """Refuse bad values, naming the field. Unless listed here, integers are at least 1 and floats at least 0."""
        may_be_0 = ("eval_interval", "eval_num_samples", "checkpoint_interval", "seed")
        above_0 = ("temperature", "top_p", "max_grad_norm", "value_clip_range")
        low = dict.fromkeys(may_be_0, 0) | dict.fromkeys(above_0, 1e-6) | {"early_termination_threshold": -1e300}
        high = {"top_p": 1, "discount": 1, "seed": 2**32}
        for f in fields(IACConfig):
            value, kinds = getattr(self, f.name), get_args(f.type) or (f.type,)  # int | None: int, NoneType
            least, most = low.get(f.name, 1 if int in kinds else 0), high.get(f.name, 1e300)  # neither inf nor NaN
            if list[str] in kinds and isinstance(value, str | list | tuple):
                value = [value] if isinstance(value, str) else list(value)
                good = value and all(isinstance(name, str) and name for name in value)
            elif type(value) in (int, float):
                good = least <= value <= most and (type(value) in kinds or float in kinds)
                value = float(value) if good and float in kinds else value
            else:
                good = type(value) in kinds or (type(value) is str and value in kinds)  # a Literal lists strings
            if not good:
                wanted = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds)
                limits = f", at least {least:.10g} and at most {most:.10g}" if {int, float} & set(kinds) else ""
                raise ValueError(f"{f.name}={value!r:.100} must be {wanted}{limits}")
            setattr(self, f.name, value)
        self.train_batch_size = self.train_batch_size or self.rollout_buffer_size
        if self.num_turns > 1 and self.num_generations > 1:
            raise ValueError(f"num_generations={self.num_generations} must be 1 with num_turns={self.num_turns}")
        for name in ("agent_devices", "critic_devices") if self.use_separate_critic else ("agent_devices",):
            if self.parallel_training == "mp" and getattr(self, name) is None:
                raise ValueError(f"{name}=None: parallel_training='mp' needs device names")


# --------------------------------------------------------------------------------------------------------- 2 task


def number_task(num_agents: int, seed: int) -> dict[str, Any]:
    """The built-in task: all agents are shown n, each names a number, and the numbers should add up to n.

    They cannot talk, so they must find a convention: say, agent 0 names 4 whatever n is, and agent 1 the rest. In a
    later turn they see what everybody said. Returns arguments of the trainer, as a task file would define them.
    """

    def first_number(text: str) -> str:
        return (re.findall(r"\d{1,4}", text) or ["?"])[0]

    def reward_func(*completions: list[str], batch_items: list[dict]) -> list[float]:  # one number per joint answer
        answers = [[first_number(text) for text in joint] for joint in zip(*completions, strict=True)]
        misses = [math.inf if "?" in a else abs(sum(map(int, a)) - batch_items[0]["n"]) for a in answers]
        return [max(0.0, 1 - miss / 5) for miss in misses]

    def external_transition(prompt: str, agent_completions: list[str], **others: Any) -> list[str]:
        return [f"{prompt}, said {' '.join(map(first_number, agent_completions))}"] * num_agents

    # "agent 1 of 2: sum to 7, said 3 5 ="
    formatters = [lambda x, i=i: f"agent {i + 1} of {num_agents}: {x['prompt']} =" for i in range(num_agents)]
    rng = random.Random(seed)
    rows = [{"prompt": f"sum to {n}", "n": n} for n in (rng.randrange(10) for _ in range(2000))]
    functions = {"reward_func": reward_func, "external_transition": external_transition}
    return {"train_dataset": rows[:1600], "eval_dataset": rows[1600:], "formatters": formatters, **functions}


def call_reward(reward_func: Callable, completions: list[list[str]], prompts: list[str], item: Mapping) -> Any:
    """Call a reward function the way its signature asks for.

    Its positional parameters get the agents' answers, a list of G strings each. If it requires one more than there are
    agents, the first gets the prompts; if it requires a single one, that gets the list of all agents' lists. Parameters
    named `prompts` (N strings) or `batch_items` (a list of the one item) are filled wherever they stand; **kwargs too.
    """
    parameters = common.parameters(reward_func)
    kinds = {p.kind.name for p in parameters.values()}
    places = [p for p in parameters.values() if p.kind.name in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    named: dict[str, list] = {"prompts": list(prompts), "batch_items": [item]}
    required = sum(p.default is p.empty and p.name not in named for p in places)
    answers: list[Any] = [list(texts) for texts in completions]
    if "VAR_POSITIONAL" not in kinds and required == len(answers) + 1:
        answers.insert(0, list(prompts))
    elif "VAR_POSITIONAL" not in kinds and required == 1 < len(answers):
        answers = [answers]
    positional = []
    for p in places:
        if p.name not in named and not answers:
            break  # this one and those after it keep their defaults or are given by name
        positional.append(named.pop(p.name) if p.name in named else answers.pop(0))
    by_name = {name: x for name, x in named.items() if name in parameters or "VAR_KEYWORD" in kinds}
    return reward_func(*positional, *answers, **by_name)


def read_rewards(raw: Any, N: int, G: int, where: str) -> list[list[float]]:
    """Rewards [N][G] out of what a reward function returned for N agents and G joint answers.

    That is one number for the whole call, or G numbers, one per joint answer, or else N numbers, one per agent, or an
    N x G matrix; a list, tuple, array or tensor. Anything else is a ValueError, also a number too big to square.
    """
    try:
        rewards = torch.as_tensor(raw, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, text, rows of different lengths
        rewards = torch.tensor(math.nan)
    per_agent = rewards.shape == (N,) and N != G
    if not (per_agent or rewards.shape in ((), (G,), (N, G))) or not rewards.float().square().isfinite().all():
        got = (f"{len(raw)} values, " if isinstance(raw, Sequence) or getattr(raw, "ndim", 0) else "") + f"{raw!r:.200}"
        forms = f"a number, {G} numbers (one per joint answer), {N} numbers (one per agent) or {N} lists of {G} numbers"
        raise ValueError(f"{where}: expected a reward of {forms}, all finite, also squared; got {got}")
    return (rewards[:, None] if per_agent else rewards).expand(N, G).tolist()


# ------------------------------------------------------------------------------------------------------- 3 critic


class Critic(nn.Module):
    """A language model's backbone, and in place of its head a float32 value head that reads the last token."""

    def __init__(self, source: Any, backbone: nn.Module, hidden_dim: int | None, seed: int) -> None:
        """Put a head D -> 1 on the backbone, with a tanh layer in between if hidden_dim is given.

        Its last layer starts at zero (values are 0 at first), unless `save_model` left a trained head in `source`.
        """
        super().__init__()
        self.backbone, config = backbone, backbone.config.get_text_config()
        D = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT-350m's last hidden states are narrower
        path = common.find_file(source, "value_head.safetensors")
        saved = load_file(path) if path else {}
        linear = [x for _, x in sorted(saved.items()) if x.dim() == 2]  # weights of the head's linear layers, in order
        trained = len(linear[0]) if len(linear) > 1 else None
        if saved and hidden_dim not in (None, trained):
            raise ValueError(f"a value head's hidden_dim={hidden_dim}: the one saved in {source!r} has {trained}")
        hidden_dim = hidden_dim or trained
        with torch.random.fork_rng(devices=[]):  # building a trainer leaves the global random state as it was
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
            hidden = [nn.Linear(D, hidden_dim), nn.Tanh()] if hidden_dim else []
            self.value_head = nn.Sequential(*hidden, nn.Linear(hidden_dim or D, 1)).to(backbone.device, torch.float32)
        for parameter in self.value_head[-1].parameters():
            nn.init.zeros_(parameter)
        if saved:
            self.value_head.load_state_dict(saved)

    def forward(self, sequences: list[list[int]], dtype: str) -> Tensor:
        """Values [B] of B token sequences."""
        return self.value(common.last_hidden(self.backbone, sequences, dtype))

    def value(self, hidden: Tensor) -> Tensor:
        """Values [B] of hidden states [B, D]."""
        return self.value_head(hidden.float()).squeeze(-1)


# ------------------------------------------------------------------------------------------------ 4 buffer record


@dataclass
class RolloutSample:
    """One agent's answer in one turn of one episode; the fields are filled in from top to bottom."""

    agent_idx: int
    row: int  # in the dataset
    turn_idx: int
    generation_idx: int
    item: Mapping | None  # the dataset row; None in the buffer, as a checkpoint holds plain data
    prompt: str
    prompt_ids: list[int]  # h_i
    completion: str = ""  # without the stop token
    completion_ids: list[int] = field(default_factory=list)  # a_i: as generated, a stop token included
    finished: bool = False  # ended by a stop token, not by the length limit
    reward: float = 0.0  # R: processed, before the KL penalty
    critic_ids: list[int] = field(default_factory=list)  # what the critic reads: h_i, with "q" then a_i
    reference_kl: float = 0.0  # KL_t
    old_value: float = 0.0  # C_old(t)
    target: float = 0.0  # y_t
    advantage: float = 0.0  # y_t - C_old(t); normalised only in `update`
    expected_return: float = 0.0  # R summed from this turn on, undiscounted


# ------------------------------------------------------------------------------- 5 targets, advantages and losses


def td_targets(rewards: list[float], values: list[float], discount: float) -> tuple[list[float], list[float]]:
    """Targets y_t and TD errors y_t - C_old(t) of one agent's T collected turns.

    With discount 1, rewards [1, 2] and values [0.5, 0.25] the targets are [1.25, 2] and the TD errors [0.75, 1.75].
    """
    next_values = [*values[1:], 0.0]  # nothing follows the last collected turn
    targets = [r + discount * v for r, v in zip(rewards, next_values, strict=True)]
    return targets, [y - v for y, v in zip(targets, values, strict=True)]


def normalize_advantages(advantages: Tensor) -> Tensor:
    """(A - mean) / max(std, 1e-6) of advantages [B], with the population std; a single one is left as it is."""
    if len(advantages) == 1:
        return advantages
    exact = advantages.double()  # equal advantages must become 0, and their mean is exact only in float64
    return ((exact - exact.mean()) / exact.std(correction=0).clamp(min=1e-6)).float()


def reference_kl(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """One-sample KL estimates [B]: sum_k [log pi(a_k) - log pi_ref(a_k)] over the generated tokens of [B, K]."""
    return torch.where(mask, logprobs - reference, 0.0).sum(-1)


def policy_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-log pi(a|h) * A of each sample: logprobs [B, K], 0 at padding, and advantages [B] -> [B]."""
    return -logprobs.sum(-1) * advantages


def value_loss(values: Tensor, targets: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """(C - y)^2 of each sample, [B]; with a clip range the larger of that and (C_clip - y)^2."""
    if clip is None:
        return (values - targets) ** 2
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)


def explained_variance(values: Tensor, targets: Tensor) -> list[float]:
    """[1 - Var(y - C_old) / Var(y)], or [], nothing to log, where the targets [B] do not vary."""
    variance = targets.double().var(correction=0)  # exactly 0 if they are equal
    return [(1 - (targets - values).double().var(correction=0) / variance).item()] if variance > 1e-12 else []


# ------------------------------------------------------------------------------------------------------ 6 trainer


ALGORITHM = "iac"  # names the folders of runs, and tells one file's runs from the other's
# Attributes that a checkpoint brings back: epoch, next row in it, items, joint answers and updates done, ...
POSITION = ("epoch", "row", "items_done", "env_step", "updates", "logged_step", "truncated", "run_id")
LOADING = ("model_kwargs", "critic_model_kwargs", "tokenizer_kwargs")  # the keys of model_config
MAY_CHANGE = {"num_train_epochs", "checkpoint_interval", "resume", "output_dir", "track"}  # on resumption


def read_settings(run: str) -> dict[str, Any]:
    """The config.json in the folder of a run; ValueError if it is not one of this file's."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(os.path.join(run, "config.json")) as file:
        settings = json.load(file)
        if settings["algorithm"] == ALGORITHM:
            return settings
    raise ValueError(f"{run} is not the folder of a run of {ALGORITHM}.py (give that one, not the checkpoint/ in it)")


class IACTrainer:
    """Trains N agents, each with a critic of its own; whatever does not fit together is refused with a ValueError."""

    def __init__(
        self,
        *,
        agent_model: str | nn.Module | None = None,  # folder or hub name, each agent loads a copy; a model if N = 1
        agents: Sequence[str | nn.Module] | None = None,  # instead: one for each agent
        critic_model: str | nn.Module | None = None,  # the same for critics; a model in memory serves all agents
        critics: Sequence[str | nn.Module] | None = None,  # instead: one for each critic
        tokenizer: Any = None,  # one, or a list with one for each agent; by default the one that agent_model names
        reward_func: Callable | None = None,  # see call_reward and read_rewards
        reward_processor: Callable[[float], float] | None = None,  # applied to every reward
        formatters: Callable | Sequence[Callable] | None = None,  # item -> prompt, one or one for each agent
        args: IACConfig | None = None,
        train_dataset: Any = None,  # dicts: a list, a Hugging Face Dataset, any iterable
        eval_dataset: Any = None,  # the same, for evaluate()
        model_config: dict[str, Any] | None = None,  # model_kwargs, critic_model_kwargs, tokenizer_kwargs
        wandb_config: dict[str, Any] | None = None,  # arguments of wandb.init
        metrics_callback: Callable | None = None,  # an item's RolloutSamples -> dict of further metrics
        external_transition: Callable | None = None,  # the next turn's prompts, see turn_prompts
        output_dir: str | None = None,  # a new folder, by default one in runs/
    ) -> None:
        self.args = args = IACConfig() if args is None else args

        def check(name: str, x: Any, kind: Any) -> None:
            if not isinstance(x, kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {x!r:.200}")

        check("args", args, IACConfig)
        N, separate, options = args.num_agents, args.use_separate_critic, model_config or {}
        formatters = (lambda item: item["prompt"]) if formatters is None else formatters
        self.formatters = [formatters] * N if callable(formatters) else formatters
        if not isinstance(self.formatters, Sequence) or len(self.formatters) != N:
            raise ValueError(f"formatters must be a function or a list of {N}, got {formatters!r:.200}")
        self.reward_func, self.external_transition = reward_func, external_transition
        self.reward_processor = reward_processor or float  # by default nothing is changed
        self.metrics_callback = metrics_callback or (lambda rollout: {})
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.wandb_config, self.output_dir = wandb_config, output_dir
        if not isinstance(options, Mapping) or set(options) - set(LOADING):
            raise ValueError(f"model_config must be a dict with keys among {LOADING}, got {options!r:.200}")
        for name in ("reward_func", "reward_processor", "metrics_callback"):
            check(name, getattr(self, name), Callable)
        check("wandb_config", {} if wandb_config is None else wandb_config, Mapping)
        for i, formatter in enumerate(self.formatters):
            check(f"formatters[{i}]", formatter, Callable)
        self.informed = ["external_prompts" in common.parameters(x) for x in self.formatters]  # those that take it
        for name in [name for name in options if name.endswith("_kwargs")]:
            check(f"model_config[{name!r}]", options[name], Mapping)
        for name, x in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):  # keys: a dict, a table
            if hasattr(x, "keys") or not (x is None or hasattr(x, "__getitem__") or hasattr(x, "__iter__")):
                raise ValueError(f"{name} must be a list of dicts or the like, one for each row; got {x!r:.200}")
            if isinstance(x, Iterator) and (name == "eval_dataset" or args.num_train_epochs > 1):
                raise ValueError(f"{name} is to be read several times, which {x!r:.200} cannot: make it a list")
        if args.num_turns > 1 or external_transition is not None:
            check(f"external_transition (num_turns={args.num_turns})", external_transition, Callable)

        given = {"agent_model": agent_model, "agents": agents, "critic_model": critic_model, "critics": critics}
        sources = critic_sources = common.resolve_sources(given, "agent_model", "agents", N)
        num_critics = 1 if isinstance(critic_model, nn.Module) else N  # one model in memory serves all agents
        self.critic_of = [i % num_critics for i in range(N)]  # agent i is judged by self.critics[self.critic_of[i]]
        if separate:
            critic_sources = common.resolve_sources(given, "critic_model", "critics", num_critics)
        elif critic_model is not None or critics is not None:
            raise ValueError("critic_model and critics have no place with use_separate_critic=False")
        groups = [("agent_devices", args.agent_devices, N), ("critic_devices", args.critic_devices, num_critics)]
        groups += [("reference_devices", args.reference_devices, N)]
        self.agent_devices, critic_devices, reference_devices = common.place(args.parallel_training, groups)
        self.agents = common.load("agents", sources, self.agent_devices, options.get("model_kwargs", {}))
        # The references: names load anew, models in memory are copied before training changes them.
        frozen = copy.deepcopy(sources) if args.reference_kl_enabled and args.reference_kl_coef > 0 else []
        self.references = common.load("references", frozen, reference_devices, options.get("model_kwargs", {}))
        backbones, hidden_dim = [agent.base_model for agent in self.agents], args.value_head_hidden_dim
        if separate:
            backbones = common.load("critics", critic_sources, critic_devices, options.get("critic_model_kwargs", {}))
            hidden_dim = args.critic_value_head_hidden_dim
        common.refuse_shared_weights(agents=self.agents, critics=backbones if separate else [])
        self.critics = [Critic(critic_sources[c], x, hidden_dim, args.seed + c) for c, x in enumerate(backbones)]
        self.tokenizers = common.resolve_tokenizers(tokenizer, agent_model, N, options.get("tokenizer_kwargs", {}))
        self.embeddings = []  # for each agent, how many ids it and its critic both know
        for i, (tok, c) in enumerate(zip(self.tokenizers, self.critic_of, strict=True)):
            known = common.check_vocabulary(f"agents[{i}]", self.agents[i], sources[i], tok)
            known_to_critic = common.check_vocabulary(f"critics[{c}]", backbones[c], critic_sources[c], tok)
            self.embeddings.append(min(known, known_to_critic))
        self.prompt_limits = [common.max_positions(agent) - args.max_new_tokens for agent in self.agents]
        if min(self.prompt_limits) < 1:
            raise ValueError(f"max_new_tokens={args.max_new_tokens} leaves a prompt no room in the models' positions")
        self.stops = [common.stop_ids(*pair) for pair in zip(self.agents, self.tokenizers, strict=True)]

        def adamw(learning_rate: float, *modules: nn.Module) -> torch.optim.Optimizer:
            parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
            return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)

        heads = [[] if separate else [self.critics[i].value_head] for i in range(N)]  # one optimiser for both
        self.agent_optimizers = [adamw(args.agent_learning_rate, self.agents[i], *heads[i]) for i in range(N)]
        self.critic_optimizers = [adamw(args.critic_learning_rate, x) for x in self.critics if separate]
        self.generators, self.shuffle = self.new_generators(args.seed), torch.Generator().manual_seed(args.seed)
        self.stateful = [*self.agents, *self.critics, *self.agent_optimizers, *self.critic_optimizers]
        self.all_generators = [*self.generators, self.shuffle, torch.default_generator]
        self.buffers: list[list[RolloutSample]] = [[] for _ in range(N)]
        self.metrics: dict[str, list[float]] = defaultdict(list)  # values to average in the next logged row
        self.seconds: dict[str, float] = defaultdict(float)  # time in each part since the last logged row
        self.epoch = self.row = self.items_done = self.env_step = self.updates = self.logged_step = self.truncated = 0
        self.run_id, self.logged_at, self.tracker = os.urandom(4).hex(), time.perf_counter(), None
        self.running = self.updating = self.stopping = False  # a run has begun; weights are on the move; Ctrl-C came
        self.snapshot()

    def new_generators(self, seed: int) -> list[torch.Generator]:
        """A sampling generator for each agent."""
        return [torch.Generator(agent.device).manual_seed(1000 * seed + i) for i, agent in enumerate(self.agents)]

    def turn_prompts(self, item: Mapping, turn: int, rollout: list[RolloutSample], where: str) -> list[str]:
        """The N prompts of an item's next turn, given the samples of its turns so far."""
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}: a dataset item must be a dict, got {item!r:.200}")
        N, prompts = self.args.num_agents, []
        external, items = [None] * N, [item] * N
        if turn > 0:
            own = [[s for s in rollout if s.agent_idx == i] for i in range(N)]
            external = self.external_transition(
                prompt=item.get("prompt", ""),
                agent_completions=[samples[-1].completion for samples in own],
                num_agents=N,
                prompt_history_per_agent=[[s.prompt for s in samples] for samples in own],
                response_history_per_agent=[[s.completion for s in samples] for samples in own],
            )
            is_list = isinstance(external, list | tuple) and len(external) == N
            if not is_list or not all(isinstance(text, str) and text.strip() for text in external):
                raise ValueError(f"{where}: external_transition must return a string per agent, got {external!r:.200}")
            if self.args.external_prompt_passthrough:
                return list(external)
            items = [{**item, "_original_prompt": item.get("prompt", ""), "prompt": text} for text in external]
        for i, formatter in enumerate(self.formatters):
            try:
                prompts.append(formatter(items[i], **({"external_prompts": external[i]} if self.informed[i] else {})))
            except KeyError as error:
                raise ValueError(f"{where}, agent {i}: the formatter found no {error} in {item!r:.200}") from error
            if not isinstance(prompts[i], str) or not prompts[i].strip():
                raise ValueError(f"{where}, agent {i}: the formatter returned {prompts[i]!r:.200}, not a prompt")
        return prompts

    def micro_batches(self, samples: Sequence | Tensor) -> list[Any]:
        """Pieces of at most micro_batch_size samples, each of which goes through a model at once."""
        size = self.args.micro_batch_size or len(samples)
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def score(self, model: nn.Module, samples: list[RolloutSample], return_hidden: bool = False) -> common.Scores:
        """Score the answers of B samples by a model: one forward pass."""
        prompts, completions = [s.prompt_ids for s in samples], [s.completion_ids for s in samples]
        return common.score(model, prompts, completions, self.args.temperature, self.args.dtype, return_hidden)

    def values(self, i: int, samples: list[RolloutSample], hidden: Tensor | None = None) -> Tensor:
        """Values [B] of agent i's samples, by a pass of its critic or from hidden states [B, K + 1, D] of a score."""
        critic = self.critics[self.critic_of[i]]
        if hidden is None:
            return critic([s.critic_ids for s in samples], self.args.dtype)
        column = [len(s.critic_ids) - len(s.prompt_ids) for s in samples]  # both begin with the prompt: 0 is its end
        return critic.value(hidden[torch.arange(len(samples)), column])

    @torch.no_grad()
    def appraise(self, samples: list[list[RolloutSample]]) -> None:
        """Fill in critic_ids, reference_kl and old_value of samples [N][B], with the weights that drew them."""
        for i, own in enumerate(samples):
            limit = common.max_positions(self.critics[self.critic_of[i]].backbone)
            for s in own:
                ids = s.prompt_ids + s.completion_ids if self.args.critic_type == "q" else s.prompt_ids
                ids = [min(token, self.embeddings[i] - 1) for token in ids]  # agents can draw unused ids
                s.critic_ids = common.keep_end(ids, limit, self.tokenizers[i])
            for batch in self.micro_batches(own):
                hidden = None
                if self.references:  # with a shared backbone this pass gives the values too
                    scores = self.score(self.agents[i], batch, return_hidden=not self.args.use_separate_critic)
                    reference = self.score(self.references[i], batch).logprobs.to(scores.logprobs.device)
                    penalties, hidden = reference_kl(scores.logprobs, reference, scores.mask), scores.hidden
                    for s, kl in zip(batch, penalties.tolist(), strict=True):
                        s.reference_kl = kl
                for s, value in zip(batch, self.values(i, batch, hidden).tolist(), strict=True):
                    s.old_value = value

    def collect(self, items: list, first_row: int, generators: list, G: int, train: bool = True) -> list[list]:
        """Play all items side by side, batched; returns each one's samples in order of turn, agent, generation."""
        args, N = self.args, self.args.num_agents
        sampling = (args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.dtype)
        rollouts: list[list[RolloutSample]] = [[] for _ in items]
        active = list(range(len(items)))  # items e whose episode goes on; B = len(active) * G, generations innermost
        for turn in range(args.num_turns):
            where = [f"row {first_row + e}, turn {turn + 1}" for e in range(len(items))]
            samples: list[list[RolloutSample]] = [[] for _ in range(N)]  # [N][B]
            prompts = [self.turn_prompts(items[e], turn, rollouts[e], where[e]) for e in active]  # [items][N]
            for i, agent_prompts in enumerate(zip(*prompts, strict=True)):
                places = [f"{where[e]}, agent {i}" for e in active]
                ids = common.encode(self.tokenizers[i], agent_prompts, places, self.embeddings[i], args.chat_template)
                for e, prompt, whole in zip(active, agent_prompts, ids, strict=True):
                    kept = common.keep_end(whole, self.prompt_limits[i], self.tokenizers[i])
                    self.truncated += int(train and len(kept) < len(whole))
                    samples[i] += [RolloutSample(i, first_row + e, turn, g, items[e], prompt, kept) for g in range(G)]
            prompt_ids = [[s.prompt_ids for s in own] for own in samples]
            drawn = common.generate_all(self.agents, prompt_ids, self.stops, generators, self.agent_devices, sampling)
            for i, own in enumerate(samples):
                for s, answer in zip(own, drawn[i], strict=True):
                    s.completion_ids, s.finished = answer, answer[-1] in self.stops[i]
                    text_ids = answer[:-1] if s.finished else answer
                    s.completion = self.tokenizers[i].decode(text_ids, skip_special_tokens=True)
            for j, e in enumerate(active):
                joint = [own[j * G : (j + 1) * G] for own in samples]  # [N][G]
                texts, asked = [[s.completion for s in own] for own in joint], [own[0].prompt for own in joint]
                raw = read_rewards(call_reward(self.reward_func, texts, asked, items[e]), N, G, where[e])
                processed = [[self.reward_processor(reward) for reward in row] for row in raw]
                for own, row in zip(joint, read_rewards(processed, N, G, f"{where[e]}, reward_processor"), strict=True):
                    for s, reward in zip(own, row, strict=True):
                        s.reward = reward
                        rollouts[e].append(s)
            if train:
                self.appraise(samples)
            if (threshold := args.early_termination_threshold) is not None:  # a sum: a mean of equals may be rounded up
                active = [e for e in active if sum(s.reward - threshold for s in rollouts[e][-N * G :]) <= 0]
            if not active:
                break
        for rollout in rollouts:
            for j in range(N * G):
                path = rollout[j :: N * G]  # the T collected turns of one agent and generation
                rewards = [s.reward - args.reference_kl_coef * s.reference_kl for s in path]
                targets, td_errors = td_targets(rewards, [s.old_value for s in path], args.discount)
                for t, s in enumerate(path):
                    s.target, s.advantage = targets[t], td_errors[t]
                    s.expected_return = sum(x.reward for x in path[t:])
        return rollouts

    def update(self, i: int) -> None:
        """Update agent i and its critic on the whole buffer: turn by turn, shuffled, in mini-batches."""
        buffer, self.buffers[i] = self.buffers[i], []
        for turn in sorted({s.turn_idx for s in buffer}):
            group = [s for s in buffer if s.turn_idx == turn]
            advantages, old_values, targets = torch.tensor([[s.advantage, s.old_value, s.target] for s in group]).T
            self.metrics[f"agent_{i}/advantage_mean"] += advantages.tolist()
            self.metrics[f"critic_{self.critic_of[i]}/value_mean"] += old_values.tolist()
            self.metrics[f"critic_{self.critic_of[i]}/explained_variance"] += explained_variance(old_values, targets)
            if self.args.advantage_normalization:
                advantages = normalize_advantages(advantages)
            for mb_inds in torch.randperm(len(group), generator=self.shuffle).split(self.args.train_batch_size):
                batch = [group[b] for b in mb_inds.tolist()]
                self.actor_step(i, batch, advantages[mb_inds])
                if self.args.use_separate_critic:
                    self.critic_step(i, batch)

    def actor_step(self, i: int, samples: list[RolloutSample], advantages: Tensor) -> None:
        """One optimiser step of agent i on B samples and advantages [B]; with a shared backbone, of its critic too."""
        for batch, A in zip(self.micro_batches(samples), self.micro_batches(advantages), strict=True):
            scores = self.score(self.agents[i], batch, return_hidden=not self.args.use_separate_critic)
            losses = policy_loss(scores.logprobs, A.to(scores.logprobs.device))
            self.metrics[f"agent_{i}/policy_loss"] += losses.tolist()
            if not self.args.use_separate_critic:
                losses = losses + self.critic_losses(i, batch, scores.hidden)
            (losses.sum() / len(samples)).backward()
        self.optimizer_step(f"agent_{i}/grad_norm", self.agent_optimizers[i])

    def critic_step(self, i: int, samples: list[RolloutSample]) -> None:
        """One optimiser step of agent i's critic on B samples."""
        for batch in self.micro_batches(samples):
            (self.critic_losses(i, batch).sum() / len(samples)).backward()
        self.optimizer_step(f"critic_{self.critic_of[i]}/grad_norm", self.critic_optimizers[self.critic_of[i]])

    def critic_losses(self, i: int, samples: list[RolloutSample], hidden: Tensor | None = None) -> Tensor:
        """value_loss_coef times the value loss [B], which is clipped with a shared backbone."""
        clip = None if self.args.use_separate_critic else self.args.value_clip_range
        values = self.values(i, samples, hidden)
        targets, old_values = torch.tensor([[s.target, s.old_value] for s in samples], device=values.device).T
        losses = value_loss(values, targets, old_values, clip)
        self.metrics[f"critic_{self.critic_of[i]}/value_loss"] += losses.tolist()
        return self.args.value_loss_coef * losses

    def optimizer_step(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Check that the gradient is finite, clip it, take the step and clear the gradient."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not norm.isfinite():
            raise FloatingPointError(f"{name} is {norm.item()}: this step was not taken")
        if self.args.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)
        self.metrics[name].append(norm.item())
        optimizer.step()
        optimizer.zero_grad()

    def add_metrics(self, metrics: dict[str, list[float]], rollout: list[RolloutSample], prefix: str = "") -> None:
        """Append an item's metrics, the user's among them, to lists that are averaged later."""
        for s in rollout:
            turn, agent = f"{prefix}turn_{s.turn_idx + 1}", f"{prefix}agent_{s.agent_idx}"
            metrics[f"{turn}/reward_mean"].append(s.reward)
            metrics[f"{turn}/expected_return"].append(s.expected_return)
            metrics[f"{agent}/reward_mean"].append(s.reward)
            metrics[f"{agent}/completion_tokens"].append(len(s.completion_ids))
            metrics[f"{agent}/finished_fraction"].append(float(s.finished))
            if self.references and not prefix:
                metrics[f"{agent}/reference_kl"].append(s.reference_kl)
        further = self.metrics_callback(rollout)
        try:
            for name, value in further.items():
                metrics[f"{prefix}{name}"] += [float(value)] if math.isfinite(value) else []  # not finite: left out
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"metrics_callback must return a dict of numbers, got {further!r:.200}") from error

    def evaluate(self) -> dict[str, float]:
        """Mean metrics, named eval/..., of eval_num_samples items of eval_dataset with one joint answer each.

        Answers are drawn with other generators, seeded by env_step: evaluating changes nothing in training.
        """
        args, rollouts, metrics = self.args, [], defaultdict(list)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # the user's functions may draw
        dataset = () if self.eval_dataset is None else self.eval_dataset
        items = list(islice(common.iterate(dataset), args.eval_num_samples))
        generators = self.new_generators(args.seed + 7919 * (self.env_step + 1))  # far from any run's own seed
        for start in range(0, len(items), args.eval_batch_size):
            rollouts += self.collect(items[start : start + args.eval_batch_size], start, generators, 1, train=False)
        for number, rollout in enumerate(rollouts):
            self.add_metrics(metrics, rollout, "eval/")
            for s in rollout:
                row = {"row": s.row, "turn": s.turn_idx + 1, "agent": s.agent_idx, "prompt": s.prompt}
                self.write("completions.jsonl", row | {"completion": s.completion, "reward": s.reward})
                if number < 3:  # a few on the console
                    tqdm.write(f"  {s.prompt[-60:]!r} -> {s.completion[:60]!r}, reward {s.reward:.2f}")
        for restore, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), states, strict=True):
            restore(state)
        return {name: sum(values) / len(values) for name, values in metrics.items() if values}

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to a file of the run, if there is a run."""
        if self.running:
            with open(os.path.join(self.output_dir, name), "a") as file:
                file.write(json.dumps({"env_step": self.env_step} | row, allow_nan=False) + "\n")

    def report(self) -> None:
        """Evaluate, and average the metrics since the last row, each if it is due; write what there is as one row."""
        args, ended = self.args, self.epoch == self.args.num_train_epochs
        row = self.evaluate() if args.eval_interval and (ended or self.items_done % args.eval_interval == 0) else {}
        for name, value in row.items():
            if name.startswith("eval/turn_") and name.endswith("/reward_mean"):
                tqdm.write(f"  env_step {self.env_step}: {name} {value:.3f}")
        if not self.buffers[0] and (ended or self.env_step - self.logged_step >= args.logging_steps):  # after an update
            row |= {name: sum(values) / len(values) for name, values in self.metrics.items() if values}
            steps, seconds = self.env_step - self.logged_step, time.perf_counter() - self.logged_at
            row |= {f"time/{part}": spent / seconds for part, spent in self.seconds.items()}
            row |= {"time/env_steps_per_second": steps / seconds, "truncated_prompts": self.truncated}
            self.metrics.clear()
            self.seconds.clear()
            self.logged_step, self.logged_at = self.env_step, time.perf_counter()
        if row:
            self.write("metrics.jsonl", row)
            if self.tracker:
                self.tracker.log(row, step=self.env_step)

    def save_model(self, path: str) -> None:
        """Write agent_{i}/, an ordinary Hugging Face model and its tokenizer, and critic_{c}/ with the value head."""
        new, old = (f"{os.path.abspath(path)}.{ending}" for ending in ("new", "old"))
        if os.path.exists(path) and not all(re.fullmatch(r"(agent|critic)_\d+", name) for name in os.listdir(path)):
            raise ValueError(f"{path} holds other things than saved models, which would be lost: name a new folder")
        shutil.rmtree(new, ignore_errors=True)
        for i, agent in enumerate(self.agents):
            agent.save_pretrained(f"{new}/agent_{i}")
            self.tokenizers[i].save_pretrained(f"{new}/agent_{i}")
        for c, critic in enumerate(self.critics):
            home = f"{new}/critic_{c}" if self.args.use_separate_critic else f"{new}/agent_{c}"
            if self.args.use_separate_critic:
                critic.backbone.save_pretrained(home)
            save_file(critic.value_head.state_dict(), f"{home}/value_head.safetensors")
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(path):
            os.rename(path, old)
        os.rename(new, path)  # at any moment there are whole models
        shutil.rmtree(old, ignore_errors=True)

    def snapshot(self) -> None:
        """Note all but the weights for a checkpoint, between two batches: a batch broken off leaves no trace."""
        files = [os.path.join(self.output_dir, name) for name in ("metrics.jsonl", "completions.jsonl") if self.running]
        _, keys, *others = np.random.get_state()  # a list below: weights_only loads no arrays
        self.state = {name: getattr(self, name) for name in POSITION} | {
            "generators": [x.get_state() for x in self.all_generators],
            "random": (random.getstate(), ("MT19937", keys.tolist(), *others)),  # the user's functions may draw
            "buffers": [list(buffer) for buffer in self.buffers],
            "metrics": {name: list(values) for name, values in self.metrics.items()},
            "sizes": {os.path.basename(file): os.path.getsize(file) for file in files if os.path.exists(file)},
        }

    def save_checkpoint(self, path: str) -> None:
        """Write all that changes in training, for `train(resume_from=...)` to go on as if nothing had happened."""
        state = self.state | {"settings": self.settings, "weights": [x.state_dict() for x in self.stateful]}
        state["buffers"] = [[asdict(s) for s in buffer] for buffer in state["buffers"]]
        file = os.path.join(path, "state.pt")
        try:
            os.makedirs(path, exist_ok=True)
            torch.save(state, f"{file}.new")
            os.replace(f"{file}.new", file)  # at any moment there is one whole file
        except Exception as error:
            raise OSError(f"{file} could not be written, an earlier one is still whole: {error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same when a run is resumed, but for MAY_CHANGE."""
        return {"algorithm": ALGORITHM} | {f.name: getattr(self.args, f.name) for f in fields(self.args)}

    def refuse_other(self, settings: dict[str, Any], path: str) -> None:
        """ValueError unless the settings of the run in `path` are those of this trainer."""
        for name, own in self.settings.items():
            other = settings.get(name, getattr(type(self.args), name, None))  # a field may be younger than the run
            if name not in MAY_CHANGE and other != own:
                raise ValueError(f"{path} is of a run with {name}={other!r}, here it is {own!r}")

    def load_checkpoint(self, path: str) -> None:
        """Take up the state that `save_checkpoint` wrote."""
        state = torch.load(os.path.join(path, "state.pt"), map_location="cpu", weights_only=True)
        self.refuse_other(state["settings"], path)
        if state["epoch"] > self.args.num_train_epochs:
            raise ValueError(f"num_train_epochs={self.args.num_train_epochs}: {path} has done {state['epoch']} already")
        for name in POSITION:
            setattr(self, name, state[name])
        for x, saved in zip(self.stateful, state["weights"], strict=True):
            x.load_state_dict(saved)
        for optimizer in [*self.agent_optimizers, *self.critic_optimizers]:
            optimizer.zero_grad()  # an error may have left gradients behind
        for x, saved in zip(self.all_generators, state["generators"], strict=True):
            x.set_state(saved)
        random.setstate(state["random"][0])
        np.random.set_state(state["random"][1])
        state["buffers"] = self.buffers = [[RolloutSample(**s) for s in buffer] for buffer in state["buffers"]]
        self.state, self.metrics = state, defaultdict(list, state["metrics"])

    def start_run(self, resume_from: str | None) -> None:
        """Make a new folder for the run, or take up a run in its own folder; start the W&B run."""
        args, stamp = self.args, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
        if self.train_dataset is None or (self.running and isinstance(self.train_dataset, Iterator)):
            raise ValueError("train_dataset is required to train, and one that can be read again to go on")
        if args.eval_interval and self.eval_dataset is None:
            tqdm.write("There is no eval_dataset: nothing is evaluated.")
        if hasattr(self.train_dataset, "__len__"):  # a bad row shows now, not after hours
            for row, item in enumerate(common.iterate(self.train_dataset)):
                self.turn_prompts(item, 0, [], f"row {row}, turn 1")
        is_checkpoint = resume_from and os.path.exists(os.path.join(resume_from, "state.pt"))
        if resume_from and not is_checkpoint:  # a run's folder: go on in it, from the start if it has no checkpoint
            self.output_dir = resume_from
            self.refuse_other(read_settings(resume_from), resume_from)
            if os.path.exists(os.path.join(resume_from, "checkpoint", "state.pt")):
                self.load_checkpoint(os.path.join(resume_from, "checkpoint"))
            elif self.running:
                raise ValueError(f"{resume_from} has no checkpoint: begin again with a new trainer")
        else:  # a new folder, for a new run or for one that goes on from a checkpoint elsewhere
            if is_checkpoint:
                self.load_checkpoint(resume_from)
            self.output_dir = self.output_dir or f"runs/{ALGORITHM}__{args.critic_type}__{args.seed}__{stamp}"
            os.makedirs(self.output_dir, exist_ok=True)
            if os.listdir(self.output_dir):
                raise ValueError(f"output_dir={self.output_dir!r} holds files already: name a new folder or resume it")
            self.state["sizes"] = {}  # those of the other folder's files
        for name in ("metrics.jsonl", "completions.jsonl"):  # drop what came after the checkpoint: it comes again
            with open(os.path.join(self.output_dir, name), "a") as file:
                file.truncate(min(self.state["sizes"].get(name, 0), file.tell()))
        config = os.path.join(self.output_dir, "config.json")
        with open(f"{config}.new", "w") as file:
            json.dump({"algorithm": ALGORITHM} | asdict(args), file, indent=2)
        os.replace(f"{config}.new", config)
        self.running, self.updating, self.stopping = True, False, False
        tqdm.write(f"The files of this run are in {self.output_dir}.")
        if self.wandb_config is not None:
            import wandb  # takes a second, and few runs need it

            options = {"config": asdict(args), "dir": self.output_dir, "reinit": "create_new", "id": self.run_id}
            options |= {"resume": "allow", "settings": wandb.Settings(init_timeout=20, login_timeout=5)}
            try:
                self.tracker = wandb.init(**options | self.wandb_config)
            except wandb.errors.Error as error:  # no login, no network
                tqdm.write(f"W&B: {error}\nThe run goes on offline.")
                self.tracker = wandb.init(**options | self.wandb_config | {"mode": "offline"})

    def item_batches(self) -> Iterator[tuple[list, bool]]:
        """Yield the items up to the next update, all answered by the same weights, and whether they end an epoch."""
        args = self.args
        while self.epoch < args.num_train_epochs:
            rows = common.iterate(self.train_dataset, self.row)
            ahead = list(islice(rows, 1))  # looking ahead tells where the epoch ends
            if not ahead:
                raise ValueError(f"train_dataset has no rows in epoch {self.epoch + 1}")
            while ahead:
                missing = args.rollout_buffer_size - len(self.buffers[0])
                count = math.ceil(missing / (args.num_generations * args.num_turns))
                items = ahead + list(islice(rows, min(count, args.rollout_batch_size or count) - 1))
                ahead = list(islice(rows, 1))
                yield items, not ahead  # meanwhile `train` moves on epoch, row and buffers, which ends the loops

    def interrupt(self, *_: Any) -> None:
        """Break off a rollout, of which nothing is kept, but finish an update, unless asked a second time."""
        if not self.updating or self.stopping:
            raise KeyboardInterrupt
        self.stopping = True

    def train(self, resume_from: str | None = None) -> None:
        """Pass num_train_epochs times over train_dataset, or go on from `resume_from`: a run's folder or a checkpoint.

        Ctrl-C or an error leaves a checkpoint of all that was completed, an error in an update only an earlier one.
        """
        args = self.args
        self.start_run(resume_from)
        checkpoint = os.path.join(self.output_dir, "checkpoint")
        length = len(self.train_dataset) * args.num_train_epochs if hasattr(self.train_dataset, "__len__") else None
        bar = tqdm(total=length, initial=self.items_done, unit="item")
        self.logged_at = time.perf_counter()
        in_main = threading.current_thread() is threading.main_thread()  # only this one may handle signals
        handlers = {s: signal.signal(s, self.interrupt) for s in (signal.SIGINT, signal.SIGTERM) if in_main}
        try:
            self.snapshot()
            self.report()  # the first evaluation, or what was due when the checkpoint was written
            for items, epoch_ends in self.item_batches():
                started = time.perf_counter()
                rollouts = self.collect(items, self.row, self.generators, args.num_generations)
                self.seconds["rollout"] += time.perf_counter() - started
                for rollout in rollouts:  # from here on as if each item had been generated on its own
                    self.add_metrics(self.metrics, rollout)
                    for s in rollout:
                        s.item = None
                        self.buffers[s.agent_idx].append(s)
                    self.env_step += len(rollout) // args.num_agents
                    self.items_done, self.row = self.items_done + 1, self.row + 1
                    bar.set_postfix(reward=f"{sum(s.reward for s in rollout) / len(rollout):.2f}", refresh=False)
                    bar.update()
                    if rollout is not rollouts[-1]:  # the last one is reported below, after an update
                        self.report()
                if epoch_ends:
                    self.epoch, self.row = self.epoch + 1, 0
                if epoch_ends or len(self.buffers[0]) >= args.rollout_buffer_size:
                    self.updating, started = True, time.perf_counter()
                    for i in range(args.num_agents):
                        self.update(i)
                    self.updates += 1
                    self.seconds["update"] += time.perf_counter() - started
                self.snapshot()
                self.updating = False
                if self.stopping:
                    raise KeyboardInterrupt
                if args.checkpoint_interval and not self.buffers[0] and self.updates % args.checkpoint_interval == 0:
                    self.save_checkpoint(checkpoint)
                self.report()
            self.save_checkpoint(checkpoint)
            self.save_model(os.path.join(self.output_dir, "model"))
            tqdm.write(f"The trained models are in {os.path.join(self.output_dir, 'model')}.")
        except BaseException:
            whole, self.updating, self.stopping = not self.updating, True, False  # one more signal now has to wait
            if self.state["items_done"] and whole:  # the last snapshot and its weights; no half update
                self.save_checkpoint(checkpoint)
            start = "its last checkpoint" if os.path.exists(os.path.join(checkpoint, "state.pt")) else "its beginning"
            tqdm.write(f"The run stopped; --resume {self.output_dir} goes on from {start}.")
            raise
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            bar.close()
            if self.tracker:
                self.tracker.finish(exit_code=int(sys.exc_info()[0] is not None))


# --------------------------------------------------------------------------------------------------------- 7 main

TINY_LM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests", "tiny_lm")
DEMO = dict(  # what suits tests/tiny_lm
    agent_model=TINY_LM, max_new_tokens=3, agent_learning_rate=3e-4, critic_learning_rate=1e-4, max_grad_norm=None,
    rollout_buffer_size=64, num_train_epochs=8, eval_interval=1600, eval_num_samples=128, eval_batch_size=128,
)  # fmt: skip


@dataclass
class Args(IACConfig):
    """Independent actor-critic. Without --agent-model or --agents it is the demo: two tiny models learn to sum to n."""

    agent_model: str | None = None  # model folder or hub name; every agent loads its own copy
    agents: list[str] | None = None  # instead: one for each agent
    critic_model: str | None = None  # the same for critics; by default the agents' own
    critics: list[str] | None = None  # instead: one for each critic
    task: str | None = None  # Python file with train_dataset, reward_func, ...; by default the number task
    output_dir: str | None = None  # a new folder for the run; by default one in runs/
    resume: str | None = None  # the folder of a run to go on with, by the settings it was started with
    track: bool = False  # log to Weights & Biases
    wandb_project: str = "multi-agent-actor-critic"  # its project
    wandb_entity: str | None = None  # its entity


def main() -> None:
    """Train from the command line."""
    transformers.logging.disable_progress_bar()
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal cannot show
    flags = {flag.split("=")[0].replace("_", "-") for flag in sys.argv[1:]}  # tell which defaults --help is to show
    default = Args(**({} if flags & {"--agent-model", "--agents"} else DEMO))
    default.train_batch_size = None  # to be derived again, from the buffer size that the command line gives
    args = tyro.cli(Args, default=default)
    if args.resume:
        saved = read_settings(args.resume)  # the run's own settings hold, unless they are given again
        args = tyro.cli(Args, default=Args(**{f.name: saved[f.name] for f in fields(Args) if f.name in saved}))
    if args.use_separate_critic and not (args.critic_model or args.critics):
        args.critic_model, args.critics = args.agent_model, args.agents
    given = {name: getattr(args, name) for name in ("agent_model", "agents", "critic_model", "critics", "output_dir")}
    if args.task is None:
        task = number_task(args.num_agents, args.seed)
    else:
        if not os.path.isfile(args.task):
            raise ValueError(f"task={args.task!r} is no file here (resume a run in the folder where it began)")
        sys.path.insert(0, os.path.dirname(os.path.abspath(args.task)))  # a task may import its neighbours
        defined = runpy.run_path(args.task)
        keys = "train_dataset eval_dataset formatters reward_func reward_processor external_transition metrics_callback"
        task = {name: defined[name] for name in keys.split() if name in defined}
        tqdm.write(f"{args.task} defines {', '.join(task) or 'nothing that is read'}.")  # shows a name that is misspelt
    tokenizer = [common.AutoTokenizer.from_pretrained(name) for name in args.agents or []] or None
    wandb_config = {"project": args.wandb_project, "entity": args.wandb_entity} if args.track else None
    trainer = IACTrainer(**given, tokenizer=tokenizer, args=args, wandb_config=wandb_config, **task)
    try:
        trainer.train(args.resume)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, for SIGTERM too; `train` has said how to go on


if __name__ == "__main__":
    main()
