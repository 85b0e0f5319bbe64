"""Reading /proc/self/maps: lines, ranges, and which files are memory."""

import mmap

import numpy as np

from slideformer_ray.memory.proc_maps import FileOffset, find_mapping, is_memory_file, parse_mapping


def map_file(path, nbytes):
    path.write_bytes(bytes(nbytes))
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)


def test_line_of_a_deleted_plasma_file():
    """All fields are read, and a path with spaces in it is one path."""
    mapping = parse_mapping("7fa0cf800000-7fa0dc000000 rw-s 00001000 00:1b 2    /dev/shm/plasma (deleted)\n")
    assert mapping.permissions == "rw-s" and mapping.path == "/dev/shm/plasma (deleted)"
    assert mapping.file_offset(0x7FA0CF800010) == FileOffset("00:1b", 2, 0x1010)


def test_anonymous_line_has_no_path():
    """Private memory is a mapping without a file."""
    assert parse_mapping("7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n").path == ""


def test_two_mappings_of_one_file_share_offsets(tmp_path):
    """The same byte of the same file has one FileOffset, whatever address it is mapped at."""
    path = tmp_path / "file"
    first = map_file(path, 8192)
    with open(path, "r+b") as file:
        second = np.frombuffer(mmap.mmap(file.fileno(), 4096, offset=4096), np.uint8)
    offsets = [
        find_mapping(address, 16).file_offset(address) for address in (first.ctypes.data + 4096, second.ctypes.data)
    ]
    assert offsets[0] == offsets[1] and offsets[0].offset == 4096


def test_range_past_a_mappings_end_is_in_none(tmp_path):
    """A buffer must lie in one mapping as a whole."""
    array = map_file(tmp_path / "file", 4096)
    assert find_mapping(array.ctypes.data, 4096) is not None
    assert find_mapping(array.ctypes.data, 1 << 40) is None


def test_memory_files_are_told_from_disk_files():
    """/dev/shm is memory, /proc is no file system that could hold a buffer."""
    assert is_memory_file("/dev/shm/plasma (deleted)")
    assert not is_memory_file("/proc/self/maps")
