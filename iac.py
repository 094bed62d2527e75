"""IAC: independent actor-critic for several language models that answer together, in one file.

N agents, each a language model, read a prompt each and answer; one reward scores the joint answer.
Every agent i has a critic of its own that reads what agent i reads: the other agents are part of
its environment. (In maac.py one critic reads everything, for all; `diff iac.py maac.py` shows how.)

    policy     log pi_i(a_i|h_i) = sum_k log softmax(z_k / temperature)[a_k]
               h_i: prompt, a_i: answer, the stop token included
    reward     r_t = R_t - reference_kl_coef * KL_t,  R = reward_processor(reward_func(...))
               KL_t = sum_k [log pi_i(a_k) - log pi_i^ref(a_k)], only if reference_kl_enabled
    critic     critic_type "v": C(t) = V_i(h_i), read at the end of the prompt
               critic_type "q": C(t) = Q_i(h_i, a_i), read at the end of the answer
    target     y_t = r_t + discount * C_old(t + 1),  y_T = r_T at the last collected turn T
    advantage  A_t = y_t - C_old(t), the TD error, normalised over the samples of one agent and turn
    losses     actor   -mean_b log pi_i(a_b|h_b) * A_b
               critic  value_loss_coef * mean_b (C(b) - y_b)^2

The critic is a model of its own, or with --no-use-separate-critic a value head on the actor's own
backbone. Then one optimiser steps on both losses, and the squared error is clipped: max((C - y)^2,
(C_clip - y)^2) with C_clip = C_old + clip(C - C_old, -value_clip_range, value_clip_range).

C_old, targets and advantages are fixed at collection; a sample is trained on once. Left out on
purpose: importance ratios, GAE (a target looks one turn ahead), an entropy bonus, dropout. With "q"
the same TD error drives the actor, but Q(h, a) depends on the action and is no baseline: as it
fits, the advantage r - Q shrinks to noise. Let it learn slowly.

    python iac.py                             the demo: two tiny models name numbers that sum to n
    python iac.py --agent-model Qwen/Qwen3-0.6B --chat-template --task my_task.py
    torchrun --nproc-per-node 8 iac.py ...    on 8 GPUs, each of which plays a share of the items

Words: an item is a row of the dataset; a joint answer is one answer of every agent to the same item
in the same turn; a sample is one agent's part of it; an episode is the turns of one item. env_step
counts joint answers. Letters: N agents, G joint answers to an item (num_generations), T turns, E
episodes, B samples, K completion tokens, D hidden width. Agents count from 0; for the models, agent
0 is "agent 1".
"""

import copy
import hashlib
import inspect
import json
import math
import os
import random
import re
import runpy
import secrets
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby, islice
from typing import Annotated, Any, Literal

import pydantic
import torch
import transformers
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

import common

# ----------------------------------------------------------------------------------------- 1 config

DEVICES = ("agent_devices", "critic_devices", "reference_devices")
STRICT = pydantic.ConfigDict(
    strict=True, extra="forbid", validate_assignment=True, allow_inf_nan=False
)
Fraction = Annotated[float, Field(ge=0, le=1)]
Devices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


@pydantic.dataclasses.dataclass(config=STRICT)
class Config:
    """Every setting of the algorithm; the defaults suit a pretrained language model."""

    num_agents: PositiveInt = 2  # models that answer together
    num_turns: PositiveInt = 1  # rounds per episode; above 1 needs an external_transition
    critic_type: Literal["v", "q"] = "v"  # "v": V(h), read after the prompt; "q": Q(h, a)
    use_separate_critic: bool = True  # a critic model per agent, or a value head on the actor
    num_train_epochs: PositiveInt = 1  # passes over train_dataset
    agent_learning_rate: NonNegativeFloat = 5e-6  # AdamW step size of the actors
    critic_learning_rate: NonNegativeFloat = 5e-6  # AdamW step size of separate critics
    value_loss_coef: NonNegativeFloat = 0.6  # weight of the critic loss
    advantage_normalization: bool = True  # mean 0 and std 1 within each agent and turn
    discount: Fraction = 1.0  # per turn
    early_termination_threshold: float | None = None  # a mean reward above it ends the episode
    reference_kl_enabled: bool = False  # penalise the distance from the initial models
    reference_kl_coef: NonNegativeFloat = 0.1  # weight of that penalty
    value_clip_range: PositiveFloat | None = 0.2  # shared backbone: clip the value loss; None = off
    critic_value_head_hidden_dim: PositiveInt | None = None  # separate critic: tanh layer's width
    value_head_hidden_dim: PositiveInt | None = None  # shared backbone: the same; None = linear
    max_grad_norm: PositiveFloat | None = 1.0  # gradient clipping per model; None = off
    seed: NonNegativeInt = 1  # of sampling, shuffling and value heads

    max_new_tokens: PositiveInt = 256  # length limit of an answer
    temperature: PositiveFloat = 1.0  # of sampling and scoring
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # nucleus sampling; 1 = off
    top_k: PositiveInt | None = None  # sample from the k likeliest tokens; None = off
    num_generations: PositiveInt = 1  # joint answers per item; above 1 needs num_turns 1
    chat_template: bool = False  # wrap prompts in the tokenizer's chat template
    external_prompt_passthrough: bool = False  # the transition's prompts skip the formatter

    rollout_buffer_size: PositiveInt = 8  # samples per agent that start an update
    train_batch_size: PositiveInt | None = None  # samples per step; None = rollout_buffer_size
    micro_batch_size: PositiveInt | None = None  # samples in a model at once; None = all
    rollout_batch_size: PositiveInt | None = None  # items generated together; None = all
    lora_rank: PositiveInt | None = None  # train adapters of that rank; None = all weights
    gradient_checkpointing: bool = False  # compute layers twice, to keep less of them in memory
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; weights are float32

    parallel_training: Literal["none", "mp"] = "none"  # one device, or "mp": those named below
    agent_devices: Devices | None = None  # one for all agents or one for each
    critic_devices: Devices | None = None  # one for all critics or one for each
    reference_devices: Devices | None = None  # of the reference models; None = the agents'

    eval_interval: NonNegativeInt = 16  # items between evaluations; 0 = never evaluate
    eval_num_samples: NonNegativeInt = 4  # items per evaluation
    eval_batch_size: PositiveInt = 1  # items generated together in evaluation
    logging_steps: PositiveInt = 1  # joint answers between two logged rows, at least
    checkpoint_interval: NonNegativeInt = 0  # updates between checkpoints; 0 = one at the end

    @pydantic.field_validator(
        "critic_type", "critic_learning_rate", "parallel_training", mode="before"
    )
    @classmethod
    def read_null(cls, x: Any, info: pydantic.ValidationInfo) -> Any:
        """Take these as comlrl's YAML files may have them: null, or in capitals."""
        if x is None or x == "null":
            learning_rate = info.data.get("agent_learning_rate")
            null = {"critic_type": "v", "parallel_training": "none"}
            return null.get(info.field_name, learning_rate)
        return x.strip().lower() if isinstance(x, str) else x

    @pydantic.field_validator(*DEVICES, mode="before")
    @classmethod
    def read_devices(cls, x: Any) -> Any:
        """Take one name, or several."""
        return [x] if isinstance(x, str) else list(x) if isinstance(x, tuple) else x

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.train_batch_size is None:
            self.train_batch_size = self.rollout_buffer_size
        if self.num_turns > 1 and self.num_generations > 1:
            generations = f"num_generations={self.num_generations}"
            raise ValueError(f"{generations} must be 1 with num_turns={self.num_turns}")
        first = None
        for name in DEVICES:
            needed = name == "agent_devices" or (
                name == "critic_devices" and self.use_separate_critic
            )
            devices = getattr(self, name)
            if self.parallel_training == "mp" and needed and devices is None:
                raise ValueError(f"{name}=None: parallel_training='mp' needs device names")
            first = first or (devices and devices[0])
            if self.parallel_training == "none" and devices and set(devices) != {first}:
                problem = f"parallel_training='none' is for one device, which is {first!r}"
                raise ValueError(f"{name}={devices}: {problem}")


IACConfig = Config

# ---------------------------------------------------------------------------------- 2 buffer record


