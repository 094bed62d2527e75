"""What iac.py and maac.py share: processes, loading, tokenization, generation and scoring.

No algorithm lives here. Letters in shape comments: N agents, B samples, P prompt tokens, K
completion tokens, L = P + K, V vocabulary entries, D hidden width. Token ids travel as plain lists
and are padded only where a model is called, prompts left and completions right:

    row 0   . . 4 5 6 | 7 8 2         prompt 4 5 6, completion 7 8 2 (2 stopped it)
    row 1   1 2 3 4 5 | 9 . .         prompt 1 2 3 4 5, completion 9 (the length limit stopped it)

so the first generated token of every row is in column P. Masks and positions come from these
lengths, never from comparing ids with a pad id: what the pads hold means nothing.
"""

import copy
import inspect
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file

# ---------------------------------------------------------------------------------------- processes


def start_processes() -> None:
    """Join the other processes, if torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or distributed.is_initialized():
        return
    backend = "gloo"  # numbers and samples travel between CPUs, ...
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"  # ... gradients where they are
    # Whoever waits for another's slow functions must not give up; of one that died it hears.
    distributed.init_process_group(backend, timeout=timedelta(hours=3))


def rank() -> int:
    """The number of this process; 0 writes and shows for all."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def own_share(sequence: Any) -> Any:
    """The part of a list or tensor for this process: of 0 1 2 3 4, with two, 0 2 4 or 1 3."""
    return sequence[rank() :: world_size()]


def gather(x: Any) -> list:
    """Every process's x, in the order of their numbers. All have to call it."""
    if world_size() == 1:
        return [x]
    gathered = [None] * world_size()
    distributed.all_gather_object(gathered, x)
    return gathered


def take_weights_of_first(models: list[nn.Module]) -> None:
    """Let all processes start from the weights in process 0: random ones differ."""
    if world_size() == 1:
        return
    for parameter in dict.fromkeys(p for model in models for p in model.parameters()):
        weights = parameter.data.contiguous()
        distributed.broadcast(weights, src=0)
        parameter.data.copy_(weights)


PIECE = 2**26  # gradients that travel at once, 256 MB


