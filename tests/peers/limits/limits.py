"""Scripts at a real server, and routers that share its limits: see run.sh. Standard library only."""

import concurrent.futures
import hashlib
import http.server
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from processes import ROOT, ask, free_port, running, send, start, wait_for

SCRIPTS = {name: (ROOT / f"router/src/auth/shared/{name}.lua").read_text() for name in ("take", "correct", "renew")}
MINUTE, DAY = 60_000_000, 86_400_000_000


class Store:
    """A client of the server."""

    def __init__(self, port):
        self.stream = socket.create_connection(("127.0.0.1", port)).makefile("rwb")

    def __call__(self, *words):
        words = [str(word).encode() for word in words]
        self.stream.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
        self.stream.flush()
        return self.read()

    def read(self):
        line = self.stream.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"*":
            return [self.read() for _ in range(int(rest))]
        if kind == b"$":
            return None if rest == b"-1" else self.stream.read(int(rest) + 2)[:-2].decode()
        return int(rest) if kind == b":" else rest.decode()

    def run(self, name, keys, *arguments):
        return self("EVAL", SCRIPTS[name], len(keys), *keys, *arguments)

    def take(self, amount, buckets, sets=(), lease="l", lease_ms=30000):
        """`buckets` and `sets`: pairs of a name and a capacity."""
        both = [*buckets, *sets]
        return self.run("take", [name for name, _ in both], amount, len(buckets), lease, lease_ms, *(c for _, c in both))

    def until_full(self, bucket):
        seconds, micros = map(int, self("TIME"))
        return max(int(self("GET", bucket) or 0) - seconds * 1_000_000 - micros, 0)


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers at once with a usage, or holds the request while `held` is set."""
    protocol_version = "HTTP/1.1"
    held, usage = threading.Event(), {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        while Engine.held.is_set():
            time.sleep(0.02)
        self.answer({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": Engine.usage})

    def answer(self, body):
        body = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, *_):
        pass


def equal(found, expected, what):
    if found != expected:
        sys.exit(f"{what}: {found!r}, not {expected!r}")


def check(holds, what):
    if not holds:
        sys.exit(f"failed: {what}")


def scripts(port):
    """The scripts at the server."""
    store = Store(port)
    store("FLUSHALL")

    print("== a bucket holds a minute, and refuses with the wait that suffices")
    for _ in range(5):
        equal(store.take(1, [("a", 5)])[0], 0, "a take within the limit")
    index, wait = store.take(1, [("a", 5)])
    check(index == 1 and 11_000_000 < wait <= 12_000_000, f"the wait of the sixth of five: {wait} us")
    code, now, until_full = store.take(7, [("big", 10**12)])
    check(code == 0 and abs(now / 1e6 - time.time()) < 5 and until_full == 1, f"one microsecond at least: {until_full}")

    print("== key and tenant are taken together or not at all")
    for _ in range(2):
        equal(store.take(1, [("key", 100), ("tenant", 2)], [("places", 9)], lease=f"l{_}")[0], 0, "a take of both")
    before = store("GET", "key")
    equal(store.take(1, [("key", 100), ("tenant", 2)], [("places", 9)], lease="x")[0], 2, "the tenant refuses")
    equal((store("GET", "key"), store("ZCARD", "places")), (before, 2), "a refusal takes nothing")
    equal(store.take(1, [("key", 100)], [("places", 9), ("full", 0)], lease="y"), [-3, 0], "the set refuses")
    equal((store("GET", "key"), store("ZCARD", "places")), (before, 2), "a refusal takes nothing")

    print("== a lease ends with its time, unless it is renewed")
    equal(store.take(1, [], [("held", 1)], lease="one", lease_ms=300)[0], 0, "a place")
    equal(store.take(1, [], [("held", 1)], lease="two", lease_ms=300), [-1, 0], "no second place")
    for _ in range(3):
        time.sleep(0.2)
        equal(store.run("renew", ["held"], 300, "one"), [1], "a renewal")
    equal(store.take(1, [], [("held", 1)], lease="two", lease_ms=300), [-1, 0], "no second place after renewals")
    wait_for("the lease ends", lambda: store.take(1, [], [("held", 1)], lease="two")[0] == 0, 5)
    store("FLUSHALL")
    equal(store.run("renew", ["held"], 30000, "two"), [1], "a renewal after the server has lost everything")
    equal(store.take(1, [], [("held", 1)], lease="three"), [-1, 0], "the renewed lease counts")

    print("== corrections return what time has not refilled, and charge up to a day")
    at = store.take(60, [("c", 60)])[1]
    store.run("correct", ["c"], "give", 30, at, 60)
    check(MINUTE // 2 - 3_000_000 < store.until_full("c") <= MINUTE // 2, "half was returned")
    store.run("correct", ["c"], "give", 60, at - 2 * MINUTE, 60)
    check(store.until_full("c") > MINUTE // 2 - 5_000_000, "what time has refilled is not returned again")
    store.run("correct", ["c"], "give", 60, at, 60)
    equal(store("EXISTS", "c"), 0, "a full bucket needs no name")
    store.run("correct", ["c"], "charge", 10**15, 0, 60)
    check(DAY < store.until_full("c") <= DAY + MINUTE, "a charge is capped at a day")
    index, wait = store.take(1, [("c", 60)])
    check(index == 1 and DAY < wait <= DAY + 2_000_000, "and so is the wait")

    print("== damaged values fill the bucket or fail, and never grant or lock for ever")
    for value in ("", "x", "nan", "-nan", "-inf", "-5"):
        store("SET", "d", value)
        equal(store.take(1, [("d", 1)])[0], 0, f"a bucket with {value!r}")
    store("SET", "d", 10**18)
    check(store.take(1, [("d", 60)])[1] <= DAY + 2_000_000, "a time in a thousand years")
    store("DEL", "d")
    store("LPUSH", "d", 1)
    check("WRONGTYPE" in str(store.take(1, [("d", 1)])), "another type")
    store("DEL", "d")

    print("== takes of many connections at once are exact")
    def many(_):
        own = Store(port)
        return sum(own.take(1, [("e", 200), ("f", 1000)])[0] == 0 for _ in range(100))
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        taken = sum(pool.map(many, range(8)))
    most = 200 + 200 * (time.monotonic() - begun) / 60 + 1
    check(200 <= taken <= most, f"{taken} takes of 200, and {most - 200:.0f} refilled")
    equal([name for name in store("KEYS", "*") if store("PTTL", name) < 0], [], "names without an end")


class Deployment:
    """A server, an engine and routers."""

    def __init__(self, baton, server, folder, processes):
        self.baton, self.server, self.folder, self.processes = baton, server, folder, processes
        self.port, self.routers = free_port(), []
        engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
        engine.daemon_threads = True
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        self.engine = f"127.0.0.1:{engine.server_address[1]}"
        (folder / "password").write_text("a password\n")
        self.start_server()

    def start_server(self):
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "dir": self.folder, "requirepass": "a password"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.store = subprocess.Popen([self.server, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes.append(self.store)
        def answers():
            try:
                return Store(self.port)("AUTH", "a password") == "OK"
            except OSError:
                return False
        wait_for("the server answers", answers)

    def kill_server(self):
        self.store.kill()
        self.store.wait()

    def start_router(self, on_failure="allow_local"):
        keys = {"requests": "requests_per_minute: 20", "tokens": "tokens_per_minute: 630",
                "places": "concurrent_requests: 3", "free": ""}
        hashed = lambda name: hashlib.sha256(f"a-key-of-{name}".encode()).hexdigest()
        entries = "".join(f"    - {{id: {name}, hash: 'sha256:{hashed(name)}', tenant: {name}, limits: {{{limits}}}}}\n"
                          for name, limits in keys.items())
        name = f"router-{len(self.routers)}"
        (self.folder / f"{name}.yaml").write_text(
            "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\n"
            f"models: [{{name: m, decode: {{engines: [{{url: 'http://{self.engine}'}}]}}}}]\n"
            f"auth:\n  keys:\n{entries}  shared_limits:\n    url: redis://127.0.0.1:{self.port}/1\n"
            f"    password_file: {self.folder}/password\n    on_failure: {on_failure}\n    timeout_ms: 200\n")
        command = [self.baton, "router", "-c", str(self.folder / f"{name}.yaml"), "--until-stdin-ends"]
        process, ready = start(command, self.folder, name)
        self.processes.append(process)
        router = Router(process, ready)
        self.routers.append(router)
        router.is_up(1)
        return router


class Router:
    def __init__(self, process, ready):
        self.process, self.address, self.admin = process, ready["http"], ready["admin"]

    def metric(self, series):
        lines = ask(self.admin, "GET", "/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))

    def is_up(self, value):
        wait_for(f"up is {value}", lambda: self.metric("baton_router_shared_limits_up") == value)

    def begin(self, key):
        body = {"model": "m", "prompt": "hello", "max_tokens": 8}
        return send(self.address, "POST", "/v1/completions", body, authorization=f"Bearer a-key-of-{key}")

    def post(self, key):
        connection = self.begin(key)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status


def granted(routers, key, times):
    statuses = [routers[n % len(routers)].post(key) for n in range(times)]
    check(set(statuses) <= {200, 429}, f"statuses of {key}: {statuses}")
    return statuses.count(200)


def routers(deployment):
    one, two = deployment.start_router(), deployment.start_router()

    print("== two routers share the requests and the tokens of a key")
    begun = time.monotonic()
    passed = granted([one, two], "requests", 40)
    most = 20 + 20 * (time.monotonic() - begun) / 60 + 1
    check(20 <= passed <= most, f"{passed} of 40 requests, with a limit of 20")
    # Each takes 21 tokens: a quarter of its 50 bytes, and max_tokens. It reports fewer, so nothing is corrected.
    begun = time.monotonic()
    passed = granted([one, two], "tokens", 45)
    most = 30 + 30 * (time.monotonic() - begun) / 60 + 1
    check(30 <= passed <= most, f"{passed} of 45 requests of 21 tokens, with a limit of 630")

    print("== places in flight: of both routers together, and freed when a router is killed")
    Engine.held.set()
    held = [one.begin("places"), one.begin("places"), two.begin("places")]
    store = Store(deployment.port)
    store("AUTH", "a password"), store("SELECT", 1)
    places = lambda: max((store("ZCARD", name) for name in store("KEYS", "*concurrent")), default=0)
    wait_for("three leases", lambda: places() == 3)
    equal([one.post("places"), two.post("places")], [429, 429], "the fourth request at each router")
    held[2].close()
    wait_for("a client that left frees its place", lambda: places() == 2)
    one.process.kill()
    one.process.wait()
    begun = time.monotonic()
    Engine.held.clear()
    equal(two.post("places"), 200, "the third place")
    Engine.held.set()
    more = [two.begin("places")]
    wait_for("the third place is taken", lambda: places() == 3)
    equal(two.post("places"), 429, "the killed router's leases still count")

    def has_place():
        # A refused request is in flight for a moment only.
        in_flight = [two.metric("baton_router_requests_in_flight") for _ in range(3)]
        if min(in_flight) == 1:
            more.append(two.begin("places"))
        return min(in_flight) >= 2

    wait_for("the killed router's leases end, and the live one is renewed", has_place, 60)
    print(f"   freed {time.monotonic() - begun:.0f} s after the kill")
    Engine.held.clear()

    print("== the server dies: local limits, or 503; no request waits once that is known")
    strict = deployment.start_router("refuse")
    deployment.kill_server()
    two.is_up(0), strict.is_up(0)
    begun = time.monotonic()
    passed = granted([two], "requests", 30)
    check(passed <= 20 + 1, f"{passed} of 30 requests: the router's own limit")
    equal(strict.post("requests"), 503, "on_failure: refuse")
    equal(strict.post("free"), 200, "a key without limits")
    check(time.monotonic() - begun < 10, "no request waits for a dead server")

    print("== the server returns, empty: the limits are shared again")
    deployment.start_server()
    two.is_up(1), strict.is_up(1)
    begun = time.monotonic()
    passed = granted([two, strict], "requests", 40)
    most = 20 + 20 * (time.monotonic() - begun) / 60 + 1
    check(20 <= passed <= most, f"{passed} of 40 requests, with a limit of 20")

    print("== a server that stops answering without closing its connections")
    deployment.store.send_signal(19)
    statuses = [strict.post("requests") for _ in range(5)]
    check(statuses[-1] == 503 and two.post("free") == 200, f"{statuses}")
    strict.is_up(0)
    deployment.store.send_signal(18)
    strict.is_up(1)
    count = two.metric("baton_router_shared_limits_seconds_count")
    total = two.metric("baton_router_shared_limits_seconds_sum")
    print(f"== passed; a question took {total / count * 1000:.2f} ms on average of {count:.0f}")


def main(baton, server):
    with running("limits") as (folder, processes):
        deployment = Deployment(str(pathlib.Path(baton).resolve()), server, folder, processes)
        deployment.kill_server()
        port = free_port()
        bare = subprocess.Popen([server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
                                stdout=subprocess.DEVNULL)
        processes.append(bare)
        def listens():
            try:
                return socket.create_connection(("127.0.0.1", port))
            except OSError:
                return None
        wait_for("the server listens", listens).close()
        scripts(port)
        deployment.start_server()
        routers(deployment)


main(*sys.argv[1:])
