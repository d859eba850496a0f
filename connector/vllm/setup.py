"""Builds the Rust core into the package, and names the wheel for every Python 3 of the platform."""

import pathlib
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = "libbaton_vllm_core.so"


class BuildWithCore(build_py):
    """`cargo build` of the crate in this folder. `BATON_VLLM_CORE` names a library that is built already."""

    def run(self):
        super().run()
        import os

        built = os.environ.get("BATON_VLLM_CORE")
        if not built:
            subprocess.run(["cargo", "build", "--release", "--locked", "-p", "baton-vllm"], cwd=HERE, check=True)
            target = os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target")
            built = pathlib.Path(target) / "release" / LIBRARY
        package = pathlib.Path(self.build_lib) / "baton_vllm"
        package.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, package / LIBRARY)


class PlatformWheel(bdist_wheel):
    """The core is loaded with ctypes, so one wheel serves all versions of Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class WithCore(Distribution):
    """A distribution for one platform."""

    def has_ext_modules(self):
        return True


setup(distclass=WithCore, cmdclass={"build_py": BuildWithCore, "bdist_wheel": PlatformWheel})
