"""resident.py: the Hugging Face model that the window is compared with."""

import dataclasses

import pytest
import torch

from slideformer_ray.bench import resident
from slideformer_ray.bench.batches import random_batch
from slideformer_ray.bench.case import Case
from slideformer_ray.bench.host_memory import MachineMemory
from slideformer_ray.bench.resident import ResidentModel, as_labels, measure_resident
from slideformer_ray.bench.result import BenchResult
from slideformer_ray.data.batches import IGNORE_INDEX
from slideformer_ray.data.quickstart import quickstart_model_dir

CASE = Case(
    "2 rows", "tiny", str(quickstart_model_dir()), 2, 16, "resident", ("placement.device=cpu",), warmup=1, steps=2
)


def test_labels_are_those_of_transformers():
    """Unshifted: the model shifts them itself, so every target of ours is one of its."""
    batch = random_batch(2, 8, 2, vocab_size=50, seed=0)
    ids, labels = as_labels(batch)
    assert (labels[:, 0] == IGNORE_INDEX).all() and torch.equal(labels[:, 1:], ids[:, 1:])


def test_it_trains_every_parameter():
    """Losses fall on the one batch, layers are checkpointed, and only timed steps are timed."""
    model = ResidentModel(dataclasses.replace(CASE, steps=4, settings=(*CASE.settings, "optimizer.learning_rate=1e-2")))
    before = [p.detach().clone() for p in model.model.parameters()]
    seconds, losses = model.run(dataclasses.replace(CASE, steps=4))
    assert len(seconds) == 4 and len(losses) == 5 and losses[-1] < losses[0]
    assert not any(torch.equal(p, old) for p, old in zip(model.model.parameters(), before, strict=True))
    assert model.model.is_gradient_checkpointing
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    result = model.result(CASE, seconds, losses, 1)
    assert result.parameters == sum(p.numel() for p in model.model.parameters()) and result.tokens == 32


@pytest.fixture
def rates(monkeypatch):
    """Seconds of a step by rows, instead of the model's own; None: out of memory."""
    seconds_of: dict[int, float | None] = {}

    def run(self, case):
        if seconds_of[case.rows] is None:
            raise torch.OutOfMemoryError
        return [seconds_of[case.rows]], [1.0]

    monkeypatch.setattr(resident.ResidentModel, "run", run)
    return seconds_of


def measured(cases, larger):
    outcomes = []
    measure_resident(cases, MachineMemory(), outcomes.append, larger=larger)
    return [(r.rows if isinstance(r, BenchResult) else f"{r.case.rows} failed") for r in outcomes]


def test_larger_batches_are_tried_while_they_are_faster(rates):
    """8 rows are as fast as 4: they are the last."""
    rates.update({2: 1.0, 4: 1.5, 8: 3.0})
    assert measured([CASE], larger=True) == [2, 4, 8]
    assert measured([CASE], larger=False) == [2]


def test_a_batch_beyond_the_memory_ends_it(rates):
    """What was asked for and does not fit is said, all of it."""
    rates.update({2: 1.0, 4: None})
    assert measured([CASE], larger=True) == [2, "4 failed"]
    more = [dataclasses.replace(CASE, rows=rows) for rows in (2, 4, 8)]
    assert measured(more, larger=True) == [2, "4 failed", "8 failed"]
