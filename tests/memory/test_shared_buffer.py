"""SharedBuffer: views over private memory first, then one Ray node with actors that write into the driver's buffers.

The tests of plasma_store.py that need a running node stand at the end, so that one node serves both.
"""

import dataclasses
import gc
import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import ray
import torch

from slideformer_ray.memory.counters import Aborted, CounterPage
from slideformer_ray.memory.pinning import register
from slideformer_ray.memory.plasma_store import (
    SYSTEM_CONFIG,
    StoreTooSmall,
    join_cluster,
    ray_start_command,
    read_store_stats,
    start_local_node,
)
from slideformer_ray.memory.proc_maps import is_memory_file
from slideformer_ray.memory.shared_buffer import DivergedBuffer, SharedBuffer

MIB = 2**20
PAGE_NAMES = ["ping", "pong"]

# ---------------------------------------------------------------- without Ray


def test_private_buffer_is_page_aligned_zeros():
    """The pure classes get what actors get: aligned, zeroed, writable memory of exactly the size asked for."""
    buffer = SharedBuffer.private("odd", 5001)
    assert buffer.address % 4096 == 0 and buffer.page_range == (buffer.address, 8192)
    view = buffer.numpy(np.uint8)
    assert view.shape == (5001,) and view.flags.writeable and not view.any()


def test_views_are_windows_on_the_same_bytes():
    """numpy counts its offset in bytes, torch in elements; both see each other's writes."""
    buffer = SharedBuffer.private("views", 64)
    buffer.tensor(torch.float32, offset_elements=2, numel=3).fill_(1.5)
    assert buffer.numpy(np.float32).tolist() == [0, 0, 1.5, 1.5, 1.5] + [0] * 11
    assert buffer.numpy(np.float32, offset_bytes=8, count=2).tolist() == [1.5, 1.5]
    assert buffer.tensor(torch.bfloat16).shape == (32,)
    assert buffer.tensor(torch.int64).data_ptr() == buffer.address


def test_empty_slice_is_an_empty_tensor():
    """A layer smaller than the number of optimizer actors leaves some of them nothing."""
    assert SharedBuffer.private("tiny", 8).tensor(torch.float32, offset_elements=2).shape == (0,)


@pytest.mark.parametrize(
    "view",
    [lambda b: b.tensor(torch.float32, 0, 17), lambda b: b.numpy(np.float32, 4, 16), lambda b: b.numpy("f4", 65)],
)
def test_views_past_the_end_are_refused(view):
    """The padding up to the page belongs to nobody."""
    with pytest.raises(ValueError):
        view(SharedBuffer.private("short", 64))


def test_making_tensors_warns_of_nothing(recwarn):
    """torch warns of read-only memory; ours is writable."""
    SharedBuffer.private("quiet", 64).tensor(torch.uint8)
    assert not recwarn.list


def test_tensor_outlives_its_buffer():
    """A view alone keeps the memory: closing the buffer under a running copy frees nothing."""
    buffer = SharedBuffer.private("closed", 4 * MIB)
    tensor = buffer.tensor(torch.int32)
    buffer.close()
    buffer.close()
    del buffer
    gc.collect()
    assert tensor.fill_(3).sum() == 3 * MIB


def test_private_memory_has_no_handle():
    """Memory of one process cannot be sent to another."""
    with pytest.raises(AssertionError, match="not this process's to hand out"):
        SharedBuffer.private("mine", 64).handle()


def test_private_memory_is_no_shared_mapping():
    """What the kernel does not map rw-s is never taken for a shared buffer."""
    with pytest.raises(DivergedBuffer, match="not in one writable shared mapping"):
        _ = SharedBuffer.private("mine", 64).file_offset


def test_file_on_a_disk_is_refused(tmp_path):
    """Ray's silent fallback to files under /tmp is found out by the path of the mapping (ray #14326)."""
    if is_memory_file(str(tmp_path)):
        pytest.skip("the temporary directory is memory")
    path = tmp_path / "plasma"
    path.write_bytes(bytes(8192))
    with open(path, "r+b") as file:
        fallback = np.frombuffer(mmap.mmap(file.fileno(), 8192), np.uint8)
    with pytest.raises(DivergedBuffer, match="plasma, which is on a disk"):
        _ = SharedBuffer("grad.0", 100, fallback).file_offset


