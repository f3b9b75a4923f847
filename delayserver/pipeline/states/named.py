"""The names that numbers in the logs of a shard stand for, as Arrow columns need them.

Cost: the small tables of the catalog. Threads: values.
"""

from collections.abc import Mapping

from delayserver.pipeline.logs.columns import Names, name_table
from delayserver.pipeline.states.snapshot import read_subscriptions
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import read_subjects
from storage.catalog import Catalog


def read_names(catalog: Catalog, shard: int) -> Names:
    """The names for the numbers in the logs of a shard."""
    return names_of(read_subjects(catalog), read_subscriptions(catalog), shard)


def names_of(
    subjects: Mapping[int, str], subscriptions: Mapping[int, Subscription], shard: int
) -> Names:
    """The same, from tables that were read already."""
    named = {number: subscription.name for number, subscription in subscriptions.items()}
    return Names(name_table(subjects), name_table(named), shard)
