"""The endpoint plugin: one answer of several ranks, and handoffs of refused requests go back."""

import asyncio
import json
import types

import pytest

import fakes
from baton_vllm import plugin
from baton_vllm.plugin import (
    REFUSALS_MAX,
    REFUSED_BYTES_MAX,
    SECRET_HEADER,
    Cores,
    MetricsMiddleware,
    RefusalMiddleware,
    merge_states,
    merge_verbs,
    own_headers,
    refused_handoff,
)

# Answers of several ranks


def reply(status=200, **body):
    return status, json.dumps(body).encode()


def merged(*answers):
    status, body = merge_verbs(list(answers))
    return status, json.loads(body)


def test_no_rank_and_one_rank():
    assert merge_verbs([])[0] == merge_states([])[0] == 501
    assert merge_verbs([(418, b"no JSON")]) == (418, b"no JSON")


@pytest.mark.parametrize("words, best", [
    (["unknown", "unknown"], "unknown"),
    (["unknown", "released"], "released"),
    (["released", "unknown"], "released"),
    (["unknown", "already", "unknown"], "already"),
    (["unknown", "draining"], "draining"),
    (["remembered", "released"], "released"),
    (["remembered", "aborting"], "aborting"),
    (["remembered", "unknown"], "remembered"),
    (["unknown", "remembered"], "remembered"),
    (["released", "remembered"], "released"),
    (["already", "released"], "already"),
])
def test_the_word_that_says_more_counts(words, best):
    assert merged(*(reply(result=word) for word in words)) == (200, {"result": best})
    answers = [reply(results={"a": word, "b": "unknown"}) for word in words]
    assert merged(*answers) == (200, {"results": {"a": best, "b": "unknown"}})


def test_ranks_that_answer_different_ids():
    assert merged(reply(results={"a": "unknown"}), reply(results={"b": "aborting", "a": "released"})) == (
        200,
        {"results": {"a": "released", "b": "aborting"}},
    )


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_one_rank_is_the_answer(place):
    answers = [reply(result="released")]
    answers.insert(place, (503, b"{}"))
    assert merge_verbs(answers) == (503, b"{}")


def state(rank, **blocks):
    return {
        "rank": rank,
        "blocks": {"total": 10, "free": 4, **blocks},
        "requests": {"running": rank},
        "leases": {"live": 1},
        "oldest_leases": [{"request_id": f"r{rank}"}],
        "steps": None,
        "failed": None,
        "offload": None,
        "engine": {"epoch": f"{rank}", "data_parallel_size": 1},
        "cores": [{"rank": rank}],
    }


def test_states_are_summed():
    status, body = merge_states([reply(**state(0)), reply(**state(1, free=1)), reply(**state(2, leased=3))])
    body = json.loads(body)
    assert status == 200 and body["blocks"]["total"] == 30 and body["blocks"]["free"] == 9
    assert body["requests"] == {"running": 3} and body["leases"] == {"live": 3}
    assert [lease["request_id"] for lease in body["oldest_leases"]] == ["r0", "r1", "r2"]
    assert [core["rank"] for core in body["cores"]] == [0, 1, 2] and "rank" not in body
    assert body["engine"] == {"epoch": "0", "data_parallel_size": 3} and body["steps"] is None
    assert json.loads(merge_states([reply(**state(5))])[1])["rank"] == 5


def test_a_state_that_one_rank_refuses():
    assert merge_states([reply(**state(0)), (401, b"{}")]) == (401, b"{}")


# Bodies


GOOD = {"do_remote_prefill": True, "remote_handle": "ab" * 16}

