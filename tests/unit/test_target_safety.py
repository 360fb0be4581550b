from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.target import TargetPolicy, read_target

ANY = TargetPolicy()
STRICT = TargetPolicy(block_private=True)

WILDCARD = "0.0.0.0"  # noqa: S104 - an address to refuse, not to bind to
ALWAYS_REFUSED = [
    WILDCARD,
    "169.254.0.1",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "febf::1",
    "64:ff9b:1::a9fe:a9fe",
    "64:ff9b:1:a9fe:a9:fe00::",
    "fd00:ec2::254",
    "fd20:ce::254",
]
PRIVATE = [
    "127.0.0.1",
    "127.9.9.9",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "fd12:3456::1",
    "fec0::1",
]
MULTICAST = ["224.0.0.1", "239.1.2.3", "ff02::1", "ff0e::1"]
PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "64:ff9b::808:808", "2002:808:808::1"]


def in_ipv6(address: IPv4Address) -> list[str]:
    """The ways to write an IPv4 address as an IPv6 one that leads there."""
    number = int(address)
    return [
        f"::ffff:{address}",
        str(IPv6Address((0x64FF9B << 96) | number)),
        str(IPv6Address((0x2002 << 112) | (number << 80) | 1)),
        str(IPv6Address((0xFFFF_0000 << 32) | number)),  # translated
        str(IPv6Address((0x2001_0000 << 96) | (1 << 64) | (number ^ 0xFFFF_FFFF))),  # Teredo
        *([str(IPv6Address(number))] if number > 1 else []),  # compatible; 1 is loopback
    ]


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize("ip", ALWAYS_REFUSED)
def test_some_addresses_are_refused_whatever_is_allowed(ip: str) -> None:
    assert ip in str(ANY.refuse_address(ip, 80))


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize("ip", [ip for ip in ALWAYS_REFUSED if ":" not in ip])
def test_c4_they_are_refused_in_every_ipv6_disguise(ip: str) -> None:
    disguises = in_ipv6(IPv4Address(ip))

    assert all(ANY.refuse_address(disguise, 80) for disguise in disguises)


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize("ip", PRIVATE)
def test_private_addresses_are_refused_only_on_demand(ip: str) -> None:
    assert ANY.refuse_address(ip, 80) is None
    assert STRICT.refuse_address(ip, 80) == f"the target's address {ip} is private"


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize("ip", MULTICAST)
def test_c4_multicast_is_refused_with_private_addresses(ip: str) -> None:
    assert ANY.refuse_address(ip, 80) is None
    assert STRICT.refuse_address(ip, 80) == f"the target's address {ip} is multicast"


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize("ip", PUBLIC)
def test_public_addresses_are_allowed(ip: str) -> None:
    assert STRICT.refuse_address(ip, 443) is None


@pytest.mark.rule("MED-5")
@given(st.ip_addresses(v=4))
def test_a_disguise_changes_nothing(address: IPv4Address) -> None:
    for policy in (ANY, STRICT):
        refused = policy.refuse_address(str(address), 80) is not None

        for disguise in in_ipv6(address):
            assert (policy.refuse_address(disguise, 80) is not None) is refused


