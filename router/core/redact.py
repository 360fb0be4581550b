"""Keeping secrets out of everything that people see."""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
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
_MAX_PARAMETERS: Final = 64  # no queue has more options; the rest is not shown
# What may be the begin of a URL with a password, of which the rest was cut off.
_CUT_USER_INFO: Final = re.compile(rf"://[^/?#{_END}]*\Z")
_ESCAPE: Final = re.compile(
    rb"(?P<cut>\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z"
    rb"|\\(?:u[0-9a-fA-F]{0,3})?\Z)"  # the begin of one, at the end of a text that was cut there
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two for one character
    rb"|\\u[0-9a-fA-F]{4}|\\[^u]",
    re.DOTALL,
)
_SECRET_CHARACTERS: Final = 8  # a shorter text is found everywhere, and no secret
_TELLING_CHARACTERS: Final = 4  # this many characters of a cut-off secret are too many
_READ_FOR_ONE: Final = 16  # bytes that are read for each one that is shown: masks are short


def mask_urls(text: str) -> str:
    """Mask the user info, the query and the fragment of every URL in a text."""
    if "?" in text:
        text = _QUERY.sub(f"?{MASK}", text)
    if "#" in text:
        text = _FRAGMENT.sub(f"#{MASK}", text)
    return _USER_INFO.sub(f"://{MASK}@", text) if "@" in text else text


def public_uri(uri: str, shown: AbstractSet[str] = frozenset()) -> str:
    """Return the URI without user info and fragment, and of its options only those to be shown."""
    parts = _URI.fullmatch(uri)
    if parts is None:
        return uri
    # By the last @, whatever comes before it: rather a host too few than a password too many.
    host = parts["authority"].rpartition("@")[2]
    given = parts["query"].removeprefix("?").split("&", _MAX_PARAMETERS)[:_MAX_PARAMETERS]
    public = [text for text in given if text.partition("=")[0] in shown]
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


def masked_start(text: str, message: Message, most: int) -> str:
    """Return the start of what a target said, without secrets, within a limit of bytes.

    Little more is read than is shown. A target may say 1 MB, and secrets may be all of it.
    """
    read = text[: _READ_FOR_ONE * most]
    masked = mask_urls(read)
    if len(read) < len(text):
        masked = _CUT_USER_INFO.sub(f"://{MASK}", masked)
    content = mask_sent_secrets(masked.encode(errors="replace"), message)
    return content[:most].decode(errors="ignore")


def spellings(secret: bytes) -> tuple[bytes, ...]:
    """Return a secret as a target may say it again: as it is, and as encoders of JSON write it."""
    if len(secret) < _SECRET_CHARACTERS:
        return ()
    in_json = msgspec.json.encode(secret.decode())[1:-1]
    for_html = in_json
    for byte in b"<>&'":
        for_html = for_html.replace(bytes((byte,)), b"\\u%04x" % byte)
    return tuple(dict.fromkeys((secret, in_json, in_json.replace(b"/", b"\\/"), for_html)))


def mask_spellings(content: bytes, secrets: Sequence[bytes]) -> bytes:
    """Mask these texts. All of it is done by C: the content may be large."""
    for secret in secrets:
        content = content.replace(secret, MASK.encode())
    return content


def mask_sent_secrets(content: bytes, message: Message) -> bytes:
    """Mask, in a target's answer, secrets that were sent to it and no one else may see."""
    query = message.target.partition("#")[0].partition("?")[2]
    headers = () if message.headers is None else message.headers.values()
    for secret in (
        message.token,
        message.secret,
        *(text for text in (query, *headers) if len(text) >= _TELLING_CHARACTERS),
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
    shown, after, begins = [], 0, plain.find(secret)
    while begins >= 0:
        shown.append(content[places[after] : places[begins]])
        after = begins + len(secret)
        begins = plain.find(secret, after)
    # It may have been cut in the middle of the secret.
    begun = _begun_at_end(plain[after:], secret)
    if begun >= _TELLING_CHARACTERS:
        shown += [content[places[after] : places[len(plain) - begun]], b""]
    else:
        shown.append(content[places[after] :])
    return MASK.encode().join(shown)


def _begun_at_end(plain: bytes, secret: bytes) -> int:
    """Return how many of the first characters of a secret a text ends with.

    Each byte is looked at a bounded number of times, as Knuth, Morris and Pratt do it.
    """
    end = plain[-len(secret) :]
    first = end.find(secret[:_TELLING_CHARACTERS])
    if first < 0:
        return 0
    shorter, length = [0], 0  # for each start of the secret, the longest that it ends with itself
    for byte in secret[1:]:
        while length and byte != secret[length]:
            length = shorter[length - 1]
        length += byte == secret[length]
        shorter.append(length)
    length = 0
    for byte in end[first:]:
        while length and byte != secret[length]:
            length = shorter[length - 1]
        length += byte == secret[length]
    return length


def _unescape(content: bytes) -> tuple[bytes, Sequence[int]]:
    """Return it without JSON's escapes, and where in it each byte came from; last its end."""
    plain, places, end = bytearray(), [], 0
    for found in _ESCAPE.finditer(content):
        text = b"" if found["cut"] else _escaped(found[0])
        plain += content[end : found.start()] + text
        places += [*range(end, found.start()), *([found.start()] * len(text))]
        end = found.end()
    return bytes(plain + content[end:]), [*places, *range(end, len(content) + 1)]


def _escaped(text: bytes) -> bytes:
    try:
        return msgspec.json.decode(b'"%b"' % text, type=str).encode()
    except (msgspec.MsgspecError, UnicodeError):
        return text
