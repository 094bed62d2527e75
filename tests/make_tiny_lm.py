"""Build tests/tiny_lm: a character-level Llama of about 0.1 M parameters that plays "sum to n" at random.

Its one skill is to answer a prompt that names n with a number drawn uniformly from 0..n, whoever asks and whatever
was said before, and then to stop. Training agents on the sum therefore starts from a known, unskilled policy.
Run `python tests/make_tiny_lm.py`; the result depends only on the seed. It ends by printing what the model does.
"""

import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

FOLDER = Path(__file__).parent / "tiny_lm"
SEED, STEPS, BATCH, JOINT_BATCH, LEARNING_RATE = 0, 1500, 64, 8, 2e-3
CHARACTERS = ["\n"] + [chr(code) for code in range(32, 127)]


def prompt(agent, agents, n, said=None):
    heard = f", said {' '.join(said)}" if said else ""
    return f"agent {agent} of {agents}: sum to {n}{heard} ="


def random_said(rng, agents):
    """One answer per agent: a digit, or now and then something longer or unreadable."""
    odd = ["?"] + [str(number) for number in range(10, 20)]
    return [rng.choice(odd) if rng.random() < 0.05 else str(rng.randrange(10)) for _ in range(agents)]


def random_round(rng):
    agents, n = rng.choice([1, 2, 2, 2, 3, 4]), rng.randrange(10)
    said = random_said(rng, agents) if rng.random() < 0.5 else None
    return n, [prompt(i, agents, n, said) for i in range(1, agents + 1)]


def joint(prompts):
    """The prompts of all the agents in one round, as a central critic reads them."""
    return "\n".join(f"[agent {i}]\n{text}" for i, text in enumerate(prompts, 1))


def make_tokenizer():
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: index for index, token in enumerate([*special.values(), *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    inputs = {
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 512,
        "padding_side": "left",
    }
    return PreTrainedTokenizerFast(tokenizer_object=characters, clean_up_tokenization_spaces=False, **special, **inputs)


def mean_loss(model, tokenizer, texts, starts):
    """Cross-entropy of the tokens of the texts, each from its start on."""
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    counted = batch.attention_mask.bool() & (torch.arange(batch.input_ids.shape[1]) >= torch.tensor(starts)[:, None])
    return model(**batch, labels=batch.input_ids.masked_fill(~counted, -100)).loss


def train(tokenizer):
    rng = random.Random(SEED)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes, **ids)
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(1, STEPS + 1):
        rounds = [random_round(rng) for _ in range(BATCH)]
        asked = [rng.choice(prompts) for _, prompts in rounds]
        answered = [f"{text}{rng.randint(0, n)}<eos>" for text, (n, _) in zip(asked, rounds, strict=True)]
        answer_loss = mean_loss(model, tokenizer, answered, [len(text) for text in asked])
        joints = [joint(prompts) for _, prompts in rounds if len(prompts) > 1][:JOINT_BATCH]
        joint_loss = mean_loss(model, tokenizer, joints, [0] * len(joints))
        optimizer.zero_grad()
        (answer_loss + 0.2 * joint_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(
                f"step {step}: loss of the answer {answer_loss:.3f}, of the joint text {joint_loss:.3f}",
                flush=True,
            )
    return model.eval()


@torch.no_grad()
def check(model, tokenizer, with_said):
    """Print how far the answers are from uniform, whether they stop, and what two independent agents can expect."""

    def next_token(texts):
        return model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, -1].softmax(-1)

    rng, digits, rows = (
        random.Random(SEED + 1),
        tokenizer.convert_tokens_to_ids(list("0123456789")),
        [],
    )
    cases = [(i, agents) for agents in range(1, 5) for i in range(1, agents + 1)] * 10
    print("later turns, with what was said:" if with_said else "first turn:")
    for n in range(10):
        asked = [prompt(i, agents, n, random_said(rng, agents) if with_said else None) for i, agents in cases]
        answers, uniform = next_token(asked), torch.zeros(len(tokenizer))
        uniform[digits[: n + 1]] = 1 / (n + 1)
        ends = next_token([text + digit for text in asked for digit in "0123456789"])[:, tokenizer.eos_token_id]
        one_digit = answers[:, digits] * ends.view(-1, 10)
        first, second = (one_digit[cases.index((i, 2)) :: 10].mean(0) for i in (1, 2))
        reward = first @ (1 - (torch.arange(10)[:, None] + torch.arange(10) - n).abs() / 5).clamp(min=0) @ second
        rows.append(torch.stack([(answers - uniform).abs().sum(-1).mean() / 2, one_digit.sum(-1).mean(), reward]))
    for name, row in [*((f"n={n}", row) for n, row in enumerate(rows)), ("mean", sum(rows) / 10)]:
        distance, ending, reward = row.tolist()
        print(f"  {name}: total variation {distance:.3f}, one digit then <eos> {ending:.4f}, reward {reward:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = train(tokenizer)
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(FOLDER),
        AutoTokenizer.from_pretrained(FOLDER),
    )
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in ["".join(CHARACTERS), " .  ,\n n't ?"])
    print(f"{model.num_parameters()} parameters")
    for with_said in (False, True):
        check(model, tokenizer, with_said)
