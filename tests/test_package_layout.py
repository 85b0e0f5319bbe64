"""`actors/` and `kernels/` stand at the root but are imported as slideformer_ray.actors and slideformer_ray.kernels,
whichever way the package gets onto sys.path: a wheel, an editable install, pytest at the root, a Ray working_dir. And
imports run one way.

Builds happen in a copy of the checkout, each import in a Python process of its own. Needs no network.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Package path in an installation: folder in the checkout.
SOURCES = {
    "slideformer_ray": "slideformer_ray",
    "slideformer_ray/actors": "actors",
    "slideformer_ray/kernels": "kernels",
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NO_NETWORK = ["--no-index", "--no-deps", "--no-build-isolation"]
HAS_COMPILER = any(shutil.which(command) for command in ("cc", "gcc", "clang"))


def installed_paths(suffix):
    """Where the sources of the checkout belong when installed: kernels/rope.py at slideformer_ray/kernels/rope.py."""
    return {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in SOURCES.items()
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }


def run(command, cwd, **env):
    """Runs it to the end; its output is the failure's message."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | env, text=True, capture_output=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_python(code, cwd, first_on_path, site_dir=None):
    """The JSON that `code` prints, in a process that sees this one's dependencies but not this checkout.

    `-S`, with this process's sys.path handed on, leaves out .pth files: those of an editable install would lead back
    to the checkout. The .pth files of `site_dir` alone are read.
    """
    dependencies = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    read_pth_files = f"import site; site.addsitedir({str(site_dir)!r})\n" if site_dir else ""
    path = os.pathsep.join([*map(str, first_on_path), *dependencies])
    return json.loads(run([sys.executable, "-S", "-c", read_pth_files + code], cwd, PYTHONPATH=path).splitlines()[-1])


WHERE_THE_MODULES_ARE = """
import json
import slideformer_ray.actors.gpu_actor as gpu_actor
import slideformer_ray.kernels.layer_adam as layer_adam
print(json.dumps([gpu_actor.__file__, layer_adam.__file__]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what the build reads, without build products."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for folder in ("slideformer_ray", "actors", "kernels"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], cwd=checkout)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, so that a file that the sdist lacks is missed."""
    folder = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", *NO_NETWORK, "-w", folder, sdist], cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site_packages(wheel, tmp_path_factory):
    """A folder with nothing but the wheel installed in it."""
    folder = tmp_path_factory.mktemp("site-packages")
    run([*PIP, "install", *NO_NETWORK, "--target", folder, wheel], cwd=folder)
    return folder


def test_the_wheel_holds_every_module_and_data_file(wheel):
    """A package or data file that pyproject.toml does not name would be missing for users and for no developer."""
    data_files = {path for path in installed_paths("") if "/quickstart/" in path and (ROOT / path).is_file()}
    expected = installed_paths(".py") | installed_paths(".c") | data_files
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_wheel_installs_one_top_level_package(site_packages):
    """A top-level `kernels` would be taken by transformers for the Hugging Face package of that name."""
    modules = {path.name for path in site_packages.iterdir() if path.name.isidentifier() and path.name != "bin"}
    assert modules == {"slideformer_ray"}


def test_an_installed_wheel_imports(site_packages, tmp_path):
    """Both mapped packages are imported from the installation."""
    files = run_python(WHERE_THE_MODULES_ARE, cwd=tmp_path, first_on_path=[site_packages])
    package = site_packages / "slideformer_ray"
    assert files == [str(package / "actors/gpu_actor.py"), str(package / "kernels/layer_adam.py")]


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")
def test_a_wheel_with_the_compiled_kernel_is_bound_to_the_platform_alone(wheel):
    """ctypes needs no Python ABI: one wheel serves every Python of the platform, and is installed in platlib."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/WHEEL"))).decode()
    _, _, python, abi, platform = wheel.stem.split("-")
    assert [str(Path(library).parent) for library in libraries] == ["slideformer_ray/kernels"]
    assert (python, abi) == ("py3", "none") and platform.startswith("linux_")
    assert "Root-Is-Purelib: false" in metadata


def test_without_a_compiler_the_wheel_is_pure(checkout, tmp_path):
    """A machine without a compiler can install the package, and the build says that the torch fallback will be used."""
    command = [*PIP, "wheel", "-v", *NO_NETWORK, "-w", tmp_path, checkout]
    result = subprocess.run(
        [str(part) for part in command],
        env={name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "torch fallback" in result.stdout + result.stderr


def test_an_editable_install_imports_from_the_checkout(checkout, tmp_path):
    """`pip install -e .` maps both packages to the checkout's root, and compiles the kernel in place."""
    run([*PIP, "install", *NO_NETWORK, "--target", tmp_path, "-e", checkout], cwd=tmp_path)
    files = run_python(WHERE_THE_MODULES_ARE, cwd=tmp_path, first_on_path=[], site_dir=tmp_path)
    assert files == [str(checkout / "actors/gpu_actor.py"), str(checkout / "kernels/layer_adam.py")]
    assert len(list((checkout / "kernels").glob("*.so"))) == int(HAS_COMPILER)


