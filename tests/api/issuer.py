"""An OpenID provider on loopback, with keys of its own."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.outbound.servers import Connection, LoopbackTarget, listening

AUDIENCE = "message-router"
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Key:
    kid: str
    algorithm: str
    private: Any
    public: Mapping[str, Any]  # as a JSON Web Key

    def published(self, **more: str) -> dict[str, Any]:
        return {**self.public, "kid": self.kid, **more}


@cache  # an RSA key takes a while to be found
def rsa_key(kid: str = "rsa", algorithm: str = "RS256", bits: int = 2048) -> Key:
    private = rsa.generate_private_key(65537, bits)
    public = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return Key(kid, algorithm, private, public)


@cache
def ec_key(kid: str = "ec") -> Key:
    private = ec.generate_private_key(ec.SECP256R1())
    return Key(kid, "ES256", private, ECAlgorithm.to_jwk(private.public_key(), as_dict=True))


@cache
def ed_key(kid: str = "ed") -> Key:
    private = ed25519.Ed25519PrivateKey.generate()
    return Key(kid, "EdDSA", private, OKPAlgorithm.to_jwk(private.public_key(), as_dict=True))


@dataclass
class Issuer:
    """What it answers can be changed at any time."""

    keys: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    answers: dict[str, Any] = field(default_factory=dict)  # in place of its own, by path
    name: str = ""  # in place of its own
    delay: float = 0.0
    target: LoopbackTarget | None = None

    @property
    def url(self) -> str:
        assert self.target is not None
        return f"http://127.0.0.1:{self.target.port}/realm"

    @property
    def asked(self) -> int:
        """How often it was asked for its keys."""
        assert self.target is not None
        return sum("/keys" in request.line for request in self.target.requests)

    async def script(self, connection: Connection) -> None:
        while True:
            path = (await connection.read()).line.split()[1]
            await asyncio.sleep(self.delay)
            answer = self.answers.get(path, self._documents().get(path))
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            await connection.reply(self.status if answer is not None else 404, body)

    def _documents(self) -> Mapping[str, Any]:
        return {
            "/realm/.well-known/openid-configuration": {
                "issuer": self.name or self.url,
                "jwks_uri": f"{self.url}/keys",
            },
            "/realm/keys": {"keys": self.keys},
        }

    def token(
        self, key: Key, claims: Mapping[str, Any] = NOTHING, *, kid: str | None = "its own"
    ) -> str:
        """A good one, but for what is given; a claim of None is left out."""
        now = int(time.time())
        good = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 300}
        content = {name: value for name, value in {**good, **claims}.items() if value is not None}
        kid = key.kid if kid == "its own" else kid
        headers = {} if kid is None else {"kid": kid}
        return jwt.encode(content, key.private, key.algorithm, headers)


@asynccontextmanager
async def issuing(*keys: dict[str, Any]) -> AsyncIterator[Issuer]:
    issuer = Issuer(list(keys))
    async with listening(issuer.script) as issuer.target:
        yield issuer
