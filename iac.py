"""IAC: independent actor-critic for several language models that answer together, in one file.

N agents, each a language model, read a prompt each and answer; one reward scores the joint answer. Every agent i has a
critic of its own that reads what agent i reads: the other agents are part of its environment. (In maac.py one critic
reads everything, for all agents; `diff iac.py maac.py` shows the difference.)

    policy     log pi_i(a|h) = sum_k log softmax(z_k / temperature)[a_k]     over the generated tokens, stop included
    reward     r_t = R_t - reference_kl_coef * KL_t,  R = reward_processor(reward_func(...))
               KL_t = sum_k [log pi_i(a_k) - log pi_i^ref(a_k)]              only with reference_kl_enabled
    critic     critic_type "v": C(t) = V_i(h_t), read at the end of the prompt
               critic_type "q": C(t) = Q_i(h_t, a_t), read at the end of the answer
    target     y_t = r_t + discount * C_old(t + 1),  y_T = r_T at the last collected turn T
    advantage  A_t = y_t - C_old(t), the TD error, normalised over the samples of one agent and turn
    losses     actor   -mean_b log pi_i(a_b|h_b) * A_b
               critic  value_loss_coef * mean_b (C(b) - y_b)^2

The critic is a model of its own, or with --no-use-separate-critic a value head on the actor's backbone: then one pass
gives scores and values, one optimiser steps on the sum of both losses, and the squared error is clipped, max((C - y)^2,
(C_clip - y)^2) with C_clip = C_old + clip(C - C_old, -value_clip_range, value_clip_range).

C_old, targets and advantages are fixed at collection. Left out on purpose: importance ratios and their clipping, GAE
(a target looks one turn ahead), an entropy bonus, dropout. With "q" the same TD error drives the actor, without a state
baseline: at the last turn it is r - Q(h, a), so as Q fits, the advantage shrinks to noise. Let Q learn slowly.

    python iac.py                                      the demo: two tiny models name numbers that sum to n
    python iac.py --agent-model Qwen/Qwen3-0.6B --chat-template --task my_task.py

Letters: N agents, C critics, G generations, B samples, P prompt tokens, K completion tokens, D hidden width.
"""

import contextlib
import copy
import inspect
import json
import math
import os
import random
import re
import runpy
import shutil
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Literal, get_args, get_origin

import torch
import transformers
import tyro
from safetensors.torch import save_file
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
    value_clip_range: float | None = 0.2  # shared backbone: how far a value may move from C_old; None = off
    advantage_normalization: bool = True  # mean 0 and deviation 1 within each agent and turn
    rollout_buffer_size: int = 8  # samples per agent that start an update
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
    max_grad_norm: float | None = 1.0  # gradient clipping per model; None = off
    eval_interval: int = 16  # dataset items between evaluations; 0 = never evaluate
    eval_num_samples: int = 4  # dataset items per evaluation
    eval_batch_size: int = 1  # dataset items generated together in evaluation
    logging_steps: int = 1  # joint answers between two logged rows, at least
    checkpoint_interval: int = 0  # updates between checkpoints; 0 = one at the end
    parallel_training: Literal["none", "mp"] = "none"  # "none": one device for all; "mp": the devices named below
    agent_devices: list[str] | None = None  # one for all agents or one for each
    critic_devices: list[str] | None = None  # one for all critics or one for each
    reference_devices: list[str] | None = None  # of the reference models; None = the agents'
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; weights are float32 either way
    seed: int = 1  # of sampling, shuffling and value heads

    def __post_init__(self) -> None:
        """Refuse bad values, naming the field; fill in what is derived."""
        bounds = dict.fromkeys(("eval_interval", "eval_num_samples", "checkpoint_interval", "seed"), (0, math.inf))
        bounds |= dict.fromkeys(("temperature", "max_grad_norm", "value_clip_range"), (1e-6, math.inf))
        bounds |= {"top_p": (1e-6, 1), "discount": (0, 1), "early_termination_threshold": (-math.inf, math.inf)}
        for f in fields(IACConfig):
            value, kinds = getattr(self, f.name), get_args(f.type) or (f.type,)  # of a Literal: what it lists
            low, high = bounds.get(f.name, (1 if int in kinds else 0, math.inf))
            if float in kinds and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            good = (
                type(value) in kinds
                or (get_origin(f.type) is Literal and value in kinds)
                or (list[str] in kinds and isinstance(value, list | tuple | str))
            )
            if type(value) in (int, float):
                good = good and low <= value <= high and math.isfinite(value)
            if not good or value in ([], (), ""):
                wanted = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds)
                raise ValueError(f"{f.name}={value!r} must be {wanted}, if a number a finite one in [{low}, {high}]")
            setattr(self, f.name, value)
        self.train_batch_size = self.train_batch_size or self.rollout_buffer_size
        if self.num_turns > 1 and self.num_generations > 1:
            raise ValueError(f"num_generations={self.num_generations} must be 1 with num_turns={self.num_turns}")
        for name in ("agent_devices", "critic_devices")[: 1 + self.use_separate_critic]:
            if self.parallel_training == "mp" and getattr(self, name) is None:
                raise ValueError(f"{name}=None: parallel_training='mp' needs device names")


