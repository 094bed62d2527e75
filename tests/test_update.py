"""One update against gradients worked out one sample at a time; collection, batched and one by one; the order of both.

Generation is rigged throughout, so that every pass that is seen is one that scores or values.
"""

import collections
import copy
import gc
import json
import math
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

EVERYTHING = 99  # a buffer that only the end of the epoch empties
approx = pytest.approx


def answer(i, prompt, k):
    """One to four tokens that depend on the agent, the prompt and the generation; the shorter ones end by id 1."""
    seed = sum(prompt) + i + k
    tokens = [40 + (seed * (j + 3)) % 200 for j in range(1 + seed % 4)]
    return tokens if len(tokens) == 4 else [*tokens, 1]


def reward_each(a, b):
    """A number for each agent."""
    return [sum(map(ord, a[0])) % 7 / 7, sum(map(ord, b[0])) % 11 / 11 - 0.5]


def watch(trainer):
    """A list that fills with what happens: ("pass", model, with gradient, sequences) and ("step", optimiser)."""
    events, models = [], {f"agent {i}": agent.base_model for i, agent in enumerate(trainer.agents)}
    for c, critic in enumerate(trainer.critics):
        if critic.backbone not in models.values():
            models[f"critic {c}"] = critic.backbone
    models |= {f"reference {i}": model.base_model for i, model in enumerate(trainer.references)}

    def see(name, args, kwargs):
        if kwargs.get("attention_mask") is None:
            return  # a pass of the test's own, on one sequence without padding
        ids, mask = args[0] if args else kwargs["input_ids"], kwargs["attention_mask"].bool()
        sequences = [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]
        events.append(("pass", name, torch.is_grad_enabled(), sequences))

    for name, model in models.items():
        model.register_forward_pre_hook(
            lambda _, a, k, name=name: see(name, a, k), with_kwargs=True
        )
    for name, optimizer in optimizers(trainer).items():
        optimizer.register_step_pre_hook(lambda *_, name=name: events.append(("step", name)))
    return events


def optimizers(trainer):
    named = {f"agent {i}": optimizer for i, optimizer in enumerate(trainer.agent_optimizers)}
    return named | {
        f"critic {c}": optimizer for c, optimizer in enumerate(trainer.critic_optimizers)
    }


def stir(trainer):
    """Move agents and value heads off their initial weights: KL and values are not 0 then."""
    generator = torch.Generator().manual_seed(5)
    for parameter in [
        p
        for m in [*trainer.agents, *(c.value_head for c in trainer.critics)]
        for p in m.parameters()
    ]:
        parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


# ---------------------------------------------------------------------------- gradients, one sample at a time


