"""What a worker refuses before it starts (CMD-9)."""

import pytest

from router.worker import Worker


@pytest.mark.rule("CMD-9")
def test_a_type_has_one_handler_and_a_usable_name() -> None:
    worker = Worker("memory://q", dead_letters="none")

    async def paid(*_: object) -> None: ...

    worker.handler("paid")(paid)
    with pytest.raises(ValueError, match="has a handler"):
        worker.handler("paid")(paid)
    with pytest.raises(ValueError, match="letters"):
        worker.handler("pa id")


@pytest.mark.parametrize(
    ("uri", "options", "reason"),
    [
        ("", {}, "queueUri"),
        ("memory://q", {"concurrency": "many"}, "concurrency"),
        (
            "memory://q",
            {"dead_letters": "nowhere"},
            "sqlite:///path, postgresql://host/database or none",
        ),
    ],
)
@pytest.mark.rule("CMD-9")
def test_arguments_that_make_no_sense_are_refused(
    uri: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Worker(uri, **options)  # type: ignore[arg-type]
