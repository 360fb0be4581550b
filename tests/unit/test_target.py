import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.target import MAX_CHARACTERS, BadTarget, Target, read_target


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://svc/api", Target("https", "svc", 443, has_credentials=False)),
        ("http://svc", Target("http", "svc", 80, has_credentials=False)),
        (
            "HTTP://SVC.Example:8080/a?b#c",
            Target("http", "svc.example", 8080, has_credentials=False),
        ),
        (
            "https://[2001:DB8::1]:8443/",
            Target("https", "2001:db8::1", 8443, has_credentials=False),
        ),
        ("https://user:pw@svc/", Target("https", "svc", 443, has_credentials=True)),
        ("https://@svc/", Target("https", "svc", 443, has_credentials=True)),
        (
            r"http://good.example\@evil.example/",
            Target("http", "evil.example", 80, has_credentials=True),
        ),
        ("ftp://svc/file", Target("ftp", "svc", 0, has_credentials=False)),
        ("process:Make-it.v2", Target("process", "Make-it.v2", 0, has_credentials=False)),
        ("handler:order_paid", Target("handler", "order_paid", 0, has_credentials=False)),
    ],
)
def test_a_url_is_taken_apart(url: str, target: Target) -> None:
    assert read_target(url) == target


@pytest.mark.rule("MED-5")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "absolute"),
        ("svc/api", "absolute"),
        ("/api", "absolute"),
        ("//svc/api", "absolute"),
        ("http:///api", "absolute"),
        ("http://:80/", "absolute"),
        ("mailto:someone", "absolute"),
        ("http://svc:0x50/", "port"),
        ("http://svc:99999/", "port"),
        ("http://[::1/", "IPv6"),
        ("http://a b/", "white space"),
        ("http://svc/\r\nX-Injected: 1", "white space"),
        ("http://svc/\x00", "control character"),
        ("http://svc/" + "x" * MAX_CHARACTERS, "longer"),
        ("process:", "a name"),
        ("process:/bin/sh", "a name"),
        ("process:../x", "a name"),
        ("process:a?b", "a name"),
        ("process:" + "x" * 129, "a name"),
        ("PROCESS://svc/api", "a name"),
        ("handler:a b", "white space"),
        ("handler:aé", "a name"),
    ],
)
def test_what_is_no_absolute_url_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(BadTarget, match=reason):
        read_target(url)


@pytest.mark.rule("MED-4")
@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Svc/a?b", "https://svc:443"),
        ("http://svc:8080/x", "http://svc:8080"),
        ("http://[::1]/x", "http://[::1]:80"),
        ("process:thumbnail", "process:thumbnail"),
        ("handler:order.paid", "handler:order.paid"),
    ],
)
def test_the_origin_names_scheme_host_and_port(url: str, origin: str) -> None:
    assert read_target(url).origin == origin


@pytest.mark.rule("MED-5")
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        target = read_target(text)
    except BadTarget:
        return

    assert target.host
    assert target.scheme
