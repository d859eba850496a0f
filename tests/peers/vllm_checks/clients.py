"""Clients that disconnect, streams of a constant load, and prompts."""

import json
import random
import socket
import struct
import threading
import time
import urllib.request

from .base import NO_ANSWER, expect

BLOCK = 32


def make_prompt(source, blocks):
    """A prompt of about this many blocks that no prefix cache has. A number and its space are two tokens."""
    words = " ".join(str(source.randrange(10, 99)) for _ in range(blocks * BLOCK // 2))
    return f"{words} The end."


class Call:
    """One request on a connection of its own. The caller decides how the connection ends."""

    def __init__(self, url, path, body, request_id=None):
        data = json.dumps(body).encode()
        named = f"x-request-id: {request_id}\r\n".encode() if request_id else b""
        self.socket = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 30)
        self.seen = b""
        self.socket.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
            + named + f"content-length: {len(data)}\r\n\r\n".encode() + data
        )

    def read_frames(self, frames):
        """Reads until so many frames of the stream have arrived."""
        while self.seen.count(b"data: ") < frames:
            piece = self.socket.recv(65536)
            expect(piece, f"the stream ended early: {self.seen[-200:]!r}")
            self.seen += piece

    def read_to_end(self, seconds=60):
        """Reads until the stream's last frame, or until the connection ends."""
        self.socket.settimeout(seconds)
        try:
            while b"[DONE]" not in self.seen:
                piece = self.socket.recv(65536)
                if not piece:
                    break
                self.seen += piece
        except OSError:
            pass
        self.socket.close()
        return self.seen

    def leave(self, how):
        """Closes with FIN, or resets. True if the response was complete before."""
        self.socket.setblocking(False)
        try:
            while piece := self.socket.recv(1 << 20):
                self.seen += piece
        except OSError:
            pass  # no more bytes yet, or the connection has ended
        try:
            if how == "rst":
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()
        return b"[DONE]" in self.seen or b'"finish_reason":"' in self.seen.replace(b" ", b"")


class Load:
    """So many clients that stream one response after the other."""

    def __init__(self, url, streams, blocks=3, tokens=40, seed=0):
        self.url, self.blocks, self.tokens = url, blocks, tokens
        self.done, self.failed, self.reasons = 0, 0, []
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        sources = [random.Random(f"load-{seed}-{k}") for k in range(streams)]
        self.threads = [threading.Thread(target=self.run, args=(source,), daemon=True) for source in sources]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join(30)

    def run(self, source):
        while not self.stopping.is_set():
            body = {"model": "demo", "prompt": make_prompt(source, self.blocks), "max_tokens": self.tokens,
                    "temperature": 0, "ignore_eos": True, "stream": True}
            try:
                request = urllib.request.Request(
                    self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read()
                reason = None if b"[DONE]" in text and b'"error"' not in text else text[-200:].decode(errors="replace")
            except NO_ANSWER as error:
                reason = f"{type(error).__name__}: {error}"
            with self.lock:
                self.done += reason is None
                self.failed += reason is not None
                if reason and len(self.reasons) < 5:
                    self.reasons.append(reason)
            if reason:
                time.sleep(0.2)


class Background(threading.Thread):
    """One call of a function on a thread; `result` waits for its value."""

    def __init__(self, function, *arguments):
        super().__init__(daemon=True)
        self.function, self.arguments, self.value, self.error = function, arguments, None, None
        self.start()

    def run(self):
        try:
            self.value = self.function(*self.arguments)
        except Exception as error:  # raised again in `result`
            self.error = error

    def result(self, seconds):
        self.join(seconds)
        expect(not self.is_alive(), f"no response within {seconds:.0f} s")
        if self.error:
            raise self.error
        return self.value