# --------------------------------------------------------------------------------------------------------- 2 task


def number_task(num_agents: int, seed: int) -> dict[str, Any]:
    """The built-in task: all agents are shown n, each names a number, and the numbers are to add up to n.

    They cannot talk, so they must find a convention: say, agent 0 names 4 whatever n is, and agent 1 the rest. In a
    later turn they see what everybody said. Returns arguments of the trainer, the same that a task file defines.
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

    Its positional parameters are the agents, each a list of G strings; with one more than agents, not counting those
    with defaults, the prompts come first, and a single one gets the list of all agents' lists. Parameters called
    `prompts` (N strings) or `batch_items` (a list of the one item) are filled wherever they stand, as is **kwargs.
    """
    parameters = inspect.signature(reward_func).parameters
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
    N x G matrix; a list, tuple, array or tensor. Anything else, and whatever is not finite, is a ValueError.
    """
    try:
        rewards = torch.as_tensor(raw, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, text, rows of different lengths
        rewards = torch.tensor(math.nan)
    per_agent = rewards.shape == (N,) and N not in (1, G)
    if not (per_agent or rewards.shape in ((), (G,), (N, G))) or not rewards.float().isfinite().all():
        got = f"{len(raw)} values, {raw!r:.200}" if isinstance(raw, Sequence | Tensor) else f"{raw!r:.200}"
        forms = f"a number, {G} numbers (one per joint answer), {N} numbers (one per agent) or {N} lists of {G} numbers"
        raise ValueError(f"{where}: expected a reward of {forms}, all finite; got {got}")
    return (rewards[:, None] if per_agent else rewards).expand(N, G).tolist()


# ------------------------------------------------------------------------------------------------------- 3 critic


class Critic(nn.Module):
    """A language model without its language-model head, and a float32 value head that reads the last token."""

    def __init__(self, source: Any, backbone: nn.Module, hidden_dim: int | None, seed: int) -> None:
        """Put a head D -> 1 on the backbone, with a tanh layer in between if hidden_dim is given.

        Its last layer starts at zero, unless `save_model` left a trained head in the folder `source`.
        """
        super().__init__()
        saved, D = common.saved_value_head(source), backbone.config.get_text_config().hidden_size
        hidden_dim = hidden_dim or (len(saved["0.weight"]) if len(saved) > 2 else None)
        with torch.random.fork_rng(devices=[]):  # building a trainer leaves the global random state as it was
            torch.manual_seed(seed)
            hidden = [nn.Linear(D, hidden_dim), nn.Tanh()] if hidden_dim else []
            self.value_head = nn.Sequential(*hidden, nn.Linear(hidden_dim or D, 1)).to(backbone.device)
        for parameter in self.value_head[-1].parameters():
            nn.init.zeros_(parameter)
        if saved:
            self.value_head.load_state_dict(saved)
        self.backbone = backbone

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
    item: Mapping | None  # the dataset row itself, until the sample lies in the buffer
    prompt: str
    prompt_ids: list[int]
    completion: str = ""  # without the stop token
    completion_ids: list[int] = field(default_factory=list)  # as generated, a stop token included
    finished: bool = False  # ended by a stop token, not by the length limit
    reward: float = 0.0  # R: processed, before the KL penalty
    critic_ids: list[int] = field(default_factory=list)  # what the critic reads
    reference_kl: float = 0.0  # KL_t
    old_value: float = 0.0  # C_old(t)
    target: float = 0.0  # y_t
    advantage: float = 0.0  # y_t - C_old(t)
    expected_return: float = 0.0  # R summed from this turn on, undiscounted


# ------------------------------------------------------------------------------- 5 targets, advantages and losses


def td_targets(rewards: list[float], values: list[float], discount: float) -> tuple[list[float], list[float]]:
    """Targets y_t and TD errors y_t - C_old(t) of one agent's T collected turns.

    With discount 1, rewards [1, 2] and values [0.5, 0.25] the targets are [1.25, 2] and the TD errors [0.75, 1.75].
    """
    next_values = [*values[1:], 0.0]  # nothing follows the last collected turn
    targets = [r + discount * following for r, following in zip(rewards, next_values, strict=True)]
    return targets, [y - value for y, value in zip(targets, values, strict=True)]


def normalize_advantages(advantages: Tensor) -> Tensor:
    """(A - mean) / max(std, 1e-6) of advantages [B], with the population std; a single one is left as it is."""
    if len(advantages) == 1:
        return advantages
    return (advantages - advantages.mean()) / advantages.std(correction=0).clamp(min=1e-6)


def reference_kl(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """KL [B] = sum_k [log pi(a_k) - log pi_ref(a_k)] over the generated tokens of [B, K]."""
    return torch.where(mask, logprobs - reference, 0.0).sum(-1)


def policy_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-log pi(a|h) * A of each sample: logprobs [B, K], 0 at padding, and advantages [B] -> [B]."""
    return -logprobs.sum(-1) * advantages


def value_loss(values: Tensor, targets: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """(C - y)^2 of each sample, [B]; with a clip range the larger one of it and (C_clip - y)^2."""
    if clip is None:
        return (values - targets) ** 2
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)


