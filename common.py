"""What iac.py and maac.py share: loading, tokenization, generation and the scoring of tokens.

No algorithm lives here. Letters in shape comments: N agents, B samples, P prompt tokens, K
completion tokens, L = P + K, V vocabulary entries, D hidden width. Token ids travel as plain lists
and are padded only where a model is called, prompts left and completions right:

    row 0   . . 4 5 6 | 7 8 2         prompt 4 5 6, completion 7 8 2 (2 stopped it)
    row 1   1 2 3 4 5 | 9 . .         prompt 1 2 3 4 5, completion 9 (the length limit stopped it)

so the first generated token of every row is in column P. Masks and positions come from these
lengths, never from comparing ids with a pad id: what the pads hold means nothing.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import cached_file

# ---------------------------------------------------------------------------------- data, functions


def iterate(dataset: Any, start: int = 0) -> Iterator[Any]:
    """The items of a dataset from row `start` on; one without a length is read up to there."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return (dataset[row] for row in range(start, len(dataset)))
    return islice(iter(dataset), start, None)


def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; {} for built-in functions that do not tell theirs."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


# ------------------------------------------------------------------------------------------ loading


LOADING = ("model_kwargs", "critic_model_kwargs", "tokenizer_kwargs", "chat_template_kwargs")
FOR_ALL = ("dtype", "torch_dtype", "attn_implementation")
WIDTHS = ("critic_value_head_hidden_dim", "value_head_hidden_dim")


