"""Looking up names: a slow one delays deliveries to itself, and to no other."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final

import pytest

from router.core.outcome import Answer, Cause, NoReply, Reply
from router.core.target import TargetPolicy
from router.curl import resolver as module
from router.curl.loop import NO_DESCRIPTORS, NO_NAMES, CurlLoop, CurlOptions, RefuseAddress
from router.curl.resolver import (
    BLAME_SECONDS,
    FRESH_SECONDS,
    RENEW_AFTER_SECONDS,
    Blame,
    HostAddresses,
    Resolver,
    TooManyLookUps,
    Unresolved,
)
from tests.outbound.sender.test_curl_loop import no_more_descriptors, refuse_nothing
from tests.outbound.servers import listening, until

pytestmark = pytest.mark.anyio

HERE: Final = ("127.0.0.1",)


@dataclass
class Names:
    """A name service: some names are slow until the gate opens, others it does not know."""

    known: dict[str, Sequence[str]] = field(default_factory=lambda: {"good.test": HERE})
    gate: Event = field(default_factory=Event)
    asked: Counter[str] = field(default_factory=Counter)

    def look_up(self, host: str) -> Sequence[str]:
        self.asked[host] += 1
        if host.endswith(".slow.test"):
            self.gate.wait()
            return HERE
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.known[host]


@contextmanager
def slow_names() -> Iterator[Names]:
    names = Names()
    try:
        yield names
    finally:
        names.gate.set()


@asynccontextmanager
async def curl(
    names: Names, refuse: RefuseAddress = refuse_nothing, **options: Any
) -> AsyncIterator[CurlLoop]:
    async with CurlLoop(CurlOptions(**options), refuse, look_up=names.look_up) as loop:
        yield loop


def age(addresses: HostAddresses, seconds: float) -> None:
    addresses.found_at -= seconds
    addresses.look_again_at -= seconds


@pytest.mark.rule("P5")
async def test_slow_names_delay_no_others() -> None:
    with slow_names() as names:
        async with listening() as target, curl(names) as loop:

            async def post(host: str, timeout: float = 2) -> Answer:
                return await loop.post(f"http://{host}:{target.port}/", [], b"", timeout)

            slow = [asyncio.ensure_future(post(f"{n}.slow.test")) for n in range(100)]
            await until(lambda: len(names.asked) == 100)
            begun = asyncio.get_running_loop().time()
            healthy = [await post("good.test") for _ in range(3)]
            literal = await post("127.0.0.1")
            took = asyncio.get_running_loop().time() - begun
            answers = await asyncio.gather(*slow)

    assert healthy == [Reply(200)] * 3
    assert literal == Reply(200)
    assert took < 0.5
    assert answers == [
        *(NoReply(Cause.UNRESOLVED, f"Resolving {n}.slow.test timed out after 2 s") for n in "01"),
        *[NO_NAMES] * 98,
    ]


@dataclass
class DeadNames(Names):
    """A name service that answers nothing, unless it knows the name."""

    def look_up(self, host: str) -> Sequence[str]:
        self.asked[host] += 1
        if host not in self.known:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self.known[host]


class Clock:
    """Moves the loop's clock, so that a test need not wait."""

    def __init__(self, resolver: Resolver) -> None:
        self.ahead = 0.0
        self._real = resolver._loop
        resolver._loop = self  # type: ignore[assignment]

    def time(self) -> float:
        return self._real.time() + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def blames(resolver: Resolver, *hosts: str) -> list[Blame]:
    found = []
    for host in hosts:
        with pytest.raises(Unresolved) as raised:
            await resolver.resolve(host, 9)
        found.append(raised.value.blame)
    return found


@pytest.mark.rule("MED-4")
async def test_three_names_without_an_answer_within_ten_seconds_are_our_fault() -> None:
    resolver = Resolver(DeadNames().look_up)
    clock = Clock(resolver)

    first = await blames(resolver, "a.test", "b.test", "c.test", "a.test")
    clock.ahead = BLAME_SECONDS + 1
    later = await blames(resolver, "c.test", "c.test", "b.test", "a.test")

    assert first == [Blame.UNKNOWN, Blame.UNKNOWN, Blame.NAME_SERVER, Blame.NAME_SERVER]
    assert later == [Blame.NAME, Blame.NAME, Blame.NAME, Blame.NAME_SERVER]


@pytest.mark.rule("MED-4")
async def test_one_name_is_to_blame_itself_after_ten_seconds_without_an_answer() -> None:
    names = DeadNames()
    resolver = Resolver(names.look_up)
    clock, found = Clock(resolver), list[Blame]()

    for clock.ahead in (0.0, 5.0, 10.1, 71.0):  # the last one is a minute later: a new story
        found += await blames(resolver, "a.test")
    names.known["a.test"] = HERE
    await resolver.resolve("a.test", 9)
    del names.known["a.test"]
    again = await blames(resolver, "a.test")

    assert found == [Blame.UNKNOWN, Blame.UNKNOWN, Blame.NAME, Blame.UNKNOWN]
    assert again == [Blame.UNKNOWN]


