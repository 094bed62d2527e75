"""Each row of the README's "I want to change ...", tried: the edit is made where the row says, and it takes effect.

An edit is (place, old, new): in the function or class `place` of a copy of the file, or of common.py if it is called
`common.place`, every `old` becomes `new`. The row has to name the places.
"""

import ast
import re
import sys
import types
from pathlib import Path

import library_models
import pytest
import torch
from library_models import ROOT, ROWS, VARIANTS, build, collected, metrics
from transformers import AutoTokenizer

README = (ROOT / "README.md").read_text()
TABLE = README[README.index("## I want to change") : README.index("## What it learns")]
CELLS = dict(re.findall(r"^\| (.*?) \| (.*) \|$", TABLE, re.M))


def edit(source, place, old, new):
    """The source with the edit made in that place."""
    nodes = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == place]
    assert len(nodes) == 1, place
    lines = source.splitlines(keepends=True)
    start, end = nodes[0].lineno - 1, nodes[0].end_lineno
    text = "".join(lines[start:end])
    assert old in text, (place, old)
    return "".join([*lines[:start], text.replace(old, new), *lines[end:]])


@pytest.fixture
def edited(monkeypatch):
    """edited(row, variant, *edits) -> the module, which `build` makes its trainers of from now on."""

    def make(row, variant, *edits):
        cells = [
            cell
            for name, cell in CELLS.items()
            if name == row or (row.startswith("...") and "actor's" in name)
        ]
        file = variant.split("_")[0]
        sources = {name: (ROOT / f"{name}.py").read_text() for name in ("common", file)}
        for place, old, new in edits:
            owner, place = ("common", place[7:]) if place.startswith("common.") else (file, place)
            assert place.endswith("Config") or any(f"`{place}`" in cell for cell in cells), (
                row,
                place,
            )
            sources[owner] = edit(sources[owner], place, old, new)
        with monkeypatch.context() as patch:
            for name, source in sources.items():
                module = types.ModuleType(name)
                module.__file__ = str(ROOT / f"{name}.py")
                patch.setitem(sys.modules, name, module)
                exec(compile(source, f"{name}.py, edited", "exec"), module.__dict__)
        monkeypatch.setitem(library_models.MODULES, variant, module)
        return module

    return make


every = pytest.mark.parametrize("variant", VARIANTS)


def config_of(variant):
    return "MAACConfig" if variant == "maac" else "IACConfig"


def test_every_row_is_tried():
    tried = set(re.findall(r'edited\(\s*"(.*?)"', Path(__file__).read_text()))
    assert len(tried) > 11 and tried == CELLS.keys() - {"what", "---"}


@every
def test_task(variant, edited):
    """The difference of two numbers instead of their sum."""
    old, new = (
        'abs(sum(map(int, a)) - batch_items[0]["n"])',
        'abs(int(a[0]) - int(a[1]) - batch_items[0]["n"])',
    )
    module = edited("the task, its data, prompts and reward", variant, ("number_task", old, new))
    assert module.number_task(2, 0)["reward_func"](
        ["9", "3"], ["2", "2"], batch_items=[{"n": 7}]
    ) == [1.0, 0.0]


@every
def test_forms_of_reward_functions(variant, edited, tmp_path):
    """Parts of a reward by name, and a further parameter."""
    named, summed = (
        '"batch_items": [item]',
        "raw = [sum(x) for x in zip(*raw.values())] if type(raw) is dict else raw",
    )
    edited(
        "what a reward function may look like",
        variant,
        ("read_rewards", "    try:\n", f"    {summed}\n    try:\n"),
        ("call_reward", named, f'{named}, "agent_names": ["one", "two"]'),
    )

    def reward_func(a, b, agent_names):
        return {"names": [float(len("".join(agent_names)))], "other": [0.5]}

    trainer = build(variant, tmp_path / "run", reward_func=reward_func)
    trainer.train()
    assert metrics(trainer)[0]["turn_1/reward_mean"] == 6.5


MEAN_OVER_TOKENS = [
    ("policy_loss", "logprobs: Tensor,", "logprobs: Tensor, mask: Tensor,"),
    ("policy_loss", "-logprobs.sum(-1) *", "-logprobs.sum(-1) / mask.sum(-1) *"),
    ("actor_step", "policy_loss(scores.logprobs,", "policy_loss(scores.logprobs, scores.mask,"),
]