def read_model_config(model_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that a user may set about loading, with what is left out; ValueError otherwise.

    model_kwargs and critic_model_kwargs go to from_pretrained of agents and critics, and so do
    dtype and attn_implementation beside them; tokenizer_kwargs to that of tokenizers, which
    special_tokens are added to; chat_template_kwargs to every rendering. The rest are widths of
    value heads.
    """
    given = {} if model_config is None else model_config
    known = (*LOADING, *FOR_ALL, *WIDTHS, "special_tokens")
    if not isinstance(given, Mapping) or set(given) - set(known):
        raise ValueError(f"model_config must be a dict with keys among {known}, got {given!r:.300}")
    options: dict[str, Any] = {}
    for name in (*LOADING, "special_tokens"):
        options[name] = dict(given.get(name) or {})
    for name in FOR_ALL:
        if given.get(name) is not None:
            for kwargs in (options["model_kwargs"], options["critic_model_kwargs"]):
                kwargs.setdefault(name, given[name])
    for name in WIDTHS:
        options[name] = width = given.get(name)
        if width is not None and (type(width) is not int or width < 1):
            raise ValueError(f"model_config: {name}={width!r} must be a width or None")
    return options


def resolve_sources(given: dict[str, Any], count: int, setting: str) -> list:
    """`count` model sources (folder, hub name or model), of `given`: one for all, or a list.

    Both may be given if they agree. ValueError names what does not fit, and the setting that would.
    """
    (one, single), (many, several) = given.items()
    if single is None and several is None:
        raise ValueError(f"give {one} or {many}")
    if several is None:
        if isinstance(single, nn.Module) and count > 1:
            raise ValueError(f"{one} is one model, but {count} are needed: give a list as {many}")
        several = [single] * count
    if not isinstance(several, list | tuple):
        raise ValueError(f"{many} must be a list, got {several!r:.200}")
    if single is not None and any(source != single for source in several):
        raise ValueError(
            f"{one}={single!r:.200} and {many}={several!r:.200} disagree: give one of them"
        )
    if len(several) != count:
        raise ValueError(f"{many} lists {len(several)} models, {count} are needed ({setting})")
    for index, source in enumerate(several):
        if not isinstance(source, str) and not hasattr(source, "base_model"):
            wanted = "a folder, a hub name or a language model"
            raise ValueError(f"{many}[{index}] must be {wanted}, got {source!r:.200}")
    return list(several)


def resolve_tokenizers(tokenizer: Any, sources: list, options: dict[str, Any]) -> list:
    """One tokenizer per agent: one for all, a list of them, or each from its agent's folder."""
    if tokenizer is None:
        if not all(isinstance(source, str) for source in sources):
            raise ValueError("tokenizer is required with a model that is in memory")
        kwargs = options["tokenizer_kwargs"]
        tokenizer = [AutoTokenizer.from_pretrained(source, **kwargs) for source in sources]
    tokenizers = list(tokenizer) if isinstance(tokenizer, list | tuple) else [tokenizer]
    if len(tokenizers) == 1:
        tokenizers *= len(sources)
    if len(tokenizers) != len(sources):
        raise ValueError(f"tokenizer lists {len(tokenizers)}, but num_agents={len(sources)}")
    if not all(hasattr(tok, "decode") for tok in tokenizers):
        raise ValueError(f"tokenizer must be a tokenizer or a list of them, got {tokenizer!r:.200}")
    if options["special_tokens"]:
        for tok in tokenizers:
            tok.add_special_tokens(options["special_tokens"])
    return tokenizers


def find_devices(name: str, devices: list[str] | None, count: int) -> list[torch.device]:
    """`count` devices: those named, one for all or one each; by default cuda, else the cpu."""
    if devices and len(devices) not in (1, count):
        raise ValueError(f"{name}={devices} has {len(devices)} entries, expected 1 or {count}")
    devices = devices or ["cuda" if torch.cuda.is_available() else "cpu"]
    try:
        found = [torch.empty(0, device=device).device for device in devices]
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{name}={devices}: {error}") from error
    return found if len(found) == count else found * count


def load(kind: str, sources: list, devices: list, options: dict[str, Any]) -> list[nn.Module]:
    """The models on their devices, in eval mode; critics without their language-model head.

    `options` go to from_pretrained. Parameters are float32, whatever type they are stored in: AdamW
    steps of the size used in RL vanish in bfloat16 weights.
    """
    models = []
    for index, (source, device) in enumerate(zip(sources, devices, strict=True)):
        name = f"{kind}[{index}]"
        model = source
        if isinstance(source, str):
            auto_class = AutoModel if kind == "critics" else AutoModelForCausalLM
            model = load_pretrained(name, source, auto_class, options)
        if kind == "critics":
            model = model.base_model
        types = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if types - {torch.float32}:
            warnings.warn(
                f"{name} holds weights of {types}: they are trained in float32", stacklevel=2
            )
        models.append(model.float().to(device).eval())
    return models


def load_pretrained(name: str, source: str, auto_class: Any, options: dict[str, Any]) -> nn.Module:
    """A model from a folder or the hub; ValueError if weights are missing there."""
    logger = logging.getLogger("transformers.modeling_utils")
    options = {"dtype": torch.float32, "output_loading_info": True} | options
    logger.disabled = True  # it would report that a critic has no use for lm_head
    try:
        model, info = auto_class.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}={source!r} could not be loaded: {error}") from error
    finally:
        logger.disabled = False
    if lacking := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise ValueError(f"{name}={source!r} lacks weights: {lacking}")
    return model


def refuse_shared_weights(**groups: list[nn.Module]) -> None:
    """ValueError if two of the models share a parameter: two optimisers would both step it."""
    owners: dict[int, str] = {}
    for group, models in groups.items():
        for index, model in enumerate(models):
            name = f"{group}[{index}]"
            for parameter in model.parameters():
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise ValueError(f"{owner} and {name} are the same model: load it twice")


def find_file(source: Any, name: str) -> str | None:
    """The path of a file in a folder or hub name; None if it is not there."""
    if not isinstance(source, str):
        return None
    return cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


# ------------------------------------------------------------------------------------- tokenization


def vocabulary(model: nn.Module) -> int:
    """The number of ids a model embeds."""
    return model.get_input_embeddings().weight.shape[0]