@pytest.mark.rule("MED-4")
async def test_names_that_do_not_exist_are_no_fault_of_the_name_server() -> None:
    resolver = Resolver(Names().look_up)

    assert set(await blames(resolver, *(f"{n}.test" for n in range(5)))) == {Blame.NAME}


@pytest.mark.rule("P4", "MED-4")
async def test_names_without_an_answer_are_remembered_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_NAMES", 5)
    resolver = Resolver(DeadNames().look_up)

    await blames(resolver, *(f"{n}.test" for n in range(9)))

    assert list(resolver._failing) == [f"{n}.test" for n in range(4, 9)]


@pytest.mark.rule("MED-4")
async def test_the_answer_says_whose_fault_a_name_is() -> None:
    async with curl(DeadNames()) as loop:
        answers = [await loop.post(f"http://{host}.test/", [], b"", 5) for host in "abc"]

    assert [answer.cause for answer in answers if isinstance(answer, NoReply)] == [
        Cause.UNRESOLVED,
        Cause.UNRESOLVED,
        Cause.NO_NAMES,
    ]
    assert answers[-1] == NoReply(Cause.NO_NAMES, "the fault is here: no name can be resolved")


@pytest.mark.rule("P5")
async def test_all_who_want_a_name_wait_for_one_look_up_and_share_what_it_finds() -> None:
    with slow_names() as names:
        resolver = Resolver(names.look_up)
        asking = [asyncio.ensure_future(resolver.resolve("a.slow.test", 9)) for _ in range(50)]
        await until(lambda: names.asked["a.slow.test"] == 1)
        names.gate.set()
        found = await asyncio.gather(*asking)

        assert {id(each) for each in found} == {id(resolver.recall("a.slow.test"))}
        assert found[0].ips == HERE
        assert names.asked == {"a.slow.test": 1}


@pytest.mark.rule("P5")
async def test_who_has_waited_long_enough_goes_and_the_answer_is_there_for_the_next() -> None:
    with slow_names() as names:
        resolver = Resolver(names.look_up)
        with pytest.raises(Unresolved, match=r"Resolving a\.slow\.test timed out after 0\.01 s"):
            await resolver.resolve("a.slow.test", 0.01)
        names.gate.set()
        await until(lambda: resolver.recall("a.slow.test") is not None)

        assert names.asked == {"a.slow.test": 1}


@pytest.mark.rule("P5")
async def test_addresses_in_use_are_looked_up_again_before_they_are_too_old() -> None:
    names = Names()
    resolver = Resolver(names.look_up)
    first = await resolver.resolve("good.test", 9)
    assert resolver.recall("good.test") is first
    assert names.asked["good.test"] == 1

    names.known["good.test"] = ("127.0.0.2",)
    age(first, RENEW_AFTER_SECONDS)
    assert resolver.recall("good.test") is first
    await until(lambda: resolver.recall("good.test") is not first)
    second = resolver.recall("good.test")

    assert second is not None
    assert second.ips == ("127.0.0.2",)
    assert names.asked["good.test"] == 2


@pytest.mark.rule("P5")
async def test_addresses_that_cannot_be_looked_up_again_are_used_until_they_are_too_old() -> None:
    names = Names()
    resolver = Resolver(names.look_up)
    first = await resolver.resolve("good.test", 9)
    names.known.clear()
    age(first, RENEW_AFTER_SECONDS)
    resolver.recall("good.test")
    await until(lambda: not resolver._running)

    assert resolver.recall("good.test") is first  # and no further look-up at once
    assert names.asked["good.test"] == 2
    age(first, FRESH_SECONDS)
    assert resolver.recall("good.test") is None
    with pytest.raises(Unresolved, match=r"good\.test \(Name or service not known\)"):
        await resolver.resolve("good.test", 9)


@pytest.mark.rule("P5")
async def test_when_all_threads_wait_names_found_before_are_still_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_LOOK_UPS", 4)
    monkeypatch.setattr(module, "RESERVED_LOOK_UPS", 2)
    with slow_names() as names:
        async with listening() as target, curl(names) as loop:

            async def post(host: str) -> Answer:
                return await loop.post(f"http://{host}:{target.port}/", [], b"", 1)

            await post("good.test")
            found = loop._resolver._found["good.test"]
            age(found, RENEW_AFTER_SECONDS)
            slow = [asyncio.ensure_future(post(f"{n}.slow.test")) for n in range(2)]
            await until(lambda: len(names.asked) == 3)
            new = await post("new.test")
            age(found, FRESH_SECONDS)
            known = await post("good.test")
            await asyncio.gather(*slow)

    assert new == NoReply(Cause.OVERLOADED, "not sent: too many host names are being looked up")
    assert known == Reply(200)


@pytest.mark.rule("P5")
async def test_addresses_are_used_although_no_thread_is_free_to_look_them_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    names = Names()
    resolver = Resolver(names.look_up)
    first = await resolver.resolve("good.test", 9)
    monkeypatch.setattr(module, "start_new_thread", fail)
    age(first, RENEW_AFTER_SECONDS)

    assert resolver.recall("good.test") is first
    with pytest.raises(TooManyLookUps, match="no thread"):
        await resolver.resolve("new.test", 9)
    assert not resolver._running


