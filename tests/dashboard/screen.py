"""A page in a browser, as the person before it sees and uses it."""

from dataclasses import dataclass, field
from typing import Final

from playwright.async_api import ConsoleMessage, Locator, Page, Request, expect

PATIENCE: Final = 20_000  # milliseconds: far more than anything takes, even on a busy machine
_EXPECTED: Final = ("net::ERR_", "401 (Unauthorized)")  # the browser tells of these by itself

expect.set_options(timeout=PATIENCE)


@dataclass
class Screen:
    page: Page
    errors: list[str] = field(default_factory=list)  # of its scripts, and of its security policy
    foreseen: list[str] = field(default_factory=list)  # what the test makes the browser tell of
    hosts: set[str] = field(default_factory=set)  # that it has asked for something

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note_console)
        self.page.on("request", self._note_request)

    async def visit(self, url: str, view: str = "overview") -> None:
        await self.page.goto(f"{url}/#{view}")

    async def turn_to(self, view: str) -> None:
        await self.page.get_by_role("navigation").get_by_role("link", name=view).click()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name)

    def row(self, text: str) -> Locator:
        """Of a table."""
        return self.page.get_by_role("row").filter(has_text=text)

    def item(self, text: str) -> Locator:
        """Of a list."""
        return self.page.get_by_role("listitem").filter(has_text=text)

    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    async def shows(self, text: str) -> None:
        await expect(self.page.get_by_text(text).first).to_be_visible()

    async def hides(self, text: str) -> None:
        await expect(self.page.get_by_text(text)).to_have_count(0)

    def _note_console(self, message: ConsoleMessage) -> None:
        expected = (*_EXPECTED, *self.foreseen)
        if message.type == "error" and not any(word in message.text for word in expected):
            self.errors.append(message.text)

    def _note_request(self, request: Request) -> None:
        self.hosts.add(request.url.split("/")[2])
