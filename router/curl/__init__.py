"""The HTTP client of deliveries and of the SQS adapter: libcurl on the event loop.

It stands below `outbound` and `brokers`, because both use it and neither may import the other.
"""

import os
from typing import Final
from urllib.parse import quote

import certifi
import pycurl

from router import __version__

_AUTHORITIES: Final = certifi.where()  # now: it opens files, and later no descriptor may be left
PRINTABLE_ASCII: Final = "".join(map(chr, range(0x20, 0x7F)))


def ascii_url(url: str) -> str:
    """Return the URL as libcurl takes it: with percent signs for all that is not ASCII."""
    return url if url.isascii() else quote(url, safe=PRINTABLE_ASCII)


def new_handle() -> pycurl.Curl:
    """Return a libcurl "easy" handle that speaks nothing but HTTP and goes where it is sent.

    It trusts the bundle of certifi, or what OpenSSL's variables name instead.
    """
    easy = pycurl.Curl()
    easy.setopt(pycurl.CAINFO, os.environ.get("SSL_CERT_FILE") or _AUTHORITIES)
    if directory := os.environ.get("SSL_CERT_DIR"):
        easy.setopt(pycurl.CAPATH, directory)
    easy.setopt(pycurl.NOSIGNAL, 1)
    easy.setopt(pycurl.USERAGENT, f"message-router/{__version__}")
    easy.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    easy.setopt(pycurl.HTTP09_ALLOWED, 0)
    easy.setopt(pycurl.FOLLOWLOCATION, 0)
    easy.setopt(pycurl.PATH_AS_IS, 1)
    return easy
