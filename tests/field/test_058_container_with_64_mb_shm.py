"""Field case 58 (ray PR #3149, #3223, #14326, #14616).

In: a container with Docker's default /dev/shm of 64 MB.
Bad: the store falls to /tmp, from 0.3 s to 7 s per GB, or fails without advice.
Good: our start-up check fails with the exact --shm-size.
"""

import pytest
import ray

from slideformer_ray.memory import plasma_store
from slideformer_ray.memory.plasma_store import HostLimits, StoreTooSmall, start_local_node, store_bytes

MIB, GIB = 2**20, 2**30


def test_start_is_refused_with_the_shm_size(monkeypatch):
    """Nothing is started, and the number in the advice is one that would have done."""
    container = HostLimits(
        ram_total=64 * GIB,
        ram_available=60 * GIB,
        cgroup_limit=None,
        cgroup_used=0,
        shm_total=64 * MIB,
        shm_free=64 * MIB,
    )
    monkeypatch.setattr(plasma_store, "read_host_limits", lambda: container)
    needed = store_bytes([5 * GIB] * 2)
    with pytest.raises(StoreTooSmall) as caught:
        start_local_node(needed, num_cpus=1, num_gpus=0)
    assert 15.7 * GIB < needed < 16 * GIB
    assert "/dev/shm has 0.06 GiB free of 0.06 GiB" in str(caught.value)
    assert "docker run --shm-size=16g" in str(caught.value)
    assert not ray.is_initialized()
