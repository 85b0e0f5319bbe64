"""What the kernel says about an address of this process: which file stands behind it, where in that file, and with what
rights.

Plasma gives no promise that two processes see the same bytes of an object, so `shared_buffer.py` asks the kernel. Reads
/proc/self alone. Tested by tests/memory/test_proc_maps.py.
"""

import dataclasses

# File systems whose files are memory. Anything else behind a buffer is Ray's silent fallback to disk.
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}


@dataclasses.dataclass(frozen=True)
class FileOffset:
    """One byte of one file: equal in two processes exactly when they share that byte."""

    device: str
    inode: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Mapping:
    """One line of /proc/self/maps. `permissions` is like "rw-s": readable, writable, not executable, shared."""

    start: int
    end: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str

    def file_offset(self, address: int) -> FileOffset:
        return FileOffset(self.device, self.inode, self.offset + address - self.start)


def parse_mapping(line: str) -> Mapping:
    addresses, permissions, offset, device, inode, *path = line.split(maxsplit=5)
    start, end = (int(part, 16) for part in addresses.split("-"))
    return Mapping(start, end, permissions, int(offset, 16), device, int(inode), path[0].rstrip("\n") if path else "")


def find_mapping(address: int, nbytes: int) -> Mapping | None:
    """The mapping that holds the whole range, or None if no single one does."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            mapping = parse_mapping(line)
            if mapping.start <= address < mapping.end:
                return mapping if address + nbytes <= mapping.end else None
    return None


def is_memory_file(path: str) -> bool:
    """Whether the file lies on a file system that is memory, like /dev/shm, by the longest mount point that holds
    it.
    """
    with open("/proc/self/mounts") as mounts:
        points = [line.split()[1:3] for line in mounts]
    holding = [(point, kind) for point, kind in points if path.startswith(point.rstrip("/") + "/")]
    return max(holding, key=lambda mount: len(mount[0]))[1] in _MEMORY_FILE_SYSTEMS if holding else False
