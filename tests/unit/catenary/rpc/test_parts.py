from __future__ import annotations

import hmac
import inspect
import re
from pathlib import Path

import grpc
import pytest

from catenary.config import ConfigError
from catenary.rpc import (
    ERROR_TRAILER,
    Role,
    RpcConfig,
    Secrets,
    TcpAddress,
    TlsFiles,
    UnixAddress,
    error_of,
    parse_address,
    read_secret,
    refuse,
)
from catenary.rpc.auth import Authorizer
from catenary.rpc.channel import channel_options, server_options
from catenary.rpc.config import channel_credentials, server_credentials
from catenary.rpc.health import HealthBoard
from catenary.runtime import StartRefused
from catenary.v1 import common_pb2

ACCESS = {
    "/catenary.v1.RouterService/": frozenset({Role.CLIENT}),
    "/catenary.v1.FleetService/": frozenset({Role.ENGINE}),
}
GENERATE = "/catenary.v1.RouterService/Generate"
ATTACH = "/catenary.v1.FleetService/Attach"


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7070", TcpAddress("127.0.0.1", 7070)),
        ("router:0", TcpAddress("router", 0)),
        ("[::1]:65535", TcpAddress("::1", 65535)),
        ("unix:/run/c/r.sock", UnixAddress(Path("/run/c/r.sock"))),
        ("unix:///run/c/r.sock", UnixAddress(Path("/run/c/r.sock"))),
    ],
)
def test_addresses(text: str, address: TcpAddress | UnixAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "7070", ":7070", "host", "host:", "host:x", "host:-1", "host:65536", "host:\uff19", "::1:7070",
        "[::1]", "[zz]:1", "a b:1", "http://h:1", "unix:", "unix://relative", "unix:/dir/",
        "unix:/" + "x" * 107, "host:" + "9" * 5000,
    ],
)  # fmt: skip
def test_bad_addresses_are_named_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|path|host|IPv6") as error:
        parse_address(text)
    assert "\n" not in str(error.value)


def test_the_configuration_refuses_a_bad_address() -> None:
    with pytest.raises(ValueError, match="is not an address"):
        RpcConfig(listen=("nonsense",))