class Hand:
    """The formulas of the design once more, for one unpadded sample at a time and nothing of the project's."""

    def __init__(self, trainer, reference):
        self.trainer, self.args, self.reference = trainer, trainer.args, reference
        self.samples, self.clipped = (
            trainer.samples,
            0,
        )  # how often the clipped error was the larger one
        self.agents, self.critics = copy.deepcopy(
            (trainer.agents, trainer.critics)
        )  # as they collect

    def prompt_ids(self, s):
        return self.trainer.tokenizers[s.agent_idx](s.prompt).input_ids

    def logprob(self, agent, s):
        prompt, total = self.prompt_ids(s), 0.0
        logits = agent(input_ids=torch.tensor([prompt + s.completion_ids])).logits[0]
        for k, token in enumerate(s.completion_ids):
            total = (
                total + (logits[len(prompt) + k - 1] / self.args.temperature).log_softmax(-1)[token]
            )
        return total

    def value(self, critics, s):
        answers = self.args.critic_type == "q"
        if hasattr(self.args, "use_separate_critic"):
            critic, ids = (
                critics[s.agent_idx],
                self.prompt_ids(s) + (s.completion_ids if answers else []),
            )
        else:
            joint = sorted(self.joint[s.row, s.turn_idx], key=lambda x: x.agent_idx)
            text = "\n".join(f"[agent {x.agent_idx + 1}]\n{x.prompt}" for x in joint)
            text += "".join(
                f"\n[answer {x.agent_idx + 1}]\n{x.completion}" for x in joint if answers
            )
            critic, ids = critics[0], self.trainer.tokenizers[0](text).input_ids
        return critic.value_head(
            critic.backbone(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        )[0]

    @torch.no_grad()
    def collect(self):
        """C_old, targets and normalised advantages of all samples, by the weights they were drawn with."""
        self.joint = collections.defaultdict(list)
        for s in self.samples:
            self.joint[s.row, s.turn_idx].append(s)
        old = {id(s): self.value(self.critics, s).item() for s in self.samples}
        targets, advantages = {}, {}
        for s in self.samples:
            kl = self.logprob(self.agents[s.agent_idx], s) - self.logprob(self.reference, s)
            reward = reward_each(*([x.completion] for x in self.joint[s.row, s.turn_idx]))[
                s.agent_idx
            ]
            later = [x for x in self.joint[s.row, s.turn_idx + 1] if x.agent_idx == s.agent_idx]
            bootstrap = self.args.discount * old[id(later[0])] if later else 0.0
            targets[id(s)] = reward - self.args.reference_kl_coef * kl.item() + bootstrap
        for s in self.samples:
            group = [
                x for x in self.samples if (x.agent_idx, x.turn_idx) == (s.agent_idx, s.turn_idx)
            ]
            errors = [targets[id(x)] - old[id(x)] for x in group]
            error = targets[id(s)] - old[id(s)]
            advantages[id(s)] = (error - statistics.fmean(errors)) / statistics.pstdev(errors)
        self.old, self.targets, self.advantages = old, targets, advantages

    def actor_loss(self, batch):
        agents = self.trainer.agents
        terms = [self.logprob(agents[s.agent_idx], s) * self.advantages[id(s)] for s in batch]
        return -sum(terms) / len(batch)

    def critic_loss(self, batch, clip):
        losses = []
        for s in batch:
            y, old, value = (
                self.targets[id(s)],
                self.old[id(s)],
                self.value(self.trainer.critics, s),
            )
            losses.append((value - y) ** 2)
            if clip is not None:
                clipped = (old + torch.clamp(value - old, -clip, clip) - y) ** 2
                self.clipped += bool(clipped > losses[-1])
                losses[-1] = torch.maximum(losses[-1], clipped)
        return self.args.value_loss_coef * sum(losses) / len(batch)


@pytest.mark.parametrize("micro", [None, 3])
def test_gradients_equal_those_of_one_sample_at_a_time(
    variant, micro, make_trainer, rig, folders, tmp_path
):
    """Two turns, some episodes ending early; weights move from step to step, C_old and the advantages do not."""
    model = "G" if "iac" in variant else "L"
    args = {
        "num_turns": 2,
        "early_termination_threshold": 0.25,
        "discount": 0.5,
        "temperature": 0.7,
    }
    args |= {
        "reference_kl_enabled": True,
        "reference_kl_coef": 0.3,
        "max_grad_norm": None,
        "train_batch_size": 4,
    }
    args |= {
        "rollout_buffer_size": EVERYTHING,
        "micro_batch_size": micro,
        "agent_learning_rate": 3e-3,
    }
    args |= {"value_clip_range": 0.02} if "shared" in variant else {}
    trainer = make_trainer(variant, tmp_path, args, model=model, reward_func=reward_each)
    rig(trainer, answer)
    stir(trainer)
    events, differences = watch(trainer), []
    hand = Hand(trainer, AutoModelForCausalLM.from_pretrained(folders[model]).eval())

    def check(name, optimizer):
        if not differences:
            hand.collect()
        batch = batches(trainer, events)[-1]
        loss = hand.actor_loss(batch) if "agent" in name else hand.critic_loss(batch, None)
        if "shared" in variant:
            loss = loss + hand.critic_loss(batch, 0.02)
        expected = torch.autograd.grad(loss, parameters_of(optimizer), allow_unused=True)
        for p, gradient in zip(parameters_of(optimizer), expected, strict=True):
            got, gradient = (torch.zeros(1) if g is None else g for g in (p.grad, gradient))
            differences.append((got - gradient).abs().max().item())

    for name, optimizer in optimizers(trainer).items():
        optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: check(name, optimizer))
    trainer.train()
    for s in trainer.samples:
        assert s.old_value == approx(hand.old[id(s)], abs=1e-5) and s.target == approx(
            hand.targets[id(s)], abs=1e-5
        )
    turns = collections.Counter(s.turn_idx for s in trainer.samples if s.agent_idx == 0)
    assert turns[0] == 10 and 4 < turns[1] < 10  # some ended early
    steps = 2 * sum(math.ceil(count / 4) for count in turns.values())
    assert sum(event[0] == "step" for event in events) == steps * (1 if "shared" in variant else 2)
    assert max(differences) < 1e-5
    assert min(abs(s.reference_kl) for s in trainer.samples) > 1e-4 and (hand.clipped > 3) == (
        "shared" in variant
    )
    assert max(len(event[3]) for event in events if event[0] == "pass") == (micro or 10)


