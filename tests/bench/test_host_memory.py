"""host_memory.py: memory at machine level."""

import time

import pytest

from slideformer_ray.bench import host_memory
from slideformer_ray.bench.host_memory import MachineMemory


@pytest.fixture
def available(monkeypatch):
    """MemAvailable, as the test sets it: the machine's own is everyone's."""
    values = [100]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: values[0])
    monkeypatch.setattr(host_memory, "_EVERY_SECONDS", 0.001)
    return values


def test_the_peak_outlasts_what_is_given_back(available):
    """A watching thread sees the lowest value, whenever it was."""
    with MachineMemory() as memory:
        available[0] = 40
        time.sleep(0.1)
        available[0] = 90
        assert memory.peak_bytes == 60


def test_the_machine_is_asked():
    """MemAvailable, in bytes: some of it, and less than all of the machine's memory."""
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 1 << 20 < host_memory.available_bytes() <= total
