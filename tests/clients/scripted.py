"""A scripted pair in vLLM's format behind a router: tool calls and `/v1/responses`, which the built-in model has not.

Standard library only. The engine answers:
- a request with tools and without a tool's result: by a call of the first tool, as `{"what": "box"}`
- a body of more than BODY_MAX: by vLLM's refusal of a prompt that is too long
- any other: by TEXT, in a few pieces
"""

import contextlib
import http.server
import json
import pathlib
import re
import subprocess
import tempfile
import threading
import time

MODEL = "scripted"
TEXT = ["The red ", "box holds ", "a key."]
ARGUMENTS = ['{"wh', 'at": ', '"box"}']
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
BODY_MAX = 100_000
# vLLM 0.32's.
TOO_LONG = {"error": {"message": "This model's maximum context length is 2048 tokens. However, you requested 60001 tokens (60000"
                      " in the messages, 1 in the completion). Please reduce the length of the messages or completion.",
                      "type": "BadRequestError", "param": None, "code": 400}}
START_S = 60
# What P returns for D. No engine reads it here.
HANDOFF = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "scripted", "remote_block_ids": [1],
           "remote_request_id": "scripted", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1}


class Engine(http.server.BaseHTTPRequestHandler):
    """Both engines: P if the body asks for a handoff."""
    protocol_version = "HTTP/1.1"
    legs = {"P": 0, "D": 0}

    def do_GET(self):
        if self.path == "/v1/models":
            return self.answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        return self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        if len(text) > BODY_MAX:
            return self.answer(400, TOO_LONG)
        body = json.loads(text or b"{}")
        params = body.get("kv_transfer_params") or {}
        handlers = {"/v1/chat/completions": self.chat, "/v1/responses": self.respond}
        if self.path not in handlers:
            return self.answer(404, {"detail": "Not Found"})
        if not body:
            # The router asks whether the engine has the path.
            return self.answer(400, {"object": "error", "message": "input is missing", "type": "BadRequestError", "code": 400})
        prefills = params.get("do_remote_decode")
        Engine.legs["P" if prefills else "D"] += 1
        return handlers[self.path](body, {"kv_transfer_params": HANDOFF} if prefills else {})

    def chat(self, body, more):
        head = {"id": "chatcmpl-scripted", "created": 1, "model": MODEL}
        name = tool_to_call(body["messages"], body.get("tools"))
        if not body.get("stream"):
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "".join(ARGUMENTS)}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]} if name else \
                {"role": "assistant", "content": "".join(TEXT)}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if name else "stop"}
            return self.answer(200, {**head, "object": "chat.completion", "choices": [choice], "usage": USAGE, **more})
        deltas = [{"content": piece} for piece in TEXT]
        if name:
            first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
            deltas = [{"tool_calls": [first]}]
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in ARGUMENTS]
        events = [([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], None)]
        events += [([{"index": 0, "delta": delta, "finish_reason": None}], None) for delta in deltas]
        events += [([{"index": 0, "delta": {}, "finish_reason": "tool_calls" if name else "stop"}], None)]
        if (body.get("stream_options") or {}).get("include_usage"):
            events += [([], USAGE)]
        chunk = {**head, "object": "chat.completion.chunk"}
        lines = [json.dumps({**chunk, "choices": choices, **({"usage": usage} if usage else {})}) for choices, usage in events]
        return self.stream([f"data: {line}\n\n" for line in [*lines, "[DONE]"]])

    def respond(self, body, more):
        items = body["input"] if isinstance(body["input"], list) else [{"role": "user"}]
        name = tool_to_call(items, body.get("tools"))
        usage = {"input_tokens": 11, "output_tokens": 3, "total_tokens": 14, "input_tokens_details": {"cached_tokens": 0},
                 "output_tokens_details": {"reasoning_tokens": 0}}
        text = {"type": "output_text", "text": "".join(TEXT), "annotations": []}
        item = {"id": "item_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        if name:
            item = {"id": "item_1", "type": "function_call", "call_id": "call_1", "name": name, "status": "completed",
                    "arguments": "".join(ARGUMENTS)}
        whole = {"id": "resp_scripted", "object": "response", "created_at": 1, "model": MODEL, "status": "completed",
                 "output": [item], "usage": usage, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
                 "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, **more}
        if not body.get("stream"):
            return self.answer(200, whole)
        place = {"item_id": "item_1", "output_index": 0}
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        opened = {**item, "status": "in_progress", **({"arguments": ""} if name else {"content": []})}
        events = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun}),
                  ("response.output_item.added", {"output_index": 0, "item": opened})]
        if name:
            events += [("response.function_call_arguments.delta", {**place, "delta": piece}) for piece in ARGUMENTS]
            done = {**place, "name": name, "arguments": "".join(ARGUMENTS)}
            events += [("response.function_call_arguments.done", done)]
        else:
            place["content_index"] = 0
            events += [("response.content_part.added", {**place, "part": {**text, "text": ""}})]
            events += [("response.output_text.delta", {**place, "delta": piece, "logprobs": []}) for piece in TEXT]
            events += [("response.output_text.done", {**place, "text": "".join(TEXT), "logprobs": []}),
                       ("response.content_part.done", {**place, "part": text})]
        events += [("response.output_item.done", {"output_index": 0, "item": item}), ("response.completed", {"response": whole})]
        frame = "event: {}\ndata: {}\n\n"
        return self.stream([frame.format(kind, json.dumps({"type": kind, "sequence_number": at, **event}))
                            for at, (kind, event) in enumerate(events)])

    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, frames):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for frame in [*(frame.encode() for frame in frames), b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
            self.wfile.flush()

    def log_message(self, *_):
        pass


def tool_to_call(items, tools):
    """The name of the first tool, unless a tool has answered."""
    answered = any(item.get("role") == "tool" or item.get("type") == "function_call_output" for item in items)
    if not tools or answered:
        return None
    return tools[0].get("name") or tools[0]["function"]["name"]


@contextlib.contextmanager
def behind_a_router(binary):
    """The URL of a router in front of a scripted pair. Ends the router afterwards."""
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in "PD"]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    prefill, decode = (f"{{engines: [{{url: 'http://127.0.0.1:{server.server_address[1]}'}}]}}" for server in servers)
    config = (f"listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: {MODEL}\n    protocol: vllm\n"
              f"    prefill: {prefill}\n    decode: {decode}\n")
    with tempfile.TemporaryDirectory(prefix="baton-scripted-") as folder:
        folder = pathlib.Path(folder)
        (folder / "router.yaml").write_text(config)
        with open(folder / "log", "w") as log:
            command = [binary, "router", "-c", folder / "router.yaml"]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not (ready := re.search(r"ready http=(\S+)", (folder / "log").read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the router does not start: {(folder / 'log').read_text()}")
                time.sleep(0.02)
            yield f"http://{ready[1]}"
        finally:
            process.terminate()
            process.wait(30)
            for server in servers:
                server.shutdown()