@dataclass
class RolloutSample:
    """One agent's answer in one turn of one episode; filled in from top to bottom."""

    agent_idx: int
    row: int  # of the item in the dataset
    turn_idx: int
    generation_idx: int
    item: Mapping  # the dataset row
    prompt: str
    prompt_ids: list[int] = field(default_factory=list)  # h_i
    truncated: bool = False  # only the end of the prompt fits the model's positions
    completion: str = ""  # without the stop token
    completion_ids: list[int] = field(default_factory=list)  # a_i: the stop token included
    finished: bool = False  # ended by a stop token, not by the length limit
    reward: float = 0.0  # R: processed, before the KL penalty
    critic_ids: list[int] = field(default_factory=list)  # what the critic reads
    old_value: float = 0.0  # C_old(t)
    reference_kl: float = 0.0  # KL_t
    target: float = 0.0  # y_t
    advantage: float = 0.0  # y_t - C_old(t); normalised only in `update`
    expected_return: float = 0.0  # R summed from this turn on, undiscounted

    # What metrics callbacks that were written for comlrl ask for
    returns = property(lambda self: self.expected_return)
    normalized_advantage = property(lambda self: None)  # not known yet
    prompt_len = property(lambda self: len(self.prompt_ids))
    response_len = property(lambda self: len(self.completion_ids))

    @property
    def metadata(self) -> dict[str, Any]:
        """The rest, under comlrl's names."""
        return {
            "turn_idx": self.turn_idx,
            "generation_idx": self.generation_idx,
            "batch_item": self.item,
            "value_target": self.target,
            "adv_target": self.target,
            "reference_kl": self.reference_kl,
        }


Joint = list[RolloutSample]  # the N agents' samples of one turn: a joint answer
Episode = list[Joint]  # the T turns of an episode


# ----------------------------------------------------------------------------------------- 3 critic


class Critic(nn.Module):
    """A language model's backbone and, in place of its head, a value head on the last token."""

    def __init__(self, backbone: nn.Module, hidden_dim: int | None, source: Any, seed: int) -> None:
        """Put a head D -> 1 on the backbone, with a tanh layer in between if hidden_dim is given.

        Its last layer starts at zero: values are 0 at first. Where `save_model` left a trained head
        in the folder `source`, that one is taken.
        """
        super().__init__()
        self.backbone = backbone
        config = backbone.config.get_text_config()
        D = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT-350m's are narrower
        path = common.find_file(source, "value_head.safetensors")
        saved = load_file(path) if path else {}
        if "2.weight" in saved:  # a tanh layer's output
            hidden_dim = hidden_dim or saved["2.weight"].shape[1]
        with torch.random.fork_rng(devices=[]):  # the global random state is the user's
            torch.default_generator.manual_seed(seed)
            layers = [nn.Linear(D, hidden_dim), nn.Tanh()] if hidden_dim else []
            head = nn.Sequential(*layers, nn.Linear(hidden_dim or D, 1))
        nn.init.zeros_(head[-1].weight)
        nn.init.zeros_(head[-1].bias)
        if saved:
            head.load_state_dict(saved)
        self.value_head = head.to(backbone.device, torch.float32)

    def forward(self, sequences: list[list[int]], dtype: str) -> Tensor:
        """Values [B] of B token sequences."""
        hidden = common.last_hidden(self.backbone, sequences, dtype)  # [B, D]
        return self.value_head(hidden.float()).squeeze(-1)


# ----------------------------------------------------------------- 4 targets, advantages and losses


def td_targets(
    rewards: list[float], values: list[float], discount: float
) -> tuple[list[float], list[float]]:
    """Targets y_t and TD errors y_t - C_old(t) of one agent's T collected turns.

    With discount 1, rewards [1, 2], values [0.5, 0.25]: targets [1.25, 2], TD errors [0.75, 1.75].
    """
    next_values = [*values[1:], 0.0]  # nothing follows the last collected turn
    targets = [r + discount * v for r, v in zip(rewards, next_values, strict=True)]
    return targets, [y - v for y, v in zip(targets, values, strict=True)]


def normalize_advantages(advantages: Tensor) -> Tensor:
    """(A - mean) / max(std, 1e-6) of advantages [B]; a single one is left as it is."""
    if len(advantages) == 1:
        return advantages
    exact = advantages.double()  # equal advantages must become 0, and their mean is exact only here
    return ((exact - exact.mean()) / exact.std(correction=0).clamp(min=1e-6)).float()


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """One-sample estimates [B] of KL(pi || pi_ref), from log-probs [B, K] that are 0 at padding."""
    return (logprobs - reference_logprobs).sum(-1)


