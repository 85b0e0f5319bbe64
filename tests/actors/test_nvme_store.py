"""Regions on a real file system and back, whatever the drive does; files of dead runs go, those of living ones stay."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from faulty_drive import FaultyDrive

from slideformer_ray.actors import nvme_store
from slideformer_ray.actors.nvme_store import (
    HeldFiles,
    NvmeError,
    NvmeStore,
    aligned_buffer,
    check_directories,
    dead_files,
    file_system,
    has_direct_io,
    open_files,
    remove_dead_files,
)
from slideformer_ray.config import ConfigError
from slideformer_ray.nvme_layout import ALIGN_BYTES, FileLayout

REGIONS = tuple(ALIGN_BYTES * n for n in (7, 40, 23))


@pytest.fixture
def drives(tmp_path):
    """Two directories, whose file system must be a real one for what is tested here."""
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("the tests' temporary directory is in memory")
    found = [tmp_path / "a", tmp_path / "b"]
    for directory in found:
        directory.mkdir()
    return found


@pytest.fixture(autouse=True)
def small_transfers(monkeypatch):
    """Several chunks a region, and stripes that do not divide it."""
    monkeypatch.setattr(nvme_store, "DEFAULT_CHUNK_BYTES", 2 * ALIGN_BYTES)
    monkeypatch.setattr(nvme_store, "_STRIPE_BYTES", 4 * ALIGN_BYTES)


@pytest.fixture
def store(drives):
    held, files = open_files(drives, REGIONS, stall_s=0.5)
    opened = NvmeStore(files)
    yield opened
    opened.close()
    held.close()


def random_regions(seed):
    rng = np.random.default_rng(seed)
    regions = []
    for nbytes in REGIONS:
        memory = aligned_buffer(nbytes)
        memory[:] = rng.integers(0, 256, nbytes, np.uint8)
        regions.append(memory)
    return regions


def contents(store):
    found = []
    for region, nbytes in enumerate(REGIONS):
        memory = aligned_buffer(nbytes)
        memory[:] = 0xEE
        store.read(region, memory)
        found.append(memory)
    return found


def test_new_regions_read_as_zero(store):
    """Adam's moments begin at 0, and no byte is written for that."""
    assert all(not region.any() for region in contents(store))


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_written_is_read(drives, number):
    """Whole regions and parts of them, over one directory and several."""
    held, files = open_files(drives[:number], REGIONS, stall_s=5)
    store, wanted = NvmeStore(files), random_regions(0)
    for region in (1, 2, 0):
        store.write(region, wanted[region])
    part = wanted[1][3 * ALIGN_BYTES : 12 * ALIGN_BYTES]
    part[:] = 7
    store.write(1, part, 3 * ALIGN_BYTES)
    assert all(map(np.array_equal, contents(store), wanted))
    store.close()
    held.close()
    assert not [path for drive in drives for path in drive.glob(nvme_store.FILE_PATTERN)]


def test_the_way_of_access_is_said(drives):
    """Path, way and numbers; on a file system with O_DIRECT it is used."""
    held, files = open_files(drives, REGIONS, stall_s=5)
    assert files.direct == has_direct_io(held.paths[0])
    text = files.describe()
    assert str(drives[0]) in text and str(drives[1]) in text and "every layer in stripes" in text
    assert ("O_DIRECT" in text) == files.direct
    held.close()


def test_without_o_direct_the_page_cache_serves_and_is_named(drives, monkeypatch):
    """The same bytes, and the report says why."""
    monkeypatch.setattr(nvme_store, "has_direct_io", lambda path: False)
    held, files = open_files(drives, REGIONS, stall_s=5)
    store, wanted = NvmeStore(files), random_regions(1)
    for region, memory in enumerate(wanted):
        store.write(region, memory)
    assert all(map(np.array_equal, contents(store), wanted))
    assert "the file system has no O_DIRECT" in files.describe()
    store.close()
    held.close()


def test_large_regions_are_measured(drives, monkeypatch):
    """Every candidate is tried in files of its own, which are gone afterwards; the fastest is taken and said."""
    monkeypatch.setattr(nvme_store, "PROBED_BYTES", 16 * ALIGN_BYTES)
    held, files = open_files(drives, (16 * ALIGN_BYTES,) * 3, stall_s=5)
    if files.direct:
        assert "GB/s of reads while" in files.reason
        assert (files.queue_depth, files.chunk_bytes) in nvme_store._CANDIDATES
    assert [len(list(drive.glob(nvme_store.FILE_PATTERN))) for drive in drives] == [1, 1]
    held.close()


# ----------------------------------------------------------------------------------------------------------------------
# Faults


