"""An endpoint picker, a real Envoy and engines: see run.sh. Standard library only."""

import http.client
import http.server
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from processes import ROOT, ask, free_port, running, start, wait_for

DESTINATION = "x-gateway-destination-endpoint"


class Recorder(http.server.BaseHTTPRequestHandler):
    """An engine that keeps the requests, and answers as their `user` field says."""
    protocol_version = "HTTP/1.1"
    requests, disconnects, client_has_a_part = [], 0, threading.Event()

    def do_GET(self):
        self.answer(200, b"{}")

    def do_POST(self):
        body = b""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        Recorder.requests.append((self.headers, json.loads(body)))
        way = Recorder.requests[-1][1].get("user", "")
        if way == "slow":
            self.piece_until_left()
        elif way == "break":
            self.begin()
            self.wfile.write(b"4\r\npart\r\n")
            self.wfile.flush()
            Recorder.client_has_a_part.wait(30)
            self.connection.shutdown(socket.SHUT_RDWR)
        elif way == "error":
            self.answer(500, b'{"error": {}}')
        else:
            self.answer(200, b'{"ok": true}')

    def begin(self):
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def piece_until_left(self):
        self.begin()
        try:
            while True:
                self.wfile.write(b"4\r\npart\r\n")
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            Recorder.disconnects += 1
            self.close_connection = True

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def listener(handler):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


class Deployment:
    """Engines, picker and Envoy."""

    def __init__(self, baton, envoy, response_mode, folder, processes):
        self.baton, self.folder, self.processes = baton, folder, processes
        sim = subprocess.Popen([baton, "bench", "sim", "--decode", "2", "--decode-ms", "2", "--until-stdin-ends"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(sim)
        self.engines = sim.stdout.readline().split("decode=")[1].strip().split(",")
        self.recorder = f"127.0.0.1:{listener(Recorder)}"
        self.trap = socket.create_server(("127.0.0.1", 0))
        self.trap_address = f"127.0.0.1:{self.trap.getsockname()[1]}"
        self.listen, self.grpc, self.health = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self.write_picker()
        self.start_picker()
        self.start_envoy(envoy, response_mode)

    def write_picker(self):
        config = (ROOT / "deploy/envoy/picker.yaml").read_text()
        replaced = {"127.0.0.1:9201": self.engines[0], "127.0.0.1:9202": self.engines[1], "127.0.0.1:9090":
                    f"127.0.0.1:{free_port()}", "127.0.0.1:9002": self.grpc, "127.0.0.1:9003": self.health,
                    "my-model": "sim", "drain_delay_ms: 5000": "drain_delay_ms: 0"}
        for theirs, ours in replaced.items():
            assert config.count(theirs) == 1, theirs
            config = config.replace(theirs, ours)
        one = f"  - {{name: %s, decode: {{engines: [{{url: 'http://%s'%s}}]}}}}\n"
        more = (one % ("recorder", self.recorder, "") + one % ("one", self.recorder, ", max_in_flight: 1")
                + one % ("gone", f"127.0.0.1:{free_port()}", ""))
        config = config.replace("\n# Envoy gets", more + "\n# Envoy gets")
        config = config.replace("health:\n", "health:\n  active: {interval_ms: 100}\n")
        top = "queue: {requests: 1, timeout_ms: 20000}\n"
        (self.folder / "picker.yaml").write_text(config + top)

    def start_picker(self):
        command = [self.baton, "picker", "-c", str(self.folder / "picker.yaml"), "--until-stdin-ends"]
        self.picker, ready = start(command, self.folder, "picker")
        self.processes.append(self.picker)
        self.admin = ready["admin"]
        series = 'baton_router_pool_ready_engines{model="%s",leg="decode"}'
        wait_for("the engines are ready", lambda: self.metric(series % "sim") == 2 and self.metric(series % "gone") == 0)

    def start_envoy(self, envoy, response_mode):
        config = (ROOT / "deploy/envoy/envoy.yaml").read_text()
        port = lambda address: f"port_value: {address.split(':')[1]}"
        replaced = {"port_value: 8080": port(self.listen), "port_value: 9002": port(self.grpc)}
        if response_mode == "FULL_DUPLEX_STREAMED":
            replaced |= {"response_body_mode: NONE": "response_body_mode: FULL_DUPLEX_STREAMED"}
        if response_mode == "open":
            replaced |= {"failure_mode_allow: false": "failure_mode_allow: true"}
        if response_mode == "nothing":
            replaced |= {"response_header_mode: SEND": "response_header_mode: SKIP"}
        for theirs, ours in replaced.items():
            assert config.count(theirs) == 1, theirs
            config = config.replace(theirs, ours)
        (self.folder / "envoy.yaml").write_text(config)
        self.log = self.folder / "envoy.log"
        self.processes.append(subprocess.Popen(
            [envoy, "-c", str(self.folder / "envoy.yaml"), "--disable-hot-restart", "--concurrency", "1",
             "--log-level", "warning"], stdout=open(self.log, "w"), stderr=subprocess.STDOUT))
        ready = lambda: self.processes[-1].poll() is not None or self.send("sim", "warm").status == 200
        wait_for("Envoy forwards a request", ready)
        assert self.processes[-1].poll() is None, self.log.read_text()

    def metric(self, series):
        for line in ask(self.admin, "GET", "/metrics").splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0

    def post(self, model, prompt, headers=(), **fields):
        """A request whose response has not been read."""
        connection = http.client.HTTPConnection(self.listen, timeout=60)
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4, **fields})
        connection.putrequest("POST", "/v1/completions")
        for name, value in (("content-type", "application/json"), ("content-length", str(len(body))), *headers):
            connection.putheader(name, value)
        connection.endheaders(body.encode())
        return connection

    def send(self, model, prompt, headers=(), **fields):
        """The response, read to its end."""
        try:
            connection = self.post(model, prompt, headers, **fields)
            response = connection.getresponse()
            response.text = response.read().decode()
            connection.close()
            return response
        except OSError:
            response = type("NoResponse", (), {})()
            response.status, response.text = 0, ""
            return response

    def settled(self, what):
        wait_for(f"{what}: every place is free", lambda: self.metric("baton_router_requests_in_flight") == 0, 15)


