"""Processes and requests that otel.py and prometheus.py share. Standard library only."""

import contextlib
import http.client
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "baton-demo"


def start(command, folder, name):
    """A process and the values of its "ready" line."""
    log = open(folder / f"{name}.log", "w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.PIPE, text=True)
    for line in process.stdout:
        if ": ready " in line:
            facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
            # Later output must not fill the pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, facts
    sys.exit(f"{name} does not start:\n{(folder / f'{name}.log').read_text()}")


def engine(baton, role, *options):
    """The command of a small engine."""
    return [baton, "engine", "--role", role, "--listen", "127.0.0.1:0", "--kv-cache-mib", "32", "--threads", "1",
            "--until-stdin-ends", *options]


@contextlib.contextmanager
def running(what):
    """A folder, and a list of processes that end with it."""
    with tempfile.TemporaryDirectory(prefix=f"baton-{what}-") as folder:
        processes = []
        try:
            yield pathlib.Path(folder), processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(what, look, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.2)
    sys.exit(f"not within {seconds} s: {what}")


def send(address, method, path, body=None, **headers):
    """A request on its own connection, whose response has not been read."""
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"content-type": "application/json", **headers}
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    return connection


def ask(address, method, path, body=None):
    """The response, as parsed JSON or text."""
    connection = send(address, method, path, body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return json.loads(text) if answer.headers.get("content-type", "").startswith("application/json") else text
