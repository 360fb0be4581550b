"""Chains that are hard to read: as long and as deep as a message may be (CMD-11)."""

import json
from typing import Final

from router.core.message import MAX_MESSAGE_BYTES, MAX_STEPS

HARD_TO_READ: Final = (b'["["],', b"[],", b'"[",[],', b'{"a":1},')  # again and again


def deep_chain(name: str, target: str, unit: bytes, levels: int = MAX_STEPS) -> bytes:
    """Return a message of 1 MiB. The payload of its last step is filled up with `unit`."""
    step = json.dumps({"mediationTarget": target, "then": 0}).encode().removesuffix(b"0}")
    first = step.replace(b"{", json.dumps({"id": name}).encode().removesuffix(b"}") + b", ", 1)
    start = first + step * (levels - 1) + step.replace(b'"then"', b'"payload"') + b"["
    end = b"1]" + b"}" * (levels + 1)
    return start + unit * ((MAX_MESSAGE_BYTES - len(start) - len(end)) // len(unit)) + end
