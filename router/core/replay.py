"""The message that is published when a dead letter is replayed (DLQ-2)."""

from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.core.target import BadTarget, origin_of, read_target

# Counted from a publication that is long over.
_LEFT_OUT: Final = ("expiresAt", "delaySeconds")
_SECRETS: Final = ("authToken", "signingSecret")

_fields: Final = msgspec.json.Decoder(dict[str, Raw])


class TargetChange(Struct, frozen=True):
    """Where targets move to: those that begin with one prefix get another."""

    old: str
    new: str
    keeps_secrets: bool = False  # of messages, also if the origin is another one

    def problem(self) -> str | None:
        """Return why it cannot be used, or None."""
        for name, prefix in (("targetFrom", self.old), ("targetTo", self.new)):
            try:
                is_local = read_target(prefix).is_local
            except BadTarget as error:
                return f"`{name}` {error}"
            if is_local:
                return f"`{name}` must begin with https:// or http://"
        if self.old.endswith("/") != self.new.endswith("/"):  # a host could grow by what follows
            return "both prefixes end with a slash, or none does"
        return None

    def of(self, target: str) -> str | None:
        """Return the new target, or None if the prefix is another one. It ends with a segment."""
        rest = target.removeprefix(self.old)
        is_whole = not rest or self.old.endswith("/") or rest[0] in "/?#"
        return f"{self.new}{rest}" if target.startswith(self.old) and is_whole else None


def replayed_body(body: bytes, target: str, change: TargetChange | None = None) -> bytes:
    """Return the message to publish again: byte for byte, unless something has to change."""
    new = None if change is None else change.of(target)
    fields = _fields.decode(body)
    left_out = [*_LEFT_OUT]
    if change is not None and new is not None:
        fields["mediationTarget"] = Raw(msgspec.json.encode(new))
        if not change.keeps_secrets and origin_of(new) != origin_of(target):
            left_out += _SECRETS
    kept = {name: value for name, value in fields.items() if name not in left_out}
    return body if new is None and len(kept) == len(fields) else msgspec.json.encode(kept)