HOSTILE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"7",
    b'"kv_transfer_params"',
    b"[]",
    b"[{}]",
    b"{",
    b"{}",
    b'{"kv_transfer_params": null}',
    b'{"kv_transfer_params": []}',
    b'{"kv_transfer_params": "x"}',
    b'{"kv_transfer_params": {}}',
    b'{"kv_transfer_params": {"do_remote_prefill": 1, "remote_handle": "x"}}',
    b'{"kv_transfer_params": {"do_remote_prefill": true, "remote_handle": 7}}',
    b'{"kv_transfer_params": {"do_remote_prefill": true}}',
    b"[" * 100000,
    b'{"a":' * 100000,
    b"1" * 5000,
    b'{"kv_transfer_params": ' + b"[" * 900 + b"]" * 900 + b"}",
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_bodies_without_a_handoff(body):
    assert refused_handoff(body) is None


def test_bodies_with_a_handoff():
    assert refused_handoff(json.dumps({"model": "m", "kv_transfer_params": GOOD}).encode()) == GOOD


def test_only_the_headers_that_a_core_reads_are_forwarded():
    headers = {SECRET_HEADER: "s", "authorization": "Bearer x", "cookie": "c"}
    assert own_headers(headers) == {"content-type": "application/json", SECRET_HEADER: "s"}
    assert own_headers({}) == {"content-type": "application/json"}


# Middlewares, with ASGI applications of a few lines


class Recorder(Cores):
    """Cores that record what would be sent."""

    def __init__(self, urls=("http://core",), fails=False, silent=()):
        super().__init__()
        self.urls = list(urls)
        self.silent = silent
        self.calls = []
        self.fails = fails

    async def call(self, method, url, body=None, headers=None, timeout=None):
        self.calls.append((method, url, body, headers or {}))
        if self.fails:
            raise RuntimeError("a fault")
        if url.startswith(tuple(self.silent)):
            return 503, b"{}"
        return (200, b"baton_kv_leases 1\n") if url.endswith("/metrics") else (200, b"{}")

    @property
    def given_back(self):
        return [json.loads(body) for _, url, body, _ in self.calls if url.endswith("/kv/refused")]


async def run_app(
    middleware, body=b"", headers=(), method="POST", path="/v1/completions", chunk=1 << 20, disconnect=False
):
    """The messages of one exchange."""
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in chunks]
    messages[-1]["more_body"] = False
    if disconnect:
        messages = [*messages, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    await middleware(scope, receive, send)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return sent


def answering(status, reads=True):
    async def app(scope, receive, send):
        while reads and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


def exchange(app, cores, middleware=RefusalMiddleware, **more):
    return asyncio.run(run_app(middleware(app, cores), **more))


BODY = json.dumps({"kv_transfer_params": GOOD, "prompt": "x" * 100}).encode()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 503])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_refused_handoff_goes_back(status, chunk):
    cores = Recorder()
    sent = exchange(answering(status), cores, body=BODY, chunk=chunk)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert cores.given_back == [{"params": GOOD, "reason": f"refused_{status}"}]
    assert cores.calls[0][:2] == ("POST", "http://core/kv/refused")


@pytest.mark.parametrize("status", [200, 201, 204, 302])
def test_an_accepted_handoff_stays(status):
    cores = Recorder()
    exchange(answering(status), cores, body=BODY)
    assert not cores.calls


def test_the_secret_goes_along(tmp_path):
    file = tmp_path / "secret"
    file.write_text("  hush \nsecond line\n")
    cores = Recorder()
    cores._secret = plugin.read_secret(file)
    exchange(answering(400), cores, body=BODY)
    assert cores.calls[0][3][SECRET_HEADER] == "hush"
    assert plugin.read_secret(None) is None


def test_a_router_that_settles_itself():
    cores = Recorder()
    exchange(answering(400), cores, body=BODY, headers=[(b"x-baton-router-settles", b"1")])
    assert not cores.calls


# The drain

DRAINING = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": "draining"}}).encode()


def test_a_shutdown_of_the_front_end_is_a_drain():
    seen = []
    cores = Recorder()
    client = types.SimpleNamespace(shutdown=lambda timeout: seen.append((timeout, cores.draining is not None)))
    cores.notice_shutdown(client)
    assert cores.draining is None
    client.shutdown(timeout=3)
    assert seen == [(3, True)]
    start, answer = exchange(answering(500), cores, body=BODY)
    assert start["status"] == 503 and json.loads(answer["body"])["error"]["code"] == "draining"


