"""The settings of the connector: `kv_connector_extra_config.baton`, checked."""

import dataclasses
import ipaddress

# Distances from the port of vLLM's NIXL side channel, which is unique per engine on a host.
HTTP_PORT_OFFSET = 2000
CHANNEL_PORT_OFFSET = 4000


class SettingsError(ValueError):
    """A setting is wrong."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings, with defaults from vLLM's own."""

    http: str  # address of the engine process's HTTP port
    channel: str  # address of the side channel
    secret_file: str | None
    previous_secret_file: str | None  # a secret that is accepted beside the first during a rotation
    strict_peers: bool  # refuse NixlConnectors without the contract
    require_abort: bool  # refuse to start if requests cannot be aborted by id
    allow_untested: bool  # start on a vLLM whose functions have changed
    nap: bool  # sleep between steps while leases are all there is

    @classmethod
    def parse(cls, extra, side_channel_host, side_channel_port, rank):
        """`extra` is `kv_connector_extra_config`. Both ports get the data-parallel rank added."""
        given = extra.get("baton") or {}
        if not isinstance(given, dict):
            raise SettingsError("kv_connector_extra_config.baton must be an object")
        known = {field.name for field in dataclasses.fields(cls)} - {"strict_peers"} | {"peers"}
        for key in given:
            if key not in known:
                names = ", ".join(sorted(known))
                raise SettingsError(f"kv_connector_extra_config.baton.{key} is unknown; known: {names}")
        peers = given.get("peers", "strict")
        if peers not in ("strict", "any"):
            raise SettingsError('kv_connector_extra_config.baton.peers must be "strict" or "any"')
        http = given.get("http", f"127.0.0.1:{side_channel_port + HTTP_PORT_OFFSET}")
        channel = given.get("channel", f"{numeric(side_channel_host)}:{side_channel_port + CHANNEL_PORT_OFFSET}")
        return cls(
            http=with_rank("http", http, rank),
            channel=with_rank("channel", channel, rank),
            secret_file=text(given, "secret_file"),
            previous_secret_file=text(given, "previous_secret_file"),
            strict_peers=peers == "strict",
            require_abort=flag(given, "require_abort", True),
            allow_untested=flag(given, "allow_untested", False),
            nap=flag(given, "nap", True),
        )


@dataclasses.dataclass(frozen=True)
class PushSettings:
    """All settings of the push connector."""

    push_wait_s: float | None  # a registration without a request waits so long; None: the lease's duration
    push_silent_s: float  # a producer that does not answer for so long has ended; 0: never
    allow_untested: bool  # start on a vLLM whose functions have changed

    @classmethod
    def parse(cls, extra):
        """`extra` is `kv_connector_extra_config`."""
        given = extra.get("baton") or {}
        if not isinstance(given, dict):
            raise SettingsError("kv_connector_extra_config.baton must be an object")
        known = sorted(field.name for field in dataclasses.fields(cls))
        for key in given:
            if key not in known:
                raise SettingsError(
                    f"kv_connector_extra_config.baton.{key} is unknown for push; known: {', '.join(known)}"
                )
        return cls(
            push_wait_s=seconds(given, "push_wait_s", None, above=0),
            push_silent_s=seconds(given, "push_silent_s", 0.0, above=None),
            allow_untested=flag(given, "allow_untested", False),
        )


def seconds(given, key, default, above):
    """A time of at most an hour: above this number, or at least 0."""
    value = given.get(key, default)
    if value is None and default is None:
        return None
    number = type(value) in (int, float) and value <= 3600
    if not number or not (value >= 0 if above is None else value > above):
        least = "at least 0" if above is None else f"above {above}"
        raise SettingsError(f"kv_connector_extra_config.baton.{key} must be a number of seconds, {least}, at most 3600")
    return float(value)


def flag(given, key, default):
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"kv_connector_extra_config.baton.{key} must be true or false")
    return value


def text(given, key):
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"kv_connector_extra_config.baton.{key} must be a text")
    return value


def numeric(host):
    """The side channel listens on all addresses unless vLLM's own is loopback."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return "127.0.0.1" if ipaddress.ip_address(host).is_loopback else "0.0.0.0"
    except ValueError:
        return "0.0.0.0"


def with_rank(key, address, rank):
    """`IP:PORT` with the rank added to a port other than 0."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isdecimal()):
        raise SettingsError(f"kv_connector_extra_config.baton.{key} must be IP:PORT")
    shifted = int(port) + rank if int(port) else 0
    if shifted > 65535:
        raise SettingsError(f"kv_connector_extra_config.baton.{key}: port {shifted} is above 65535; set a lower one")
    return f"{host}:{shifted}"
