"""A block is written before its next update may start, and the one that is waited for comes first."""

import errno
import os
import threading

import pytest
import torch
from pipeline import save_small_model

from slideformer_ray.actors.block_saver import BlockSaver
from slideformer_ray.actors.slice_files import StateSlice
from slideformer_ray.checkpoint_layout import CheckpointLayout, state_dtypes
from slideformer_ray.durable import create_allocated
from slideformer_ray.model.layers import describe_model, load_hf_config


class Shard:
    """States of one actor, all of one value, whose blocks are given out when the test says so."""

    def __init__(self, directory, model):
        self.spec = describe_model(load_hf_config(model))
        self.layout = CheckpointLayout.of(self.spec, "fp32", 1 << 30)
        (directory / "model").mkdir(parents=True)
        (directory / "state").mkdir()
        for file in self.layout.files:
            create_allocated(directory / file.name, file.size, file.header)
        self.directory = directory
        self.tensors = [torch.ones(block.numel) for block in self.spec.blocks]
        self.may_begin = [threading.Event() for _ in self.spec.blocks]
        self.begun: list[int] = []

    def slices(self, block):
        self.begun.append(block)
        assert self.may_begin[block].wait(60)
        spec = self.spec.blocks[block]
        for state in state_dtypes("fp32"):
            yield StateSlice(spec, state, 0, spec.numel, self.tensors[block])

    def begin(self, order):
        return BlockSaver(self.slices, order, self.directory, self.layout.places, adam_step=3)


@pytest.fixture
def shard(tmp_path):
    return Shard(tmp_path / "saved", save_small_model(tmp_path / "model", "llama"))


def test_an_update_waits_for_its_block_alone(shard):
    """Block 1 is at work: an update of block 3 waits and comes next; afterwards nothing waits any more."""
    saver = shard.begin([1, 0, 2, 3, 4])
    done = threading.Event()

    def update():
        saver.before_update(3)
        shard.tensors[3].zero_()
        done.set()

    thread = threading.Thread(target=update)
    thread.start()
    while saver._waiting[0] != 3:  # the update has asked
        pass
    assert not done.is_set() and saver.poll() is None
    for block in (1, 3):
        shard.may_begin[block].set()
    assert done.wait(60)
    saver.before_update(1)  # written: returns at once
    for event in shard.may_begin:
        event.set()
    report = saver.wait()
    thread.join()
    assert shard.begun == [1, 3, 0, 2, 4]
    assert report.error is None and report.adam_step == 3 and report.update_waited_seconds > 0
    saved = b"".join((shard.directory / f.name).read_bytes()[len(f.header) :] for f in shard.layout.files)
    assert torch.frombuffer(bytearray(saved), dtype=torch.float32).eq(1).all()  # not one zero of the update


def test_a_failed_save_lets_updates_go_on(shard, monkeypatch):
    """The disk is full: what is said is the error, and no update waits for what will never be written."""

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = shard.begin(range(5))
    monkeypatch.setattr(os, "pwrite", full)
    for event in shard.may_begin:
        event.set()
    for block in range(5):
        saver.before_update(block)
    assert saver.wait().error.errno == errno.ENOSPC


def test_an_abandoned_save_ends_after_the_block_at_work(shard):
    saver = shard.begin(range(5))
    while not shard.begun:
        pass
    threading.Timer(0.05, shard.may_begin[0].set).start()
    saver.abandon()
    assert shard.begun == [0]