def batches(trainer, events):
    """The samples of each mini-batch, read off the agents' passes with gradients between two of their steps."""
    by_ids = {(s.agent_idx, *s.prompt_ids, *s.completion_ids): s for s in trainer.samples}
    assert len(by_ids) == len(trainer.samples)
    found, waiting = [], []
    for kind, name, *details in events:
        if "agent" in name and kind == "pass" and details[0]:
            waiting += [by_ids[(int(name[-1]), *sequence)] for sequence in details[1]]
        elif "agent" in name and kind == "step":
            found, waiting = [*found, waiting], []
    return found


@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_do_not_change_the_gradient(variant, micro, make_trainer, rig, tmp_path):
    def gradients(size):
        args = {"micro_batch_size": size, "rollout_buffer_size": EVERYTHING, "max_grad_norm": None}
        args |= {"agent_learning_rate": 0.0, "critic_learning_rate": 0.0}
        trainer, got = make_trainer(variant, tmp_path / str(size), args), []
        rig(trainer, answer)
        stir(trainer)
        for optimizer in optimizers(trainer).values():
            optimizer.register_step_pre_hook(
                lambda o, *_: got.extend(p.grad.flatten() for p in parameters_of(o))
            )
        trainer.train()
        return torch.cat(got)

    whole, pieces = gradients(None), gradients(micro)
    assert whole.abs().max() > 0.1 and torch.allclose(whole, pieces, atol=3e-6)


def test_gradients_are_clipped_per_model(variant, make_trainer, rig, tmp_path):
    def norms(limit):
        args = {"max_grad_norm": limit, "agent_learning_rate": 0.0, "critic_learning_rate": 0.0}
        trainer, got = make_trainer(variant, tmp_path / str(limit), args), []
        rig(trainer, answer)
        stir(trainer)
        for optimizer in optimizers(trainer).values():
            optimizer.register_step_pre_hook(
                lambda o, *_: got.append(torch.cat([p.grad.flatten() for p in parameters_of(o)]))
            )
        trainer.train()
        return torch.stack([gradient.norm() for gradient in got])

    free, clipped = norms(None), norms(0.1)
    assert (free > 0.1).all() and torch.allclose(clipped, torch.full_like(clipped, 0.1), rtol=1e-3)