def test_each_secret_gives_its_role_and_no_other() -> None:
    authorizer = Authorizer(Secrets("c-secret", "e-secret"), ACCESS)
    assert authorizer.deny(GENERATE, bearer("c-secret")) is None
    assert authorizer.deny(ATTACH, bearer("e-secret")) is None
    for method, secret in ((GENERATE, "e-secret"), (ATTACH, "c-secret")):
        denial = authorizer.deny(method, bearer(secret))
        assert denial is not None
        assert denial[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer(""),
        bearer("c-secre"),
        bearer("c-secrett"),
        bearer("C-SECRET"),
        bearer(" c-secret"),
        bearer("c-secret "),
        bearer("gehéim\ud800"),
        bearer("' OR 1=1--"),
        bearer("c-secret") * 2,
        (("authorization", "c-secret"),),
        (("authorization", "Basic c-secret"),),
        (("authorization", b"Bearer c-secret"),),
        (("authorization-bin", b"Bearer c-secret"),),
        (("x-authorization", "Bearer c-secret"),),
    ],
)
def test_without_the_right_secret_nothing_is_told(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    authorizer = Authorizer(Secrets("c-secret", "e-secret"), ACCESS)
    for method in (GENERATE, ATTACH, "/nobody.Knows/This"):
        denial = authorizer.deny(method, metadata)
        assert denial is not None
        assert denial[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "method",
    [
        "/catenary.v1.FleetService/../RouterService/Generate",
        "//catenary.v1.RouterService/Generate",
        "/catenary.v1.RouterService//Generate",
        "/catenary.v1.RouterService/",
        "/catenary.v1.RouterService",
        "catenary.v1.RouterService/Generate",
        "/CATENARY.V1.ROUTERSERVICE/Generate",
        "/catenary.v1.RouterService%2FGenerate",
        "/catenary.v1.EngineService/GetStatus",
        "/grpc.health.v1.Health/../../catenary.v1.RouterService/Generate",
        "/grpc.health.v1.Health",
        "",
        "/",
        "//",
        "///",
    ],
)
def test_what_is_not_granted_is_denied(method: str) -> None:
    for secret in ("c-secret", "e-secret"):
        denial = Authorizer(Secrets("c-secret", "e-secret"), ACCESS).deny(method, bearer(secret))
        assert denial is not None
        assert denial[0] is grpc.StatusCode.PERMISSION_DENIED
    insecure = Authorizer(Secrets(None, None), ACCESS, insecure=True).deny(method, ())
    assert insecure is not None


def test_health_is_open_and_reflection_takes_any_role() -> None:
    authorizer = Authorizer(Secrets("c-secret", "e-secret"), ACCESS)
    assert authorizer.deny("/grpc.health.v1.Health/Check", ()) is None
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert authorizer.deny(reflection, ()) is not None
    assert authorizer.deny(reflection, bearer("c-secret")) is None
    assert authorizer.deny(reflection, bearer("e-secret")) is None


def test_insecure_does_not_switch_a_secret_off() -> None:
    authorizer = Authorizer(Secrets("c-secret", None), ACCESS, insecure=True)
    assert authorizer.deny(GENERATE, ()) is not None
    assert authorizer.deny(ATTACH, bearer("c-secret")) is not None


def test_certificates_grant_by_exact_name() -> None:
    authorizer = Authorizer(Secrets(None, None), ACCESS, certificates=True)
    assert authorizer.deny_certificate(ATTACH, {"x509_common_name": [b"catenary-engine"]}) is None
    assert authorizer.deny_certificate(GENERATE, {"x509_common_name": [b"catenary-engine"]}) is not None
    names = {"x509_subject_alternative_name": [b"localhost", b"catenary-client"]}
    assert authorizer.deny_certificate(GENERATE, names) is None
    for stranger in (b"catenary-client.evil.example", b"xcatenary-client", b"\xff"):
        assert authorizer.deny_certificate(GENERATE, {"x509_common_name": [stranger]}) is not None
    assert authorizer.deny_certificate(GENERATE, {}) is not None
    with_secrets = Authorizer(Secrets("c-secret", None), ACCESS, certificates=True)
    assert with_secrets.deny(GENERATE, ()) is not None


def test_secrets_are_compared_in_constant_time_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    original = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        seen.append(len(one))
        return original(one, other)

    monkeypatch.setattr("catenary.rpc.auth.hmac.compare_digest", compare)
    authorizer = Authorizer(Secrets("c-secret", "e-secret"), ACCESS)
    authorizer.deny(GENERATE, bearer("c-secret"))
    assert seen == [32, 32]
    # Nothing that is compared otherwise is a secret.
    assert set(re.findall(r"(\w+) ==", inspect.getsource(Authorizer))) == {"prefix", "key"}


@pytest.mark.parametrize("prefix", ["catenary.v1.RouterService", "/a.B", "/a/b/", "a.B/"])
def test_a_prefix_that_would_match_nothing_is_a_defect(prefix: str) -> None:
    with pytest.raises(ValueError, match="access prefix"):
        Authorizer(Secrets("c-secret", None), {prefix: frozenset({Role.CLIENT})})


def test_secrets_do_not_show_themselves() -> None:
    assert "c-secret" not in f"{Secrets('c-secret', None)!r} {Secrets('c-secret', None)}"


def test_secrets_come_from_files_then_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_CLIENT_SECRET", "from-env")
    monkeypatch.delenv("CATENARY_ENGINE_SECRET", raising=False)
    file = tmp_path / "secret"
    file.write_text("from-file\n")
    assert RpcConfig().secrets() == Secrets("from-env", None)
    assert RpcConfig(client_secret_file=file).secrets() == Secrets("from-file", None)
    monkeypatch.setenv("CATENARY_ENGINE_SECRET", "from-env")
    with pytest.raises(ConfigError, match="the same"):
        RpcConfig().secrets()


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", b"gl\xc3\xbcck", b"x" * 513])
def test_an_unusable_secret_is_refused_without_being_shown(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="one line of 1 to 512") as error:
        read_secret(file, "CATENARY_NO_SUCH", option="client_secret_file")
    assert "words" not in str(error.value)


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"client_secret_file .*No such file"):
        read_secret(tmp_path / "none", "CATENARY_NO_SUCH", option="client_secret_file")


