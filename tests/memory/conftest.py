"""One small private Ray node for a module of tests: starting one costs seconds."""

import os

import pytest


@pytest.fixture(scope="module")
def ray_node():
    from slideformer_ray.memory.plasma_store import start_local_node, store_bytes

    shm_before = set(os.listdir("/dev/shm"))
    node = start_local_node(store_bytes([32 << 20, 32 << 20]), num_cpus=2, num_gpus=0)
    yield node
    node.shutdown()
    assert set(os.listdir("/dev/shm")) <= shm_before, "Ray left files in /dev/shm"