def test_a_drain_gives_handoffs_back_through_a_rank_that_answers():
    cores = Recorder(urls=["http://a", "http://b", "http://c"], silent=["http://a"])
    cores.draining = DRAINING
    exchange(answering(200), cores, body=BODY)
    assert [url for _, url, *_ in cores.calls] == ["http://a/kv/refused", "http://b/kv/refused"]
    # Without a drain one of the ranks may have used it.
    cores.calls, cores.draining = [], None
    exchange(answering(400), cores, body=BODY)
    assert not cores.calls


@pytest.mark.parametrize("settles", [False, True])
def test_a_draining_engine_refuses_and_the_handoff_goes_back(settles):
    cores = Recorder()
    cores.draining = DRAINING
    headers = [(b"x-baton-router-settles", b"1")] if settles else []
    start, answer = exchange(answering(200), cores, body=BODY, chunk=7, headers=headers)
    assert start["status"] == 503 and answer["body"] == DRAINING
    assert {(b"retry-after", b"1"), (b"content-length", str(len(DRAINING)).encode())} <= set(start["headers"])
    assert cores.given_back == ([] if settles else [{"params": GOOD, "reason": "refused_503"}])
    # Other paths are answered on.
    assert exchange(answering(200), cores, method="GET", path="/v1/models")[0]["status"] == 200


def test_a_draining_engine_reads_long_bodies_to_the_bound_only():
    cores = Recorder()
    cores.draining = DRAINING
    received = []

    async def run():
        async def receive():
            received.append(1)
            return {"type": "http.request", "body": b"x" * (1 << 20), "more_body": True}

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await RefusalMiddleware(None, cores)(scope, receive, send)

    asyncio.run(run())
    assert len(received) == (REFUSED_BYTES_MAX >> 20) + 1 and not cores.calls


def test_the_drain_of_one_core_refuses_new_requests(monkeypatch):
    monkeypatch.setattr(plugin, "DRAIN_PAUSE_S", 0)
    answers = [(200, b"{}"), (503, plugin.envelope("no answer")), (503, b"[]"), (503, b"")]
    answers += [(401, DRAINING), (503, DRAINING)]

    class Scripted(Recorder):
        async def call(self, method, url, body=None, headers=None, timeout=None):
            await super().call(method, url, body, headers)
            return answers.pop(0) if url.startswith("http://b/") else (200, b"{}")

    async def run():
        cores = Scripted(["http://a", "http://b"])
        cores._secret = "hush"
        cores.watch_drain()
        await asyncio.gather(*cores._watches)
        return cores

    cores = asyncio.run(run())
    assert cores.draining == DRAINING and not answers
    assert cores.calls[0] == ("GET", "http://a/health?wait_ms=10000", None, {SECRET_HEADER: "hush"})


@pytest.mark.parametrize("how", ["get", "no cores", "no handoff", "websocket"])
def test_exchanges_of_no_concern(how):
    cores = Recorder(urls=() if how == "no cores" else ("http://core",))
    if how == "websocket":
        seen = []

        async def app(scope, receive, send):
            seen.append(scope["type"])

        asyncio.run(RefusalMiddleware(app, cores)({"type": "websocket"}, None, None))
        assert seen == ["websocket"]
    else:
        body, method = b"{}" if how == "no handoff" else BODY, "GET" if how == "get" else "POST"
        exchange(answering(400), cores, body=body, method=method)
    assert not cores.calls


def test_an_application_that_raises():
    cores = Recorder()

    async def app(scope, receive, send):
        await receive()
        raise ZeroDivisionError

    async def run():
        with pytest.raises(ZeroDivisionError):
            await run_app(RefusalMiddleware(app, cores), body=BODY)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert cores.given_back == [{"params": GOOD, "reason": "refused_499"}]


