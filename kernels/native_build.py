"""Compiles layer_adam.c, and finds a compiled one that matches the source.

Standard library only: setup.py loads this file by its path, before torch is installed. `python -m
slideformer_ray.kernels.native_build` compiles in place. It may write the library it is asked for and, at run time, the
user's cache directory; it never loads a library that was built from another source. Tests:
tests/kernels/test_native_build.py.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("layer_adam.c")
LIBRARY_NAME = "layer_adam_native.so"

# No -march: the instruction sets are chosen at run time, so one library serves every CPU of the platform.
# -ffp-contract=off: a fused multiply-add where the source does not write one would change bits.
# -fno-math-errno, -fno-trapping-math: without them sqrt is a call and the selection is a branch, and neither
# vectorises.
FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
)


class CompilerMissing(RuntimeError):
    """No C compiler was found. The message names what was looked for and the fix."""


class CompilationFailed(RuntimeError):
    """The compiler refused layer_adam.c. The message holds its command and its errors."""


def build_id() -> str:
    """Identifies the source and the flags. A library carries the one it was built from; only an equal one is loaded."""
    return hashlib.sha256(SOURCE.read_bytes() + "\0".join(FLAGS).encode()).hexdigest()[:16]


def compile_layer_adam(output_dir: Path, compiler: str | None = None) -> Path:
    """Compiles layer_adam.c into `output_dir`/layer_adam_native.so and returns that path.

    `compiler`: a command such as "clang" or "ccache gcc"; by default $CC, else the first of cc, gcc, clang that is
    found. The file appears whole or not at all: several processes may compile to one place at once.

    Raises CompilerMissing, CompilationFailed, and OSError where `output_dir` cannot be written.
    """
    command = _compiler_command(compiler)
    output_dir.mkdir(parents=True, exist_ok=True)
    library = output_dir / LIBRARY_NAME
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".layer_adam-") as scratch_dir:
        fresh = Path(scratch_dir) / LIBRARY_NAME
        command += [*FLAGS, f'-DLAYER_ADAM_BUILD_ID="{build_id()}"', str(SOURCE), "-o", str(fresh), "-lm"]
        compilation = subprocess.run(command, capture_output=True, text=True)
        if compilation.returncode != 0:
            raise CompilationFailed(f"{shlex.join(command)} failed:\n{compilation.stderr.strip()}")
        os.replace(fresh, library)
    return library


def _compiler_command(compiler: str | None) -> list[str]:
    wanted = compiler or os.environ.get("CC")
    for candidate in [wanted] if wanted else ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    looked_for = f"{wanted!r} was asked for" if wanted else "looked for cc, gcc and clang on PATH"
    raise CompilerMissing(f"no C compiler ({looked_for}); install gcc or clang, or set CC to one")


def user_cache_dir() -> Path:
    """Where a library compiled at run time is kept: a folder a user, build and machine type (homes are shared)."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "slideformer_ray" / f"layer_adam-{build_id()}-{platform.machine()}"


def load_layer_adam(package_dir: Path | None = None, cache_dir: Path | None = None) -> tuple[ctypes.CDLL | None, str]:
    """The compiled library and where it came from, or None and why there is none.

    Looked for in this order: `package_dir` (default: beside layer_adam.c, where an installation puts it), `cache_dir`
    (default: `user_cache_dir()`), and then it is compiled into `cache_dir`. A library of another source or for another
    machine is passed over, and the text says so.
    """
    passed_over = ""
    package_library = (package_dir or SOURCE.parent) / LIBRARY_NAME
    if package_library.exists():
        library, problem = _open(package_library)
        if library:
            return library, str(package_library)
        passed_over = f" ({package_library} is not used: {problem})"
    try:
        cached_library = (cache_dir or user_cache_dir()) / LIBRARY_NAME
        library, problem = _open(cached_library) if cached_library.exists() else (None, "not there")
        if library is None:
            library, problem = _open(compile_layer_adam(cached_library.parent))
    except (CompilerMissing, CompilationFailed) as error:
        return None, f"{error}{passed_over}"
    except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() of a user that has none
        return (
            None,
            f"the user's cache cannot be written ({error}); set XDG_CACHE_HOME to a folder that can{passed_over}",
        )
    if library is None:
        return None, f"{cached_library} was compiled but does not load: {problem}{passed_over}"
    return library, f"{cached_library}{passed_over}"


def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # another architecture or C library
        return None, str(error)
    try:
        library.layer_adam_build_id.restype = ctypes.c_char_p
        found = library.layer_adam_build_id().decode()
    except AttributeError:
        found = "none"
    if found != build_id():
        return None, f"stale, its build id is {found} and the source's is {build_id()}"
    return library, ""


def main() -> int:
    try:
        print(compile_layer_adam(SOURCE.parent))
    except (CompilerMissing, CompilationFailed, OSError) as error:
        print(f"native_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
