"""One update against gradients worked out one sample at a time, the order of its steps, clipping.

Generation is rigged, so that every pass that is seen is one that scores or values.
"""

import collections
import copy
import itertools
import json
import math
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import (
    VARIANTS,
    answer,
    batches,
    flat,
    optimizers,
    parameters_of,
    reward_by_text,
    stir,
    watch,
)

EVERYTHING = 99  # a buffer that only the end of the epoch empties
approx = pytest.approx
some = pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-shared", "maac-q"])


def reward_each(*completions):
    """A number for each agent and each joint answer."""
    return [
        [sum(map(ord, text)) % (7 + 4 * i) / (7 + 4 * i) - i / 2 for text in own] for i, own in enumerate(completions)
    ]


# ------------------------------------------------------------------ gradients, one sample at a time


class Hand:
    """The formulas once more, for one unpadded sample at a time, with nothing of the project's."""

    def __init__(self, trainer, reference):
        self.trainer, self.args, self.reference = trainer, trainer.args, reference
        self.samples = trainer.samples
        self.clipped = 0  # how often the clipped error was the larger one
        self.agents, self.critics = copy.deepcopy((trainer.agents, trainer.critics))  # as they drew
        self.is_joint = not hasattr(self.args, "use_separate_critic")  # MAAC's

    def prompt_ids(self, s):
        return self.trainer.tokenizers[s.agent_idx](s.prompt).input_ids

    def logprob(self, agent, s):
        prompt, total = self.prompt_ids(s), 0.0
        logits = agent(input_ids=torch.tensor([prompt + s.completion_ids])).logits[0]
        for k, token in enumerate(s.completion_ids):
            scaled = logits[len(prompt) + k - 1] / self.args.temperature
            total = total + scaled.log_softmax(-1)[token]
        return total

    def value(self, critics, s):
        answers, critic = self.args.critic_type == "q", critics[s.agent_idx]
        if self.is_joint:
            joint = sorted(self.joint[self.place(s)], key=lambda x: x.agent_idx)
            blocks = [f"[agent {x.agent_idx + 1}]\n{x.prompt}" for x in joint]
            blocks += [f"[answer {x.agent_idx + 1}]\n{x.completion}" for x in joint if answers]
            ids = self.trainer.tokenizers[0]("\n".join(blocks)).input_ids
        else:
            ids = self.prompt_ids(s) + (s.completion_ids if answers else [])
        hidden = critic.backbone(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return critic.value_head(hidden)[0]

    def place(self, s, later=0):
        return s.row, s.turn_idx + later, s.generation_idx

    @torch.no_grad()
    def collect(self):
        """C_old, targets and advantages of all samples, by the weights they were drawn with."""
        self.joint = collections.defaultdict(list)
        for s in self.samples:
            self.joint[self.place(s)].append(s)
        old = {id(s): self.value(self.critics, s).item() for s in self.samples}
        targets, advantages = {}, {}
        for s in self.samples:
            kl = self.logprob(self.agents[s.agent_idx], s) - self.logprob(self.reference, s)
            completions = [[x.completion] for x in self.joint[self.place(s)]]
            reward = reward_each(*completions)[s.agent_idx][0]
            later = [x for x in self.joint[self.place(s, 1)] if x.agent_idx == s.agent_idx]
            bootstrap = self.args.discount * old[id(later[0])] if later else 0.0
            targets[id(s)] = reward - self.args.reference_kl_coef * kl.item() + bootstrap
        for s in self.samples:
            key = (s.agent_idx, s.turn_idx)
            group = [x for x in self.samples if (x.agent_idx, x.turn_idx) == key]
            errors = [targets[id(x)] - old[id(x)] for x in group]
            advantages[id(s)] = error = targets[id(s)] - old[id(s)]
            if self.args.advantage_normalization:
                spread = statistics.pstdev(errors)
                advantages[id(s)] = (error - statistics.fmean(errors)) / spread
        self.old, self.targets, self.advantages = old, targets, advantages

    def actor_loss(self, batch):
        agents = self.trainer.agents
        terms = [self.logprob(agents[s.agent_idx], s) * self.advantages[id(s)] for s in batch]
        return -sum(terms) / len(batch)

    def critic_loss(self, batch, clip):
        losses = []
        for s in batch:
            y, old = self.targets[id(s)], self.old[id(s)]
            value = self.value(self.trainer.critics, s)
            losses.append((value - y) ** 2)
            if clip is not None:
                clipped = (old + torch.clamp(value - old, -clip, clip) - y) ** 2
                self.clipped += bool(clipped > losses[-1])
                losses[-1] = torch.maximum(losses[-1], clipped)
        return self.args.value_loss_coef * sum(losses) / len(batch)


CASES = {
    "two turns": {
        "num_turns": 2,
        "early_termination_threshold": 0.25,
        "discount": 0.5,
        "micro_batch_size": 3,
    },
    "three generations": {
        "num_generations": 3,
        "advantage_normalization": False,
        "train_batch_size": 12,
    },
}
CRITICS = [*VARIANTS, "iac-q-one"]  # the last: one critic in memory, for both agents


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", CRITICS)
def test_gradients_equal_those_of_one_sample_at_a_time(variant, case, make_trainer, rig, folders, tmp_path):
    """Weights move from step to step; C_old, targets and advantages do not."""
    model = "G" if variant[0] == "i" and case == "two turns" else "L"
    args = {
        "temperature": 0.7,
        "reference_kl_enabled": True,
        "reference_kl_coef": 0.3,
        "max_grad_norm": None,
        "train_batch_size": 4,
        "rollout_buffer_size": EVERYTHING,
        "agent_learning_rate": 3e-3,
    }
    clip = 0.02 if "shared" in variant else None
    args |= CASES[case] | ({"value_clip_range": clip} if clip else {})
    load = lambda: AutoModelForCausalLM.from_pretrained(folders[model]).eval()  # noqa: E731
    given = {"critic_model": load()} if "one" in variant else {}
    trainer = make_trainer(variant, tmp_path, args, model, reward_func=reward_each, **given)
    rig(trainer, answer)
    stir(trainer)
    events, differences, sizes = watch(trainer), [], []
    hand = Hand(trainer, load())

    def check(name, optimizer):
        if not differences:
            hand.collect()
        batch = batches(trainer, events)[-1]
        loss = hand.actor_loss(batch) if "agent" in name else hand.critic_loss(batch, None)
        if clip:
            loss = loss + hand.critic_loss(batch, clip)
        expected = torch.autograd.grad(loss, parameters_of(optimizer), allow_unused=True)
        for p, gradient in zip(parameters_of(optimizer), expected, strict=True):
            got, gradient = (torch.zeros(1) if g is None else g for g in (p.grad, gradient))
            differences.append((got - gradient).abs().max().item())
            sizes.append(gradient.abs().max().item())

    for name, optimizer in optimizers(trainer).items():
        optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: check(name, optimizer))
    trainer.train()
    assert max(differences) < 1e-5 < 0.1 < max(sizes)
    for s in trainer.samples:
        assert s.old_value == approx(hand.old[id(s)], abs=1e-5)
        assert s.target == approx(hand.targets[id(s)], abs=1e-5)
        assert s.advantage == approx(hand.targets[id(s)] - hand.old[id(s)], abs=1e-5)
    turns = collections.Counter(s.turn_idx for s in trainer.samples if s.agent_idx == 0)
    if case == "two turns":
        assert turns[0] == 10 and 2 < turns[1] < 10  # some ended early
        assert max(len(event[3]) for event in events if event[0] == "pass") == 3
    else:
        assert turns == {0: 30}
    steps = 2 * sum(math.ceil(count / trainer.args.train_batch_size) for count in turns.values())
    assert sum(event[0] == "step" for event in events) == steps * (1 if clip else 2)
    assert min(abs(s.reference_kl) for s in trainer.samples) > 1e-4
    assert (hand.clipped > 3) == bool(clip)