def test_an_application_that_raises_after_its_answer_began():
    cores = Recorder()

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def run():
        with pytest.raises(ZeroDivisionError):
            await run_app(RefusalMiddleware(app, cores), body=BODY)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert not cores.calls


def test_a_disconnect_before_the_first_byte():
    cores = Recorder()

    async def app(scope, receive, send):
        await receive()
        assert (await receive())["type"] == "http.disconnect"

    assert exchange(app, cores, body=BODY, disconnect=True) == []
    assert cores.given_back == [{"params": GOOD, "reason": "refused_499"}]


def test_a_cancelled_application():
    cores = Recorder()

    async def app(scope, receive, send):
        await receive()
        await asyncio.sleep(60)

    async def run():
        task = asyncio.create_task(run_app(RefusalMiddleware(app, cores), body=BODY))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert cores.given_back == [{"params": GOOD, "reason": "refused_499"}]


def test_a_body_that_was_not_read_has_no_handoff():
    cores = Recorder()
    exchange(answering(401, reads=False), cores, body=BODY)
    assert not cores.calls


@pytest.mark.parametrize("padding", [0, REFUSED_BYTES_MAX])
def test_long_bodies_are_not_kept(padding):
    cores = Recorder()
    body = json.dumps({"kv_transfer_params": GOOD, "prompt": "x" * padding}).encode()
    exchange(answering(400), cores, body=body)
    assert len(cores.calls) == (0 if padding else 1)


def test_a_body_is_not_kept_after_a_good_status():
    cores, kept = Recorder(), []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        kept.append(len(receive.__self__.body))

    exchange(app, cores, body=BODY)
    assert kept == [0]


@pytest.mark.parametrize("fails", [False, True])
def test_refusals_in_flight_are_bounded_and_end(fails):
    async def run():
        cores = Recorder(fails=fails)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        for _ in range(REFUSALS_MAX + 10):
            cores.give_back(BODY, 400)
        assert cores._refusals == REFUSALS_MAX
        while cores._refusals:
            await asyncio.sleep(0)
        assert len(cores.calls) == REFUSALS_MAX

    asyncio.run(run())


def test_a_deep_handoff_ends_no_exchange():
    params = dict(GOOD, nested=[])
    for _ in range(800):
        params["nested"] = [params["nested"]]
    cores = Recorder()
    sent = exchange(answering(400), cores, body=json.dumps({"kv_transfer_params": params}).encode())
    assert len(sent) == 2


# Metrics