def policy_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-log pi(a|h) * A of each sample: logprobs [B, K], 0 at padding, and advantages [B] -> [B]."""
    return -logprobs.sum(-1) * advantages


def value_loss(values: Tensor, targets: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """(C - y)^2 of each sample, [B]; with a clip range the larger of that and (C_clip - y)^2."""
    losses = (values - targets) ** 2
    if clip is None:
        return losses
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(losses, (clipped - targets) ** 2)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """1 - Var(y - C_old) / Var(y); NaN, which is not logged, where the targets do not vary."""
    variance = targets.double().var(correction=0)
    if variance < 1e-12:
        return math.nan
    return (1 - (targets - values).double().var(correction=0) / variance).item()


# ---------------------------------------------------------------------------------------- 5 trainer

ALGORITHM = "iac"  # names the folders of runs, and tells one file's runs from the other's


@dataclass
class Counts:
    """Where a run stands: it changes between updates only, and a checkpoint holds it."""

    epoch: int = 0
    row: int = 0  # in the dataset, of the next item
    items_done: int = 0
    env_step: int = 0  # joint answers
    updates: int = 0
    truncated_prompts: int = 0
    evaluated_items: int = -1  # items_done at the last evaluation
    logged_step: int = 0  # env_step when metrics were logged last
    row_step: int = -1  # env_step of the last row that was written


class Trainer:
    """Trains N agents, each with its own critic. What does not fit together is a ValueError."""

    def __init__(
        self,
        *,
        agent_model=None,  # folder or hub name, of which each agent loads a copy; a model if N = 1
        agents=None,  # instead: a list of one for each agent
        critic_model=None,  # the same for critics; a model in memory serves all agents
        critics=None,  # instead: a list of one for each agent
        tokenizer=None,  # one, or a list of one for each agent; by default those in agents' folders
        reward_func=None,  # see call_reward and read_rewards
        reward_processor=float,  # applied to every reward
        formatters=None,  # item -> prompt, one or a list; None: item["prompt"]
        args: Config | None = None,
        train_dataset=None,  # dicts: a list, a Hugging Face Dataset, any iterable
        eval_dataset=None,  # the same, for evaluate()
        model_config: Mapping[str, Any] | None = None,  # see common.read_model_config
        wandb_config: Mapping[str, Any] | None = None,  # arguments of wandb.init, or comlrl's
        metrics_callback=None,  # an item's RolloutSamples -> dict of further metrics
        external_transition=None,  # the next turn's prompts, see next_prompts
        output_dir: str | None = None,  # a new folder, by default one in runs/
    ) -> None:
        self.args = args = Config() if args is None else args
        if not isinstance(args, Config):
            raise ValueError(f"args must be the settings of {ALGORITHM}.py, got {args!r:.200}")
        common.start_processes()
        if args.parallel_training == "mp" and common.world_size() > 1:
            problem = f"places models for one process, but torchrun started {common.world_size()}"
            raise ValueError(f"parallel_training='mp' {problem}")
        self.reward_func = reward_func
        self.reward_processor = reward_processor or float
        self.formatters = list_formatters(formatters, args.num_agents)
        self.metrics_callback = metrics_callback or (lambda samples: {})
        self.external_transition = external_transition
        self.train_dataset = check_dataset("train_dataset", train_dataset, args.num_train_epochs)
        self.eval_dataset = check_dataset("eval_dataset", eval_dataset, times=math.inf)
        self.wandb_config, self.verbose = read_wandb_config(wandb_config)
        self.output_dir = output_dir
        needed = ["reward_func", "reward_processor", "metrics_callback"]
        if args.num_turns > 1 or external_transition is not None:
            needed.append("external_transition")
        for name in needed:
            if not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function, got {getattr(self, name)!r:.200}")

        options = common.read_model_config(model_config)
        memory = (args.dtype, args.lora_rank, args.gradient_checkpointing)
        loader = common.Loader(options, *memory, self.seed_for)
        self.load_agents(agent_model, agents, tokenizer, loader)
        self.load_critics(critic_model, critics, loader)
        common.take_weights_of_first([*self.agents, *self.critics, *self.references])
        if args.use_separate_critic:
            self.agent_optimizers = [adamw(args.agent_learning_rate, x) for x in self.agents]
            optimizers = {x: adamw(args.critic_learning_rate, x) for x in self.critics}
            self.critic_optimizers = [optimizers[x] for x in self.critics]
        else:  # one optimiser steps on an agent and the value head on it
            pairs = zip(self.agents, [critic.value_head for critic in self.critics], strict=True)
            self.agent_optimizers = [adamw(args.agent_learning_rate, *pair) for pair in pairs]
            self.critic_optimizers = self.agent_optimizers

        self.buffer: list[Joint] = []  # joint answers since the last update; agent i's are joint[i]
        self.buffer_metrics: dict[str, list[float]] = defaultdict(list)  # own share of these
        self.metrics: dict[str, list[float]] = defaultdict(list)  # to average in the next row
        self.seconds: dict[str, float] = defaultdict(float)  # spent in each part since the last row
        self.counts = Counts()
        self.run: Run | None = None

    def load_agents(self, agent_model: Any, agents: Any, tokenizer: Any, loader: Any) -> None:
        """Set agents, their references (or none) and tokenizers."""
        args, N, options = self.args, self.args.num_agents, loader.options
        given = {"agent_model": agent_model, "agents": agents}
        self.sources = common.resolve_sources(given, N, f"num_agents={N}")
        self.agents = loader.load("agents", self.sources, self.devices("agent_devices", N))
        self.references = []
        if args.reference_kl_enabled and args.reference_kl_coef > 0:
            devices = self.devices("reference_devices", N)
            self.references = loader.load("references", self.sources, devices)
        self.tokenizers = common.resolve_tokenizers(tokenizer, self.sources, options)
        self.chat_template_kwargs = options["chat_template_kwargs"]
        for i, (agent, tok) in enumerate(zip(self.agents, self.tokenizers, strict=True)):
            common.check_vocabulary(f"agents[{i}]", agent, self.sources[i], tok)
            if common.max_positions(agent) <= args.max_new_tokens:
                limit = f"max_new_tokens={args.max_new_tokens}"
                raise ValueError(f"{limit}: agents[{i}] has no more positions than that")
            if args.chat_template and not tok.chat_template:
                raise ValueError(f"chat_template=True: the tokenizer of agents[{i}] has none")

    def load_critics(self, critic_model: Any, critics: Any, loader: Any) -> None:
        """Set critics: one for each agent, or the same one for all if it was in memory."""
        args, N = self.args, self.args.num_agents
        if args.use_separate_critic:
            given = {"critic_model": critic_model, "critics": critics}
            count = 1 if isinstance(critic_model, nn.Module) else N
            sources = common.resolve_sources(given, count, f"num_agents={N}")
            devices = self.devices("critic_devices", count)
            backbones = loader.load("critics", sources, devices)
            common.refuse_shared_weights(agents=self.agents, critics=backbones)
            width = self.head_width("critic_value_head_hidden_dim", loader.options)
        else:
            if critic_model is not None or critics is not None:
                raise ValueError(
                    "critic_model and critics have no place: use_separate_critic=False"
                )
            sources, backbones = self.sources, [common.body(agent) for agent in self.agents]
            common.refuse_shared_weights(agents=self.agents)
            width = self.head_width("value_head_hidden_dim", loader.options)
        made = [
            Critic(x, width, sources[c], self.seed_for("critic", c))
            for c, x in enumerate(backbones)
        ]
        self.critics = made if len(made) == N else made * N
        self.critic_names = [f"critic_{made.index(critic)}" for critic in self.critics]
        for i, critic in enumerate(self.critics):  # it reads the ids of its agent's tokenizer
            source = sources[made.index(critic)]
            common.check_vocabulary(f"critics[{i}]", critic.backbone, source, self.tokenizers[i])

    def head_width(self, name: str, options: dict) -> int | None:
        """The width by that name in args or model_config."""
        in_args, in_options = getattr(self.args, name), options[name]
        if None not in (in_args, in_options) and in_args != in_options:
            raise ValueError(f"{name}={in_args} in args, but {in_options} in model_config")
        return in_args or in_options

    def devices(self, name: str, count: int) -> list[torch.device]:
        """`count` devices by the setting `name`; without "mp" all settings name the same one."""
        args = self.args
        named = getattr(args, name) or args.agent_devices
        if args.parallel_training == "none":
            named = named or args.critic_devices or args.reference_devices
            named = named and named[:1]
        return common.find_devices(name, named, count)

    def seed_for(self, *purpose: Any) -> int:
        """A seed for one purpose: no random state is carried from step to step, or saved."""
        digest = hashlib.sha256(repr((self.args.seed, *purpose)).encode()).digest()
        return int.from_bytes(digest[:4], "little")

    # What follows stands in the order in which it is called.

    def train(self, resume_from: str | None = None) -> None:
        """Pass num_train_epochs times over train_dataset, or go on from `resume_from`.

        That is the folder of a run, or of a checkpoint. Ctrl-C and an error in a function of the
        user leave a checkpoint of the last update; an error within an update leaves an earlier one.
        """
        args = self.args
        with self.start_run(resume_from):
            self.report()  # the first evaluation, or what was due when the checkpoint was written
            for items, epoch_ends in self.item_batches():
                with self.timed("rollout"), self.checkpoint_on_error():
                    own = common.own_share(items)
                    stream = ("train", self.counts.epoch)
                    episodes = self.rollout(own, args.num_generations, stream)
                    joints = [joint for episode in episodes for joint in episode]
                    self.compute_values(joints)
                    self.compute_targets(episodes)
                    self.add_metrics(self.buffer_metrics, joints)
                self.buffer += gather_joints(episodes)
                if len(self.buffer) >= args.rollout_buffer_size or epoch_ends:
                    with self.timed("update"):
                        for i in range(args.num_agents):
                            self.update(i)
                    self.empty_buffer(epoch_ends)
                    self.between_updates()
            self.end_run()

    def item_batches(self) -> Iterator[tuple[list, bool]]:
        """Yield the items to answer next, as (row, item), and whether they end an epoch.

        They are those that fill the buffer if no episode ends early: the weights stay as they are.
        """
        args, counts = self.args, self.counts
        while counts.epoch < args.num_train_epochs:
            rows = enumerate(common.iterate(self.train_dataset, counts.row), counts.row)
            with self.checkpoint_on_error():
                ahead = list(islice(rows, 1))  # looking ahead tells where the epoch ends
            if not ahead:
                raise ValueError(f"train_dataset has no rows in epoch {counts.epoch + 1}")
            while ahead:
                missing = args.rollout_buffer_size - len(self.buffer)
                count = math.ceil(missing / (args.num_generations * args.num_turns))
                count = min(count, args.rollout_batch_size or count)
                with self.checkpoint_on_error():
                    items = ahead + list(islice(rows, count - 1))
                    ahead = list(islice(rows, 1))
                yield items, not ahead

    def rollout(self, items: list, G: int, stream: tuple) -> list[Episode]:
        """Answer all (row, item) side by side, turn by turn, with the weights as they are.

        Returns episodes [E][T][N] of samples, E = len(items) * G; T differs where some end early.
        `stream` and the first row name the random numbers; the user's functions may draw from the
        global ones.
        """
        if not items:
            return []  # there are more processes than items
        args, stream = self.args, (*stream, items[0][0])
        transformers.set_seed(self.seed_for(*stream))
        episodes = [[] for _ in range(len(items) * G)]
        active = list(range(len(episodes)))  # the numbers of those that go on, B of them
        for turn in range(args.num_turns):
            joints = []  # [B][N]: the samples of this turn
            for e in active:
                row, item = items[e // G]
                if e % G == 0:  # the G joint answers to an item have the same prompts
                    prompts = self.next_prompts(item, episodes[e], f"row {row}, turn {turn + 1}")
                joint = []
                for i, prompt in enumerate(prompts):
                    joint.append(RolloutSample(i, row, turn, e % G, item, prompt))
                joints.append(joint)
            self.encode_prompts(joints)
            self.draw_answers(joints, (*stream, turn))
            for start in range(0, len(joints), G):
                self.fill_rewards(joints[start : start + G])
            for e, joint in zip(active, joints, strict=True):
                episodes[e].append(joint)
            active = [e for e in active if not self.has_ended(episodes[e][-1])]
            if not active:
                break
        return episodes

    def next_prompts(self, item: Mapping, episode: Episode, where: str) -> list:
        """The N prompts of the next turn of an episode [T][N], texts or chats.

        In the first turn the formatters make them of the item. Later the transition says what
        comes: the prompts themselves with external_prompt_passthrough, else what stands for
        item["prompt"].
        """
        N = self.args.num_agents
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}: a dataset item must be a dict, got {item!r:.200}")
        items, external = [item] * N, [None] * N
        if episode:
            histories = list(zip(*episode, strict=True))  # [N][T]
            external = self.external_transition(
                prompt=copy.deepcopy(item.get("prompt", "")),
                agent_completions=[s.completion for s in episode[-1]],
                num_agents=N,
                prompt_history_per_agent=[[s.prompt for s in turns] for turns in histories],
                response_history_per_agent=[[s.completion for s in turns] for turns in histories],
            )
            check_external(external, N, where)
            if self.args.external_prompt_passthrough:
                return list(external)
            original = copy.deepcopy(item.get("prompt", ""))
            items = [{**item, "_original_prompt": original, "prompt": x} for x in external]
        prompts = []
        for i, formatter in enumerate(self.formatters):
            by = f"{where}, agent {i}: the formatter"
            informed = "external_prompts" in common.parameters(formatter)
            options = {"external_prompts": external[i]} if informed else {}
            try:
                prompts.append(check_prompt(formatter(items[i], **options), by))
            except KeyError as error:
                raise ValueError(f"{by} found no {error} in {items[i]!r:.200}") from error
        return prompts

    def encode_prompts(self, joints: list[Joint]) -> None:
        """Fill in prompt_ids of samples [B][N], and chats as texts; too long ones keep the end."""
        args, options = self.args, self.chat_template_kwargs
        for i, own in enumerate(zip(*joints, strict=True)):
            tokenizer, agent = self.tokenizers[i], self.agents[i]
            texts = []
            for s in own:
                chat = s.prompt
                if args.chat_template and isinstance(s.prompt, str):
                    chat = [{"role": "user", "content": s.prompt}]
                texts.append(common.render(tokenizer, chat, options))
                s.prompt = s.prompt if isinstance(s.prompt, str) else texts[-1]
            places = [f"row {s.row}, turn {s.turn_idx + 1}, agent {i}" for s in own]
            known = min(common.vocabulary(agent), common.vocabulary(self.critics[i].backbone))
            limit = common.max_positions(agent) - args.max_new_tokens
            for s, ids in zip(own, common.encode(tokenizer, texts, places, known), strict=True):
                s.prompt_ids = common.keep_end(ids, limit, tokenizer)
                s.truncated = len(s.prompt_ids) < len(ids)

    def draw_answers(self, joints: list[Joint], stream: tuple) -> None:
        """Fill in the answers of samples [B][N], drawn from their agents."""
        args, generators = self.args, []
        for i, agent in enumerate(self.agents):
            generator = torch.Generator(agent.device)
            generators.append(generator.manual_seed(self.seed_for(*stream, i)))
        prompts = [[s.prompt_ids for s in own] for own in zip(*joints, strict=True)]
        stops = [common.stop_ids(*pair) for pair in zip(self.agents, self.tokenizers, strict=True)]
        sampling = common.Sampling(
            args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.dtype
        )
        drawn = common.generate_all(self.agents, prompts, stops, generators, sampling)  # [N][B]
        for i, own in enumerate(zip(*joints, strict=True)):
            for s, ids in zip(own, drawn[i], strict=True):
                s.completion_ids = ids
                s.finished = ids[-1] in stops[i]
                text_ids = ids[:-1] if s.finished else ids
                s.completion = self.tokenizers[i].decode(text_ids, skip_special_tokens=True)

    def fill_rewards(self, joints: list[Joint]) -> None:
        """Fill in the rewards of the G joint answers [G][N] to one item in one turn."""
        N, G = self.args.num_agents, len(joints)
        first = joints[0][0]
        turn = first.turn_idx + 1
        where = f"row {first.row}, turn {turn}"
        completions = [[s.completion for s in own] for own in zip(*joints, strict=True)]  # [N][G]
        prompts = [s.prompt for s in joints[0]]
        raw = call_reward(self.reward_func, completions, prompts, first.item, turn)
        rewards = read_rewards(raw, N, G, where)
        processed = [[self.reward_processor(reward) for reward in own] for own in rewards]
        rewards = read_rewards(processed, N, G, f"{where}, reward_processor")
        for g, joint in enumerate(joints):
            for s in joint:
                s.reward = rewards[s.agent_idx][g]

    def has_ended(self, joint: Joint) -> bool:
        """Whether the mean reward of a turn is above early_termination_threshold."""
        threshold = self.args.early_termination_threshold
        if threshold is None:
            return False
        return sum(s.reward - threshold for s in joint) > 0  # a mean of equals may be rounded up

    @torch.no_grad()
    def compute_values(self, joints: list[Joint]) -> None:
        """Fill in critic_ids, old_value and reference_kl of samples [B][N]."""
        args = self.args
        for i, own in enumerate(zip(*joints, strict=True)):
            limit = common.max_positions(self.critics[i].backbone)
            largest = common.vocabulary(self.critics[i].backbone) - 1  # agents may draw unused ids
            for s in own:
                answer_ids = s.completion_ids if args.critic_type == "q" else []
                ids = [min(token, largest) for token in s.prompt_ids + answer_ids]
                s.critic_ids = common.keep_end(ids, limit, self.tokenizers[i])
            for batch in self.micro_batches(own):
                values = self.critics[i]([s.critic_ids for s in batch], args.dtype)
                for s, value in zip(batch, values.tolist(), strict=True):
                    s.old_value = value
        for i, reference in enumerate(self.references):
            for batch in self.micro_batches([joint[i] for joint in joints]):
                logprobs = self.logprobs(self.agents[i], batch)
                reference_logprobs = self.logprobs(reference, batch).to(logprobs.device)
                penalties = reference_kl(logprobs, reference_logprobs)
                for s, kl in zip(batch, penalties.tolist(), strict=True):
                    s.reference_kl = kl

    def compute_targets(self, episodes: list[Episode]) -> None:
        """Fill in targets, advantages and returns of the samples of episodes [E][T][N]."""
        args = self.args
        for episode in episodes:
            for path in zip(*episode, strict=True):  # the T samples of one agent
                rewards = [s.reward - args.reference_kl_coef * s.reference_kl for s in path]
                values = [s.old_value for s in path]
                targets, td_errors = td_targets(rewards, values, args.discount)
                for t, s in enumerate(path):
                    s.target = targets[t]
                    s.advantage = td_errors[t]
                    s.expected_return = sum(later.reward for later in path[t:])

    def update(self, i: int) -> None:
        """Update agent i and its critic on the buffer: turn by turn, shuffled, in mini-batches."""
        args = self.args
        seed = self.seed_for("shuffle", self.counts.updates, i)
        shuffle = torch.Generator().manual_seed(seed)
        own = [joint[i] for joint in self.buffer]
        for turn in sorted({s.turn_idx for s in own}):
            group = [s for s in own if s.turn_idx == turn]
            self.add_critic_metrics(i, group)
            advantages = torch.tensor([s.advantage for s in group])
            if args.advantage_normalization:
                advantages = normalize_advantages(advantages)
            order = torch.randperm(len(group), generator=shuffle)
            for mb_inds in order.split(args.train_batch_size):
                batch = [group[b] for b in mb_inds]
                self.actor_step(i, batch, advantages[mb_inds])
                self.critic_step(i, batch)

    def actor_step(self, i: int, samples: list[RolloutSample], advantages: Tensor) -> None:
        """One step of agent i on B samples; with a shared backbone `critic_step` takes it."""
        micro_advantages = self.micro_batches(common.own_share(advantages))
        micro_samples = self.micro_batches(common.own_share(samples))
        for batch, A in zip(micro_samples, micro_advantages, strict=True):
            logprobs = self.logprobs(self.agents[i], batch)
            losses = policy_loss(logprobs, A.to(logprobs.device))
            (losses.sum() / len(samples)).backward()
            self.buffer_metrics[f"agent_{i}/policy_loss"] += losses.tolist()
            for s, row in zip(batch, logprobs.tolist(), strict=True):
                surprise = [-logprob for logprob in row[: len(s.completion_ids)]]
                self.buffer_metrics[f"agent_{i}/entropy"] += surprise
        if self.args.use_separate_critic:
            self.optimizer_step(f"agent_{i}", self.agent_optimizers[i])

    def critic_step(self, i: int, samples: list[RolloutSample]) -> None:
        """One step of agent i's critic on B samples; with a shared backbone, of the agent too."""
        args, name = self.args, self.critic_names[i]
        clip = None if args.use_separate_critic else args.value_clip_range
        for batch in self.micro_batches(common.own_share(samples)):
            values = self.critics[i]([s.critic_ids for s in batch], args.dtype)
            targets = torch.tensor([s.target for s in batch], device=values.device)
            old_values = torch.tensor([s.old_value for s in batch], device=values.device)
            losses = value_loss(values, targets, old_values, clip)
            (args.value_loss_coef * losses.sum() / len(samples)).backward()
            self.buffer_metrics[f"{name}/value_loss"] += losses.tolist()
        stepped = name if args.use_separate_critic else f"agent_{i}"
        self.optimizer_step(stepped, self.critic_optimizers[i])

    def optimizer_step(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, take the step, clear the gradient; refuse one that is not finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        common.sum_gradients(parameters)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not norm.isfinite():
            raise FloatingPointError(f"{name}/grad_norm is {norm.item()}: this step was not taken")
        if self.args.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        self.metrics[f"{name}/grad_norm"].append(norm.item())

    def logprobs(self, model: nn.Module, samples: Sequence[RolloutSample]) -> Tensor:
        """Log pi [B, K] of the tokens of B samples' answers, 0 at padding."""
        prompts = [s.prompt_ids for s in samples]
        completions = [s.completion_ids for s in samples]
        return common.score(model, prompts, completions, self.args.temperature, self.args.dtype)

    def micro_batches(self, samples: Any) -> list:
        """Pieces of at most micro_batch_size samples, which go through a model at once."""
        size = self.args.micro_batch_size or len(samples) or 1
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def empty_buffer(self, epoch_ends: bool) -> None:
        """Count what the update was made of and drop it; the run stands at the next item now."""
        counts = self.counts
        next_row = self.buffer[-1][0].row + 1
        counts.items_done += next_row - counts.row
        counts.row = next_row
        if epoch_ends:
            counts.epoch, counts.row = counts.epoch + 1, 0
        counts.env_step += len(self.buffer)
        counts.updates += 1
        counts.truncated_prompts += sum(s.truncated for joint in self.buffer for s in joint)
        add_up(self.metrics, common.gather(self.buffer_metrics))
        self.buffer.clear()
        self.buffer_metrics.clear()

    def between_updates(self) -> None:
        """Evaluate, log, write a checkpoint and stop, each if it is due."""
        args, counts = self.args, self.counts
        self.report()
        interval, ended = args.checkpoint_interval, counts.epoch == args.num_train_epochs
        is_due = interval and counts.updates % interval == 0 and not ended
        if is_due:
            self.save_checkpoint(self.run.path("checkpoint"))
        if any(common.gather(self.run.stop_requested)):
            self.save_checkpoint(self.run.path("checkpoint"))
            raise KeyboardInterrupt

    def report(self) -> None:
        """Log a row, if it is time for an evaluation, or for the means since the last row."""
        args, counts = self.args, self.counts
        row, ended = {}, counts.epoch == args.num_train_epochs
        if interval := args.eval_interval:
            is_due = counts.items_done // interval > counts.evaluated_items // interval
            if is_due or (ended and counts.items_done > counts.evaluated_items):
                row |= self.evaluate()
                counts.evaluated_items = counts.items_done
        steps = counts.env_step - counts.logged_step
        if steps >= args.logging_steps or (ended and steps):
            now = time.perf_counter()
            seconds = now - self.logged_at
            row |= means(self.metrics)
            row |= {f"time/{part}": spent / seconds for part, spent in self.seconds.items()}
            row["time/env_steps_per_second"] = steps / seconds
            row["truncated_prompts"] = counts.truncated_prompts
            self.metrics.clear()
            self.seconds.clear()
            self.logged_at, counts.logged_step = now, counts.env_step
        if row:
            self.run.log(counts.env_step, counts.items_done, row)
            counts.row_step = counts.env_step

    def evaluate(self) -> dict[str, float]:
        """Mean metrics, named eval/..., of one joint answer to the first items of eval_dataset.

        The random numbers depend on env_step alone: evaluating changes nothing in training.
        """
        args, own_metrics, episodes = self.args, defaultdict(list), []
        dataset = () if self.eval_dataset is None else self.eval_dataset
        with self.checkpoint_on_error():
            items = list(enumerate(islice(common.iterate(dataset), args.eval_num_samples)))
            items = common.own_share(items)
            for start in range(0, len(items), args.eval_batch_size):
                batch = items[start : start + args.eval_batch_size]
                played = self.rollout(batch, 1, ("eval", self.counts.env_step))
                self.compute_targets(played)  # for the returns
                joints = [joint for episode in played for joint in episode]
                self.add_metrics(own_metrics, joints, "eval/")
                episodes += played
        metrics, joints = defaultdict(list), gather_joints(episodes)
        add_up(metrics, common.gather(own_metrics))
        if self.run:
            self.run.log_answers(self.counts.env_step, [s for joint in joints for s in joint])
        return means(metrics)

    def add_metrics(
        self, metrics: dict[str, list[float]], joints: list[Joint], prefix: str = ""
    ) -> None:
        """Add what joint answers [B][N] tell, item by item, and what the user's callback tells."""
        for _, group in groupby(joints, key=lambda joint: joint[0].row):
            samples = [s for joint in group for s in joint]
            samples.sort(key=lambda s: (s.turn_idx, s.agent_idx, s.generation_idx))
            for s in samples:
                turn, agent = f"{prefix}turn_{s.turn_idx + 1}", f"{prefix}agent_{s.agent_idx}"
                metrics[f"{turn}/reward_mean"].append(s.reward)
                metrics[f"{turn}/expected_return"].append(s.expected_return)
                metrics[f"{agent}/reward_mean"].append(s.reward)
                metrics[f"{agent}/completion_tokens"].append(len(s.completion_ids))
                metrics[f"{agent}/finished_fraction"].append(float(s.finished))
                if self.references and not prefix:
                    metrics[f"{agent}/reference_kl"].append(s.reference_kl)
            further = self.metrics_callback(samples)
            try:
                for name, value in further.items():
                    metrics[f"{prefix}{name}"].append(float(value))
            except (AttributeError, TypeError, ValueError) as error:
                wanted = "metrics_callback must return a dict of numbers"
                raise ValueError(f"{wanted}, got {further!r:.200}") from error

    def add_critic_metrics(self, i: int, group: list[RolloutSample]) -> None:
        """Add what the advantages and values of agent i's samples [B] of one turn tell."""
        name = self.critic_names[i]
        values = torch.tensor([s.old_value for s in group])
        targets = torch.tensor([s.target for s in group])
        self.metrics[f"agent_{i}/advantage_mean"] += [s.advantage for s in group]
        self.metrics[f"{name}/value_mean"] += values.tolist()
        self.metrics[f"{name}/explained_variance"].append(explained_variance(values, targets))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds that something takes."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started

    @contextmanager
    def checkpoint_on_error(self) -> Iterator[None]:
        """An error where weights are only read, say in a user's function, leaves a checkpoint.

        It ends all processes, which meet here: nothing within may wait for the others.
        """
        error = None
        try:
            yield
        except BaseException as raised:
            error = repr(raised)
            raise
        finally:
            errors = [other for other in common.gather(error) if other]
            if errors and self.run and self.counts.updates:
                self.save_checkpoint(self.run.path("checkpoint"))
            if errors and not error:
                raise RuntimeError(f"another process ended with {errors[0]:.1000}")

    # Saving and resuming

    def save_model(self, path: str) -> None:
        """Write agent_{i}/, an ordinary model folder, and critic_{c}/ with value_head.safetensors.

        With a shared backbone the head lies in agent_{i}/. All are loaded again by their folders.
        """
        if common.rank() > 0:
            return
        for i, agent in enumerate(self.agents):
            agent.save_pretrained(os.path.join(path, f"agent_{i}"))
            self.tokenizers[i].save_pretrained(os.path.join(path, f"agent_{i}"))
        for i, critic in enumerate(self.critics):
            folder = os.path.join(path, f"agent_{i}")
            if self.args.use_separate_critic:
                folder = os.path.join(path, self.critic_names[i])
                critic.backbone.save_pretrained(folder)
            head = os.path.join(folder, "value_head.safetensors")
            save_file(critic.value_head.state_dict(), head)

    def save_checkpoint(self, path: str) -> None:
        """Write all that changes in training, for `train(resume_from=...)` to go on from."""
        if common.rank() > 0:
            return
        state = {
            "settings": self.settings(),
            "counts": asdict(self.counts),
            "metrics": dict(self.metrics),
            "weights": [common.trainable(x) for x in (*self.agents, *self.critics)],
            "optimizers": [x.state_dict() for x in self.optimizers()],
        }
        os.makedirs(path, exist_ok=True)
        file = os.path.join(path, "state.pt")
        torch.save(state, f"{file}.new")  # what stands in it twice, it holds once
        os.replace(f"{file}.new", file)  # at any moment there is one whole file

    def load_checkpoint(self, path: str) -> None:
        """Take up what `save_checkpoint` wrote."""
        file = os.path.join(path, "state.pt")
        state = torch.load(file, map_location="cpu", weights_only=True)
        refuse_other(state["settings"], self.settings(), path)
        done, wanted = state["counts"]["epoch"], self.args.num_train_epochs
        if done > wanted:
            raise ValueError(f"num_train_epochs={wanted}: {path} has done {done} already")
        for x, saved in zip((*self.agents, *self.critics), state["weights"], strict=True):
            if not common.trainable(x).keys() <= saved.keys():
                raise ValueError(f"{path} does not hold the weights that are trained here")
            x.load_state_dict(saved, strict=False)  # what is frozen is not in it
        for x, saved in zip(self.optimizers(), state["optimizers"], strict=True):
            x.load_state_dict(saved)
            x.zero_grad()  # an error may have left gradients behind
        self.counts, self.metrics = Counts(**state["counts"]), defaultdict(list, state["metrics"])
        self.buffer.clear()
        self.buffer_metrics.clear()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimiser once."""
        return list(dict.fromkeys([*self.agent_optimizers, *self.critic_optimizers]))

    def settings(self) -> dict[str, Any]:
        """What runs are told apart by."""
        digest = dataset_digest(self.train_dataset)
        return {"algorithm": ALGORITHM, "train_dataset": digest} | asdict(self.args)

    def start_run(self, resume_from: str | None) -> "Run":
        """Begin a run in a new folder, or take one up: in its own, or from a bare checkpoint."""
        args, dataset = self.args, self.train_dataset
        if dataset is None:
            raise ValueError("train_dataset is required to train")
        folder, settings = self.output_dir, self.settings()
        if resume_from and os.path.exists(os.path.join(resume_from, "state.pt")):
            self.load_checkpoint(resume_from)
            self.counts.row_step = -1  # the rows so far are in another folder
        elif resume_from:
            started = read_settings(resume_from)
            refuse_other(started, settings, resume_from)
            folder, settings["run_id"] = resume_from, started["run_id"]
            if os.path.exists(os.path.join(folder, "checkpoint", "state.pt")):
                self.load_checkpoint(os.path.join(folder, "checkpoint"))
            elif self.run:
                raise ValueError(f"{folder} has no checkpoint: begin again with a new trainer")
        if folder is None:
            stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            folder = f"runs/{ALGORITHM}__{args.critic_type}__{args.seed}__{stamp}"
        if folder != resume_from and os.path.exists(folder) and os.listdir(folder):
            raise ValueError(f"output_dir={folder!r} holds files: name a new folder, or resume it")
        folder = common.gather(folder)[0]  # nothing is written until all have looked
        for other in common.gather(settings):
            unequal = [name for name in settings if settings[name] != other.get(name)]
            if unequal:
                raise ValueError(f"the processes disagree on {unequal}")
        self.output_dir, self.logged_at = folder, time.perf_counter()
        self.run = Run(folder, settings, self.wandb_config, self.verbose)
        self.run.drop_rows_after(self.counts.row_step)
        if self.counts.updates and folder != resume_from:
            self.save_checkpoint(self.run.path("checkpoint"))  # the new folder can be resumed
        if hasattr(dataset, "__len__"):
            self.run.total = len(dataset) * args.num_train_epochs
        if args.eval_interval and self.eval_dataset is None:
            say("There is no eval_dataset: nothing is evaluated.")
        return self.run

    def end_run(self) -> None:
        """Leave the last checkpoint and the trained models."""
        self.save_checkpoint(self.run.path("checkpoint"))
        self.save_model(self.run.path("model"))
        say(f"The trained models are in {self.run.path('model')}.")
        common.gather(None)  # until all is written


IACTrainer = Trainer


def adamw(learning_rate: float, *modules: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of what trains in these modules."""
    parameters = [p for module in modules for p in common.trainable(module).values()]
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)