def explained_variance(values: Tensor, targets: Tensor) -> list[float]:
    """[1 - Var(y - C_old) / Var(y)], or [] where the targets [B] do not vary."""
    variance = targets.var(correction=0)
    return [(1 - (targets - values).var(correction=0) / variance).item()] if variance > 1e-12 else []


# ------------------------------------------------------------------------------------------------------ 6 trainer


# where a run stands: epoch and row in it, items, joint answers and updates done, env_step of the last logged row
COUNTERS = ("epoch", "row", "batches", "env_step", "updates", "logged_step", "truncated")


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """A new folder that takes the place of `path` once it is complete; at any moment one whole folder is there."""
    path = os.path.normpath(path)
    new, old = f"{path}.new", f"{path}.old"
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(new)
    yield new
    if os.path.exists(path):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)


class IACTrainer:
    """Trains N agents, each with a critic of its own; whatever does not fit together is refused with a ValueError."""

    def __init__(
        self,
        *,
        agent_model: str | nn.Module | None = None,  # folder or hub name, each agent loads a copy; a model if N = 1
        agents: Sequence[str | nn.Module] | None = None,  # instead: one for each agent
        critic_model: str | nn.Module | None = None,  # the same for critics; one model serves all agents
        critics: Sequence[str | nn.Module] | None = None,
        tokenizer: Any = None,  # one, or a list with one for each agent; by default the one of the name agent_model
        reward_func: Callable | None = None,  # see call_reward and read_rewards
        reward_processor: Callable[[float], float] | None = None,  # applied to every reward
        formatters: Callable | Sequence[Callable] | None = None,  # item -> prompt, one or one for each agent
        args: IACConfig | None = None,
        train_dataset: Any = None,  # dicts: a list, a Hugging Face Dataset, any iterable
        eval_dataset: Any = None,
        model_config: dict[str, Any] | None = None,  # model_kwargs, critic_model_kwargs, tokenizer_kwargs
        wandb_config: dict[str, Any] | None = None,  # arguments of wandb.init
        metrics_callback: Callable | None = None,  # an item's RolloutSamples -> dict of further metrics
        external_transition: Callable | None = None,  # the next turn's prompts, see turn_prompts
        output_dir: str | None = None,  # a new folder, by default one in runs/
    ) -> None:
        self.args = args = IACConfig() if args is None else args
        if not isinstance(args, IACConfig):
            raise ValueError(f"args must be a IACConfig, got {args!r:.200}")
        self.reward_func, self.reward_processor = reward_func, reward_processor or float
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.metrics_callback, self.external_transition = metrics_callback, external_transition
        self.wandb_config, self.output_dir = wandb_config, output_dir
        N, formatters = args.num_agents, (lambda item: item["prompt"]) if formatters is None else formatters
        self.formatters = [formatters] * N if callable(formatters) else list(formatters)
        if len(self.formatters) != N:
            raise ValueError(f"formatters has {len(self.formatters)} entries, expected {N}")
        if args.num_turns > 1 and external_transition is None:
            raise ValueError(f"external_transition is required with num_turns={args.num_turns}")
        functions = {"reward_func": reward_func, "reward_processor": self.reward_processor}
        functions |= {"metrics_callback": metrics_callback or len, "external_transition": external_transition or len}
        known = ("model_kwargs", "critic_model_kwargs", "tokenizer_kwargs")
        if unknown := set(model_config or {}) - set(known):
            raise ValueError(f"model_config has unknown keys {sorted(unknown)}, known are {known}")
        for name, function in {**functions, **{f"formatters[{i}]": f for i, f in enumerate(self.formatters)}}.items():
            if not callable(function):
                raise ValueError(f"{name} must be a function, got {function!r}")
        models = {"agent_model": agent_model, "agents": agents, "critic_model": critic_model, "critics": critics}
        self.load_models(models, tokenizer, model_config or {})
        self.generators, self.shuffle = self.new_generators(args.seed), torch.Generator().manual_seed(args.seed)
        self.buffers: list[list[RolloutSample]] = [[] for _ in range(N)]
        self.metrics: dict[str, list[float]] = defaultdict(list)  # values to average in the next logged row
        self.seconds: dict[str, float] = defaultdict(float)  # spent on what since the last logged row
        for counter in COUNTERS:
            setattr(self, counter, 0)
        self.running, self.tracker = False, None  # whether output_dir is ours to write to; the W&B run

    def load_models(self, models: dict[str, Any], tokenizer: Any, options: dict[str, Any]) -> None:
        """Tokenizers, agents, reference models, critics and optimisers, from the constructor's arguments."""
        args, N, separate = self.args, self.args.num_agents, self.args.use_separate_critic
        sources = critic_sources = common.resolve_sources(models, "agent_model", "agents", N)
        C = 1 if isinstance(models["critic_model"], nn.Module) else N  # agent i is judged by self.critics[i % C]
        if separate:
            critic_sources = common.resolve_sources(models, "critic_model", "critics", C)
        elif models["critic_model"] is not None or models["critics"] is not None:
            raise ValueError("critic_model and critics have no place with use_separate_critic=False")
        self.tokenizers = common.resolve_tokenizers(tokenizer, models["agent_model"], N, options)
        names = {"agent_devices": N, "critic_devices": C, "reference_devices": N}
        groups = [(name, getattr(args, name), count) for name, count in names.items()]
        self.agent_devices, critic_devices, reference_devices = common.place(args.parallel_training, groups)

        self.agents = common.load("agents", sources, self.agent_devices, options)
        frozen = copy.deepcopy(sources) if args.reference_kl_enabled and args.reference_kl_coef > 0 else []
        self.references = common.load("references", frozen, reference_devices, options)
        backbones, hidden_dim = [agent.base_model for agent in self.agents], args.value_head_hidden_dim
        if separate:
            backbones = common.load("critics", critic_sources, critic_devices, options)
            hidden_dim = args.critic_value_head_hidden_dim
        common.refuse_shared_weights(agents=self.agents, critics=backbones if separate else [])
        self.critics = [Critic(critic_sources[c], backbones[c], hidden_dim, args.seed + c) for c in range(C)]
        for i, tok in enumerate(self.tokenizers):
            common.check_vocabulary(f"agents[{i}]", self.agents[i], sources[i], tok)
            common.check_vocabulary(f"critics[{i % C}]", backbones[i % C], critic_sources[i % C], tok)
        self.stops = [common.stop_ids(*pair) for pair in zip(self.agents, self.tokenizers, strict=True)]
        self.prompt_limits = [common.max_positions(agent) - args.max_new_tokens for agent in self.agents]
        if min(self.prompt_limits) < 1:
            raise ValueError(f"max_new_tokens={args.max_new_tokens} leaves a prompt no room in the models' positions")

        def adamw(learning_rate: float, *modules: nn.Module) -> torch.optim.Optimizer:
            parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
            return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)

        heads = [[] if separate else [self.critics[i].value_head] for i in range(N)]  # one optimiser for both heads
        self.agent_optimizers = [adamw(args.agent_learning_rate, self.agents[i], *heads[i]) for i in range(N)]
        self.critic_optimizers = [adamw(args.critic_learning_rate, critic) for critic in self.critics if separate]

    def new_generators(self, seed: int) -> list[torch.Generator]:
        """A sampling generator for each agent."""
        return [torch.Generator(agent.device).manual_seed(1000 * seed + i) for i, agent in enumerate(self.agents)]

    def turn_prompts(self, item: Mapping, turn: int, episode: list[RolloutSample], where: str) -> list[str]:
        """The N prompts of an item's next turn, given the samples of its turns so far."""
        agents, prompts = range(self.args.num_agents), []
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}: a dataset item must be a dict, got {item!r:.200}")
        external, items = [None for _ in agents], [item for _ in agents]
        if turn > 0:
            external = self.external_transition(
                prompt=item.get("prompt", ""),
                agent_completions=[s.completion for s in episode[-len(agents) :]],
                num_agents=len(agents),
                prompt_history_per_agent=[[s.prompt for s in episode if s.agent_idx == i] for i in agents],
                response_history_per_agent=[[s.completion for s in episode if s.agent_idx == i] for i in agents],
            )
            strings = isinstance(external, list | tuple) and all(isinstance(text, str) and text for text in external)
            if not strings or len(external) != len(agents):
                raise ValueError(f"{where}: external_transition must return a string per agent, got {external!r:.200}")
            if self.args.external_prompt_passthrough:
                return list(external)
            items = [{**item, "_original_prompt": item.get("prompt", ""), "prompt": text} for text in external]
        for i, formatter in enumerate(self.formatters):
            wants_external = "external_prompts" in inspect.signature(formatter).parameters
            try:
                prompts.append(formatter(items[i], **({"external_prompts": external[i]} if wants_external else {})))
            except KeyError as error:
                raise ValueError(f"{where}, agent {i}: the formatter found no {error} in {item!r:.200}") from error
            if not isinstance(prompts[i], str) or not prompts[i].strip():
                raise ValueError(f"{where}, agent {i}: the formatter returned {prompts[i]!r:.200}, not a prompt")
        return prompts

    def reward(self, item: Mapping, joint: list[list[RolloutSample]], where: str) -> None:
        """Set the rewards of G joint answers [N][G] to an item."""
        N, G, prompts = len(joint), len(joint[0]), [own[0].prompt for own in joint]
        raw = call_reward(self.reward_func, [[s.completion for s in own] for own in joint], prompts, item)
        processed = [[self.reward_processor(reward) for reward in row] for row in read_rewards(raw, N, G, where)]
        for own, row in zip(joint, read_rewards(processed, N, G, f"{where}, after reward_processor"), strict=True):
            for s, reward in zip(own, row, strict=True):
                s.reward = reward

    def micro_batches(self, samples: list[RolloutSample]) -> list[list[RolloutSample]]:
        """Pieces of at most micro_batch_size samples, each of which goes through a model at once."""
        size = self.args.micro_batch_size or len(samples)
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def score(self, model: nn.Module, samples: list[RolloutSample], return_hidden: bool = False) -> tuple:
        """Get logprobs [B, K], mask [B, K] and hidden states [B, K + 1, D] or None of B samples, see common.score."""
        prompts, completions = [s.prompt_ids for s in samples], [s.completion_ids for s in samples]
        return common.score(model, prompts, completions, self.args.temperature, self.args.dtype, return_hidden)

    def shared_values(self, i: int, samples: list[RolloutSample], hidden: Tensor) -> Tensor:
        """Values [B] off agent i's own hidden states [B, K + 1, D]: after the prompt (v) or after the answer (q)."""
        column = [len(s.completion_ids) if self.args.critic_type == "q" else 0 for s in samples]
        return self.critics[i].value(hidden[torch.arange(len(samples)), column])

    @torch.no_grad()
    def appraise(self, samples: list[list[RolloutSample]]) -> None:
        """Fill in critic_ids, reference_kl and old_value of samples [N][B], by the weights they were drawn with."""
        args = self.args
        for i, own in enumerate(samples):
            critic = self.critics[i % len(self.critics)]
            for s in own:
                ids = s.prompt_ids + s.completion_ids if args.critic_type == "q" else s.prompt_ids
                s.critic_ids = common.keep_end(ids, common.max_positions(critic.backbone), self.tokenizers[i])
            for batch in self.micro_batches(own):
                hidden = None
                if self.references:
                    logprobs, mask, hidden = self.score(self.agents[i], batch, not args.use_separate_critic)
                    reference = self.score(self.references[i], batch)[0].to(logprobs.device)
                    for s, kl in zip(batch, reference_kl(logprobs, reference, mask).tolist(), strict=True):
                        s.reference_kl = kl
                if hidden is None:
                    values = critic([s.critic_ids for s in batch], args.dtype)
                else:  # the pass that scored the samples serves for their values too
                    values = self.shared_values(i, batch, hidden)
                for s, value in zip(batch, values.tolist(), strict=True):
                    s.old_value = value

    def collect(self, items: list, first_row: int, generators: list, G: int, train: bool = True) -> list[list]:
        """Play all items side by side, one batched generation per agent and turn; returns the samples of each item."""
        args, N = self.args, self.args.num_agents
        episodes: list[list[RolloutSample]] = [[] for _ in items]
        active = list(range(len(items)))  # items whose episode goes on; B = len(active) * G, generations innermost
        for turn in range(args.num_turns):
            samples: list[list[RolloutSample]] = [[] for _ in range(N)]  # [N][B]
            for e in active:
                row, where = first_row + e, f"row {first_row + e}, turn {turn + 1}"
                for i, prompt in enumerate(self.turn_prompts(items[e], turn, episodes[e], where)):
                    ids = common.encode(self.tokenizers[i], prompt, f"{where}, agent {i}", args.chat_template)
                    kept = common.keep_end(ids, self.prompt_limits[i], self.tokenizers[i])
                    self.truncated += train and len(kept) < len(ids)
                    samples[i] += [RolloutSample(i, row, turn, g, items[e], prompt, kept) for g in range(G)]
            prompt_ids = [[s.prompt_ids for s in own] for own in samples]
            sampling = (args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.dtype)
            ids = common.generate_all(self.agents, prompt_ids, self.stops, generators, self.agent_devices, sampling)
            for i, own in enumerate(samples):
                for s, answer in zip(own, ids[i], strict=True):
                    s.completion_ids, s.finished = answer, answer[-1] in self.stops[i]
                    text_ids = answer[:-1] if s.finished else answer
                    s.completion = self.tokenizers[i].decode(text_ids, skip_special_tokens=True)
            for k, e in enumerate(active):
                joint = [own[k * G : (k + 1) * G] for own in samples]  # [N][G]
                self.reward(items[e], joint, f"row {first_row + e}, turn {turn + 1}")
                episodes[e] += [s for own in joint for s in own]
            if train:
                self.appraise(samples)
            if args.early_termination_threshold is not None:
                mean = {e: sum(s.reward for s in episodes[e][-N * G :]) / (N * G) for e in active}
                active = [e for e in active if mean[e] <= args.early_termination_threshold]
            if not active:
                break
        for episode in episodes:
            paths = defaultdict(list)
            for s in episode:
                paths[s.agent_idx, s.generation_idx].append(s)
            for path in paths.values():  # one agent's T collected turns
                rewards = [s.reward - args.reference_kl_coef * s.reference_kl for s in path]
                targets, td_errors = td_targets(rewards, [s.old_value for s in path], args.discount)
                for t, s in enumerate(path):
                    s.target, s.advantage, s.expected_return = targets[t], td_errors[t], sum(x.reward for x in path[t:])
        return episodes

    def update(self, i: int) -> None:
        """Update agent i and its critic on the whole buffer: turn by turn, shuffled, in mini-batches."""
        buffer, self.buffers[i] = self.buffers[i], []
        c = i % len(self.critics)
        for turn in sorted({s.turn_idx for s in buffer}):
            group = [s for s in buffer if s.turn_idx == turn]
            advantages, old_values = torch.tensor([[s.advantage, s.old_value] for s in group]).T
            targets = torch.tensor([s.target for s in group])
            self.metrics[f"agent_{i}/advantage_mean"] += advantages.tolist()
            self.metrics[f"critic_{c}/value_mean"] += old_values.tolist()
            self.metrics[f"critic_{c}/explained_variance"] += explained_variance(old_values, targets)
            if self.args.advantage_normalization:
                advantages = normalize_advantages(advantages)
            for mb_inds in torch.randperm(len(group), generator=self.shuffle).split(self.args.train_batch_size):
                batch = [group[b] for b in mb_inds.tolist()]
                self.actor_step(i, batch, advantages[mb_inds])
                if self.args.use_separate_critic:
                    self.critic_step(c, batch)

    def actor_step(self, i: int, samples: list[RolloutSample], advantages: Tensor) -> None:
        """One optimiser step of agent i on B samples and advantages [B]; with a shared backbone, of its critic too."""
        args, agent, B = self.args, self.agents[i], len(samples)
        for batch, A in zip(self.micro_batches(samples), advantages.split(args.micro_batch_size or B), strict=True):
            logprobs, _, hidden = self.score(agent, batch, return_hidden=not args.use_separate_critic)
            losses = policy_loss(logprobs, A.to(logprobs.device))
            self.metrics[f"agent_{i}/policy_loss"] += losses.tolist()
            loss = losses.sum() / B
            if hidden is not None:
                values = self.shared_values(i, batch, hidden)
                loss = loss + self.critic_loss(i, batch, values, args.value_clip_range) / B
            loss.backward()
        self.optimizer_step(f"agent_{i}/grad_norm", self.agent_optimizers[i])

    def critic_step(self, c: int, samples: list[RolloutSample]) -> None:
        """One optimiser step of critic c on B samples."""
        for batch in self.micro_batches(samples):
            values = self.critics[c]([s.critic_ids for s in batch], self.args.dtype)
            (self.critic_loss(c, batch, values, clip=None) / len(samples)).backward()
        self.optimizer_step(f"critic_{c}/grad_norm", self.critic_optimizers[c])

    def critic_loss(self, c: int, samples: list[RolloutSample], values: Tensor, clip: float | None) -> Tensor:
        """value_loss_coef times the summed value loss of values [B]."""
        targets, old_values = torch.tensor([[s.target, s.old_value] for s in samples], device=values.device).T
        losses = value_loss(values, targets, old_values, clip)
        self.metrics[f"critic_{c}/value_loss"] += losses.tolist()
        return self.args.value_loss_coef * losses.sum()

    def optimizer_step(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, refuse one that is not finite, step, and forget it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.args.max_grad_norm or math.inf)
        if not norm.isfinite():
            raise FloatingPointError(f"{name} is {norm.item()}: no step was taken")
        self.metrics[name].append(norm.item())
        optimizer.step()
        optimizer.zero_grad()

    def add_metrics(self, metrics: dict[str, list[float]], episode: list[RolloutSample], prefix: str = "") -> None:
        """Add what is logged of an item's samples, the user's metrics among it, to lists that will be averaged."""
        for s in episode:
            turn, agent = f"{prefix}turn_{s.turn_idx + 1}", f"{prefix}agent_{s.agent_idx}"
            metrics[f"{turn}/reward_mean"].append(s.reward)
            metrics[f"{turn}/expected_return"].append(s.expected_return)
            metrics[f"{agent}/reward_mean"].append(s.reward)
            metrics[f"{agent}/completion_tokens"].append(len(s.completion_ids))
            metrics[f"{agent}/finished_fraction"].append(float(s.finished))
            if self.references and not prefix:
                metrics[f"{agent}/reference_kl"].append(s.reference_kl)
        for name, value in (self.metrics_callback(episode) if self.metrics_callback else {}).items():
            metrics[f"{prefix}{name}"].append(float(value))

    def evaluate(self) -> dict[str, float]:
        """Mean metrics, named eval/..., of eval_num_samples items of eval_dataset with one joint answer each.

        Drawn from generators of their own, seeded by env_step: evaluating never changes the training that follows.
        """
        args, episodes, metrics = self.args, [], defaultdict(list)
        items = list(islice(common.iterate(self.eval_dataset or []), args.eval_num_samples))
        generators = self.new_generators(args.seed + 7919 * (self.env_step + 1))
        for start in range(0, len(items), args.eval_batch_size):
            episodes += self.collect(items[start : start + args.eval_batch_size], start, generators, 1, train=False)
        for number, episode in enumerate(episodes):
            self.add_metrics(metrics, episode, "eval/")
            for s in episode:
                row = {"row": s.row, "turn": s.turn_idx + 1, "agent": s.agent_idx, "prompt": s.prompt}
                self.write("completions.jsonl", row | {"completion": s.completion, "reward": s.reward})
                if number < 3:  # a few on the console
                    tqdm.write(f"  {s.prompt[-60:]!r} -> {s.completion[:60]!r}, reward {s.reward:.2f}")
        return {name: sum(values) / len(values) for name, values in metrics.items()}

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to a file of the run, if there is a run."""
        if self.running:
            with open(os.path.join(self.output_dir, name), "a") as file:
                file.write(json.dumps({"env_step": self.env_step} | row) + "\n")

    def log(self, row: dict[str, float], train: bool) -> None:
        """Write a row, with the means of the training metrics since the last such row if `train`, to file and W&B."""
        if train:
            row = row | {name: sum(values) / len(values) for name, values in self.metrics.items() if values}
            steps, seconds = self.env_step - self.logged_step, time.perf_counter() - self.logged_at
            row |= {f"time/{part}": spent / seconds for part, spent in self.seconds.items()}
            row |= {"time/env_steps_per_second": steps / seconds, "truncated_prompts": self.truncated}
            self.metrics.clear(), self.seconds.clear()
            self.logged_step, self.logged_at = self.env_step, time.perf_counter()
        if row:
            self.write("metrics.jsonl", row)
            if self.tracker:
                self.tracker.log(row, step=self.env_step)

    def save_model(self, path: str) -> None:
        """Write agent_{i}/, an ordinary Hugging Face model and its tokenizer, and critic_{c}/ with the value head."""
        with replacing(path) as folder:
            for i, agent in enumerate(self.agents):
                agent.save_pretrained(f"{folder}/agent_{i}")
                self.tokenizers[i].save_pretrained(f"{folder}/agent_{i}")
            for c, critic in enumerate(self.critics):
                home = f"{folder}/critic_{c}" if self.args.use_separate_critic else f"{folder}/agent_{c}"
                if self.args.use_separate_critic:
                    critic.backbone.save_pretrained(home)
                save_file(critic.value_head.state_dict(), f"{home}/value_head.safetensors")

    def finish_item(self, episode: list[RolloutSample], epoch_ends: bool) -> None:
        """Put an item's samples into the buffers; update, evaluate and log where that is due."""
        args = self.args
        self.add_metrics(self.metrics, episode)
        for s in episode:
            s.item = None
            self.buffers[s.agent_idx].append(s)
        self.env_step += len(episode) // args.num_agents
        self.batches, self.row = self.batches + 1, self.row + 1
        if epoch_ends:
            self.epoch, self.row = self.epoch + 1, 0
        update, started = epoch_ends or len(self.buffers[0]) >= args.rollout_buffer_size, time.perf_counter()
        if update:
            for i in range(args.num_agents):
                self.update(i)
            self.updates += 1
            self.seconds["update"] += time.perf_counter() - started
        ended = self.epoch == args.num_train_epochs
        evaluate = args.eval_interval and (ended or self.batches % args.eval_interval == 0)
        due = ended or (update and self.env_step - self.logged_step >= args.logging_steps)
        self.log(self.evaluate() if evaluate else {}, train=due)

    def save_checkpoint(self, path: str) -> None:
        """Write all that changes in training, for `train(resume_from=...)` to go on as if nothing had happened."""
        files = [os.path.join(self.output_dir, name) for name in ("metrics.jsonl", "completions.jsonl")]
        state = {name: getattr(self, name) for name in COUNTERS} | {
            "modules": [x.state_dict() for x in (*self.agents, *self.critics)],
            "optimizers": [x.state_dict() for x in (*self.agent_optimizers, *self.critic_optimizers)],
            "generators": [x.get_state() for x in (*self.generators, self.shuffle)],
            "buffers": [[asdict(s) for s in buffer] for buffer in self.buffers],
            "metrics": dict(self.metrics),
            "files": {file: os.path.getsize(file) for file in files if os.path.exists(file)},
        }
        with replacing(path) as folder:
            torch.save(state, f"{folder}/state.pt")

    def load_checkpoint(self, path: str) -> None:
        """Take up the state that `save_checkpoint` wrote; what was logged after it is cut off and will come again."""
        path = path if os.path.exists(path) else f"{path}.old"  # a kill between two renames leaves that one
        state = torch.load(f"{path}/state.pt", map_location="cpu", weights_only=True)
        for name in COUNTERS:
            setattr(self, name, state[name])
        for x, saved in zip((*self.agents, *self.critics), state["modules"], strict=True):
            x.load_state_dict(saved)
        for x, saved in zip((*self.agent_optimizers, *self.critic_optimizers), state["optimizers"], strict=True):
            x.load_state_dict(saved)
        for x, saved in zip((*self.generators, self.shuffle), state["generators"], strict=True):
            x.set_state(saved)
        self.buffers = [[RolloutSample(**s) for s in buffer] for buffer in state["buffers"]]
        self.metrics.update(state["metrics"])
        for file, size in state["files"].items():
            os.truncate(os.path.join(self.output_dir, os.path.basename(file)), size)

    def start_run(self, resume_from: str | None) -> None:
        """Make the run's folder, a new one, or take up that of another run; start the W&B run."""
        args, stamp = self.args, f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        if self.train_dataset is None:
            raise ValueError("train_dataset is required to train")
        if hasattr(self.train_dataset, "__len__"):  # a bad row shows now, not after hours
            for row, item in enumerate(common.iterate(self.train_dataset)):
                self.turn_prompts(item, 0, [], f"row {row}, turn 1")
        if resume_from is not None:
            self.output_dir = resume_from
            self.load_checkpoint(os.path.join(resume_from, "checkpoint"))
        else:
            self.output_dir = self.output_dir or os.path.join("runs", f"iac__{args.critic_type}__{args.seed}__{stamp}")
            os.makedirs(self.output_dir, exist_ok=True)
            if os.listdir(self.output_dir):
                raise ValueError(f"output_dir={self.output_dir!r} holds files already: name a new folder or resume it")
            with open(os.path.join(self.output_dir, "config.json"), "w") as file:
                json.dump(asdict(args), file, indent=2)
        self.running = True
        if self.wandb_config is not None:
            import wandb  # takes a second, and few runs need it

            patience = wandb.Settings(init_timeout=20, login_timeout=5)
            options = {"config": asdict(args), "dir": self.output_dir, "reinit": "create_new", "settings": patience}
            try:
                self.tracker = wandb.init(**options | self.wandb_config)
            except wandb.errors.Error as error:  # no login, no network
                tqdm.write(f"W&B: {error}\nThe run goes on offline.")
                self.tracker = wandb.init(**options | self.wandb_config | {"mode": "offline"})

    def train(self, resume_from: str | None = None) -> None:
        """Pass num_train_epochs times over train_dataset, or go on with the run in the folder `resume_from`."""
        args = self.args
        self.start_run(resume_from)
        saved_at = self.updates
        length = len(self.train_dataset) * args.num_train_epochs if hasattr(self.train_dataset, "__len__") else None
        bar, self.logged_at = tqdm(total=length, initial=self.batches, unit="item"), time.perf_counter()
        try:
            if args.eval_interval and self.batches == 0:
                self.log(self.evaluate(), train=False)
            while self.epoch < args.num_train_epochs:
                rows = common.iterate(self.train_dataset, self.row)
                item = next(rows, None)
                if item is None:
                    raise ValueError(f"train_dataset has no rows in epoch {self.epoch + 1}")
                while item is not None:
                    # the items up to the next update all see the same weights: generate them together
                    missing = args.rollout_buffer_size - len(self.buffers[0])
                    count = math.ceil(missing / (args.num_generations * args.num_turns))
                    count = min(count, args.rollout_batch_size or count)
                    items, started = [item, *islice(rows, count - 1)], time.perf_counter()
                    item = next(rows, None)  # looking ahead tells where the epoch ends
                    episodes = self.collect(items, self.row, self.generators, args.num_generations)
                    self.seconds["rollout"] += time.perf_counter() - started
                    for episode in episodes:  # from here on as if each item had been generated on its own
                        self.finish_item(episode, epoch_ends=item is None and episode is episodes[-1])
                        bar.set_postfix(reward=f"{sum(s.reward for s in episode) / len(episode):.2f}", refresh=False)
                        bar.update()
                    if args.checkpoint_interval and self.updates - saved_at >= args.checkpoint_interval:
                        saved_at = self.updates
                        self.save_checkpoint(os.path.join(self.output_dir, "checkpoint"))
            self.save_checkpoint(os.path.join(self.output_dir, "checkpoint"))
            self.save_model(os.path.join(self.output_dir, "model"))
        finally:
            bar.close()
            if self.tracker:
                self.tracker.finish()


