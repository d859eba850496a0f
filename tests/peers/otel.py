"""A router with deploy/otel/router.yaml, two engines and rotel as the collector. Checks its output: see otel.sh."""

import re
import signal
import socket
import subprocess
import sys

from processes import MODEL, ROOT, ask, engine, free_port, running, send, start, wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER = "POST /v1/completions"
# Each span's parent and kind.
TREE = {SERVER: (None, "SERVER"), "queue": (SERVER, "INTERNAL"), "prefill": (SERVER, "CLIENT"),
        "gap": (SERVER, "INTERNAL"), "decode": (SERVER, "CLIENT"), "fetch": ("decode", "INTERNAL")}


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def spans(text):
    """The spans of the collector's output."""
    found = []
    for block in re.split(r"^Span #\d+$", text, flags=re.M)[1:]:
        field = lambda name: (re.search(rf"^\s*{name}\s*: ?(.*)$", block, re.M) or ["", ""])[1].strip()
        attributes = dict(re.findall(r"^\s*-> (\S+): \w+\((.*)\)$", block, re.M))
        found.append({"trace": field("Trace ID"), "parent": field("Parent ID"), "id": field(r"ID"),
                      "name": field("Name"), "kind": field("Kind").removeprefix("SPAN_KIND_"),
                      "attributes": attributes, "text": block})
    return found


def check_tree(found):
    by_name = {span["name"]: span for span in found}
    assert set(by_name) == set(TREE) and len(found) == len(TREE), [span["name"] for span in found]
    for name, (parent, kind) in TREE.items():
        assert by_name[name]["kind"] == kind, by_name[name]
        if parent:
            assert by_name[name]["parent"] == by_name[parent]["id"], name
    return by_name


def check(baton, agent, folder, processes):
    port = free_port()
    said = folder / "collector.out"
    processes.append(subprocess.Popen(
        [agent, "start", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed",
         "--pid-file", str(folder / "collector.pid"), "--otlp-http-endpoint", f"127.0.0.1:{port}",
         "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"], stdout=open(said, "w"), stderr=subprocess.STDOUT))
    wait_for("the collector listens", lambda: listens(port))

    prefill, p = start(engine(baton, "prefill"), folder, "prefill")
    processes.append(prefill)
    decode, d = start(engine(baton, "decode"), folder, "decode")
    processes.append(decode)
    config = (ROOT / "deploy/otel/router.yaml").read_text()
    for theirs, ours in (("127.0.0.1:4318", f"127.0.0.1:{port}"), ("127.0.0.1:9001", p["http"]),
                         ("127.0.0.1:9002", d["http"]), ("my-model", MODEL), ("/var/log/baton", str(folder))):
        assert config.count(theirs) == 1, theirs
        config = config.replace(theirs, ours)
    (folder / "router.yaml").write_text(config + "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\n")
    router, r = start([baton, "router", "-c", str(folder / "router.yaml"), "--until-stdin-ends"], folder, "router")
    processes.append(router)

    def request(agent, first, **headers):
        body = {"model": MODEL, "prompt": list(range(first, first + 100)), "max_tokens": 4}
        return send(r["http"], "POST", "/v1/completions", body, **{"user-agent": agent, **headers})

    def trace_of(agent):
        found = spans(said.read_text())
        roots = [span for span in found if span["attributes"].get("user_agent.original") == agent]
        whole = [span for span in found if roots and span["trace"] == roots[0]["trace"]]
        return whole if len(whole) >= len(TREE) else None

    answer = request("whole", 100, traceparent=f"00-{TRACE}-{PARENT}-01").getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    whole = check_tree(wait_for("the collector has the trace", lambda: trace_of("whole")))
    assert {span["trace"] for span in whole.values()} == {TRACE} and whole[SERVER]["parent"] == PARENT, whole[SERVER]
    attributes = whole[SERVER]["attributes"]
    assert attributes["gen_ai.usage.input_tokens"] == "100" and attributes["baton.outcome"] == "completed", attributes
    print(f"== one request: {len(whole)} spans of the client's trace, each below its parent")

    # The client disconnects while a decode engine has the handoff and has not responded.
    decode.send_signal(signal.SIGSTOP)
    leaving = request("leaves", 300)
    books = lambda: ask(p["http"], "GET", "/debug/kv")
    wait_for("the blocks are lent", lambda: books()["oldest_leases"])
    # The handoff exists. The router sends the decode leg next.
    metric = 'baton_router_engine_requests_total{engine="%s",leg="decode"} 2' % d["http"]
    wait_for("the decode engine is asked", lambda: metric in ask(r["admin"], "GET", "/metrics"))
    leaving.sock.close()
    left = check_tree(wait_for("the collector has the trace", lambda: trace_of("leaves")))
    decode.send_signal(signal.SIGCONT)
    assert left[SERVER]["trace"] != TRACE and left[SERVER]["parent"] == "", left[SERVER]
    assert left[SERVER]["attributes"]["error.type"] == "client_gone", left[SERVER]
    wait_for("every block is home", lambda: not books()["oldest_leases"])
    print("== a client that left: the router's own trace, and the phase in which it left")


with running("otel") as (place, started):
    check(*sys.argv[1:3], place, started)
