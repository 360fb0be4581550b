"""The benchmark believes no figure before it has seen that every message arrived as promised."""

import json

from bench.load import Load

LOAD = Load(messages=4, groups=2, targets=["http://127.0.0.1/a", "http://127.0.0.1/b"], run="r")
IDS = ["r-00000000", "r-00000001", "r-00000002", "r-00000003"]


def test_what_arrives_once_and_in_group_order_is_in_order() -> None:
    assert LOAD.faults(IDS) == []
    assert LOAD.faults([IDS[1], IDS[0], IDS[2], IDS[3]]) == []  # groups do not wait for each other


def test_a_missing_message_is_a_fault_unless_the_run_was_cut_short() -> None:
    arrived = IDS[:3]

    assert LOAD.faults(arrived) == ["1 not delivered: r-00000003"]
    assert LOAD.faults(arrived, complete=False) == []


def test_a_message_that_came_twice_is_a_fault_at_any_time() -> None:
    arrived = [*IDS, IDS[3]]

    assert LOAD.faults(arrived) == ["1 delivered again: r-00000003"]
    assert LOAD.faults(arrived, complete=False) == ["1 delivered again: r-00000003"]


def test_a_message_after_a_later_one_of_its_group_is_a_fault() -> None:
    arrived = [IDS[2], IDS[1], IDS[0], IDS[3]]

    assert LOAD.faults(arrived) == ["1 delivered after a later one of their group: r-00000000"]


def test_a_group_is_one_of_its_pool() -> None:
    load = Load(messages=4, groups=1, pools=2, targets=["http://127.0.0.1/"], run="r")

    assert load.faults([IDS[1], IDS[0], IDS[2], IDS[3]]) == []
    assert load.faults([IDS[0], IDS[3], IDS[2], IDS[1]]) != []


def test_other_runs_are_none_of_its_business() -> None:
    assert LOAD.faults(["s-00000001", *IDS, "-"]) == []


def test_a_long_list_of_faults_is_cut() -> None:
    load = Load(messages=9, groups=1, targets=["http://127.0.0.1/"], run="r")

    (fault,) = load.faults([])

    assert fault.startswith("9 not delivered: r-00000000, ")
    assert fault.endswith("r-00000004 …")


def test_groups_pools_and_targets_are_taken_in_turn() -> None:
    bodies = [json.loads(LOAD.body(number)) for number in range(3)]

    assert [each["messageGroupId"] for each in bodies] == ["r-0", "r-1", "r-0"]
    assert [each["mediationTarget"][-1] for each in bodies] == ["a", "b", "a"]
    assert [each["poolCode"] for each in bodies] == ["POOL-0"] * 3


def test_an_id_can_be_in_the_url_for_routers_that_send_no_header() -> None:
    load = Load(messages=1, groups=1, targets=["http://127.0.0.1/a"], run="r", ids_in_url=True)

    (item,) = load.publications(0, 10)

    assert item.message.target == "http://127.0.0.1/a?id=r-00000000"
