"""The endpoint plugin `baton`: the verbs and the state of the engine processes, on vLLM's own address.

vLLM loads it if `VLLM_PLUGINS` names it. Each API server process forwards to the HTTP port of every local EngineCore.
A handoff that the front end refuses before the engine sees it is given back to its producer. While the engine drains,
each request is refused.
"""

import asyncio
import ipaddress
import json
import logging
import os
import pathlib

from .settings import Settings

logger = logging.getLogger("vllm.baton")

SECRET_HEADER = "x-baton-cluster-secret"
ROUTER_SETTLES_HEADER = "x-baton-router-settles"
BODY_BYTES_MAX = 1 << 20
# A refused body is read for its handoff up to this size; block tables are long.
REFUSED_BYTES_MAX = 8 << 20
FORWARD_TIMEOUT_S = 5.0
WAIT_MAX_S = 12.0  # of `wait_ms`, which is at most 10 s
# Between two waits for the drain, doubled after each failure.
DRAIN_PAUSE_S, DRAIN_PAUSE_MAX_S = 0.1, 5.0
REFUSALS_MAX = 1024
# Paths whose requests may have a handoff. vLLM's key check covers all of them.
GENERATE_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate")
# As Baton's engine sends them with its 503.
RETRY_HEADERS = [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
# Headers of a proxy: the caller is not on this host, whatever its address is.
PROXY_HEADERS = ("x-forwarded-for", "forwarded", "x-envoy-external-address", "x-real-ip")
PUSH_CONNECTORS = ("BatonPushConnector", "NixlPushConnector")
SUMMED = ("blocks", "requests", "leases", "steps")


def plugin():
    """The entry point."""
    return BatonPlugin()


class BatonPlugin:
    """vLLM's `EndpointPlugin`."""

    name = "baton"
    required_tasks = ("generate",)

    def __init__(self):
        self.cores = Cores()

    def attach_router(self, app):
        from fastapi import APIRouter, Request

        router, cores = APIRouter(), self.cores

        # FastAPI reads the annotations, and resolves no names of this function.
        async def release(request):
            return await cores.forward_post("/kv/release", request)

        async def abort(request):
            return await cores.forward_post("/abort_requests", request)

        async def state(request):
            return await cores.state(request)

        async def events(request):
            return await cores.events(request)

        for path, method, endpoint in [
            ("/kv/release", "POST", release),
            ("/abort_requests", "POST", abort),
            ("/debug/kv", "GET", state),
            ("/debug/kv/events", "GET", events),
        ]:
            endpoint.__annotations__ = {"request": Request}
            router.add_api_route(path, endpoint, methods=[method], include_in_schema=False)
        app.include_router(router)
        app.add_middleware(RefusalMiddleware, cores=cores)
        app.add_middleware(MetricsMiddleware, cores=cores)

    async def init_state(self, engine_client, state, args):
        if engine_client is None:
            return
        self.cores.configure(engine_client.vllm_config)
        if self.cores.urls:
            self.cores.notice_shutdown(engine_client)
            self.cores.watch_drain()


class Cores:
    """The HTTP ports of the local EngineCores."""

    def __init__(self):
        self.urls = []
        self.draining = None  # the answer to new requests, once an engine process has begun to drain
        self._watches = []
        self._secret = None
        self._session = None
        self._refusals = 0

    def configure(self, config):
        """The addresses, from the same settings as in the engine processes."""
        transfer = config.kv_transfer_config
        if transfer is None or transfer.kv_connector_module_path != "baton_vllm":
            return
        if transfer.kv_connector in PUSH_CONNECTORS:
            # It has no HTTP port.
            return
        import vllm.envs as envs

        parallel = config.parallel_config
        first = parallel.data_parallel_index
        for rank in range(first, first + max(1, parallel.data_parallel_size_local)):
            settings = Settings.parse(
                transfer.kv_connector_extra_config or {},
                envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
                envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
                rank,
            )
            host, _, port = settings.http.rpartition(":")
            self.urls.append(f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}")
            self._secret = read_secret(settings.secret_file or os.environ.get("BATON_CLUSTER_SECRET_FILE"))

    async def call(self, method, url, body=None, headers=None, timeout=FORWARD_TIMEOUT_S):
        """Status and body of one answer; 503 if there is none."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._session.request(method, url, data=body, headers=headers, timeout=limit) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return 503, envelope(f"the engine process does not answer: {type(error).__name__}")

    def notice_shutdown(self, engine_client):
        """The front end shuts its tokenizers down before the engine drains, and would answer 500 meanwhile."""
        shutdown = engine_client.shutdown

        def draining(*arguments, **named):
            self.draining = self.draining or envelope("the engine is shutting down", code="draining")
            return shutdown(*arguments, **named)

        engine_client.shutdown = draining

    def watch_drain(self):
        """Starts to wait for the drain, which vLLM begins in all its engine processes."""
        loop = asyncio.get_running_loop()
        self._watches = [loop.create_task(self.wait_for_drain(url)) for url in self.urls]

    async def wait_for_drain(self, url):
        pause = DRAIN_PAUSE_S
        while not self.draining:
            headers = self.secret_header()
            status, body = await self.call("GET", url + "/health?wait_ms=10000", headers=headers, timeout=WAIT_MAX_S)
            if status == 503 and error_code(body) == "draining":
                self.draining = body
                return
            if status == 401 and pause == DRAIN_PAUSE_S:
                logger.warning("Baton: %s refuses the cluster secret; a drain of the engine is not noticed", url)
            pause = DRAIN_PAUSE_S if status == 200 else min(2 * pause, DRAIN_PAUSE_MAX_S)
            await asyncio.sleep(pause)

    def secret_header(self):
        return {SECRET_HEADER: self._secret} if self._secret else {}

    def refuse_stranger(self, request):
        """Without a secret, vLLM's own port may be open to clients: only callers of this host are served."""
        proxied = any(name in request.headers for name in PROXY_HEADERS)
        if self._secret or (is_loopback(request.client) and not proxied):
            return None
        return respond(401, envelope("this path needs a cluster secret (kv_connector_extra_config.baton.secret_file)"))

    async def forward_post(self, path, request):
        """The first answer that knows the lease or request counts."""
        if refusal := self.refuse_stranger(request):
            return refusal
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                return respond(413, envelope(f"the body has more than {BODY_BYTES_MAX} bytes"))
        headers = own_headers(request.headers)
        answers = await asyncio.gather(*(self.call("POST", url + path, bytes(body), headers) for url in self.urls))
        return respond(*merge_verbs(answers))

    async def state(self, request):
        if refusal := self.refuse_stranger(request):
            return refusal
        headers = own_headers(request.headers)
        answers = await asyncio.gather(*(self.call("GET", url + "/debug/kv", headers=headers) for url in self.urls))
        return respond(*merge_states(answers))

    async def events(self, request):
        if refusal := self.refuse_stranger(request):
            return refusal
        if len(self.urls) != 1:
            return respond(501, envelope("with several data-parallel ranks, ask the HTTP port of each EngineCore"))
        query = f"?{request.url.query}" if request.url.query else ""
        return respond(
            *await self.call("GET", f"{self.urls[0]}/debug/kv/events{query}", headers=own_headers(request.headers), timeout=WAIT_MAX_S)
        )

    async def metrics(self):
        """The cores' metrics as text. A core that does not answer has none."""
        answers = await asyncio.gather(*(self.call("GET", url + "/metrics") for url in self.urls))
        return b"".join(body for status, body in answers if status == 200)

    def give_back(self, body, status, unseen=False):
        """Starts to give the handoff of a refused request back to its producer. `unseen`: no engine process has it."""
        params = refused_handoff(body)
        if params is None or self._refusals >= REFUSALS_MAX or (len(self.urls) != 1 and not unseen):
            # With several ranks, the one that a request used is not known here. vLLM tells that rank of most refusals.
            return
        message = json.dumps({"params": params, "reason": f"refused_{status}"}).encode()
        headers = {"content-type": "application/json", **self.secret_header()}
        task = asyncio.get_running_loop().create_task(self.send_back(message, headers))
        self._refusals += 1
        task.add_done_callback(self._given_back)

    async def send_back(self, message, headers):
        """Through one engine process. In a drain, ranks end one after the other."""
        for url in self.urls:
            status, _ = await self.call("POST", url + "/kv/refused", message, headers)
            if status < 500:
                return

    def _given_back(self, _task):
        self._refusals -= 1


def read_secret(path):
    """The cluster secret, as the core reads it: the first line of the file."""
    return (pathlib.Path(path).read_text().splitlines() or [""])[0].strip() if path else None


def is_loopback(client):
    """Whether a caller is on this host. A Unix socket has no address, and may be a proxy's."""
    try:
        return client is not None and ipaddress.ip_address(client.host).is_loopback
    except ValueError:
        return False


def own_headers(headers):
    """The headers that a core reads."""
    kept = {"content-type": "application/json"}
    if SECRET_HEADER in headers:
        kept[SECRET_HEADER] = headers[SECRET_HEADER]
    return kept


def envelope(message, code=None):
    return json.dumps({"error": {"message": message, "type": "service_unavailable_error", "code": code, "param": None}}).encode()


def error_code(body):
    try:
        return json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def respond(status, body):
    from starlette.responses import Response

    return Response(content=body, status_code=status, media_type="application/json")


def merge_verbs(answers):
    """One answer for all ranks: the first result other than `unknown`, for each request or handle."""
    if not answers:
        # Routers take this status for a missing verb.
        return 501, envelope("this vLLM has no BatonConnector")
    if len(answers) == 1:
        return answers[0]
    merged = None
    for status, body in answers:
        if status != 200:
            return status, body
        reply = json.loads(body)
        if merged is None:
            merged = reply
        elif "results" in reply:
            for name, result in reply["results"].items():
                merged["results"][name] = better(merged["results"].get(name), result)
        else:
            merged["result"] = better(merged.get("result"), reply.get("result"))
    return 200, json.dumps(merged).encode()


def better(one, other):
    """The word that says more. A rank that knows nothing of a request says `unknown`, or remembers it."""
    order = {None: 0, "unknown": 1, "remembered": 2}
    return other if order.get(other, 3) > order.get(one, 3) else one


def merge_states(answers):
    """The sums over the ranks, as a Baton engine with several ranks reports them."""
    if not answers:
        # Routers take this status for a missing verb.
        return 501, envelope("this vLLM has no BatonConnector")
    for status, body in answers:
        if status != 200:
            return status, body
    states = [json.loads(body) for _, body in answers]
    merged = states[0]
    for state in states[1:]:
        for part in SUMMED:
            merged[part] = add(merged.get(part), state.get(part))
        merged["oldest_leases"] += state["oldest_leases"]
        merged["cores"] += state["cores"]
        merged["failed"] = merged["failed"] or state["failed"]
    if len(states) > 1:
        # The sums belong to no rank.
        merged.pop("rank", None)
    merged["engine"]["data_parallel_size"] = len(states)
    return 200, json.dumps(merged).encode()


def add(left, right):
    if isinstance(left, dict):
        return {key: add(value, right.get(key)) for key, value in left.items()}
    return left + (right or 0) if isinstance(left, int) else left


def refused_handoff(body):
    """The handoff of a refused request, if it has one with a handle."""
    try:
        params = json.loads(body).get("kv_transfer_params")
    except (ValueError, AttributeError, RecursionError):
        return None
    if isinstance(params, dict) and params.get("do_remote_prefill") is True and isinstance(params.get("remote_handle"), str):
        return params
    return None


class RefusalMiddleware:
    """Gives handoffs back that the front end refuses: malformed bodies, unknown models, a stream that never starts.

    A draining engine answers a new request as aborted. The 503 here takes its place.
    """

    def __init__(self, app, cores):
        self.app = app
        self.cores = cores

    async def __call__(self, scope, receive, send):
        watched = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GENERATE_PATHS
        draining = self.cores.draining
        if not watched or not self.cores.urls or (settles_itself(scope) and not draining):
            return await self.app(scope, receive, send)
        request = ObservedRequest(receive, send)
        try:
            if draining:
                await request.refuse(draining)
            else:
                await self.app(scope, request.receive, request.send)
        finally:
            if request.is_refused() and not settles_itself(scope):
                self.cores.give_back(bytes(request.body), request.status or 499, unseen=bool(draining))


def settles_itself(scope):
    """Whether a router says that it releases the handoff of a refused request, or tries another engine with it."""
    return any(name == ROUTER_SETTLES_HEADER.encode() for name, _ in scope["headers"])


class ObservedRequest:
    """The body of one request, and how its answer begins."""

    def __init__(self, receive, send):
        self._receive = receive
        self._send = send
        self.body = bytearray()
        self.status = None
        self.body_sent = False

    async def receive(self):
        message = await self._receive()
        if message["type"] == "http.request" and not self.body_sent and len(self.body) <= REFUSED_BYTES_MAX:
            self.body += message.get("body", b"")
        return message

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status < 400:
                # Its body is not needed.
                self.body_sent = True
                self.body.clear()
        await self._send(message)

    async def refuse(self, body):
        """Reads the request, because its handoff goes back, and answers 503."""
        more = True
        while more and len(self.body) <= REFUSED_BYTES_MAX:
            more = (await self.receive()).get("more_body", False)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *RETRY_HEADERS]
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def is_refused(self):
        """Whether no answer of the engine began. The core ignores a handoff that a request of its engine has used."""
        return not self.body_sent and len(self.body) <= REFUSED_BYTES_MAX


class MetricsMiddleware:
    """Appends the cores' metrics to the answer of `/metrics`."""

    def __init__(self, app, cores):
        self.app = app
        self.cores = cores

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/metrics" or not self.cores.urls:
            return await self.app(scope, receive, send)

        async def send_with_ours(message):
            if message["type"] == "http.response.start":
                # The length changes, and the text must not be compressed.
                message = dict(message, headers=[h for h in message["headers"] if h[0].lower() != b"content-length"])
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                message = dict(message, body=message.get("body", b"") + await self.cores.metrics())
            await send(message)

        scope = dict(scope, headers=[h for h in scope["headers"] if h[0].lower() != b"accept-encoding"])
        await self.app(scope, receive, send_with_ours)
