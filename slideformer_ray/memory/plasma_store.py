"""The Ray node whose object store (plasma) holds the shared buffers: how it is started, joined and watched.

Ray's store spills to disk when it is full, and falls back to files when it may not. For memory that a GPU reads both
are silent disasters, so both are switched off (docs/architecture.md); `host_limits.py` says beforehand whether the
store fits. Touches Ray and the environment variable RAY_AUTH_MODE. Tested by tests/memory/test_plasma_store.py.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.internal_api
import ray._private.ray_constants
import ray._private.state
import ray._private.utils

from slideformer_ray.memory.host_limits import (
    GIB,
    HostLimits,
    StoreTooSmall,
    check_store_fits,
    gib,
    read_host_limits,
    store_bytes,
)
from slideformer_ray.memory.node_guard import NodeGuard

__all__ = [
    "SYSTEM_CONFIG",
    "HostLimits",
    "RayNode",
    "StoreStats",
    "StoreTooSmall",
    "check_store_fits",
    "find_store_problems",
    "join_cluster",
    "ray_start_command",
    "read_host_limits",
    "read_store_stats",
    "start_local_node",
    "store_bytes",
]

# All of it is passed as system config, because Ray overwrites what the environment says about spilling.
SYSTEM_CONFIG = {
    "automatic_object_spilling_enabled": False,
    # Above this part of the disk in use, Ray refuses to fall back to files. 0 is "always", and unlike any small number
    # it does not have the raylet warn about a full disk every 10 s (measured on Ray 2.60: no line in raylet.err, a full
    # store still fails within 1 ms).
    "local_fs_capacity_threshold": 0,
    # The monitor kills actors of a tight node, and an optimizer actor would come back empty. What fits is settled
    # beforehand.
    "memory_monitor_refresh_ms": 0,
    # Workers start at nice 15 otherwise.
    "worker_niceness": 0,
}
# A given cluster may also have a number next to 0: any disk is fuller than that.
_LARGEST_CAPACITY_THRESHOLD = 0.0001

_CONNECT_TIMEOUT_S = 5
# Without one of these no actor can be reached.
_SERVERS = (ray._private.ray_constants.PROCESS_TYPE_RAYLET, ray._private.ray_constants.PROCESS_TYPE_GCS_SERVER)


@dataclasses.dataclass
class RayNode:
    """The Ray node that this driver is connected to.

    `address` is host:port; `started_here` says whether `shutdown` ends the node or only leaves it.
    """

    address: str
    started_here: bool
    _auth_mode_before: str | None = dataclasses.field(default=None, repr=False)
    _guard: NodeGuard | None = dataclasses.field(default=None, repr=False)

    def spilled_bytes(self) -> int:
        """Bytes of objects that ever left /dev/shm for a disk, spilled or as fallback files. 0 in a sound run."""
        stats = read_store_stats()
        return stats.spilled_bytes + stats.fallback_bytes

    def lost(self) -> str | None:
        """Which of the node's servers has ended, or None. Ray itself says so after a minute, or ends this process.

        Of a node that was started here: a given cluster's servers are not this process's children.
        """
        if not self.started_here:
            return None
        node: Any = ray._private.worker._global_node
        for kind in _SERVERS:
            for info in node.all_processes.get(kind, ()):
                if info.process.poll() is not None:
                    return f"Ray's {kind} (process {info.process.pid}) has ended"
        return None

    def shutdown(self) -> None:
        """End the node, or leave the given cluster. A view that this process still holds keeps its memory."""
        if self._guard is not None:
            self._guard.expect_end()
        ray.shutdown()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self.started_here:
            _restore_auth_mode(self._auth_mode_before)


def start_local_node(
    store_bytes: int,
    num_cpus: int,
    num_gpus: int,
    *,
    include_dashboard: bool = False,
    namespace: str | None = None,
    log_to_driver: bool = True,
) -> RayNode:
    """Start a private Ray node of this machine. It never joins a running cluster, whatever RAY_ADDRESS says.

    Args:
        store_bytes: the object store's size, from the function of that name.
        num_cpus, num_gpus: what Ray may hand to actors.
        log_to_driver: print the actors' output here.
    Raises:
        StoreTooSmall: the store does not fit /dev/shm or memory. (Ray would put one below 10 GB into /tmp, on a disk.)
        ValueError: Ray already runs in this process, or its Dashboard is wanted and not installed.
    """
    _refuse_second_connection()
    if include_dashboard and (missing := ray._private.utils.get_dashboard_dependency_error()):
        raise ValueError(
            f"placement.include_dashboard is true, but Ray's Dashboard is not installed ({missing}). "
            "Fix: pip install 'slideformer_ray[dashboard]'"
        )
    check_store_fits(store_bytes, 0, read_host_limits())
    # A new local cluster otherwise makes itself a token in the user's home. A mode that the user chose stays.
    auth_mode_before = os.environ.get("RAY_AUTH_MODE")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        with _signals_of_the_program():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_memory=store_bytes,
                # Ray's own idea of the memory left for actors, on which it would refuse to start beside a large store.
                # Nothing asks for it.
                _memory=GIB,
                include_dashboard=include_dashboard,
                namespace=namespace,
                log_to_driver=log_to_driver,
                _system_config=dict(SYSTEM_CONFIG),
            )
    except BaseException:
        ray.shutdown()
        _restore_auth_mode(auth_mode_before)
        raise
    node: Any = ray._private.worker._global_node
    raylet = node.all_processes[ray._private.ray_constants.PROCESS_TYPE_RAYLET][0].process
    guard = NodeGuard(raylet.pid, node.get_logs_dir_path())
    return RayNode(ray.get_runtime_context().gcs_address, True, auth_mode_before, guard)


def join_cluster(
    address: str,
    store_bytes: int,
    num_cpus: int = 0,
    num_gpus: int = 0,
    *,
    namespace: str | None = None,
    log_to_driver: bool = True,
) -> RayNode:
    """Connect to the Ray cluster that the user named ("auto" inside a job), if it can hold our buffers and actors.

    Args:
        num_cpus, num_gpus: what the actors will ask for. Ray would let them wait for ever where there are fewer.
    Raises:
        ValueError: no cluster answers, its store is too small, it would spill, or it has too few CPUs or GPUs. Says the
            right `ray start` command.
    """
    _refuse_second_connection()
    command = ray_start_command(store_bytes, num_cpus)
    _probe(address, command)
    try:
        with _signals_of_the_program():
            ray.init(address=address, namespace=namespace, log_to_driver=log_to_driver)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at {address!r}: {error} Fix: start one with\n  {command}") from error
    # The head node's settings, as every raylet got them.
    system_config = ray._private.state.state.get_system_config()
    resources = _this_node()["Resources"]
    problems = find_store_problems(store_bytes, int(resources.get("object_store_memory", 0)), system_config)
    for kind, needed in (("CPU", num_cpus), ("GPU", num_gpus)):
        if (found := resources.get(kind, 0)) < needed:
            problems.append(f"it has {found:g} {kind}s for actors, {needed} are needed")
    if problems:
        ray.shutdown()
        raise ValueError(
            f"the Ray cluster at {address!r} cannot hold this run: {'; '.join(problems)}. "
            f"Fix: `ray stop`, then\n  {command}"
        )
    return RayNode(ray.get_runtime_context().gcs_address, False)


def ray_start_command(store_bytes: int, num_cpus: int = 0) -> str:
    """The shell command that starts a cluster `join_cluster` accepts. `num_cpus` 0: as many as Ray counts.

    With a token, because Ray's servers listen on every address of the machine, also with --node-ip-address=127.0.0.1
    (measured on Ray 2.60), and who reaches them can run any code. And with time for a stopped job to save: Ray's 3 s
    are too short.
    """
    config = json.dumps(SYSTEM_CONFIG, separators=(",", ":"))
    cpus = f" --num-cpus={num_cpus}" if num_cpus else ""
    return (
        "ray get-auth-token --generate >/dev/null && RAY_AUTH_MODE=token RAY_JOB_STOP_WAIT_TIME_S=600 "
        f"ray start --head{cpus} --object-store-memory={store_bytes} --system-config='{config}'"
    )


def find_store_problems(store_bytes: int, capacity_bytes: int, system_config: dict) -> list[str]:
    """Why a running cluster's object store of `capacity_bytes` cannot hold our buffers; empty if it can.

    Args:
        system_config: what the cluster was started with. A setting that is not there has Ray's default.
    """
    problems = []
    if capacity_bytes < store_bytes:
        problems.append(f"its object store here is {gib(capacity_bytes)}, {gib(store_bytes)} are needed")
    if system_config.get("automatic_object_spilling_enabled", True):
        problems.append("it spills objects to disk (automatic_object_spilling_enabled is not false)")
    threshold = system_config.get("local_fs_capacity_threshold", 0.95)
    if threshold > _LARGEST_CAPACITY_THRESHOLD:
        problems.append(f"it falls back to files when full (local_fs_capacity_threshold is {threshold}, not 0)")
    return problems


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Where this node's objects are, in bytes. `used_bytes` is of `capacity_bytes`; the last two should stay 0."""

    capacity_bytes: int
    used_bytes: int
    num_objects: int
    num_created: int
    spilled_bytes: int
    fallback_bytes: int