def test_optimizers_hold_what_trains_at_its_learning_rate(variant, make_trainer, tmp_path):
    trainer = make_trainer(
        variant, tmp_path, {"agent_learning_rate": 1e-3, "critic_learning_rate": 1e-2}
    )
    shared, found = "shared" in variant, optimizers(trainer)
    assert len(found) == {"iac-v-shared": 2, "iac-q-shared": 2, "maac-v": 3, "maac-q": 3}.get(
        variant, 4
    )
    for name, optimizer in found.items():
        part, index = name.split()
        models = {"agent": trainer.agents, "critic": trainer.critics}[part]
        modules = [
            models[int(index)],
            *([trainer.critics[int(index)].value_head] if shared else []),
        ]
        held = {id(p) for p in parameters_of(optimizer)}
        assert held == {id(p) for module in modules for p in module.parameters()}
        assert type(optimizer) is torch.optim.AdamW and all(
            p.dtype == torch.float32 for p in parameters_of(optimizer)
        )
        rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        assert rates == [(1e-3 if part == "agent" else 1e-2, 0.0)]
    backbones = [*trainer.agents, *(critic.backbone for critic in trainer.critics)]
    assert not any(
        module.training for backbone in backbones for module in backbone.modules()
    )  # no dropout


# -------------------------------------------------------------------------------------------------- the order


def test_order_of_the_steps(variant, make_trainer, rig, tmp_path):
    """Agent by agent, turn by turn, in shuffled mini-batches: an actor step, then a critic step on the same samples."""
    args = {"num_turns": 2, "rollout_buffer_size": EVERYTHING, "train_batch_size": 4}
    trainer = make_trainer(variant, tmp_path, args)
    rig(trainer, answer)
    events = watch(trainer)
    trainer.train()
    critic = {0: "critic 0", 1: "critic 0" if "maac" in variant else "critic 1"}
    expected = [f"agent {i}" for i in (0, 1) for _ in range(6)]
    if "shared" not in variant:
        expected = [name for i in (0, 1) for _ in range(6) for name in (f"agent {i}", critic[i])]
    assert [event[1] for event in events if event[0] == "step"] == expected
    found = batches(trainer, events)
    assert [len(batch) for batch in found] == [4, 4, 2] * 4
    kinds = [{(s.agent_idx, s.turn_idx) for s in batch} for batch in found]
    assert kinds == [{(i, turn)} for i in (0, 1) for turn in (0, 1) for _ in range(3)]
    orders = [
        [s.row for batch in found[start : start + 3] for s in batch] for start in (0, 3, 6, 9)
    ]
    assert all(sorted(order) == list(range(10)) != order for order in orders)
    assert len(set(map(tuple, orders))) == 4
    valued = [
        set(event[3])
        for event in events
        if event[0] == "pass" and event[2] and "critic" in event[1]
    ]
    if "shared" not in variant:
        assert valued == [{tuple(s.critic_ids) for s in batch} for batch in found]


