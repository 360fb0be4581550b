from tests.support.readme import README, with_settings


def test_the_settings_in_the_readme_are_those_of_the_router() -> None:
    text = README.read_text()

    assert text == with_settings(text), "run: ./dev fmt"
