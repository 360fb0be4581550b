"""Query parameters, read alike everywhere."""

from typing import Final

from pydantic import BeforeValidator

BLANK_IS_NONE: Final = BeforeValidator(lambda given: given or None)  # as in `?queue=&pool=a`
