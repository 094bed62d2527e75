"""Adapters, recomputation and wrapped models: in every role, with one base for all, to the same gradients."""

import collections
import copy
import json
import os
import subprocess
import sys
import warnings

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import common
from conftest import ROOT, VARIANTS

approx = pytest.approx
SEPARATE = [variant for variant in VARIANTS if "shared" not in variant]
LORA = {"lora_rank": 4}
KL = {"reference_kl_enabled": True, "reference_kl_coef": 0.3}


def adapters(model, layers=("q_proj", "v_proj"), **options):
    """A LoRA model around a language model, as a user makes one."""
    config = peft.LoraConfig(r=2, target_modules=list(layers), task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def distinct(trainer):
    """(tensors that train, tensors that do not) of all models of a trainer, each once."""
    models = [*trainer.agents, *trainer.critics, *trainer.references]
    parameters = {id(p): p for model in models for p in model.parameters()}.values()
    return [p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]


def stir(trainer):
    """Move adapters and value heads off their start, where some gradients, the KL and the values are 0."""
    generator = torch.Generator().manual_seed(5)
    for p in distinct(trainer)[0]:
        p.data += 0.05 * torch.randn(p.shape, generator=generator)


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model, before):
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def quiet(trainer):
    trainer.verbose = False
    return trainer


# ------------------------------------------------------------------------------------ one base for all


@pytest.mark.parametrize("model", ["L", "G"])
def test_the_base_exists_once_and_never_changes(variant, model, make_trainer, folders, tmp_path):
    trainer = quiet(make_trainer(variant, tmp_path, LORA | KL, model=model))
    trains, frozen = distinct(trainer)
    base = AutoModelForCausalLM.from_pretrained(folders[model])
    assert sum(p.numel() for p in frozen) == sum(p.numel() for p in base.parameters())
    before = [p.clone() for p in frozen]
    assert all(p.dtype == torch.float32 for p in trains)
    optimised = [p for o in trainer.optimizers() for group in o.param_groups for p in group["params"]]
    assert {id(p) for p in optimised} == {id(p) for p in trains}
    starts = [snapshot(m) for m in (*trainer.agents, *trainer.critics)]
    trainer.train()
    assert all(p.grad is None for p in frozen)
    assert all(torch.equal(p, q) for p, q in zip(frozen, before, strict=True))
    for m, start in zip((*trainer.agents, *trainer.critics), starts, strict=True):
        assert any("lora_B" in name for name in changed(m, start))
    assert trainer.samples[0].reference_kl == 0 and trainer.samples[-1].reference_kl != 0
    a, b = (snapshot(agent) for agent in trainer.agents)
    first = next(name for name in a if "lora_A" in name)
    assert not torch.equal(a[first], b[first])


def test_adapters_are_drawn_by_the_seed_and_the_global_state_is_left_alone(make_trainer, tmp_path):
    def drawn(seed):
        torch.manual_seed(3)
        trainer = make_trainer("iac-v-separate", tmp_path, LORA | {"seed": seed})
        assert torch.rand(1).item() == random
        return [p.detach().clone() for agent in trainer.agents for p in agent.parameters()]

    torch.manual_seed(3)
    random = torch.rand(1).item()
    one, same, other = drawn(1), drawn(1), drawn(2)
    assert all(map(torch.equal, one, same)) and not all(map(torch.equal, one, other))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bases_load_in_dtype_and_adapters_are_float32(variant, dtype, make_trainer, tmp_path):
    trainer = quiet(make_trainer(variant, tmp_path, LORA | KL | {"dtype": dtype}))
    trains, frozen = distinct(trainer)
    assert {p.dtype for p in trains} == {torch.float32}
    assert {p.dtype for p in frozen} == {getattr(torch, dtype)}
    trainer.train()
    assert trainer.samples[0].reference_kl == 0


def test_model_config_decides_on_the_bases_type(make_trainer, tmp_path):
    config = {"torch_dtype": "bfloat16"}
    trainer = quiet(make_trainer("maac-v", tmp_path, LORA | KL, model_config=config))
    assert {p.dtype for p in distinct(trainer)[1]} == {torch.bfloat16}
    trainer.train()
    config = {"critic_model_kwargs": {"dtype": "bfloat16"}}  # other options: a base of its own
    trainer = quiet(make_trainer("maac-v", tmp_path / "2", LORA, model_config=config))
    assert {p.dtype for p in trainer.agents[0].parameters()} == {torch.float32}
    assert torch.bfloat16 in {p.dtype for p in trainer.critics[0].parameters()}
    trainer.train()


