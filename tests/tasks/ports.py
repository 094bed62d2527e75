"""A task written for comlrl's actor-critic trainers, whose functions run here as they are.

The agents write one line each; the second line should be about twice as long as the first. In a second turn each is
told what both said before and tries again.
"""

train_dataset = [{"prompt": f"Describe the number {n}.", "target": 1.5 + 0.1 * n} for n in range(6)]
eval_dataset = train_dataset[:2]
formatters = [
    lambda example: f"Briefly. {example['prompt']}",
    lambda example, external_prompts=None: f"At length. {external_prompts or example['prompt']}",
]


def reward_func(first, second, *, batch_items):
    target = batch_items[0]["target"]
    return [-abs(len(b) / max(len(a), 1) - target) for a, b in zip(first, second, strict=True)]


def external_transition(
    prompt,
    agent_completions,
    num_agents,
    prompt_history_per_agent=None,
    response_history_per_agent=None,
):
    assert len(prompt_history_per_agent) == len(response_history_per_agent) == num_agents
    assert [history[-1] for history in response_history_per_agent] == list(agent_completions)
    said = " / ".join(agent_completions)
    return [f"{prompt} Agent {i + 1}, you all said: {said}. Again:" for i in range(num_agents)]


def reward_processor(reward):
    return 1.0 + max(reward, -1.0)


def metrics_callback(samples):
    return {"second_turn_share": sum(s.turn_idx for s in samples) / len(samples)}