def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Add up the gradients of all processes; one that had nothing to do adds zeros."""
    if world_size() == 1:
        return
    pieces, count = defaultdict(list), 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        pieces[gradient.device, gradient.dtype, count // PIECE].append(gradient)
        count += gradient.numel()
    for gradients in pieces.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        sums = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))


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
        options[name] = given.get(name) or {}
        if not isinstance(options[name], Mapping):
            raise ValueError(f"model_config: {name}={options[name]!r:.200} must be a dict")
        options[name] = dict(options[name])
    for kwargs in (options["model_kwargs"], options["critic_model_kwargs"]):
        for name in FOR_ALL:
            if given.get(name) is not None:
                kwargs.setdefault(name, given[name])
        if "torch_dtype" in kwargs:  # its old name
            kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
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
    """`count` devices: those named, one for all or one each; by default cuda, else the cpu.

    "cuda" without a number is a process's own GPU.
    """
    if devices and len(devices) not in (1, count):
        raise ValueError(f"{name}={devices} has {len(devices)} entries, expected 1 or {count}")
    devices = devices or ["cuda" if torch.cuda.is_available() else "cpu"]
    try:
        found = [torch.empty(0, device=device).device for device in devices]
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{name}={devices}: {error}") from error
    return found if len(found) == count else found * count


class Loader:
    """Loads a trainer's models: "agents", "references" and "critics".

    Without adapters each is a model of its own that trains as a whole. With them (new ones of rank
    `lora_rank`, or those that a folder holds) each base is loaded once per device, frozen, in
    `dtype`; a model is a copy of its structure that shares its tensors and has its own adapters. A
    reference that needs none costs nothing.
    """

    def __init__(
        self,
        options: dict[str, Any],  # see read_model_config
        dtype: str,
        lora_rank: int | None,
        gradient_checkpointing: bool,
        seed_for: Callable[..., int],
    ) -> None:
        self.options, self.seed_for = options, seed_for
        self.dtype, self.lora_rank = getattr(torch, dtype), lora_rank
        self.gradient_checkpointing = gradient_checkpointing
        self.bases: dict[tuple, nn.Module] = {}
        if lora_rank:
            import_peft(f"lora_rank={lora_rank}")

    def load(self, kind: str, sources: list, devices: list) -> list[nn.Module]:
        """The models on their devices, in eval mode; critics without their language-model head."""
        models = []
        for index, (source, device) in enumerate(zip(sources, devices, strict=True)):
            name = f"{kind}[{index}]"
            if find_file(source, "adapter_config.json"):
                model = self.load_adapters(kind, name, source, device)
            elif self.lora_rank and not has_adapters(source):
                model = self.share_base(kind, name, source, device)
                if kind != "references":
                    model = self.add_adapters(kind, name, source, model)
            elif isinstance(source, str):
                options = {"dtype": torch.float32} | self.kwargs(kind)
                model = load_pretrained(name, source, kind != "critics", options)
            else:
                model = share(source, device) if kind == "references" else source
            models.append(self.prepare(kind, name, model, device))
        return models

    def kwargs(self, kind: str) -> dict[str, Any]:
        """What the user wants from_pretrained to be given."""
        return self.options["critic_model_kwargs" if kind == "critics" else "model_kwargs"]

    def share_base(
        self, kind: str, name: str, source: Any, device: torch.device, with_head: bool = False
    ) -> nn.Module:
        """A copy of a frozen base that shares its tensors; critics', by default, have no head."""
        options = {"dtype": self.dtype} | self.kwargs(kind)
        whole, headless = [(causal, source, device, str(options)) for causal in (True, False)]
        with_head = with_head or kind != "critics"
        key = whole if with_head or whole in self.bases else headless
        if key not in self.bases:
            base = getattr(source, "_orig_mod", source)
            if isinstance(source, str):
                base = load_pretrained(name, source, key is whole, options)
            elif base.device != device:
                base = copy.deepcopy(base)
            self.bases[key] = place(base.requires_grad_(False), device)
        base = self.bases[key]
        return share(base if with_head else body(base), device)

    def add_adapters(self, kind: str, name: str, source: Any, base: nn.Module) -> nn.Module:
        """A base with new LoRA adapters, which change nothing at first."""
        peft = import_peft(name)
        config = peft.LoraConfig(
            r=self.lora_rank,
            lora_alpha=2 * self.lora_rank,
            target_modules="all-linear",
            task_type=HEADLESS if kind == "critics" else "CAUSAL_LM",
        )
        with own_randomness(self.seed_for("adapters", name)):
            model = peft.get_peft_model(base, config)
        if isinstance(source, str):  # where whoever loads the adapters is to find the base
            home = os.path.abspath(source) if os.path.isdir(source) else source
            model.peft_config["default"].base_model_name_or_path = home
        return model

    def load_adapters(self, kind: str, name: str, source: str, device: torch.device) -> nn.Module:
        """A base with the adapters of a folder, to train on."""
        peft = import_peft(f"{name}={source!r}")
        config = peft.PeftConfig.from_pretrained(source)
        refuse_adapters(name, [config])
        if not config.base_model_name_or_path:
            raise ValueError(f"{name}={source!r} does not tell which model its adapters are for")
        with_head = kind != "critics" or config.task_type != HEADLESS
        base = self.share_base(kind, name, config.base_model_name_or_path, device, with_head)
        with own_randomness(0):
            warnings.filterwarnings("error", "Found missing adapter keys")
            try:
                return peft.PeftModel.from_pretrained(
                    base, source, is_trainable=kind != "references"
                )
            except UserWarning as error:
                raise ValueError(f"{name}={source!r} does not fit its base: {error}") from error

    def prepare(self, kind: str, name: str, model: nn.Module, device: torch.device) -> nn.Module:
        """The model on its device, in eval mode, what trains in float32; ValueError if it is unfit.

        AdamW steps of the size used in RL vanish in bfloat16 weights; frozen ones keep their type.
        """
        inner = unwrap(model)
        refuse_adapters(name, getattr(model, "peft_config", {}).values())
        if kind != "critics" and not hasattr(inner, "generate"):
            raise ValueError(f"{name} is a {type(inner).__name__}, which does not generate text")
        if kind == "critics" and not has_adapters(model):  # with them, the whole is to be saved
            model = body(model)
        trained = trainable(model).values()
        if not trained and kind != "references":
            hint = "load its adapters with is_trainable=True, or unfreeze a part of it"
            raise ValueError(f"{name} has no trainable parameter: {hint}")
        if types := {p.dtype for p in trained} - {torch.float32}:
            warnings.warn(
                f"{name} holds weights of {types}: they are trained in float32", stacklevel=4
            )
        if len(trained) == len(list(model.parameters())):
            model.float()  # buffers too
        for parameter in trained:
            parameter.data = parameter.data.float()
        if kind == "references":
            model.requires_grad_(False)
        elif self.gradient_checkpointing or is_recomputed(model):
            recompute_layers(name, model)
        return place(model, device).eval()


