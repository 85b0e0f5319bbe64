"""Optimizer states on disk: pieces of 1-D tensors in safetensors files, keyed by parameter name and first element.

The key says nothing about flat offsets or actors, so a checkpoint is read by any number of optimizer actors. Pure: no
Ray. Tested by tests/actors/test_state_files.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slideformer_ray.durable import fsync_path

Piece = tuple[str, str, int]  # (state, parameter, first element)


class StateError(ValueError):
    """A checkpoint's states are missing, torn, or of another model."""


class StateWriter:
    def __init__(self, directory: Path, prefix: str, metadata: dict[str, str]):
        self.directory, self.prefix, self.metadata = directory, prefix, metadata
        self.names: list[str] = []

    def write(self, part: str, tensors: Mapping[Piece, Tensor]) -> None:
        name = f"{self.prefix}.{part}.safetensors"
        path = self.directory / name
        save_file(
            {"|".join((state, param, str(first))): t for (state, param, first), t in tensors.items()},
            path,
            self.metadata,
        )
        fsync_path(path)
        self.names.append(name)


class StateReader:
    """Reads ranges of states out of a directory's `*.safetensors` files. Raises StateError, naming file and key."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Path, str]]] = {}
        steps = set()
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    steps.add((file.metadata() or {}).get("adam_step", ""))
                    for key in file.keys():
                        state, param, first = key.rsplit("|", 2)
                        (count,) = file.get_slice(key).get_shape()
                        self._pieces.setdefault((state, param), []).append((int(first), int(first) + count, path, key))
            except Exception as error:
                raise StateError(
                    f"{path}: not a readable state file ({error}); the checkpoint is torn: resume from another one"
                ) from None
        if not self._pieces:
            raise StateError(
                f"{directory}: no state files (*.safetensors); resume from a directory RUN/checkpoints/step-N"
            )
        if len(steps) != 1 or not next(iter(steps)).isdigit():
            raise StateError(
                f"{directory}: its files are of several saves (Adam steps {sorted(steps)}); resume from another "
                "checkpoint"
            )
        self.adam_step = int(next(iter(steps)))

    def read(self, state: str, param: str, first: int, last: int, out: Tensor) -> None:
        """Copy elements [first, last) of a parameter's state into `out`."""
        at = first
        for start, stop, path, key in sorted(self._pieces.get((state, param), ())):
            if stop <= at or start > at or at >= last:
                continue
            end = min(stop, last)
            with safe_open(path, "pt") as file:
                piece = file.get_slice(key)[at - start : end - start]
            if piece.dtype != out.dtype:
                raise StateError(
                    f"{path}: {key} is {piece.dtype}, expected {out.dtype}; training.precision differs from the saved "
                    "run's"
                )
            out[at - first : end - first].copy_(piece)
            at = end
        if at < last:
            raise StateError(
                f"{self.directory}: {state} of {param} ends at element {at}, needed up to {last}; the checkpoint lost "
                "a file or is of another model"
            )