def test_one_base_per_device_with_mp(make_trainer, tmp_path):
    devices = {"agent_devices": ["cpu"], "critic_devices": ["cpu"], "parallel_training": "mp"}
    trainer = quiet(make_trainer("maac-v", tmp_path, LORA | KL | devices))
    base = common.unwrap(trainer.references[0]).model.embed_tokens.weight
    assert common.body(trainer.critics[0].backbone).embed_tokens.weight is base
    trainer.train()


def test_tensors_on_another_device_are_not_shared(llama):
    llama.requires_grad_(False)
    here, there = (common.share(llama, torch.device(d)) for d in ("cpu", "meta"))
    assert here.lm_head.weight is llama.lm_head.weight
    assert there.lm_head.weight is not llama.lm_head.weight
    assert there.to("meta").device.type == "meta" and llama.device.type == "cpu"


def test_models_in_memory_are_bases_too(variant, make_trainer, llama, tokenizer, tmp_path):
    given = {"agents": [llama, llama], "tokenizer": tokenizer}
    given |= {} if "shared" in variant else {"critics": [llama] * (2 if "iac" in variant else 1)}
    trainer = quiet(make_trainer(variant, tmp_path, LORA | KL, **given))
    frozen = {id(p) for p in distinct(trainer)[1]}
    assert frozen == {id(p) for p in llama.parameters()}
    before = snapshot(llama)
    trainer.train()
    assert not changed(llama, before)


