"""A model directory's answer to one prompt, through transformers alone: what a user would get from the saved model.

Used by the quickstart, before and after the training. Tested by tests/test_cli.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(model_dir: Path, prompt: str, max_new_tokens: int = 32) -> str:
    """Greedy text of the assistant's turn after `prompt`, on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True).eval()
    messages = [{"role": "user", "content": prompt}]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return str(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)).strip()