def gather_joints(episodes: list[Episode]) -> list[Joint]:
    """The joint answers of all processes' episodes [E][T][N], in the order of the items."""
    every = [episode for own in common.gather(episodes) for episode in own]
    every.sort(key=lambda episode: (episode[0][0].row, episode[0][0].generation_idx))
    return [joint for episode in every for joint in episode]


def add_up(metrics: dict[str, list[float]], parts: list[dict[str, list[float]]]) -> None:
    """Add each metric's values in the parts."""
    for part in parts:
        for name, values in part.items():
            metrics[name] += values


def means(metrics: dict[str, list[float]]) -> dict[str, float]:
    """The mean of each metric's values, of those that are finite."""
    finite = {name: [x for x in values if math.isfinite(x)] for name, values in metrics.items()}
    return {name: sum(values) / len(values) for name, values in finite.items() if values}


# ---------------------------------------------------------------------------------------- 6 the run

MAY_CHANGE = {  # settings that may differ when a run is resumed
    *("num_train_epochs", "checkpoint_interval"),
    *("output_dir", "resume", "track", "run_id"),
}


def read_settings(folder: str) -> dict[str, Any]:
    """The config.json in the folder of a run; ValueError if it is not one of this file's."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(folder, "config.json")) as file:
            settings = json.load(file)
        if settings["algorithm"] == ALGORITHM:
            return settings
    wanted = f"the folder of a run of {ALGORITHM}.py"
    raise ValueError(f"{folder} is not {wanted} (give that one, not the checkpoint/ in it)")


def refuse_other(settings: dict[str, Any], own: dict[str, Any], path: str) -> None:
    """ValueError unless the settings of the run in `path` are one's own."""
    for name, value in own.items():
        other = settings.get(
            name, getattr(Config, name, None)
        )  # a field may be younger than the run
        if name not in MAY_CHANGE and other != value:
            hint = "start anew from its model/ folder to train on with other settings or data"
            raise ValueError(
                f"{path} is of a run with {name}={other!r}, here it is {value!r}: {hint}"
            )


