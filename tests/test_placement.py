"""parallel_training: which model lands where, and agents of several devices answer side by side.

What is placed on the device "meta" has a place and no numbers: enough to see every decision on a
machine without a GPU. Where there is one, the same is tried with it.
"""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import common
from conftest import answer, flat

GPUS = torch.cuda.device_count()
SAMPLING = common.Sampling(4, 1.0, 1.0, None, "float32")
MP = {"parallel_training": "mp", "agent_devices": ["cpu"], "critic_devices": ["cpu"]}
some = pytest.mark.parametrize("variant", ["iac-v-separate", "iac-q-shared", "maac-q"])


def places(models):
    """The kind of device of each model, of all its weights."""
    found = [{p.device.type for p in model.parameters()} for model in models]
    assert all(len(kinds) == 1 for kinds in found)
    return [kinds.pop() for kinds in found]


# -------------------------------------------------------------------------------------- concurrency


@pytest.fixture
def answers_of(monkeypatch):
    """answers_of(devices, act): all agents answer; what each does meanwhile is act(number)."""

    def run(devices, act):
        monkeypatch.setattr(common, "generate", lambda model, *_: act(model.number))
        models = [SimpleNamespace(number=i, device=torch.device(device)) for i, device in enumerate(devices)]
        nothing = [None] * len(models)
        return common.generate_all(models, nothing, nothing, nothing, SAMPLING)

    return run


def test_agents_on_devices_of_their_own_answer_at_the_same_time(answers_of):
    """Each waits for the others: one after the other, the barrier would break."""
    barrier = threading.Barrier(3, timeout=20)
    assert answers_of(["cuda:0", "cuda:1", "cpu"], lambda i: (barrier.wait(), i)[1]) == [0, 1, 2]


def test_agents_on_one_device_take_turns(answers_of):
    inside, most = [], []

    def act(i):
        inside.append(i)
        most.append(len(inside))
        time.sleep(0.01)
        inside.remove(i)
        return i

    assert answers_of(["cuda:0"] * 3, act) == [0, 1, 2] and set(most) == {1}


def test_an_error_in_one_agents_answers_reaches_the_user(answers_of):
    def act(i):
        if i == 1:
            raise RuntimeError("agent 1 is out of memory")

    with pytest.raises(RuntimeError, match="agent 1 is out of memory"):
        answers_of(["cpu", "cuda:0"], act)


# ---------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("references", [None, ["meta"], ["meta", "cpu"]])
@pytest.mark.parametrize("agents", [["meta"], ["cpu", "meta"]])
def test_models_land_on_the_named_devices(variant, agents, references, make_trainer, tmp_path):
    """One name is for all, several are for one each; references go to the agents' by default."""
    for critics in [["meta"], ["cpu"]] + [["meta", "cpu"]] * ("separate" in variant):
        args = {"parallel_training": "mp", "reference_kl_enabled": True, "agent_devices": agents}
        args |= {"critic_devices": critics, "reference_devices": references}
        trainer = make_trainer(variant, tmp_path, args)
        two, wanted = agents * (3 - len(agents)), references or agents
        assert places(trainer.agents) == two
        assert places(trainer.references) == wanted * (3 - len(wanted))
        expected = two if "shared" in variant else critics * (3 - len(critics))
        assert places(trainer.critics) == expected  # the value head with its backbone


def test_a_shared_critic_instance_takes_one_device(make_trainer, llama, tmp_path):
    args = MP | {"critic_devices": ["meta"]}
    trainer = make_trainer("iac-v-separate", tmp_path, args, critic_model=llama)
    assert places(trainer.critics) == ["meta"] * 2 and places(trainer.agents) == ["cpu"] * 2
    with pytest.raises(ValueError, match="critic_devices"):
        args = MP | {"critic_devices": ["cpu", "meta"]}
        make_trainer("iac-v-separate", tmp_path, args, critic_model=llama)


ONE = [
    {"agent_devices": ["meta"]},
    {"agent_devices": "meta", "critic_devices": ["meta"]},
    {"critic_devices": "meta"},
    {"reference_devices": ["meta", "meta"]},
]


@some
@pytest.mark.parametrize("given", ONE)
def test_none_is_for_one_device_that_may_be_named(variant, given, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path, {"reference_kl_enabled": True} | given)
    models = [*trainer.agents, *trainer.references, *trainer.critics]
    assert set(places(models)) == {"meta"} and len(models) == 6