def check_vocabulary(name: str, model: nn.Module, source: Any, tokenizer: Any) -> None:
    """ValueError if a model embeds too few ids for a tokenizer, or comes with another one."""
    rows = vocabulary(model)
    given = tokenizer.name_or_path
    # Tokens that were added without an embedding do no harm until a text holds one: `encode` looks.
    tokens = max(tokenizer.vocab_size, (tokenizer.eos_token_id or 0) + 1)
    if tokens > rows:
        raise ValueError(f"{name} embeds {rows} tokens, the tokenizer {given!r} has {tokens}")
    home = source if isinstance(source, str) else getattr(model, "name_or_path", None) or None
    if home != given and find_file(home, "tokenizer_config.json"):
        own = AutoTokenizer.from_pretrained(home).get_vocab().items()
        others = tokenizer.get_vocab().items()
        if not (own <= others or others <= own):
            raise ValueError(
                f"{name} comes with the tokenizer {home!r}, but is to read ids of {given!r}"
            )


def render(tokenizer: Any, chat: str | list[dict], options: dict[str, Any]) -> str:
    """A chat, a list of {role, content}, as the text that a model goes on from; a text as it is."""
    if isinstance(chat, str):
        return chat
    return tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, **options
    )


def encode(tokenizer: Any, texts: list[str], places: list[str], known: int) -> list[list[int]]:
    """Token ids of prompts. What the tokenizer puts before a text stands there once, even if a chat
    template wrote it too; an end token it appends is left out: the model is to go on from here.

    ValueError, naming the place, where there are no ids or one that is not below `known`.
    """  # noqa: D205
    rows = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    begin = begin_ids(tokenizer)
    rows = [ids if ids[: len(begin)] == begin else begin + ids for ids in rows]
    for place, text, ids in zip(places, texts, rows, strict=True):
        if not ids or max(ids) >= known:
            problem = "has no ids" if not ids else "has ids that the model does not embed"
            raise ValueError(f"{place}: {text!r:.200} {problem}: {ids!r:.200}")
    return rows


def begin_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for k in range(len(whole)):
        if whole[k : k + len(bare)] == bare:
            return whole[:k]
    return []


def max_positions(model: nn.Module) -> int:
    """The number of positions a model was built for; a huge one if its config sets no limit."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len"):
        if getattr(config, name, None):
            return getattr(config, name)
    return 10**9


def keep_end(ids: list[int], limit: int, tokenizer: Any) -> list[int]:
    """The last `limit` ids, a begin token at the front being kept; warns when it cuts."""
    if len(ids) <= limit:
        return ids
    warnings.warn(
        "a text is longer than its model has positions for: its end is kept", stacklevel=2
    )
    if ids[0] == tokenizer.bos_token_id and limit > 1:
        return [ids[0], *ids[1 - limit :]]
    return ids[-limit:]


def stop_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    """Every token that ends a completion: the generation config's and the tokenizer's end token."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