@pytest.mark.rule("P5")
async def test_a_bug_of_the_name_service_is_told_to_who_waits() -> None:
    def look_up(_: str) -> Sequence[str]:
        raise KeyError("bug")

    def refuse(_: str) -> Sequence[str]:
        raise UnicodeError("label too long")

    with pytest.raises(Unresolved, match=r"a\.test \(KeyError\('bug'\)\)"):
        await Resolver(look_up).resolve("a.test", 9)
    with pytest.raises(Unresolved, match="no host name"):
        await Resolver(refuse).resolve("a.test", 9)


@pytest.mark.rule("P5")
async def test_the_latest_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_NAMES", 2)
    names = Names(dict.fromkeys(("a", "b", "c"), HERE))
    resolver = Resolver(names.look_up)
    for name in "abc":
        await resolver.resolve(name, 9)

    assert resolver.recall("a") is None
    assert resolver.recall("b") is not None
    assert resolver.recall("c") is not None


@pytest.mark.rule("P5")
async def test_who_waits_for_a_name_is_let_go_at_the_end() -> None:
    with slow_names() as names:
        async with curl(names) as loop:
            posting = asyncio.ensure_future(loop.post("http://a.slow.test/", [], b"", 60))
            await until(lambda: len(names.asked) == 1)
        answer = await posting
        names.gate.set()

    assert answer == NoReply(Cause.NETWORK, "closed")


@pytest.mark.rule("P5")
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/",
        "http://LOCALHOST.:{port}/",
        "http://a.localhost:{port}/",
    ],
)
async def test_an_address_and_this_host_are_not_looked_up(url: str) -> None:
    names = Names()
    async with listening() as target, curl(names) as loop:
        answer = await loop.post(url.format(port=target.port), [], b"", 5)

    assert answer == Reply(200)
    assert not names.asked


@pytest.mark.rule("P5")
async def test_behind_a_proxy_the_proxy_looks_names_up() -> None:
    names = Names()
    async with listening() as proxy, curl(names, proxy=f"http://127.0.0.1:{proxy.port}") as loop:
        answer = await loop.post("http://far.test/", [], b"", 5)

    assert answer == Reply(200)
    assert not names.asked


@pytest.mark.rule("P5")
@pytest.mark.parametrize("host", ["good.test", "good.test.", "GOOD.test", "a_b~c.test"])
async def test_libcurl_uses_what_was_looked_up(host: str) -> None:
    names = Names({host.lower(): HERE})
    async with listening() as target, curl(names) as loop:
        for path in ("", "a", "b"):
            assert await loop.post(f"http://{host}:{target.port}/{path}", [], b"", 5) == Reply(200)

    assert target.connections == 1
    assert names.asked == {host.lower(): 1}


@pytest.mark.rule("MED-5")
async def test_an_address_is_checked_whenever_a_connection_is_made() -> None:
    """Whoever owns the name may change what it stands for after it was found harmless."""
    names = Names({"bad.test": ("::1", "127.0.0.1")})
    refuse = TargetPolicy().refuse_address
    async with listening() as target, curl(names, refuse, http_version="HTTP_1_1") as loop:
        url = f"http://bad.test:{target.port}/"
        harmless = await loop.post(url, [], b"", 5)
        names.known["bad.test"] = ("169.254.169.254", "fd00:ec2::254")
        age(loop._resolver._found["bad.test"], FRESH_SECONDS)
        reused = await loop.post(url, [], b"", 5)  # over the connection that was checked
        target.close_all()
        await until(lambda: target.open_connections == 0)
        refused = await loop.post(url, [], b"", 5)

    assert (harmless, reused) == (Reply(200), Reply(200))
    assert isinstance(refused, NoReply)
    assert refused.cause is Cause.TARGET_REFUSED


@pytest.mark.rule("MED-5")
async def test_the_next_address_is_tried_when_one_is_refused() -> None:
    names = Names({"two.test": ("169.254.169.254", "127.0.0.1")})
    async with listening() as target, curl(names, TargetPolicy().refuse_address) as loop:
        answer = await loop.post(f"http://two.test:{target.port}/", [], b"", 5)

    assert answer == Reply(200)


@pytest.mark.rule("P5")
async def test_a_look_up_that_fails_for_lack_of_descriptors_is_our_fault() -> None:
    names = Names()
    async with curl(names) as loop:
        with no_more_descriptors():
            ours = await loop.post("http://a.test/", [], b"", 5)
        theirs = await loop.post("http://a.test/", [], b"", 5)

    assert ours == NoReply(Cause.OVERLOADED, NO_DESCRIPTORS)
    assert isinstance(theirs, NoReply)
    assert theirs.cause is Cause.NETWORK


@pytest.mark.rule("P5")
async def test_names_of_this_machine_are_found_by_the_system() -> None:
    found = await Resolver().resolve("localhost", 9)

    assert "127.0.0.1" in found.ips