def test_bad_tls_files_are_refused_before_listening(tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("not a certificate")
    with pytest.raises(StartRefused, match="both tls_cert and tls_key"):
        server_credentials(TlsFiles(text, None, None))
    with pytest.raises(StartRefused, match="not a PEM pair"):
        server_credentials(TlsFiles(text, text, None))
    with pytest.raises(StartRefused, match="tls_ca"):
        server_credentials(TlsFiles(text, text, None, require_client_cert=True))
    with pytest.raises(StartRefused, match="no PEM certificate"):
        channel_credentials(TlsFiles(None, None, text))
    with pytest.raises(StartRefused, match="No such file"):
        channel_credentials(TlsFiles(None, None, tmp_path / "none"))
    with pytest.raises(ConfigError):
        RpcConfig(tls_require_client_cert=True).tls()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (common_pb2.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (common_pb2.ERROR_CODE_UNSUPPORTED, grpc.StatusCode.INVALID_ARGUMENT),
        (common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT),
        (common_pb2.ERROR_CODE_MODEL_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (common_pb2.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (common_pb2.ERROR_CODE_DRAINING, grpc.StatusCode.UNAVAILABLE),
        (common_pb2.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (common_pb2.ERROR_CODE_ENGINE_LOST, grpc.StatusCode.UNAVAILABLE),
        (common_pb2.ERROR_CODE_TIMEOUT, grpc.StatusCode.DEADLINE_EXCEEDED),
        (common_pb2.ERROR_CODE_DUPLICATE_REQUEST, grpc.StatusCode.ALREADY_EXISTS),
        (common_pb2.ERROR_CODE_SCHEMA_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
        (common_pb2.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
        (common_pb2.ERROR_CODE_UNSPECIFIED, grpc.StatusCode.INTERNAL),
    ],
)
def test_every_error_code_has_its_status(
    code: common_pb2.ErrorCode.ValueType, status: grpc.StatusCode
) -> None:
    assert refuse(code, "text").status is status


def failed(code: grpc.StatusCode, details: str, *trailer: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailer)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)


def test_an_error_comes_back_from_its_trailer() -> None:
    error = refuse(
        common_pb2.ERROR_CODE_OVERLOADED, "full", param="n", retryable=True, retry_after_ms=7
    ).error
    call = failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (ERROR_TRAILER, error.SerializeToString()))
    assert error_of(call) == error


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_an_error_without_trailer_has_a_fixed_text(code: grpc.StatusCode) -> None:
    for trailer in ((), ((ERROR_TRAILER, b"\xff\xff"),)):
        error = error_of(failed(code, "ipv4:10.0.0.7:7070: Connection refused", *trailer))
        assert error.code != common_pb2.ERROR_CODE_UNSPECIFIED
        assert error.message
        assert "10.0.0.7" not in error.message


def test_long_texts_are_cut_to_fit_the_trailer() -> None:
    error = refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, "x" * 100_000, param="y" * 100_000).error
    assert len(error.SerializeToString()) < 8192


def test_option_names_are_those_that_c_core_knows() -> None:
    server = dict(
        server_options(max_message_mib=1, max_concurrent_streams=2, keepalive_s=30, max_connection_age_s=0)
    )
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert server["grpc.so_reuseport"] == 0
    assert not any("min_recv_ping" in name for name in server)
    assert "grpc.max_connection_age_ms" not in server
    channel = dict(channel_options(max_message_mib=1, keepalive_s=30))
    assert channel["grpc.enable_retries"] == 0
    assert channel["grpc.keepalive_time_ms"] == 30_000
    assert (
        channel["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    )
    assert channel["grpc.dns_min_time_between_resolutions_ms"] == 2_000
    assert "pick_first" in str(channel["grpc.service_config"])


async def test_the_board_pins_readiness_and_tells_watchers_the_newest_state() -> None:
    board = HealthBoard(["a"])
    assert board.statuses() == {"": False, "a": False}
    watch = board.watch("a")
    assert await anext(watch) is False
    for serving in (True, False, True):
        board.set("a", serving)
    assert await anext(watch) is True
    board.set("", True)
    board.pin()
    board.set("a", True)
    board.set("later", True)
    assert await anext(watch) is False
    assert board.statuses() == {"": True, "a": False, "later": False}
    board.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    # A change that came while the reader was busy with the one before is told before the end.
    busy = HealthBoard(["a"])
    busy.set("a", True)
    watch = busy.watch("a")
    assert await anext(watch) is True
    busy.pin()
    busy.close()
    assert [state async for state in watch] == [False]
    assert board.get("") is False
    late = board.watch("a")
    assert [state async for state in late] == [False]
    assert board.get("nobody") is None