def load_pretrained(name: str, source: str, with_head: bool, options: dict[str, Any]) -> nn.Module:
    """A model from a folder or the hub; ValueError if weights are missing there."""
    auto_class = AutoModelForCausalLM if with_head else AutoModel
    logger = logging.getLogger("transformers.modeling_utils")
    logger.disabled = True  # it would report that a critic has no use for lm_head
    # With weights of another shape it would end without a word on which: they are told below.
    loading = {"output_loading_info": True, "ignore_mismatched_sizes": True} | options
    try:
        model, info = auto_class.from_pretrained(source, **loading)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}={source!r} could not be loaded: {error}") from error
    finally:
        logger.disabled = False
    if lacking := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise ValueError(f"{name}={source!r} lacks weights: {lacking}")
    return model


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device; a quantised one that is there already is left alone: few can move."""
    is_there = getattr(model, "is_quantized", False) and model.device == device
    return model if is_there else model.to(device)


def share(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model, which shares those frozen tensors that are on the device already."""
    tensors = [x for x in (*model.parameters(), *model.buffers()) if not x.requires_grad]
    return copy.deepcopy(model, {id(x): x for x in tensors if x.device == device})


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def unwrap(model: nn.Module) -> nn.Module:
    """The language model within torch.compile's and PEFT's wrappers; adapters stay in it."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body(model: nn.Module) -> nn.Module:
    """A language model without wrappers and without its head."""
    return unwrap(model).base_model


# ----------------------------------------------------------------------- adapters and recomputation

HEADLESS = "FEATURE_EXTRACTION"  # PEFT's name for adapters of a model without head


def import_peft(needed_for: str) -> Any:
    """The package peft, which nothing but adapters needs."""
    try:
        import peft
    except ImportError as error:
        install = "pip install 'peft>=0.19,<1'"
        raise ValueError(f"{needed_for} needs the package peft: {install}") from error
    return peft


def has_adapters(source: Any) -> bool:
    """Whether a source is a model in memory that PEFT has put adapters into."""
    return hasattr(source, "peft_config")


def refuse_adapters(name: str, configs: Iterable) -> None:
    """ValueError for PEFT's kinds that do not stay in a model when its wrapper is taken off."""
    for config in configs:
        kind = getattr(config.peft_type, "value", config.peft_type)
        if config.is_prompt_learning or kind in ("POLY", "XLORA"):
            raise ValueError(f"{name} has adapters of the kind {kind}: use LoRA or the like")


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Draw from a random state of one's own, the global one being the user's, without warnings."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.default_generator.manual_seed(seed)
        warnings.simplefilter("ignore")  # PEFT tells how it reads a model's layers
        yield


def is_recomputed(model: nn.Module) -> bool:
    """Whether transformers' gradient checkpointing was switched on in a model."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def recompute_layers(name: str, model: nn.Module) -> None:
    """Let each layer run again in the backward pass rather than keep all that it computes.

    Transformers' own switch works in training mode only, in which dropout wakes up.
    """
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    if not layers:
        kind = type(unwrap(model)).__name__
        raise ValueError(f"gradient_checkpointing: {name}, a {kind}, has no layers that can do it")
    for layer in layers:
        if getattr(layer.forward, "func", None) is not recompute:  # not yet
            layer.forward = partial(recompute, layer.forward)


def recompute(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's forward such that the backward pass calls it again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def refuse_shared_weights(**groups: list[nn.Module]) -> None:
    """ValueError if two of the models share what trains: two optimisers would both step it."""
    owners: dict[int, str] = {}
    for group, models in groups.items():
        for index, model in enumerate(models):
            name = f"{group}[{index}]"
            for parameter in trainable(model).values():
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise ValueError(f"{owner} and {name} are the same model: load it twice")


def find_file(source: Any, name: str) -> str | None:
    """The path of a file in a folder or hub name; None if it is not there."""
    if not isinstance(source, str):
        return None
    with suppress(OSError):  # no such folder or name: whoever loads it says so
        return cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return None


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
    if not texts:
        return []
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
    """Arithmetic in bfloat16, if that is the dtype or not all weights are float32."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    enabled = dtype == "bfloat16" or bool(types - {torch.float32})
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)


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
    inner = unwrap(model)
    shipped = inner.generation_config
    model.generation_config = inner.generation_config = GenerationConfig()
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
        model.generation_config = inner.generation_config = shipped
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
    known = parameters(unwrap(model).forward)
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
    return call_model(body(backbone), dtype, **inputs).last_hidden_state[:, -1][index]


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