OPTIONS = {
    "one turn": {},
    "three generations": {"num_generations": 3},
    "two turns": {"num_turns": 2, "early_termination_threshold": 0.55},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batched_collection_equals_one_item_at_a_time(
    variant, options, make_trainer, rig, tmp_path
):
    def run(rollout_batch_size):
        args = {"rollout_batch_size": rollout_batch_size, "rollout_buffer_size": 4}
        args |= {
            "agent_learning_rate": 1e-4,
            "critic_learning_rate": 1e-4,
        }  # AdamW would magnify rounding
        args |= {"eval_interval": 3, "reference_kl_enabled": True, "num_train_epochs": 2} | options
        data = [{"prompt": f"Row {n} " + "so on " * (n % 3)} for n in range(7)]
        home = tmp_path / str(rollout_batch_size)
        trainer = make_trainer(variant, home, args, train_dataset=data, eval_dataset=data[:3])
        rig(trainer, answer)
        stir(trainer)
        events = watch(trainer)
        trainer.train()
        rows = [
            json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        return (
            trainer,
            events,
            [{name: x for name, x in row.items() if "time/" not in name} for row in rows],
        )

    (one, one_events, one_rows), (many, many_events, many_rows) = run(1), run(None)
    assert len(one.samples) == len(many.samples) > 40
    for a, b in zip(one.samples, many.samples, strict=True):
        for name in vars(a):
            assert getattr(a, name) == approx(getattr(b, name), abs=1e-5), (name, a, b)
    updates = [
        [e for e in events if e[0] == "step" or e[2]] for events in (one_events, many_events)
    ]
    assert len(updates[0]) >= 16 and updates[0] == updates[1]
    assert [row["env_step"] for row in one_rows] == [row["env_step"] for row in many_rows]
    for a, b in zip(one_rows, many_rows, strict=True):
        assert a == approx(b, abs=1e-4, rel=1e-4)
    trained = [s for s in one.samples if s.target or s.old_value]
    generations, second = range(options.get("num_generations", 1)), sum(s.turn_idx for s in trained)
    assert {(s.row, s.generation_idx) for s in trained} == {
        (row, g) for row in range(7) for g in generations
    }
    assert (
        4 < second < 24 if "num_turns" in options else second == 0
    )  # some of 28 episodes end early
    widest = [
        max(len(e[3]) for e in events if e[0] == "pass" and not e[2])
        for events in (one_events, many_events)
    ]
    assert widest[1] > widest[0]  # the one was batched, the other not


@pytest.mark.parametrize(
    ("rows", "buffer", "steps"), [(10, 4, [4, 4, 2]), (3, 8, [3]), (8, 4, [4, 4]), (2, 1, [1, 1])]
)
def test_leftovers_are_trained_on_at_the_end_of_an_epoch(
    variant, rows, buffer, steps, make_trainer, rig, tmp_path
):
    args = {"rollout_buffer_size": buffer, "num_train_epochs": 2}
    trainer = make_trainer(
        variant, tmp_path, args, train_dataset=[{"prompt": f"Row {n}"} for n in range(rows)]
    )
    rig(trainer, answer)
    events = watch(trainer)
    trainer.train()
    for name in optimizers(trainer):
        factor = 2 if "maac" in variant and "critic" in name else 1  # stepped once for each agent
        assert events.count(("step", name)) == 2 * len(steps) * factor
    sizes = [len(e[3]) for e in events if e[0] == "pass" and e[1] == "agent 1" and e[2]]
    assert sizes == steps * 2
    assert {s.row for s in trainer.samples} == set(range(rows)) and len(trainer.samples) == 4 * rows


# ------------------------------------------------------------------------------------------------------ passes


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("variant", ["iac-v-shared", "iac-q-shared"])
def test_a_shared_backbone_runs_once_for_scores_and_values(
    variant, kl, make_trainer, rig, tmp_path
):
    trainer = make_trainer(variant, tmp_path, {"train_batch_size": 2, "reference_kl_enabled": kl})
    rig(trainer, answer)
    events = watch(trainer)
    trainer.train()  # 4, 4 and 2 rows
    for i in (0, 1):
        passes = [event for event in events if event[:2] == ("pass", f"agent {i}")]
        assert [len(p[3]) for p in passes if not p[2]] == [4, 4, 2]
        assert [len(p[3]) for p in passes if p[2]] == [2] * 5
        assert [len(e[3]) for e in events if e[1] == f"reference {i}"] == ([4, 4, 2] if kl else [])


def test_identical_prompts_are_valued_once(variant, make_trainer, rig, tmp_path):
    """Three rows, two of them alike, three answers each: V reads two texts, Q all that differ."""
    rows = [{"prompt": text} for text in ("same", "other prompt", "same")]
    args = {"num_generations": 3, "rollout_buffer_size": EVERYTHING}
    trainer = make_trainer(variant, tmp_path, args, train_dataset=rows)
    rig(trainer, answer)
    stir(trainer)
    events = watch(trainer)
    trainer.train()
    model = "agent" if "shared" in variant else "critic"
    passes = [
        event[3] for event in events if event[0] == "pass" and not event[2] and model in event[1]
    ]
    assert len(passes) == (1 if "maac" in variant else 2)
    texts = {tuple(s.critic_ids) for s in trainer.samples if s.agent_idx == 0}
    assert (
        all(len(set(sequences)) == len(sequences) for sequences in passes)
        and set(passes[0]) == texts
    )
    assert len(texts) == 2 if "-v" in variant else len(texts) > 5
    assert len({round(s.old_value, 6) for s in trainer.samples if s.agent_idx == 0}) == len(texts)


REFERENCES = pytest.mark.parametrize(
    ("enabled", "coef", "count"), [(False, 0.1, 0), (True, 0.0, 0), (True, 0.1, 2)]
)


@REFERENCES
def test_reference_models_are_loaded_only_if_they_count(
    variant, enabled, coef, count, make_trainer, tmp_path, monkeypatch
):
    loaded, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k)
    )
    trainer = make_trainer(
        variant, tmp_path, {"reference_kl_enabled": enabled, "reference_kl_coef": coef}
    )
    assert len(loaded) == 2 + count and len(trainer.references) == count