# ---------------------------------------------------------------- with Ray


@ray.remote(num_cpus=0)
class Actor:
    """Attaches to what it is sent, and writes, reads and waits there when told."""

    def __init__(self, *handles):
        self.buffers = {handle.name: SharedBuffer.attach(handle) for handle in handles}

    def file_offset(self, name):
        return self.buffers[name].file_offset

    def fill(self, name, value):
        self.buffers[name].tensor(torch.bfloat16).fill_(value)

    def sum(self, name):
        return self.buffers[name].tensor(torch.bfloat16).float().sum().item()

    def pointers(self, name):
        buffer = self.buffers[name]
        return buffer.address, buffer.tensor(torch.uint8).data_ptr(), buffer.numpy(np.uint8).ctypes.data

    def page(self, name):
        return CounterPage(self.buffers[name].numpy(np.uint8), PAGE_NAMES)

    def echo(self, name, hops):
        page = self.page(name)
        for i in range(1, hops + 1):
            page.wait("ping", i, timeout_s=30)
            page.signal("pong", i)

    def wait_until_aborted(self, name):
        page = self.page(name)
        page.signal("pong", 1)
        page.wait("ping", 1, timeout_s=30)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def buffer(ray_node):
    buffer = SharedBuffer.create("grad.0", 3 * MIB + 10)
    yield buffer
    buffer.close()


def test_actors_see_the_drivers_bytes(buffer):
    """Driver and actors map the same byte of the same memory file, and each sees what the others write."""
    actors = [Actor.remote(buffer.handle()) for _ in range(2)]
    offsets = ray.get([actor.file_offset.remote("grad.0") for actor in actors])
    assert offsets == [buffer.file_offset] * 2
    here = buffer.tensor(torch.bfloat16)
    assert here.sum() == 0
    here[7] = 5
    assert ray.get([actor.sum.remote("grad.0") for actor in actors]) == [5, 5]
    ray.get(actors[0].fill.remote("grad.0", 0.5))
    assert (here == 0.5).all()
    assert ray.get(actors[1].sum.remote("grad.0")) == 0.5 * here.numel()


def test_pointers_stay_where_they_are(buffer):
    """Addresses hold for the whole run, whatever else is created, freed or collected: copies may be under way."""
    actor = Actor.remote(buffer.handle())
    first = ray.get(actor.pointers.remote("grad.0"))
    assert len(set(first)) == 1 and first[0] % 4096 == 0
    address = buffer.address
    for size in (MIB, 5 * MIB, 17):
        SharedBuffer.create("other", size).close()
        gc.collect()
    assert ray.get(actor.pointers.remote("grad.0")) == first
    assert buffer.tensor(torch.uint8).data_ptr() == buffer.address == address


def test_diverged_buffer_is_refused(buffer):
    """An actor that would see other bytes than the driver ends with an error that shows both places."""
    handle = buffer.handle()
    elsewhere = dataclasses.replace(handle.file_offset, offset=handle.file_offset.offset + 4096)
    actor = Actor.remote(dataclasses.replace(handle, file_offset=elsewhere))
    with pytest.raises(ray.exceptions.RayActorError, match="DivergedBuffer.*grad.0"):
        ray.get(actor.sum.remote("grad.0"))


def test_killed_actor_leaves_the_contents(buffer):
    """A fresh actor attaches to what a killed one wrote, at the same place."""
    actor = Actor.remote(buffer.handle())
    ray.get(actor.fill.remote("grad.0", 2))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.die.remote())
    fresh = Actor.remote(buffer.handle())
    assert ray.get(fresh.sum.remote("grad.0")) == 2 * buffer.tensor(torch.bfloat16).numel()
    assert ray.get(fresh.file_offset.remote("grad.0")) == buffer.file_offset


def test_counters_between_driver_and_actor(ray_node):
    """A page of two counters is small, yet lies in the store like every buffer; 300 hops need no Ray call."""
    buffer = SharedBuffer.create("counters", CounterPage.nbytes(len(PAGE_NAMES)))
    page = CounterPage(buffer.numpy(np.uint8), PAGE_NAMES)
    done = Actor.remote(buffer.handle()).echo.remote("counters", 300)
    for i in range(1, 301):
        page.signal("ping", i)
        page.wait("pong", i, timeout_s=30)
    ray.get(done)