@every
def test_loss_of_the_actor(variant, edited, tmp_path):
    """The mean over an answer's tokens instead of their sum; with a coefficient that is a setting."""
    more = [
        (config_of(variant), "    seed: int", "    policy_loss_coef: float = 1.0\n    seed: int"),
        ("actor_step", "losses = policy_loss", "losses = self.args.policy_loss_coef * policy_loss"),
    ]
    module = edited("the actor's loss", variant, *MEAN_OVER_TOKENS, *more)
    logprobs, mask = torch.tensor([[-1.0, -3.0, 0.0]]), torch.tensor([[True, True, False]])
    assert module.policy_loss(logprobs, mask, torch.tensor([2.0])).tolist() == [4.0]
    losses = []
    for number, coef in enumerate((1.0, 0.5)):
        trainer = build(variant, tmp_path / str(number), {"policy_loss_coef": coef})
        trainer.train()
        losses.append(metrics(trainer)[0]["agent_0/policy_loss"])
    assert losses[0] != 0 and losses[1] == pytest.approx(losses[0] / 2)
    with pytest.raises(ValueError, match="policy_loss_coef="):
        build(variant, None, {"policy_loss_coef": "1"})


KEEP_LOGPROBS = """
        for i, own in enumerate(samples):
            for s, logprobs in zip(own, self.score(self.agents[i], own).logprobs, strict=True):
                s.old_logprob = logprobs.sum().item()
"""
RATIOS = """ratios = (logprobs.sum(-1) - old).exp()
    SEEN.append(ratios.tolist())
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)"""


@every
def test_ratios(variant, edited, tmp_path):
    """Two passes over the buffer, with ratios that are clipped."""
    drawn_with = 'with the weights that drew them."""\n'
    old_logprobs = "torch.tensor([s.old_logprob for s in batch])"
    module = edited(
        "... with ratios",
        variant,
        ("RolloutSample", "    old_value:", "    old_logprob: float = 0.0\n    old_value:"),
        ("appraise", drawn_with, drawn_with + KEEP_LOGPROBS),
        ("policy_loss", "logprobs: Tensor,", "logprobs: Tensor, old: Tensor,"),
        ("policy_loss", "return -logprobs.sum(-1) * advantages", RATIOS),
        (
            "actor_step",
            "policy_loss(scores.logprobs,",
            f"policy_loss(scores.logprobs, {old_logprobs},",
        ),
        (
            "update",
            "sorted({s.turn_idx for s in buffer})",
            "sorted({s.turn_idx for s in buffer}) * 2",
        ),
    )
    module.SEEN = []
    build(variant, tmp_path / "run").train()
    assert len(module.SEEN) == 2 * 2 * 2  # updates, agents, passes
    for first, second in zip(module.SEEN[::2], module.SEEN[1::2], strict=True):
        assert all(abs(ratio - 1) < 1e-4 for ratio in first) and any(
            abs(ratio - 1) > 1e-3 for ratio in second
        )


ENTROPY = """every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1).masked_fill(~mask, 0.0).sum(-1)
    return Scores("""


@every
def test_entropy_bonus(variant, edited, tmp_path):
    """So strong that the entropy of the same answers rises."""
    edited(
        "... with an entropy bonus",
        variant,
        ("common.Scores", "the generated ones, if wanted", "\n    entropy: Tensor | None = None"),
        ("common.score", "return Scores(", ENTROPY),
        ("common.score", "if return_hidden else None)", "if return_hidden else None, entropy)"),
        (
            "actor_step",
            "A.to(scores.logprobs.device))",
            "A.to(scores.logprobs.device)) - 10 * scores.entropy",
        ),
    )
    trainer = build(
        variant,
        tmp_path / "run",
        {"max_grad_norm": None},
        agent_model=library_models.folder("L", "T"),
    )
    for agent in trainer.agents:
        agent.lm_head.weight.data *= 30  # else there is little to gain
    samples = collected(trainer)
    entropy = lambda: trainer.score(trainer.agents[0], samples[:4]).entropy.mean().item()  # noqa: E731
    trainer.collect(ROWS[:4], 0, trainer.generators, 1)
    before = entropy()
    trainer.train()
    assert 0 < before < entropy()