@some
def test_without_names_everything_is_on_the_gpu_or_else_the_cpu(variant, make_trainer, tmp_path):
    trainer = make_trainer(variant, tmp_path, {"reference_kl_enabled": True})
    models = [*trainer.agents, *trainer.references, *trainer.critics]
    assert set(places(models)) == {"cuda" if GPUS else "cpu"}


REFUSED = {
    "three agent_devices for two": ({"agent_devices": ["cpu"] * 3}, "agent_devices"),
    "three critic_devices": ({"critic_devices": ["cpu"] * 3}, "critic_devices"),
    "three reference_devices": ({"reference_devices": ["cpu"] * 3}, "reference_devices"),
    "an unknown kind": ({"agent_devices": ["gpu:0"]}, "agent_devices"),
    "a number": ({"critic_devices": ["0.5"]}, "critic_devices"),
    "a gpu there is not": ({"reference_devices": [f"cuda:{GPUS}"]}, "reference_devices"),
}


@some
@pytest.mark.parametrize("case", REFUSED)
def test_devices_that_do_not_fit_are_refused_by_name(variant, case, make_trainer, tmp_path):
    devices, name = REFUSED[case]
    if name == "critic_devices" and "shared" in variant:
        return  # there are none to place
    with pytest.raises(ValueError, match=rf"{name}=\["):
        make_trainer(variant, tmp_path, MP | {"reference_kl_enabled": True} | devices)
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_refused_without_mp_too(variant, make_trainer, tmp_path):
    with pytest.raises(ValueError, match="agent_devices"):
        make_trainer(variant, tmp_path, {"agent_devices": [f"cuda:{GPUS}"]})


def test_the_maac_critic_takes_one_device(make_trainer, tmp_path):
    with pytest.raises(ValueError, match=r"critic_devices=\['cpu', 'meta'\] has 2 entries"):
        make_trainer("maac-v", tmp_path, MP | {"critic_devices": ["cpu", "meta"]})


# ----------------------------------------------------------------------------------------- training


def outcome(trainer):
    """Completions, metrics without times, and final weights."""
    trainer.train()
    with open(f"{trainer.output_dir}/metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    rows = [{name: x for name, x in row.items() if "time/" not in name} for row in rows]
    weights = flat([*trainer.agents, *trainer.critics])
    return [s.completion_ids for s in trainer.samples], rows, weights


@some
def test_results_are_those_of_one_device(variant, make_trainer, tmp_path):
    """To the bit, with references, several generations, an evaluation and three agents."""
    args = {"num_agents": 3, "num_generations": 2, "reference_kl_enabled": True}
    args |= {"eval_interval": 3, "agent_devices": ["cpu"]}
    mp = {"parallel_training": "mp", "agent_devices": ["cpu:0", "cpu:1", "cpu"]}
    mp |= {"reference_devices": ["cpu"], "critic_devices": ["cpu"]}
    given = {"eval_dataset": [{"prompt": "eval"}] * 2}
    one, many = (outcome(make_trainer(variant, tmp_path / str(len(x)), args | x, **given)) for x in ({}, mp))
    assert one[:2] == many[:2] and torch.equal(one[2], many[2])


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_agents_critics_and_references_on_cpu_and_gpu(variant, make_trainer, rig, tmp_path):
    """Each model computes where it was put, and the numbers are those of the CPU to rounding."""
    mixed = {"parallel_training": "mp", "agent_devices": ["cuda:0", "cpu"]}
    mixed |= {"reference_devices": ["cpu", "cuda:0"]}
    mixed |= {"critic_devices": ["cuda:0"] if "maac" in variant else ["cpu", "cuda:0"]}
    first = []
    for name, devices in ("mixed", mixed), ("plain", {"agent_devices": ["cpu"]}):
        args = {"reference_kl_enabled": True, "agent_learning_rate": 1e-5} | devices
        trainer = make_trainer(variant, tmp_path / name, args)
        if name == "mixed":
            assert places(trainer.agents) == ["cuda", "cpu"]
            assert places(trainer.references) == ["cpu", "cuda"]
        else:
            rig(trainer, lambda i, prompt, k: answer(i, prompt, k))
        trainer.train()
        assert flat([p.cpu() for p in (*trainer.agents, *trainer.critics)]).isfinite().all()
        first.append([s for s in trainer.samples if s.row < 4])
    assert [s.prompt_ids for s in first[0]] == [s.prompt_ids for s in first[1]]
    if "-v" in variant:
        for a, b in zip(*first, strict=True):
            assert a.old_value == pytest.approx(b.old_value, abs=1e-3)
