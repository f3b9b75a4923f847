"""Tests mirror modules: `tests/unit/schedule/test_wheel.py` tests `delayserver/schedule/wheel.py`.

So a reader who changes a module knows which file to run. The mirror of a module may also be a
property test (`tests/property/test_NAME.py`), and the pipeline has its mirrors in `tests/pipeline`.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNMIRRORED_MAX = 150
"""The list below only gets shorter: a new module comes with a test file of its name."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "tests/cluster/test_commands.py": ("delayserver/cli/cluster/made.py",),
    "tests/cluster/test_here.py": ("delayserver/cli/cluster/orders.py",),
    "tests/cluster/test_kafka.py": ("storage/replicated/engine.py",),
    "tests/cluster/test_transactions.py": (
        "storage/replicated/kafka_transactions.py",
        "storage/replicated/transactions.py",
    ),
    "tests/integration/test_api_access.py": (
        "delayserver/api/rest/authorize.py",
        "delayserver/api/rest/tokens.py",
        "delayserver/api/scopes.py",
    ),
    "tests/integration/test_api_backups.py": ("delayserver/api/rest/backups.py",),
    "tests/integration/test_api_bad_days.py": ("delayserver/recovery/memory_faults.py",),
    "tests/integration/test_api_conditions.py": ("delayserver/api/rest/named.py",),
    "tests/integration/test_api_imports.py": ("delayserver/parts/imports/rest.py",),
    "tests/integration/test_api_listing.py": (
        "delayserver/api/rest/common.py",
        "delayserver/queries/listing.py",
    ),
    "tests/integration/test_api_messages.py": ("delayserver/api/rest/messages.py",),
    "tests/integration/test_api_operations.py": (
        "delayserver/wire/operations.py",
        "delayserver/api/rest/operations.py",
        "delayserver/parts/attempts/attempts.py",
    ),
    "tests/integration/test_api_schedules.py": (
        "delayserver/wire/schedules.py",
        "delayserver/parts/schedules/rest.py",
        "delayserver/parts/schedules/intake.py",
    ),
    "tests/integration/test_api_sources.py": ("delayserver/parts/sources/rest.py",),
    "tests/integration/test_api_subscriptions.py": ("delayserver/api/rest/subscriptions.py",),
    "tests/integration/test_api_timers.py": ("delayserver/parts/heartbeats/rest.py",),
    "tests/integration/test_api_two_ways.py": ("delayserver/api/hot/consume.py",),
    "tests/integration/test_api_webhooks.py": ("delayserver/server/webhook_sink.py",),
    "tests/integration/test_client_processes.py": ("delayserver/client/replacing.py",),
    "tests/integration/test_cluster_map.py": ("delayserver/api/map_call.py",),
    "tests/integration/test_examples.py": (
        "delayserver/examples/django_shop.py",
        "delayserver/examples/fastapi_shop.py",
        "delayserver/examples/order_unpaid.py",
        "delayserver/examples/red_envelope_refund.py",
    ),
    "tests/integration/test_openapi.py": ("delayserver/api/rest/openapi.py",),
    "tests/integration/test_sharded_server.py": ("delayserver/cli/demo/sharded.py",),
    "tests/integration/test_supervisor.py": ("delayserver/cluster/joining.py",),
    "tests/integration/test_webhook_sender.py": (
        "delayserver/delivery/batch.py",
        "delayserver/delivery/sender.py",
        "delayserver/delivery/webhook.py",
    ),
    "tests/pipeline/archive/test_archive.py": (
        "delayserver/cli/pipeline_archive.py",
        "delayserver/pipeline/archive/plain.py",
    ),
    "tests/pipeline/archive/test_table.py": ("delayserver/pipeline/archive/rows.py",),
    "tests/pipeline/audits/test_audit.py": (
        "delayserver/pipeline/audits/examples.py",
        "delayserver/pipeline/audits/following.py",
        "delayserver/pipeline/audits/judging.py",
        "delayserver/pipeline/audits/on_spark.py",
        "delayserver/pipeline/audits/plan.py",
        "delayserver/pipeline/audits/row_ids.py",
        "delayserver/pipeline/progress.py",
        "delayserver/pipeline/reports/audit_report.py",
    ),
    "tests/pipeline/audits/test_here.py": (
        "delayserver/pipeline/audits/bodies.py",
        "delayserver/pipeline/audits/facts.py",
        "delayserver/pipeline/audits/telling.py",
    ),
    "tests/pipeline/exports/test_export.py": (
        "delayserver/cli/pipeline_export.py",
        "delayserver/pipeline/exports/exported.py",
        "delayserver/pipeline/exports/manifest.py",
        "delayserver/pipeline/exports/place.py",
    ),
    "tests/pipeline/load/test_load.py": (
        "delayserver/cli/pipeline.py",
        "delayserver/cli/pipeline_load.py",
        "delayserver/pipeline/calls.py",
        "delayserver/pipeline/load/ids.py",
    ),
    "tests/pipeline/logs/test_source.py": (
        "delayserver/pipeline/logs/columns.py",
        "delayserver/pipeline/logs/dispatched.py",
        "delayserver/pipeline/logs/options.py",
    ),
    "tests/pipeline/publish/test_publish.py": ("delayserver/pipeline/publish/mapping.py",),
    "tests/pipeline/publish/test_sending.py": ("delayserver/pipeline/publish/columns.py",),
    "tests/pipeline/reports/test_forecast.py": (
        "delayserver/pipeline/reports/forecast_report.py",
        "delayserver/pipeline/reports/page.py",
    ),
    "tests/pipeline/reports/test_live.py": ("delayserver/cli/pipeline_lateness.py",),
    "tests/pipeline/states/test_states.py": (
        "delayserver/pipeline/states/history.py",
        "delayserver/pipeline/states/named.py",
        "delayserver/pipeline/states/vanished.py",
    ),
    "tests/pipeline/test_all_options.py": ("delayserver/pipeline/audits/groups.py",),
    "tests/pipeline/test_shards.py": ("delayserver/pipeline/reports/names.py",),
    "tests/pipeline/topics/test_cluster.py": (
        "delayserver/cli/pipeline_watch.py",
        "delayserver/pipeline/topics/settled.py",
    ),
    "tests/pipeline/topics/test_folding.py": ("delayserver/pipeline/topics/pieces.py",),
    "tests/pipeline/topics/test_watch.py": (
        "delayserver/pipeline/topics/following.py",
        "delayserver/pipeline/topics/hours.py",
        "delayserver/pipeline/topics/names.py",
        "delayserver/pipeline/topics/verdicts.py",
    ),
    "tests/property/test_backlog.py": ("delayserver/delivery/catch_up.py",),
    "tests/property/test_publishing.py": ("delayserver/decisions/new_messages.py",),
    "tests/property/test_shard_pages.py": ("delayserver/shards/pages.py",),
    "tests/simulation/test_catalog_rot.py": ("storage/catalog_file.py",),
    "tests/simulation/test_repair.py": ("delayserver/recovery/repair.py",),
    "tests/simulation/test_shards.py": ("delayserver/shards/demand.py",),
    "tests/simulation/test_snapshots.py": ("delayserver/recovery/snapshots.py",),
    "tests/unit/shards/test_consuming.py": (
        "delayserver/shards/endings.py",
        "delayserver/shards/gathering.py",
        "delayserver/shards/local.py",
        "delayserver/shards/peers.py",
        "delayserver/shards/supply.py",
    ),
    "tests/unit/cluster/test_keeping.py": ("delayserver/cluster/copying.py",),
    "tests/unit/shards/test_limits.py": ("delayserver/shards/allotment.py",),
    "tests/unit/shards/test_link.py": ("delayserver/shards/place.py",),
    "tests/unit/shards/test_real_shards.py": ("delayserver/shards/front.py",),
    "tests/unit/shards/test_router.py": ("delayserver/cluster/forwarding.py",),
    "tests/unit/cluster/test_reports.py": ("delayserver/api/cluster/reports.py",),
    "tests/unit/cluster/test_sharing.py": ("delayserver/cluster/proofs.py",),
    "tests/unit/api/hot/test_cancel.py": (
        "delayserver/api/hot/answers.py",
        "delayserver/api/hot/paths.py",
    ),
    "tests/unit/api/hot/test_protocol.py": (
        "delayserver/api/hot/asgi.py",
        "delayserver/api/hot/connection.py",
    ),
    "tests/unit/api/test_intake.py": (
        "delayserver/api/packed.py",
        "delayserver/records/nesting.py",
    ),
    "tests/unit/api/test_problems.py": ("delayserver/errors.py",),
    "tests/unit/cli/test_cluster.py": (
        "delayserver/cli/cluster/adopt.py",
        "delayserver/cli/cluster/brokers.py",
    ),
    "tests/unit/cli/test_demo_process.py": ("delayserver/cli/demo/process.py",),
    "tests/unit/cli/test_demo_servers.py": ("delayserver/cli/demo/servers.py",),
    "tests/unit/cli/test_ledger.py": ("delayserver/cli/demo/ledger.py",),
    "tests/unit/cli/test_receiver.py": (
        "delayserver/cli/demo/receiver.py",
        "delayserver/cli/demo/shop.py",
    ),
    "tests/unit/parts/schedules/test_commands.py": ("delayserver/cli/named.py",),
    "tests/unit/cli/test_subscriptions.py": ("delayserver/cli/options.py",),
    "tests/unit/client/test_batching.py": ("delayserver/client/batches.py",),
    "tests/unit/client/test_blocking.py": ("delayserver/client/loop_thread.py",),
    "tests/unit/client/test_owners.py": (
        "delayserver/client/cluster_map.py",
        "delayserver/client/retries.py",
    ),
    "tests/unit/client/test_producer.py": (
        "delayserver/client/calling.py",
        "delayserver/client/cutting.py",
        "delayserver/client/transport.py",
    ),
    "tests/unit/client/test_sources.py": ("delayserver/client/definitions.py",),
    "tests/unit/decisions/test_outcomes.py": ("delayserver/decisions/outcome_messages.py",),
    "tests/unit/parts/schedules/test_scheduling.py": (
        "delayserver/decisions/defining.py",
        "delayserver/records/named.py",
    ),
    "tests/unit/parts/imports/test_imports.py": ("delayserver/parts/imports/importer.py",),
    "tests/unit/parts/sources/test_sourcing.py": ("delayserver/parts/sources/records.py",),
    "tests/unit/decisions/test_watches.py": ("delayserver/decisions/events.py",),
    "tests/unit/delivery/test_orphans.py": ("delayserver/delivery/reassignment.py",),
    "tests/unit/delivery/test_queue.py": ("delayserver/delivery/handout.py",),
    "tests/unit/delivery/test_dispatcher.py": (
        "delayserver/delivery/deliveries.py",
        "delayserver/delivery/permits.py",
        "delayserver/delivery/ports.py",
    ),
    "tests/unit/delivery/test_transaction_sink.py": ("delayserver/delivery/sink.py",),
    "tests/unit/records/test_sharding.py": ("delayserver/api/hot/belonging.py",),
    "tests/unit/recovery/test_check.py": ("delayserver/schedule/expansion.py",),
    "tests/unit/recovery/test_incoming.py": ("storage/swap.py",),
    "tests/unit/recovery/test_replica.py": ("delayserver/recovery/store.py",),
    "tests/unit/server/test_backups.py": (
        "delayserver/backup/shelf.py",
        "delayserver/backup/restoring.py",
    ),
    "tests/unit/server/test_calls.py": (
        "delayserver/delivery/delayed_fetch.py",
        "delayserver/queries/dead_letters.py",
        "delayserver/records/message_id.py",
        "delayserver/server/futures.py",
    ),
    "tests/unit/storage/test_files.py": ("storage/errors.py",),
    "tests/unit/storage/test_message_log.py": ("storage/write_ahead_log.py",),
    "tests/unit/timers/test_contract.py": (
        "delayserver/timers/interface.py",
        "delayserver/timers/scheduled_executor.py",
    ),
    "tests/unit/timers/test_heap.py": ("delayserver/timers/indexed_heap.py",),
}
"""Modules without a mirror, by the test file that tests them. All have one reason: such a module
came into being when a larger one was cut, and its tests stayed with their neighbours."""