def gradients(make_trainer, rig, variant, home, args):
    """The gradient at every step, the weights standing still."""
    still = {"agent_learning_rate": 0.0, "critic_learning_rate": 0.0}
    trainer, got = make_trainer(variant, home, still | args), []
    rig(trainer, answer)
    stir(trainer)

    def keep(optimizer, *_):
        got.append(torch.cat([p.grad.flatten() for p in parameters_of(optimizer)]))

    for optimizer in optimizers(trainer).values():
        optimizer.register_step_pre_hook(keep)
    trainer.train()
    return got


def test_micro_batches_do_not_change_the_gradient(variant, make_trainer, rig, tmp_path):
    args = {"rollout_buffer_size": EVERYTHING, "max_grad_norm": None}
    whole, *pieces = (
        gradients(make_trainer, rig, variant, tmp_path / str(size), args | {"micro_batch_size": size})
        for size in (None, 1, 3)
    )
    for other in pieces:
        for a, b in zip(whole, other, strict=True):
            assert a.abs().max() > 0.1 and torch.allclose(a, b, atol=3e-6)


def test_gradients_are_clipped_per_model(variant, make_trainer, rig, tmp_path):
    free, clipped, loose = (
        gradients(make_trainer, rig, variant, tmp_path / str(x), {"max_grad_norm": x}) for x in (None, 0.1, 1e6)
    )
    for a, b, c in zip(free, clipped, loose, strict=True):
        assert a.norm() > 0.1 and torch.equal(a, c)
        assert torch.allclose(b, a * (0.1 / a.norm()), rtol=1e-3)


