"""Starting and joining a Ray node, as far as no node is needed; the rest is at the end of test_shared_buffer.py."""

import json
import os
import shlex
import time

import pytest
import ray

from slideformer_ray.memory import plasma_store
from slideformer_ray.memory.plasma_store import (
    SYSTEM_CONFIG,
    StoreTooSmall,
    find_store_problems,
    join_cluster,
    ray_start_command,
    start_local_node,
)

GIB = 2**30


def test_command_carries_size_and_settings():
    """What the user is told to type is one shell line that sets all of ours, and lets nobody in without a token."""
    *words, settings = shlex.split(ray_start_command(7 * GIB, num_cpus=9))
    assert words == [
        "ray", "get-auth-token", "--generate", ">/dev/null", "&&",
        "RAY_AUTH_MODE=token", "RAY_JOB_STOP_WAIT_TIME_S=600",
        "ray", "start", "--head", "--num-cpus=9", f"--object-store-memory={7 * GIB}",
    ]  # fmt: skip
    assert json.loads(settings.removeprefix("--system-config=")) == SYSTEM_CONFIG


def test_cluster_of_that_command_has_no_problem():
    """A store of exactly the size asked for, with our settings, will do."""
    assert find_store_problems(GIB, GIB, SYSTEM_CONFIG) == []
    assert find_store_problems(GIB, GIB, {**SYSTEM_CONFIG, "local_fs_capacity_threshold": 0.0001}) == []


def test_plain_cluster_has_every_problem():
    """`ray start --head` alone spills, and falls back to files: both are Ray's defaults, so both are absent here."""
    problems = find_store_problems(2 * GIB, GIB, {})
    assert problems[0] == "its object store here is 1.00 GiB, 2.00 GiB are needed"
    assert "spills objects to disk" in problems[1] and "local_fs_capacity_threshold is 0.95" in problems[2]


@pytest.mark.parametrize("address", ["ray://head:10001", "10.0.0.1", "local", ""])
def test_address_must_be_host_and_port(address):
    """A client connection shares no memory, and a bare join never means "start one"."""
    with pytest.raises(ValueError, match="host:port or 'auto', found"):
        join_cluster(address, GIB)


def test_dead_address_is_found_out_at_once():
    """Ray alone would try for minutes and then exit."""
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"(?s)no Ray cluster answers at '127.0.0.1:1'.*ray start --head"):
        join_cluster("127.0.0.1:1", GIB)
    assert time.perf_counter() - started < 5 and not ray.is_initialized()


def test_store_beyond_this_machine_never_starts_ray(monkeypatch):
    """The check comes first: nothing is started, and the environment is as it was."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(StoreTooSmall, match="not enough host memory"):
        start_local_node(2**50, num_cpus=1, num_gpus=0)
    assert not ray.is_initialized() and "RAY_AUTH_MODE" not in os.environ


def test_start_never_joins_and_a_failed_one_restores_the_environment(monkeypatch):
    """A start asks Ray for a new node whatever RAY_ADDRESS says; if Ray refuses, no trace of ours is left."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def refuse(*, address, **_):
        assert address == "local" and os.environ["RAY_AUTH_MODE"] == "disabled"
        raise RuntimeError("no port")

    monkeypatch.setattr(plasma_store.ray, "init", refuse)
    with pytest.raises(RuntimeError, match="no port"):
        start_local_node(80 * 2**20, num_cpus=1, num_gpus=0)
    assert "RAY_AUTH_MODE" not in os.environ
