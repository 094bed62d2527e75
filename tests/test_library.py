"""What people construct: agents, critics and tokenizers in every form, mixed families, saving and loading again."""

import copy
import json
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from commands import run
from library_models import VARIANTS, build, collected, folder, metrics, model, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM, OPTModel

SEQUENCES = [[5, 6, 7], [8, 9, 10, 11, 12], [260, 7]]


def flat(module) -> torch.Tensor:
    """All entries of a model's parameters, a copy."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def assert_trains(trainer, critics: int) -> None:
    """Train; every agent and every critic must have changed, and every number logged be finite."""
    models = [*trainer.agents, *trainer.critics]
    assert len(trainer.critics) == critics
    before = [flat(m) for m in models]
    trainer.train()
    assert all((flat(m) != old).any() for m, old in zip(models, before, strict=True))
    rows = metrics(trainer)
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in rows)
    for i in range(len(trainer.agents)):
        assert f"agent_{i}/policy_loss" in rows[0], rows[0]
    assert {name for name in rows[0] if "value_loss" in name} == {
        f"critic_{c}/value_loss" for c in range(critics)
    }


# ------------------------------------------------------------------------------------------ agents and tokenizers


@pytest.mark.parametrize("num_agents", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_agent_model_is_a_folder_and_every_agent_loads_its_own_copy(variant, num_agents, tmp_path):
    trainer = build(variant, tmp_path / "run", {"num_agents": num_agents})
    assert (
        len(trainer.agents)
        == len({id(p) for a in trainer.agents for p in [next(a.parameters())]})
        == num_agents
    )
    start = flat(AutoModelForCausalLM.from_pretrained(folder("G", "T")))
    assert all(torch.equal(flat(agent), start) for agent in trainer.agents)
    assert_trains(trainer, critics=1 if variant == "maac" else num_agents)
    after = [flat(agent) for agent in trainer.agents]
    assert not any(torch.equal(after[i], after[j]) for i in range(num_agents) for j in range(i))


@pytest.mark.parametrize("form", ["names", "instances", "mixed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_agents_as_names_as_instances_and_mixed(variant, form, tmp_path):
    instances = [model("G", tokenizer("T"), seed) for seed in (1, 2)]
    agents = [
        folder("G", "T") if form == "names" or (form == "mixed" and i == 0) else instances[i]
        for i in (0, 1)
    ]
    trainer = build(variant, tmp_path / "run", agents=agents, tokenizer=tokenizer("T"))
    assert all(
        a is b for a, b in zip(trainer.agents, agents, strict=True) if not isinstance(b, str)
    )
    assert_trains(trainer, critics=1 if variant == "maac" else 2)


def test_one_agent_may_be_an_instance(tmp_path):
    agent = model("G", tokenizer("T"))
    trainer = build(
        "maac", tmp_path / "run", {"num_agents": 1}, agent_model=agent, tokenizer=tokenizer("T")
    )
    assert trainer.agents == [agent]
    assert_trains(trainer, critics=1)


def test_tokenizers_come_from_the_folder_as_one_or_as_a_list(tmp_path):
    def ids(**given):
        return [tok("name 1").input_ids for tok in build("iac", tmp_path, **given).tokenizers]

    T = tokenizer("T")
    assert (
        ids()
        == ids(tokenizer=T)
        == ids(tokenizer=[T, copy.deepcopy(T)])
        == [T("name 1").input_ids] * 2
    )
    U = {
        "agents": [folder("G", "T"), folder("G", "U")],
        "critics": [folder("G", "T"), folder("G", "U")],
    }
    assert ids(**U, tokenizer=[T, tokenizer("U")]) == [
        T("name 1").input_ids,
        tokenizer("U")("name 1").input_ids,
    ]


# ------------------------------------------------------------------------------------------------------- critics


@pytest.mark.parametrize("form", ["name", "names", "instances", "mixed"])
def test_iac_separate_critics_are_independent(form, tmp_path):
    name, instances = (
        folder("G", "T"),
        [model("G", tokenizer("T"), seed).base_model for seed in (1, 2)],
    )
    forms = {"names": [name, name], "instances": instances, "mixed": [instances[0], name]}
    given = {"critic_model": name} if form == "name" else {"critics": forms[form]}
    trainer = build("iac", tmp_path / "run", **given)
    assert len(trainer.critic_optimizers) == 2
    assert_trains(trainer, critics=2)
    assert not torch.equal(flat(trainer.critics[0]), flat(trainer.critics[1]))
    if form == "mixed":
        assert trainer.critics[0].backbone is instances[0]


def test_iac_one_critic_instance_is_shared_with_one_optimiser_and_one_head(tmp_path):
    critic, steps = model("G", tokenizer("T")), []
    trainer = build("iac", tmp_path / "run", critic_model=critic)
    assert trainer.critics[0].backbone is critic.base_model and len(trainer.critic_optimizers) == 1
    held = {id(p) for group in trainer.critic_optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in trainer.critics[0].parameters()}
    trainer.critic_optimizers[0].register_step_post_hook(lambda *_: steps.append(1))
    assert_trains(trainer, critics=1)
    assert len(steps) == 2 * 2  # 2 updates of 2 agents


@pytest.mark.parametrize("form", ["name", "instance", "list with a name", "list with an instance"])
def test_maac_has_one_critic(form, tmp_path):
    source = model("G", tokenizer("T")).base_model if "instance" in form else folder("G", "T")
    trainer = build(
        "maac",
        tmp_path / "run",
        **({"critics": [source]} if "list" in form else {"critic_model": source}),
    )
    assert "instance" not in form or trainer.critics[0].backbone is source
    assert_trains(trainer, critics=1)


def test_a_critic_is_loaded_without_its_language_model_head(tmp_path):
    for critic in ("GT", "LT"):
        trainer = build("maac", tmp_path, critic_model=folder(*critic))
        assert not any("lm_head" in name for name, _ in trainer.critics[0].named_parameters())
    trainer = build("maac", tmp_path, critic_model=model("L", tokenizer("T")))
    assert not any("lm_head" in name for name, _ in trainer.critics[0].named_parameters())


def refusals() -> dict[str, tuple]:
    """Name -> variant, constructor arguments, and what the message must hold."""
    T, a, b = tokenizer("T"), model("G", tokenizer("T")), model("G", tokenizer("T"))
    name = folder("G", "T")
    return {
        "maac: two critics": ("maac", {"critics": [name, name]}, "critics"),
        "iac: one critic in a list": ("iac", {"critics": [name]}, "critics"),
        "iac: both forms": ("iac", {"critic_model": name, "critics": [name, name]}, "critic_model"),
        "iac shared: critic_model": ("iac_shared", {"critic_model": name}, "critic_model"),
        "iac shared: critics": ("iac_shared", {"critics": [name, name]}, "critics"),
        "one instance twice": (
            "maac",
            {"agents": [a, a], "tokenizer": T},
            r"agents\[0\] and agents\[1\]",
        ),
        "agent as critic": (
            "maac",
            {"agents": [a, b], "tokenizer": T, "critic_model": b},
            r"agents\[1\] and critics\[0\]",
        ),
        "agent's body as critic": (
            "iac",
            {"agents": [a, b], "tokenizer": T, "critics": [name, a.base_model]},
            r"agents\[0\] and critics\[1\]",
        ),
        "agent_model and agents": (
            "iac",
            {"agent_model": name, "agents": [a, b], "tokenizer": T},
            "agent_model",
        ),
        "three agents": ("maac", {"agents": [name] * 3, "tokenizer": T}, "agents"),
        "instance for two": ("maac", {"agent_model": a, "tokenizer": T}, "agent_model"),
        "agents without tokenizer": ("iac", {"agents": [name, name]}, "tokenizer"),
        "three tokenizers": ("iac", {"tokenizer": [T] * 3}, "tokenizer"),
        "larger tokenizer": ("iac", {"tokenizer": [T, tokenizer("U")]}, r"agents\[1\]"),
        "unknown option": ("iac", {"model_config": {"modelkwargs": {}}}, "modelkwargs"),
        "unknown option, maac": ("maac", {"model_config": {"modelkwargs": {}}}, "modelkwargs"),
        "no such folder": (
            "iac",
            {"agent_model": "no/such/folder", "tokenizer": T},
            "no/such/folder",
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_refused(case, tmp_path):
    variant, given, words = refusals()[case]
    with pytest.raises(ValueError, match=words):
        build(variant, tmp_path, **given)


# ---------------------------------------------------------------------------------- different families, one team


MIXED = {
    "agents": [folder("G", "T"), folder("L", "U")],
    "tokenizer": [tokenizer("T"), tokenizer("U")],
}


@pytest.mark.parametrize("first", ["gpt2", "llama"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpt2_and_a_llama_with_tokenizers_of_their_own(variant, critic_type, first, tmp_path):
    """Ids stay within a family: between models only text travels, and it is the right one."""
    order = [0, 1] if first == "gpt2" else [1, 0]
    agents, toks = ([MIXED[name][k] for k in order] for name in ("agents", "tokenizer"))
    given = {"iac": {"critics": agents}, "iac_shared": {}, "maac": {"critic_model": agents[0]}}[
        variant
    ]
    rewarded, read = [], [[] for _ in toks]

    def reward_func(a, b):
        rewarded.append([a, b])
        return (len(a[0]) + 2 * len(b[0])) / 50

    formatters = [lambda x, i=i: f"{x['prompt']} for {'ab'[i]}" for i in (0, 1)]
    trainer = build(
        variant,
        tmp_path / "run",
        {"critic_type": critic_type},
        agents=agents,
        tokenizer=toks,
        formatters=formatters,
        reward_func=reward_func,
        **given,
    )
    for c, critic in enumerate(trainer.critics):
        critic.register_forward_pre_hook(lambda _, inputs, c=c: read[c].extend(inputs[0]))
    samples = collected(trainer)
    assert_trains(trainer, critics=1 if variant == "maac" else 2)

    answers = [[], []]
    for s in samples:
        ids = s.completion_ids[:-1] if s.finished else s.completion_ids
        answers[s.agent_idx].append(toks[s.agent_idx].decode(ids, skip_special_tokens=True))
    assert rewarded == [[[a], [b]] for a, b in zip(*answers, strict=True)]
    assert max(max(s.completion_ids) for s in samples) >= len(
        tokenizer("T")
    )  # U's larger ids did occur

    rows = [f"name {n}" for n in range(8)]
    if variant == "maac":
        texts = [f"[agent 1]\n{row} for a\n[agent 2]\n{row} for b" for row in rows]
        if critic_type == "q":
            texts = [
                f"{t}\n[answer 1]\n{a}\n[answer 2]\n{b}"
                for t, a, b in zip(texts, *answers, strict=True)
            ]
        assert {toks[0].decode(ids, skip_special_tokens=True) for ids in read[0]} == set(texts)
    for c in range(2 if variant != "maac" else 0):
        own = [s for s in samples if s.agent_idx == c]
        texts = [f"{row} for {'ab'[c]}" for row in rows]
        if critic_type == "q":
            texts = [
                text + toks[c].decode(s.completion_ids) for text, s in zip(texts, own, strict=True)
            ]
        begin = toks[c].bos_token or ""
        assert {toks[c].decode(ids) for ids in read[c]} == {begin + text for text in texts}


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_a_critic_with_another_tokenizer_is_refused_naming_both(variant, tmp_path):
    """A09: whichever of the two is larger."""
    for agents, critic in (("GT", "LU"), ("LU", "GT")):
        with pytest.raises(ValueError) as error:
            build(variant, tmp_path, agent_model=folder(*agents), critic_model=folder(*critic))
        assert "critics[0]" in str(error.value) and "tokenizer" in str(error.value)
        assert folder(*agents) in str(error.value)
    same_size = folder("L", "V")  # as many ids as T, in another order: only the vocabulary tells
    with pytest.raises(ValueError) as error:
        build(variant, tmp_path, critic_model=same_size)
    assert same_size in str(error.value) and folder("G", "T") in str(error.value)


def test_an_agent_with_another_models_tokenizer_is_refused(tmp_path):
    """A09, the other instance of its kind: two agents' tokenizers changed over."""
    agents, toks = [folder("G", "T"), folder("L", "V")], [tokenizer("V"), tokenizer("T")]
    with pytest.raises(ValueError, match=r"agents\[0\]"):
        build("maac", tmp_path, agents=agents, tokenizer=toks, critic_model=folder("L", "V"))


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_a_critic_needs_no_more_embeddings_than_there_are_tokens(variant, critic_type, tmp_path):
    """Models are often padded to a round number of embeddings, and an agent may draw one that stands for no token."""
    agents = [model("G", tokenizer("T"), seed) for seed in (1, 2)]
    for agent in agents:
        agent.resize_token_embeddings(20 * len(tokenizer("T")))
    tokens = {"agents": agents, "tokenizer": tokenizer("T")}
    trainer = build(variant, tmp_path / "run", {"critic_type": critic_type}, **tokens)
    samples = collected(trainer)
    trainer.train()
    assert max(token for s in samples for token in s.completion_ids) >= len(tokenizer("T"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_last_hidden_states_may_be_narrower_than_hidden_size(variant, tmp_path):
    """As those of OPT-350m are."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64, "num_hidden_layers": 2}
    config = OPTConfig(
        vocab_size=len(tokenizer("T")), num_attention_heads=2, max_position_embeddings=64, **sizes
    )
    given = {} if variant == "iac_shared" else {"critic_model": OPTModel(config)}
    agents = [OPTForCausalLM(config).eval() for _ in range(2)]
    trainer = build(variant, tmp_path / "run", agents=agents, tokenizer=tokenizer("T"), **given)
    assert_trains(trainer, critics=2 if variant == "iac_shared" else 1)
    trainer.save_model(str(tmp_path / "saved"))


def test_one_critic_cannot_serve_agents_of_two_families(tmp_path):
    with pytest.raises(ValueError, match=r"critics\[1\]"):
        build("iac", tmp_path, **MIXED, critic_model=folder("G", "T"))


# ------------------------------------------------------------------------------------------------ save and load


RELOAD = """
import json, sys
from library_models import build
from transformers import AutoTokenizer
runs = json.load(sys.stdin)
for run in runs:
    agents = [f"{run['folder']}/agent_{i}" for i in (0, 1)]
    critics = [f"{run['folder']}/critic_{c}" for c in range(run["critics"])]
    given = {"agents": agents, "tokenizer": [AutoTokenizer.from_pretrained(agent) for agent in agents]}
    given |= {"critics": critics} if critics else {}
    trainer = build(run["variant"], None, {"critic_type": run["critic_type"]}, **given)
    run["values"] = [critic(run["sequences"], "float32").tolist() for critic in trainer.critics]
print(json.dumps(runs))
"""


@pytest.mark.parametrize("family", ["G", "L"])
def test_critics_come_back_with_their_value_heads_in_a_fresh_process(family, tmp_path):
    """A14: for every kind of critic; the agents of a shared backbone bring theirs along."""
    runs, values, source = [], [], folder(family, "T")
    for variant, critic_type, width in product(VARIANTS, ("v", "q"), (None, 8)):
        args, given = (
            {"critic_type": critic_type},
            {} if variant == "iac_shared" else {"critic_model": source},
        )
        if variant == "maac":
            given["model_config"] = {"critic_value_head_hidden_dim": width}
        else:
            args[("critic_" if variant == "iac" else "") + "value_head_hidden_dim"] = width
        trainer = build(
            variant,
            tmp_path / f"{variant}_{critic_type}_{width}",
            args,
            agent_model=source,
            **given,
        )
        before = [copy.deepcopy(critic.value_head) for critic in trainer.critics]
        trainer.train()
        for old, critic in zip(before, trainer.critics, strict=True):
            pairs = list(zip(old.parameters(), critic.value_head.parameters(), strict=True))
            assert len(pairs) == (4 if width else 2) and all((p != q).any() for p, q in pairs)
        values.append([critic(SEQUENCES, "float32").tolist() for critic in trainer.critics])
        assert (
            min(abs(value) for critic in values[-1] for value in critic) > 1e-5
        )  # an untrained head would give 0
        critics = {"iac": 2, "iac_shared": 0, "maac": 1}[variant]  # folders of their own
        runs.append(
            {
                "variant": variant,
                "critic_type": critic_type,
                "critics": critics,
                "sequences": SEQUENCES,
            }
        )
        runs[-1]["folder"] = f"{trainer.output_dir}/model"
    done = run("-c", RELOAD, cwd=Path(__file__).parent, stdin=json.dumps(runs))
    assert done.returncode == 0, done.stderr
    for read, expected in zip(json.loads(done.stdout.splitlines()[-1]), values, strict=True):
        given = torch.tensor(read["values"])
        torch.testing.assert_close(given, torch.tensor(expected), rtol=0, atol=1e-6, msg=str(read))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_agents_are_ordinary_models_with_their_tokenizers(variant, tmp_path):
    """A14, A15: each in a folder of its own, though both started from the same name; nothing missing or unexpected."""
    trainer = build(variant, tmp_path / "run")
    trainer.train()
    for target in (
        f"{tmp_path}/saved",
        tmp_path / "as a path",
        f"{tmp_path}/saved",
    ):  # the third replaces the first
        trainer.save_model(target)
        for i, agent in enumerate(trainer.agents):
            home = f"{target}/agent_{i}"
            loaded, info = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
            assert not any(
                info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")
            ), info
            assert torch.equal(flat(loaded), flat(agent)) and loaded.dtype == torch.float32
            tok = AutoTokenizer.from_pretrained(home)
            assert tok.get_vocab() == tokenizer("T").get_vocab() and tok("name 1") == tokenizer(
                "T"
            )("name 1")
        critics = {"iac": {"critic_0", "critic_1"}, "iac_shared": set(), "maac": {"critic_0"}}[
            variant
        ]
        assert {path.name for path in Path(target).iterdir()} == {"agent_0", "agent_1"} | critics


def test_save_model_takes_a_path_with_a_slash_at_its_end(tmp_path):
    build("maac", None).save_model(f"{tmp_path}/saved/")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        "agent_0",
        "agent_1",
        "critic_0",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# ---------------------------------------------------------------------------------------------- loading options


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_config_reaches_from_pretrained(variant, tmp_path):
    options = {
        "model_kwargs": {"attn_implementation": "eager"},
        "tokenizer_kwargs": {"model_max_length": 123},
    }
    options |= (
        {} if variant == "iac_shared" else {"critic_model_kwargs": {"attn_implementation": "sdpa"}}
    )
    options |= {"critic_value_head_hidden_dim": 5} if variant == "maac" else {}
    args = {"reference_kl_enabled": True}
    trainer, plain = (
        build(variant, tmp_path, args, model_config=options),
        build(variant, tmp_path, args),
    )
    assert {m.config._attn_implementation for m in [*trainer.agents, *trainer.references]} == {
        "eager"
    }
    assert {m.config._attn_implementation for m in plain.agents} == {"sdpa"}
    assert (
        [tok.model_max_length for tok in trainer.tokenizers]
        == [123] * 2
        != plain.tokenizers[0].model_max_length
    )
    if variant != "iac_shared":
        assert {c.backbone.config._attn_implementation for c in trainer.critics} == {"sdpa"}
        options["critic_model_kwargs"] = {"attn_implementation": "eager"}
        trainer = build(variant, tmp_path, model_config=options)
        assert {c.backbone.config._attn_implementation for c in trainer.critics} == {"eager"}
    if variant == "maac":
        assert trainer.critics[0].value_head[0].out_features == 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bfloat16_checkpoint_is_trained_in_float32(variant, tmp_path):
    """A06: at a learning rate of 1e-6, where every step would round away in bfloat16."""
    source = folder("G", "T", torch.bfloat16)
    assert next(AutoModelForCausalLM.from_pretrained(source).parameters()).dtype == torch.bfloat16
    given = {"agent_model": source} | ({} if variant == "iac_shared" else {"critic_model": source})
    args = {"agent_learning_rate": 1e-6, "critic_learning_rate": 1e-6, "num_train_epochs": 10}
    trainer = build(variant, tmp_path / "run", args, **given)
    models = [*trainer.agents, *(critic.backbone for critic in trainer.critics)]
    assert {p.dtype for m in models for p in m.parameters()} == {torch.float32}
    before = [flat(m) for m in models]
    trainer.train()
    assert len(metrics(trainer)) == 20
    for m, old in zip(models, before, strict=True):
        assert (flat(m) != old).float().mean() > 0.5


def test_a_type_that_the_user_asks_for_is_named_and_trained_in_float32(tmp_path):
    with pytest.warns(UserWarning, match=r"agents\[0\].*bfloat16.*float32"):
        trainer = build(
            "iac_shared", tmp_path, model_config={"model_kwargs": {"dtype": torch.bfloat16}}
        )
    assert trainer.agents[0].dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("iac_shared", tmp_path)
