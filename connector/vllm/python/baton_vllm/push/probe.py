"""Asks at a prefill engine's side channel which process is there."""

import hashlib
import socket

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.utils.network_utils import make_zmq_path

from .consumer import ALIVE, GONE, SILENT

TIMEOUT_S = 2.0


def fingerprint(agent_metadata):
    """A short name of one NIXL agent. Each process start has another one."""
    return hashlib.blake2b(agent_metadata, digest_size=8).hexdigest()


def probe(host, port, engine_id, known):
    """`ALIVE`, `GONE` or `SILENT`. `known` are the fingerprints from the handshake, empty if rank 0 is not among them.

    The kernel refuses a connection to a port without a listener. A stopped process, a partition or a lost host refuse
    nothing.
    """
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return GONE
    except OSError:
        return SILENT
    try:
        reply = ask(host, port)
    except zmq.ZMQError:
        return SILENT
    try:
        payload = msgspec.msgpack.decode(reply, type=NixlHandshakePayload)
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return GONE
    if metadata.engine_id != engine_id or (known and fingerprint(metadata.agent_metadata) not in known):
        return GONE
    return ALIVE


def ask(host, port):
    """The handshake payload of rank 0, which every engine has."""
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as sock:
        sock.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        sock.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        return sock.recv_multipart()[0]
