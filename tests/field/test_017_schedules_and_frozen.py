"""Field case 17: pytorch/ao #959, #1209.

In: a learning rate schedule, or frozen parameters, with an optimizer whose states are on the host.
Bad: a TypeError, or an error from a hook that frozen parameters do not have.
Good: any schedule works; frozen parameters are never updated, have no state, and nothing of theirs is sent back.
"""

import pytest
import torch
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.lr_schedule import learning_rate
from slideformer_ray.schedule import build_step

FROZEN = ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.mlp.*"]
STEPS = 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_any_schedule_with_frozen_parameters(tmp_path, schedule, warmup_steps, device):
    """Each step has the schedule's rate, trained masters move, frozen ones keep every bit."""
    model = save_small_model(tmp_path / "model", "llama")
    changes = {"optimizer__schedule": schedule, "optimizer__warmup_steps": warmup_steps, "training__steps": STEPS}
    with open_tiers(make_config(model, device=device, precision="bf16", model__frozen=FROZEN, **changes)) as tiers:
        params = [p for block in tiers.spec.blocks for p in block.params]
        before = {p.name: parameter(tiers, p) for p in params}
        reports = run_steps(tiers, [random_batch(4, 2, seed=step) for step in range(STEPS)])
        rates = [report.updates[0].learning_rate for report in reports]
        assert rates == [learning_rate(step, STEPS, 1e-3, schedule, warmup_steps) for step in range(STEPS)]
        assert {p.name for p in params if torch.equal(parameter(tiers, p), before[p.name])} == {
            p.name for p in params if p.frozen
        }


def parameter(tiers, param):
    """What the GPU reads, and the exact master where there is one."""
    block = next(block for block in tiers.spec.blocks if param in block.params)
    hi = tiers.buffers[f"hi.{block.index}"].tensor(tiers.layout.dtype)[param.offset : param.offset + param.numel]
    return hi.float() if param.frozen else tiers.master(param.name)


def test_nothing_of_a_frozen_parameter_travels_back_or_has_states(tmp_path):
    """Neither a download nor an update of a block that is frozen whole; of the others the trained part alone. No
    gradient buffer for the embedding; ten bytes of private memory for each trained parameter and none for others."""
    model = save_small_model(tmp_path / "model", "llama")
    with open_tiers(make_config(model, precision="bf16", model__frozen=FROZEN)) as tiers:
        slots = {i: tiers.buffers[f"grad.{i}"].tensor(tiers.layout.dtype) for i in range(tiers.layout.gradient_slots)}
        for slot in slots.values():
            slot.fill_(7.0)
        run_steps(tiers, [random_batch(4, 2, seed=0)])
        plan = build_step(tiers.layout.shape(2, True))
        sent = {op.block for op in plan.ops if op.kind == "download_gradient"}
        assert sent == {op.block for op in plan.ops if op.kind == "update"} == {2, 3, 4}  # layers 1 and 2, the head
        for op in plan.ops:
            if op.kind == "download_gradient" and op.grad_slot >= 0:
                trained = tiers.spec.blocks[op.block].trainable_numel
                assert (slots[op.grad_slot][trained:] == 7.0).all(), f"block {op.block} sent more than its gradient"
        assert not any(op.kind == "backward" and op.block == 1 for op in plan.ops)
        assert "grad.embed" not in tiers.buffers
        trained = sum(block.trainable_numel for block in tiers.spec.blocks)
        assert sum(shard.state_bytes for shard in tiers.shards) == 10 * trained
