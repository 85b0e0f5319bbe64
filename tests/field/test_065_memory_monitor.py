"""Field case 65: ray #59796, PR #42508, PR #8113.

In: a node whose memory is full of page cache, or a cgroup of version 1.
Bad: Ray's memory monitor counts the cache, or the host's memory, and kills a worker, which is started again.
Good: our node runs without the monitor, by an accounting of our own that leaves the cache out; an optimizer actor is
never started again, for it would come back empty.
"""

import pytest
import ray

from slideformer_ray.actors.gpu_actor import GpuActor
from slideformer_ray.actors.optimizer_actor import OptimizerActor
from slideformer_ray.actors.storage_actor import StorageActor
from slideformer_ray.memory.host_limits import GIB, check_store_fits, read_host_limits
from slideformer_ray.memory.plasma_store import start_local_node

MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n"
CGROUPS = {
    "v1": ("5:memory:/job\n", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("0::/job\n", "job", "memory.max", "memory.current", "inactive_file"),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_page_cache_is_not_in_use(tmp_path, version):
    """A limit of 16 GiB with 15 GiB in use, 14 of them cache: 15 GiB are left, and a run of 10 is not refused."""
    membership, group, limit, usage, cache = CGROUPS[version]
    directory = tmp_path / "sys/fs/cgroup" / group
    for path in (directory, tmp_path / "proc/self", tmp_path / "dev/shm"):
        path.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    (directory / limit).write_text(f"{16 * GIB}\n")
    (directory / usage).write_text(f"{15 * GIB}\n")
    (directory / "memory.stat").write_text(f"{cache} {14 * GIB}\n")
    limits = read_host_limits(tmp_path)
    assert limits.cgroup_limit - limits.cgroup_used == 15 * GIB
    check_store_fits(0, 10 * GIB, limits)


def test_our_node_has_no_monitor():
    """As Ray itself has it after the start, not only as it was asked."""
    node = start_local_node(80 << 20, num_cpus=1, num_gpus=0, log_to_driver=False)
    try:
        assert ray._private.state.state.get_system_config()["memory_monitor_refresh_ms"] == 0
    finally:
        node.shutdown()


@pytest.mark.parametrize("actor", [GpuActor, OptimizerActor, StorageActor], ids=lambda actor: actor.__class__.__name__)
def test_no_actor_is_started_again(actor):
    """Nor is a call of it done twice, as a step would be."""
    assert actor._default_options["max_restarts"] == 0 and actor._default_options["max_task_retries"] == 0
