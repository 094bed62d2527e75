"""A quick start as the users of comlrl know it; of it only the import line is another one here.

The reward is how far the second answer is from three times the length of the first. It is a script, not a task file:

    PYTHONPATH=. python tests/tasks/quick_start.py
"""

from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer

from maac import MAACConfig, MAACTrainer

model = str(Path(__file__).parent.parent / "tiny_lm")
tokenizer = AutoTokenizer.from_pretrained(model)
dataset = Dataset.from_dict({"prompt": [f"agent 1 of 2: sum to {n} =" for n in range(8)]})

trainer = MAACTrainer(
    agent_model=model,
    critic_model=model,
    tokenizer=tokenizer,
    reward_func=lambda a, b: [abs(max(len(b[0]), 1) / max(len(a[0]), 1) - 3.0)],
    formatters=[lambda example: example["prompt"]] * 2,
    args=MAACConfig(num_agents=2, max_new_tokens=8, rollout_buffer_size=4),
    train_dataset=dataset,
)
trainer.train()
