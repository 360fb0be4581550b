"""Keeping secrets out of everything that people see."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from router.core.dead_letter import DeadLetter
from router.core.message import Malformed, Message, parse

MASK: Final = "***"

# What ends a URL in a text: no target may contain it.
_END: Final = r"\x00-\x20\x7f-\x9f"
# Each of these reads a text once, whatever is in it: one literal to look for, one run to its end.
_USER_INFO: Final = re.compile(rf"://[^/?#{_END}]*@")
_QUERY: Final = re.compile(rf"\?[^{_END}]+")
_FRAGMENT: Final = re.compile(rf"#(?<=[^{_END}]#)[^{_END}]+")
_URI: Final = re.compile(
    r"(?P<scheme>[^:/?#]+)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<query>(?:\?[^#]*)?)(?:#.*)?",
    re.DOTALL,
)
# The options of queue URIs, of all brokers. They name queues, files and numbers, never a secret.
_PUBLIC_PARAMETERS: Final = frozenset(
    {
        "audit",
        "cafile",
        "certfile",
        "consumer",
        "fifo",
        "groups",
        "heartbeat",
        "keep",
        "keyfile",
        "lease",
        "notify",
        "passfile",
        "prefetch",
        "queue",
        "sslcert",
        "sslkey",
        "sslmode",
        "sslrootcert",
        "stream",
        "subject",
        "target_session_attrs",
        "tls",
        "type",
    }
)
_MOST_PARAMETERS: Final = 64  # no queue has more options; the rest is not shown
_ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two for one character
    rb"|\\u[0-9a-fA-F]{4}|\\[^u]",
    re.DOTALL,
)
_TELLING_CHARACTERS: Final = 4  # so many characters of a cut-off secret are too many


def mask_urls(text: str) -> str:
    """Mask the user info, the query and the fragment of every URL in a text."""
    if "?" in text:
        text = _QUERY.sub(f"?{MASK}", text)
    if "#" in text:
        text = _FRAGMENT.sub(f"#{MASK}", text)
    return _USER_INFO.sub(f"://{MASK}@", text) if "@" in text else text


def public_uri(uri: str) -> str:
    """Return the URI without user info and fragment, and with harmless query parameters only."""
    parts = _URI.fullmatch(uri)
    if parts is None:
        return uri
    # By the last @, whatever comes before it: rather a host too few than a password too many.
    host = parts["authority"].rpartition("@")[2]
    given = parts["query"].removeprefix("?").split("&", _MOST_PARAMETERS)[:_MOST_PARAMETERS]
    public = [text for text in given if text.partition("=")[0] in _PUBLIC_PARAMETERS]
    query = f"?{'&'.join(public)}" if public else ""
    return f"{parts['scheme']}://{host}{parts['path']}{query}"


def mask_malformed(text: str) -> str:
    """Mask or drop what may be a credential in a text that should have been a URL."""
    before, at, after = text.rpartition("@")
    public = f"{MASK}{at}{after}" if before else text
    return public.partition("?")[0].partition("#")[0]


def without_secrets(letter: DeadLetter) -> DeadLetter:
    """Return the letter with its reply masked: some targets echo the secrets that they get."""
    try:
        message = parse(letter.body)
    except Malformed:
        return letter
    return replace(letter, reply=mask_sent_secrets(letter.reply, message))


def mask_sent_secrets(content: bytes, message: Message) -> bytes:
    """Mask what was sent to a target and nobody else may see, in what it answered."""
    query = message.target.partition("#")[0].partition("?")[2]
    for secret in (
        message.token,
        message.secret,
        query if len(query) >= _TELLING_CHARACTERS else None,
    ):
        if secret:
            content = _mask(content, secret.encode())
    return content


def _mask(content: bytes, secret: bytes) -> bytes:
    """Mask a text, also where JSON's escapes hide it. Rather too much than a secret too many."""
    content = _mask_in(content, secret, content, range(len(content) + 1))
    # Not instead: what looks like an escape may be none, and the letter after it the secret's.
    return _mask_in(content, secret, *_unescape(content)) if b"\\" in content else content


def _mask_in(content: bytes, secret: bytes, plain: bytes, places: Sequence[int]) -> bytes:
    """Mask in `content` what is found in `plain`; `places` says where each byte of it is."""
    shown, after, begins = b"", 0, plain.find(secret)
    while begins >= 0:
        shown += content[places[after] : places[begins]] + MASK.encode()
        after = begins + len(secret)
        begins = plain.find(secret, after)
    rest = content[places[after] :]
    # The reply was cut at its first KiB, perhaps in the middle of the secret.
    for length in range(min(len(secret), len(plain) - after), _TELLING_CHARACTERS - 1, -1):
        if plain.endswith(secret[:length]):
            rest = content[places[after] : places[len(plain) - length]] + MASK.encode()
            break
    return shown + rest


def _unescape(content: bytes) -> tuple[bytes, Sequence[int]]:
    """Return it without JSON's escapes, and where in it each byte came from; last its end."""
    plain, places, end = bytearray(), [], 0
    for found in _ESCAPE.finditer(content):
        text = _escaped(found[0])
        plain += content[end : found.start()] + text
        places += [*range(end, found.start()), *([found.start()] * len(text))]
        end = found.end()
    return bytes(plain + content[end:]), [*places, *range(end, len(content) + 1)]


def _escaped(text: bytes) -> bytes:
    try:
        return msgspec.json.decode(b'"%b"' % text, type=str).encode()
    except (msgspec.MsgspecError, UnicodeError):
        return text
