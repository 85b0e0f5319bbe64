"""The byte table of README.md: what `plan` says for three workstations. `tests/test_docs.py` holds the page to it.

python docs/make_byte_table.py            # print it
python docs/make_byte_table.py --write    # put it into README.md
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from slideformer_ray.budget import BytePlan, Machine, resolve
from slideformer_ray.config import GIB, RunConfig
from slideformer_ray.memory.host_limits import HostLimits
from slideformer_ray.model.layers import describe_model
from slideformer_ray.model.shapes import shape

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- byte table: docs/make_byte_table.py -->", "<!-- end of byte table -->"

SYSTEM_GIB = 3  # what the desktop has taken before the run starts
GPU_GIB = 24
MACHINES = [
    (64, "qwen2.5-3b"),
    (128, "qwen2.5-7b"),
    (256, "qwen2.5-14b"),
]  # (GB of RAM, the largest of the family that fits)


def workstation(ram_gb: int) -> Machine:
    """8 cores, one 24 GB GPU; /dev/shm is half of the RAM, which is Linux's default."""
    total = int(ram_gb * 1e9)
    free = total - SYSTEM_GIB * GIB
    gpu = int(23.5 * GIB)  # a 24 GB card with a display shows about this much free
    return Machine(HostLimits(total, free, None, 0, total // 2, total // 2), 8, "24 GB", GPU_GIB * GIB, gpu)


def plan(ram_gb: int, name: str) -> BytePlan:
    config = RunConfig.from_dict(
        {
            "run_dir": tempfile.gettempdir(),
            "model": {"path": tempfile.gettempdir(), "random_init": True},
            "data": {"train": ["rows.jsonl"], "seq_len": 1024},
            "training": {"steps": 1, "rows_per_step": 32, "micro_batch_rows": 4},
        }
    )
    hf_config = shape(name)
    return resolve(config, describe_model(hf_config), hf_config.intermediate_size, workstation(ram_gb))


def table() -> str:
    lines = [
        "| 24 GB GPU and | model | parameters, hi | masters' rest, lo | Adam states | gradients | activations | "
        "all host GiB | GPU GiB | of it, recomputation saved |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ram_gb, name in MACHINES:
        p = plan(ram_gb, name)

        def gib(word: str, p: BytePlan = p, tier: str = "host") -> str:
            return f"{sum(i.nbytes for i in p.items if word in i.what and tier in i.tier) / GIB:.1f}"

        lines.append(
            f"| {ram_gb} GB of RAM | {name} | {gib('(hi)')} | {gib('(lo)')} | {gib('exp_avg')} | {gib('gradients:')} | "
            f"{gib('offloaded activations')} | {p.host_bytes / GIB:.1f} | {p.gpu_bytes / GIB:.1f} | "
            f"{gib('kept for the backward', tier='GPU')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        text = README.read_text()
        before, rest = text.split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
    print(table())