@every
def test_loss_of_the_critic(variant, edited):
    """Huber's."""
    huber = 'nn.functional.huber_loss({}, targets, reduction="none")'
    edits = [
        ("value_loss", f"({name} - targets) ** 2", huber.format(name))
        for name in ("values", "clipped")
    ]
    module = edited("the critic's loss", variant, *edits[: 1 + (variant != "maac")])
    more = () if variant == "maac" else (torch.zeros(2), None)
    assert module.value_loss(torch.tensor([3.0, 1.0]), torch.zeros(2), *more).tolist() == [2.5, 0.5]
    if variant != "maac":  # clipped to 2.25
        loss = module.value_loss(
            torch.tensor([3.0]), torch.tensor([3.0]), torch.tensor([2.0]), 0.25
        )
        assert loss.tolist() == [0.75**2 / 2]


GAE = """td_errors = [y - value for y, value in zip(targets, values, strict=True)]
    for t in reversed(range(len(values) - 1)):
        td_errors[t] += discount * 0.5 * td_errors[t + 1]
    return targets, td_errors"""


@every
def test_targets_and_advantages(variant, edited, tmp_path):
    """GAE with lambda 0.5."""
    old = "return targets, [y - v for y, v in zip(targets, values, strict=True)]"
    module = edited("targets and advantages, say GAE", variant, ("td_targets", old, GAE))
    assert module.td_targets([1.0, 2.0], [0.5, 0.25], 1.0) == (
        [1.25, 2.0],
        [0.75 + 0.5 * 1.75, 1.75],
    )
    again = lambda prompt, num_agents, **_: [f"{prompt} again"] * num_agents  # noqa: E731
    trainer = build(variant, tmp_path / "run", {"num_turns": 2}, external_transition=again)
    samples = collected(trainer)
    trainer.train()
    firsts = {(s.row, s.agent_idx): s for s in samples if s.turn_idx == 0}
    for s in samples:
        if s.turn_idx == 1:
            first = firsts[s.row, s.agent_idx]
            assert s.advantage == s.target - s.old_value
            assert first.advantage == pytest.approx(
                first.target - first.old_value + 0.5 * s.advantage
            )


READS = {
    "iac": [
        ("appraise", "s.prompt_ids + s.completion_ids if", "said(s) + s.completion_ids if"),
        ("appraise", "else s.prompt_ids", "else said(s)"),
        (
            "appraise",
            "        for i, own in enumerate(samples):",
            "        said = lambda s: self.tokenizers[0](f\"n is {s.item['n']}: {s.prompt}\").input_ids\n"
            "        for i, own in enumerate(samples):",
        ),
    ],
    "maac": [
        ("critic_text", 'f"[agent {i + 1}]\\n{prompt}"', 'f"{i + 1} reads: {prompt}"'),
        (
            "appraise",
            "critic_text([s.prompt for s in joint]",
            "critic_text([f\"n is {joint[0].item['n']}\"]",
        ),
    ],
}
READS["iac_shared"] = [
    *READS["iac"],
    ("appraise", "return_hidden=not self.args.use_separate_critic", "return_hidden=False"),
    ("actor_step", ", return_hidden=not self.args.use_separate_critic", ""),
    ("actor_step", "self.critic_losses(i, batch, scores.hidden)", "self.critic_losses(i, batch)"),
]
ANOTHER_TOKEN = [("appraise", "else s.prompt_ids", "else s.prompt_ids + s.completion_ids[:1]")]


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("case", [*READS, "iac_shared, another token"])
def test_what_the_critic_reads(case, penalty, edited, tmp_path):
    """A field of the row in the text; or with a shared backbone the value at the first token of the answer.

    IAC's are trained on what they were asked: before a step, the loss is that of the values of collection.
    """
    variant, token = case.split(",")[0], "," in case
    edited("what the critic reads", variant, *(ANOTHER_TOKEN if token else READS[variant]))
    args = {"num_train_epochs": 2, "reference_kl_enabled": penalty}
    args |= {} if variant == "maac" else {"value_clip_range": None}
    trainer = build(variant, tmp_path / "run", args)
    samples = collected(trainer)
    trainer.train()
    for s in samples:
        text = trainer.tokenizers[0].decode(s.critic_ids)
        if token:
            assert s.critic_ids == s.prompt_ids + s.completion_ids[:1]
        elif variant == "maac":
            assert f"1 reads: n is {ROWS[s.row]['n']}" in text
        else:
            assert f"n is {ROWS[s.row]['n']}: {s.prompt}" in text
    rows = metrics(trainer)
    assert len(rows) == 4
    for number, row in enumerate(
        rows if variant != "maac" else []
    ):  # there agent 0's step comes between
        errors = [
            s.target - s.old_value for s in samples[number * 8 : number * 8 + 8] if s.agent_idx == 0
        ]
        assert row["critic_0/value_loss"] == pytest.approx(
            sum(error**2 for error in errors) / 4, rel=1e-4
        )
    assert max(abs(s.old_value) for s in samples) > 1e-3


