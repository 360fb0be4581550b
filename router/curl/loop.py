"""libcurl on the running event loop: POST one request, get one answer.

libcurl implements the protocols. It says which sockets to watch (`router.curl.sockets`) and when to
wake it. Only this package uses pycurl.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, NamedTuple, Self

import pycurl
from msgspec import Struct

from router.core.leadership import Leadership
from router.core.outcome import MAX_REPLY_BYTES, Answer, Cause, NoReply, Reply
from router.core.target import BadTarget, read_target
from router.core.trial import Timings
from router.curl import new_handle
from router.curl.resolver import (
    Blame,
    HostAddresses,
    LookUp,
    Resolver,
    TooManyLookUps,
    Unresolved,
    system_look_up,
)
from router.curl.sockets import watch_sockets

KEEP_ALIVE_SECONDS: Final = 60  # TCP probes keep a 15-minute delivery alive behind a NAT
OVERRULED: Final = "not sent: this router is no longer the primary"
NO_DESCRIPTORS: Final = "not sent: the router has no file descriptor left (see ulimit -n)"
FAULT_IS_HERE: Final = "the fault is here"
NO_NAMES: Final = NoReply(Cause.NO_NAMES, f"{FAULT_IS_HERE}: no name can be resolved")
NO_PROXY: Final = NoReply(Cause.NO_PROXY, f"{FAULT_IS_HERE}: the proxy cannot be used")
PROXY_REFUSES_US: Final = NoReply(
    Cause.NO_CREDENTIALS, f"{FAULT_IS_HERE}: the proxy does not take the router's credentials"
)
MAX_PIECES: Final = 65_536  # of a reply: 1 MiB in chunks of 16 bytes
TURN_SECONDS: Final = 0.05  # then the loop's other work comes first
DNS_CACHE_SECONDS: Final = 600  # libcurl keeps what we resolved; far longer than we use it

_HTTP_VERSIONS: Final = {
    "HTTP_2": pycurl.CURL_HTTP_VERSION_2TLS,  # by ALPN; plain http stays HTTP/1.1
    "HTTP_1_1": pycurl.CURL_HTTP_VERSION_1_1,
}

_ANY_EVENT: Final = 0  # libcurl looks for itself, as it does anyway
_NO_WAIT: Final = (pycurl.SOCKET_TIMEOUT,)  # what waits for no socket

# What a result code of libcurl means, if it is no fault of the router.
_CAUSES: Final = {
    pycurl.E_UNSUPPORTED_PROTOCOL: Cause.BROKEN,  # of the reply: it is no HTTP
    pycurl.E_URL_MALFORMAT: Cause.BAD_REQUEST,
    pycurl.E_COULDNT_RESOLVE_HOST: Cause.NETWORK,
    pycurl.E_COULDNT_CONNECT: Cause.NETWORK,
    pycurl.E_FTP_WEIRD_SERVER_REPLY: Cause.BROKEN,  # the name is history: any protocol
    pycurl.E_HTTP2: Cause.BROKEN,
    pycurl.E_PARTIAL_FILE: Cause.BROKEN,
    pycurl.E_SSL_CONNECT_ERROR: Cause.BROKEN,
    pycurl.E_GOT_NOTHING: Cause.BROKEN,
    pycurl.E_SEND_ERROR: Cause.BROKEN,
    pycurl.E_RECV_ERROR: Cause.BROKEN,
    pycurl.E_SSL_CIPHER: Cause.BROKEN,
    pycurl.E_PEER_FAILED_VERIFICATION: Cause.BROKEN,
    pycurl.E_BAD_CONTENT_ENCODING: Cause.BROKEN,
    pycurl.E_SSL_SHUTDOWN_FAILED: Cause.BROKEN,
    pycurl.E_NO_CONNECTION_AVAILABLE: Cause.NETWORK,
    pycurl.E_SSL_INVALIDCERTSTATUS: Cause.BROKEN,
    92: Cause.BROKEN,  # CURLE_HTTP2_STREAM; pycurl has no names for this one and the next two
    97: Cause.NETWORK,  # CURLE_PROXY: a proxy that works cannot reach the target
    100: Cause.BROKEN,  # CURLE_TOO_LARGE: the reply's headers
}
_OWN_CERTIFICATES: Final = frozenset({pycurl.E_SSL_CERTPROBLEM, pycurl.E_SSL_CACERT_BADFILE})
_UNCONNECTED: Final = frozenset(
    {pycurl.E_COULDNT_RESOLVE_PROXY, pycurl.E_COULDNT_CONNECT, pycurl.E_OPERATION_TIMEDOUT}
)
_E_PROXY: Final = 97  # CURLE_PROXY: of a SOCKS proxy
_PROXY_ERROR: Final = 0x20003B  # CURLINFO_PROXY_ERROR, and these are its values (CURLPX_…):
_CANNOT_REACH_TARGET: Final = frozenset({*range(19, 25), 27})  # refused, no route, no such name
_REFUSES_CREDENTIALS: Final = frozenset({12, 33})

_NO_SUCCESS: Final = 300  # and above: the only replies whose headers are looked at
_NO_SOCKET: Final[int] = pycurl.SOCKET_BAD
_OK: Final[int] = pycurl.PREREQFUNC_OK
_ABORT: Final[int] = pycurl.PREREQFUNC_ABORT

_NONE_LEFT: Final = {errno.EMFILE, errno.ENFILE}
_GIVEN_UP: Final = NoReply(Cause.UNFORESEEN)  # by the caller: it is not read

Headers = Sequence[str | bytes]  # whole lines; bytes cost less
RefuseAddress = Callable[[str, int], str | None]  # ip, port → why not, or None


class Place(NamedTuple):
    """A host that has to be looked up, and the port there."""

    host: str
    port: int


class CurlOptions(Struct, frozen=True, kw_only=True):
    """The options that all requests share."""

    http_version: str = "HTTP_2"
    proxy: str | None = None
    ca_file: str | None = None  # None: those of `new_handle`
    connect_timeout: float = 30.0
    max_connections: int = 1000  # kept open for reuse, over all origins
    max_at_once: int = 0  # connections in use, more requests wait; 0: as many as there are requests
    idle_seconds: int = 60  # a connection unused for longer is closed, not used again
    reply_cap: int = MAX_REPLY_BYTES  # bytes of a reply that are read


class Tls(Struct, frozen=True, eq=False):
    """Certificates for some targets, as PEM. Bytes, not paths: libcurl compares these by what they
    are, and would keep using connections that were opened with what a path held before.
    """

    certificate: bytes | None = None
    private_key: bytes | None = None
    key_password: str | None = None
    authorities: bytes | None = None  # None: those of `new_handle`

    def __repr__(self) -> str:
        return "Tls(***)"


class Channel:
    """How the requests of some targets are made, if not as all others. It has its own handles."""

    __slots__ = ("http_version", "idle", "method", "tls")

    def __init__(
        self, *, method: str = "POST", http_version: str | None = None, tls: Tls | None = None
    ) -> None:
        self.method = method
        self.http_version = http_version  # None: that of the options
        self.tls = tls
        self.idle: list[_Transfer] = []

    def timings(self) -> Timings:
        """Return how long the last request took, if no other request uses the channel."""
        if not self.idle:  # it was not sent
            return Timings()
        get = self.idle[-1].easy.getinfo
        names = (
            pycurl.NAMELOOKUP_TIME,
            pycurl.CONNECT_TIME,
            pycurl.APPCONNECT_TIME,
            pycurl.STARTTRANSFER_TIME,
            pycurl.TOTAL_TIME,
        )
        return Timings(*(round(get(each) * 1000, 3) for each in names))


class CurlLoop:
    """All requests under way, on one libcurl "multi" handle. Opened and closed by `async with`."""

    def __init__(
        self,
        options: CurlOptions,
        refuse_address: RefuseAddress,
        leadership: Leadership | None = None,
        look_up: LookUp = system_look_up,
    ) -> None:
        self._options = options
        self._leadership = leadership  # None: requests may always be sent
        self._look_up = look_up
        proxy = options.proxy or ""
        # Most proxies look up the target's name themselves.
        self._looks_up = not proxy or proxy.startswith("socks5:")
        self._refuse_address = refuse_address
        self._transfers: dict[pycurl.Curl, _Transfer] = {}
        self._usual = Channel()
        self._next_turn: asyncio.Handle | None = None
        self._left: dict[int, None] = {}  # sockets that the next turn begins with, in order
        self._alarm: asyncio.Handle | None = None
        self._alarm_at = 0.0  # loop time

    def __repr__(self) -> str:
        idle = sum(each.done is None for each in self._transfers.values())
        busy = len(self._transfers) - idle
        return f"CurlLoop(busy={busy}, idle={idle}, sockets={len(self._sockets)})"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._resolver = Resolver(self._look_up)
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, self._options.max_connections)
        self._multi.setopt(pycurl.M_MAX_TOTAL_CONNECTIONS, self._options.max_at_once)
        self._multi.setopt(pycurl.M_PIPELINING, pycurl.PIPE_MULTIPLEX)
        self._sockets = watch_sockets(self._loop, self._go_on)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._sockets.watch)
        # Bound once: looking one of pycurl's methods up costs as much as calling it.
        self._add_handle = self._multi.add_handle
        self._remove_handle = self._multi.remove_handle
        self._socket_action = self._multi.socket_action
        return self

    async def __aexit__(self, *_: object) -> None:
        self._resolver.close()
        for transfer in self._transfers.values():
            if transfer.done is not None:
                self._finish(transfer, NoReply(Cause.NETWORK, "the sender was closed"))
        for handle in (self._next_turn, self._alarm):
            if handle is not None:
                handle.cancel()
        self._multi.close()
        self._sockets.close()

    def retire(self, channel: Channel) -> bool:
        """Close the handles of a channel that have nothing to do. Return whether that is all."""
        while channel.idle:
            transfer = channel.idle.pop()
            del self._transfers[transfer.easy]
            transfer.easy.close()
        return not any(each.home is channel.idle for each in self._transfers.values())

    async def post(
        self,
        url: str,
        headers: Headers,
        body: bytes,
        timeout: float,
        channel: Channel | None = None,
    ) -> Answer:
        """Send a request and return the answer. Raises ValueError if libcurl cannot build it."""
        place, addresses = _place_of(url) if self._looks_up else None, None
        if place is not None:
            addresses = self._resolver.recall(place.host)
            if addresses is None:
                begun = self._loop.time()
                found = await self._resolve(place.host, timeout)
                if isinstance(found, NoReply):
                    return found
                addresses = found
                timeout -= self._loop.time() - begun
        idle = (channel or self._usual).idle
        if not idle:
            new = _Transfer(
                self._options,
                self._refuse_address,
                self._sockets.expect_new,
                channel or self._usual,
                self._leadership,
            )
            self._transfers[new.easy] = new
            idle.append(new)
        transfer = idle[-1]
        transfer.prepare(url, headers, body, timeout)  # raises: then it is still idle
        if addresses is not None or transfer.is_pinned:
            transfer.pin(place, addresses)
        self._add_handle(transfer.easy)
        idle.pop()
        done: asyncio.Future[Answer] = self._loop.create_future()
        transfer.done = done
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._take_turn)
        try:
            return await done
        finally:
            if transfer.done is done:  # cancelled, and not yet reused
                self._finish(transfer, _GIVEN_UP)
                self._set_alarm()  # another request may have waited for its connection

    async def _resolve(self, host: str, timeout: float) -> HostAddresses | NoReply:
        try:
            return await self._resolver.resolve(host, min(timeout, self._options.connect_timeout))
        except TooManyLookUps as error:
            return NoReply(Cause.OVERLOADED, f"not sent: {error}")
        except Unresolved as error:
            if _has_no_descriptors():
                return NoReply(Cause.OVERLOADED, NO_DESCRIPTORS)
            match error.blame:
                case Blame.NAME_SERVER:
                    return NO_NAMES
                case Blame.UNKNOWN:
                    return NoReply(Cause.UNRESOLVED, str(error))
                case Blame.NAME:
                    return NoReply(Cause.NETWORK, str(error))

    def _finish(self, transfer: "_Transfer", answer: Answer) -> None:
        """Take the handle from libcurl, which ends the request if it is still open."""
        self._remove_handle(transfer.easy)
        transfer.home.append(transfer)
        done, transfer.done = transfer.done, None
        if done is not None and not done.done():  # else cancelled
            done.set_result(answer)

    def _take_turn(self) -> None:
        """Let libcurl do what waits for no socket and no time."""
        self._next_turn = None
        left, self._left = self._left, {}
        self._go_on((*left, *_NO_WAIT))

    def _go_on(self, sockets: Iterable[int]) -> None:
        """Let libcurl go on with these sockets. Give the answers to those who wait for them.

        What replies in many small pieces takes long, and many may do so. Sockets for which there is
        no time left have their turn before any other: each is served, and so is the loop.
        """
        if self._left:
            self._leave(sockets)
            return
        now, waiting = self._loop.time, iter(sockets)
        ends = now() + TURN_SECONDS
        for fd in waiting:
            self._socket_action(fd, _ANY_EVENT)
            if now() > ends:
                self._leave(waiting)
        _, succeeded, failed = self._multi.info_read()
        for easy in succeeded:
            transfer = self._transfers[easy]
            self._finish(transfer, transfer.reply())
        for easy, code, text in failed:
            transfer = self._transfers[easy]
            self._finish(transfer, transfer.answer(code, text))
        self._set_alarm()

    def _leave(self, sockets: Iterable[int]) -> None:
        """Leave these to the next turn. One that is closed until then does no harm."""
        self._left |= dict.fromkeys(sockets)
        if self._left and self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._take_turn)

    def _set_alarm(self) -> None:
        """Ask libcurl when it wants its next turn, once for everything that happened in this one.

        (It could call us each time that it changes its mind: several times for each request.) An
        alarm that rings early does no harm, so one that is due earlier anyway is left as it is.
        """
        ms = self._multi.timeout()
        if ms < 0:  # not at all
            return
        due = self._loop.time() + ms / 1000
        if self._alarm is not None:
            if self._alarm_at <= due:
                return
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = self._loop.call_at(due, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._go_on(_NO_WAIT)


class _Transfer:
    """A libcurl "easy" handle for one request after the other. Its callbacks are bound once."""

    done: asyncio.Future[Answer] | None = None  # None: it has nothing to do

    def __init__(
        self,
        options: CurlOptions,
        refuse_address: RefuseAddress,
        on_open: Callable[[], None],
        channel: Channel,
        leadership: Leadership | None = None,
    ) -> None:
        self.easy = new_handle()
        self.home = channel.idle  # where it is while it has nothing to do
        self._setopt = self.easy.setopt
        self._getinfo = self.easy.getinfo
        self._leadership = leadership
        # Behind a proxy the hook sees the proxy's address, not the target's.
        self._refuse_address = refuse_address if options.proxy is None else lambda _ip, _port: None
        self._has_proxy = options.proxy is not None
        self._on_open = on_open
        self._reply_cap = options.reply_cap
        self._url = ""
        self._timeout = -1.0
        self.is_pinned = False  # libcurl was given addresses
        self._pinned: tuple[Place | None, HostAddresses | None] = (None, None)
        self._body = bytearray()  # a list of what comes would be large if it comes byte by byte
        self._header_lines: list[bytes] = []
        self._set_up(options)
        self._set_up_channel(channel)

    def prepare(self, url: str, headers: Headers, body: bytes, timeout: float) -> None:
        self._body.clear()
        self._room = self._reply_cap
        self._pieces = 0
        self._header_lines.clear()
        self._refusal: str | None = None
        self._opened = self._starved = False
        try:
            # What repeats is not set again: each option costs as much as the rest of this function.
            if timeout != self._timeout:
                self._setopt(pycurl.TIMEOUT_MS, max(round(timeout * 1000), 1))  # 0: no limit
                self._timeout = timeout
            if url != self._url:
                self._setopt(pycurl.URL, url)
                self._url = url
            self._setopt(pycurl.HTTPHEADER, headers)
            self._setopt(pycurl.POSTFIELDS, body)
        except (pycurl.error, UnicodeError, TypeError) as error:
            raise ValueError(f"libcurl refuses the request: {error}") from error

    def pin(self, place: Place | None, addresses: HostAddresses | None) -> None:
        """Give libcurl the addresses of the host, so that it does not look them up itself."""
        last_place, last_addresses = self._pinned
        if addresses is last_addresses and place == last_place:
            return
        self._pinned, self.is_pinned = (place, addresses), addresses is not None
        if place is None or addresses is None:
            self.easy.unsetopt(pycurl.RESOLVE)
            return
        ips = ",".join(f"[{ip}]" if ":" in ip else ip for ip in addresses.ips)
        self._setopt(pycurl.RESOLVE, [f"+{place.host}:{place.port}:{ips}"])

    def reply(self) -> Answer:
        """Return the answer of a request that libcurl has completed."""
        status = self._getinfo(pycurl.RESPONSE_CODE)
        body = bytes(self._body)
        if status < _NO_SUCCESS:
            return Reply(status, body)
        if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED and self._has_proxy:
            return PROXY_REFUSES_US
        return Reply(status, body, self._retry_after())

    def answer(self, code: int, text: str) -> Answer:
        """Return the answer of a request that libcurl has given up, by its result code."""
        if self._room < 0:
            whole = self.reply()
            if isinstance(whole, NoReply):
                return whole
            body = whole.body[: self._reply_cap]
            return Reply(whole.status, body, whole.retry_after, too_long=True)
        if self._refusal is not None and not self._opened:
            return NoReply(Cause.TARGET_REFUSED, self._refusal)
        if code == pycurl.E_ABORTED_BY_CALLBACK:
            return NoReply(Cause.UNFORESEEN, OVERRULED)
        return self._fault_of_router(code, text) or NoReply(self._cause_of(code), text)

    def _cause_of(self, code: int) -> Cause:
        if code == pycurl.E_OPERATION_TIMEDOUT:
            # Not by the times that libcurl keeps: those of steps not reached are set, too.
            return Cause.TIMEOUT if self._getinfo(pycurl.REQUEST_SIZE) > 0 else Cause.NETWORK
        return _CAUSES.get(code, Cause.UNFORESEEN)

    def _fault_of_router(self, code: int, text: str) -> NoReply | None:
        """Return what is wrong here. None: with us nothing is wrong, or it cannot be told."""
        if self._starved and (code == pycurl.E_COULDNT_CONNECT or not self._opened):
            return NoReply(Cause.OVERLOADED, NO_DESCRIPTORS)  # not all addresses were tried
        if code in _OWN_CERTIFICATES:
            return NoReply(Cause.NO_CREDENTIALS, f"{FAULT_IS_HERE}: {text}")
        return self._fault_of_proxy(code) if self._has_proxy else None

    def _fault_of_proxy(self, code: int) -> NoReply | None:
        status = self._getinfo(pycurl.HTTP_CONNECTCODE)
        said = self._getinfo(_PROXY_ERROR)  # by a SOCKS proxy
        if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED or said in _REFUSES_CREDENTIALS:
            return PROXY_REFUSES_US
        if code == _E_PROXY:
            is_faulty = said not in _CANNOT_REACH_TARGET
        elif self._getinfo(pycurl.PRIMARY_IP):
            # Connected: then a failure is the proxy's only if it hangs up on our CONNECT.
            was_asked_only = not status and not self._getinfo(pycurl.REQUEST_SIZE)
            is_faulty = code == pycurl.E_RECV_ERROR and was_asked_only
        else:
            is_faulty = code in _UNCONNECTED
        return NO_PROXY if is_faulty else None

    def _retry_after(self) -> str | None:
        said: str | None = None
        for line in self._header_lines:
            if line[:5] == b"HTTP/":  # a new block: what an interim reply said is void
                said = None
            elif line[:12].lower() == b"retry-after:":
                said = line[12:].decode("latin-1").strip()
        return said

    def _set_up(self, options: CurlOptions) -> None:
        """Set the options that stay the same for all requests.

        Left as libcurl has it: no cookies, no .netrc, no Accept-Encoding; and a POST on a reused
        connection that turns out to be dead before a byte of the reply came is sent again on a new
        one. That may reach a target twice, as "at least once" always may, and a mere idle timeout
        at the target costs no attempt. PIPEWAIT stays off: with it, all requests to a host that
        turns out to speak HTTP/1.1 wait until the first one is answered. So a first burst opens
        many connections; over HTTP/2 the requests share one from then on.
        """
        setopt = self._setopt
        setopt(pycurl.POST, 1)
        setopt(pycurl.HTTP_VERSION, _HTTP_VERSIONS[options.http_version])
        setopt(pycurl.PROXY, options.proxy or "")  # "" also keeps the environment's away
        setopt(pycurl.NOPROXY, "")
        if options.ca_file is not None:
            setopt(pycurl.CAINFO, options.ca_file)
        setopt(pycurl.CONNECTTIMEOUT_MS, round(options.connect_timeout * 1000))
        setopt(pycurl.MAXAGE_CONN, options.idle_seconds)
        setopt(pycurl.DNS_CACHE_TIMEOUT, DNS_CACHE_SECONDS)
        setopt(pycurl.TCP_KEEPALIVE, 1)
        setopt(pycurl.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS)
        setopt(pycurl.TCP_KEEPINTVL, KEEP_ALIVE_SECONDS)
        setopt(pycurl.WRITEFUNCTION, self._on_body)
        # No function of ours: it would be called for each line, and hardly any reply is asked.
        setopt(pycurl.HEADERFUNCTION, self._header_lines.append)
        setopt(pycurl.OPENSOCKETFUNCTION, self._open_socket)
        setopt(pycurl.RESOLVER_START_FUNCTION, self._on_open)  # it may open some itself
        if self._leadership is not None:
            setopt(pycurl.PREREQFUNCTION, partial(_allow, self._leadership))

    def _set_up_channel(self, channel: Channel) -> None:
        setopt, tls = self._setopt, channel.tls
        if channel.method != "POST":
            setopt(pycurl.CUSTOMREQUEST, channel.method)
        if channel.http_version is not None:
            setopt(pycurl.HTTP_VERSION, _HTTP_VERSIONS[channel.http_version])
        if tls is None:
            return
        if tls.certificate is not None:
            setopt(pycurl.SSLCERT_BLOB, tls.certificate)
            setopt(pycurl.SSLKEY_BLOB, tls.private_key)
        if tls.key_password is not None:
            setopt(pycurl.KEYPASSWD, tls.key_password)
        if tls.authorities is not None:
            setopt(pycurl.CAINFO_BLOB, tls.authorities)  # instead of CAINFO
            self.easy.unsetopt(pycurl.CAPATH)

    def _on_body(self, chunk: bytes) -> int | None:
        self._body += chunk
        self._room -= len(chunk)
        self._pieces += 1
        if self._pieces > MAX_PIECES:  # each costs as much as a kilobyte
            self._room = -1
        return 0 if self._room < 0 else None  # 0: libcurl ends the transfer

    def _open_socket(self, _purpose: int, address: tuple[int, int, int, tuple[str, int]]) -> int:
        """Open a socket for libcurl: the one place where the resolved address is known (MED-5).

        Refusing one address of several lets libcurl try the next. A connection that is used again
        was checked when it was opened.
        """
        self._on_open()
        family, kind, protocol, (ip, port, *_) = address
        self._refusal = self._refuse_address(ip, port)
        if self._refusal is not None:
            return _NO_SOCKET
        try:
            fd = socket.socket(family, kind, protocol).detach()
        except OSError as error:  # no descriptor left, no IPv6 here: as if it could not connect
            self._starved = self._starved or error.errno in _NONE_LEFT
            return _NO_SOCKET
        self._opened = True
        return fd


@lru_cache(maxsize=10_000)  # URLs repeat
def _place_of(url: str) -> Place | None:
    """Return what of a URL has to be looked up. None: it names an address, or this host."""
    try:
        target = read_target(url)
    except BadTarget:
        return None  # libcurl will say so
    if not target.host.isascii():
        return None  # likewise
    name = target.host.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):  # libcurl knows without looking it up
        return None
    with suppress(ValueError):
        ip_address(target.host)
        return None
    return Place(target.host, target.port)


def _has_no_descriptors() -> bool:
    """Return whether a look-up may have failed for lack of descriptors. It does not say so."""
    try:
        socket.socket().close()
    except OSError as error:
        return error.errno in _NONE_LEFT
    return False


def _allow(leadership: Leadership, *_: object) -> int:
    """Check leadership once more, just before the request is written (CFG-9).

    An earlier check is not enough: a router that is suspended between the check and the write
    would send what another router sends by now. Here, only a few instructions lie between.
    """
    return _ABORT if leadership.is_over else _OK