def test_abort_reaches_a_waiting_actor(ray_node):
    """The driver's reason becomes the error of the actor's call."""
    buffer = SharedBuffer.create("counters", CounterPage.nbytes(len(PAGE_NAMES)))
    page = CounterPage(buffer.numpy(np.uint8), PAGE_NAMES)
    done = Actor.remote(buffer.handle()).wait_until_aborted.remote("counters")
    page.wait("pong", 1, timeout_s=30)
    page.abort("storage actor: disk full")
    with pytest.raises(Aborted, match="storage actor: disk full"):
        ray.get(done)


def test_creating_takes_the_memory_once(ray_node):
    """The zeros that are put into the store never become memory of the driver."""
    before = anonymous_bytes()
    buffer = SharedBuffer.create("large", 32 * MIB)
    assert anonymous_bytes() - before < 8 * MIB
    buffer.close()


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def test_full_store_fails_at_once_and_clearly(ray_node):
    """No waiting, no spilling, no file on a disk: one error with both numbers, and what fits still fits afterwards."""
    started = time.perf_counter()
    with pytest.raises(StoreTooSmall, match=r"'grad.1' needs 4096.0 MiB, the object store has .* MiB free of"):
        SharedBuffer.create("grad.1", 4096 * MIB)
    assert time.perf_counter() - started < 2
    SharedBuffer.create("grad.1", MIB).close()
    assert ray_node.spilled_bytes() == 0


def test_closed_buffer_is_freed(ray_node):
    """When the last view is gone the store has the room back."""
    used = read_store_stats().used_bytes
    buffer = SharedBuffer.create("temporary", 16 * MIB)
    assert read_store_stats().used_bytes >= used + 16 * MIB
    buffer.close()
    deadline = time.perf_counter() + 20
    while read_store_stats().used_bytes > used and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert read_store_stats().used_bytes <= used


@pytest.mark.gpu
def test_gpu_copies_from_and_to_registered_plasma(buffer):
    """Plasma memory is pinned in place: PyTorch says so, and asynchronous copies both ways are exact."""
    registration = register([buffer.page_range])
    host = buffer.tensor(torch.bfloat16)
    assert host.is_pinned()
    host.copy_(torch.randn(host.numel()))
    expected = host.clone() * 2
    on_gpu = host.to("cuda", non_blocking=True)
    host.copy_(on_gpu * 2, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    registration.unregister()


# ---------------------------------------------------------------- the node itself (plasma_store.py)


def join_in_another_process(address, nbytes):
    """Run `join_cluster` as a job's driver would; return its output or the error's text."""
    code = (
        "from slideformer_ray.memory.plasma_store import join_cluster\n"
        f"try: node = join_cluster({address!r}, {nbytes})\n"
        "except ValueError as error: print(error)\n"
        "else: print('joined', node.address, node.started_here, node.spilled_bytes()); node.shutdown()"
    )
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60).stdout


def test_local_node_spills_nothing_and_lets_workers_run_at_nice_0(ray_node):
    """The node runs with our settings, read back from the cluster itself."""
    assert ray._private.state.state.get_system_config() == SYSTEM_CONFIG
    assert ray.get(ray.remote(lambda: os.nice(0)).options(num_cpus=0).remote()) == 0


def test_second_connection_is_refused(ray_node):
    """A process that is connected to Ray already keeps its connection; ours never takes it over."""
    for start in (lambda: start_local_node(80 * MIB, 1, 0), lambda: join_cluster(ray_node.address, 80 * MIB)):
        with pytest.raises(ValueError, match="connected to Ray already"):
            start()


def test_fit_cluster_is_joined(ray_node):
    """A cluster set up as ours is taken as it is, and only left at the end."""
    output = join_in_another_process(ray_node.address, 76 * MIB)
    assert output.split() == ["joined", ray_node.address, "False", "0"]
    assert ray.is_initialized() and read_store_stats().capacity_bytes > 0


def test_cluster_with_a_small_store_is_refused(ray_node):
    """The refusal has both sizes and the exact command."""
    output = join_in_another_process(ray_node.address, 8192 * MIB)
    assert "its object store here is 0.10 GiB, 8.00 GiB are needed" in output
    assert ray_start_command(8192 * MIB) in output
