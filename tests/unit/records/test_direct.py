"""Direct subscriptions: which has the messages to a host."""

from delayserver.records.direct import DIRECT_COUNT, DIRECT_FIRST_ID, Destination, is_direct
from delayserver.schedule.wheel_rows import ROUTE_NUMBER, ROUTE_SUBSCRIPTION, route_of


def number(url: str) -> int:
    return Destination(url, "s").subscription_id


def test_the_numbers_stand_on_disks() -> None:
    assert number("http://127.0.0.1:9/x") == 33_554_371
    assert number("https://hooks.example.com/") == 33_554_387


def test_a_host_has_one_number_whatever_the_path() -> None:
    assert len({number(f"https://Hooks.example.com/{n}?{n}") for n in range(9)}) == 1
    assert number("https://HOOKS.example.com") == number("https://hooks.example.com/x")


def test_hosts_have_all_of_the_numbers() -> None:
    found = {number(f"http://10.0.{n}.{m}/") for n in range(10) for m in range(100)}
    assert found == set(range(DIRECT_FIRST_ID, DIRECT_FIRST_ID + DIRECT_COUNT))
    assert all(map(is_direct, found))
    assert not is_direct(DIRECT_FIRST_ID - 1)


def test_a_route_has_room_for_them() -> None:
    for one in (DIRECT_FIRST_ID, DIRECT_FIRST_ID + DIRECT_COUNT - 1):
        assert route_of(7, one) & ROUTE_NUMBER == one
        assert route_of(7, one) & ROUTE_SUBSCRIPTION
    assert route_of(7, 0) == 7
