"""The names for the numbers of subjects and subscriptions, if only brokers are read.

    the directory of a node, or an export   all names that were ever defined
    NAME.log                                the names defined since its beginning; the brokers keep
                                            an hour of it, once nodes have filed it

Cost: the small tables of a directory; the whole of the log, once. Threads: values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from delayserver.errors import PipelineError
from delayserver.pipeline.logs.columns import Names
from delayserver.pipeline.progress import Job
from delayserver.pipeline.states.named import names_of
from delayserver.pipeline.states.snapshot import open_directories, read_subscriptions
from delayserver.pipeline.topics.pieces import DEFINED, LoggedDefinition, pieces_of
from delayserver.pipeline.topics.source import ClusterTopics
from delayserver.records.subscriptions import Subscription, decode_subscription
from delayserver.records.tables import read_subjects
from storage.replicated.meta import ClusterIdentity
from storage.rows import RecordKind


class NotOfClusterError(PipelineError):
    """A data directory is not one of the cluster's."""

    def __init__(self, root: str, cluster: str) -> None:
        super().__init__(f"{root} is no directory of a node of the cluster {cluster}")


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Subjects and subscriptions of a shard by their numbers, deleted ones, too."""

    subjects: Mapping[int, str]
    subscriptions: Mapping[int, Subscription]

    def columns(self, shard: int) -> Names:
        """The names in the form that Arrow columns need."""
        return names_of(self.subjects, self.subscriptions, shard)


def names_in_directories(identity: ClusterIdentity, *data_dirs: str) -> dict[int, KnownNames]:
    """The names in directories of nodes, or in exports, by shard.

    Raises NotADataDirectoryError, CatalogError, NotOfClusterError."""
    known = {}
    for directory in open_directories(*data_dirs) if data_dirs else ():
        shard = directory.shard
        if shard >= identity.shards or directory.stamp != identity.stamps[shard]:
            raise NotOfClusterError(directory.root, identity.cluster)
        with directory.catalog() as catalog:
            known[shard] = KnownNames(read_subjects(catalog), read_subscriptions(catalog))
    return known


def names_in_log(job: Job, topics: ClusterTopics) -> dict[int, KnownNames]:
    """The names in the log, as far as it reaches back, by shard. Raises KafkaSourceMissingError."""
    subjects: dict[int, dict[int, str]] = {}
    subscriptions: dict[int, dict[int, Subscription]] = {}
    with job.step("reading names in the log"):
        pieces = list(pieces_of(topics.table(job.spark, "log"), topics, {}, {DEFINED}))
    for shard, _, data in pieces:
        defined = msgspec.msgpack.decode(data, type=LoggedDefinition)
        if defined.kind == RecordKind.SUBJECT:
            subjects.setdefault(shard, {})[defined.number] = defined.data.decode()
        else:
            found = decode_subscription(defined.data, defined.number)
            subscriptions.setdefault(shard, {})[defined.number] = found
    return {
        shard: KnownNames(subjects.get(shard, {}), subscriptions.get(shard, {}))
        for shard in range(topics.identity.shards)
    }