def leave(connection):
    """Closes a connection whose response may still be read."""
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def connected(trap):
    trap.setblocking(False)
    try:
        trap.accept()
        return True
    except BlockingIOError:
        return False


def check_requests(d):
    for n in range(12):
        answer = d.send("sim", f"prompt {n} " * 100)
        assert answer.status == 200 and "choices" in answer.text, (answer.status, answer.text)
    answer = d.send("sim", "stream", stream=True, max_tokens=50)
    assert answer.status == 200 and answer.text.count("data: ") >= 50 and "[DONE]" in answer.text, answer.text[-300:]
    series = 'baton_router_decisions_total{model="sim",leg="decode",policy="prefix_aware",reason="%s"}'
    prompt = "the same conversation, over and over " * 100
    d.send("sim", prompt)
    before = d.metric(series % "holds_chunks")
    for turn in range(5):
        assert d.send("sim", prompt + f"turn {turn}").status == 200
    assert d.metric(series % "holds_chunks") == before + 5, "the prefix decides"
    d.settled("requests")
    print("== whole and streamed responses; a prefix returns to its engine")


def check_client_header(d):
    headers = [(DESTINATION, d.trap_address), (DESTINATION, d.trap_address), ("x-prefiller-host-port", d.trap_address),
               ("x-data-parallel-rank", "7")]
    big = "y" * 3_000_000
    answer = d.send("recorder", big, headers)
    assert answer.status == 200, (answer.status, answer.text)
    seen, body = Recorder.requests[-1]
    assert seen.get_all(DESTINATION) == [d.recorder], seen.get_all(DESTINATION)
    assert seen["x-prefiller-host-port"] is None and seen["x-data-parallel-rank"] is None, dict(seen)
    assert body == {"model": "recorder", "prompt": big, "max_tokens": 4}, "the body arrives whole"
    framing = "chunked" if seen["transfer-encoding"] else "content-length"
    hidden = d.send("recorder", "p", kv_transfer_params={"remote_host": "evil"})
    assert hidden.status == 200 and "kv_transfer_params" not in Recorder.requests[-1][1]
    assert not connected(d.trap), "the client chose the address"
    get = http.client.HTTPConnection(d.listen, timeout=60)
    get.request("GET", "/v1/models", headers={DESTINATION: d.trap_address})
    assert get.getresponse().status == 200 and not connected(d.trap)
    print(f"== a client's own destination is overwritten; a body of 3 MB arrives whole ({framing})")


