"""A router, two engines and a Prometheus: every rule and every query of the dashboard. See prometheus.sh."""

import json
import subprocess
import sys
import time
import urllib.parse

from processes import MODEL, ROOT, ask, engine, free_port, running, send, start, wait_for

# Metrics of stock vLLM: their queries are evaluated and return nothing here.
STOCK_VLLM = ("nixl_num_notifications_after_expiry_total",)
# Without metrics here: certificates and discovery.
NOT_HERE = ("baton_router_certificate_expiry_seconds", "baton_router_discovery_stale_seconds")


def load(router, until):
    """One request after the other. Every fourth client disconnects during its stream."""
    count = 0
    while time.monotonic() < until:
        count += 1
        prompt = [6 + (count * 7919 + at * 31) % 1400 for at in range(200)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 300 if count % 4 == 0 else 8, "stream": True,
                "ignore_eos": True, "stream_options": {"include_usage": True}}
        if count % 4 == 0:
            leave(router, body)
        else:
            ask(router, "POST", "/v1/completions", body)


def leave(router, body):
    """A client that disconnects after the first bytes of its response."""
    connection = send(router, "POST", "/v1/completions", body)
    connection.getresponse().read(40)
    if connection.sock:
        connection.sock.close()
    connection.close()


def query(prometheus, text):
    answer = ask(prometheus, "GET", "/api/v1/query?" + urllib.parse.urlencode({"query": text}))
    if answer["status"] != "success":
        sys.exit(f"{text}\n  {answer['error']}")
    return answer["data"]["result"]


def board_queries():
    board = json.loads((ROOT / "deploy/dashboards/baton.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "30s")
            for variable in ("$model", "$router_job", "$instance"):
                text = text.replace(variable, ".*")
            yield panel["title"], text


def check(baton, folder, processes):
    tiers = ["--kv-offload-host-mib", "8", "--kv-offload-disk", str(folder / "tier"), "--kv-offload-disk-mib", "16"]
    prefill, p = start(engine(baton, "prefill", "--kv-lease-duration", "1"), folder, "prefill")
    processes.append(prefill)
    decode, d = start(engine(baton, "decode", *tiers), folder, "decode")
    processes.append(decode)
    config = {"listen": "127.0.0.1:0", "admin": {"listen": "127.0.0.1:0"},
              "models": [{"name": MODEL, "prefill": {"engines": [{"url": f"http://{p['http']}"}]},
                          "decode": {"engines": [{"url": f"http://{d['http']}"}]}}]}
    (folder / "router.yaml").write_text(json.dumps(config))
    router, r = start([baton, "router", "-c", str(folder / "router.yaml"), "--until-stdin-ends"], folder, "router")
    processes.append(router)

    port = free_port()
    targets = {"baton-router": r["admin"], "prefill": p["http"], "decode": d["http"]}
    scrapes = [{"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()]
    rules = [str(path) for path in sorted((ROOT / "deploy/alerts").glob("*.yaml"))]
    settings = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": rules,
                "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(json.dumps(settings))
    log = open(folder / "prometheus.log", "w")
    processes.append(subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log))
    prometheus = f"127.0.0.1:{port}"

    def up():
        try:
            return len([one for one in query(prometheus, "up") if one["value"][1] == "1"]) == 3
        except OSError:
            return False

    wait_for("Prometheus scrapes all three", up)
    # One lease expires, and a decode engine refuses one handoff.
    lend = {"model": MODEL, "prompt": list(range(100, 164)), "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    ask(p["http"], "POST", "/v1/completions", lend)
    handoff = ask(p["http"], "POST", "/v1/completions", {**lend, "prompt": list(range(200, 264))})["kv_transfer_params"]
    ask(d["http"], "POST", "/v1/completions",
        {"model": MODEL, "prompt": list(range(200, 264)), "temperature": -1, "kv_transfer_params": handoff})
    load(r["http"], time.monotonic() + 30)

    # A counter that begins with its first event has a rate only after the next event, and after a second scrape.
    ask(p["http"], "POST", "/v1/completions", {**lend, "prompt": list(range(300, 364))})
    load(r["http"], time.monotonic() + 5)
    found, empty = 0, []
    for title, text in board_queries():
        result = query(prometheus, text)
        finite = [one for one in result if one["value"][1] not in ("NaN", "+Inf")]
        if finite:
            found += 1
        elif not result or not finite:
            empty.append((title, text))
    surprising = [(title, text) for title, text in empty if not any(word in text for word in STOCK_VLLM + NOT_HERE)]
    print(f"== {found} queries of the board have values, {len(empty)} have none")
    for title, text in empty:
        print(f"   no value: {title}: {text}")

    groups = ask(prometheus, "GET", "/api/v1/rules")["data"]["groups"]
    all_rules = [rule for group in groups for rule in group["rules"]]
    broken = [rule for rule in all_rules if rule["health"] != "ok"]
    print(f"== {len(all_rules)} rules, {len(broken)} of them cannot be evaluated")
    for rule in broken:
        print(f"   {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
    states = {rule["name"]: rule["state"] for rule in all_rules}
    print(f"   active: {sorted(name for name, state in states.items() if state != 'inactive')}")
    stranded = states["BatonBlocksStranded"] == "firing"

    decode.kill()
    decode.wait()

    def alerts():
        active = ask(prometheus, "GET", "/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in active} >= {"BatonEngineDown"}

    wait_for("the alert on an engine that is gone", alerts)
    print("== after the decode engine was killed: BatonEngineDown")
    if surprising or broken or not stranded or len(all_rules) < 20:
        sys.exit(f"queries without a value: {surprising}; broken rules: {len(broken)}; stranded: {stranded}")
    print("== Prometheus: everything held")


with running("prometheus") as (place, started):
    check(sys.argv[1], place, started)