def metrics_app(parts, status=200):
    async def app(scope, receive, send):
        app.scope = scope
        headers = [(b"Content-Length", b"9"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": i + 1 < len(parts)})

    return app


@pytest.mark.parametrize("parts", [[b"vllm 1\n"], [b"vllm ", b"1\n"], [b"vllm 1\n", b""]])
def test_metrics_are_appended_once(parts):
    app = metrics_app(parts)
    headers = [(b"Accept-Encoding", b"gzip"), (b"a", b"b")]
    sent = exchange(app, Recorder(), MetricsMiddleware, method="GET", path="/metrics", headers=headers)
    assert b"".join(message.get("body", b"") for message in sent) == b"vllm 1\nbaton_kv_leases 1\n"
    assert sent[0]["headers"] == [(b"x", b"y")] and app.scope["headers"] == [(b"a", b"b")]


@pytest.mark.parametrize("path, urls", [("/health", ["u"]), ("/metrics", [])])
def test_other_answers_are_left_alone(path, urls):
    sent = exchange(metrics_app([b"ok"]), Recorder(urls), MetricsMiddleware, method="GET", path=path)
    assert sent[1]["body"] == b"ok" and len(sent[0]["headers"]) == 2


# Addresses


def config(module="baton_vllm", name="BatonConnector", first=0, local=1, **baton):
    transfer = types.SimpleNamespace(
        kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config={"baton": baton}
    )
    parallel = types.SimpleNamespace(data_parallel_index=first, data_parallel_size_local=local)
    return types.SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


def urls_of(config, monkeypatch):
    import harness  # noqa: F401  (vLLM or its stubs)
    import vllm.envs as envs

    monkeypatch.setattr(envs, "VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost", raising=False)
    monkeypatch.setattr(envs, "VLLM_NIXL_SIDE_CHANNEL_PORT", 5600, raising=False)
    cores = Cores()
    cores.configure(config)
    return cores.urls


def test_addresses_of_all_local_ranks(monkeypatch):
    assert urls_of(config(), monkeypatch) == ["http://127.0.0.1:7600"]
    assert urls_of(config(first=2, local=2), monkeypatch) == ["http://127.0.0.1:7602", "http://127.0.0.1:7603"]
    assert urls_of(config(http="0.0.0.0:80"), monkeypatch) == ["http://127.0.0.1:80"]
    assert urls_of(config(http="10.0.0.5:80"), monkeypatch) == ["http://10.0.0.5:80"]
    assert urls_of(config(module=None), monkeypatch) == []
    for name in ("BatonPushConnector", "NixlPushConnector"):
        assert urls_of(config(name=name, push_wait_s=6), monkeypatch) == [], "it has no HTTP port"
    assert urls_of(types.SimpleNamespace(kv_transfer_config=None), monkeypatch) == []


def test_a_core_that_does_not_answer_is_503():
    pytest.importorskip("aiohttp")

    async def run():
        cores = Cores()
        status, body = await cores.call("GET", "http://127.0.0.1:9/debug/kv")
        await cores._session.close()
        return status, json.loads(body)

    status, body = asyncio.run(run())
    assert status == 503 and "does not answer" in body["error"]["message"]


def test_the_routes_on_a_real_application():
    fastapi = pytest.importorskip("fastapi")
    client = pytest.importorskip("starlette.testclient")
    app = fastapi.FastAPI()

    @app.post("/v1/completions")
    async def completions(request: fastapi.Request):
        await request.body()
        raise fastapi.HTTPException(400)

    @app.get("/metrics")
    async def metrics():
        return fastapi.Response("vllm 1\n", media_type="text/plain")

    made = plugin.plugin()
    made.cores = Recorder()
    made.attach_router(app)
    try:
        http = client.TestClient(app, client=("127.0.0.1", 9))
        foreign = client.TestClient(app, client=("10.0.0.9", 9))
    except RuntimeError as error:  # without httpx
        pytest.skip(str(error))
    with http:
        assert http.get("/metrics").text == "vllm 1\nbaton_kv_leases 1\n"
        assert http.post("/kv/release", json={"handle": fakes.handoff(8)["remote_handle"]}).status_code == 200
        assert http.post("/abort_requests", content=b"x" * (1 << 20) + b"x").status_code == 413
        assert http.get("/debug/kv/events?after=3").status_code == 200
        assert made.cores.calls[-1][1] == "http://core/debug/kv/events?after=3"
        assert http.post("/v1/completions", content=BODY).status_code == 400
        assert made.cores.given_back == [{"params": GOOD, "reason": "refused_400"}]
        # Without a secret, other hosts reach none of the paths.
        paths = [("POST", "/kv/release"), ("POST", "/abort_requests")]
        paths += [("GET", "/debug/kv"), ("GET", "/debug/kv/events")]
        assert [foreign.request(method, path).status_code for method, path in paths] == [401] * 4
        made.cores._secret = "0123456789abcdef"
        assert foreign.get("/debug/kv/events").status_code == 200
        made.cores.draining = DRAINING
        refused = http.post("/v1/completions", content=BODY)
        assert (refused.status_code, refused.headers["retry-after"], refused.content) == (503, "1", DRAINING)
        made.cores.urls = []
        assert http.post("/kv/release", json={}).status_code == 501
        assert http.get("/debug/kv/events").status_code == 501
