"""Python imports this module when an engine's process starts, if `--few-cores` is given.

Each stock engine has two loops without a wait: NIXL's progress thread, and the workers, for a second after each step.
With fewer cores than such loops, processes wait for seconds until the kernel runs them. This module lets both wait:

- NIXL's progress thread for events, at most a millisecond
- a worker for its next step, 100 microseconds instead of `sched_yield`
"""

import importlib.util
import os
import sys
import time

POLL_US, YIELD_S = 1000, 100e-6


class Loader:
    """The loader of NIXL's bindings. The agents' configuration in the loaded module has another default."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)

        class Configuration(module.nixlAgentConfig):
            def __setattr__(self, name, value):
                super().__setattr__(name, POLL_US if name == "pthrDelay" else value)

        module.nixlAgentConfig = Configuration


class Finder:
    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        if module != "_bindings" or not package.startswith("nixl"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
os.sched_yield = lambda: time.sleep(YIELD_S)