def read_store_stats() -> StoreStats:
    """Ask the raylet of the node this process is on. Ray has no public call for it."""
    node = _this_node()
    reply = ray._private.internal_api.node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    )
    stats = reply.store_stats
    return StoreStats(
        capacity_bytes=stats.object_store_bytes_avail,
        used_bytes=stats.object_store_bytes_used,
        num_objects=stats.num_local_objects,
        num_created=stats.cumulative_created_objects,
        spilled_bytes=stats.spilled_bytes_total,
        fallback_bytes=stats.object_store_bytes_fallback,
    )


def _this_node() -> dict:
    node_id = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == node_id)


def _refuse_second_connection() -> None:
    if ray.is_initialized():
        raise ValueError(
            "this process is connected to Ray already. Fix: call ray.shutdown() before starting a run here"
        )


def _probe(address: str, command: str) -> None:
    """Ray takes minutes to give up on an address where nothing listens, and then ends the process: knock first."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and "/" not in host):
        raise ValueError(
            f"a Ray address is host:port or 'auto', found {address!r} (Ray Client's ray:// cannot share memory)"
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r} ({error}). Fix: start one with\n  {command}"
        ) from error


@contextlib.contextmanager
def _signals_of_the_program() -> Iterator[None]:
    """Act on Ctrl-C and SIGTERM after the `ray.init` inside, and by the program's own handlers.

    In the middle of it (measured on Ray 2.60) a signal leaves half a connection behind, which crashes the process at
    its end, or Ray's processes, which stay for a minute. And Ray puts handlers of its own for SIGTERM, one of them in
    C++, which aborts the process after 3 s.
    """
    if threading.current_thread() is not threading.main_thread():  # no one else may change handlers
        yield
        return
    held: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    set_by_ray = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = set_by_ray
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])


def _restore_auth_mode(before: str | None) -> None:
    if before is None:
        os.environ.pop("RAY_AUTH_MODE", None)
    else:
        os.environ["RAY_AUTH_MODE"] = before
