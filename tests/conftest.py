"""Tiny models, a tokenizer and trainers that the tests make for themselves: nothing is downloaded.

G: GPT-2, 2 layers of width 32, learned positions (64 of them), tied embeddings.
L: Llama, 2 layers of width 32, rotary positions, untied embeddings.
T: byte-level BPE, about 300 tokens; a begin and an end token, no pad token, no chat template.
"""

import copy
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"  # for the commands too that tests start
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import PreTrainedTokenizerFast as FastTokenizer

import iac
import maac

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()

VARIANTS = ["iac-v-separate", "iac-q-separate", "iac-v-shared", "iac-q-shared", "maac-v", "maac-q"]
BEGIN, END = 0, 1  # ids of T
SENTENCES = [
    "Several language models answer a prompt together, and one reward scores the joint answer.",
    "Row 12: what does the other agent know, what did it say, and what will it say next?",
    "A critic reads the prompt and names a value; the actor reads the same and writes a few words.",
]


def load_once(auto_class):
    """Let a tiny model that is loaded again be a copy: tests load the same few a thousand times."""
    load, loaded = auto_class.from_pretrained, {}

    def from_pretrained(source, *args, **options):
        file = Path(str(source)) / "model.safetensors"
        known = {"dtype", "output_loading_info", "ignore_mismatched_sizes"}
        if args or options.keys() - known or not file.exists() or file.stat().st_size > 1e6:
            return load(source, *args, **options)
        key = (
            file,
            *(f.stat().st_mtime_ns for f in sorted(file.parent.iterdir())),
            *sorted(options.items()),
        )
        if key not in loaded:
            loaded[key] = load(source, **options)
        return copy.deepcopy(loaded[key])

    auto_class.from_pretrained = from_pretrained


load_once(AutoModel), load_once(AutoModelForCausalLM)


@pytest.fixture(params=VARIANTS)
def variant(request):
    """All six variants, for tests that do not name their own."""
    return request.param


@pytest.fixture(scope="session")
def tokenizer():
    """T."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"special_tokens": ["<begin>", "<end>"], "initial_alphabet": alphabet}
    bpe.train_from_iterator(SENTENCES * 3, trainers.BpeTrainer(vocab_size=300, **special))
    bpe.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    return FastTokenizer(tokenizer_object=bpe, bos_token="<begin>", eos_token="<end>")


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer):
    """Saved models by name, each with its tokenizer: "G", "L" and "tiny_lm"."""
    home = tmp_path_factory.mktemp("models")
    ids = {"vocab_size": 300, "bos_token_id": BEGIN, "eos_token_id": END, "initializer_range": 0.1}
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = {
            "G": GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, **ids)),
            "L": LlamaForCausalLM(LlamaConfig(max_position_embeddings=256, **small, **ids)),
        }
    for name, model in made.items():
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return {name: str(home / name) for name in made} | {"tiny_lm": str(ROOT / "tests" / "tiny_lm")}


@pytest.fixture
def gpt2(folders):
    """A G of the test's own."""
    return AutoModelForCausalLM.from_pretrained(folders["G"]).eval()


@pytest.fixture
def llama(folders):
    """An L of the test's own."""
    return AutoModelForCausalLM.from_pretrained(folders["L"]).eval()


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    """G, then L."""
    return request.getfixturevalue(request.param)


def reward_by_text(*completions):
    """A number for every joint answer, such that no two texts are worth the same."""
    joint_answers = zip(*completions, strict=True)
    return [sum(sum(text.encode()) * (i + 1) % 97 for i, text in enumerate(joint)) / 97 for joint in joint_answers]


def say_more(prompt, agent_completions, num_agents, **_):
    """The next turn's prompts show agent i what it said itself."""
    return [f"{prompt} {text[:8]} more {i}" for i, text in zip(range(num_agents), agent_completions, strict=True)]


@pytest.fixture(scope="session")
def make_trainer(folders):
    """make_trainer(variant, tmp_path, args={...}, model="L", **constructor_kwargs): two agents.

    The trainer's list `samples` fills with the samples of every item as it has been collected
    (those of evaluation too, if there is one).
    """

    def make(variant, tmp_path, args=None, model="L", **given):
        (name, critic_type, *kind), samples = variant.split("-"), []
        settings = {
            "critic_type": critic_type,
            "max_new_tokens": 4,
            "rollout_buffer_size": 4,
            "eval_interval": 0,
        }
        settings |= {"agent_learning_rate": 1e-3, "critic_learning_rate": 1e-2}
        settings |= {"use_separate_critic": False} if kind == ["shared"] else {}
        Config, Trainer = (iac.IACConfig, iac.IACTrainer) if name == "iac" else (maac.MAACConfig, maac.MAACTrainer)
        arguments = {
            "args": Config(**settings | (args or {})),
            "reward_func": reward_by_text,
            "external_transition": say_more,
            "train_dataset": [{"prompt": f"Row {n} " + "and so on " * (n % 3), "n": n} for n in range(10)],
            "metrics_callback": lambda episode: samples.extend(episode) or {},
            "output_dir": str(tmp_path / "run"),
        }
        if given.get("agents") is None:
            arguments["agent_model"] = folders[model]
        if kind != ["shared"] and not {"critic_model", "critics"} & given.keys():
            arguments["critic_model"] = folders[model]
        trainer = Trainer(**arguments | given)
        trainer.samples = samples
        return trainer

    return make


