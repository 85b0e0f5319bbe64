"""kuberay_rayjob.yaml: a RayJob of KubeRay's v1 API, with a store that a run accepts and memory for it.

The schema holds the fields of KubeRay's RayJobSpec, RayClusterSpec and HeadGroupSpec (API reference of ray.io/v1) and
of Kubernetes' PodSpec as far as the file uses them; a field that is not there is an error, as with a strict apply.
"""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from slideformer_ray.memory.host_limits import GIB
from slideformer_ray.memory.plasma_store import SYSTEM_CONFIG, find_store_problems

FILE = Path(__file__).resolve().parents[2] / "cluster_configs" / "kuberay_rayjob.yaml"


def strict(required, **fields):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": fields}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
CONTAINER = strict(
    ["name", "image"],
    name=TEXT,
    image=TEXT,
    env={"type": "array", "items": strict(["name", "value"], name=TEXT, value=TEXT)},
    ports={"type": "array", "items": strict(["containerPort"], containerPort=COUNT, name=TEXT)},
    resources=strict([], requests=TEXTS, limits=TEXTS),
    volumeMounts={"type": "array", "items": strict(["name", "mountPath"], name=TEXT, mountPath=TEXT)},
)
VOLUME = strict(
    ["name"],
    name=TEXT,
    emptyDir=strict([], medium=TEXT, sizeLimit=TEXT),
    persistentVolumeClaim=strict(["claimName"], claimName=TEXT),
)
POD = strict(
    ["containers"],
    terminationGracePeriodSeconds=COUNT,
    containers={"type": "array", "minItems": 1, "items": CONTAINER},
    volumes={"type": "array", "items": VOLUME},
)
HEAD = strict(["rayStartParams", "template"], rayStartParams=TEXTS, template=strict(["spec"], spec=POD))
SCHEMA = strict(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=strict(["name"], name=TEXT),
    spec=strict(
        ["entrypoint", "rayClusterSpec"],
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        rayClusterSpec=strict(["headGroupSpec"], headGroupSpec=HEAD),
    ),
)


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load(FILE.read_text())


@pytest.fixture(scope="module")
def container(job):
    (found,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    return found


def gibibytes(text):
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) * GIB


def test_it_is_a_rayjob(job):
    """Every field is one that KubeRay or Kubernetes knows, of the right type."""
    jsonschema.validate(job, SCHEMA)
    assert job["spec"]["entrypoint"].startswith("slideformer-ray train /")


def test_its_cluster_is_one_that_a_run_accepts(job):
    """KubeRay makes one shell line of rayStartParams, so the JSON keeps quotes of its own."""
    params = job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
    words = shlex.split(" ".join(f"--{name}={value}" for name, value in params.items()))
    found = dict(word.removeprefix("--").split("=", 1) for word in words)
    settings = json.loads(found["system-config"])
    assert settings == SYSTEM_CONFIG
    store = int(found["object-store-memory"])
    assert find_store_problems(store, store, settings) == [] and found["num-gpus"] == "1"


def test_the_container_has_the_memory_that_the_store_takes(job, container):
    """/dev/shm, which is 64 MB otherwise, holds the store; the container's memory holds that and the private bytes.
    One GPU, nothing lent out, and time to save."""
    spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    store = int(spec["rayStartParams"]["object-store-memory"])
    volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory" and store <= gibibytes(shm["sizeLimit"]) < store + GIB * 2
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert gibibytes(container["resources"]["limits"]["memory"]) > 3 * store
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    stop = {entry["name"]: entry["value"] for entry in container["env"]}["RAY_JOB_STOP_WAIT_TIME_S"]
    assert int(stop) < spec["template"]["spec"]["terminationGracePeriodSeconds"]
