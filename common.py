"""What iac.py and maac.py share: loading, tokenization, generation and the scoring of tokens. No algorithm lives here.

Letters in shape comments: B samples, P prompt tokens, K completion tokens, L = P + K, V vocabulary entries, D hidden
width. Token ids travel as plain lists and are padded only where a model is called, prompts left and completions right:

    row 0   . . 4 5 6 | 7 8 2         prompt 4 5 6, completion 7 8 2 (2 stopped it)
    row 1   1 2 3 4 5 | 9 . .         prompt 1 2 3 4 5, completion 9 (the length limit stopped it)

so the first generated token of every row is in column P. Masks and positions come from these lengths, never from
comparing ids with a pad id: what the pads hold means nothing.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import cached_file

# ---------------------------------------------------------------------------------------------------------- loading


def iterate(dataset: Any, start: int = 0) -> Iterator[Any]:
    """The items of a dataset from row `start` on; one that has no length is read from its beginning, up to there."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return (dataset[row] for row in range(start, len(dataset)))
    return islice(iter(dataset), start, None)


def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; {} for built-in functions that do not tell theirs."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def resolve_sources(given: dict[str, Any], one: str, many: str, count: int) -> list[Any]:
    """`count` sources (folder, hub name or model): given[one] for all of them, or those of the list given[many]."""
    if (given[one] is None) == (given[many] is None):
        raise ValueError(f"give either {one} or {many}")
    if isinstance(given[one], nn.Module) and count > 1:
        raise ValueError(f"{one} is one model, {count} are needed: give a name, or {count} models as {many}")
    name, sources = (many, given[many]) if given[one] is None else (one, [given[one]] * count)
    if not isinstance(sources, list | tuple) or len(sources) != count:
        raise ValueError(f"{name} must be a list of {count}, got {sources!r:.200}")
    for index, source in enumerate(sources):
        if not isinstance(source, str) and not hasattr(source, "base_model"):
            raise ValueError(f"{name}[{index}] must be a folder, a hub name or a language model, got {source!r:.200}")
    return list(sources)


def resolve_tokenizers(tokenizer: Any, agent_model: Any, count: int, options: dict[str, Any]) -> list[Any]:
    """One tokenizer per agent: the one given for all, a list with one for each, or the one in agent_model's folder."""
    if tokenizer is None and isinstance(agent_model, str):
        tokenizer = AutoTokenizer.from_pretrained(agent_model, **options)
    tokenizers = list(tokenizer) if isinstance(tokenizer, list | tuple) else [tokenizer] * count
    if len(tokenizers) != count or not all(hasattr(x, "decode") for x in tokenizers):
        raise ValueError(f"tokenizer, unless agent_model is a name, must be one or {count}; got {tokenizer!r:.99}")
    return tokenizers


def place(parallel_training: str, groups: list[tuple[str, list[str] | None, int]]) -> list[list[torch.device]]:
    """For each group of models, given as (name, device names, count), `count` devices.

    "mp": those named for the group, else the first group's. "none": one for all: the one named, or cuda, or the cpu.
    """
    named = sorted({device for _, devices, _ in groups for device in devices or ()})
    if parallel_training == "none" and len(named) > 1:
        raise ValueError(f"agent_devices, ...: parallel_training='none' is for one device, got {named}")
    places: list[list[torch.device]] = []
    for name, devices, count in groups:
        if devices and len(devices) not in (1, count):
            raise ValueError(f"{name} has {len(devices)} entries, expected 1 or {count}")
        if parallel_training == "none":
            devices = named or ["cuda" if torch.cuda.is_available() else "cpu"]
        try:
            found = [torch.device(x) for x in devices or () if torch.empty(0, device=x) is not None] or places[0]
        except (RuntimeError, AssertionError) as error:  # torch.empty is there to fail if there is no such device
            raise ValueError(f"{name}={devices}: {error}") from error
        places.append(found if len(found) == count else found * count)
    return places


