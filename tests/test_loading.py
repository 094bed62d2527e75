"""What a trainer is made of: sources of models, tokenizers, loading options; and its settings."""

import copy
import dataclasses
import json
import random
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import iac
import maac

BOTH = pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])
THREE = pytest.mark.parametrize("variant", ["iac-v-separate", "iac-v-shared", "maac-v"])


def flat(*modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def rows_of(trainer):
    with open(f"{trainer.output_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def assert_trains(trainer):
    """Every agent and every critic changes, and every number that is logged is finite."""
    models = [*trainer.agents, *trainer.critics]
    before = [flat(model) for model in models]
    trainer.train()
    assert all((flat(m) != old).any() for m, old in zip(models, before, strict=True))
    assert all(np.isfinite(list(row.values())).all() for row in rows_of(trainer))


# ---------------------------------------------------------------------------------- agents, critics


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_of_a_folder_every_agent_loads_its_own_copy(variant, num_agents, folders, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path, {"num_agents": num_agents})
    start = flat(AutoModelForCausalLM.from_pretrained(folders["L"]))
    assert len(trainer.agents) == len(set(map(id, trainer.agents))) == num_agents
    assert all(torch.equal(flat(agent), start) for agent in trainer.agents)
    assert len(trainer.critics) == len(trainer.critic_optimizers) == num_agents
    assert_trains(trainer)
    after = [flat(agent) for agent in trainer.agents]
    assert not any(torch.equal(after[i], after[j]) for i in range(num_agents) for j in range(i))
    assert f"agent_{num_agents - 1}/policy_loss" in rows_of(trainer)[0]


@pytest.mark.parametrize("form", ["names", "models", "mixed"])
@THREE
def test_agents_are_names_or_models_or_both(variant, form, folders, llama, tokenizer, make_trainer, tmp_path):
    models = [llama, copy.deepcopy(llama)]
    name = folders["L"]
    agents = {"names": [name, name], "models": models, "mixed": [name, models[1]]}[form]
    trainer = make_trainer(variant, tmp_path, agents=agents, tokenizer=tokenizer)
    for own, given in zip(trainer.agents, agents, strict=True):
        assert own is given or isinstance(given, str)
    assert_trains(trainer)


def test_one_agent_may_be_a_model(llama, tokenizer, make_trainer, tmp_path):
    given = {"agent_model": llama, "tokenizer": tokenizer}
    trainer = make_trainer("maac-v", tmp_path, {"num_agents": 1}, **given)
    assert trainer.agents == [llama]
    assert_trains(trainer)


@BOTH
def test_a_name_and_a_list_that_agree_are_taken(variant, folders, make_trainer, tmp_path):
    name, count = folders["L"], 1 if "maac" in variant else 2
    given = {"agent_model": name, "agents": [name] * 2}
    given |= {"critic_model": name, "critics": [name] * count}
    assert_trains(make_trainer(variant, tmp_path, **given))


@BOTH
def test_a_name_and_a_list_that_disagree_are_refused_naming_both(variant, folders, make_trainer, tmp_path):
    one, two, count = folders["L"], folders["G"], 1 if "maac" in variant else 2
    for names in (("agent_model", "agents"), ("critic_model", "critics")):
        number = 2 if "agents" in names else count
        given = {names[0]: one, names[1]: [two] * number}
        with pytest.raises(ValueError) as error:
            make_trainer(variant, tmp_path, **given)
        assert all(word in str(error.value) for word in (*names, one, two))


@BOTH
def test_one_model_in_two_places_is_refused_naming_both(variant, llama, tokenizer, folders, make_trainer, tmp_path):
    other, name = copy.deepcopy(llama), folders["L"]

    def refused(words, **given):
        with pytest.raises(ValueError, match=words):
            make_trainer(variant, tmp_path, tokenizer=tokenizer, **given)

    refused(r"agents\[0\] and agents\[1\]", agents=[llama, llama])
    pair = {"agents": [llama, other]}
    if "maac" in variant:
        refused(r"agents\[1\] and critics\[0\]", critic_model=other, **pair)
        refused(r"agents\[0\] and critics\[0\]", critics=[llama.base_model], **pair)
    else:
        refused(r"agents\[0\] and critics\[0\]", critic_model=llama, **pair)
        refused(r"agents\[0\] and critics\[1\]", critics=[name, llama.base_model], **pair)
        refused(r"critics\[0\] and critics\[1\]", critics=[llama, llama], agents=[name, name])
    tied = copy.deepcopy(llama)
    tied.set_input_embeddings(llama.get_input_embeddings())  # a single parameter is enough
    refused(r"agents\[0\] and agents\[1\]", agents=[llama, tied])


def test_one_model_for_two_shared_backbones_is_refused(llama, tokenizer, make_trainer, tmp_path):
    given = {"agents": [llama, llama], "tokenizer": tokenizer}
    with pytest.raises(ValueError, match=r"agents\[0\] and agents\[1\]"):
        make_trainer("iac-v-shared", tmp_path, **given)


REFUSED = {  # -> variants, constructor arguments (L: a folder, M: a model), the message
    "no agent": ("iac maac", {"agent_model": None}, "agent_model or agents"),
    "no critic": ("iac maac", {"critic_model": None}, "critic_model or critics"),
    "one agent in a list": ("iac maac", {"agents": ["L"]}, "agents lists 1.*num_agents=2"),
    "three agents": ("iac maac", {"agents": ["L"] * 3}, "agents lists 3.*num_agents=2"),
    "a name for a list": ("iac maac", {"agents": "L"}, "agents must be a list"),
    "a number": ("iac maac", {"agents": ["L", 1]}, r"agents\[1\]"),
    "a module that is no model": ("iac maac", {"agents": ["L", nn.Linear(1, 1)]}, r"agents\[1\]"),
    "one model for two": ("iac maac", {"agent_model": "M"}, "agent_model is one model.*agents"),
    "a model and no tokenizer": (
        "iac maac",
        {"agents": ["M", "L"], "tokenizer": None},
        "tokenizer is required",
    ),
    "three tokenizers": ("iac maac", {"tokenizer": ["T"] * 3}, "tokenizer lists 3.*num_agents=2"),
    "no tokenizer": ("iac maac", {"tokenizer": "name"}, "tokenizer"),
    "two critics": ("maac", {"critics": ["L", "L"]}, "critics lists 2"),
    "one critic in a list": ("iac", {"critics": ["L"]}, "critics lists 1.*num_agents=2"),
    "a critic with shared": ("shared", {"critic_model": "L"}, "critic_model.*use_separate_critic"),
    "critics with shared": ("shared", {"critics": ["L", "L"]}, "critics.*use_separate_critic"),
    "no such folder": ("iac maac", {"agent_model": "no/such"}, r"no/such"),
    "no such critic": ("iac maac", {"critic_model": "no/such"}, r"critics\[0\]='no/such'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sources_that_do_not_fit_are_refused_saying_why(case, folders, llama, tokenizer, make_trainer, tmp_path):
    kinds, given, words = REFUSED[case]
    things = {"L": folders["L"], "M": llama, "T": tokenizer}

    def fill(value):
        if isinstance(value, list):
            return [fill(x) for x in value]
        return things.get(value, value) if isinstance(value, str) else value

    given = {"tokenizer": "T"} | given
    for kind in kinds.split():
        variant = {"iac": "iac-v-separate", "maac": "maac-v", "shared": "iac-v-shared"}[kind]
        with pytest.raises(ValueError, match=words):
            make_trainer(variant, tmp_path, **{name: fill(x) for name, x in given.items()})
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------- tokenizers


@THREE
def test_tokenizers_come_from_the_folders_or_as_one_or_as_a_list(variant, folders, tokenizer, make_trainer, tmp_path):
    other = copy.deepcopy(tokenizer)
    expected = [tokenizer("name 1").input_ids] * 2
    for given in (
        {},
        {"tokenizer": tokenizer},
        {"tokenizer": [tokenizer]},
        {"tokenizer": [tokenizer, other]},
        {"agents": [folders["L"], folders["G"]], "critics": [folders["L"]]},
    ):
        if "critics" in given and "maac" not in variant:
            given = given | {"critics": given["agents"]} if "separate" in variant else {}
        trainer = make_trainer(variant, tmp_path, **given)
        assert [tok("name 1").input_ids for tok in trainer.tokenizers] == expected
    trainer = make_trainer(variant, tmp_path, tokenizer=[tokenizer, other])
    assert trainer.tokenizers[0] is tokenizer and trainer.tokenizers[1] is other


@THREE
def test_agents_of_two_kinds_train_together_each_with_its_own_tokenizer(variant, folders, make_trainer, tmp_path):
    """A GPT-2 and a Llama, with ids of different meanings, by nothing but their names."""
    agents = [folders["L"], folders["tiny_lm"]]
    given = {"agents": agents}
    if "shared" not in variant:
        given["critics"] = agents if "iac" in variant else agents[1:]
    if "maac" in variant:  # what all read is tokenized by agent 0's
        given = {"agents": agents[::-1], "critics": agents[1:]}
    trainer = make_trainer(variant, tmp_path, **given)
    for tok, source in zip(trainer.tokenizers, given["agents"], strict=True):
        assert tok.get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    assert_trains(trainer)
    for s in trainer.samples:
        ids = s.completion_ids[:-1] if s.finished else s.completion_ids
        tok = trainer.tokenizers[s.agent_idx]
        assert s.completion == tok.decode(ids, skip_special_tokens=True)


@BOTH
def test_a_tokenizer_that_is_not_its_agents_is_refused_by_name(variant, folders, make_trainer, tmp_path):
    """Changed over, or with more ids than the model embeds."""
    names = [folders["L"], folders["tiny_lm"]]
    toks = [AutoTokenizer.from_pretrained(name) for name in names]
    critics = {"critics": names if "iac" in variant else names[:1]}
    with pytest.raises(ValueError, match=r"agents\[0\]"):
        make_trainer(variant, tmp_path, agents=names, tokenizer=toks[::-1], **critics)
    with pytest.raises(ValueError, match=r"agents\[0\] comes with the tokenizer"):
        make_trainer(variant, tmp_path, tokenizer=toks[1])
    with pytest.raises(ValueError, match=r"agents\[1\] embeds"):
        wrong = {"agents": [names[0], names[1]], "tokenizer": [toks[0], toks[0]]}
        make_trainer(variant, tmp_path, **wrong, **critics)


# ------------------------------------------------------------------------------------- model_config


@THREE
def test_options_reach_from_pretrained_of_agents_critics_and_tokenizers(variant, make_trainer, tmp_path):
    options = {
        "model_kwargs": {"attn_implementation": "eager"},
        "critic_model_kwargs": {"attn_implementation": "sdpa"},
        "tokenizer_kwargs": {"model_max_length": 123},
    }
    given = copy.deepcopy(options)
    args = {"reference_kl_enabled": True}
    trainer = make_trainer(variant, tmp_path, args, model_config=given)
    plain = make_trainer(variant, tmp_path, args)

    def kinds(models):
        return {model.config._attn_implementation for model in models}

    assert given == options
    assert kinds([*trainer.agents, *trainer.references]) == {"eager"}
    assert kinds([*plain.agents, *plain.references]) == {"sdpa"}
    assert [tok.model_max_length for tok in trainer.tokenizers] == [123, 123]
    assert plain.tokenizers[0].model_max_length != 123
    if "shared" not in variant:
        assert kinds(critic.backbone for critic in trainer.critics) == {"sdpa"}
        options["critic_model_kwargs"] = {"attn_implementation": "eager"}
        trainer = make_trainer(variant, tmp_path, model_config=options)
        assert kinds(critic.backbone for critic in trainer.critics) == {"eager"}


@THREE
def test_options_at_the_top_level_are_for_all_models_that_have_none_of_their_own(variant, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path, model_config={"attn_implementation": "eager"})
    backbones = [critic.backbone for critic in trainer.critics]
    for model in (*trainer.agents, *backbones):
        assert model.config._attn_implementation == "eager"
    mixed = {"attn_implementation": "eager", "model_kwargs": {"attn_implementation": "sdpa"}}
    trainer = make_trainer(variant, tmp_path, model_config=mixed)
    assert trainer.agents[0].config._attn_implementation == "sdpa"
    if "shared" not in variant:
        assert trainer.critics[0].backbone.config._attn_implementation == "eager"
    names = ("dtype", "torch_dtype", "attn_implementation", "model_kwargs", "special_tokens")
    nothing = dict.fromkeys(names)
    assert make_trainer(variant, tmp_path, model_config=nothing).agents[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@THREE
def test_a_dtype_is_taken_at_the_top_level_and_trained_in_float32(variant, name, make_trainer, tmp_path):
    """Weights are rounded to it as they are loaded, which is said."""
    for value in (torch.bfloat16, "bfloat16"):
        with pytest.warns(UserWarning, match=r"agents\[0\].*bfloat16.*float32") as caught:
            trainer = make_trainer(variant, tmp_path, model_config={name: value})
        models = [*trainer.agents, *trainer.critics]
        assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
        entries = flat(trainer.agents[0])
        assert torch.equal(entries, entries.bfloat16().float())
        said = [str(w.message) for w in caught]
        assert any("critics[0]" in text for text in said) == ("shared" not in variant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(variant, tmp_path)


@THREE
def test_special_tokens_are_added_to_the_tokenizers(variant, tokenizer, make_trainer, tmp_path):
    given = {"special_tokens": {"additional_special_tokens": ["<new>"]}}
    own = copy.deepcopy(tokenizer)
    for tok in (None, own, [copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)]):
        trainer = make_trainer(variant, tmp_path, tokenizer=tok, model_config=given)
        assert all(len(tok("<new>").input_ids) == 2 for tok in trainer.tokenizers)
    trainer = make_trainer(variant, tmp_path, model_config={"special_tokens": {"pad_token": "<p>"}})
    assert [tok.pad_token for tok in trainer.tokenizers] == ["<p>", "<p>"]


def test_widths_of_value_heads_may_be_given_in_either_place(make_trainer, tmp_path):
    """Both files take the same keys; the key of another kind of critic changes nothing."""
    separate, shared = "critic_value_head_hidden_dim", "value_head_hidden_dim"
    for variant, name, other in (
        ("iac-v-separate", separate, shared),
        ("iac-v-shared", shared, separate),
        ("maac-v", separate, shared),
    ):
        widths = []
        places = [{}, {"model_config": {name: 8}}, {"model_config": {other: 8, name: None}}]
        if "iac" in variant:
            both = {"args": {name: 8}, "model_config": {name: 8}}
            places += [{"args": {name: 8}}, both, {"args": {name: 8}, "model_config": {name: None}}]
        for given in places:
            head = make_trainer(variant, tmp_path, **given).critics[0].value_head
            widths.append(head[0].out_features if len(head) == 3 else None)
        assert widths == [None, 8, None] + [8] * (len(places) - 3)
        if "iac" in variant:
            given = {"args": {name: 8}, "model_config": {name: 9}}
            with pytest.raises(ValueError, match=f"{name}=8 in args, but 9 in model_config"):
                make_trainer(variant, tmp_path, **given)
        for bad in (0, -1, 2.0, "8", True):
            with pytest.raises(ValueError, match=name):
                make_trainer(variant, tmp_path, model_config={name: bad})


@BOTH
def test_options_that_nobody_reads_are_refused_by_name(variant, make_trainer, tmp_path):
    for bad in ({"modelkwargs": {}}, {"model_kwargs": {}, "lora": 8}, ["model_kwargs"], "dtype"):
        with pytest.raises(ValueError, match="model_config must be a dict"):
            make_trainer(variant, tmp_path, model_config=bad)


# --------------------------------------------------------------------------- what is in the folders


@THREE
def test_a_bfloat16_checkpoint_is_trained_in_float32(variant, llama, tokenizer, make_trainer, tmp_path):
    """At a learning rate of 1e-6, where every step would round away in bfloat16."""
    source = str(tmp_path / "low")
    llama.to(torch.bfloat16).save_pretrained(source)
    tokenizer.save_pretrained(source)
    assert AutoModelForCausalLM.from_pretrained(source).dtype == torch.bfloat16
    given = {"agent_model": source} | ({} if "shared" in variant else {"critic_model": source})
    rates = {"agent_learning_rate": 1e-6, "critic_learning_rate": 1e-6}
    args = rates | {"num_train_epochs": 7}
    trainer = make_trainer(variant, tmp_path, args, **given)
    models = [*trainer.agents, *(critic.backbone for critic in trainer.critics)]
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    before = [flat(model) for model in models]
    trainer.train()
    assert len(rows_of(trainer)) == 21
    for model, old in zip(models, before, strict=True):
        assert (flat(model) != old).float().mean() > 0.5
    loaded = AutoModelForCausalLM.from_pretrained(f"{trainer.output_dir}/model/agent_0")
    assert torch.equal(flat(loaded), flat(trainer.agents[0])) and loaded.dtype == torch.float32


@THREE
def test_a_folder_that_lacks_weights_is_refused_naming_them(variant, llama, tokenizer, make_trainer, tmp_path):
    """transformers would fill them with random numbers, and say so in a table at most."""
    file = tmp_path / "holes" / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    for change in ("missing", "of another shape"):
        llama.save_pretrained(file.parent)
        tokenizer.save_pretrained(file.parent)
        tensors = load_file(file)
        tensor = tensors.pop(name)
        if change != "missing":
            tensors[name] = tensor[:, :5].clone()
        save_file(tensors, file, metadata={"format": "pt"})
        roles = {"agent_model": "agents", "critic_model": "critics"}
        for role, kind in list(roles.items())[: 1 if "shared" in variant else 2]:
            with pytest.raises(ValueError) as error:
                make_trainer(variant, tmp_path, **{role: str(file.parent)})
            for word in (f"{kind}[0]", str(file.parent), "layers.1.mlp.up_proj.weight"):
                assert word in str(error.value), str(error.value)


def test_a_critic_of_a_checkpoint_with_or_without_a_language_model_head(
    llama, tokenizer, make_trainer, tmp_path, capfd
):
    """The backbone is the same, and nothing is reported as unused."""
    sources = [str(tmp_path / name) for name in ("whole", "body")]
    llama.save_pretrained(sources[0])
    llama.base_model.save_pretrained(sources[1])
    for source in sources:
        tokenizer.save_pretrained(source)
    capfd.readouterr()
    made = [make_trainer("maac-v", tmp_path, critic_model=source) for source in sources]
    assert "lm_head" not in "".join(capfd.readouterr())
    assert torch.equal(flat(made[0].critics[0]), flat(made[1].critics[0]))


# -------------------------------------------------------------------------------- the constructor


def test_making_a_trainer_draws_no_global_random_number(variant, make_trainer, tmp_path):
    name = "critic_value_head_hidden_dim"
    given = {"model_config": {name: 8, "value_head_hidden_dim": 8}}
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    make_trainer(variant, tmp_path, {"reference_kl_enabled": True}, **given)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))


@BOTH
def test_making_a_trainer_writes_nothing(variant, make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(variant, tmp_path, output_dir=None)
    make_trainer(variant, tmp_path)
    assert list(tmp_path.iterdir()) == []


@THREE
def test_models_are_in_eval_mode_and_stay_so(variant, llama, tokenizer, make_trainer, tmp_path):
    """Scoring has to repeat what sampling did, so dropout never wakes up."""
    llama.config.attention_dropout = 0.9
    agents = [llama.train(), copy.deepcopy(llama).train()]
    given = {"agents": agents, "tokenizer": tokenizer}
    trainer = make_trainer(variant, tmp_path, {"reference_kl_enabled": True}, **given)
    models = [*trainer.agents, *trainer.references, *trainer.critics]
    models += [critic.backbone for critic in trainer.critics]

    def awake():
        return [part for model in models for part in model.modules() if part.training]

    def heads():
        return [part for critic in trainer.critics for part in critic.value_head.modules()]

    for _ in range(2):
        assert set(awake()) <= {*heads(), *trainer.critics}  # which have no dropout
        trainer.train() if trainer.run is None else None


# ----------------------------------------------------------------- every setting makes a difference

TEMPLATE = "[{{ messages[0]['content'] }}]"
ROWS = [{"prompt": f"name {n}", "n": n} for n in range(6)]
TURNS = {"num_turns": 2, "rollout_buffer_size": 8}
KL = {"reference_kl_enabled": True, "num_train_epochs": 2}
IAC = ["iac-v-separate"]
SHARED = ["iac-v-shared"]
SETTINGS = {  # field -> two values whose outcomes differ, what else has to be so, and where
    "num_agents": (2, 3),
    "num_turns": (1, 2),
    "critic_type": ("v", "q"),
    "num_train_epochs": (1, 2),
    "agent_learning_rate": (1e-3, 2e-3),
    "critic_learning_rate": (1e-3, 2e-3),
    "value_loss_coef": (0.6, 0.3),
    "value_clip_range": (0.2, 1e-3, {"train_batch_size": 1}, SHARED),
    "advantage_normalization": (True, False),
    "rollout_buffer_size": (3, 2),
    "train_batch_size": (None, 2),
    "micro_batch_size": (None, 2),
    "rollout_batch_size": (None, 2),
    "chat_template": (False, True),
    "max_new_tokens": (5, 3),
    "temperature": (1.0, 1.5),
    "top_p": (1.0, 0.5),
    "top_k": (None, 5),
    "num_generations": (1, 2),
    "external_prompt_passthrough": (False, True, TURNS),
    "discount": (1.0, 0.5, TURNS),
    "early_termination_threshold": (None, 0.1, TURNS),
    "reference_kl_enabled": (False, True, {"num_train_epochs": 2}),
    "reference_kl_coef": (0.1, 0.5, KL),
    "critic_value_head_hidden_dim": (None, 8, {}, IAC),
    "value_head_hidden_dim": (None, 8, {}, SHARED),
    "max_grad_norm": (1.0, 1e-6),
    "eval_interval": (4, 0),
    "eval_num_samples": (3, 2),
    "eval_batch_size": (1, 2),
    "logging_steps": (1, 8),
    "checkpoint_interval": (0, 1),
    "dtype": ("float32", "bfloat16"),
    "seed": (1, 2),
}
ELSEWHERE = {"use_separate_critic", "lora_rank", "gradient_checkpointing"}  # in tests of their own
ELSEWHERE |= {"parallel_training", "agent_devices", "critic_devices", "reference_devices"}


@pytest.fixture(scope="module")
def outcome(make_trainer, tokenizer, tmp_path_factory):
    """outcome(variant, args) -> what of a training can be told from outside; each is done once."""
    known = {}
    tok = copy.deepcopy(tokenizer)
    tok.chat_template = TEMPLATE

    def play(variant, args, again=False):
        key = (variant, repr(sorted(args.items())))
        if key in known and not again:
            return known[key]
        sizes, saves, pad = [], [], common.pad

        def note_size(prompts, *rest):
            sizes.append(len(prompts))
            return pad(prompts, *rest)

        settings = {"eval_num_samples": 3, "eval_interval": 4} | args
        given = {"train_dataset": ROWS, "eval_dataset": ROWS, "tokenizer": tok}
        given["formatters"] = lambda x: f"* {x['prompt']}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "pad", note_size)
            trainer = make_trainer(variant, tmp_path_factory.mktemp("run"), settings, **given)
            save = trainer.save_checkpoint
            trainer.save_checkpoint = lambda path: saves.append(1) or save(path)
            trainer.train()
        rows = []
        for row in rows_of(trainer):
            rows.append({k: x for k, x in row.items() if not k.startswith("time/")})
        drawn = [(s.prompt_ids, s.completion_ids, s.old_value, s.target) for s in trainer.samples]
        weights = flat(*trainer.agents, *trainer.critics).double().norm().item()
        known[key] = repr([drawn, rows, sizes, saves, weights])
        return known[key]

    return play


@pytest.mark.parametrize("field", SETTINGS)
def test_every_setting_makes_a_difference(field, outcome):
    """A field that is read nowhere, or whose value goes nowhere, would leave all as it is."""
    one, two, *rest = SETTINGS[field]
    context, variants = rest[0] if rest else {}, rest[1] if len(rest) > 1 else [*IAC, "maac-v"]
    default = {f.name: f.default for f in dataclasses.fields(iac.IACConfig)}[field]
    for variant in variants:
        args = context if one == default else context | {field: one}
        same = outcome(variant, args) == outcome(variant, context | {field: two})
        assert not same, variant


@BOTH
def test_equal_settings_make_none(variant, outcome):
    """So that the test above means something."""
    same = outcome(variant, {}) == outcome(variant, {}, again=True)
    assert same


@pytest.mark.parametrize("config", [iac.IACConfig, maac.MAACConfig])
def test_no_setting_is_left_out(config):
    names = {field.name for field in dataclasses.fields(config)}
    assert names - ELSEWHERE <= SETTINGS.keys(), names - ELSEWHERE - SETTINGS.keys()
