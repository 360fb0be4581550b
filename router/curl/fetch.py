"""One GET in a separate thread: whatever the server does, it costs the event loop nothing.

A server can answer in a million pieces, trickle or never end, and its name can hang. libcurl works
without Python's lock, and a thread that hangs is left alone: it ends when the system answers.
"""

import asyncio
from _thread import start_new_thread
from contextlib import suppress
from typing import Final

import pycurl
from msgspec import Struct

from router.curl import ascii_url, new_handle

GRACE_SECONDS: Final = 1.0  # after its time, for libcurl to end by itself
_UNCONNECTED: Final = frozenset(
    {pycurl.E_COULDNT_RESOLVE_HOST, pycurl.E_COULDNT_CONNECT, pycurl.E_SSL_CONNECT_ERROR}
    | {pycurl.E_PEER_FAILED_VERIFICATION}
)


class FetchFailed(Exception):
    """There is no answer, or not a whole one."""


class Fetched(Struct, frozen=True):
    status: int
    body: bytes  # as it was sent
    encoding: str  # of the body
    is_too_long: bool  # then the body is not whole


async def fetch(url: str, headers: list[str], *, max_bytes: int, timeout: float) -> Fetched:
    """Fetch a URL. Raises FetchFailed, and TimeoutError after the time limit for all of it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Fetched | str] = loop.create_future()

    def settle(result: Fetched | str) -> None:
        if not done.done():  # else given up
            done.set_result(result)

    def work() -> None:
        result: Fetched | str
        try:
            result = _get(url, headers, max_bytes, timeout + GRACE_SECONDS)
        except pycurl.error as error:
            code, text = error.args
            result = (
                f"cannot connect: {text}" if code in _UNCONNECTED else f"no usable answer: {text}"
            )
        except Exception as error:  # noqa: BLE001 - the caller must get it, whatever it is
            result = f"no usable answer: {type(error).__name__}"
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(settle, result)

    try:
        start_new_thread(work, ())  # one that hangs does not hold up the end of the process
    except RuntimeError:
        raise FetchFailed("no thread is left") from None
    async with asyncio.timeout(timeout):
        result = await done
    if isinstance(result, str):
        raise FetchFailed(result)
    return result


def _get(url: str, headers: list[str], max_bytes: int, timeout: float) -> Fetched:
    body = bytearray()  # not a list: a server may send a byte at a time
    encoding, is_too_long = "", False

    def on_body(chunk: bytes) -> int | None:
        nonlocal body, is_too_long
        is_too_long = len(body) + len(chunk) > max_bytes
        if is_too_long:
            return 0  # libcurl ends the transfer
        body += chunk
        return None

    def on_header(line: bytes) -> None:
        nonlocal encoding
        name, _, value = line.partition(b":")
        if name.lower() == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()

    easy = new_handle()
    try:
        easy.setopt(pycurl.URL, ascii_url(url))
        easy.setopt(pycurl.HTTPHEADER, headers)
        easy.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        easy.setopt(pycurl.PROXY, "")  # "" also keeps the environment's away
        easy.setopt(pycurl.TIMEOUT_MS, round(timeout * 1000))
        easy.setopt(pycurl.WRITEFUNCTION, on_body)
        easy.setopt(pycurl.HEADERFUNCTION, on_header)
        try:
            easy.perform()
        except pycurl.error:
            if not is_too_long:
                raise
        status: int = easy.getinfo(pycurl.RESPONSE_CODE)
    finally:
        easy.close()
    return Fetched(status, bytes(body), encoding, is_too_long)
