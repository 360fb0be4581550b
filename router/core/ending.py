"""How a message ended: its result or its failure, for replies and next steps (CMD-2, CMD-3)."""

from typing import Final

from msgspec import Struct

MAX_RESULT_BYTES: Final = 64 * 1024
MAX_ERROR_BYTES: Final = 1024
MAX_CODE_CHARACTERS: Final = 128


class Failure(Struct, frozen=True):
    """Why a message was given up."""

    code: str  # the target's own, or HTTP_<status>, or the name of our error
    message: str  # masked; never empty
    http_status: int | None = None


class Ending(Struct, frozen=True):
    """A message that ended for good: accepted, or given up with a failure."""

    failure: Failure | None = None
    result: bytes | None = None  # JSON, at most MAX_RESULT_BYTES
    result_omitted: bool = False  # the target gave a result that is too long to keep


ACCEPTED: Final = Ending()  # of a message that wants a reply or next steps, and gave no result
