"""Saves one optimizer actor's blocks while training goes on: each is written before its next update may start.

A thread writes the blocks in the order in which they will be updated. An update of a block that is not written yet
waits, and its block comes next; so the bits saved are those of one step, and no copy of the states is made. Pure: no
Ray. Tested by tests/actors/test_block_saver.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slideformer_ray.actors.slice_files import Range, SliceWriter, StateSlice
from slideformer_ray.checkpoint_layout import TensorPlaces


@dataclass(frozen=True)
class SaveReport:
    """What one actor has written; the files are not durable yet."""

    adam_step: int
    ranges: dict[str, list[Range]] = field(default_factory=dict)
    seconds: float = 0.0
    update_waited_seconds: float = 0.0  # how long updates were held up
    direct: bool = True  # False: the file system has no O_DIRECT, and the page cache was used
    error: OSError | None = None


class BlockSaver:
    def __init__(
        self,
        slices: Callable[[int], Iterable[StateSlice]],
        order: Sequence[int],
        directory: Path,
        places: TensorPlaces,
        adam_step: int,
    ):
        """slices(block): what is to be saved of it, valid until the next block's are asked for."""
        self._slices, self._places, self._adam_step = slices, places, adam_step
        self._waiting = list(order)
        self._changed = threading.Condition()
        self._at_work: int | None = None
        self._update_waited = 0.0
        self._report: SaveReport | None = None
        self._failed: BaseException | None = None  # what is no matter of files and disks: ours
        self._thread = threading.Thread(target=self._run, args=(directory,), name="save", daemon=True)
        self._thread.start()

    def before_update(self, block: int) -> None:
        """Return when the block has been written, or will not be: the save has failed."""
        with self._changed:
            if block not in self._waiting and block != self._at_work:
                return
            started = time.perf_counter()
            if block in self._waiting:
                self._waiting.remove(block)
                self._waiting.insert(0, block)
            self._changed.wait_for(lambda: block not in self._waiting and block != self._at_work)
            self._update_waited += time.perf_counter() - started

    def poll(self) -> SaveReport | None:
        """The report, once everything is written or has failed."""
        if self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> SaveReport:
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        assert self._report is not None
        return self._report

    def abandon(self) -> None:
        """Stop after the block at work."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self, directory: Path) -> None:
        started = time.perf_counter()
        writer: SliceWriter | None = None
        error: OSError | None = None
        try:
            writer = SliceWriter(directory, self._places)
            for block in self._blocks():
                for piece in self._slices(block):
                    writer.write(piece)
                writer.finish()
        except OSError as caught:
            error = caught
        except BaseException as caught:
            self._failed = caught
        finally:
            if writer is not None:
                writer.close()
            with self._changed:
                self._waiting.clear()
                self._at_work = None
                self._changed.notify_all()
        ranges, direct = (writer.ranges, writer.direct) if writer is not None else ({}, False)
        seconds = time.perf_counter() - started
        self._report = SaveReport(self._adam_step, ranges, seconds, self._update_waited, direct, error)

    def _blocks(self) -> Iterator[int]:
        while True:
            with self._changed:
                self._at_work = self._waiting.pop(0) if self._waiting else None
                self._changed.notify_all()
                if self._at_work is None:
                    return
                block = self._at_work
            yield block
