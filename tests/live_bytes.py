"""What a call holds at its height, counted where there is no allocator to ask: on the CPU."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes() as live:`, live.peak is the most bytes that results of operators held at one time.

    Storages that were there before do not count. Temporaries inside one operator do not show.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._seen:
                    self._hold(storage)
        return result

    def _hold(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key, size):
        self._seen.discard(key)
        self.now -= size
