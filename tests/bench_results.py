"""Results of benchmarks that nobody ran, for tests; pyproject.toml puts this folder on the path."""

from slideformer_ray.bench.result import BenchResult


def a_result(**changes) -> BenchResult:
    values = {
        "label": "4 rows",
        "system": "window",
        "shape": "tiny",
        "settings": (),
        "rows": 4,
        "seq_len": 64,
        "micro_batch_rows": 4,
        "tokens": 256,
        "parameters": 1_000_000,
        "seconds": (0.5, 0.4, 0.6),
        "gpu_peak_bytes": 3 << 30,
        "gpu_reserved_bytes": 4 << 30,
        "machine_bytes": 5 << 30,
        "device": "a GPU, 16 cores",
        "versions": {"torch": "2.11"},
        "process_bytes": 6 << 30,
        "forward_hiding_factor": 2.5,
        "backward_hiding_factor": 0.75,
        "exposed_seconds": {"update": 0.0125, "tail": 0.002, "upload_head": 0.0},
    }
    return BenchResult(**(values | changes))