def test_pytest_at_the_root_imports_from_the_checkout():
    """Under --import-mode=importlib the folders of tests/ with the same names do not get in the way."""
    import slideformer_ray.actors.gpu_actor as gpu_actor
    import slideformer_ray.kernels.layer_adam as layer_adam

    assert gpu_actor.__file__ == str(ROOT / "actors/gpu_actor.py")
    assert layer_adam.__file__ == str(ROOT / "kernels/layer_adam.py")


def test_transformers_at_the_root_does_not_take_our_kernels_for_the_hub_package():
    """With the checkout first on sys.path its folder `kernels` is found, but is no package: it has no `__init__.py`."""
    code = """
import importlib.util, json, sys
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
hub_package_is_installed = importlib.util.find_spec("kernels").origin is not None
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("kernels.")]
print(json.dumps([is_kernels_available(), hub_package_is_installed, files]))
"""
    available, hub_package_is_installed, files = run_python(code, cwd=ROOT, first_on_path=[ROOT])
    assert hub_package_is_installed or not available
    assert not [file for file in files if Path(file).is_relative_to(ROOT)]


@pytest.mark.slow
def test_a_ray_working_dir_imports(checkout, tmp_path):
    """A job's workers find both packages in the working_dir that Ray unpacked for them, with nothing installed."""
    code = """
import json, ray
ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
    runtime_env={"working_dir": CHECKOUT},
)

@ray.remote
def where_the_modules_are():
    import slideformer_ray.actors.gpu_actor as gpu_actor
    import slideformer_ray.kernels.layer_adam as layer_adam
    return gpu_actor.__file__, layer_adam.__file__

files = ray.get(where_the_modules_are.remote(), timeout=60)
ray.shutdown()
print(json.dumps(files))
""".replace("CHECKOUT", repr(str(checkout)))
    files = run_python(code, cwd=tmp_path, first_on_path=[])
    assert [file.split("/working_dir_files/")[1].split("/", 1)[1] for file in files] == [
        "actors/gpu_actor.py",
        "kernels/layer_adam.py",
    ]


@pytest.mark.parametrize("module", ["schedule", "simulator", "config", "lr_schedule", "model.spec", "observe.trace"])
def test_pure_modules_import_neither_torch_nor_ray(module):
    """A plan can be made, simulated and checked at once, on a machine without either."""
    code = f"import json, sys, slideformer_ray.{module}; print(json.dumps(list(sys.modules)))"
    modules = run_python(code, cwd=ROOT, first_on_path=[ROOT])
    assert not {"torch", "ray"} & set(modules)


# cli -> trainer -> actors -> (memory, model, kernels); schedule, config and memory import nothing above them.
COMMAND = {"cli", "__main__"}  # `python -m slideformer_ray` is the command, too
RANK = dict.fromkeys(COMMAND, 4) | {
    **{"trainer": 3, "actors": 2, "model": 1, "kernels": 1},
    **{"memory": 0, "schedule": 0, "config": 0},
}


def imported_parts(path):
    """X for each `import slideformer_ray.X...` and `from slideformer_ray.X import ...` of a file, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom("slideformer_ray", names, 0):
                modules = [f"slideformer_ray.{alias.name}" for alias in names]
            case ast.ImportFrom(str(module), _, 0):
                modules = [module]
            case _:
                continue
        yield from (module.split(".")[1] for module in modules if module.startswith("slideformer_ray."))


def upward_imports(part, path):
    for imported in imported_parts(path):
        if part not in RANK:
            # The modules not named in the order are only kept from the command.
            allowed = imported not in COMMAND
        elif RANK[part] == 0:
            allowed = RANK.get(imported) == 0
        else:
            allowed = RANK.get(imported, 0) <= RANK[part]
        if not allowed and imported != part:
            yield f"{path.name}: {part} imports {imported}"


def test_imports_run_one_way():
    """The order above holds for every import, so that each part can be read, and tested, without those above it."""
    upward = []
    for package, folder in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):
            part = (Path(package) / path.relative_to(ROOT / folder)).with_suffix("").parts[1]
            if part != "__init__":
                upward += upward_imports(part, path)
    assert upward == []


@pytest.mark.parametrize(
    "part, source",
    [
        ("memory", "from slideformer_ray.actors.gpu_actor import GpuActor"),
        ("kernels", "def f():\n    import slideformer_ray.trainer"),
        ("observe", "from slideformer_ray import cli"),
    ],
)
def test_an_upward_import_is_noticed(part, source, tmp_path):
    """The check above sees every form of import."""
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(list(upward_imports(part, path))) == 1
