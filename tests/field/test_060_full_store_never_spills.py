"""Field case 60 (ray #17017).

In: the disk that Ray spills to is full.
Bad: Ray retries for ever and floods its logs.
Good: spilling is off for our buffers; a full store is an error before a deadline, and the logs stay quiet.
"""

import pathlib
import time

import pytest
import ray

from slideformer_ray.memory.plasma_store import StoreTooSmall
from slideformer_ray.memory.shared_buffer import SharedBuffer
from tests.memory.conftest import ray_node  # noqa: F401


def test_full_store_is_an_error_not_a_retry(ray_node):  # noqa: F811
    """Ten refusals take seconds in all, touch no disk, and Ray's error log has no line about a full one."""
    started = time.perf_counter()
    for _ in range(10):
        with pytest.raises(StoreTooSmall):
            SharedBuffer.create("grad.0", 1 << 30)
    assert time.perf_counter() - started < 10
    assert ray_node.spilled_bytes() == 0
    session = pathlib.Path(ray._private.worker._global_node.get_session_dir_path())
    assert not list(session.rglob("ray_spilled_objects*"))
    assert (session / "logs" / "raylet.err").read_text() == ""