@pytest.mark.parametrize("width", [None, 8])
@every
def test_value_head(variant, width, edited, tmp_path):
    """A norm in front of it: the saved one comes back."""
    edited(
        "the value head",
        variant,
        ("Critic", "nn.Sequential(*hidden", "nn.Sequential(nn.LayerNorm(D), *hidden"),
    )
    name = "value_head_hidden_dim" if variant == "iac_shared" else "critic_value_head_hidden_dim"
    given = {"model_config": {name: width}} if variant == "maac" else {}
    trainer = build(variant, tmp_path / "run", {} if variant == "maac" else {name: width}, **given)
    trainer.train()
    model = f"{trainer.output_dir}/model"
    agents = [f"{model}/agent_{i}" for i in range(2)]
    critics = (
        {}
        if variant == "iac_shared"
        else {"critics": [f"{model}/critic_{c}" for c in range(len(trainer.critics))]}
    )
    tokenizers = [AutoTokenizer.from_pretrained(agent) for agent in agents]
    again = build(variant, tmp_path / "again", agents=agents, tokenizer=tokenizers, **critics)
    for one, other in zip(trainer.critics, again.critics, strict=True):
        assert len(one.value_head) == (4 if width else 2)
        for p, q in zip(one.value_head.parameters(), other.value_head.parameters(), strict=True):
            assert torch.equal(p, q)


CUT = """output.logits[:, -(K + 1) : -1].float() / temperature[0]
    below = logits < logits.amax(-1, keepdim=True) + torch.tensor(temperature[1]).log()
    below = below.scatter(-1, inputs["input_ids"][:, -K:, None], False)
    logits, temperature = logits.masked_fill(below, -torch.inf), 1.0"""


@every
def test_sampling(variant, edited, tmp_path):
    """min-p as a setting: only tokens at least 0.9 times as likely as the likeliest."""
    warper = "from transformers.generation import MinPLogitsWarper\n    warpers += [MinPLogitsWarper(min_p)]\n    "
    edits = [
        (config_of(variant), "    seed: int", "    min_p: float = 0.9\n    seed: int"),
        ("collect", "args.top_k, args.dtype)", "args.top_k, args.dtype, args.min_p)"),
        ("common.generate", "top_k, dtype = sampling", "top_k, dtype, min_p = sampling"),
        ("common.generate", "warpers += [TopP", warper + "warpers += [TopP"),
        ("common.score", "logits = output.logits[:, -(K + 1) : -1].float()", "logits = " + CUT),
        ("score", "self.args.temperature", "(self.args.temperature, self.args.min_p)"),
    ]

    def lowest(made, samples, cut):
        """The least p / max p among the tokens drawn; with a cut their scores are log(p / kept mass)."""
        with torch.no_grad():
            made.collect(ROWS[:4], 0, made.generators, 1)
        least = 1.0
        for s in samples:
            logits = made.agents[s.agent_idx](
                torch.tensor([s.prompt_ids + s.completion_ids])
            ).logits
            p = logits[0, len(s.prompt_ids) - 1 : -1].softmax(-1)
            chosen = p.gather(-1, torch.tensor(s.completion_ids)[:, None])
            least = min(least, (chosen / p.amax(-1, keepdim=True)).min().item())
            if cut:
                kept = torch.where(p >= 0.9 * p.amax(-1, keepdim=True) - 1e-7, p, 0.0).sum(
                    -1, keepdim=True
                )
                scores = made.score(made.agents[s.agent_idx], [s]).logprobs
                torch.testing.assert_close(
                    scores[0], (chosen / kept).log()[:, 0], rtol=0, atol=1e-3
                )
        return least

    plain = build(variant, None)
    assert lowest(plain, collected(plain), cut=False) < 0.85
    edited("sampling", variant, *edits)
    trainer = build(variant, tmp_path / "run", {"train_batch_size": 1, "agent_learning_rate": 1e-2})
    assert lowest(trainer, collected(trainer), cut=True) > 0.9 - 1e-4
    trainer.train()  # a drawn token falls below the cut as the weights move


