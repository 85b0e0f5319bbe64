"""kernels/native_build.py: compiling layer_adam.c, and which compiled library is loaded."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slideformer_ray.kernels import native_build
from slideformer_ray.kernels.native_build import CompilationFailed, CompilerMissing, compile_layer_adam, load_layer_adam

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler on PATH"
)


@pytest.fixture(autouse=True)
def no_cc_variable(monkeypatch):
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A PATH on which nothing is found."""
    empty = tmp_path / "empty-path"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


@needs_compiler
@pytest.mark.parametrize("compiler", ["gcc", "clang", "aarch64-linux-gnu-gcc"])
def test_compiles_without_warnings(compiler, tmp_path, monkeypatch):
    """gcc, clang and, for Arm, a cross-compiler accept the source with -Wall -Wextra as errors; those that are here."""
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-Werror"))
    assert compile_layer_adam(tmp_path, compiler).exists()


@needs_compiler
def test_only_the_library_is_left_in_the_output_folder(tmp_path):
    """The library appears whole, by a rename; no scratch file stays. The folder is made if it is missing."""
    library = compile_layer_adam(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == [library] == [tmp_path / "new" / native_build.LIBRARY_NAME]


def test_library_name_does_not_shadow_the_module():
    """Python prefers an extension module NAME.so to NAME.py, so the library must have no module's name."""
    assert not native_build.SOURCE.with_name(Path(native_build.LIBRARY_NAME).stem + ".py").exists()


def test_missing_compiler_is_its_own_error(no_compiler, tmp_path):
    """setup.py must tell a missing compiler (build on, fallback at run time) from an error in the source."""
    with pytest.raises(CompilerMissing, match="looked for cc, gcc and clang on PATH.*install gcc or clang"):
        compile_layer_adam(tmp_path)


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_named_compiler_is_not_replaced(by_variable, monkeypatch, tmp_path):
    """$CC or an argument that names a compiler which is not there is an error, even where another compiler is."""
    if by_variable:
        monkeypatch.setenv("CC", "no-such-compiler -O1")
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        compile_layer_adam(tmp_path, None if by_variable else "no-such-compiler")


@needs_compiler
def test_a_compiler_error_carries_command_and_message(monkeypatch, tmp_path):
    """What the compiler said reaches the user."""
    source = tmp_path / "layer_adam.c"
    source.write_text("#error broken on purpose\n")
    monkeypatch.setattr(native_build, "SOURCE", source)
    with pytest.raises(CompilationFailed, match="(?s)layer_adam.c.*broken on purpose"):
        compile_layer_adam(tmp_path)


def test_build_id_follows_source_and_flags(monkeypatch, tmp_path):
    """Another source or other flags are another build."""
    ids = {native_build.build_id()}
    with monkeypatch.context() as patch:
        patch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-O2"))
        ids.add(native_build.build_id())
    source = tmp_path / "layer_adam.c"
    source.write_bytes(native_build.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native_build, "SOURCE", source)
    ids.add(native_build.build_id())
    assert len(ids) == 3


@needs_compiler
def test_the_installed_library_comes_first(tmp_path, monkeypatch):
    """A library beside the source is used as it is; the user's cache is not written."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    compile_layer_adam(package)
    library, origin = load_layer_adam(package, cache)
    assert library is not None and origin == str(package / native_build.LIBRARY_NAME)
    assert not cache.exists()


@needs_compiler
def test_a_stale_library_is_never_used(tmp_path, monkeypatch):
    """A library of another source is passed over for a fresh one in the user's cache, and the text says so."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(native_build, "build_id", lambda: "another source")
        compile_layer_adam(package)
    library, origin = load_layer_adam(package, cache)
    assert library.layer_adam_build_id().decode() == native_build.build_id()
    assert origin.startswith(str(cache)) and "stale" in origin and "another source" in origin


@needs_compiler
def test_the_cache_is_used_again(tmp_path, monkeypatch):
    """Compiled at run time once, then loaded without a compiler."""
    _, first = load_layer_adam(tmp_path / "nothing", tmp_path / "cache")
    monkeypatch.setenv("PATH", "")
    library, second = load_layer_adam(tmp_path / "nothing", tmp_path / "cache")
    assert library is not None and first == second


@needs_compiler
def test_a_broken_library_is_passed_over(tmp_path):
    """A file that does not load (another architecture, a torn copy) is named with the loader's message."""
    package = tmp_path / "package"
    package.mkdir()
    (package / native_build.LIBRARY_NAME).write_bytes(b"not a library")
    library, origin = load_layer_adam(package, tmp_path / "cache")
    assert library is not None and f"{package / native_build.LIBRARY_NAME} is not used" in origin


def test_without_library_and_compiler_the_reason_is_given(no_compiler, tmp_path):
    """Nothing to load and nothing to compile with: None, and the text says what to install."""
    library, reason = load_layer_adam(tmp_path / "nothing", tmp_path / "cache")
    assert library is None and "install gcc or clang" in reason


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """The fix (XDG_CACHE_HOME) is part of the reason."""
    (tmp_path / "file").touch()
    library, reason = load_layer_adam(tmp_path / "nothing", tmp_path / "file" / "cache")
    assert library is None and "XDG_CACHE_HOME" in reason


def test_cache_folder_tells_builds_and_machines_apart(monkeypatch, tmp_path):
    """Homes are shared between machines and versions: the folder carries the build id and the machine type."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = native_build.user_cache_dir()
    assert folder.parent == tmp_path / "slideformer_ray"
    assert native_build.build_id() in folder.name and platform.machine() in folder.name


def test_needs_no_torch():
    """setup.py loads this file by its path in an environment without torch."""
    program = (
        "import importlib.util, sys; sys.modules['torch'] = None;"
        f"spec = importlib.util.spec_from_file_location('native_build', {native_build.__file__!r});"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); print(module.build_id())"
    )
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == native_build.build_id(), run.stderr
