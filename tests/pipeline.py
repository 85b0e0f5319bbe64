"""Runs the tiers on small models and random rows, for tests; pyproject.toml puts this folder on the path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from slideformer_ray.budget import Machine, resolve
from slideformer_ray.checkpoint import CheckpointWriter
from slideformer_ray.config import RunConfig
from slideformer_ray.data.batches import MicroBatch, StepBatch
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.tiers import LocalTiers, StepReport, Tiers
from slideformer_ray.trainer import submit_batch

VOCAB = 160


def save_small_model(
    directory: Path, family: str = "llama", *, tied: bool = False, layers: int = 3, seed: int = 0
) -> Path:
    """A random model of some 100,000 parameters with odd sizes, in safetensors."""
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    config = kind(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=104,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=None,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # norms and biases that are not 1 and 0, so that losing one shows
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(directory)
    return directory


def random_batch(
    rows: int, micro_batch_rows: int, seed: int, *, longest: int = 40, supervised: float = 0.5
) -> StepBatch:
    """Rows of unequal length, right-padded; about `supervised` of the tokens are."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, longest + 1, rows)
    ids_of = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    kept = [rng.random(n - 1) < supervised for n in lengths]
    kept[0][0] = True
    micro = []
    for start in range(0, rows, micro_batch_rows):
        chosen = range(start, min(start + micro_batch_rows, rows))
        seq = max(lengths[i] for i in chosen)
        ids, targets = np.zeros((len(chosen), seq), np.int32), np.full((len(chosen), seq), -100, np.int32)
        for r, i in enumerate(chosen):
            ids[r, : lengths[i]] = ids_of[i]
            targets[r, : lengths[i] - 1] = np.where(kept[i], ids_of[i][1:], -100)
        micro.append(MicroBatch(ids, targets))
    return StepBatch(tuple(micro), int(sum(k.sum() for k in kept)), int(lengths.sum()), tuple(range(rows)))


def as_torch(batch: StepBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(m.ids).long(), torch.from_numpy(m.targets).long()) for m in batch.micro_batches]


def make_config(
    model_dir: Path,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    rows: int = 4,
    micro_batch_rows: int = 2,
    **changes,
) -> RunConfig:
    """`changes`: section__key=value."""
    values: dict = {
        "run_dir": model_dir / "run",
        "model": {"path": model_dir},
        "data": {"train": [model_dir / "none.jsonl"], "seq_len": 40, "pad_to_multiple": 8},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "schedule": "cosine"},
        "training": {"steps": 20, "rows_per_step": rows, "micro_batch_rows": micro_batch_rows, "precision": precision},
        "placement": {"device": device, "threads_per_optimizer_actor": 1, "num_optimizer_actors": 1},
        "debug": {"poison_freed_slots": True, "wait_timeout_s": 60},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return RunConfig.from_dict(values)


def open_tiers(config: RunConfig, tiers: type[Tiers] = LocalTiers, *, load: bool = True) -> Tiers:
    hf_config = load_hf_config(config.model.path)
    spec = describe_model(hf_config, config.model.frozen)
    plan = resolve(config, spec, hf_config.intermediate_size, Machine.read(config.placement.device))
    opened = tiers(config, hf_config, spec, plan, config.training.steps)
    if load:
        opened.load_weights(config.model.path)
    return opened


def run_steps(tiers: Tiers, batches: list[StepBatch], first: int = 0, *, look_ahead: bool = True) -> list[StepReport]:
    """Training steps, one submitted ahead as the trainer does. `look_ahead`: each step knows the one after it."""
    reports, ahead = [], []
    for i, batch in enumerate(batches):
        if len(ahead) == 2:
            reports.append(tiers.gather(ahead.pop(0)))
        following = batches[i + 1] if look_ahead and i + 1 < len(batches) else None
        ahead.append(submit_batch(tiers, batch, first + i, first + i, train=True, following=following))
    return reports + [tiers.gather(pending) for pending in ahead]


@dataclass
class State:
    """Everything that a run leaves behind, for comparison of bits."""

    tensors: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, State)
        return self.losses == other.losses and self.norms == other.norms and not self.differing(other)

    def differing(self, other: State) -> list[str]:
        return [name for name, tensor in self.tensors.items() if not torch.equal(tensor, other.tensors[name])]


def state_of(tiers: Tiers, reports: list[StepReport]) -> State:
    """Masters and moments as seen from outside, put together from however many actors."""
    tensors = {}
    for param in (p for block in tiers.spec.blocks for p in block.params if not p.frozen):
        tensors[f"master {param.name}"] = tiers.master(param.name)
        for state in ("exp_avg", "exp_avg_sq"):
            tensors[f"{state} {param.name}"] = tiers.state(state, param.name)
    return State(tensors, [r.gpu.loss for r in reports], [r.gpu.grad_norm for r in reports])


def save(tiers: Any, config: RunConfig, steps_done: int) -> Path:
    """A complete checkpoint of what the tiers hold, between two steps."""
    writer = CheckpointWriter(config, tiers.spec, tiers)
    writer.begin(steps_done)
    return writer.finish({"config": config.model_dump(mode="json")}).path


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its key, as the library reads them."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits are not the same."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double().cpu()
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
