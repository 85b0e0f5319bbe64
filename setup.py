"""Compiles kernels/layer_adam.c as a step of the build; all else about the package stands in pyproject.toml.

The library is called through ctypes, not imported, so it depends on no Python version: a wheel that holds it is tagged
`py3-none-<platform>`. Without a C compiler the build still succeeds, as `py3-none-any`, and the optimizer runs its
torch fallback. `pip install -e .` compiles into kernels/ itself. Tested by tests/test_package_layout.py.
"""

import importlib.util
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

# Relative: setuptools runs this file from its own folder and wants relative paths.
KERNELS = Path("kernels")

# By path: slideformer_ray.kernels needs torch, which an isolated build environment does not have.
_spec = importlib.util.spec_from_file_location("native_build", KERNELS / "native_build.py")
native_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native_build)


class BuildLayerAdam(Command):
    """A sub-command of `build`, by setuptools' SubCommand protocol (which is how it learns of an editable install)."""

    description = "compile kernels/layer_adam.c"
    user_options = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None
        self.library = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))
        self.package = Path(self.build_lib, "slideformer_ray", "kernels")

    def run(self):
        output_dir = KERNELS if self.editable_mode else self.package
        try:
            self.library = native_build.compile_layer_adam(output_dir)
        except native_build.CompilerMissing as missing:
            self.warn(f"{missing}. Until then the optimizer runs on its slower torch fallback.")

    def get_source_files(self):
        return [str(KERNELS / "layer_adam.c")]

    def get_outputs(self):
        return [str(self.package / self.library.name)] if self.library else []

    def get_output_mapping(self):
        return {built: str(KERNELS / self.library.name) for built in self.get_outputs()} if self.editable_mode else {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_layer_adam", None)]


class PlatformWheel(bdist_wheel):
    def run(self):
        # First, because whether there is a library decides where the wheel's files go (platlib) and how it is tagged.
        self.run_command("build_layer_adam")
        if self.get_finalized_command("build_layer_adam").library:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build": Build, "build_layer_adam": BuildLayerAdam, "bdist_wheel": PlatformWheel})
