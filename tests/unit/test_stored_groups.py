import pytest

from router.core.order import MAX_NAME_CHARACTERS, StoredGroups, store_name

G = ("P", "g")


@pytest.mark.rule("ORD-4")
def test_a_group_is_forgotten_only_if_nothing_went_to_the_store_meanwhile() -> None:
    groups = StoredGroups()
    assert groups.begin(G, "a") == "a"
    assert groups.ask([G]) == {}  # on its way: there is nothing to ask
    groups.end(G)
    asked = groups.ask([G, ("P", "unknown")])

    assert groups.begin(G, "b") == "a"
    groups.end(G)
    groups.answer(asked, [])
    assert G in groups
    groups.answer(groups.ask([G]), [G])
    assert G in groups
    groups.answer(groups.ask([G]), [])
    assert G not in groups
    groups.answer({G: 1}, [])


@pytest.mark.rule("ORD-4")
def test_what_was_stored_by_another_process_has_no_first_message() -> None:
    groups = StoredGroups()
    groups.load([G])

    assert groups.begin(G, "b") == ""


@pytest.mark.rule("ORD-4")
def test_the_name_of_a_store_fits_a_work_queue_and_tells_queues_apart() -> None:
    assert store_name("orders") == "order:orders"
    long = [store_name("q" * 300 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(name) <= MAX_NAME_CHARACTERS for name in long)
