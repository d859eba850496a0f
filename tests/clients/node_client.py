#!/usr/bin/env python3
"""Starts `baton up` and runs a suite of a JavaScript client, `node/NAME.mjs`, against it. See README.md in this folder.

The packages are those of `node/package.json`, installed by `npm ci` or `npm install` in a copy of that folder.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

from suite import everything_up, Place

HERE = pathlib.Path(__file__).resolve().parent / "node"
RUN_S = 600


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(path.stem for path in HERE.glob("*.mjs") if path.stem != "suite"))
    parser.add_argument("--modules", required=True, type=pathlib.Path, help="the folder that has node_modules")
    parser.add_argument("--url", help="a running router; by default `baton up` is started ($BATON_BIN)")
    parser.add_argument("--admin", help="its admin address, as http://HOST:PORT")
    parser.add_argument("--engine", action="append", default=[], help="an engine behind it; may be repeated")
    options = parser.parse_args()
    # Node looks for packages beside the script.
    for file in HERE.glob("*.mjs"):
        shutil.copy(file, options.modules / file.name)
    packages = json.loads((HERE / "package.json").read_text())["dependencies"]
    shown = [name for name in packages if (options.name == "openai") == (name == "openai") and name != "zod"]
    version = lambda name: json.loads((options.modules / "node_modules" / name / "package.json").read_text())["version"]  # noqa: E731
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{', '.join(f'{name} {version(name)}' for name in shown)}, Node {node}", flush=True)
    if options.url:
        return run(options, Place(options.url.rstrip("/"), options.engine, options.admin))
    with everything_up(os.environ["BATON_BIN"]) as place:
        return run(options, place)


def run(options, place):
    about = {"url": place.url, "engines": place.engines, "admin": place.admin, "builtIn": place.built_in,
             "scripted": place.scripted}
    environment = {**os.environ, "BATON_PLACE": json.dumps(about)}
    script = options.modules / f"{options.name}.mjs"
    return subprocess.run(["node", script], env=environment, timeout=RUN_S, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