@REFERENCES
@pytest.mark.parametrize("variant", ["iac-v-shared", "maac-v"])
def test_reference_models_are_copied_only_if_they_count(
    variant, enabled, coef, count, make_trainer, folders, tokenizer, tmp_path
):
    def language_models():
        gc.collect()
        return sum(
            issubclass(type(x), PreTrainedModel) and hasattr(x, "lm_head") for x in gc.get_objects()
        )

    agents = [AutoModelForCausalLM.from_pretrained(folders["L"]) for _ in range(2)]
    before, args = language_models(), {"reference_kl_enabled": enabled, "reference_kl_coef": coef}
    trainer = make_trainer(variant, tmp_path, args, agents=agents, tokenizer=tokenizer)
    assert language_models() - before == count == len(trainer.references)
    assert [*map(id, trainer.agents)] == [*map(id, agents)]


# ----------------------------------------------------------------------------------------------------- rewards


FORMS = {  # two agents, three joint answers
    "one per agent": ([-1, 2], [[-1, -1, -1], [2, 2, 2]]),
    "one per joint answer": ([1, 2, 3], [[1, 2, 3], [1, 2, 3]]),
    "a matrix": ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
}


@pytest.mark.parametrize(("raw", "expected"), FORMS.values(), ids=FORMS)
def test_rewards_reach_their_agent_and_their_answer(
    variant, raw, expected, make_trainer, rig, tmp_path
):
    trainer = make_trainer(variant, tmp_path, {"num_generations": 3}, reward_func=lambda a, b: raw)
    rig(trainer, answer)
    trainer.train()
    for row in range(10):
        for i in (0, 1):
            own = [s for s in trainer.samples if (s.row, s.agent_idx) == (row, i)]
            assert [s.generation_idx for s in own] == [0, 1, 2]
            assert [s.reward for s in own] == [s.target for s in own] == expected[i]


def test_answers_of_one_generation_meet_in_the_reward(variant, make_trainer, rig, tmp_path):
    """The reward reads the k-th answers of both agents together, and the k-th samples of both get what it says."""
    joint = {}

    def reward(a, b, batch_items):
        n = batch_items[0]["n"]
        joint.update(
            {
                (n, k): (a[k], b[k], 1000 * n + 10 * k + len(a[k]) + len(b[k]) / 100)
                for k in range(3)
            }
        )
        return [joint[n, k][2] for k in range(3)]

    trainer = make_trainer(variant, tmp_path, {"num_generations": 3}, reward_func=reward)
    rig(trainer, answer)
    trainer.train()
    assert len(joint) == 30 and len({x for x, _, _ in joint.values()}) > 20
    for s in trainer.samples:
        own = joint[s.row, s.generation_idx]
        assert (s.completion, s.reward) == (own[s.agent_idx], approx(own[2]))


def test_the_callback_sees_every_sample_with_its_row(variant, make_trainer, rig, tmp_path):
    seen, rows = [], [{"prompt": f"Row {n}"} for n in range(6)]
    callback = lambda episode: seen.append([(s.row, s.agent_idx, s.item) for s in episode]) or {}  # noqa: E731
    trainer = make_trainer(variant, tmp_path, train_dataset=rows, metrics_callback=callback)
    rig(trainer, answer)
    trainer.train()
    assert seen == [[(n, i, rows[n]) for i in (0, 1)] for n in range(6)]