def modules() -> Iterator[str]:
    """All modules of the product that hold code of their own."""
    for package in ("delayserver", "storage"):
        for path in sorted((ROOT / package).glob("**/*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not path.name.startswith("__"):
                yield name


def mirrors(module: str) -> list[str]:
    """The test files that may bear the name of this module."""
    folder, _, file = module.removeprefix("delayserver/").rpartition("/")
    found = [f"tests/unit/{folder}/test_{file}", f"tests/property/test_{file}"]
    if folder.startswith("pipeline"):
        found.append(f"tests/{folder}/test_{file}")
    return [name.replace("//", "/") for name in found]


def has_mirror(module: str) -> bool:
    return any((ROOT / name).is_file() for name in mirrors(module))


def test_where_a_module_has_its_mirror() -> None:
    assert mirrors("delayserver/config.py")[0] == "tests/unit/test_config.py"
    assert mirrors("storage/frame.py")[0] == "tests/unit/storage/test_frame.py"
    assert "tests/pipeline/load/test_note.py" in mirrors("delayserver/pipeline/load/note.py")
    assert not has_mirror("storage/no_such_module.py")


def test_every_module_has_a_mirror_or_stands_on_the_list() -> None:
    listed = [module for names in ELSEWHERE.values() for module in names]
    assert sorted(listed) == sorted(set(listed)), "a module stands on the list twice"
    lacking = {module for module in modules() if not has_mirror(module)}
    assert lacking - {*listed} == set(), "write a test file of the module's name"
    assert {*listed} - lacking == set(), "has a mirror, or is gone: take it off the list"


def test_the_list_only_gets_shorter() -> None:
    assert sum(map(len, ELSEWHERE.values())) <= UNMIRRORED_MAX
    assert [name for name in ELSEWHERE if not (ROOT / name).is_file()] == []
