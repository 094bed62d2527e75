"""Tiny models, tokenizers and trainers that the library tests build for themselves: no file, no network."""

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import common
import iac
import maac

MODULES = {"iac": iac, "iac_shared": iac, "maac": maac}
VARIANTS = list(MODULES)
TEXT = """Two or more models read a prompt each and answer it together, and one number tells how good the answers were.
Every model learns from that number alone: it cannot ask the others what they said, nor why they said it.
A critic guesses the number before it is known, so that only a surprise, good or bad, changes what the models do.
When all of them share a critic it reads everything; otherwise each has its own, which knows just one side.
Suppose somebody wants a summary of a long letter. The first model writes one sentence and the second a paragraph, and
what is wanted is that the paragraph holds more than the sentence, but not three times as much. Nobody says which of
them should give way. After some hundred rounds one of them has found a length that it keeps, whatever the letter is
about, while its partner has learned to follow; begin again with another seed and their parts may well be exchanged."""
ROWS = [{"prompt": f"name {n}", "n": n} for n in range(8)]
transformers.logging.disable_progress_bar()
_HOME = tempfile.TemporaryDirectory()  # of the saved models, removed when the tests end


@cache
def tokenizer(name: str):
    """T: 280 ids, begin and end first, a begin token before every text. U: 500 ids in another order, V: 280 in U's."""
    specials, size = {"T": (["<s>", "</s>"], 280)}.get(
        name, (["<extra>", "<end>", "<other>"], 500 if name == "U" else 280)
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    letters = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=letters),
    )
    begin = {"bos_token": "<s>"} if name == "T" else {}
    if begin:
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=specials[1], clean_up_tokenization_spaces=False, **begin
    )


def model(family: str, tok, seed: int = 0, positions: int = 256):
    """A G (GPT-2, learned positions, tied) or L (Llama, rotary, untied) with random weights for a tokenizer's ids."""
    ids = {
        "vocab_size": len(tok),
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "G":
            return GPT2LMHeadModel(
                GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=positions, **ids)
            ).eval()
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        return LlamaForCausalLM(
            LlamaConfig(max_position_embeddings=positions, **sizes, **ids)
        ).eval()


@cache
def folder(family: str, name: str, dtype: torch.dtype = torch.float32) -> str:
    """A saved model of that family with the tokenizer of that name."""
    path = f"{_HOME.name}/{family}{name}_{dtype}"
    model(family, tokenizer(name)).to(dtype).save_pretrained(path)
    tokenizer(name).save_pretrained(path)
    return path


def reward_length(*completions, **_):
    """Between 0 and 1 for every joint answer: longer is better, and no two are quite the same."""
    return [
        sum(len(text) + sum(map(ord, text)) % 7 for text in joint) / 100
        for joint in zip(*completions, strict=True)
    ]


def build(variant: str, output_dir, args: dict | None = None, **given):
    """A trainer of two G agents on 8 rows, 2 updates per epoch; `args` and `given` change what they name."""
    module = MODULES[variant]
    settings = dict(
        rollout_buffer_size=4, max_new_tokens=4, agent_learning_rate=1e-3, critic_learning_rate=1e-2
    )
    settings |= {"use_separate_critic": False} if variant == "iac_shared" else {}
    settings |= (
        {"agent_devices": ["cpu"]} if torch.cuda.is_available() else {}
    )  # unless the test names others
    defaults = dict(
        reward_func=reward_length, train_dataset=ROWS, output_dir=output_dir and str(output_dir)
    )
    if given.get("agents") is None:
        defaults["agent_model"] = folder("G", "T")
    if variant != "iac_shared" and not {"critic_model", "critics"} & given.keys():
        defaults["critic_model"] = folder("G", "T")
    config = module.MAACConfig if variant == "maac" else module.IACConfig
    trainer = module.MAACTrainer if variant == "maac" else module.IACTrainer
    return trainer(args=config(**settings | (args or {})), **defaults | given)


def metrics(trainer) -> list[dict]:
    """The rows of metrics.jsonl."""
    return [
        json.loads(line)
        for line in (Path(trainer.output_dir) / "metrics.jsonl").read_text().splitlines()
    ]


def weights(trainer) -> torch.Tensor:
    """All entries of the parameters of all agents and critics, as a copy."""
    return torch.cat(
        [p.detach().flatten() for m in [*trainer.agents, *trainer.critics] for p in m.parameters()]
    )


def collected(trainer) -> list:
    """The list that every sample of training (not of evaluation) is put in, in order of collection."""
    samples, collect = [], trainer.collect

    def spy(items, first_row, generators, G, train=True):
        episodes = collect(items, first_row, generators, G, train=train)
        samples.extend(s for episode in episodes if train for s in episode)
        return episodes

    trainer.collect = spy
    return samples


def rig(monkeypatch, trainer, text_of) -> None:
    """Replace generation: agent i's k-th answer of a batch is text_of(i, k), in its own tokens, and its end token."""

    def generate_all(agents, prompts, *_):
        return [
            [
                [*tok(text_of(i, k), add_special_tokens=False).input_ids, tok.eos_token_id]
                for k in range(len(own))
            ]
            for i, (tok, own) in enumerate(zip(trainer.tokenizers, prompts, strict=True))
        ]

    monkeypatch.setattr(common, "generate_all", generate_all)
