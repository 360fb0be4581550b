"""A mail server of a few words: it takes mail, and refuses what it is told to refuse."""

import asyncio
from base64 import b64decode
from contextlib import suppress

from tests.support.loopback import LoopbackServer


class MailServer(LoopbackServer):
    def __init__(self) -> None:
        self.refuses = ""  # a word that it answers with 550
        self.logins: list[str] = []
        self.said: list[str] = []  # commands as they came
        self.mails: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # some clients hang up when they do not like what they hear
            await self._talk(reader, writer)
        writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.test\r\n")
        while line := (await reader.readline()).decode(errors="replace").rstrip():
            self.said.append(line)
            word = line.partition(" ")[0].upper()
            answer = self._answer(word, line)
            writer.write(f"{answer}\r\n".encode())
            if answer.startswith("354"):
                self.mails.append((await reader.readuntil(b"\r\n.\r\n")).decode())
                writer.write(b"250 taken\r\n")
            if word == "QUIT":
                return

    def _answer(self, word: str, line: str) -> str:
        if word == self.refuses:
            return "550 no, thank you"
        if word == "AUTH":
            self.logins.append(b64decode(line.split()[2]).decode())
        answers = {
            "EHLO": "250-mail.test\r\n250 AUTH PLAIN",
            "AUTH": "235 welcome",
            "DATA": "354 go on",
            "QUIT": "221 bye",
        }
        return answers.get(word, "250 ok")