@some
@pytest.mark.parametrize("broken", ["agent", "critic"])
def test_a_gradient_that_is_not_finite_is_named_and_no_step_taken(variant, broken, make_trainer, rig, tmp_path):
    trainer = make_trainer(variant, tmp_path)
    rig(trainer, answer)
    model = trainer.agents[0] if broken == "agent" else trainer.critics[0].value_head[-1]
    next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    name = "agent" if broken == "agent" or "shared" in variant else "critic"
    part = [trainer.agents[0] if name == "agent" else trainer.critics[0]]
    before = flat(part)
    with pytest.raises(FloatingPointError, match=f"{name}_0/grad_norm"):
        trainer.train()
    assert torch.equal(before, flat(part))


def test_optimizers_hold_what_trains_at_its_learning_rate(variant, make_trainer, tmp_path):
    rates = {"agent_learning_rate": 1e-3, "critic_learning_rate": 1e-2}
    trainer = make_trainer(variant, tmp_path, rates | {"dtype": "bfloat16"})
    found, shared = optimizers(trainer), "shared" in variant
    assert len(found) == (2 if shared else 3 if "maac" in variant else 4)
    owners = collections.Counter(id(p) for o in found.values() for p in parameters_of(o))
    assert set(owners.values()) == {1}  # no weight has two optimisers
    for name, optimizer in found.items():
        part, index = name.split()
        models = {"agent": trainer.agents, "critic": trainer.critics}[part]
        modules = [models[int(index)], *([trainer.critics[int(index)].value_head] * shared)]
        held = {id(p) for p in parameters_of(optimizer)}
        assert held == {id(p) for module in modules for p in module.parameters()}
        assert {p.dtype for p in parameters_of(optimizer)} == {torch.float32}
        assert type(optimizer) is torch.optim.AdamW
        groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        assert groups == [(1e-3 if part == "agent" else 1e-2, 0.0)]
    modules = [m for part in (*trainer.agents, *trainer.critics) for m in part.children()]
    assert not any(m.training for m in modules if not isinstance(m, torch.nn.Sequential))


def test_one_critic_in_memory_gets_one_optimiser(make_trainer, llama, rig, tmp_path):
    """It stands for both agents, learns from the samples of both, and is saved once."""
    trainer = make_trainer("iac-v-separate", tmp_path, critic_model=llama)
    rig(trainer, answer)
    assert trainer.critics[0] is trainer.critics[1]
    assert trainer.critic_optimizers[0] is trainer.critic_optimizers[1]
    events = watch(trainer)
    trainer.train()  # 4, 4 and 2 rows
    steps = [event[1] for event in events if event[0] == "step"]
    assert steps == ["agent 0", "critic 0", "agent 1", "critic 0"] * 3
    assert (tmp_path / "run/model/critic_0").exists()
    assert not (tmp_path / "run/model/critic_1").exists()


def test_equal_advantages_give_no_step(variant, make_trainer, rig, tmp_path):
    """Normalised they are 0, to the bit: AdamW would make a full step of a rest of rounding."""
    args = {"value_loss_coef": 0.0} if "shared" in variant else {}
    args |= {"num_generations": 3, "rollout_buffer_size": EVERYTHING}
    trainer = make_trainer(variant, tmp_path, args, reward_func=lambda a, b: 0.3)
    rig(trainer, answer)
    actors, critics = flat(trainer.agents), flat(trainer.critics)
    trainer.train()
    assert torch.equal(actors, flat(trainer.agents))
    assert torch.equal(critics, flat(trainer.critics)) == ("shared" in variant)


