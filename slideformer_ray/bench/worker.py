"""The process that measures: `python -m slideformer_ray.bench.worker`, given its cases on stdin as JSON.

One process a case (one for all batches of the resident model), so that nothing of one is left for the next, neither
GPU memory nor compiled kernels nor patched classes. Each outcome is a line of JSON in the file that the request names,
as soon as it is known; the message of an error is on stderr. Tested by tests/bench/test_run.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from slideformer_ray.bench.case import Case
from slideformer_ray.bench.host_memory import MachineMemory
from slideformer_ray.bench.result import Outcome, to_line

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 128 + signal.SIGINT  # as the command's


def work(request: dict[str, Any], memory: MachineMemory) -> None:
    """Raises what a run raises."""
    cases = [Case.from_record(record) for record in request["cases"]]

    def tell(outcome: Outcome) -> None:
        with Path(request["outcomes"]).open("a") as file:
            file.write(to_line(outcome) + "\n")

    if cases[0].system == "resident":
        from slideformer_ray.bench.resident import measure_resident

        measure_resident(cases, memory, tell, larger=request["larger"])
        return
    from slideformer_ray.bench.window import measure_window

    for case in cases:
        tell(measure_window(case, memory))


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: the tiers are ended in order
    request = json.load(sys.stdin)
    memory = MachineMemory()  # before torch is there: what it takes counts
    from slideformer_ray.tiers import TierError

    try:
        # Ray prints on stdout what its raylet complains of.
        nowhere = open(os.devnull, "w")
        with nowhere, redirect_stdout(sys.stderr if request["debug"] else nowhere), memory:
            work(request, memory)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, TierError) as error:  # ConfigError and its like: the user's input
        if request["debug"]:
            raise
        print(error, file=sys.stderr)
        return WRONG_INPUT if isinstance(error, ValueError) else FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