OPINIONS = ["is_global", "is_loopback", "is_multicast", "is_private", "is_unspecified"]


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize("opinion", [True, False])
@pytest.mark.parametrize("own", ["127.0.0.1", WILDCARD, "::"])
def test_what_python_thinks_of_a_disguise_is_never_asked(
    own: str, monkeypatch: pytest.MonkeyPatch, *, opinion: bool
) -> None:
    # Before 3.13 ::ffff:127.0.0.1 was no loopback address. Now it is one.
    ip = IPv4Address("127.0.0.1")
    policy = TargetPolicy(own_addresses=frozenset({(own, 8080)}), block_private=True)
    disguises = in_ipv6(ip)
    for name in OPINIONS:
        monkeypatch.setattr(IPv6Address, name, opinion)

    for disguise in disguises:
        assert "the router's own" in str(policy.refuse_address(disguise, 8080))
        assert "private" in str(policy.refuse_address(disguise, 80))


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("own", "ip", "port", "refused"),
    [
        ("127.0.0.1", "127.0.0.1", 8080, True),
        ("127.0.0.1", "::ffff:127.0.0.1", 8080, True),
        ("127.0.0.1", "127.0.0.1", 8081, False),
        ("127.0.0.1", "127.0.0.2", 8080, False),
        (WILDCARD, "127.0.0.2", 8080, True),
        (WILDCARD, "::1", 8080, True),
        ("::1", "::1%lo", 8080, True),
        (WILDCARD, "127.0.0.1", 8081, False),
        (WILDCARD, "10.0.0.5", 8080, True),
        (WILDCARD, "::ffff:10.0.0.5", 8080, True),
        (WILDCARD, "10.0.0.5", 8081, False),
        (WILDCARD, "10.0.0.9", 8080, False),
        ("::", "127.0.0.1", 8080, True),
        ("::", "10.0.0.5", 8080, True),
        ("::", "2001:db8::5", 8080, True),
        ("10.0.0.6", "10.0.0.5", 8080, False),
        ("10.0.0.5", "10.0.0.5", 8080, True),
        ("::ffff:10.0.0.5", "10.0.0.5", 8080, True),
    ],
)
def test_c3_the_routers_own_api_is_no_target(
    own: str, ip: str, port: int, *, refused: bool
) -> None:
    of_this_host = {"10.0.0.5", "10.0.0.6", "2001:db8::5"}
    policy = TargetPolicy(
        own_addresses=frozenset({(own, 8080)}), is_this_host=of_this_host.__contains__
    )

    assert (policy.refuse_address(ip, port) is not None) is refused


@pytest.mark.rule("MED-5")
def test_an_own_address_must_be_an_address() -> None:
    with pytest.raises(ValueError, match="localhost"):
        TargetPolicy(own_addresses=frozenset({("localhost", 8080)}))


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://svc/", "scheme is ftp"),
        ("file://host/etc/passwd", "scheme is file"),
        ("gopher://svc/", "scheme is gopher"),
        ("http://user:hunter2@svc/", "credentials"),
        ("http://169.254.169.254/latest/", "link-local"),
        ("http://[fe80::1]/", "link-local"),
        ("http://[::ffff:a9fe:a9fe]/", "link-local"),
        ("http://0.0.0.0/", "no address"),
        ("http://2852039166/", "unusual spelling"),
        ("http://0xA9FEA9FE/", "unusual spelling"),
        ("http://0251.0376.0251.0376/", "unusual spelling"),
        ("http://169.16689662/", "unusual spelling"),
        ("http://169.254.169.254./", "unusual spelling"),
        ("http://%31%36%39.254.169.254.nip.example/", "characters"),
        ("http://evil.example%2f.good.example/", "characters"),
        (r"http://evil.example\.good.example/", "characters"),
        ("http://bücher.example/", "characters"),
        ("process:thumbnail", "MEDIATOR_EXECUTORS_FILE"),
        ("handler:paid", "router.worker"),
    ],
)
def test_a_url_is_refused_for_what_it_shows(url: str, reason: str) -> None:
    refusal = ANY.refuse_url(read_target(url))

    assert refusal is not None
    assert reason in refusal
    assert "hunter2" not in refusal


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    "url",
    [
        "http://svc/",
        "https://svc.example.com:8443/a?b=c@d",
        "http://localhost:3000/",
        "http://10.0.0.1/",
        "http://[::1]:8080/",
        "http://my_service.default.svc.cluster.local/",
        "http://4ever.example.com/",
        "http://xn--bcher-kva.example/",
        "http://svc.example.com./",
    ],
)
def test_an_ordinary_url_is_not_refused(url: str) -> None:
    assert ANY.refuse_url(read_target(url)) is None


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("api.example.com", True),
        ("API.Example.COM", True),
        ("a.b.example.com", True),
        ("api.example.com.", True),
        ("svc", True),
        ("10.0.0.7", True),
        ("example.com", False),
        ("evilexample.com", False),
        ("api.example.com.evil.net", False),
        ("10.0.1.7", False),
        ("svc2", False),
    ],
)
def test_with_an_allow_list_only_its_hosts_are_targets(host: str, *, allowed: bool) -> None:
    policy = TargetPolicy(allowed_hosts=("*.Example.com", "svc", "10.0.0.*"))

    refusal = policy.refuse_url(read_target(f"http://{host}/"))

    assert (refusal is None) is allowed


@pytest.mark.rule("MED-5")
def test_the_allow_list_opens_no_forbidden_address() -> None:
    policy = TargetPolicy(allowed_hosts=("*",))

    assert policy.refuse_url(read_target("http://169.254.169.254/")) is not None
