"""The critic: what it reads, where its value is read off, its head, its loading."""

import copy
import json
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    OPTModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

import iac
import maac
from commands import run
from conftest import BEGIN, END

approx = pytest.approx
SEQUENCES = [[5, 6, 7], [8, 9, 10, 11, 12], [260, 7]]
SEPARATE = pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-separate"])
WITH_CRITIC = pytest.mark.parametrize("variant", ["iac-v-separate", "maac-v"])


def rows_of(trainer):
    with open(f"{trainer.output_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def distinct(critics):
    return list(dict.fromkeys(critics))


def flat(*modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def stirred(module, seed=3):
    """The same module, its weights a little different."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    return module


def reads(trainer):
    """A list for each distinct critic that fills with the sequences it is given."""
    seen = []
    for critic in distinct(trainer.critics):
        seen.append([])
        critic.register_forward_pre_hook(lambda _, inputs, own=seen[-1]: own.extend(inputs[0]))
    return seen


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Folders of a GPT-2 with a tokenizer of no begin token: "more" has 500 ids, "same" has 300."""
    home, folders = tmp_path_factory.mktemp("others"), {}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    for name, size in (("more", 500), ("same", 300)):
        names = [f"<{n}>" for n in range(size - 257)] + ["<stop>", *letters]
        backend = Tokenizer(models.BPE({token: n for n, token in enumerate(names)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        tok = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<stop>")
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 256, "vocab_size": size}
        with torch.random.fork_rng():
            torch.manual_seed(1)
            ids = {"eos_token_id": tok.eos_token_id, "bos_token_id": None}
            model = GPT2LMHeadModel(GPT2Config(**sizes, **ids))
        folders[name] = str(home / name)
        model.save_pretrained(folders[name])
        tok.save_pretrained(folders[name])
    return folders


# ------------------------------------------------------------------------- where the value is read


def count_tokens(backbone):
    """Make a backbone's hidden state at each position (real tokens seen so far) / 10."""

    def forward(input_ids=None, attention_mask=None, **_):
        hidden = torch.zeros(*input_ids.shape, 32)
        hidden[..., 0] = attention_mask.cumsum(-1) / 10
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=(hidden,))

    backbone.forward = forward


@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_value_is_read_at_the_last_token(variant, length, pads, make_trainer, rig, tmp_path):
    """Prompt of 4 tokens, reward 1: V gives a TD error of 0.6; Q, after 3 more tokens, of 0.3."""
    rows = [{"prompt": "zzz"}, {"prompt": "yyyyy"}][: 1 + pads // 2]  # 4 and 6 tokens
    args = {"max_new_tokens": 5, "agent_learning_rate": 0.0, "critic_learning_rate": 0.0}
    if length == 3:
        args |= {"reference_kl_enabled": True, "reference_kl_coef": 1e-9}
    given = {"train_dataset": rows, "reward_func": lambda *_, **__: 1.0}
    trainer = make_trainer(variant, tmp_path, args, **given)
    short = [70] * (length - 1) + [END]
    rig(trainer, lambda i, prompt, k: short if len(prompt) == 4 else [70] * 5)
    for critic in trainer.critics:
        count_tokens(critic.backbone)
        critic.value_head[-1].weight.data[0, 0] = 1.0
    trainer.train()
    for s in trainer.samples[:2]:
        assert len(s.prompt_ids) == 4 and len(s.completion_ids) == length
        tokens = 4 + (length if "-q" in variant else 0)
        if "maac" in variant:
            text = "[agent 1]\nzzz\n[agent 2]\nzzz"
            for i in (1, 2) if "-q" in variant else ():
                text += f"\n[answer {i}]\n{s.completion}"
            tokens = len(trainer.tokenizers[0](text).input_ids)
        assert s.old_value == approx(tokens / 10) and s.target == approx(1.0)  # the reward, once
        assert s.advantage == approx(1 - tokens / 10, abs=1e-6)
    (row,) = rows_of(trainer)
    critics = len(distinct(trainer.critics))
    for c in range(critics):  # the update reads it where collection did
        errors = [s.advantage**2 for s in trainer.samples if s.agent_idx % critics == c]
        assert row[f"critic_{c}/value_loss"] == approx(sum(errors) / len(errors), abs=1e-5)


# ------------------------------------------------------------------------------------ what it reads


def test_iacs_critic_reads_what_its_agent_reads(make_trainer, tmp_path):
    """Its own prompt, and with "q" its own answer, the stop token included; nothing of others."""
    for variant, turns in product(["iac-v-separate", "iac-q-shared"], (1, 2)):
        formatters = [lambda x, i=i: f"{'ab'[i]}: {x['prompt']}" for i in (0, 1)]
        args = {"num_turns": turns, "rollout_buffer_size": 99}
        trainer = make_trainer(variant, tmp_path / f"{variant}{turns}", args, formatters=formatters)
        seen = reads(trainer)
        trainer.train()
        for i in (0, 1):
            own = [s for s in trainer.samples if s.agent_idx == i]
            answers = [s.completion_ids if "-q" in variant else [] for s in own]
            ids = [s.prompt_ids + answer for s, answer in zip(own, answers, strict=True)]
            assert [s.critic_ids for s in own] == ids
            assert set(map(tuple, seen[i])) == set(map(tuple, ids)) and len(own) == 10 * turns


@pytest.mark.parametrize("num_agents", [1, 2, 3])
@pytest.mark.parametrize("variant", ["maac-v", "maac-q"])
def test_maacs_critic_reads_one_text_of_all_agents(variant, num_agents, make_trainer, tmp_path):
    """Exactly the documented one, with this turn's prompts, in agent 0's tokens."""
    formatters = [lambda x, i=i: f"{'abc'[i]}: {x['prompt']}" for i in range(num_agents)]
    args = {"num_agents": num_agents, "num_turns": 2, "rollout_buffer_size": 99}
    trainer = make_trainer(variant, tmp_path, args, formatters=formatters)
    (seen,) = reads(trainer)
    trainer.train()
    expected = set()
    for row, turn in product(range(10), (0, 1)):
        joint = [s for s in trainer.samples if (s.row, s.turn_idx) == (row, turn)]
        blocks = [f"[agent {s.agent_idx + 1}]\n{s.prompt}" for s in joint]
        if variant == "maac-q":
            blocks += [f"[answer {s.agent_idx + 1}]\n{s.completion}" for s in joint]
        ids = trainer.tokenizers[0]("\n".join(blocks)).input_ids
        assert ids[0] == BEGIN and all(s.critic_ids == ids for s in joint)
        expected.add(tuple(ids))
    assert set(map(tuple, seen)) == expected and len(expected) == 20
    example = "[agent 1]\n<prompt>\n[agent 2]\n<prompt>\n[answer 1]\n<answer>\n[answer 2]\n<answer>"
    assert maac.critic_text(["<prompt>"] * 2, ["<answer>"] * 2) == example
    assert repr(example)[1:-1] in maac.__doc__


@pytest.mark.parametrize("first", ["gpt2", "llama"])
def test_a_team_of_two_families_shares_texts_and_no_ids(variant, first, folders, other, make_trainer, tmp_path):
    """Rewards and critics get each agent's text as its own tokenizer decodes it."""
    agents = [folders["L"], other["more"]] if first == "llama" else [other["more"], folders["L"]]
    toks = [AutoTokenizer.from_pretrained(agent) for agent in agents]
    rewarded = []

    def reward_func(a, b):
        rewarded.append([*a, *b])
        return len(rewarded) / 10

    given = {"agents": agents, "tokenizer": toks, "reward_func": reward_func}
    if "separate" in variant:
        given["critics"] = agents
    elif "maac" in variant:
        given["critic_model"] = agents[0]
    args = {"max_new_tokens": 8}
    trainer = make_trainer(variant, tmp_path, args, **given)
    seen, before = reads(trainer), [flat(agent) for agent in trainer.agents]
    trainer.train()
    answers = [[], []]
    for s in trainer.samples:
        ids = s.completion_ids[:-1] if s.finished else s.completion_ids
        answers[s.agent_idx].append(toks[s.agent_idx].decode(ids, skip_special_tokens=True))
    assert rewarded == [list(joint) for joint in zip(*answers, strict=True)]
    large = [s for s in trainer.samples if max(s.completion_ids) >= 300]
    assert {s.agent_idx for s in large} == {agents.index(other["more"])}
    for own, old in zip(trainer.agents, before, strict=True):
        assert (flat(own) != old).any()
    for c, own in enumerate(seen):
        assert max(map(max, own)) < len(toks[c])
        if "maac" in variant:
            pairs = zip(trainer.samples[::2], trainer.samples[1::2], strict=True)
            texts = set()
            for a, b in pairs:
                said = [a.completion, b.completion] if "-q" in variant else []
                texts.add(maac.critic_text([a.prompt, b.prompt], said))
        else:
            texts = set()
            for s in trainer.samples[c::2]:
                said = toks[c].decode(s.completion_ids) if "-q" in variant else ""
                texts.add((toks[c].bos_token or "") + s.prompt + said)
        decoded = {toks[c].decode(ids, skip_special_tokens="maac" in variant) for ids in own}
        assert decoded == texts


@WITH_CRITIC
def test_a_critic_with_another_tokenizer_is_refused_naming_both(variant, folders, other, make_trainer, tmp_path):
    """Whichever of the two has more ids, and also if they have as many in another order."""
    ours = folders["L"]
    for agents, critic in (
        (ours, other["more"]),
        (other["more"], ours),
        (ours, other["same"]),
        (other["same"], ours),
    ):
        with pytest.raises(ValueError) as error:
            make_trainer(variant, tmp_path, agent_model=agents, critic_model=critic)
        message = str(error.value)
        assert "critics[0]" in message and "tokenizer" in message and agents in message
    assert critic in message
    model = AutoModel.from_pretrained(other["same"])  # in memory it still knows where it is from
    with pytest.raises(ValueError, match=r"critics\[0\] comes with the tokenizer"):
        make_trainer(variant, tmp_path, agent_model=ours, critic_model=model)


def test_one_critic_cannot_serve_agents_of_two_families(folders, other, make_trainer, tmp_path):
    given = {"agents": [folders["G"], other["more"]]}
    with pytest.raises(ValueError, match=r"critics\[1\]"):
        make_trainer("iac-v-separate", tmp_path, critic_model=folders["G"], **given)


@pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-separate", "maac-v", "maac-q"])
def test_a_critic_needs_no_more_embeddings_than_there_are_tokens(variant, llama, tokenizer, make_trainer, tmp_path):
    """Models are often padded with embeddings that stand for no token; an agent may draw those."""
    agents = [llama, copy.deepcopy(llama)]
    for agent in agents:
        agent.resize_token_embeddings(20 * len(tokenizer))
    trainer = make_trainer(variant, tmp_path, agents=agents, tokenizer=tokenizer)
    trainer.train()
    assert max(token for s in trainer.samples for token in s.completion_ids) >= 300
    assert max(token for s in trainer.samples for token in s.critic_ids) < 300


@WITH_CRITIC
def test_a_text_with_a_token_that_the_critic_does_not_embed_is_refused_by_row(
    variant, llama, tokenizer, make_trainer, tmp_path
):
    tok = copy.deepcopy(tokenizer)
    tok.add_tokens(["<new>"])
    agents = [llama, copy.deepcopy(llama)]
    for agent in agents:
        agent.resize_token_embeddings(len(tok))
    rows = [{"prompt": "old"}, {"prompt": "a <new> one"}]
    given = {"agents": agents, "tokenizer": tok, "train_dataset": rows}
    trainer = make_trainer(variant, tmp_path, **given)
    before = flat(*trainer.agents)
    with pytest.raises(ValueError, match=r"row 1.*<new>"):
        trainer.train()
    assert torch.equal(flat(*trainer.agents), before)


def test_equal_inputs_are_read_once(make_trainer, rig, tmp_path):
    """The joint answers to an item have a prompt in common; with "q" equal answers count too."""
    for variant in ("iac-v-separate", "iac-q-separate", "iac-v-shared", "maac-v", "maac-q"):
        args = {"num_generations": 4, "rollout_buffer_size": 8}
        rows = [{"prompt": "one"}, {"prompt": "another"}]
        trainer = make_trainer(variant, tmp_path / variant, args, train_dataset=rows)
        rig(trainer, lambda i, prompt, k: [70 + k // 2, END])  # two answers, twice each
        sizes = []
        critic = trainer.critics[0]
        critic.register_forward_hook(lambda m, x, output, sizes=sizes: sizes.append(len(output)))
        critic.backbone.register_forward_pre_hook(
            lambda m, args, kwargs, sizes=sizes: sizes.append(len(kwargs["input_ids"])),
            with_kwargs=True,
        )
        trainer.train()
        assert sizes[:2] == [4 if "-q" in variant else 2, 8], variant  # rows read, values given


def test_reading_equal_inputs_once_changes_no_value_and_no_gradient(model):
    critic = stirred(iac.Critic(model.base_model, None, None, seed=0))
    a, b = SEQUENCES[:2]

    def gradient(sequences, weights):
        critic.zero_grad()
        values = critic(sequences, "float32")
        (values * torch.tensor(weights)).sum().backward()
        grads = [p.grad.flatten() for p in critic.parameters() if p.grad is not None]
        return values.detach(), torch.cat(grads)

    values, grads = gradient([a, b, a], [1.0, 2.0, 3.0])
    _, separate = gradient([a, b], [4.0, 2.0])
    assert values[0] == values[2] != values[1]
    assert torch.allclose(grads, separate, atol=1e-5) and grads.abs().max() > 1


# ---------------------------------------------------------------------------------------- the head


def with_width(variant, width):
    """Arguments of make_trainer that give the variant's head a hidden layer of that width."""
    if "maac" in variant:
        return {"model_config": {"critic_value_head_hidden_dim": width}}
    name = "value_head_hidden_dim"
    return {"args": {name if "shared" in variant else f"critic_{name}": width}}


@pytest.mark.parametrize("width", [None, 8])
def test_values_are_zero_at_first_and_the_head_is_float32(variant, width, make_trainer, tmp_path):
    """Of a hidden layer only the output starts at zero; every head of a run starts differently."""
    trainer = make_trainer(variant, tmp_path, **with_width(variant, width))
    for critic in trainer.critics:
        kinds = [type(layer).__name__ for layer in critic.value_head]
        assert kinds == (["Linear", "Tanh", "Linear"] if width else ["Linear"])
        assert critic.value_head[0].weight.shape == (width or 1, 32)
        assert not critic.value_head[-1].weight.any() and not critic.value_head[-1].bias.any()
        assert {p.dtype for p in critic.value_head.parameters()} == {torch.float32}
        assert width is None or critic.value_head[0].weight.any()
        assert critic(SEQUENCES, "float32").tolist() == [0.0] * 3
    if width and "iac" in variant:
        one, two = (critic.value_head[0].weight for critic in trainer.critics)
        assert not torch.equal(one, two)
    trainer.train()
    assert {s.old_value for s in trainer.samples[:8]} == {0.0}
    assert all(s.old_value != 0 for s in trainer.samples[8:])
    assert all(critic.value_head[-1].weight.all() for critic in trainer.critics)


@pytest.mark.parametrize("width", [None, 8])
def test_the_head_is_linear_or_linear_tanh_linear(model, width):
    critic = stirred(iac.Critic(model.base_model, width, None, seed=0))
    for sequence in SEQUENCES:
        hidden = model.base_model(torch.tensor([sequence])).last_hidden_state[0, -1]
        for layer in critic.value_head[::2][:-1]:
            hidden = torch.tanh(layer.weight @ hidden + layer.bias)
        by_hand = critic.value_head[-1].weight[0] @ hidden + critic.value_head[-1].bias[0]
        assert critic([sequence], "float32").item() == approx(by_hand.item(), abs=1e-5)


def test_last_hidden_states_may_be_narrower_than_hidden_size(variant, tokenizer, make_trainer, tmp_path):
    """As those of OPT-350m are."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64}
    config = OPTConfig(vocab_size=len(tokenizer), pad_token_id=None, **sizes)
    given = {"agents": [OPTForCausalLM(config) for _ in range(2)], "tokenizer": tokenizer}
    given |= {} if "shared" in variant else {"critic_model": OPTModel(config)}
    trainer = make_trainer(variant, tmp_path, **given)
    before = [flat(critic) for critic in trainer.critics]
    assert trainer.critics[0].value_head[0].weight.shape == (1, 16)
    trainer.train()
    pairs = zip(before, trainer.critics, strict=True)
    assert all((flat(critic) != old).any() for old, critic in pairs)
    assert any(s.old_value != 0 for s in trainer.samples)


# ------------------------------------------------------------------------- how many, and from where


@WITH_CRITIC
def test_a_critic_has_no_language_model_head(variant, folders, llama, make_trainer, tmp_path):
    for source in (folders["G"], folders["L"], llama):
        agents = folders["L"] if source is llama else source
        trainer = make_trainer(variant, tmp_path, agent_model=agents, critic_model=source)
        names = [name for name, _ in trainer.critics[0].named_parameters()]
        assert not any("lm_head" in name for name in names) and "value_head.0.weight" in names
    assert trainer.critics[0].backbone is llama.base_model


@pytest.mark.parametrize("form", ["name", "names", "models", "mixed"])
@SEPARATE
def test_iacs_separate_critics_are_independent(variant, form, folders, llama, make_trainer, tmp_path):
    name, models = folders["L"], [llama.base_model, copy.deepcopy(llama.base_model)]
    lists = {"names": [name, name], "models": models, "mixed": [models[0], name]}
    given = {"critic_model": name} if form == "name" else {"critics": lists[form]}
    trainer = make_trainer(variant, tmp_path, **given)
    if form in ("models", "mixed"):
        assert trainer.critics[0].backbone is models[0]
    before = [flat(critic) for critic in trainer.critics]
    trainer.train()
    after = [flat(critic) for critic in trainer.critics]
    assert all((one != two).any() for one, two in zip(before, after, strict=True))
    assert not torch.equal(after[0], after[1])
    assert len(set(map(id, trainer.critic_optimizers))) == 2
    assert {"critic_0/value_loss", "critic_1/value_loss"} <= rows_of(trainer)[0].keys()


@SEPARATE
def test_one_model_in_memory_is_the_critic_of_all_with_one_optimiser_and_one_head(
    variant, llama, make_trainer, tmp_path
):
    trainer = make_trainer(variant, tmp_path, critic_model=llama)
    assert trainer.critics[0] is trainer.critics[1]
    assert trainer.critics[0].backbone is llama.base_model
    assert trainer.critic_optimizers[0] is trainer.critic_optimizers[1]
    groups = trainer.critic_optimizers[0].param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in trainer.critics[0].parameters())
    steps = []
    trainer.critic_optimizers[0].register_step_post_hook(lambda *_: steps.append(1))
    trainer.train()
    assert len(steps) == 2 * 3  # three updates of two agents
    names = {name for name in rows_of(trainer)[0] if name.startswith("critic_")}
    assert "critic_0/value_loss" in names and not any("critic_1" in name for name in names)


@pytest.mark.parametrize("form", ["name", "model", "list of a name", "list of a model"])
@pytest.mark.parametrize("variant", ["maac-v", "maac-q"])
def test_maac_has_one_critic(variant, form, folders, llama, make_trainer, tmp_path):
    source = llama.base_model if "model" in form else folders["L"]
    given = {"critics": [source]} if "list" in form else {"critic_model": source}
    trainer = make_trainer(variant, tmp_path, **given)
    (critic,) = distinct(trainer.critics)
    assert len(trainer.critics) == 2 and ("model" not in form or critic.backbone is source)
    before = flat(critic)
    trainer.train()
    assert (flat(critic) != before).any()


@pytest.mark.parametrize("variant", ["iac-v-shared", "iac-q-shared"])
def test_a_shared_backbone_has_one_optimiser_for_both(variant, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path)
    for i, (agent, critic) in enumerate(zip(trainer.agents, trainer.critics, strict=True)):
        assert critic.backbone is agent.base_model
        groups = trainer.agent_optimizers[i].param_groups
        held = sorted(id(p) for group in groups for p in group["params"])
        every = [*agent.parameters(), *critic.value_head.parameters()]
        assert held == sorted(map(id, every)) and len(set(held)) == len(held)
        assert trainer.critic_optimizers[i] is trainer.agent_optimizers[i]


# --------------------------------------------------------------------------------- saved and loaded

RELOAD = """
import json, sys
import iac, maac
runs = json.load(sys.stdin)
for run in runs:
    module = {"iac": iac, "maac": maac}[run["variant"][:-2].split("-")[0]]
    settings = {"critic_type": run["critic_type"], **run["settings"]}
    trainer = module.Trainer(
        agents=[f"{run['folder']}/agent_{i}" for i in (0, 1)],
        critics=[f"{run['folder']}/critic_{c}" for c in range(run["critics"])] or None,
        reward_func=lambda a, b: 0.5,
        args=module.Config(max_new_tokens=4, **settings),
    )
    run["values"] = [critic(run["sequences"], "float32").tolist() for critic in trainer.critics]
print(json.dumps(runs))
"""


def test_critics_come_back_with_their_heads_in_a_fresh_process(make_trainer, tmp_path):
    """Of every kind, from the folders of the trained models; shared ones from their agents'."""
    runs, values = [], []
    kinds = ["iac-v-separate", "iac-q-separate", "iac-v-shared", "iac-q-shared", "maac-v", "maac-q"]
    for variant, width, model in product(kinds, (None, 8), ("G", "L")):
        place = tmp_path / f"{variant}-{width}-{model}"
        trainer = make_trainer(variant, place, model=model, **with_width(variant, width))
        start = [copy.deepcopy(critic.value_head) for critic in trainer.critics]
        trainer.train()
        for old, critic in zip(start, trainer.critics, strict=True):
            pairs = list(zip(old.parameters(), critic.value_head.parameters(), strict=True))
            assert len(pairs) == (4 if width else 2) and all((p != q).any() for p, q in pairs)
        values.append([critic(SEQUENCES, "float32").tolist() for critic in trainer.critics])
        assert min(abs(value) for own in values[-1] for value in own) > 1e-5  # untrained: 0
        critics = 0 if "shared" in variant else 1 if "maac" in variant else 2
        expected = {"agent_0", "agent_1", *(f"critic_{c}" for c in range(critics))}
        assert {path.name for path in (place / "run" / "model").iterdir()} == expected
        run_ = {"variant": variant, "critic_type": variant.split("-")[1], "critics": critics}
        run_ |= {"settings": {"use_separate_critic": False} if "shared" in variant else {}}
        runs.append(run_ | {"folder": f"{place}/run/model", "sequences": SEQUENCES})
    done = run("-c", RELOAD, stdin=json.dumps(runs))
    assert done.returncode == 0, done.stderr
    for read, expected in zip(json.loads(done.stdout.splitlines()[-1]), values, strict=True):
        for own, others in zip(read["values"], expected, strict=True):
            assert own == approx(others, abs=1e-6), read["folder"]


def test_a_saved_critic_is_an_ordinary_backbone_and_trains_on(make_trainer, tmp_path):
    for variant in ("iac-v-separate", "maac-q"):
        trainer = make_trainer(variant, tmp_path / variant)
        trainer.train()
        home = f"{trainer.output_dir}/model/critic_0"
        backbone, info = AutoModel.from_pretrained(home, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(flat(backbone), flat(trainer.critics[0].backbone))
        values = trainer.critics[0](SEQUENCES, "float32")
        again = make_trainer(variant, tmp_path / f"{variant} again", critic_model=home)
        assert torch.equal(again.critics[0](SEQUENCES, "float32"), values) and values.all()
        again.train()
        assert not torch.equal(again.critics[0](SEQUENCES, "float32"), values)


def test_saved_agents_are_ordinary_models_with_their_tokenizers(variant, tokenizer, make_trainer, tmp_path):
    """Each in a folder of its own, though both started from one; nothing missing or unexpected."""
    trainer = make_trainer(variant, tmp_path, model="G")
    trainer.train()
    for target in (f"{tmp_path}/saved", tmp_path / "a path", f"{tmp_path}/saved/"):
        trainer.save_model(target)  # the third time over the first
        for i, agent in enumerate(trainer.agents):
            home = f"{target}/agent_{i}"
            loaded, info = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
            assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            assert torch.equal(flat(loaded), flat(agent)) and loaded.dtype == torch.float32
            tok = AutoTokenizer.from_pretrained(home)
            assert tok.get_vocab() == tokenizer.get_vocab()
            assert tok("name 1") == tokenizer("name 1") and tok.name_or_path == home


def test_a_saved_head_of_another_width_than_asked_for_is_an_error(make_trainer, tmp_path):
    """A width that is not asked for is that of the saved head."""
    for variant, width in (("iac-v-separate", 8), ("maac-v", 8), ("iac-v-separate", None)):
        place = tmp_path / f"{variant}{width}"
        trainer = make_trainer(variant, place, **with_width(variant, width))
        trainer.save_model(place / "saved")
        given = {"critic_model": f"{place}/saved/critic_0"}
        again = make_trainer(variant, place, **given)
        assert again.critics[0].value_head[0].weight.shape == (width or 1, 32)
        with pytest.raises((ValueError, RuntimeError)):
            make_trainer(variant, place, **given, **with_width(variant, 6))
