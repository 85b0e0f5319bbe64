"""Field case 18: torchtune #1934, pytorch #124523, prime-rl's documentation.

In: an update that overlaps the backward, together with clipping or accumulation.
Bad: refused, or the update fires for each micro-batch, or before the norm is known.
Good: exact: one update a step, of the whole sum, scaled by the whole norm.
"""

import pytest
from pipeline import as_torch, make_config, open_tiers, random_batch, relative_error, run_steps, save_small_model

from slideformer_ray.reference import ReferenceTrainer
from slideformer_ray.schedule import build_step, update_lane

STEPS = 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_grad_norm", [0.5, None], ids=["clipping", "no clipping"])
def test_four_micro_batches_are_one_update(tmp_path, max_grad_norm, device):
    """Masters equal plain PyTorch's; each actor has applied one step a step, and run each update of its plan once."""
    model = save_small_model(tmp_path / "model", "llama", tied=True)
    config = make_config(
        model,
        device=device,
        rows=8,
        micro_batch_rows=2,
        optimizer__max_grad_norm=max_grad_norm,
        placement__num_optimizer_actors=2,
    )
    reference = ReferenceTrainer(
        model, precision="fp32", device=device, optimizer=config.optimizer, total_steps=config.training.steps
    )
    updates = []
    with open_tiers(config) as tiers:
        for shard in tiers.shards:
            update = shard._update

            def counted(op, shard=shard, update=update):
                updates.append((shard.actor, op.block, op.kind))
                update(op)

            shard._update = counted
        for step in range(STEPS):
            batch = random_batch(8, 2, seed=step)
            assert len(batch.micro_batches) == 4
            wanted = reference.step(as_torch(batch))
            assert max_grad_norm is None or wanted.grad_norm > 2 * max_grad_norm
            (report,) = run_steps(tiers, [batch], first=step)
            assert [update.applied_steps for update in report.updates] == [step + 1] * 2
        for name, master in reference.masters().items():
            assert relative_error(tiers.master(name), master) < 5e-5, name
        plan = build_step(tiers.layout.shape(4, True))
    once = [(k, op.block, op.kind) for k in range(2) for op in plan.lanes[update_lane(k)].ops]
    assert {block for _, block, _ in once} == set(range(5))
    assert sorted(updates) == sorted(once * STEPS)
