import tracemalloc

import pytest

from router.core.order import MAX_NAME_CHARACTERS, StoredGroups, store_name

G = ("P", "g")


@pytest.mark.rule("ORD-4")
def test_a_group_is_forgotten_only_if_nothing_went_to_the_store_meanwhile() -> None:
    groups = StoredGroups()
    assert groups.begin(G, "a") == "a"
    assert groups.ask([G]) == ()  # on its way: there is nothing to ask
    groups.end(G)
    assert groups.ask([G, ("P", "unknown")]) == (G,)

    assert groups.begin(G, "b") == "a"
    groups.end(G)
    groups.answer([])
    assert G in groups
    groups.ask([G])
    groups.answer([G])
    assert G in groups
    groups.ask([G])
    groups.answer([])
    assert G not in groups
    assert not groups


@pytest.mark.rule("ORD-4")
def test_a_group_that_another_router_stored_meanwhile_is_not_forgotten() -> None:
    groups = StoredGroups()
    groups.load([G])
    groups.ask([G])
    groups.load([G])  # found in the store after the question
    groups.answer([])

    assert G in groups


@pytest.mark.rule("ORD-4", "ORD-13")
def test_groups_of_one_pool_are_forgotten_one_by_one() -> None:
    groups = StoredGroups()
    groups.load([G, ("P", "h"), ("Q", "g")])
    for group in list(groups)[:2]:
        groups.begin(group, "a")
        groups.end(group, forget=True)

    assert list(groups) == [("Q", "g")]
    assert None not in groups


@pytest.mark.rule("ORD-4", "P4")
def test_a_stored_group_takes_little_memory() -> None:
    groups = StoredGroups()
    names = [f"customer-{number:06}" for number in range(20_000)]
    tracemalloc.start()
    for name in names:
        groups.begin(("P", name), "first")
        groups.end(("P", name))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert taken / len(names) < 100
    assert groups.begin(("P", names[0]), "b") == ""  # only the latest are remembered
    assert groups.begin(("P", names[-1]), "b") == "first"


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
