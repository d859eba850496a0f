"""Notices between ranks: each is read as it was written, and a malformed one is no error."""

import json

import pytest

import harness
from baton_vllm.push import messages
from baton_vllm.push.messages import Registration

DATA = {
    "request_id": "cmpl-x-0-0123abcd",
    "decode_engine_id": "d",
    "decode_host": "10.0.0.2",
    "decode_port": 5600,
    "decode_tp_size": 2,
    "local_block_ids": [[1, 2]],
}


def test_notices_are_read_as_written():
    read = messages.decode_cancel(messages.encode_cancel(DATA))
    assert read == Registration.of(DATA) and "local_block_ids" not in read.data
    assert messages.decode_no_write(messages.encode_no_write("r:1", 'a "reason"')) == ("r:1", 'a "reason"')
    assert messages.decode_withdraw(messages.encode_withdraw("r")) == "r"
    assert messages.decode_completion(b"cmpl-a:b-0-01234567:2") == "cmpl-a:b-0-01234567"


@pytest.mark.parametrize("name", messages.ADDRESS)
@pytest.mark.parametrize("value", [None, "", [], {}, True, -1, 0, 70000, 1.5, "x" * 600])
def test_malformed_registrations(name, value):
    assert Registration.of({**DATA, name: value}) is None
    assert Registration.of({key: DATA[key] for key in DATA if key != name}) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[1, 2]", b'["r"]', b'["r", 1]'])
def test_malformed_notices(body):
    assert messages.decode_cancel(messages.CANCEL + body) is None
    assert messages.decode_no_write(messages.NO_WRITE + body) is None
    assert messages.decode_completion(body) is None


def test_withdrawals_have_a_bounded_id():
    assert messages.decode_withdraw(messages.WITHDRAW) is None
    assert messages.decode_withdraw(messages.WITHDRAW + b"x" * 600) is None


def test_reasons_are_bounded():
    _, reason = messages.decode_no_write(messages.NO_WRITE + json.dumps(["r", "x" * 10000]).encode())
    assert len(reason) == messages.TEXT_MAX


IDS = ["cmpl-x-0-0123abcd", "cmpl-x-0-0123ABCD", "cmpl-x-0", "cmpl-x-0-0123abc", "-01234567", "a-01234567-89abcdef", ""]


BASES = ["cmpl-x-0"] * 3 + ["cmpl-x-0-0123abc", "", "a-01234567", ""]


@pytest.mark.parametrize("request_id, base", list(zip(IDS, BASES)))
def test_both_legs_have_one_base_id(request_id, base):
    assert messages.base_id(request_id) == base
    if not harness.REASON:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

        assert get_base_request_id(request_id) == base
