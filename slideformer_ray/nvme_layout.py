"""Where Adam states lie on NVMe: which layers', where in a staging slot, and where in the files. Pure data.

A layer's states are one region, the same bytes in a staging slot and in the files: actor after actor, exp_avg and then
exp_avg_sq of its slice, each from a multiple of `ALIGN_BYTES` on, so that an actor reads and writes its part by itself.
Worked, a layer of Qwen2.5-3B (77.1M parameters): 8 x 77.1e6 = 588 MiB. Imports neither torch nor ray. Tested by
tests/test_nvme_layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slideformer_ray.model.spec import ModelSpec, align, slice_of

# Of memory, offset and length of an access past the page cache: a page, which no drive's logical block exceeds.
ALIGN_BYTES = 4096
MOMENT_BYTES = 4  # exp_avg and exp_avg_sq are fp32


@dataclass(frozen=True)
class StatePart:
    """One actor's elements [start, stop) of a layer, and where their moments begin in the layer's region, bytes."""

    start: int
    stop: int
    exp_avg: int
    exp_avg_sq: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def state_parts(numel: int, num_actors: int) -> tuple[StatePart, ...]:
    """The parts of a layer of `numel` trained elements, a part an actor."""
    parts, at = [], 0
    for k in range(num_actors):
        start, stop = slice_of(numel, k, num_actors)
        moment = align((stop - start) * MOMENT_BYTES, ALIGN_BYTES)
        parts.append(StatePart(start, stop, at, at + moment))
        at += 2 * moment
    return tuple(parts)


def region_bytes(numel: int, num_actors: int) -> int:
    """Bytes of the region of a layer of `numel` trained elements."""
    moments = (slice_of(numel, k, num_actors) for k in range(num_actors))
    return sum(2 * align((stop - start) * MOMENT_BYTES, ALIGN_BYTES) for start, stop in moments)


def staged_blocks(trainable: Sequence[bool], fraction: float) -> tuple[int, ...]:
    """Decoder blocks whose states lie on NVMe: at least `fraction` of the trained ones, evenly spread.

    Spread, so that the drive works at an even pace while layers come one after the other. Embedding and head stay in
    RAM: the rows of the one are what the next step begins with, and their size is no layer's.
    """
    layers = [block for block in range(1, len(trainable) - 1) if trainable[block]]
    count = math.ceil(fraction * len(layers) - 1e-9)
    return tuple(block for i, block in enumerate(layers) if (i + 1) * count // len(layers) > i * count // len(layers))


def region_sizes(spec: ModelSpec, staged: Sequence[int], num_actors: int) -> tuple[int, ...]:
    return tuple(region_bytes(spec.blocks[block].trainable_numel, num_actors) for block in staged)


@dataclass(frozen=True)
class Extent:
    """Bytes that lie in one piece both in a file and in a region's memory."""

    file: int
    file_offset: int
    offset: int  # in the memory that is read into or written from
    nbytes: int


@dataclass(frozen=True)
class FileLayout:
    """How regions are spread over one file a directory.

    stripe_bytes: every region is cut into pieces of so many bytes, dealt out to the files in turn; None: region i lies
    whole in file i modulo their number.
    """

    regions: tuple[int, ...]  # bytes, multiples of ALIGN_BYTES
    num_files: int
    stripe_bytes: int | None

    def file_sizes(self) -> tuple[int, ...]:
        sizes = [0] * self.num_files
        for region, nbytes in enumerate(self.regions):
            for extent in self.extents(region, 0, nbytes):
                sizes[extent.file] = max(sizes[extent.file], extent.file_offset + extent.nbytes)
        return tuple(sizes)

    def extents(self, region: int, offset: int, nbytes: int) -> Iterator[Extent]:
        """Where bytes [offset, offset + nbytes) of a region lie."""
        if self.stripe_bytes is None:
            before = sum(self.regions[region % self.num_files : region : self.num_files])
            yield Extent(region % self.num_files, before + offset, 0, nbytes)
            return
        # All regions one after the other; the whole is cut into stripes.
        first = at = sum(self.regions[:region]) + offset
        while at < first + nbytes:
            stripe, skew = divmod(at, self.stripe_bytes)
            count = min(self.stripe_bytes - skew, first + nbytes - at)
            file, row = stripe % self.num_files, stripe // self.num_files
            yield Extent(file, row * self.stripe_bytes + skew, at - first, count)
            at += count
