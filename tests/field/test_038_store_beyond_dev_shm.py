"""Field case 38 (Soup #622).

In: a 16.1 GB store, /dev/shm of 16 GB, 27 GB of memory free.
Bad: the store is placed in memory all the same and the kernel kills the run.
Good: the ceiling is the least of cgroup limit, memory and what is free in /dev/shm.
"""

import dataclasses

import pytest

from slideformer_ray.memory.host_limits import HostLimits, StoreTooSmall, check_store_fits

GB = 10**9
HOST = HostLimits(
    ram_total=32 * GB, ram_available=27 * GB, cgroup_limit=None, cgroup_used=0, shm_total=16 * GB, shm_free=16 * GB
)


def test_dev_shm_binds_before_memory():
    """27 GB free do not help a store that is 0.1 GB larger than /dev/shm."""
    with pytest.raises(StoreTooSmall, match=r"^not enough host memory: /dev/shm has 14.90 GiB free") as caught:
        check_store_fits(16_100_000_000, 0, HOST)
    assert len(str(caught.value).splitlines()) == 1
    check_store_fits(16 * GB, 0, HOST)


@pytest.mark.parametrize(
    "ceiling, named",
    [
        ({"shm_free": 9 * GB}, "/dev/shm has 8.38 GiB free"),
        ({"ram_available": 9 * GB}, "8.38 GiB of memory available"),
        ({"cgroup_limit": 10 * GB, "cgroup_used": GB}, "cgroup's limit leaves 8.38 GiB"),
    ],
)
def test_least_ceiling_binds(ceiling, named):
    """Each of the three, when it is the least, refuses the run and is the one that the message names."""
    with pytest.raises(StoreTooSmall, match=named):
        check_store_fits(10 * GB, 0, dataclasses.replace(HOST, **ceiling))
