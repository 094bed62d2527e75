"""parallel_training: which model lands where, and agents with devices of their own generate at the same time.

torch knows CPU devices cpu:0, cpu:1, ... by name, though all are the same processor: that is enough to hold every
decision about placement. Where the machine has a GPU, the same is tried with it.
"""

import threading

import pytest
import torch
from library_models import VARIANTS, build, collected, folder, metrics, tokenizer
from torch import nn

GPUS = torch.cuda.device_count()
TWO = {"parallel_training": "mp", "agent_devices": ["cpu:0", "cpu:1"], "critic_devices": ["cpu:2"]}


def outcome(trainer) -> tuple:
    """Completions, training metrics without times, and final weights."""
    samples = collected(trainer)
    trainer.train()
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics(trainer)]
    tensors = [
        p.detach().cpu() for m in [*trainer.agents, *trainer.critics] for p in m.parameters()
    ]
    return [s.completion_ids for s in samples], rows, tensors


@pytest.fixture
def moves(monkeypatch):
    """Where each model was sent, in order: its class and the device's name."""
    seen, to = [], nn.Module.to

    def spy(module, *args, **kwargs):
        seen.append((type(module).__name__, str((*args, *kwargs.values())[0])))
        return to(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", spy)
    return seen


def sent(moves, name: str) -> list[str]:
    return [device for model, device in moves if model == name]


# ------------------------------------------------------------------------------------------------------ concurrency


def test_agents_on_devices_of_their_own_generate_at_the_same_time(tmp_path, monkeypatch):
    """Each waits inside generate for the other: one after the other, the barrier would break."""
    trainer, barrier = build("maac", tmp_path, TWO), threading.Barrier(2, timeout=20)
    for agent in trainer.agents:
        generate = agent.generate
        monkeypatch.setattr(
            agent, "generate", lambda *a, g=generate, **k: (barrier.wait(), g(*a, **k))[1]
        )
    trainer.train()
    assert len(metrics(trainer)) == 2 and not barrier.broken


@pytest.mark.parametrize("devices", [None, ["cpu:1"], ["cpu:1", "cpu:1"]])
def test_agents_on_one_device_take_turns(devices, tmp_path, monkeypatch):
    args = (
        {"parallel_training": "mp", "agent_devices": devices, "critic_devices": ["cpu:0"]}
        if devices
        else {}
    )
    trainer, inside, most = build("maac", tmp_path, args), [], []
    for agent in trainer.agents:

        def spy(*args, generate=agent.generate, **kwargs):
            inside.append(1), most.append(len(inside))
            result = generate(*args, **kwargs)
            inside.pop()
            return result

        monkeypatch.setattr(agent, "generate", spy)
    trainer.train()
    assert set(most) == {1}


def test_an_error_in_one_agents_generation_ends_the_training(tmp_path, monkeypatch):
    trainer = build("iac", tmp_path, TWO | {"critic_devices": ["cpu:0", "cpu:1"]})

    def fail(*_, **__):
        raise RuntimeError("agent 1 is out of memory")

    monkeypatch.setattr(trainer.agents[1], "generate", fail)
    with pytest.raises(RuntimeError, match="agent 1 is out of memory"):
        trainer.train()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_those_of_one_device(variant, dtype, tmp_path):
    """To the bit, with everything on: reference models, a group of generations, an evaluation, three agents."""
    args = {
        "num_agents": 3,
        "num_generations": 2,
        "reference_kl_enabled": True,
        "eval_interval": 3,
        "dtype": dtype,
    }
    mp = {
        "parallel_training": "mp",
        "agent_devices": ["cpu:0", "cpu:1", "cpu:2"],
        "reference_devices": ["cpu:3"],
    }
    mp |= {"critic_devices": ["cpu:1"] if variant == "maac" else ["cpu:0", "cpu:2", "cpu:1"]}
    given = {"eval_dataset": [{"prompt": "eval"}] * 2}
    one, many = (build(variant, tmp_path / str(len(x)), args | x, **given) for x in ({}, mp))
    (completions, rows, tensors), (completions_mp, rows_mp, tensors_mp) = (
        outcome(one),
        outcome(many),
    )
    assert completions == completions_mp and rows == rows_mp
    assert all(torch.equal(p, q) for p, q in zip(tensors, tensors_mp, strict=True))


# -------------------------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("references", [None, ["cpu:6"], ["cpu:6", "cpu:7"]])
@pytest.mark.parametrize("agents", [["cpu:1"], ["cpu:1", "cpu:2"]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_land_on_the_named_devices(variant, agents, references, tmp_path, moves):
    """One name is for all, several are for one each; reference models go to the agents' devices by default."""
    for critics in {
        "iac": [["cpu:4"], ["cpu:4", "cpu:5"]],
        "iac_shared": [None],
        "maac": [["cpu:4"]],
    }[variant]:
        moves.clear()
        devices = {
            "agent_devices": agents,
            "critic_devices": critics,
            "reference_devices": references,
        }
        args = {"parallel_training": "mp", "reference_kl_enabled": True} | devices
        given = {} if variant == "iac_shared" else {"critic_model": folder("L", "T")}
        trainer = build(variant, tmp_path, args, **given)
        two = [names * (3 - len(names)) for names in (agents, references or agents)]
        assert sent(moves, "GPT2LMHeadModel") == two[0] + two[1]
        assert [str(device) for device in trainer.agent_devices] == two[0]
        if variant != "iac_shared":
            assert sent(moves, "LlamaModel") == (
                critics if variant == "maac" else critics * (3 - len(critics))
            )


def test_a_shared_critic_instance_takes_one_device(tmp_path, moves):
    from library_models import model

    critic = model("L", tokenizer("T")).base_model
    trainer = build("iac", tmp_path, TWO, critic_model=critic)
    assert sent(moves, "LlamaModel") == ["cpu:2"] and len(trainer.critics) == 1
    with pytest.raises(ValueError, match="critic_devices"):
        build("iac", tmp_path, TWO | {"critic_devices": ["cpu:0", "cpu:1"]}, critic_model=critic)


@pytest.mark.parametrize(
    "given", [{"agent_devices": ["cpu:1"]}, {"agent_devices": "cpu:1", "critic_devices": ["cpu:1"]}]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_none_is_for_one_device_that_may_be_named(variant, given, tmp_path, moves):
    build(variant, tmp_path, {"reference_kl_enabled": True} | given)
    assert sent(moves, "GPT2LMHeadModel") == ["cpu:1"] * 4
    assert set(sent(moves, "GPT2Model")) == (set() if variant == "iac_shared" else {"cpu:1"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_names_everything_is_on_the_gpu_or_else_the_cpu(variant, tmp_path, moves):
    build(variant, tmp_path, {"reference_kl_enabled": True, "agent_devices": None})
    assert {device for name, device in moves if name.startswith("GPT2")} == {
        "cuda" if GPUS else "cpu"
    }


MP = {"parallel_training": "mp", "agent_devices": ["cpu:0"], "critic_devices": ["cpu:0"]}
REFUSED = {
    "none with two devices": ({"agent_devices": ["cpu:0", "cpu:1"]}, "parallel_training='none'"),
    "none with two kinds": (
        {"agent_devices": ["cpu:0"], "critic_devices": ["cpu:1"]},
        "parallel_training='none'",
    ),
    "mp without agent_devices": (MP | {"agent_devices": None}, "agent_devices"),
    "three agent_devices for two": (MP | {"agent_devices": ["cpu:0"] * 3}, "agent_devices has 3"),
    "three critic_devices": (MP | {"critic_devices": ["cpu:0"] * 3}, "critic_devices has 3"),
    "three reference_devices": (
        MP | {"reference_devices": ["cpu:0"] * 3},
        "reference_devices has 3",
    ),
    "no names": (MP | {"agent_devices": []}, "agent_devices"),
    "unknown kind": (MP | {"agent_devices": ["gpu:0"]}, "agent_devices"),
    "a number": (MP | {"critic_devices": ["0.5"]}, "critic_devices"),
    "a gpu there is not": (MP | {"reference_devices": [f"cuda:{GPUS}"]}, "reference_devices"),
    "a gpu there is not, none": ({"agent_devices": [f"cuda:{GPUS}"]}, "agent_devices"),
    "another mode": ({"parallel_training": "ddp"}, "parallel_training"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_refused_before_a_model_is_loaded(variant, case, tmp_path, monkeypatch, moves):
    args, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        build(variant, tmp_path, args)
    assert not any(name.startswith("GPT2") for name, _ in moves)


@pytest.mark.parametrize("variant", ["iac", "maac"])
def test_mp_needs_critic_devices_where_there_are_critics(variant, tmp_path):
    with pytest.raises(ValueError, match="critic_devices"):
        build(variant, tmp_path, MP | {"critic_devices": None})
    build("iac_shared", tmp_path, MP | {"critic_devices": None})


def test_the_maac_critic_takes_one_device(tmp_path):
    with pytest.raises(ValueError, match="critic_devices has 2"):
        build("maac", tmp_path, MP | {"critic_devices": ["cpu:0", "cpu:1"]})


# -------------------------------------------------------------------------------------------------------- with a GPU


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_agents_critics_and_references_on_cpu_and_gpu(variant, tmp_path):
    """Each model computes where it was put, and the numbers are those of the CPU to rounding."""
    args = {
        "parallel_training": "mp",
        "agent_devices": ["cuda:0", "cpu"],
        "reference_devices": ["cpu", "cuda:0"],
    }
    args |= {
        "reference_kl_enabled": True,
        "critic_devices": ["cuda:0"] if variant == "maac" else ["cpu", "cuda:0"],
    }
    trainer = build(variant, tmp_path / "mp", args)
    assert [agent.device.type for agent in trainer.agents] == ["cuda", "cpu"]
    assert [reference.device.type for reference in trainer.references] == ["cpu", "cuda"]
    kinds = {"iac": ["cpu", "cuda"], "iac_shared": ["cuda", "cpu"], "maac": ["cuda"]}[variant]
    for critic, kind in zip(trainer.critics, kinds, strict=True):
        assert {p.device.type for p in critic.parameters()} == {kind}
    samples = collected(trainer)
    trainer.train()
    plain = build(variant, tmp_path / "cpu", {"agent_devices": ["cpu"], "critic_devices": ["cpu"]})
    first = [s for s in samples if s.row < 4]  # collected by the weights that both start from
    for i in (0, 1):
        own = [s for s in first if s.agent_idx == i]
        here = trainer.score(build(variant, tmp_path, {"agent_devices": ["cuda"]}).agents[i], own)[
            0
        ].cpu()
        torch.testing.assert_close(here, plain.score(plain.agents[i], own)[0], atol=1e-3, rtol=1e-3)
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in metrics(trainer))
