"""A run inside a Ray job: where it finds the cluster, where it may write, and that it is alone there.

`ray job submit` starts the command on the cluster's node, with the cluster in the environment. Imports ray only where a
cluster is asked. Tested by tests/test_jobs.py.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from slideformer_ray.config import ConfigError, RunConfig

# Named actors of all runs in a given cluster live here, so that a run sees another one's.
NAMESPACE = "slideformer_ray"
GPU_ACTOR = "gpu"
# What Ray sets for a job's command, and for nothing else.
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# A crashed run's actors are there for a moment longer than the run.
_LAST_RUNS_SECONDS = 5.0


def submission_id() -> str | None:
    """Of the job that this process runs in, or None."""
    try:
        return json.loads(os.environ[_JOB_CONFIG])["metadata"]["job_submission_id"]
    except (KeyError, ValueError, TypeError):
        return None


def in_this_job(config: RunConfig) -> RunConfig:
    """The config as a job runs it: on the job's cluster, if it names none. Outside a job, as it is.

    Raises ConfigError for a run_dir inside the copy that Ray made of the working directory, and removes after the job.
    """
    job = submission_id()
    if job is None:
        return config
    if "working_dir_files" in config.run_dir.parts:
        raise ConfigError(
            f"run_dir: {config.run_dir} is in Ray's own copy of the working directory, which it removes some time "
            f"after the job; give an absolute path: run_dir=$PWD/runs/{config.run_dir.name}"
        )
    return config if config.placement.address is not None else config.changed(["placement.address=auto"])


def refuse_second_run(address: str) -> None:
    """One run a cluster: two would share the GPU and each other's memory. Raises ConfigError, which names the other.

    To be called when connected, in NAMESPACE.
    """
    import ray

    deadline = time.monotonic() + _LAST_RUNS_SECONDS
    while (actor := _gpu_actor()) is not None:
        if time.monotonic() > deadline:
            try:
                other = ray.get(actor.run_name.remote(), timeout=5.0)
            except ray.exceptions.RayError:
                other = "another run"
            raise ConfigError(
                f"the Ray cluster at {address} trains already: {other}. One run at a time has the GPU; wait for its "
                "end, or stop it (`ray job stop ID`)"
            )
        time.sleep(0.2)


def run_name(config: RunConfig) -> str:
    """What another run is told of this one."""
    job = submission_id()
    return f"{config.run_dir}, " + (f"job {job}" if job else f"process {os.getpid()}")


def _gpu_actor() -> Any:
    import ray

    try:
        return ray.get_actor(GPU_ACTOR, namespace=NAMESPACE)
    except ValueError:  # there is none
        return None
