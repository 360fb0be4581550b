"""Single requests that go out as one call, because they were made within a moment."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from router.ports import Disconnected

T = TypeVar("T")
R = TypeVar("R")


class _Request(NamedTuple, Generic[T, R]):
    item: T
    answer: asyncio.Future[R]


class Gathering(Generic[T, R]):
    """The first to ask waits a moment for others, and sends for all of them, in their order."""

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[R]]], moment: float
    ) -> None:
        self._send = send
        self._moment = moment
        self._requests: list[_Request[T, R]] = []

    async def ask(self, item: T) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(item, answer))
        if len(self._requests) == 1:
            await self._send_for_all()
        return await answer

    async def _send_for_all(self) -> None:
        requests = self._requests
        try:
            await asyncio.sleep(self._moment)
            self._requests = []
            answers = await self._send([request.item for request in requests])
            for request, answer in zip(requests, answers, strict=True):
                if not request.answer.done():  # else nobody waits any more
                    request.answer.set_result(answer)
        finally:
            if self._requests is requests:
                self._requests = []
            _let_down(requests[1:])


def _let_down(others: Sequence[_Request[T, R]]) -> None:
    """Whoever sends for them may be called off, or fail; they must not wait for ever."""
    for request in others:
        if not request.answer.done():
            request.answer.set_exception(Disconnected("the call was not made"))