@some
def test_a_single_advantage_is_left_as_it_is(variant, make_trainer, rig, tmp_path):
    """A group of one has no spread: it is trained on as it is, and nothing becomes NaN."""
    trainer = make_trainer(variant, tmp_path, {"rollout_buffer_size": 1})
    rig(trainer, answer)
    before = flat(trainer.agents)
    trainer.train()
    after = flat(trainer.agents)
    assert after.isfinite().all() and not torch.equal(before, after)
    assert trainer.counts.updates == 10


@some
def test_weights_stay_float32_under_bfloat16_arithmetic(variant, make_trainer, rig, tmp_path):
    """Steps of 1e-6 would vanish in weights of bfloat16: here most entries move."""
    rates = {"agent_learning_rate": 1e-6, "critic_learning_rate": 1e-6}
    trainer = make_trainer(variant, tmp_path, rates | {"dtype": "bfloat16"})
    rig(trainer, answer)
    stir(trainer)
    before = [p.detach().clone() for agent in trainer.agents for p in agent.parameters()]
    trainer.train()
    after = [p.detach() for agent in trainer.agents for p in agent.parameters()]
    assert {p.dtype for p in after} == {torch.float32}
    matrices = [(p, q) for p, q in zip(before, after, strict=True) if p.shape == (32, 32)]
    assert matrices and all((p != q).float().mean() > 0.5 for p, q in matrices)


# ---------------------------------------------------------------------------------------- the order


def test_order_of_the_steps(variant, make_trainer, rig, tmp_path):
    """Agent by agent, turn by turn, in shuffled mini-batches: actor step, critic step."""
    args = {"num_turns": 2, "rollout_buffer_size": EVERYTHING, "train_batch_size": 4}
    trainer = make_trainer(variant, tmp_path, args | {"num_train_epochs": 2})
    rig(trainer, answer)
    events, seen = watch(trainer), []
    trainer.metrics_callback = lambda samples: seen.extend(samples) or {}
    trainer.train()
    critic = {0: "critic 0", 1: "critic 0" if "maac" in variant else "critic 1"}
    expected = [f"agent {i}" for i in (0, 1) for _ in range(6)]
    if "shared" not in variant:
        expected = [name for i in (0, 1) for _ in range(6) for name in (f"agent {i}", critic[i])]
    assert [event[1] for event in events if event[0] == "step"] == expected * 2
    by_ids = {(s.agent_idx, *s.prompt_ids, *s.completion_ids): s for s in seen}
    mini_batches, read = [], []  # the samples that agents are scored on, what critics read beside
    for kind, name, *details in events:
        if kind == "pass" and details[0] and "agent" in name:
            mini_batches.append([by_ids[(int(name[-1]), *ids)] for ids in details[1]])
        elif kind == "pass" and details[0]:
            read.append(set(details[1]))
    assert read == [{tuple(s.critic_ids) for s in batch} for batch in mini_batches]
    assert [len(batch) for batch in mini_batches] == [4, 4, 2] * 8
    kinds = [{(s.agent_idx, s.turn_idx) for s in batch} for batch in mini_batches]
    assert kinds == [{(i, turn)} for i in (0, 1) for turn in (0, 1) for _ in range(3)] * 2
    orders = [tuple(s.row for batch in mini_batches[start : start + 3] for s in batch) for start in range(0, 24, 3)]
    assert all(sorted(order) == list(range(10)) != list(order) for order in orders)
    assert len(set(orders)) == 8  # every group is shuffled anew


OPTIONS = {
    "one turn": {},
    "three generations": {"num_generations": 3},
    "two turns": {"num_turns": 2, "early_termination_threshold": 0.55},
}