def dataset_digest(dataset: Any) -> str | None:
    """Number of rows and a digest of 64 of them, to know a dataset again, if it tells."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    count = len(dataset)
    rows = [dataset[row] for row in range(0, count, max(1, count // 64))]
    text = json.dumps(rows, default=lambda x: type(x).__name__, skipkeys=True)
    return f"{count} rows, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def read_wandb_config(given: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """Arguments of wandb.init and whether to be verbose, from those or from comlrl's of that name.

    There "run_name" is the name, and every section of "config_sections" goes into the W&B config.
    Keys that neither knows are left out with a warning; a value of the wrong type is a ValueError.
    """
    if given is None:
        return None, True
    if not isinstance(given, Mapping):
        raise ValueError(f"wandb_config must be a dict, got {given!r:.200}")
    import wandb  # takes a second, and few runs need it

    options = {name: value for name, value in given.items() if value is not None}
    sections = options.pop("config_sections", {})
    name = options.pop("run_name", None)
    options = {"name": name, "config": {}} | options
    if not isinstance(sections, Mapping) or not isinstance(options["config"], Mapping):
        raise ValueError(
            f"wandb_config: config and config_sections must be dicts, got {given!r:.300}"
        )
    options["config"] = {**options["config"], **sections}
    unknown = set(options) - set(common.parameters(wandb.init))
    if unknown:
        warnings.warn(f"wandb_config: {sorted(unknown)} are not known and ignored", stacklevel=3)
    for name in ("project", "entity", "name", "dir", "group", "mode"):
        if not isinstance(options.get(name, ""), str | None):
            raise ValueError(f"wandb_config: {name}={options[name]!r} must be a string")
    output = sections.get("output")
    verbose = bool(output.get("verbose", True)) if isinstance(output, Mapping) else True
    return {name: value for name, value in options.items() if name not in unknown}, verbose


def say(text: str) -> None:
    """Show a line; nothing that is only shown may end a run."""
    if common.rank() > 0:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError, ValueError):  # a console that is closed
        tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))


class Run:
    """Writes what a run leaves and shows, and hears of a stop; it knows no model and no loss.

    Of several processes the first one does so, the others only hear.

    Its folder holds config.json, metrics.jsonl and completions.jsonl; the trainer adds checkpoint/
    and model/. As a context it shows a progress bar, tracks with W&B and handles Ctrl-C and
    SIGTERM.
    """

    def __init__(
        self, folder: str, settings: dict[str, Any], wandb_config: Mapping | None, verbose: bool
    ) -> None:
        self.folder, self.wandb_config, self.verbose = folder, wandb_config, verbose
        self.settings = {"run_id": secrets.token_hex(4)} | settings
        self.total: int | None = None  # items to do
        self.stop_requested = False
        self.bar = self.tracker = None
        self.writes = common.rank() == 0
        if not self.writes:
            return
        os.makedirs(folder, exist_ok=True)
        with open(self.path("config.json.new"), "w") as file:
            json.dump(self.settings, file, indent=2)
        os.replace(self.path("config.json.new"), self.path("config.json"))

    def path(self, name: str) -> str:
        """Where a file of the run lies."""
        return os.path.join(self.folder, name)

    def drop_rows_after(self, env_step: int) -> None:
        """Forget what was written after a checkpoint: it comes again."""
        if not self.writes:
            return
        for name in ("metrics.jsonl", "completions.jsonl"):
            kept = []
            with suppress(FileNotFoundError), open(self.path(name)) as file:
                for line in file:
                    if not line.endswith("\n") or json.loads(line)["env_step"] > env_step:
                        break  # half a line was being written when the run was killed
                    kept.append(line)
            with open(self.path(f"{name}.new"), "w") as file:
                file.writelines(kept)
            os.replace(self.path(f"{name}.new"), self.path(name))

    def __enter__(self) -> "Run":
        say(f"The files of this run are in {self.folder}.")
        if self.wandb_config is not None and self.writes:
            self.tracker = self.start_tracking()
        self.bar = tqdm(total=self.total, unit="item", disable=not (self.verbose and self.writes))
        self.handlers = {}
        if (
            threading.current_thread() is threading.main_thread()
        ):  # only there signals can be handled
            for signum in (signal.SIGINT, signal.SIGTERM):
                self.handlers[signum] = signal.signal(signum, self.request_stop)
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        self.bar.close()
        if kind is not None:
            saved = os.path.exists(self.path("checkpoint/state.pt"))
            point = "its last checkpoint" if saved else "its beginning"
            say(f"The run stopped; --resume {self.folder} goes on from {point}.")
        if self.tracker:
            self.tracker.finish(exit_code=int(kind is not None))

    def start_tracking(self) -> Any:
        """A W&B run, offline if there is no login or no network."""
        import wandb

        config = self.settings | self.wandb_config.get("config", {})
        folder = self.wandb_config.get("dir", self.folder)
        os.makedirs(folder, exist_ok=True)
        options = {
            "id": self.settings["run_id"],
            "resume": "allow",
            "reinit": "create_new",
            "settings": wandb.Settings(init_timeout=20, login_timeout=5),
            **self.wandb_config,
            "config": config,
            "dir": folder,
        }
        try:
            return wandb.init(**options)
        except wandb.errors.Error as error:
            say(f"W&B: {error}\nThe run goes on offline.")
            return wandb.init(**options | {"mode": "offline"})

    def request_stop(self, *_: Any) -> None:
        """Let the current update finish; asked a second time, stop at once."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        if self.writes:
            os.write(2, b"\nStopping after this update; once more stops at once.\n")

    def log(self, env_step: int, items_done: int, row: dict[str, float]) -> None:
        """Append a row of metrics, track it and show what matters most."""
        self.append("metrics.jsonl", [{"env_step": env_step} | row])
        if self.tracker:
            self.tracker.log(row, step=env_step)
        for name, value in row.items():
            if name.startswith("eval/turn_") and name.endswith("/reward_mean"):
                say(f"  env_step {env_step}: {name} {value:.3f}")
        shown = {"reward": "turn_1/reward_mean", "explained": "critic_0/explained_variance"}
        values = {label: f"{row[name]:.2f}" for label, name in shown.items() if name in row}
        self.bar.set_postfix(values, refresh=False)
        self.bar.update(items_done - self.bar.n)

    def log_answers(self, env_step: int, samples: list[RolloutSample]) -> None:
        """Append evaluation's answers, and show a few."""
        rows = []
        for s in samples:
            place = {"env_step": env_step, "row": s.row, "turn": s.turn_idx + 1}
            place["agent"] = s.agent_idx
            rows.append(
                place | {"prompt": s.prompt, "completion": s.completion, "reward": s.reward}
            )
            if self.verbose and s.row < 3:
                answer = f"{s.prompt[-60:]!r} -> {s.completion[:60]!r}"
                say(f"  {answer}, reward {s.reward:.2f}")
        self.append("completions.jsonl", rows)

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a file of JSON lines."""
        if not self.writes:
            return
        with open(self.path(name), "a") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


# ----------------------------------------------------------------- 7 the user's functions, the task


def list_formatters(formatters: Any, N: int) -> list[Callable]:
    """One formatter for each agent."""
    if formatters is None:
        return [lambda item: item["prompt"]] * N
    if callable(formatters):
        return [formatters] * N
    if not isinstance(formatters, Sequence) or not all(map(callable, formatters)):
        raise ValueError(
            f"formatters must be a function or a list of them, got {formatters!r:.200}"
        )
    if len(formatters) != N:
        raise ValueError(f"{len(formatters)} formatters, num_agents={N}: these have to agree")
    return list(formatters)


def check_dataset(name: str, dataset: Any, times: float) -> Any:
    """The dataset, if it can be read that many times."""
    if dataset is None:
        return dataset
    readable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if hasattr(dataset, "keys") or not readable:  # keys: a dict, a table
        wanted = "a list of dicts or the like, one for each row"
        raise ValueError(f"{name} must be {wanted}; got {dataset!r:.200}")
    if isinstance(dataset, Iterator) and times > 1:
        problem = f"is to be read several times, which {dataset!r:.200} cannot"
        raise ValueError(f"{name} {problem}: make it a list")
    return dataset


def check_external(external: Any, N: int, where: str) -> None:
    """ValueError unless a transition returned a prompt for each agent."""
    if not isinstance(external, list | tuple) or len(external) != N:
        wanted = f"external_transition must return {N} prompts (num_agents={N})"
        raise ValueError(f"{where}: {wanted}, got {external!r:.200}")
    for i, prompt in enumerate(external):
        check_prompt(prompt, f"{where}, agent {i}: external_transition")


def check_prompt(prompt: Any, where: str) -> Any:
    """A prompt that is a text, or a chat: a list of {role, content}."""
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(x, Mapping) for x in prompt)
    if is_chat or (isinstance(prompt, str) and prompt.strip()):
        return prompt
    raise ValueError(f"{where} must return a prompt that is not empty, got {prompt!r:.200}")


ANSWERS = ("prompt", "prompts", "completion", "completions")  # what parameters may be called


def call_reward(
    reward_func: Callable,
    completions: list[list[str]],
    prompts: list[str],
    item: Mapping,
    turn: int = 1,
) -> Any:
    """Call a reward function the way its signature asks for.

    Its positional parameters get the agents' answers, a list of G strings each. If it requires one
    more than there are agents, the first gets the prompts; if it requires a single one, that gets
    the list of all agents' lists. Parameters named `prompts` (N strings), `batch_items` (a list of
    the one item) and `turn` (from 1) are filled wherever they stand; **kwargs gets them too.
    """
    parameters = common.parameters(reward_func)
    kinds = {p.kind for p in parameters.values()}
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters.values() if p.kind in by_place]
    named = {"prompts": list(prompts), "batch_items": [item], "turn": turn}
    answers: list[Any] = [list(texts) for texts in completions]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        required = sum(p.default is p.empty and p.name not in named for p in places)
        if required == len(answers) + 1:
            answers.insert(0, list(prompts))
        elif required == 1 < len(answers):
            answers = [answers]
    for p in places:
        if p.default is p.empty and p.name in item and p.name not in ANSWERS:
            hint = f"read the column as batch_items[0][{p.name!r}]"
            raise ValueError(
                f"reward_func's parameter {p.name!r} would get answers or prompts: {hint}"
            )
    positional = []
    for p in places:
        if p.name in named:
            positional.append(named.pop(p.name))
        elif answers:
            positional.append(answers.pop(0))
        else:
            break  # this one and those after it keep their defaults or are given by name
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    by_name = {name: x for name, x in named.items() if takes_all or name in parameters}
    return reward_func(*positional, *answers, **by_name)


def read_rewards(raw: Any, N: int, G: int, where: str) -> list[list[float]]:
    """Rewards [N][G] out of what a reward function returned for N agents and G joint answers.

    That is one number for the whole call, or G numbers, one per joint answer, or else N numbers,
    one per agent, or an N x G matrix; a list, tuple, array or tensor. Anything else is a
    ValueError, also a number too big to square.
    """
    try:
        rewards = torch.as_tensor(raw, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, text, a ragged list
        rewards = torch.tensor(math.nan)
    per_agent = rewards.shape == (N,) and N != G
    fits = per_agent or rewards.shape in ((), (G,), (N, G))
    if not fits or not rewards.float().square().isfinite().all():
        forms = f"a number, {G} numbers (one per joint answer), {N} numbers (one per agent)"
        wanted = f"{forms} or {N} lists of {G} numbers, all finite, also squared"
        is_list = isinstance(raw, list | tuple) or getattr(raw, "ndim", 0)
        count = f"{len(raw)} values, " if is_list else ""
        raise ValueError(f"{where}: expected a reward of {wanted}; got {count}{raw!r:.200}")
    return (rewards[:, None] if per_agent else rewards).expand(N, G).tolist()


def number_task(num_agents: int, seed: int) -> dict[str, Any]:
    """The built-in task: all agents see n, each names a number, and these should add up to n.

    They cannot talk, so they must find a convention: say, agent 0 names 4 whatever n is, and agent
    1 the rest. In a later turn they see what everybody said. Returns arguments of the trainer, as a
    task file would define them.
    """

    def first_number(text: str) -> str:
        return (re.findall(r"\d{1,4}", text) or ["?"])[0]

    def reward_func(*completions: list[str], batch_items: list[dict]) -> list[float]:
        n = batch_items[0]["n"]
        rewards = []
        for joint in zip(*completions, strict=True):
            said = [first_number(text) for text in joint]
            miss = math.inf if "?" in said else abs(sum(map(int, said)) - n)
            rewards.append(max(0.0, 1 - miss / 5))
        return rewards

    def external_transition(prompt: str, agent_completions: list[str], **_: Any) -> list[str]:
        said = " ".join(first_number(text) for text in agent_completions)
        return [f"{prompt}, said {said}"] * num_agents

    def formatter_of(i: int) -> Callable:  # "agent 1 of 2: sum to 7, said 3 5 ="
        return lambda item: f"agent {i + 1} of {num_agents}: {item['prompt']} ="

    rng = random.Random(seed)
    numbers = [rng.randrange(10) for _ in range(2000)]
    rows = [{"prompt": f"sum to {n}", "n": n} for n in numbers]
    return {
        "train_dataset": rows[:1600],
        "eval_dataset": rows[1600:],
        "formatters": [formatter_of(i) for i in range(num_agents)],
        "reward_func": reward_func,
        "external_transition": external_transition,
    }


# ----------------------------------------------------------------------------------- 8 command line

TINY_LM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests", "tiny_lm")
DEMO = {  # what suits tests/tiny_lm
    "agent_model": TINY_LM,
    "max_new_tokens": 3,
    "agent_learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "max_grad_norm": None,
    "discount": 0.5,  # each round pays for itself
    "rollout_buffer_size": 32,
    "num_train_epochs": 8,
    "eval_interval": 1600,
    "eval_num_samples": 128,
    "eval_batch_size": 128,
}
DEMO_Q = {
    "critic_learning_rate": 1e-5
}  # as Q(h, a) fits, r - Q shrinks to noise: let it learn slowly
TASK = (  # what a task file may define
    *("train_dataset", "eval_dataset", "formatters", "reward_func", "reward_processor"),
    *("external_transition", "metrics_callback", "num_agents", "num_turns"),
)


@pydantic.dataclasses.dataclass(config=STRICT)
class Args(Config):
    """Independent actor-critic. Without a model: the demo, two tiny models learn to sum to n."""

    agent_model: str | None = None  # model folder or hub name; every agent loads its own copy
    agents: list[str] | None = None  # instead: one for each agent
    critic_model: str | None = None  # the same for critics; by default the agents' own
    critics: list[str] | None = None  # instead: one for each critic
    task: str | None = None  # Python file with train_dataset, reward_func, ...; else the demo's
    chat_template_kwargs: str | None = None  # JSON, say '{"enable_thinking": false}'
    output_dir: str | None = None  # a new folder for the run; by default one in runs/
    resume: str | None = None  # the folder of a run to go on with, by its own settings
    track: bool = False  # log to Weights & Biases
    wandb_project: str = "multi-agent-actor-critic"  # its project
    wandb_entity: str | None = None  # its entity


@dataclass
class Deciding:
    """The flags that decide on the defaults of the others."""

    agent_model: str | None = None
    agents: list[str] | None = None
    critic_type: str = "v"
    task: str | None = None
    resume: str | None = None


def defaults(given: Deciding) -> Args:
    """The settings before any flag: those of the run to resume, of the demo, or of Config."""
    if given.resume:
        saved = read_settings(given.resume)
        return Args(**{f.name: saved[f.name] for f in fields(Args) if f.name in saved})
    demo = DEMO | (DEMO_Q if given.critic_type == "q" else {})
    args = Args() if given.agent_model or given.agents else Args(**demo)
    args.train_batch_size = None  # to be derived from the buffer size that the flags give
    return args


def load_task(path: str) -> dict[str, Any]:
    """What a task file defines of the trainer's arguments."""
    if not os.path.isfile(path):
        hint = "(resume a run in the folder where it began)"
        raise ValueError(f"task={path!r} is no file here {hint}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # a task may import its neighbours
    defined = runpy.run_path(path)
    task = {name: defined[name] for name in TASK if name in defined}
    say(f"{path} defines {', '.join(task) or 'nothing that is read'}.")
    return task


def main() -> None:
    """Train from the command line."""
    transformers.logging.disable_progress_bar()
    given, _ = tyro.cli(Deciding, return_unknown_args=True, add_help=False, console_outputs=False)
    default = defaults(given)
    path = given.task or default.task
    task = load_task(path) if path else {}
    for name in {"num_agents", "num_turns"} & task.keys():
        setattr(default, name, task.pop(name))
    args = tyro.cli(Args, default=default)
    if args.use_separate_critic and not (args.critic_model or args.critics):
        args.critic_model, args.critics = args.agent_model, args.agents
    if not path:
        task = number_task(args.num_agents, args.seed)
    model_config, wandb_config = {}, None
    if args.chat_template_kwargs:
        try:
            model_config["chat_template_kwargs"] = json.loads(args.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(
                f"chat_template_kwargs={args.chat_template_kwargs!r}: {error}"
            ) from None
    if args.track:
        wandb_config = {"project": args.wandb_project, "entity": args.wandb_entity}
    trainer = Trainer(
        agent_model=args.agent_model,
        agents=args.agents,
        critic_model=args.critic_model,
        critics=args.critics,
        args=args,
        model_config=model_config,
        wandb_config=wandb_config,
        output_dir=args.output_dir,
        **task,
    )
    try:
        trainer.train(args.resume)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, for SIGTERM too; the run has said how to go on


if __name__ == "__main__":
    main()