# --------------------------------------------------------------------------------------------------------- 7 main

TINY_LM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests", "tiny_lm")
DEMO = dict(  # what suits tests/tiny_lm
    agent_model=TINY_LM, max_new_tokens=3, agent_learning_rate=3e-4, critic_learning_rate=1e-4, max_grad_norm=None,
    rollout_buffer_size=64, num_train_epochs=12, eval_interval=1600, eval_num_samples=128, eval_batch_size=128,
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
    resume: str | None = None  # the folder of a run to go on with, given the flags it was started with
    track: bool = False  # log to Weights & Biases
    wandb_project: str = "multi-agent-actor-critic"  # its project
    wandb_entity: str | None = None  # its entity


def load_task(args: Args) -> dict[str, Any]:
    """The trainer arguments that a task file defines, or those of the number task."""
    if args.task is None:
        return number_task(args.num_agents, args.seed)
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.task)))  # a task may import its neighbours
    task = runpy.run_path(args.task)
    names = "train_dataset eval_dataset formatters reward_func reward_processor external_transition metrics_callback"
    return {name: task[name] for name in names.split() if name in task}


def main() -> None:
    """Train from the command line."""
    transformers.logging.disable_progress_bar()
    flags = {flag.split("=")[0].replace("_", "-") for flag in sys.argv[1:]}
    default = Args(**({} if flags & {"--agent-model", "--agents"} else DEMO))
    default.train_batch_size = None  # to be derived from the buffer size of the command line
    args = tyro.cli(Args, default=default)
    models = {name: getattr(args, name) for name in ("agent_model", "agents", "critic_model", "critics")}
    if args.use_separate_critic and not (args.critic_model or args.critics):
        models |= {"critic_model": args.agent_model, "critics": args.agents}
    tokenizer = [common.AutoTokenizer.from_pretrained(name) for name in args.agents or []] or None
    wandb_config = {"project": args.wandb_project, "entity": args.wandb_entity} if args.track else None
    outputs = {"output_dir": args.output_dir, "wandb_config": wandb_config}
    IACTrainer(**models, tokenizer=tokenizer, args=args, **outputs, **load_task(args)).train(args.resume)


if __name__ == "__main__":
    main()
