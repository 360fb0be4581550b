"""Who explains messages, made by hand: it answers as told and remembers what it was asked."""

from dataclasses import dataclass, field

from router.core.explain import Explanation, Situation
from router.core.target import read_target
from router.engine.explaining import Story

NOTHING = Explanation(situation=Situation.IDLE, text="nothing to tell")


@dataclass
class HandMadeExplaining:
    answer: Explanation = NOTHING
    stories: dict[str, Story] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    async def story(self, message_id: str) -> Story:
        return self.stories.get(message_id, Story(message_id=message_id))

    async def message(self, message_id: str) -> Explanation:
        self.asked.append(("message", message_id))
        return self.answer

    def group(self, group: str | None, pool: str | None) -> Explanation:
        self.asked.append(("group", f"{group} in {pool}"))
        return self.answer

    def target(self, url: str) -> Explanation:
        read_target(url)
        self.asked.append(("target", url))
        return self.answer