@pytest.fixture(scope="session")
def rig():
    """rig(trainer, answer): agent i's answer to prompt ids is answer(i, ids, k) from now on.

    k counts the earlier rows of the batch with the same prompt. Pads after an answer hold rubbish.
    """

    def replace(trainer, answer):
        def generate_for(i):
            def generate(input_ids, attention_mask, max_new_tokens, **_):
                prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
                answers = [answer(i, p, prompts[:row].count(p))[:max_new_tokens] for row, p in enumerate(prompts)]
                width = max(map(len, answers))
                return torch.cat([input_ids, torch.tensor([a + [77] * (width - len(a)) for a in answers])], 1)

            return generate

        for i, agent in enumerate(trainer.agents):
            agent.generate = generate_for(i)

    return replace


# -------------------------------------------- what a trainer's models and optimisers are seen to do


def watch(trainer):
    """A list that fills: ("pass", model, with gradient, sequences) and ("step", optimiser).

    An agent's pass is one of the whole language model, a critic's one of its backbone alone, so
    that they are told apart also where they share it.
    """
    events, inside = [], []

    def see(name, args, kwargs):
        if kwargs.get("attention_mask") is None:
            return  # a pass of the test's own, on one sequence without padding
        ids, mask = args[0] if args else kwargs["input_ids"], kwargs["attention_mask"].bool()
        sequences = [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]
        events.append(("pass", name, torch.is_grad_enabled(), sequences))

    def enter(name):
        return lambda _, args, kwargs: inside.append(see(name, args, kwargs))

    def read(name):
        return lambda _, args, kwargs: None if inside else see(name, args, kwargs)

    languages = {f"agent {i}": agent for i, agent in enumerate(trainer.agents)}
    languages |= {f"reference {i}": model for i, model in enumerate(trainer.references)}
    for name, model in languages.items():
        model.register_forward_pre_hook(enter(name), with_kwargs=True)
        model.register_forward_hook(lambda *_: inside.clear())
    for c, critic in enumerate(dict.fromkeys(trainer.critics)):
        critic.backbone.register_forward_pre_hook(read(f"critic {c}"), with_kwargs=True)
    for name, optimizer in optimizers(trainer).items():
        optimizer.register_step_pre_hook(lambda *_, name=name: events.append(("step", name)))
    return events


def optimizers(trainer):
    """Every optimiser once, by the name of what it trains."""
    named = {f"agent {i}": optimizer for i, optimizer in enumerate(trainer.agent_optimizers)}
    for c, optimizer in enumerate(dict.fromkeys(trainer.critic_optimizers)):
        if optimizer not in named.values():
            named[f"critic {c}"] = optimizer
    return named


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def flat(parts):
    """All weights of some modules, as a copy."""
    return torch.cat([p.detach().flatten() for part in parts for p in part.parameters()])


def stir(trainer):
    """Move agents and value heads off their first weights: KL and values are not 0 then."""
    generator = torch.Generator().manual_seed(5)
    heads = [critic.value_head for critic in dict.fromkeys(trainer.critics)]
    for parameter in [p for part in (*trainer.agents, *heads) for p in part.parameters()]:
        parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)


def answer(i, prompt, k):
    """One to four tokens by agent, prompt and generation; the shorter ones end by id 1."""
    seed = sum(prompt) + i + k
    tokens = [40 + (seed * (j + 3)) % 200 for j in range(1 + seed % 4)]
    return tokens if len(tokens) == 4 else [*tokens, 1]


def batches(trainer, events):
    """The samples of each mini-batch, read off the agents' passes between two of their steps."""
    by_ids = {(s.agent_idx, *s.prompt_ids, *s.completion_ids): s for s in trainer.samples}
    assert len(by_ids) == len(trainer.samples)
    found, waiting = [], []
    for kind, name, *details in events:
        if "agent" in name and kind == "pass" and details[0]:
            waiting += [by_ids[(int(name[-1]), *sequence)] for sequence in details[1]]
        elif "agent" in name and kind == "step":
            found, waiting = [*found, waiting], []
    return found
