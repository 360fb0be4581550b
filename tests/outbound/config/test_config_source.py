import asyncio
import gzip
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from router.core.config_document import MAX_DOCUMENT_BYTES, embedded_document, read_document
from router.outbound.config_source import EmbeddedSource, FileSource, HttpSource, config_sources
from router.ports import ConfigSource, ConfigUnavailable
from tests.outbound.config.service import ConfigService, answer
from tests.support.queues import names

pytestmark = pytest.mark.anyio

NAMING = names("EMBEDDED", "/state")
DOCUMENT = b'{"queues": []}'


def only(url: str, token: str | None = None) -> ConfigSource:
    (source,) = config_sources([url], token, NAMING)
    return source


async def failure(source: ConfigSource) -> str:
    with pytest.raises(ConfigUnavailable) as caught:
        await source.fetch()
    return str(caught.value)


@pytest.mark.rule("CFG-2")
async def test_a_document_is_fetched_over_http(service: ConfigService) -> None:
    service.reply = answer(DOCUMENT)

    body = await only(service.url("/config?env=test")).fetch()

    assert body == DOCUMENT
    assert service.requests[0].startswith("GET /config?env=test HTTP/1.1\r\n")
    assert "authorization" not in service.requests[0].lower()


@pytest.mark.rule("CFG-4")
async def test_the_token_goes_only_to_the_origin_of_the_first_url(service: ConfigService) -> None:
    async with ConfigService() as stranger:
        urls = [service.url("/one"), service.url("/two"), stranger.url("/three")]
        sources = config_sources(urls, "hunter2", NAMING)

        for source in sources:
            await source.fetch()

        assert all("Authorization: Bearer hunter2\r\n" in sent for sent in service.requests)
        assert "hunter2" not in stranger.requests[0]


@pytest.mark.rule("CFG-4")
@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("http://host/a", "http://host:80/b", True),
        ("https://host/a", "https://HOST:443/b", True),
        ("https://host/a", "http://host/b", False),
        ("https://host/a", "https://host:444/b", False),
        ("https://host/a", "https://host.evil/b", False),
        ("file:///a", "https://host/b", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(first: str, second: str, same: bool) -> None:
    source = config_sources([first, second], "hunter2", NAMING)[1]

    assert isinstance(source, HttpSource)
    assert ("Authorization: Bearer hunter2" in source._headers) is same


@pytest.mark.rule("CFG-4")
async def test_redirects_are_not_followed(service: ConfigService) -> None:
    service.reply = answer(b"", f"Location: {service.url('/other')}", status="302 Found")

    text = await failure(only(service.url()))

    assert text == "HTTP 302: redirects are not followed"
    assert len(service.requests) == 1


@pytest.mark.rule("CFG-4")
@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "401 Unauthorized"])
async def test_another_status_is_no_document(service: ConfigService, status: str) -> None:
    service.reply = answer(DOCUMENT, status=status)

    assert await failure(only(service.url())) == f"HTTP {status[:3]}"


@pytest.mark.rule("P4")
async def test_a_document_that_is_too_large_is_given_up(service: ConfigService) -> None:
    service.reply = answer(b" " * (MAX_DOCUMENT_BYTES + 1))

    assert "larger than 10485760 bytes" in await failure(only(service.url()))


@pytest.mark.rule("CFG-4")
async def test_a_document_of_the_largest_size_is_taken(service: ConfigService) -> None:
    service.reply = answer(b" " * MAX_DOCUMENT_BYTES)

    assert len(await only(service.url()).fetch()) == MAX_DOCUMENT_BYTES


@pytest.mark.rule("CFG-4")
async def test_a_compressed_document_is_unpacked(service: ConfigService) -> None:
    service.reply = answer(gzip.compress(DOCUMENT), "Content-Encoding: gzip")

    assert await only(service.url()).fetch() == DOCUMENT