@every
def test_order_of_updates_and_schedules(variant, edited, tmp_path):
    """The last agent first; rates that fall with the updates, also in a run that is stopped and goes on."""
    rate = "1e-3 / (1 + self.updates)"
    edited(
        "order of updates, mini-batches, learning-rate schedules",
        variant,
        (
            "optimizer_step",
            "optimizer.step()",
            f'optimizer.param_groups[0]["lr"] = {rate}\n        optimizer.step()',
        ),
        (
            "optimizer_step",
            "self.metrics[name]",
            f'self.metrics["rate"].append({rate})\n        self.metrics[name]',
        ),
        ("train", "for i in range(args.num_agents):", "for i in reversed(range(args.num_agents)):"),
    )
    calls, order = [], []

    def reward_func(*completions):
        calls.append(1)
        if len(calls) == 11:
            raise KeyError("of the user's own")
        return library_models.reward_length(*completions)

    trainer = build(variant, tmp_path / "run", {"num_train_epochs": 2}, reward_func=reward_func)
    update, trainer.update = trainer.update, lambda i: order.append(i) or update(i)
    with pytest.raises(KeyError):
        trainer.train()
    trainer = build(variant, None, {"num_train_epochs": 2})
    trainer.train(resume_from=str(tmp_path / "run"))
    assert order == [1, 0, 1, 0]
    assert [row["rate"] for row in metrics(trainer)] == pytest.approx(
        [1e-3, 1e-3 / 2, 1e-3 / 3, 1e-3 / 4]
    )
    assert trainer.agent_optimizers[0].param_groups[0]["lr"] == 1e-3 / 4


@every
def test_what_is_logged(variant, edited, tmp_path):
    """More of rewards, of updates, and of the run."""
    normalized, rate = (
        "if self.args.advantage_normalization",
        'self.agent_optimizers[0].param_groups[0]["lr"]',
    )
    per_sample = 'metrics[f"{turn}/reward_mean"].append(s.reward)'
    edited(
        "what is logged",
        variant,
        ("RolloutSample", "    reward: float", "    characters: int = 0\n    reward: float"),
        ("collect", "s.reward = reward", "s.reward, s.characters = reward, len(s.completion)"),
        (
            "add_metrics",
            per_sample,
            f'{per_sample}\n            metrics[f"{{prefix}}characters"].append(s.characters)',
        ),
        (
            "update",
            normalized,
            f'self.metrics["advantage_std"] += [advantages.std().item()]\n            {normalized}',
        ),
        (
            "report",
            "self.metrics.clear()",
            f'row["rate"] = {rate}\n            self.metrics.clear()',
        ),
    )
    trainer = build(variant, tmp_path / "run", {"eval_interval": 4}, eval_dataset=ROWS)
    samples = collected(trainer)
    trainer.train()
    rows = [row for row in metrics(trainer) if "rate" in row]
    assert len(rows) == 2 and all(
        row["rate"] == 1e-3 and row["eval/characters"] > 0 for row in rows
    )
    for row, group in zip(rows, (samples[:8], samples[8:]), strict=True):
        assert row["characters"] == sum(len(s.completion) for s in group) / 8
        advantages = [
            torch.tensor([s.advantage for s in group if s.agent_idx == i]).std() for i in (0, 1)
        ]
        assert row["advantage_std"] == pytest.approx(sum(advantages).item() / 2)