def check_refusals(d):
    answer = d.send("gone", "p")
    dropped = "x-llm-d-request-dropped-reason"
    assert answer.status == 503 and answer.headers["retry-after"] and answer.headers[dropped], answer.text
    assert json.loads(answer.text)["error"]["type"] == "service_unavailable_error", answer.text
    assert d.send("unknown", "p").status == 404
    head = http.client.HTTPConnection(d.listen, timeout=60)
    head.request("POST", "/kv/release", "{}", {"content-type": "application/json"})
    assert head.getresponse().status == 404
    disconnects = Recorder.disconnects
    holder = d.post("one", "p", user="slow")
    assert holder.getresponse().status == 200
    waiting = d.post("one", "p")
    series = 'baton_router_queue_requests{priority="normal"}'
    wait_for("a request waits", lambda: d.metric(series) == 1)
    shed = d.send("one", "p")
    assert shed.status == 429 and shed.headers["retry-after"] and shed.headers[dropped], (shed.status, shed.text)
    # A client that leaves while it waits, and one whose wait ends because another client leaves.
    leave(waiting)
    wait_for("no request waits", lambda: d.metric(series) == 0)
    waiting = d.post("one", "p")
    wait_for("a request waits", lambda: d.metric(series) == 1)
    leave(holder)
    answer = waiting.getresponse()
    assert answer.status == 200, (answer.status, answer.read())
    d.settled("refusals")
    wait_for("the engine sees that the holder left", lambda: Recorder.disconnects == disconnects + 1)
    print("== 503, 404 and 429 reach the client; a place passes on when its client leaves")


def check_endings(d):
    before = Recorder.disconnects
    leaving = d.post("recorder", "p", user="slow")
    response = leaving.getresponse()
    response.read(8)
    assert d.metric("baton_router_requests_in_flight") == 1
    leave(leaving)
    d.settled("a cancel")
    wait_for("the engine sees the cancel", lambda: Recorder.disconnects == before + 1)
    Recorder.client_has_a_part.clear()
    response = d.post("recorder", "p", user="break").getresponse()
    assert response.read(4) == b"part"
    Recorder.client_has_a_part.set()
    try:
        response.read()
        raise AssertionError("a broken response reads as complete")
    except (http.client.IncompleteRead, OSError):
        pass
    d.settled("a reset by the engine")
    assert d.send("recorder", "p", user="error").status == 500
    d.settled("an error of the engine")
    print("== places are free after a cancel, a reset by the engine, and an error")


def check_without_picker(d):
    d.picker.send_signal(signal.SIGKILL)
    d.picker.wait()
    for _ in range(3):
        answer = d.send("recorder", "p", [(DESTINATION, d.trap_address)])
        assert answer.status in (500, 503), answer.status
    get = http.client.HTTPConnection(d.listen, timeout=60)
    get.request("GET", "/v1/models", headers={DESTINATION: d.trap_address})
    assert get.getresponse().status in (500, 503)
    assert not connected(d.trap), "without a picker the client chose the address"
    d.start_picker()
    wait_for("Envoy uses the new picker", lambda: d.send("recorder", "p").status == 200)
    print("== without a picker requests fail, and no client chooses an address")


CHECKS = (check_requests, check_client_header, check_refusals, check_endings, check_without_picker)
MODES = {"NONE": "response headers and trailers SEND, body NONE", "nothing": "response trailers SEND only",
         "FULL_DUPLEX_STREAMED": "response headers and trailers SEND, body FULL_DUPLEX_STREAMED",
         "open": "failure_mode_allow"}

for mode in sys.argv[3:] or MODES:
    with running("envoy") as (place, started):
        print(f"-- {MODES[mode]}")
        deployment = Deployment(sys.argv[1], sys.argv[2], mode, place, started)
        for check in CHECKS if mode != "open" else CHECKS[-1:]:
            check(deployment)