def pad(prompts: list, completions: list, device: torch.device) -> dict[str, Tensor]:
    """Model inputs [B, L], laid out as above: input_ids, attention_mask, position_ids."""
    P, K = max(map(len, prompts)), max(map(len, completions))
    ids, mask = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = P - len(prompt), K - len(completion)
        ids.append([0] * left + prompt + completion + [0] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    ids, mask = torch.tensor([ids, mask], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(
        min=0
    )  # 0 for the first real token, whatever the padding
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


# --------------------------------------------------------------------------- generation and scoring


class Sampling(NamedTuple):
    """How completions are drawn."""

    max_new_tokens: int
    temperature: float
    top_p: float  # 1 = off
    top_k: int | None
    dtype: str  # of the arithmetic: "float32" or "bfloat16"


def autocast(model: nn.Module, dtype: str) -> torch.autocast:
    """Arithmetic in bfloat16 around float32 weights, if that is the dtype."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16")


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[list[int]],
    stops: set[int],
    generator: torch.Generator,
    sampling: Sampling,
) -> list[list[int]]:
    """Sample a completion of every prompt: its ids, up to and including the first stop id.

    Nothing but `sampling` shapes the distribution: defaults that come with a checkpoint (top-k 50,
    a repetition penalty, ...) are set aside, as scoring knows none of them.
    """
    warpers = LogitsProcessorList()
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def add_gumbel_noise(_: Tensor, logits: Tensor) -> Tensor:
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return logits - noise.clamp_(1e-30).log_()

    # argmax(logits - log e), e ~ Exp(1), is a draw from softmax(logits). With a generator of our
    # own the global one is left alone, and agents that generate at once do not disturb each other.
    warpers.append(add_gumbel_noise)
    inputs = pad(prompts, [[]] * len(prompts), model.device)
    inputs.pop("position_ids")  # `model.generate` makes them itself, from the mask
    shipped, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with autocast(model, sampling.dtype):
            ids = model.generate(
                **inputs,
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,  # the noise is the sampling
                pad_token_id=0,
                eos_token_id=sorted(stops) or None,
                logits_processor=warpers,
            )
    finally:
        model.generation_config = shipped
    P = inputs["input_ids"].shape[1]
    return [cut_after_stop(row, stops) for row in ids[:, P:].tolist()]


def cut_after_stop(row: list[int], stops: set[int]) -> list[int]:
    """A generated row up to and including its first stop id; what follows is padding."""
    for k, token in enumerate(row):
        if token in stops:
            return row[: k + 1]
    return row


def generate_all(
    models: list[nn.Module],
    prompts: list[list[list[int]]],
    stops: list[set[int]],
    generators: list[torch.Generator],
    sampling: Sampling,
) -> list[list[list[int]]]:
    """`generate` for all agents, side by side if on different devices: completions [N][B]."""
    jobs = list(zip(models, prompts, stops, generators, strict=True))
    workers = len(models) if len({model.device for model in models}) > 1 else 1
    if workers == 1:
        return [generate(*job, sampling) for job in jobs]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda job: generate(*job, sampling), jobs))


def call_model(model: nn.Module, dtype: str, **inputs: Any) -> Any:
    """Run a model on those inputs that its forward takes (some know no position_ids, ...)."""
    known = parameters(model.forward)
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        inputs = {name: value for name, value in inputs.items() if name in known}
    with autocast(model, dtype):
        return model(use_cache=False, **inputs)


def last_hidden(backbone: nn.Module, sequences: list[list[int]], dtype: str) -> Tensor:
    """Hidden states [B, D] at the last token of each sequence; equal sequences are read once."""
    first: dict[tuple[int, ...], int] = {}
    index = [
        first.setdefault(tuple(sequence), len(first)) for sequence in sequences
    ]  # a b a -> 0 1 0
    distinct = [list(sequence) for sequence in first]
    inputs = pad(distinct, [[]] * len(distinct), backbone.device)
    return call_model(backbone, dtype, **inputs).last_hidden_state[:, -1][index]


def completion_logits(
    model: nn.Module,
    prompts: list[list[int]],
    completions: list[list[int]],
    temperature: float,
    dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits / temperature [B, K, V] of the generated tokens, their ids [B, K] and mask [B, K]."""
    inputs = pad(prompts, completions, model.device)
    K = max(map(len, completions))
    logits = call_model(model, dtype, **inputs, logits_to_keep=K + 1).logits
    logits = logits[:, -(K + 1) : -1].float()  # column k predicts generated token k
    if temperature != 1.0:
        logits = logits / temperature
    return logits, inputs["input_ids"][:, -K:], inputs["attention_mask"][:, -K:].bool()


def score(
    model: nn.Module,
    prompts: list[list[int]],
    completions: list[list[int]],
    temperature: float,
    dtype: str,
) -> Tensor:
    """Log softmax(logits / temperature) of the generated tokens, [B, K], 0 at padding.

    Under the full softmax: top_p and top_k are ignored.
    """
    logits, ids, mask = completion_logits(model, prompts, completions, temperature, dtype)
    chosen = logits.gather(-1, ids[..., None]).squeeze(-1)
    return (chosen - logits.logsumexp(-1)).masked_fill(~mask, 0.0)
