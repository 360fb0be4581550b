"""Keeping secrets out of everything that people see."""

import re
from typing import Final

from msgspec.structs import replace

from router.core.dead_letter import DeadLetter
from router.core.message import Malformed, parse

MASK: Final = "***"

_USER_INFO: Final = re.compile(r"(?<=://)[^/?#\s]*@")
_SECRET_PARAMETER: Final = re.compile(
    r"(?<=[?&;])([^=&;#\s]*(?:pass|secret|token|signature|key|auth)[^=&;#\s]*=)[^&;#\s]*",
    re.IGNORECASE,
)
_TELLING: Final = 4  # so many characters of a cut-off secret are too many


def mask_urls(text: str) -> str:
    """The text with user names, passwords and tokens of every URL in it masked."""
    return _SECRET_PARAMETER.sub(rf"\1{MASK}", _USER_INFO.sub(f"{MASK}@", text))


def without_secrets(letter: DeadLetter) -> DeadLetter:
    """The letter with its reply free of the secrets sent: some targets echo what they are sent."""
    try:
        message = parse(letter.body)
    except Malformed:
        return letter
    reply = letter.reply
    for secret in (message.token, message.secret):
        if secret:
            reply = _mask(reply, secret.encode())
    return replace(letter, reply=reply)


def _mask(content: bytes, secret: bytes) -> bytes:
    content = content.replace(secret, MASK.encode())
    # The reply was cut at its first KiB, perhaps in the middle of the secret.
    for length in range(min(len(secret), len(content)), _TELLING - 1, -1):
        if content.endswith(secret[:length]):
            return content[:-length] + MASK.encode()
    return content
