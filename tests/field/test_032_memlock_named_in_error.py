"""Field case 32 (LMCache #1063, cupy #4775, DeepSpeed #2977).

In: memlock 64 KB, or WSL2, and 5 GB to pin.
Bad: "invalid argument", or the host freezes.
Good: the limit is read first; the message names it and the fix.
"""

import platform
import resource

import pytest

from slideformer_ray.memory.pinning import PinningFailed, register

FIVE_GIB = 5 * 2**30


class RefusingDriver:
    def cudaHostRegister(self, address, nbytes, flags):
        return 1

    def cudaGetLastError(self):
        return 1

    def cudaGetErrorString(self, code):
        return "invalid argument"


def refusal(monkeypatch, kernel):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(platform, "release", lambda: kernel)
    with pytest.raises(PinningFailed) as caught:
        register([(4096, FIVE_GIB)], runtime=RefusingDriver())
    return str(caught.value)


def test_memlock_limit_and_fix_are_named(monkeypatch):
    """Found, needed and every way to raise it: shell, container, for good."""
    message = refusal(monkeypatch, "6.8.0-generic")
    assert "invalid argument (error 1)" in message
    assert "(`ulimit -l`) is 64 KiB, 5242880 KiB were asked for" in message
    for fix in ("ulimit -l unlimited", "docker run --ulimit memlock=-1", "/etc/security/limits.conf"):
        assert fix in message
    assert "wslconfig" not in message


def test_wsl2_gets_its_own_fix(monkeypatch):
    """On WSL2 the share of memory that can be pinned is the other suspect."""
    assert r"memory=` under [wsl2] in %UserProfile%\.wslconfig" in refusal(
        monkeypatch, "5.15.90.1-microsoft-standard-WSL2"
    )
