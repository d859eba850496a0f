#!/usr/bin/env python3
"""`baton router` in front of a vLLM prefill/decode pair on this machine, with the NixlConnector or the BatonConnector.

Starts the engines and the router, runs the checks of vllm_checks/, and prints one line for each. Exits with 1 if one of
them failed. A finding of a contract check counts as failure only with the BatonConnector; for stock engines it is
printed. Standard library only. See README.md in this folder.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
import traceback

from vllm_checks import cancel, compare, faults, handoffs, malformed, messages  # noqa: F401 (they register checks)
from vllm_checks import push, push_ends, stock, store, turns  # noqa: F401
from vllm_checks import cost
from vllm_checks.base import CHECKS, NO_ANSWER, OutOfTime, Report, bounded
from vllm_checks.engines import BATON, BATON_PUSH, PUSH, ROOT, STOCK, STORE, TURNS
from vllm_checks.package import Package
from vllm_checks.pair import Pair

COST_S = 3600
# The doctor counts expired leases since an engine's start. Checks that end or restart engines come last.
CONTRACT = ["doctor", "release", "n4", "stale", "equal", "cancel", "idle", "malformed", "longstep", "restart", "drain"]


def parse():
    names = [check.name for check in CHECKS] + ["cost"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--vllm", default=os.environ.get("VLLM", "vllm"), help="the vllm command")
    add("--baton", default=os.environ.get("BATON_BIN", str(ROOT / "target/release/baton")))
    add("--model", type=pathlib.Path, default=ROOT / "engine/models/demo")
    add("--connector", choices=[STOCK, PUSH, TURNS, STORE, BATON, BATON_PUSH, "both"], default=STOCK,
        help="connector of the engines; push: the NixlPushConnector; baton-push: the BatonPushConnector; turns: "
        "bidirectional KV; store: blocks in files; both: stock and baton, one after the other")
    add("--package", type=pathlib.Path, help="sources of baton-vllm (connector/vllm), instead of an installed wheel")
    add("--only", action="append", default=[], metavar="NAME", help=f"only this check (repeatable): {', '.join(names)}")
    add("--out", type=pathlib.Path, help="FILE.json, or a folder for results.json; outputs of the tools are beside it")
    add("--rounds", type=int, default=24, help="clients that leave while P computes (leaving-prefill)")
    add("--lease", type=int, default=30, help="vLLM's kv_lease_duration, in seconds")
    add("--seed", type=int, default=1)
    add("--decodes", type=int, default=1, help="decode engines")
    add("--prefill-ranks", type=int, default=1, help="tensor-parallel ranks of P")
    add("--decode-ranks", type=int, default=1, help="tensor-parallel ranks of each D")
    add("--policy", choices=["recompute", "fail", "both"], default="both", help="failure policies of D (stale)")
    add("--cancels", type=int, default=500, help="clients that leave, half of them under load (cancel)")
    add("--p99-ms", type=float, default=50, help="target from a disconnect to P's free blocks (cancel)")
    add("--releases", type=int, default=100, help="releases (release)")
    add("--stale", type=int, default=20, help="reads after the lease, of each kind and policy (stale)")
    add("--malformed", type=int, default=300, help="malformed handoffs (malformed)")
    add("--restarts", type=int, default=1, help="rounds of killed engines (restart)")
    add("--equal", type=int, default=1000, help="compared requests (equal)")
    add("--concurrency", type=int, default=1, help="clients of the comparison (equal)")
    add("--disconnect-options", default="", metavar="TEXT", help="further options of `baton bench disconnect` (doctor)")
    add("--few-cores", action="store_true",
        help="loops of vLLM and NIXL without a wait get a short one; needed below six cores")
    add("--turns", type=int, default=5, help="runs of each pair (cost)")
    add("--cost-limit", type=float, default=0.02, help="allowed difference (cost)")
    add("--cost-model", choices=["demo", "larger"], default="demo",
        help="larger: 71 million random weights, a step takes about 10 ms (cost)")
    add("--cost-pairs", default=f"{STOCK},{BATON}",
        help="the compared connectors; stock,stock measures the noise (cost)")
    options = parser.parse_args()
    for name in options.only:
        if name not in names:
            parser.error(f"no check {name!r}; known: {', '.join(names)}")
    pairs = options.cost_pairs.split(",")
    if len(pairs) != 2 or not set(pairs) <= {STOCK, BATON}:
        parser.error("--cost-pairs takes two of stock and baton")
    options.folder, options.file = None, None
    if options.out:
        is_file = options.out.suffix == ".json"
        options.folder = options.out.with_suffix("") if is_file else options.out
        options.file = options.out if is_file else options.out / "results.json"
    return options, parser


def selected(options, connector):
    """The checks of one pair. Without --only a stock pair alone gets the checks of the router."""
    kinds = {STOCK: ["stock"], PUSH: ["push"], BATON_PUSH: ["push", "push-ends"], TURNS: ["turns"],
             STORE: ["store"]}.get(options.connector, ["stock", "contract"])
    chosen = [c for c in CHECKS if (c.name in options.only if options.only else c.kind in kinds)]
    return sorted(chosen, key=lambda c: CONTRACT.index(c.name) if c.kind == "contract" else -1)


def wants_cost(options):
    return "cost" in options.only or (not options.only and options.connector == "both")


class Results:
    """What `--out` keeps, and whether something failed."""

    def __init__(self, options, package):
        self.options, self.failed = options, 0
        self.data = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": os.environ.get("BATON_COMMIT") or commit(),
            "machine": machine(),
            "versions": {"python": platform.python_version(), "baton_vllm": package.version,
                         "nixl": package.version_of("nixl")},
            "options": {k: v if isinstance(v, (int, float, list)) or v is None else str(v)
                        for k, v in vars(options).items()},
            "results": {},
        }

    def add(self, connector, name, entry):
        self.data["results"].setdefault(connector, {})[name] = entry
        self.save()

    def save(self):
        if self.options.file:
            self.options.folder.mkdir(parents=True, exist_ok=True)
            self.options.file.parent.mkdir(parents=True, exist_ok=True)
            self.options.file.write_text(json.dumps(self.data, indent=1) + "\n")

    def run(self, connector, check, call, limit_s):
        """One check: one printed line and one entry."""
        begun, report, error = time.monotonic(), None, None
        try:
            with bounded(limit_s):
                report = call()
        except Exception as caught:  # a check that fails must not hide the others
            error = caught
        entry = {"took_s": round(time.monotonic() - begun, 1)}
        enforced = connector != STOCK or check.kind == "stock"
        if error is not None:
            text, good = f"{type(error).__name__}: {error}", False
            # A stock engine that ends in a contract check is a result, another error is one of this script.
            if not isinstance(error, (AssertionError, OutOfTime, *NO_ANSWER)):
                traceback.print_exception(error)
                enforced = True
        elif isinstance(report, Report):
            text, good = report.text, not report.findings
            entry.update(numbers=report.numbers, findings=report.findings)
            text += "".join(f"\n      finding: {finding}" for finding in report.findings)
        else:
            text, good = report, True
        entry.update(ok=good, text=text)
        self.add(connector, check.name, entry)
        self.failed += not good and enforced
        word = "ok   " if good else "FAIL " if enforced else "SEEN "
        print(f"{word} {check.name} ({entry['took_s']} s): {text}", flush=True)


def commit():
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def machine():
    """Processor, cores and memory."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "memory_gib": round(memory, 1)}


