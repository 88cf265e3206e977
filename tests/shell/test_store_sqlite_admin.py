"""What a person may ask of a store file, and how it gets smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch
from rollout_service.errors import ConfigError
from rollout_service.store import SqliteStore
from rollout_service.store.sqlite_admin import compact, store_stats
from tests.contract.store_samples import ROWS, finished, pending, scored, settled


async def run_at(path: Path) -> SqliteStore:
    """Groups 1 to 200, of which all but two went stale."""
    store = SqliteStore(path, max_staleness=2)
    await store.open()
    await store.commit(scored(*range(1, 201)))
    ended = range(1, 199)
    await store.commit(Batch(groups={seq: settled(seq, GroupState.STALE) for seq in ended}, forget_payloads=set(ended)))
    return store


async def test_stats_count_what_is_there_whether_or_not_it_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = await run_at(path)
    in_use = store_stats(path)
    await store.close()
    closed = store_stats(path)
    for stats in (in_use, closed):
        assert stats.groups == {"stale": 198, "ready": 2}
        assert (stats.outstanding, stats.submitted, stats.policy_version) == (2, 200, 0)
        assert stats.rows == {
            "groups": 200,
            "prompts": 2,
            "rollouts": 2 * len(ROWS),
            "payloads": 2 * len(ROWS),
            "scores": 2,
            "leases": 0,
            "lease_groups": 0,
        }
        assert 0 < stats.payload_bytes < 20_000
        assert stats.free_bytes > 100_000
    assert (in_use.log_bytes > 0, closed.log_bytes) == (True, 0)
    assert closed.file_bytes == path.stat().st_size


async def test_compacting_gives_free_pages_back_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = await run_at(path)
    before = await store.load()
    await store.close()
    was, now = compact(path)
    assert now == path.stat().st_size < was
    assert store_stats(path).free_bytes == 0
    await store.open()
    assert await store.load() == before
    await store.commit(Batch(groups={200: pending(200, attempt=2)}))
    await store.close()


async def test_a_store_in_use_is_not_compacted(tmp_path: Path) -> None:
    store = await run_at(tmp_path / "a.db")
    with pytest.raises(ConfigError, match="in use"):
        compact(store.path)
    await store.close()


@pytest.mark.parametrize("ask", [store_stats, compact])
def test_what_is_no_store_is_refused(ask: object, tmp_path: Path) -> None:
    assert callable(ask)
    with pytest.raises(ConfigError, match="does not exist"):
        ask(tmp_path / "a.db")
    (tmp_path / "b.db").write_bytes(b"x" * 1000)
    with pytest.raises(ConfigError, match="is not a SQLite database"):
        ask(tmp_path / "b.db")
    assert (tmp_path / "b.db").read_bytes() == b"x" * 1000


async def test_a_long_run_uses_the_space_of_what_it_forgot_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", max_staleness=2)
    await store.open()
    sizes = []
    seq = 0
    for _ in range(6):
        for _ in range(20):
            seq += 1
            batch = scored(seq)
            batch.rollouts = {(seq, 1, row): finished(row, "long " * 4000) for row in ROWS}
            await store.commit(batch)
            await store.commit(Batch(groups={seq: settled(seq, GroupState.STALE)}, forget_payloads={seq}))
        await store._read(lambda connection: connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        sizes.append(store.path.stat().st_size)
    await store.close()
    assert sizes[-1] <= sizes[0] + 5 * 16384