@pytest.mark.rule("P4")
@pytest.mark.parametrize(
    ("body", "encoding", "says"),
    [
        (gzip.compress(b" " * (MAX_DOCUMENT_BYTES + 1)), "gzip", "larger than 10485760 bytes"),
        (gzip.compress(DOCUMENT)[:-9], "gzip", "cut short"),
        (b"not gzip at all", "gzip", "damaged"),
        (DOCUMENT, "br", "not asked for"),
    ],
    ids=["a bomb", "cut short", "damaged", "brotli"],
)
async def test_bad_compression_is_no_document(
    service: ConfigService, body: bytes, encoding: str, says: str
) -> None:
    service.reply = answer(body, f"Content-Encoding: {encoding}")

    assert says in await failure(only(service.url()))


@pytest.mark.rule("P4")
async def test_a_bomb_is_not_unpacked_to_its_end(service: ConfigService) -> None:
    service.reply = answer(gzip.compress(bytes(8 * MAX_DOCUMENT_BYTES)), "Content-Encoding: gzip")

    tracemalloc.start()
    await failure(only(service.url()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4 * MAX_DOCUMENT_BYTES


@pytest.mark.rule("P5")
async def test_a_document_in_many_pieces_takes_no_more_memory_than_a_whole_one(
    service: ConfigService,
) -> None:
    chunks = b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"
    service.reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    tracemalloc.start()
    try:
        body = await only(service.url()).fetch()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert body == b" " * 100_000
    assert peak < 16 * len(body)  # a list of the pieces: 50 times


@pytest.mark.rule("CFG-4")
@pytest.mark.parametrize("reply", [b"", b"nonsense\r\n\r\n", answer(DOCUMENT)[:-3]])
async def test_a_broken_answer_is_no_document(service: ConfigService, reply: bytes) -> None:
    service.reply = reply

    assert "no usable answer" in await failure(only(service.url()))


@pytest.mark.rule("CFG-3")
@pytest.mark.parametrize("reply", [b"", answer(DOCUMENT)[:-3]])
async def test_an_attempt_is_limited_in_time_as_a_whole(
    service: ConfigService, reply: bytes
) -> None:
    service.reply, service.hangs = reply, True
    source = HttpSource(service.url(), None, timeout=0.2)

    assert await failure(source) == "no complete answer within 0.2 s"


@pytest.mark.rule("CFG-4")
async def test_a_fetch_can_be_stopped_at_once(service: ConfigService) -> None:
    service.reply, service.hangs = b"", True

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await only(service.url()).fetch()


@pytest.mark.rule("CFG-4")
async def test_a_refused_connection_is_told_without_a_trace_of_credentials() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    source = only(f"http://user:hunter2@127.0.0.1:{port}/config?token=hunter2", "hunter2")

    text = await failure(source)

    assert text.startswith("cannot connect: ")
    assert "hunter2" not in text + source.name + repr(source)


@pytest.mark.rule("CFG-4")
async def test_credentials_in_the_url_are_sent_and_not_shown(service: ConfigService) -> None:
    source = only(service.url(credentials="user:hunter2@"))

    await source.fetch()

    assert "Authorization: Basic dXNlcjpodW50ZXIy\r\n" in service.requests[0]
    assert source.name == service.url()


@pytest.mark.rule("CFG-4")
async def test_proxies_of_the_environment_are_not_used(
    service: ConfigService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    service.reply = answer(DOCUMENT)

    assert await only(service.url()).fetch() == DOCUMENT


@pytest.mark.rule("CFG-2")
async def test_a_document_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my config.json"
    path.write_bytes(DOCUMENT)

    source = only(path.as_uri())

    assert isinstance(source, FileSource)
    assert source.name == path.as_uri()
    assert await source.fetch() == DOCUMENT


@pytest.mark.rule("CFG-4")
async def test_a_file_that_cannot_be_read_is_no_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (MAX_DOCUMENT_BYTES + 1))

    texts = [
        await failure(FileSource((tmp_path / name).as_uri()))
        for name in ("missing", "", "pipe", "large")
    ]

    assert texts == [
        "No such file or directory",
        "not a regular file",
        "not a regular file",
        "the document is larger than 10485760 bytes",
    ]


@pytest.mark.rule("CFG-4")
async def test_without_a_url_the_router_configures_itself() -> None:
    (source,) = config_sources([], "hunter2", NAMING)

    document = read_document(await source.fetch(), NAMING)

    assert isinstance(source, EmbeddedSource)
    assert source.name == "embedded"
    assert document == read_document(embedded_document(NAMING), NAMING)
