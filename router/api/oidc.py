"""Bearer tokens of an OpenID provider. Its keys are discovered; in doubt, a caller is refused.

The only user of PyJWT, and imported only where the auth mode is OIDC.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import jwt
import msgspec
from msgspec import Struct

from router.api.access import CannotTell, Role
from router.curl.fetch import FetchFailed, fetch
from router.setting_values import Claim

log = logging.getLogger(__name__)

ALGORITHMS: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
LEEWAY_SECONDS: Final = 60.0  # seconds that the clocks may differ
REQUIRED: Final = ("exp", "iss", "aud")
MAX_TOKEN_BYTES: Final = 16 * 1024

REFRESH_AFTER_SECONDS: Final = 3600.0  # how long a key stays good that the provider has withdrawn
EXPIRE_AFTER_SECONDS: Final = 24 * 3600.0  # … and while the provider cannot be asked
MIN_INTERVAL_SECONDS: Final = 10.0  # between two requests: unknown keys are easily made up
TIMEOUT_SECONDS: Final = 10.0
MAX_DOCUMENT_BYTES: Final = 1024 * 1024
MAX_KEYS: Final = 100

_WORDS: Final = frozenset({"scope", "scp"})  # claims whose text is a list of words

Clock = Callable[[], float]


class _Discovery(Struct, frozen=True):
    issuer: str
    jwks_uri: str


class _KeySet(Struct, frozen=True):
    keys: list[dict[str, Any]]  # JSON Web Keys, read by PyJWT


class _Unusable(Exception):
    """The provider gave no keys. Its text is for the log and the caller."""


class Provider:
    """Judges tokens by the keys of one issuer. Fits the API's `TokenJudge`."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        clock: Clock,
        *,
        required: Sequence[Claim] = (),
        admin: Claim | None = None,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._required = required
        self._admin = admin  # None: everybody is one
        self._keys = _Keys(issuer, clock)
        self._decoder = jwt.PyJWT(options={"enforce_minimum_key_length": True})

    async def role(self, token: str) -> Role | None:
        """Return the role of a token, or None. Raises CannotTell while no keys are known."""
        algorithm, key_id = unverified_header(token)
        if algorithm not in ALGORITHMS:
            return None
        for key in await self._keys.fitting(algorithm, key_id):
            with suppress(jwt.PyJWTError):
                claims = self._decoder.decode(
                    token,
                    jwt.PyJWK(dict(key), algorithm),
                    algorithms=[algorithm],
                    audience=self._audience,
                    issuer=self._issuer,
                    leeway=LEEWAY_SECONDS,
                    options={"require": list(REQUIRED)},
                )
                if not all(_has(claims, claim) for claim in self._required):
                    return None
                is_admin = self._admin is None or _has(claims, self._admin)
                return Role.ADMIN if is_admin else Role.READER
        return None


def _has(claims: Mapping[str, Any], claim: Claim) -> bool:
    """Return whether a token has this value: alone, in a list, or among the words of a scope.

    A name with dots leads into objects, such as `realm_access.roles`, unless there is such a name.
    """
    value: Any = claims
    if claim.name in claims:
        value = claims[claim.name]
    else:
        for part in claim.name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, str):
        words = value.split(" ") if claim.name in _WORDS else ()
        return claim.value in (value, *words)
    if isinstance(value, list):
        return claim.value in value
    if isinstance(value, bool):
        return str(value).lower() == claim.value.lower()
    return isinstance(value, int) and str(value) == claim.value


class _Keys:
    """The provider's keys: fetched on use, kept for a while, fetched again when one is missing.

    PyJWT's PyJWKClient is not suitable: it drops keys that are an hour old even while the
    provider cannot be asked, it asks a failing provider again for each token, and it reads answers
    of any length.
    """

    def __init__(self, issuer: str, clock: Clock) -> None:
        self._issuer = issuer
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._keys: Sequence[Mapping[str, Any]] = ()
        self._fetched_at = self._asked_at = float("-inf")
        self._failure = ""

    async def fitting(self, algorithm: str, key_id: str | None) -> Sequence[Mapping[str, Any]]:
        """Return the keys that may have signed a token. Raises CannotTell."""
        if self._age > REFRESH_AFTER_SECONDS or not self._find(algorithm, key_id):
            async with self._one_at_a_time:
                if self._clock() - self._asked_at >= MIN_INTERVAL_SECONDS:
                    await self._refresh()
        found = self._find(algorithm, key_id)
        if self._age > EXPIRE_AFTER_SECONDS or (self._failure and not found):
            raise CannotTell(f"the OpenID provider cannot be asked: {self._failure}")
        return found

    @property
    def _age(self) -> float:
        return self._clock() - self._fetched_at

    def _find(self, algorithm: str, key_id: str | None) -> Sequence[Mapping[str, Any]]:
        return [
            key
            for key in self._keys
            if key_id in (None, key.get("kid"))
            # A key may name the only use and algorithm that it is for.
            and key.get("use", "sig") == "sig"
            and key.get("alg", algorithm) == algorithm
        ]

    async def _refresh(self) -> None:
        detail = ""  # for the log
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._keys = await self._fetch()
        except TimeoutError:
            self._failure = f"no complete answer within {TIMEOUT_SECONDS:g} s"
        except FetchFailed as error:
            self._failure, detail = "no usable answer", f" ({error})"  # the caller is a stranger
        except _Unusable as error:
            self._failure = str(error)
        except (msgspec.MsgspecError, ValueError):
            self._failure = "the answer is not that of an OpenID provider"
        else:
            self._fetched_at, self._failure = self._clock(), ""
        if self._failure:
            log.warning("no keys from the OpenID provider: %s%s", self._failure, detail)
        self._asked_at = self._clock()  # when the answer came: waiting callers must not ask too

    async def _fetch(self) -> Sequence[Mapping[str, Any]]:
        """Discover the provider's keys. Raises what `_get` and msgspec do."""
        url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
        found = msgspec.json.decode(await _get(url), type=_Discovery)
        if found.issuer != self._issuer:
            raise _Unusable("its issuer is not OIDC_ISSUER")
        if urlsplit(found.jwks_uri).scheme not in key_schemes(self._issuer):
            raise _Unusable("it offers its keys over an unsafe connection")
        return msgspec.json.decode(await _get(found.jwks_uri), type=_KeySet).keys[:MAX_KEYS]


async def _get(url: str) -> bytes:
    """Fetch a JSON document. Raises FetchFailed, TimeoutError and _Unusable."""
    answer = await fetch(
        url, ["Accept-Encoding: identity"], max_bytes=MAX_DOCUMENT_BYTES, timeout=TIMEOUT_SECONDS
    )
    if answer.status != HTTPStatus.OK:
        raise _Unusable(f"HTTP {answer.status}")
    if answer.is_too_long:
        raise _Unusable(f"an answer is larger than {MAX_DOCUMENT_BYTES} bytes")
    return answer.body


def unverified_header(token: str) -> tuple[str, str | None]:
    """Return the algorithm and the key id that a token names, before anything of it is proven."""
    try:
        header = jwt.get_unverified_header(token) if len(token) <= MAX_TOKEN_BYTES else {}
    except (jwt.PyJWTError, RecursionError):
        header = {}
    return str(header.get("alg", "")), header.get("kid")


def key_schemes(issuer: str) -> Sequence[str]:
    """Return over which schemes keys may come. An issuer known over TLS must offer them so, too."""
    return ("https",) if urlsplit(issuer).scheme == "https" else ("http", "https")
