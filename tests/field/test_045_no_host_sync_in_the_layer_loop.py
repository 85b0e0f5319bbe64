"""Field case 45: DeepSpeed #1130.

In: a 10B model with NVMe offload.
Bad: 2.3 TFLOP/s: the host waits for a copy, then for a layer, then for a copy.
Good: no host synchronisation inside the layer loop. The compute lane only ever waits for events on its own device.
"""

import contextlib
import threading

import pytest
import torch
from disturb import FEWEST
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.actors import sliding_window
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.schedule import COMPUTE, GPU_LANES, StepShape, build_step


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("num_micro_batches, activation_slots", [(1, 1 << 30), (4, 3), (4, 8)])
def test_the_compute_lane_waits_for_no_other_process(num_micro_batches, activation_slots, clip):
    """In the plan: all its waits are for the GPU's own lanes. Parameters, and the optimizers behind them, are what the
    upload lane waits for; the download lane waits for slots."""
    layers = 6
    shape = StepShape(
        layers,
        num_micro_batches,
        trainable=(True,) * (layers + 2),
        tied=True,
        gradient_slots=layers if clip else 1,
        activation_slots=activation_slots,
        num_optimizer_actors=2,
        clip=clip,
    )
    for train in (True, False):
        lane = build_step(shape if train else StepShape(**{**vars(shape), "train": False})).lanes[COMPUTE]
        assert {name for op in lane.ops for name, _ in op.waits} <= set(GPU_LANES)


def test_the_compute_thread_waits_for_no_counter(tmp_path, monkeypatch):
    """In a run: the thread that issues the layers never sleeps on the shared page."""
    waiting, wait = set(), CounterPage.wait

    def recorded(page, *args):
        waiting.add(threading.current_thread().name)
        return wait(page, *args)

    monkeypatch.setattr(CounterPage, "wait", recorded)
    with open_tiers(make_config(save_small_model(tmp_path / "model", "llama"), **FEWEST)) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed=step) for step in range(2)])
    assert waiting and all(name.startswith("lane") for name in waiting)  # not "actor1", which runs the compute lane


@pytest.mark.gpu
@pytest.mark.parametrize("max_grad_norm", [0.5, None], ids=["clipping", "no clipping"])
def test_gpu_no_lane_synchronises(tmp_path, monkeypatch, max_grad_norm):
    """PyTorch raises at every implicit synchronisation (a blocking copy, .item(), nonzero) while a lane runs. The
    upload lane's wait for a staging buffer's event is none: the other lanes go on."""
    forbidden, lock, active = False, threading.Lock(), 0
    run_in_order = sliding_window.run_in_order

    @contextlib.contextmanager
    def lane_running():
        nonlocal active
        with lock:
            active += 1
            torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        try:
            yield
        finally:
            with lock:
                active -= 1
                if active == 0:
                    torch.cuda.set_sync_debug_mode("default")

    def guarded(*args):
        with lane_running():
            run_in_order(*args)

    monkeypatch.setattr(sliding_window, "run_in_order", guarded)
    changes = {**FEWEST, "precision": "bf16", "optimizer__max_grad_norm": max_grad_norm}
    model = save_small_model(tmp_path / "model", "llama")
    with open_tiers(make_config(model, device="cuda", **changes)) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed=0)])  # libraries make their workspaces
        forbidden = True
        reports = run_steps(tiers, [random_batch(4, 2, seed=step) for step in (1, 2)], first=1)
        assert len(reports) == 2
