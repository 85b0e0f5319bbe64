"""What fits this machine: limits read from pretended /proc and cgroup trees, store size, refusals with the fix."""

import pytest

from slideformer_ray.memory.host_limits import (
    GIB,
    HostLimits,
    StoreTooSmall,
    check_store_fits,
    read_host_limits,
    store_bytes,
)

MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1024 kB\nMemAvailable: 4194304 kB\nHugePages_Total: 0\n"
ROOMY = HostLimits(
    ram_total=64 * GIB, ram_available=60 * GIB, cgroup_limit=None, cgroup_used=0, shm_total=32 * GIB, shm_free=32 * GIB
)


def limits_with(**changes):
    return HostLimits(**{**vars(ROOMY), **changes})


def write_tree(root, files):
    for name, text in {"proc/meminfo": MEMINFO, "dev/shm/keep": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v2(path, limit, used, cache=0):
    base = f"sys/fs/cgroup{path}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": f"inactive_file {cache}",
    }


def v1(path, limit, used, cache=0):
    base = f"sys/fs/cgroup/memory{path}"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": used,
        f"{base}/memory.stat": f"cache 1\ntotal_inactive_file {cache}\n",
    }


def test_this_machine_can_be_read():
    """The real files parse, and the numbers are of a machine."""
    limits = read_host_limits()
    assert 0 < limits.ram_available <= limits.ram_total
    assert 0 <= limits.shm_free <= limits.shm_total
    assert limits.cgroup_limit is None or limits.cgroup_limit > 0


def test_meminfo_is_in_bytes(tmp_path):
    """Available memory is the kernel's estimate, not what is merely free."""
    write_tree(tmp_path, {"proc/self/cgroup": "0::/\n"})
    limits = read_host_limits(tmp_path)
    assert (limits.ram_total, limits.ram_available) == (8 * GIB, 4 * GIB)
    assert limits.cgroup_limit is None


def test_cgroup_v2_limit_without_reclaimable_cache(tmp_path):
    """Page cache counts as used in a cgroup, but does not stand in the way of a run (ray #59796)."""
    write_tree(tmp_path, {"proc/self/cgroup": "0::/job\n", **v2("/job", "1000\n", "700\n", 300)})
    limits = read_host_limits(tmp_path)
    assert (limits.cgroup_limit, limits.cgroup_used) == (1000, 400)


def test_tightest_cgroup_on_the_way_up_binds(tmp_path):
    """A limit of an outer cgroup binds, too; the one that leaves least is reported."""
    files = {**v2("/slice/job", "5000", "1000"), **v2("/slice", "3000", "2500"), **v2("", "max", "0")}
    write_tree(tmp_path, {"proc/self/cgroup": "0::/slice/job\n", **files})
    limits = read_host_limits(tmp_path)
    assert (limits.cgroup_limit, limits.cgroup_used) == (3000, 2500)


def test_cgroup_v1_beside_an_empty_v2(tmp_path):
    """Hybrid machines keep the memory controller in v1."""
    cgroup = "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n"
    write_tree(tmp_path, {"proc/self/cgroup": cgroup, **v1("/docker/abc", "1000", "700", 100)})
    limits = read_host_limits(tmp_path)
    assert (limits.cgroup_limit, limits.cgroup_used) == (1000, 600)


def test_container_sees_its_own_cgroup_at_the_mount(tmp_path):
    """Inside a container the path is the host's and is not there; the limit stands at the mount itself."""
    write_tree(tmp_path, {"proc/self/cgroup": "4:memory:/docker/abc\n", **v1("", "1000", "700")})
    limits = read_host_limits(tmp_path)
    assert (limits.cgroup_limit, limits.cgroup_used) == (1000, 700)


@pytest.mark.parametrize("files", [v2("/job", "max", "700"), v1("/job", "9223372036854771712", "700")])
def test_unlimited_cgroups_are_none(tmp_path, files):
    """Both spellings of "no limit" mean none."""
    write_tree(tmp_path, {"proc/self/cgroup": "4:memory:/job\n0::/job\n", **files})
    assert read_host_limits(tmp_path).cgroup_limit is None


def test_store_holds_the_buffers_the_largest_again_and_5_percent():
    """36 layers and 8 slots of 154 MB: (44 + 1) x 154 MB x 1.05, up to the pages of each buffer."""
    size = 154_140_672
    exact = 45 * size * 1.05
    assert exact < store_bytes([size] * 44) < exact * 1.001


def test_store_is_never_smaller_than_ray_accepts():
    """Ray refuses a store below 75 MiB."""
    assert store_bytes([4096]) == 75 * 2**20


def test_a_run_that_fits_is_not_refused():
    """Exactly what is free is enough."""
    check_store_fits(32 * GIB, 28 * GIB, ROOMY)


def test_shm_too_small_says_the_remount():
    """The size asked for has room for what already lies in /dev/shm."""
    with pytest.raises(StoreTooSmall, match=r"/dev/shm has 30.00 GiB free of 32.00 GiB, .* needs 31.50 GiB") as caught:
        check_store_fits(31 * GIB + GIB // 2, 0, limits_with(shm_free=30 * GIB))
    assert "sudo mount -o remount,size=34G /dev/shm" in str(caught.value)
    assert "docker run --shm-size=34g" in str(caught.value)


def test_memory_counts_private_bytes_too():
    """A store that fits alone is refused if the actors' own memory does not fit beside it."""
    with pytest.raises(StoreTooSmall, match=r"60.00 GiB of memory available .* 61.00 GiB \(20.00 .* \+ 41.00"):
        check_store_fits(20 * GIB, 41 * GIB, ROOMY)


def test_cgroup_limit_names_itself():
    """In a container it is the container's limit that ends the run with exit -9; say so before (LlamaFactory #6755)."""
    with pytest.raises(StoreTooSmall, match=r"cgroup's limit leaves 14.00 GiB of 16.00 GiB.*--memory=17g"):
        check_store_fits(10 * GIB, 5 * GIB, limits_with(cgroup_limit=16 * GIB, cgroup_used=2 * GIB))


def test_every_ceiling_that_is_too_low_is_listed():
    """One message for all of them, so that mending one does not just uncover the next."""
    tight = limits_with(ram_available=8 * GIB, cgroup_limit=8 * GIB, shm_free=8 * GIB)
    with pytest.raises(StoreTooSmall) as caught:
        check_store_fits(9 * GIB, 0, tight)
    assert len(str(caught.value).splitlines()) == 3