@pytest.mark.parametrize(
    ("variant", "option"),
    [*itertools.product(VARIANTS, ["two turns"]), *itertools.product(VARIANTS[1::3], OPTIONS)],
)
def test_items_batched_are_trained_on_like_items_one_by_one(variant, option, make_trainer, rig, tmp_path):
    """Prompts of several lengths: padding changes no score, no value, no metric and no step."""

    def run(rollout_batch_size):
        args = {"rollout_batch_size": rollout_batch_size, "rollout_buffer_size": 4}
        args |= {
            "agent_learning_rate": 1e-4,
            "critic_learning_rate": 1e-4,
        }  # AdamW adds to rounding
        args |= {"eval_interval": 3, "reference_kl_enabled": True, "num_train_epochs": 2}
        data = [{"prompt": f"Row {n} " + "so on " * (n % 3)} for n in range(7)]
        home = tmp_path / str(rollout_batch_size)
        given = {"train_dataset": data, "eval_dataset": data[:3]}
        trainer = make_trainer(variant, home, args | OPTIONS[option], **given)
        rig(trainer, answer)
        stir(trainer)
        events = watch(trainer)
        trainer.train()
        lines = (home / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [{name: x for name, x in json.loads(line).items() if "time/" not in name} for line in lines]
        return trainer, events, rows

    (one, one_events, one_rows), (many, many_events, many_rows) = run(1), run(None)
    trained = [s for s in one.samples if s.old_value]  # evaluation needs no values
    assert len(one.samples) > len(trained) > 20
    generations = range(OPTIONS[option].get("num_generations", 1))
    rows = {(row, g) for row in range(7) for g in generations}
    assert {(s.row, s.generation_idx) for s in trained} == rows
    second = sum(s.turn_idx for s in trained)
    assert 4 < second < 24 if option == "two turns" else second == 0  # some of 28 end early
    for a, b in zip(one.samples, many.samples, strict=True):
        for name in vars(a):
            assert getattr(a, name) == approx(getattr(b, name), abs=1e-5), (name, a, b)
    steps = [[e for e in events if e[0] == "step" or e[2]] for events in (one_events, many_events)]
    assert len(steps[0]) >= 16 and steps[0] == steps[1]
    for a, b in zip(one_rows, many_rows, strict=True):
        assert a == approx(b, abs=1e-4, rel=1e-4)
    widest = [max(len(e[3]) for e in events if e[0] == "pass" and not e[2]) for events in (one_events, many_events)]
    assert widest[1] > widest[0]  # the one was batched, the other not


def test_identical_critic_inputs_are_read_once(variant, make_trainer, rig, tmp_path):
    """Three rows, two of them alike, three answers each: V reads two texts, Q all that differ."""
    rows = [{"prompt": text} for text in ("same", "other prompt", "same")]
    args = {"num_generations": 3, "rollout_buffer_size": EVERYTHING}
    trainer = make_trainer(variant, tmp_path, args, train_dataset=rows)
    rig(trainer, answer)
    stir(trainer)
    events = watch(trainer)
    trainer.train()
    passes = [e[3] for e in events if e[0] == "pass" and not e[2] and "critic" in e[1]]
    assert len(passes) == (1 if "maac" in variant else 2)  # one for each critic, after all turns
    assert all(len(set(sequences)) == len(sequences) for sequences in passes)
    own = [s for s in trainer.samples if s.agent_idx == 0]
    texts = {tuple(s.critic_ids) for s in own}
    assert set(passes[0]) == texts
    assert len(texts) == 2 if "-v" in variant else len(texts) > 5
    assert len({round(s.old_value, 6) for s in own}) == len(texts)


@some
@pytest.mark.parametrize(("enabled", "coef", "count"), [(False, 0.1, 0), (True, 0.0, 0), (True, 0.1, 2)])
def test_reference_models_exist_only_if_they_count(
    variant, enabled, coef, count, make_trainer, tokenizer, llama, folders, tmp_path, monkeypatch
):
    """They are frozen copies of the agents as they came: named ones are loaded, others copied."""
    loaded, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    args = {"reference_kl_enabled": enabled, "reference_kl_coef": coef}
    given = {"agents": [llama, folders["L"]], "tokenizer": tokenizer, "train_dataset": []}
    trainer = make_trainer(variant, tmp_path, args, **given)
    assert len(trainer.references) == count and len(loaded) == 1 + count // 2
    assert trainer.agents[0] is llama
    owned = {id(p) for o in optimizers(trainer).values() for p in parameters_of(o)}
    for agent, reference in zip(trainer.agents, trainer.references, strict=False):
        assert torch.equal(flat([agent]), flat([reference]))
        assert not owned & {id(p) for p in reference.parameters()}


def test_rewards_per_agent_move_their_own_agents(make_trainer, rig, tmp_path):
    """Agent 1 is always paid the same: only agent 0 moves."""

    def reward(a, b):
        return [[reward_by_text([text])[0] for text in a], [0.5] * len(b)]

    for variant in ("iac-v-separate", "maac-v"):
        args = {"critic_learning_rate": 0.0}
        trainer = make_trainer(variant, tmp_path / variant, args, reward_func=reward)
        rig(trainer, answer)
        before = [flat([agent]) for agent in trainer.agents]
        trainer.train()
        after = [flat([agent]) for agent in trainer.agents]
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True]