@pytest.mark.parametrize("fault", ["short", "odd"])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_transfers_are_finished(store, call, fault):
    """A call may move less than it was asked to; no byte is lost or doubled."""
    wanted = random_regions(2)
    with FaultyDrive(call, fault).installed() as drive:
        for region, memory in enumerate(wanted):
            store.write(region, memory)
        assert all(map(np.array_equal, contents(store), wanted))
    assert drive.number > sum(REGIONS) // nvme_store.DEFAULT_CHUNK_BYTES


@pytest.mark.parametrize(
    ("call", "fault", "words"),
    [
        ("preadv", "EIO", r"reading .* at byte \d+: Input/output error \(EIO\); the drive has failed"),
        ("pwritev", "EIO", r"writing .* at byte \d+: Input/output error \(EIO\); the drive has failed"),
        ("pwritev", "ENOSPC", r"No space left on device \(ENOSPC\); the file needs .* in all, .* are free"),
        ("pwritev", "EROFS", r"\(EROFS\); the file system has become read-only"),
    ],
)
def test_a_drive_that_fails_is_named(store, call, fault, words):
    """The file, what was done where, the system's word and the way out; nothing is at work any more."""
    memory = random_regions(3)[1]
    with FaultyDrive(call, fault, from_call=3).installed():
        with pytest.raises(NvmeError, match=words) as error:
            store.write(1, memory)
            store.read(1, memory)
    assert any(str(path) in str(error.value) for path in store.files.paths)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_drive_that_stands_still_is_named_within_the_bound(store, call):
    """No hang: the bound is on the time in which nothing at all is moved."""
    with FaultyDrive(call, "stall", from_call=2).installed():
        started = time.monotonic()
        with pytest.raises(NvmeError, match=r"the drive stands still: .* after 0.5 s \(nvme.stall_s\)"):
            store.write(1, random_regions(4)[1])
            store.read(1, aligned_buffer(REGIONS[1]))
        assert time.monotonic() - started < 5


def test_a_file_that_was_cut_is_an_error(store):
    """A read past the end gives nothing: it must not pass for states."""
    os.truncate(store.files.paths[0], ALIGN_BYTES)
    with pytest.raises(NvmeError, match=r"the file ends at byte \d+"):
        contents(store)


# ----------------------------------------------------------------------------------------------------------------------
# Files of runs


def test_the_space_is_taken_at_the_start(store):
    """Pre-allocated: a drive cannot fill up under a run's states."""
    for path, size in zip(store.files.paths, store.files.layout.file_sizes(), strict=True):
        assert path.stat().st_size == size and path.stat().st_blocks * 512 >= size


def test_too_little_space_leaves_nothing_behind(drives):
    """The message has the bytes needed and those that are free."""
    with pytest.raises(NvmeError, match=r"could not be set aside: .* are free\); free space, lower nvme.states"):
        HeldFiles(drives, FileLayout((1 << 50,) * 2, 2, None))
    assert not [path for drive in drives for path in drive.glob(nvme_store.FILE_PATTERN)]


OTHER_RUN = """
import sys, time
from pathlib import Path
from slideformer_ray.actors.nvme_store import open_files
held, files = open_files([Path(sys.argv[1])], (8192,), 5)
print(held.paths[0], flush=True)
time.sleep(60)
"""


def test_files_of_a_dead_run_go_and_those_of_a_living_one_stay(drives):
    """A run that was killed cannot remove its files: the next one does, and looks whether anybody holds them."""
    run = subprocess.Popen([sys.executable, "-c", OTHER_RUN, str(drives[0])], stdout=subprocess.PIPE, text=True)
    try:
        path = drives[0] / run.stdout.readline().strip()
        assert remove_dead_files(drives) == [] and path.exists()
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
    assert [found for found, _ in dead_files(drives[0])] == [path]
    assert [found for found, _ in remove_dead_files(drives)] == [path] and not path.exists()


def test_directories_are_checked_before_anything_is_made(drives, tmp_path):
    """One that is not there, one named twice, and memory that passes for a drive."""
    with pytest.raises(ConfigError, match="none is no directory; mount the drive"):
        check_directories([tmp_path / "none"])
    (tmp_path / "again").symlink_to(drives[0])
    with pytest.raises(ConfigError, match="are one directory"):
        check_directories([drives[0], tmp_path / "again"])
    check_directories(drives)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_memory_is_refused_as_a_drive(tmp_path_factory):
    from pathlib import Path

    with pytest.raises(ConfigError, match="/dev/shm is tmpfs, which is RAM"):
        check_directories([Path("/dev/shm")])