# ------------------------------------------------------------------------- gradients, one sample at a time


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_one_sample_at_a_time(variant, checkpointing, make_trainer, tmp_path):
    """With learning rates of 0, so that every step is taken at the weights of the collection."""
    args = {"rollout_buffer_size": 99, "micro_batch_size": 3, "max_grad_norm": None}
    args |= {"agent_learning_rate": 0.0, "critic_learning_rate": 0.0, "temperature": 0.7}
    args |= {"gradient_checkpointing": checkpointing}
    trainer = quiet(make_trainer(variant, tmp_path, LORA | KL | args))
    stir(trainer)
    gradients = collections.defaultdict(list)
    for optimizer in trainer.optimizers():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def keep(*_, parameters=parameters):
            for p in parameters:
                gradients[id(p)].append(None if p.grad is None else p.grad.clone())

        optimizer.register_step_pre_hook(keep)
    trainer.train()
    samples = trainer.samples
    joints = collections.defaultdict(list)
    for s in samples:
        joints[s.row].append(s)

    def logprob(i, s):
        ids = torch.tensor([s.prompt_ids + s.completion_ids])
        logits = trainer.agents[i](input_ids=ids).logits[0] / 0.7
        rows = logits[len(s.prompt_ids) - 1 : -1].log_softmax(-1)
        return sum(row[token] for row, token in zip(rows, s.completion_ids, strict=True))

    def value(i, s):
        critic, q = trainer.critics[i], variant.split("-")[1] == "q"
        ids = s.prompt_ids + (s.completion_ids if q else [])
        if "maac" in variant:
            joint = sorted(joints[s.row], key=lambda x: x.agent_idx)
            text = "\n".join(f"[agent {x.agent_idx + 1}]\n{x.prompt}" for x in joint)
            if q:
                text += "".join(f"\n[answer {x.agent_idx + 1}]\n{x.completion}" for x in joint)
            ids = trainer.tokenizers[0](text).input_ids
        hidden = common.body(critic.backbone)(input_ids=torch.tensor([ids])).last_hidden_state
        return critic.value_head(hidden[0, -1])[0]

    def by_hand(loss, model):
        parameters = list(common.trainable(model).values())
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return dict(zip(map(id, parameters), grads, strict=True))

    def add(one, other):
        both = [x for x in (one, other) if x is not None]
        return sum(both) if both else None

    steps = collections.defaultdict(list)
    for i, agent in enumerate(trainer.agents):
        own = [s for s in samples if s.agent_idx == i]
        scores = [logprob(i, s) for s in own]
        with agent.disable_adapter(), torch.no_grad():
            kls = [score.item() - logprob(i, s).item() for s, score in zip(own, scores, strict=True)]
        assert max(map(abs, kls)) > 1e-3
        rewards = torch.tensor([s.reward - 0.3 * kl for s, kl in zip(own, kls, strict=True)])
        values = [value(i, s) for s in own]
        errors = rewards - torch.tensor([v.item() for v in values])
        advantages = (errors - errors.mean()) / errors.std(correction=0)
        actor = -sum(a * score for a, score in zip(advantages, scores, strict=True)) / len(own)
        critic = 0.6 * sum((v - r) ** 2 for v, r in zip(values, rewards, strict=True)) / len(own)
        actor_grads = by_hand(actor, agent)
        critic_grads = by_hand(critic, trainer.critics[i])
        if "shared" in variant:
            for key in actor_grads.keys() | critic_grads.keys():
                steps[key].append(add(actor_grads.get(key), critic_grads.get(key)))
        else:
            for key, grad in [*actor_grads.items(), *critic_grads.items()]:
                steps[key].append(grad)
    assert steps.keys() == gradients.keys() and len(steps) >= 60
    for key, ours in steps.items():
        for mine, theirs in zip(ours, gradients[key], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------- saving and resuming


@pytest.mark.parametrize("given", [LORA | {"gradient_checkpointing": True}, {}])
def test_a_resumed_run_ends_as_the_one_that_was_never_stopped(variant, given, make_trainer, tmp_path):
    def trainer(folder, stop_at=99):
        calls = []

        def reward(a, b):
            calls.append(1)
            if len(calls) == stop_at:
                raise InterruptedError
            return [len(a[0]) + 0.1 * len(b[0])]

        args = KL | given | {"checkpoint_interval": 1, "num_train_epochs": 2}
        return quiet(make_trainer(variant, tmp_path / folder, args, reward_func=reward))

    whole, stopped, resumed = trainer("whole"), trainer("stopped", 11), trainer("resumed")
    whole.train()
    with pytest.raises(InterruptedError):
        stopped.train()
    resumed.train(resume_from=stopped.output_dir)
    for one, other in zip(whole.agents + whole.critics, resumed.agents + resumed.critics, strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    if not given:
        return
    trains = sum(p.numel() * p.element_size() for p in distinct(resumed)[0])
    size = os.path.getsize(os.path.join(resumed.output_dir, "checkpoint", "state.pt"))
    entries = 6 * len(distinct(resumed)[0])  # with AdamW's two moments and step, each has a name
    assert size < 3 * trains + 1000 * entries
    saved = torch.load(os.path.join(resumed.output_dir, "checkpoint", "state.pt"), weights_only=True)
    assert all("lora" in name or "value_head" in name for w in saved["weights"] for name in w)
    with pytest.raises(ValueError, match="lora_rank"):
        quiet(make_trainer(variant, tmp_path / "other", KL | {"lora_rank": 3})).train(resume_from=resumed.output_dir)


def test_saved_adapters_load_by_peft_and_train_on(variant, make_trainer, folders, tmp_path):
    trainer = quiet(make_trainer(variant, tmp_path, LORA | KL))
    stir(trainer)
    trainer.train()
    saved = os.path.join(trainer.output_dir, "model")
    assert not any("model.safetensors" in files for _, _, files in os.walk(saved))
    ids = torch.tensor([trainer.samples[0].prompt_ids])
    for i, agent in enumerate(trainer.agents):
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(f"{saved}/agent_{i}").eval()
        options = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(loaded.generate(**options), agent.generate(**options))
    folders_of = {"agents": [f"{saved}/agent_{i}" for i in (0, 1)]}
    if "iac" in variant and "shared" not in variant:
        folders_of["critics"] = [f"{saved}/critic_{i}" for i in (0, 1)]
    elif "maac" in variant:
        folders_of["critic_model"] = f"{saved}/critic_0"
    for k, args in enumerate((KL, LORA | KL)):  # the adapters that are there are taken
        again = quiet(make_trainer(variant, tmp_path / str(k), args, **folders_of))
        for old, new in zip(trainer.agents + trainer.critics, again.agents + again.critics, strict=True):
            tensors = [list(common.trainable(x).values()) for x in (old, new)]
            assert len(tensors[0]) and all(map(torch.equal, *tensors))
        sequences = [[5, 6, 7], [8, 9]]
        values = trainer.critics[0](sequences, "float32")
        assert values.abs().min() > 0 and torch.equal(again.critics[0](sequences, "float32"), values)
        base = AutoModelForCausalLM.from_pretrained(folders["L"])
        frozen = list(distinct(again)[1])
        adapters_of_references = sum(
            p.numel() for m in again.references for n, p in m.named_parameters() if "lora" in n
        )
        count = sum(p.numel() for p in base.parameters())
        assert sum(p.numel() for p in frozen) == count + adapters_of_references
        before = [snapshot(agent) for agent in again.agents]
        again.train()
        assert again.samples[0].reference_kl == approx(0, abs=1e-6)  # of the adapters as they came
        assert all(changed(a, b) for a, b in zip(again.agents, before, strict=True))


@pytest.mark.parametrize("variant", SEPARATE)
def test_critics_start_from_adapters_of_agents(variant, make_trainer, tmp_path):
    """As the command line does it, where no critic is named."""
    trainer = quiet(make_trainer(variant, tmp_path, LORA))
    trainer.train()
    folder = os.path.join(trainer.output_dir, "model", "agent_0")
    again = make_trainer(variant, tmp_path / "2", agents=[folder, folder], critic_model=folder)
    quiet(again).train()
    hidden = [common.body(x)(torch.tensor([[5, 6]])).last_hidden_state for x in trainer.agents[:1]]
    fresh = make_trainer(variant, tmp_path / "3", agents=[folder, folder], critic_model=folder)
    backbone = common.body(fresh.critics[0].backbone)
    assert torch.equal(backbone(torch.tensor([[5, 6]])).last_hidden_state, hidden[0])
    third = os.path.join(again.output_dir, "model", "critic_0")
    quiet(make_trainer(variant, tmp_path / "4", agents=[folder] * 2, critic_model=third)).train()


def test_folders_that_do_not_fit_are_refused_by_name(make_trainer, tmp_path):
    trainer = quiet(make_trainer("maac-v", tmp_path, LORA))
    trainer.save_model(str(tmp_path / "model"))
    critic, agent = str(tmp_path / "model" / "critic_0"), str(tmp_path / "model" / "agent_0")
    tokenizer = trainer.tokenizers[0]
    with pytest.raises(ValueError, match=r"agents\[1\].*does not fit"):
        make_trainer("maac-v", tmp_path / "2", agents=[agent, critic], tokenizer=tokenizer)
    path = tmp_path / "model" / "agent_1" / "adapter_config.json"
    config = json.loads(path.read_text())
    assert os.path.isabs(config["base_model_name_or_path"])
    path.write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"agents\[1\].*does not tell which model"):
        make_trainer("maac-v", tmp_path / "3", agents=[agent, str(path.parent)])


def test_without_peft_it_is_named(make_trainer, tmp_path, monkeypatch):
    trainer = quiet(make_trainer("maac-v", tmp_path, LORA))
    trainer.save_model(str(tmp_path / "model"))
    agent = str(tmp_path / "model" / "agent_0")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora_rank=4 needs the package peft: pip install"):
        make_trainer("maac-v", tmp_path / "2", LORA)
    with pytest.raises(ValueError, match=r"agents\[0\]=.*needs the package peft: pip install"):
        make_trainer("maac-v", tmp_path / "3", agents=[agent, agent])
    make_trainer("maac-v", tmp_path / "4")


# -------------------------------------------------------------------------- wrapped models in every role


class Int8Linear(nn.Module):
    """Stands for a quantised layer: integers that cannot train, and a scale in bfloat16."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().max() / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), False)
        self.register_buffer("scale", scale.detach().to(torch.bfloat16))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def quantise(model, dtype=torch.bfloat16):
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
    return adapters(model.requires_grad_(False).to(dtype))


def freeze_partly(model):
    model.requires_grad_(False).bfloat16()
    model.model.layers[1].requires_grad_(True)
    return model


WRAPPERS = {
    "adapters": adapters,
    "with head": lambda m: adapters(m, modules_to_save=["embed_tokens", "lm_head"]),
    "bfloat16 base": lambda m: adapters(m.bfloat16()),
    "quantised": quantise,
    "float16 base": lambda m: quantise(m, torch.float16),
    "frozen parts": freeze_partly,
}


def compiled(model):
    return torch.compile(adapters(model), backend="eager")


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        *((variant, kind) for variant in VARIANTS for kind in WRAPPERS),
        *(("iac-q-shared", "compiled"), ("maac-v", "compiled")),
    ],
)
def test_wrapped_models_train_in_every_role(variant, kind, make_trainer, folders, tokenizer, tmp_path):
    def wrapped():
        wrap = WRAPPERS.get(kind, compiled)
        return wrap(AutoModelForCausalLM.from_pretrained(folders["L"]))

    given = {"agents": [wrapped(), wrapped()], "tokenizer": tokenizer}
    if "shared" not in variant:
        given["critic_model"] = wrapped()
    types = [{n: p.dtype for n, p in m.named_parameters()} for m in given["agents"]]
    args = {"max_new_tokens": 2, "gradient_checkpointing": kind == "quantised"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet(make_trainer(variant, tmp_path, KL | args, **given))
        models = [*trainer.agents, *trainer.critics]
        starts = [snapshot(m) for m in models]
        trainer.train()
    assert trainer.agents == given["agents"]
    assert trainer.samples[0].reference_kl == approx(0, abs=1e-5)
    assert trainer.samples[-1].reference_kl != 0
    for agent, before in zip(trainer.agents, types, strict=True):
        for name, p in agent.named_parameters():
            assert p.dtype == (torch.float32 if p.requires_grad else before[name])
    for m, start in zip(models, starts, strict=True):
        trains = common.trainable(m)
        assert changed(m, start) and changed(m, start) <= trains.keys()
    saved = os.path.join(trainer.output_dir, "model")
    if kind == "adapters":
        config = os.path.join(saved, "critic_0", "adapter_config.json")
        assert os.path.exists(config) == ("shared" not in variant)
        assert os.path.exists(os.path.join(saved, "agent_1", "adapter_config.json"))


def test_a_reference_shares_what_is_frozen(make_trainer, folders, tokenizer, tmp_path):
    agents = [adapters(AutoModelForCausalLM.from_pretrained(folders["L"])) for _ in range(2)]
    trainer = make_trainer("maac-v", tmp_path, KL, agents=agents, tokenizer=tokenizer)
    for agent, reference in zip(trainer.agents, trainer.references, strict=True):
        own, others = dict(agent.named_parameters()), dict(reference.named_parameters())
        assert own.keys() == others.keys() and not common.trainable(reference)
        assert all((own[n] is others[n]) == ("lora" not in n) for n in own)


@pytest.mark.parametrize("role", ["agents", "critics"])
def test_what_cannot_work_is_refused_by_name(role, make_trainer, folders, tokenizer, tmp_path):
    def refused(broken, match):
        given = {"agents": [folders["L"]] * 2, "critics": [folders["L"]] * 2}
        given[role] = [folders["L"], broken]
        with pytest.raises(ValueError, match=rf"{role}\[1\].*{match}"):
            make_trainer("iac-v-separate", tmp_path, tokenizer=tokenizer, **given)

    def llama():
        return AutoModelForCausalLM.from_pretrained(folders["L"])

    prompt = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    for config, kind in ((prompt, "PROMPT_TUNING"), (prefix, "PREFIX_TUNING")):
        refused(peft.get_peft_model(llama(), config), kind)
    frozen = adapters(llama())
    frozen.save_pretrained(tmp_path / "adapters")
    inference = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    refused(inference, "no trainable parameter: .*is_trainable=True")
    refused(llama().requires_grad_(False), "no trainable parameter")
    if role == "agents":
        refused(AutoModel.from_pretrained(folders["L"]), "does not generate")


def test_frozen_agents_with_a_shared_backbone_are_refused(make_trainer, folders, tokenizer, tmp_path):
    model = adapters(AutoModelForCausalLM.from_pretrained(folders["L"]))
    model.save_pretrained(tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(folders["L"])
    frozen = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    given = {"agents": [model, frozen], "tokenizer": tokenizer}
    with pytest.raises(ValueError, match=r"agents\[1\] has no trainable parameter"):
        make_trainer("iac-v-shared", tmp_path, **given)


def test_no_trainable_parameter_has_two_optimisers(make_trainer, folders, tokenizer, tmp_path):
    one = adapters(AutoModelForCausalLM.from_pretrained(folders["L"]))
    other = common.share(one, torch.device("cpu"))
    given = {"tokenizer": tokenizer, "agents": [one, other]}
    make_trainer("maac-v", tmp_path, **given)  # the frozen base of both is one, their adapters not
    with pytest.raises(ValueError, match=r"agents\[0\] and critics\[0\] are the same model"):
        make_trainer("maac-v", tmp_path, critic_model=one, **given)


# -------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize(("model", "args"), [("L", {}), ("G", LORA)])
def test_recomputed_layers_run_twice_and_change_no_number(variant, model, args, make_trainer, tmp_path):
    outcomes = []
    for recomputed in (False, True):
        args = args | {"gradient_checkpointing": recomputed, "rollout_buffer_size": 99}
        trainer = quiet(make_trainer(variant, tmp_path / str(recomputed), args, model=model))
        stir(trainer)
        runs = [0]
        inner = common.unwrap(trainer.agents[0])
        layers = inner.model.layers if model == "L" else inner.transformer.h
        watched = layers[1].mlp

        def count(*_):
            runs[0] += torch.is_grad_enabled()  # noqa: B023

        watched.register_forward_pre_hook(count)  # what follows the last saved tensor is not rerun
        gradients = []
        for optimizer in trainer.optimizers():
            optimizer.register_step_pre_hook(
                lambda o, *_: gradients.extend(p.grad for p in o.param_groups[0]["params"])  # noqa: B023
            )
        trainer.train()
        outcomes.append((runs[0], gradients))
    (once, gradients), (twice, recomputed) = outcomes
    passes = 2 if "shared" in variant else 1  # the actor's and the critic's
    assert (once, twice) == (passes, 2 * passes)
    for one, other in zip(gradients, recomputed, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda m: m, adapters])
def test_a_model_handed_in_with_it_enabled_recomputes(wrap, make_trainer, folders, tokenizer, tmp_path):
    agents = [AutoModelForCausalLM.from_pretrained(folders["L"]) for _ in range(2)]
    agents[0].gradient_checkpointing_enable()
    agents = [wrap(agent) for agent in agents]
    trainer = quiet(make_trainer("maac-v", tmp_path, {"rollout_buffer_size": 99}, agents=agents, tokenizer=tokenizer))
    runs = [0, 0]
    for i, agent in enumerate(trainer.agents):

        def count(*_, i=i):
            runs[i] += torch.is_grad_enabled()

        common.unwrap(agent).model.layers[0].mlp.register_forward_pre_hook(count)
    trainer.train()
    assert runs == [2, 1]
    make_trainer("maac-v", tmp_path / "2", agents=agents, tokenizer=tokenizer)  # not wrapped twice
    forward = common.unwrap(agents[0]).model.layers[0].forward
    assert not hasattr(forward.args[0], "func")
    copied = copy.deepcopy(common.unwrap(agents[0]))
    assert copied.model.layers[0].forward.args[0].__self__ is copied.model.layers[0]


def test_no_dropout_wakes_up(make_trainer, folders, tokenizer, tmp_path):
    def agent():
        model = AutoModelForCausalLM.from_pretrained(folders["G"], attn_pdrop=0.5, resid_pdrop=0.5)
        return model

    trainer = quiet(
        make_trainer(
            "iac-v-shared",
            tmp_path,
            {"gradient_checkpointing": True},
            agents=[agent(), agent()],
            tokenizer=tokenizer,
        )
    )
    ids, answers = [[5, 6, 7]], [[8, 9]]
    scores = [common.score(trainer.agents[0], ids, answers, 1.0, "float32") for _ in range(2)]
    assert torch.equal(*scores) and scores[0].requires_grad


def test_a_model_without_such_layers_is_refused(make_trainer, folders, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders["L"])
    model.model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match=r"gradient_checkpointing: agents\[1\].*Llama"):
        args = {"gradient_checkpointing": True}
        make_trainer("maac-v", tmp_path, args, agents=[folders["L"], model], tokenizer=tokenizer)


# ------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("file", ["iac.py", "maac.py"])
def test_the_demo_with_adapters_saves_trains_on_and_resumes(file, tmp_path):
    def run(*flags):
        command = [sys.executable, str(ROOT / file), "--max-new-tokens", "3", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]

    short = ["--rollout-buffer-size", "400", "--eval-num-samples", "4"]
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    lora = ["--lora-rank", "2", "--gradient-checkpointing"]
    run(*lora, *short, "--num-train-epochs", "1", "--output-dir", one)
    run("--resume", one, "--num-train-epochs", "2")
    agents = [f"{one}/model/agent_0", f"{one}/model/agent_1"]
    run("--agents", *agents, *short, "--output-dir", two)
    assert os.path.exists(f"{two}/model/critic_0/adapter_config.json")
