"""A run that stops half-way and is resumed ends as the one that was never stopped."""

import pytest
import torch
from test_cli import rows, without_time
from test_core import make_trainer


class Stop(Exception):
    """Stands for whatever may go wrong in a user's function."""


@pytest.mark.parametrize("variant", ["iac-v", "iac-shared-q", "maac-q"])
@pytest.mark.parametrize("stop_at", [47])
def test_resumed_run_equals_the_uninterrupted_one(variant, stop_at, tmp_path):
    def trainer(folder, stop_at=None):
        args = {
            "num_turns": 2,
            "num_train_epochs": 2,
            "rollout_buffer_size": 6,
            "eval_interval": 4,
            "eval_batch_size": 4,
            "checkpoint_interval": 1,
        }
        args |= {
            "reference_kl_enabled": True,
            "early_termination_threshold": 0.9,
            "rollout_batch_size": 2,
        }
        made = make_trainer(
            variant, args | {"agent_learning_rate": 1e-3}, output_dir=str(tmp_path / folder)
        )
        calls, reward = [], made.reward_func

        def stopping(*completions, batch_items):
            calls.append(1)
            if len(calls) == stop_at:
                raise Stop
            return reward(*completions, batch_items=batch_items)

        made.reward_func = stopping
        return made

    whole = trainer("whole")
    whole.train()
    with pytest.raises(Stop):
        trainer("stopped", stop_at).train()
    assert (tmp_path / "stopped" / "checkpoint" / "state.pt").exists()
    resumed = trainer("unused")
    resumed.train(resume_from=str(tmp_path / "stopped"))
    assert without_time(tmp_path / "stopped") == without_time(tmp_path / "whole")
    assert rows(tmp_path / "stopped", "completions.jsonl") == rows(
        tmp_path / "whole", "completions.jsonl"
    )
    for one, other in zip(
        [*whole.agents, *whole.critics], [*resumed.agents, *resumed.critics], strict=True
    ):
        assert all(
            torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True)
        )
    assert resumed.updates == whole.updates >= 6 and not (tmp_path / "unused").exists()