def run_pair(options, connector, environment, results):
    checks = selected(options, connector)
    if not checks:
        return
    pair = Pair(options, connector, environment)
    try:
        results.data["versions"].update(pair.versions())
        package = f", baton-vllm {results.data['versions']['baton_vllm']}" if pair.is_baton else ""
        about = f"{connector} connector{package}"
        print(f"vLLM {pair.versions()['vllm']}, {about}, lease {options.lease} s", flush=True)
        for check in checks:
            try:
                with bounded(1200):
                    pair.ensure()
            except (AssertionError, OutOfTime) as error:
                results.failed += 1
                print(f"FAIL  {check.name}: the pair does not start again: {error}", flush=True)
                return
            results.run(connector, check, lambda check=check: check.function(pair), check.limit(options))
        for line in pair.settlements():
            print("      " + line)
    finally:
        pair.stop()


def run_cost(options, environments, results):
    """Two pairs at a time, of which one is stopped."""
    options = argparse.Namespace(**{**vars(options), "decodes": 1})
    pairs, check = [], argparse.Namespace(name="cost", kind="cost")
    try:
        for connector in options.cost_pairs.split(","):
            pairs.append(Pair(options, connector, environments[connector], cost.arguments(options.cost_model)))
            pairs[-1].usable()
            pairs[-1].suspend()
        results.run(options.cost_pairs, check, lambda: cost.cost(pairs, options), COST_S)
    finally:
        for pair in pairs:
            pair.stop()


def main():
    options, parser = parse()
    # An ended script must stop its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    connectors = [STOCK, BATON] if options.connector == "both" else [options.connector]
    package = Package(options.vllm, options.package and options.package.resolve(), ROOT, options.few_cores)
    environments = {name: package.stock() for name in (STOCK, PUSH, TURNS, STORE)}
    if connectors == [BATON_PUSH]:
        environments[BATON_PUSH] = package.baton_push()
    if BATON in connectors or (wants_cost(options) and BATON in options.cost_pairs):
        try:
            environments[BATON] = package.baton()
        except AssertionError as error:
            parser.error(str(error))
    results = Results(options, package)
    results.save()
    for connector in connectors:
        run_pair(options, connector, environments[connector], results)
    if wants_cost(options):
        run_cost(options, environments, results)
    results.save()
    sys.exit(1 if results.failed else 0)


if __name__ == "__main__":
    main()