def load(kind: str, sources: list, devices: list, options: dict[str, Any]) -> list[nn.Module]:
    """The models on their devices, in eval mode; "critics" without their head. `options` go to from_pretrained.

    Parameters are float32, whatever type a checkpoint is stored in: AdamW steps of the size used in RL vanish in
    bfloat16 weights. Weights that a checkpoint lacks are an error, never silently random.
    """
    models, logger = [], logging.getLogger("transformers.modeling_utils")
    for index, (model, device) in enumerate(zip(sources, devices, strict=False)):  # sources may be []
        name, auto_class = f"{kind}[{index}]", AutoModel if kind == "critics" else AutoModelForCausalLM
        if isinstance(model, str):
            logger.disabled = True  # it would report that a critic has no use for lm_head
            try:
                loading = {"dtype": torch.float32, "output_loading_info": True} | options
                model, info = auto_class.from_pretrained(model, **loading)
            except (OSError, ValueError) as error:
                raise ValueError(f"{name}={model!r} could not be loaded: {error}") from error
            finally:
                logger.disabled = False
            if lacking := [*info["missing_keys"], *info["mismatched_keys"]]:
                raise ValueError(f"{name}={model.name_or_path!r} lacks weights: {lacking}")
        model = model.base_model if kind == "critics" else model
        if types := {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}:
            warnings.warn(f"{name} holds weights of type {types}: they are trained in float32", stacklevel=2)
        models.append(model.float().to(device).eval())
    return models


def refuse_shared_weights(**groups: list[nn.Module]) -> None:
    """ValueError if two of the models share a parameter: two optimisers would both step it."""
    owners: dict[int, str] = {}
    for name, parameter in [(f"{g}[{i}]", p) for g in groups for i, x in enumerate(groups[g]) for p in x.parameters()]:
        if owners.setdefault(id(parameter), name) != name:
            raise ValueError(f"{owners[id(parameter)]} and {name} are the same model: load it twice")


def find_file(source: Any, name: str) -> str | None:
    """The path of a file in a folder or hub name; None if it is not there, or if the source is a model in memory."""
    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(source, name, **lenient) if isinstance(source, str) else None


# ----------------------------------------------------------------------------------------------------- tokenization


def check_vocabulary(name: str, model: nn.Module, source: Any, tokenizer: Any) -> int:
    """The number of ids a model embeds; ValueError if too few for a tokenizer, or if it comes with another one."""
    rows, given = model.get_input_embeddings().weight.shape[0], tokenizer.name_or_path
    tokens = max(tokenizer.vocab_size, (tokenizer.eos_token_id or 0) + 1)  # `encode` looks for others that were added
    if tokens > rows:
        raise ValueError(f"{name} embeds {rows} tokens, the tokenizer {given!r} has {tokens}")
    source = source if isinstance(source, str) else getattr(model, "name_or_path", None) or None
    if find_file(source, "tokenizer_config.json") and source != given:  # critics' folders hold none, nor does memory
        own, others = AutoTokenizer.from_pretrained(source).get_vocab().items(), tokenizer.get_vocab().items()
        if not (own <= others or others <= own):  # tokens added to one of them do no harm
            raise ValueError(f"{name} comes with the tokenizer {source!r}, but is to read the ids of {given!r}")
    return rows


def encode(tokenizer: Any, texts: Sequence, where: list[str], embeddings: int, chat_template: bool = False) -> list:
    """Token ids of prompts; what the tokenizer puts before a text stands there once, even if a template wrote it too.

    An end token it appends is left out: the model is to go on from here. No ids, or one not embedded: ValueError.
    """
    if chat_template:
        chats, options = [[{"role": "user", "content": text}] for text in texts], {"add_generation_prompt": True}
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, **options) for chat in chats]
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    bare, whole = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    begin = next((whole[:k] for k in range(len(whole)) if whole[k : k + len(bare)] == bare), [])
    rows = [ids if ids[: len(begin)] == begin else begin + ids for ids in rows]
    for place, text, ids in zip(where, texts, rows, strict=True):
        if not ids or max(ids) >= embeddings:
            raise ValueError(f"{place}: {text!r:.200} has ids that the model does not embed, or none: {ids!r:.200}")
    return rows


