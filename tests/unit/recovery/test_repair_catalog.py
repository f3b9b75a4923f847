"""What takes the place of definitions that are lost."""

from delayserver.records.subscriptions import decode_subscription
from delayserver.records.tables import dead_letter_key, number_key
from delayserver.recovery.repair_catalog import Rebuilt, name_what_is_lost
from storage.catalog import Table


def test_the_dead_letters_of_a_lost_subscription_can_be_asked_for() -> None:
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    defined[Table.DEAD_LETTERS] = {dead_letter_key(3, 9): b"a letter"}
    lost, losses = name_what_is_lost(defined, Rebuilt(), is_damaged=False)
    assert [*lost[Table.SUBSCRIPTIONS]] == [number_key(3)]
    definition = decode_subscription(lost[Table.SUBSCRIPTIONS][number_key(3)])
    assert (definition.name, definition.deleted) == ("lost-subscription-3", True)
    assert [definition.name in loss for loss in losses] == [True]
