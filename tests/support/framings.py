"""Heads and framings of HTTP requests, as clients, proxies and attackers send them, and how each is read.

`/smuggled` stands where bytes of a body would be taken for a request by a reader that is wrong about its end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framing:
    """Bytes of one request and verdicts on them.

    Fields:
        name: unlike all others.
        data: what is sent on a new connection.
        ours: `STATUS/BODY @CONSUMED STATE`: status of the answer, bytes of the body that the application gets
            (- if it sees no request), bytes after which the request is whole or is refused, and whether the
            connection stays open. `waits`: there is no answer, for more is needed.
        h11: how h11 reads it: bytes of the body, `refused`, or `waits` for more.
        node: how node 20's HTTP server (llhttp in its strict mode) reads it.
    """

    name: str
    data: bytes
    ours: str
    h11: str
    node: str


def _post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = b"".join(field + b"\r\n" for field in (b"Host: a", *fields))
    return b"POST /x HTTP/" + version + b"\r\n" + lines + b"\r\n" + body


def _get(*fields: bytes, line: bytes = b"GET /x HTTP/1.1", body: bytes = b"") -> bytes:
    return line + b"\r\n" + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


HOST = b"Host: a"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
LENGTH = b"Content-Length: %d" % len(SMUGGLED)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
CHUNKED = b"Transfer-Encoding: chunked"
OFFER = (b"Connection: Upgrade", b"Upgrade: h2c")
H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAA")
SOCKET = (b"Connection: keep-alive, Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")

FRAMINGS = (
    # Plain.
    Framing("no body", _get(HOST), "200/0 @28 open", "0", "0"),
    Framing("length", _post(LENGTH, body=SMUGGLED), "200/35 @84 open", "35", "35"),
    Framing("length of a GET", _get(HOST, LENGTH, body=SMUGGLED), "200/35 @83 open", "35", "35"),
    Framing("length zero", _post(b"Content-Length: 0"), "200/0 @48 open", "0", "0"),
    Framing(
        "length with zeros before it",
        _post(b"Content-Length: 005", body=b"abcde"),
        "200/5 @55 open",
        "5",
        "5",
    ),
    Framing("POST without a length", _post(), "200/0 @29 open", "0", "0"),
    Framing(
        "body shorter than its length", _post(b"Content-Length: 9", body=b"abc"), "waits", "waits", "waits"
    ),
    Framing("chunks", _post(CHUNKED, body=CHUNKS), "200/35 @103 open", "35", "35"),
    Framing(
        "chunks, capitals", _post(b"TRANSFER-ENCODING: CHUNKED", body=CHUNKS), "200/35 @103 open", "35", "35"
    ),
    Framing(
        "chunks, tab", _post(b"Transfer-Encoding:\tchunked", body=CHUNKS), "200/35 @103 open", "35", "35"
    ),
    Framing(
        "chunks, blanks", _post(b"Transfer-Encoding:  chunked  ", body=CHUNKS), "200/35 @106 open", "35", "35"
    ),
    Framing("close", _post(b"Connection: close", LENGTH, body=SMUGGLED), "200/35 @103 closed", "35", "35"),
    Framing(
        "close, chunks", _post(b"Connection: close", CHUNKED, body=CHUNKS), "200/35 @122 closed", "35", "35"
    ),
    Framing("expect", _post(b"Expect: 100-continue", LENGTH, body=SMUGGLED), "200/35 @106 open", "35", "35"),
    Framing(
        "expect, chunks", _post(b"Expect: 100-Continue", CHUNKED, body=CHUNKS), "200/35 @125 open", "35", "35"
    ),
    Framing(
        "empty lines before", b"\r\n\r\n" + _post(LENGTH, body=SMUGGLED), "200/35 @88 open", "refused", "35"
    ),
    Framing(
        "empty line behind the body", _post(LENGTH, body=SMUGGLED + b"\r\n"), "200/35 @84 open", "35", "35"
    ),
    Framing("absolute URL", _get(HOST, line=b"GET http://a/x HTTP/1.1"), "200/0 @36 open", "0", "0"),
    Framing(
        "absolute URL without a path", _get(HOST, line=b"GET http://a HTTP/1.1"), "200/0 @34 open", "0", "0"
    ),
    Framing(
        "absolute URL, query only", _get(HOST, line=b"GET http://a?b=c HTTP/1.1"), "200/0 @38 open", "0", "0"
    ),
    Framing(
        "absolute URL of another host",
        _get(HOST, line=b"GET http://b/x HTTP/1.1"),
        "400/- @36 closed",
        "0",
        "0",
    ),
    Framing(
        "absolute URL with a user",
        _get(HOST, line=b"GET http://u@a/x HTTP/1.1"),
        "400/- @38 closed",
        "0",
        "0",
    ),
    Framing(
        "absolute URL of no web", _get(HOST, line=b"GET ftp://a/x HTTP/1.1"), "400/- @35 closed", "0", "0"
    ),
    Framing("asterisk", _get(HOST, line=b"OPTIONS * HTTP/1.1"), "200/0 @31 open", "0", "0"),
    # Offers to upgrade.
    Framing("upgrade, no body", _get(HOST, *OFFER), "200/0 @63 open", "0", "0"),
    Framing("upgrade, length", _post(*OFFER, LENGTH, body=SMUGGLED), "200/35 @119 open", "35", "35"),
    Framing("upgrade, chunks", _post(*OFFER, CHUNKED, body=CHUNKS), "200/35 @138 open", "35", "35"),
    Framing(
        "upgrade behind the length", _post(LENGTH, *OFFER, body=SMUGGLED), "200/35 @119 open", "35", "35"
    ),
    Framing(
        "upgrade as Java and curl offer it",
        _post(*H2C, LENGTH, body=SMUGGLED),
        "200/35 @169 open",
        "35",
        "35",
    ),
    Framing("upgrade to a socket", _get(HOST, *SOCKET), "200/0 @108 open", "0", "0"),
    Framing(
        "upgrade to a socket, length", _post(*SOCKET, LENGTH, body=SMUGGLED), "200/35 @164 open", "35", "35"
    ),
    Framing(
        "upgrade to a socket, chunks", _post(*SOCKET, CHUNKED, body=CHUNKS), "200/35 @183 open", "35", "35"
    ),
    Framing(
        "upgrade to foo",
        _post(OFFER[0], b"Upgrade: foo", LENGTH, body=SMUGGLED),
        "200/35 @119 open",
        "35",
        "35",
    ),
    Framing(
        "upgrade to a list",
        _post(OFFER[0], b"Upgrade: a/1, b", LENGTH, body=SMUGGLED),
        "200/35 @122 open",
        "35",
        "35",
    ),
    Framing("upgrade twice", _post(*OFFER, *SOCKET, LENGTH, body=SMUGGLED), "200/35 @199 open", "35", "35"),
    Framing(
        "upgrade, blank", _post(OFFER[0], b"Upgrade:", LENGTH, body=SMUGGLED), "200/35 @115 open", "35", "35"
    ),
    Framing(
        "upgrade without Connection", _post(OFFER[1], LENGTH, body=SMUGGLED), "200/35 @98 open", "35", "35"
    ),
    Framing(
        "Connection: upgrade alone", _post(OFFER[0], LENGTH, body=SMUGGLED), "200/35 @105 open", "35", "35"
    ),
    Framing(
        "upgrade and close",
        _post(b"Connection: close, upgrade", OFFER[1], LENGTH, body=SMUGGLED),
        "200/35 @126 closed",
        "35",
        "35",
    ),
    Framing(
        "upgrade and expect",
        _post(*OFFER, b"Expect: 100-continue", LENGTH, body=SMUGGLED),
        "200/35 @141 open",
        "35",
        "35",
    ),
    Framing(
        "upgrade in HTTP/1.0",
        _post(*OFFER, LENGTH, body=SMUGGLED, version=b"1.0"),
        "200/35 @119 closed",
        "35",
        "35",
    ),
    Framing(
        "upgrade, length and chunks",
        _post(*OFFER, LENGTH, CHUNKED, body=CHUNKS),
        "400/- @100 closed",
        "35",
        "refused",
    ),
    Framing(
        "upgrade, two lengths",
        _post(*OFFER, b"Content-Length: 1", LENGTH, body=SMUGGLED),
        "400/- @98 closed",
        "refused",
        "refused",
    ),
    Framing(
        "upgrade, unknown coding",
        _post(*OFFER, b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
        "400/- @98 closed",
        "refused",
        "35",
    ),
    Framing(
        "upgrade in a trailer",
        _post(CHUNKED, body=b"0\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
        "200/0 @97 open",
        "0",
        "0",
    ),
    Framing(
        "connect",
        _get(HOST, line=b"CONNECT a:80 HTTP/1.1", body=SMUGGLED),
        "400/- @34 closed",
        "0",
        "refused",
    ),
    Framing(
        "connect, path and length",
        _get(HOST, LENGTH, line=b"CONNECT /x HTTP/1.1", body=SMUGGLED),
        "400/- @52 closed",
        "35",
        "refused",
    ),
    Framing(
        "HTTP/2 at once", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED, "400/- @24 closed", "0", "refused"
    ),
    # Lengths that cannot be told.
    Framing(
        "two lengths",
        _post(b"Content-Length: 1", LENGTH, body=SMUGGLED),
        "400/- @63 closed",
        "refused",
        "refused",
    ),
    Framing("two equal lengths", _post(LENGTH, LENGTH, body=SMUGGLED), "400/- @64 closed", "35", "refused"),
    Framing(
        "list of equal lengths",
        _post(b"Content-Length: 5, 5", body=b"abcde"),
        "400/- @45 closed",
        "5",
        "refused",
    ),
    Framing(
        "negative length",
        _post(b"Content-Length: -5", body=SMUGGLED),
        "400/- @44 closed",
        "refused",
        "refused",
    ),
    Framing(
        "length with a plus",
        _post(b"Content-Length: +5", body=b"abcde"),
        "400/- @44 closed",
        "refused",
        "refused",
    ),
    Framing(
        "hexadecimal length",
        _post(b"Content-Length: 0x5", body=b"abcde"),
        "400/- @45 closed",
        "refused",
        "refused",
    ),
    Framing(
        "length with a fraction",
        _post(b"Content-Length: 5.0", body=b"abcde"),
        "400/- @45 closed",
        "refused",
        "refused",
    ),
    Framing(
        "blank length", _post(b"Content-Length:", body=SMUGGLED), "400/- @45 closed", "refused", "refused"
    ),
    Framing(
        "length with a blank in it",
        _post(b"Content-Length: 3 5", body=SMUGGLED),
        "400/- @46 closed",
        "refused",
        "refused",
    ),
    Framing(
        "length that is no number",
        _post(b"Content-Length: five", body=SMUGGLED),
        "400/- @44 closed",
        "refused",
        "refused",
    ),
    Framing(
        "length beyond 64 bits",
        _post(b"Content-Length: 18446744073709551617", body=SMUGGLED),
        "400/- @63 closed",
        "waits",
        "refused",
    ),
    Framing("length and chunks", _post(LENGTH, CHUNKED, body=CHUNKS), "400/- @65 closed", "35", "refused"),
    Framing("chunks and length", _post(CHUNKED, LENGTH, body=CHUNKS), "400/- @70 closed", "35", "refused"),
    Framing(
        "chunks and length zero",
        _post(CHUNKED, b"Content-Length: 0", body=CHUNKS),
        "400/- @70 closed",
        "35",
        "refused",
    ),
    # Codings.
    Framing(
        "coding identity",
        _post(b"Transfer-Encoding: identity", LENGTH, body=SMUGGLED),
        "400/- @71 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunked, identity",
        _post(b"Transfer-Encoding: chunked, identity", body=CHUNKS),
        "400/- @54 closed",
        "refused",
        "refused",
    ),
    Framing(
        "identity, chunked",
        _post(b"Transfer-Encoding: identity, chunked", body=CHUNKS),
        "400/- @67 closed",
        "refused",
        "35",
    ),
    Framing(
        "gzip, chunked",
        _post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
        "400/- @63 closed",
        "refused",
        "35",
    ),
    Framing("chunked twice", _post(CHUNKED, CHUNKED, body=CHUNKS), "400/- @75 closed", "refused", "refused"),
    Framing(
        "xchunked",
        _post(b"Transfer-Encoding: xchunked", body=CHUNKS),
        "400/- @58 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunkedx",
        _post(b"Transfer-Encoding: chunkedx", body=CHUNKS),
        "400/- @58 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunked in quotes",
        _post(b'Transfer-Encoding: "chunked"', body=CHUNKS),
        "400/- @59 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunked with a parameter",
        _post(b"Transfer-Encoding: chunked;q=1", body=CHUNKS),
        "400/- @61 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunked behind a vertical tab",
        _post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
        "400/- @47 closed",
        "refused",
        "refused",
    ),
    Framing(
        "blank coding and length",
        _post(b"Transfer-Encoding:", LENGTH, body=SMUGGLED),
        "400/- @69 closed",
        "refused",
        "35",
    ),
    Framing("blank coding", _post(b"Transfer-Encoding:", body=CHUNKS), "400/- @49 closed", "refused", "0"),
    Framing(
        "chunks in HTTP/1.0", _post(CHUNKED, body=CHUNKS, version=b"1.0"), "400/- @57 closed", "35", "35"
    ),
    Framing(
        "underscore for a hyphen",
        _post(b"Transfer_Encoding: chunked", LENGTH, body=SMUGGLED),
        "200/35 @112 open",
        "35",
        "35",
    ),
    # Chunks.
    Framing(
        "chunk sizes in capitals",
        _post(CHUNKED, body=b"A\r\n0123456789\r\n0\r\n\r\n"),
        "200/10 @77 open",
        "10",
        "10",
    ),
    Framing(
        "zeros before a chunk's size",
        _post(CHUNKED, body=b"0005\r\nabcde\r\n000\r\n\r\n"),
        "200/5 @77 open",
        "5",
        "5",
    ),
    Framing(
        "chunk extension", _post(CHUNKED, body=b"5;a=b\r\nabcde\r\n0;c\r\n\r\n"), "200/5 @78 open", "5", "5"
    ),
    Framing(
        "quoted chunk extension",
        _post(CHUNKED, body=b'5;a="b;c"\r\nabcde\r\n0\r\n\r\n'),
        "200/5 @80 open",
        "5",
        "5",
    ),
    Framing(
        "line feed in a chunk extension",
        _post(CHUNKED, body=b"5;a\nabcde\r\n0\r\n\r\n"),
        "400/- @61 closed",
        "refused",
        "refused",
    ),
    Framing(
        "trailer", _post(CHUNKED, body=b"5\r\nabcde\r\n0\r\nX-Sum: 1\r\n\r\n"), "200/5 @82 open", "5", "5"
    ),
    Framing(
        "length in a trailer",
        _post(CHUNKED, body=b"0\r\nContent-Length: 35\r\n\r\n"),
        "400/- @75 closed",
        "0",
        "refused",
    ),
    Framing(
        "chunk size beyond 64 bits",
        _post(CHUNKED, body=b"10000000000000005\r\nabcde\r\n0\r\n\r\n"),
        "400/- @74 closed",
        "waits",
        "refused",
    ),
    Framing(
        "huge chunk size", _post(CHUNKED, body=b"ffffffff\r\nabcde\r\n0\r\n\r\n"), "waits", "waits", "waits"
    ),
    Framing(
        "negative chunk size",
        _post(CHUNKED, body=b"-5\r\nabcde\r\n0\r\n\r\n"),
        "400/- @58 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunk size with 0x",
        _post(CHUNKED, body=b"0x5\r\nabcde\r\n0\r\n\r\n"),
        "400/- @59 closed",
        "refused",
        "refused",
    ),
    Framing(
        "no chunk size",
        _post(CHUNKED, body=b"\r\nabcde\r\n0\r\n\r\n"),
        "400/- @58 closed",
        "refused",
        "refused",
    ),
    Framing(
        "blank behind a chunk size",
        _post(CHUNKED, body=b"5 \r\nabcde\r\n0\r\n\r\n"),
        "400/- @59 closed",
        "5",
        "refused",
    ),
    Framing(
        "chunk longer than its size",
        _post(CHUNKED, body=b"3\r\nabcde\r\n0\r\n\r\n"),
        "400/- @64 closed",
        "refused",
        "refused",
    ),
    Framing(
        "chunk without its end",
        _post(CHUNKED, body=b"5\r\nabcde0\r\n\r\n"),
        "400/- @66 closed",
        "refused",
        "refused",
    ),
    Framing(
        "line feeds between chunks",
        _post(CHUNKED, body=b"5\nabcde\n0\n\n"),
        "400/- @59 closed",
        "waits",
        "refused",
    ),
    # Lines.
    Framing("line feeds", b"GET /x HTTP/1.1\nHost: a\n\n", "400/- @16 closed", "0", "refused"),
    Framing(
        "line feed behind a field",
        b"GET /x HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
        "400/- @25 closed",
        "0",
        "refused",
    ),
    Framing("carriage return in a value", _get(HOST, b"X: a\rb"), "400/- @32 closed", "refused", "refused"),
    Framing(
        "carriage return for a line", b"GET /x HTTP/1.1\rHost: a\r\r", "400/- @17 closed", "waits", "refused"
    ),
    Framing("folded field", _get(HOST, b"X: a\r\n b"), "400/- @33 closed", "0", "refused"),
    Framing(
        "folded length", _post(b"Content-Length:\r\n 35", body=SMUGGLED), "400/- @45 closed", "35", "refused"
    ),
    Framing(
        "folded coding",
        _post(b"Transfer-Encoding:\r\n chunked", body=CHUNKS),
        "400/- @48 closed",
        "35",
        "refused",
    ),
    Framing(
        "blank before the first field",
        b"GET /x HTTP/1.1\r\n Host: a\r\n\r\n",
        "400/- @18 closed",
        "refused",
        "refused",
    ),
    Framing(
        "blank before a colon",
        _post(b"Content-Length : 35", body=SMUGGLED),
        "400/- @42 closed",
        "refused",
        "refused",
    ),
    Framing("blank in a name", _get(HOST, b"X Y: a"), "400/- @28 closed", "refused", "refused"),
    Framing("no colon", _get(HOST, b"X"), "400/- @28 closed", "refused", "refused"),
    Framing("no name", _get(HOST, b": a"), "400/- @27 closed", "refused", "refused"),
    Framing("NUL in a value", _get(HOST, b"X: a\0b"), "400/- @31 closed", "refused", "refused"),
    Framing("NUL in a name", _get(HOST, b"X\0: a"), "400/- @28 closed", "refused", "refused"),
    Framing("control character in a value", _get(HOST, b"X: a\x01b"), "400/- @31 closed", "0", "refused"),
    Framing("Latin-1 in a value", _get(HOST, b"X: \xe9"), "200/0 @34 open", "0", "0"),
    Framing(
        "two blanks before the URL", _get(HOST, line=b"GET  /x HTTP/1.1"), "200/0 @29 open", "refused", "0"
    ),
    Framing(
        "blank behind the version",
        _get(HOST, line=b"GET /x HTTP/1.1 "),
        "400/- @16 closed",
        "refused",
        "refused",
    ),
    Framing(
        "blank in the URL", _get(HOST, line=b"GET /x y HTTP/1.1"), "400/- @8 closed", "refused", "refused"
    ),
    Framing("no version", b"GET /x\r\n\r\n", "400/- @10 closed", "refused", "0"),
    Framing("HTTP/1.2", _get(HOST, line=b"GET /x HTTP/1.2"), "400/- @15 closed", "0", "refused"),
    Framing("HTTP/2.0", _get(HOST, line=b"GET /x HTTP/2.0"), "400/- @28 closed", "0", "0"),
    Framing("unknown method", _get(HOST, line=b"FROB /x HTTP/1.1"), "400/- @2 closed", "0", "refused"),
    Framing("small method", _get(HOST, line=b"get /x HTTP/1.1"), "400/- @1 closed", "0", "refused"),
    Framing("NUL in the URL", _get(HOST, line=b"GET /x\0 HTTP/1.1"), "400/- @7 closed", "refused", "refused"),
    Framing(
        "bytes beyond ASCII in the URL",
        _get(HOST, line=b"GET /\xc3\xa9 HTTP/1.1"),
        "400/- @6 closed",
        "refused",
        "refused",
    ),
    Framing(
        "TLS on a plain port",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "400/- @1 closed",
        "refused",
        "refused",
    ),
    # HTTP/1.0 and hosts.
    Framing("HTTP/1.0", _get(line=b"GET /x HTTP/1.0"), "200/0 @19 closed", "0", "0"),
    Framing(
        "HTTP/1.0 kept alive",
        _post(b"Connection: keep-alive", LENGTH, body=SMUGGLED, version=b"1.0"),
        "200/35 @108 closed",
        "35",
        "35",
    ),
    Framing("HTTP/1.0 without a length", _post(body=SMUGGLED, version=b"1.0"), "200/0 @29 closed", "0", "0"),
    Framing("no host", _get(), "400/- @19 open", "refused", "waits"),
    Framing("two hosts", _get(HOST, b"Host: b"), "400/- @37 open", "refused", "0"),
    Framing("blank host", _get(b"Host:"), "400/- @26 open", "0", "0"),
    Framing("host with a path", _get(b"Host: a/b"), "400/- @30 open", "0", "0"),
)