def max_positions(model: nn.Module) -> int:
    """The number of positions a model was built for; if its config sets no limit, a number beyond any prompt's."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 10**9


def keep_end(ids: list[int], limit: int, tokenizer: Any) -> list[int]:
    """The last `limit` ids, a begin token at the front being kept; warns when it cuts."""
    if len(ids) <= limit:
        return ids
    warnings.warn("a text is longer than its model has positions for: its end is kept", stacklevel=2)
    return [ids[0], *ids[1 - limit :]] if ids[0] == tokenizer.bos_token_id and limit > 1 else ids[-limit:]


def stop_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    """Every token that ends a completion: those of the model's generation config and the tokenizer's end token."""
    ids = model.generation_config.eos_token_id
    return {t for t in [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id] if t is not None}


def pad(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], device: torch.device) -> dict:
    """Model inputs [B, L] in the layout of the module docstring: input_ids, attention_mask, position_ids."""
    P, K = max(map(len, prompts)), max(map(len, completions))
    rows = list(zip(prompts, completions, strict=True))
    ids = [[0] * (P - len(p)) + [*p, *c] + [0] * (K - len(c)) for p, c in rows]
    mask = [[0] * (P - len(p)) + [1] * (len(p) + len(c)) + [0] * (K - len(c)) for p, c in rows]
    ids, mask = torch.tensor([ids, mask], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # 0 for the first real token, however many pads stand before it
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


# ------------------------------------------------------------------------------------------- generation and scoring


@torch.no_grad()
def generate(model: nn.Module, prompts: list, stops: set[int], generator: torch.Generator, sampling: tuple) -> list:
    """Sample a completion of every prompt in one batch: its ids, up to and including the first stop id.

    `sampling` is (max_new_tokens, temperature, top_p, top_k, dtype). Nothing else shapes the distribution: defaults
    that come with a checkpoint (top-k 50, a repetition penalty, ...) are set aside, as scoring knows none of them.
    """
    max_new_tokens, temperature, top_p, top_k, dtype = sampling
    inputs = pad(prompts, [()] * len(prompts), model.device)
    inputs.pop("position_ids")  # `model.generate` makes them itself, from the mask
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1.0 else [])
    warpers += [TopKLogitsWarper(top_k)] if top_k is not None else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    # Sampling with a generator of our own, by the Gumbel trick: argmax(logits - log e), e ~ Exp(1), is a draw from
    # softmax(logits). The global random state is left alone; agents that generate at once do not disturb each other.
    warpers += [lambda _, z: z - torch.empty_like(z).exponential_(generator=generator).clamp_(1e-30).log_()]
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    shipped, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            ids = model.generate(**inputs, **settings, eos_token_id=sorted(stops) or None, logits_processor=warpers)
    finally:
        model.generation_config = shipped
    rows = ids[:, inputs["input_ids"].shape[1] :].tolist()  # [B, K], padded after the stop id
    ends = [next((k + 1 for k, token in enumerate(row) if token in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def generate_all(models: list, prompts: list, stops: list, generators: list, devices: list, sampling: tuple) -> list:
    """`generate` for all agents, at the same time unless they share one device: completions [N][B]."""
    work = [(*each, sampling) for each in zip(models, prompts, stops, generators, strict=True)]
    if len(set(devices)) == 1:
        return [generate(*each) for each in work]
    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(lambda each: generate(*each), work))


def call_model(model: nn.Module, dtype: str, **inputs: Any) -> Any:
    """Run a model on those of the inputs that its forward takes (some know no position_ids or logits_to_keep)."""
    known = parameters(model.forward)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(use_cache=False, **{name: value for name, value in inputs.items() if takes_all or name in known})


def last_hidden(backbone: nn.Module, sequences: list[list[int]], dtype: str) -> Tensor:
    """Hidden states [B, D] at the last token of each sequence; equal sequences go through the model once."""
    first: dict[tuple[int, ...], int] = {}
    index = [first.setdefault(tuple(sequence), len(first)) for sequence in sequences]  # [a, b, a] -> [0, 1, 0]
    output = call_model(backbone, dtype, **pad(list(first), [()] * len(first), backbone.device))
    return output.last_hidden_state[:, -1][index]


class Scores(NamedTuple):
    """What one forward pass tells about B completions."""

    logprobs: Tensor  # [B, K] log softmax(z_k / temperature)[a_k] of generated tokens, 0 beyond the end
    mask: Tensor  # [B, K] True on generated tokens, the stop token among them
    hidden: Tensor | None  # [B, K + 1, D] last hidden states of the last prompt token and the generated ones, if wanted


def score(
    model: nn.Module, prompts: list, completions: list, temperature: float, dtype: str, return_hidden: bool = False
) -> Scores:
    """Score every generated token under the full softmax (top_p and top_k are ignored); no logits for prompts."""
    inputs, K = pad(prompts, completions, model.device), max(map(len, completions))
    output = call_model(model, dtype, **inputs, logits_to_keep=K + 1, output_hidden_states=return_hidden)
    logits = output.logits[:, -(K + 1) : -1].float()  # [B, K, V]: column k predicts generated token k
    logits = logits if temperature == 1.0 else logits / temperature  # / 1.0 would copy [B, K, V]
    mask = inputs["attention_mask"][:, -K:].bool()
    chosen = logits.gather(-1, inputs["input_ids"][:, -K:, None]).squeeze(-1)
    logprobs = (chosen - logits.logsumexp(-1)).masked_fill(~mask, 0.0)
    return Scores(logprobs, mask, output.hidden_states[-1][:, -(K + 1) :] if return_hidden else None)
