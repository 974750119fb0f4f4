"""Converts a model from a GGUF file to a folder with safetensors.

Run it as ``python -m tierstore.demo.convert GGUF OUT NAME``. It runs in a separate process, because it needs
gigabytes of memory, which are freed when that process ends. It prints one line per stage and does not use the
network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, out: Path, name: str) -> None:
    """Convert the model in a GGUF file to bfloat16, and write its config, tokenizer and weights.

    Args:
        gguf: The GGUF file.
        out: The folder to write to.
        name: The model's name, which is written to the config.
    """
    source, file = str(gguf.parent), gguf.name
    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file, local_files_only=True)
    tokenizer.save_pretrained(out)
    _say("reading and dequantising the weights")
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=file,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    torch.nn.Module.to(model, torch.bfloat16)
    if "quantization_config" in model.config.to_dict():
        del model.config.quantization_config
    model.config._name_or_path = name
    _say("writing safetensors")
    model.save_pretrained(out)


def _say(stage: str) -> None:
    sys.stdout.write(stage + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
