"""How the API's answers are made: a pydantic model reads the router's own values by attribute.

A field names the attribute that it shows, where the names differ, and an example for the OpenAPI
document. Its type says how the value is shown, for instance `Time` for Unix seconds.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    AliasGenerator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)
from pydantic.alias_generators import to_camel

from router.core.redact import mask_urls
from router.core.timestamps import iso

AT: Final = "2026-01-31T08:15:30.123Z"  # in examples
SLICE: Final = 25  # pools or queues: a few milliseconds of work
_MINUTES: Final = re.compile(r"(\d)Min$")

T = TypeVar("T")


Time = Annotated[str, BeforeValidator(iso)]
EnumName = Annotated[str, BeforeValidator(lambda member: member.name)]
Masked = Annotated[str, AfterValidator(mask_urls)]  # without the secrets that URLs may contain
Milliseconds = Annotated[float, BeforeValidator(lambda seconds: round(seconds * 1000, 3))]
WholeMilliseconds = Annotated[int, BeforeValidator(lambda seconds: round(seconds * 1000))]
Role = Annotated[str, BeforeValidator(lambda primary: "PRIMARY" if primary else "STANDBY")]


def _collect_example(schema: dict[str, Any]) -> None:
    """Make the example of a model out of those of its fields."""
    shown = {name: field.pop("examples") for name, field in schema["properties"].items()}
    schema["example"] = {name: examples[0] for name, examples in shown.items()}


def shown(
    path: str, example: object, description: str | None = None, *, default: object = ...
) -> Any:
    """Declare a field that shows the attribute at `path`, such as `a.b`, or else `default`."""
    alias = AliasPath(*path.split("."))
    return Field(default, validation_alias=alias, examples=[example], description=description)


def as_is(example: object, description: str | None = None, *, default: object = ...) -> Any:
    """Declare a field that shows the attribute of its own name."""
    return Field(default, examples=[example], description=description)


class ResponseModel(BaseModel):
    model_config = ConfigDict(
        alias_generator=AliasGenerator(
            serialization_alias=lambda field: _MINUTES.sub(r"\1min", to_camel(field))
        ),
        validate_by_name=True,
        validate_by_alias=True,
        from_attributes=True,
        frozen=True,
        json_schema_extra=_collect_example,
        json_schema_serialization_defaults_required=True,
    )


async def sliced(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield the items in small lists. In between, deliveries go on."""
    left = iter(items)
    while some := list(islice(left, SLICE)):
        yield some
        await asyncio.sleep(0)
