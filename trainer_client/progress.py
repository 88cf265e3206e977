"""A progress bar over a loop of leases.

What always holds: the bar counts each group once, when the service has answered its ack, whether the loop or the
trainer sent it; it is closed when its loop ends, however it ends. Nothing is drawn where stderr is no terminal, so that
a log file holds log lines only; on a terminal the client's own log lines begin on an empty line. tqdm is imported by
the first bar, not with this module.
"""

from __future__ import annotations

import json
import logging
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

if TYPE_CHECKING:
    from trainer_client.core import Request
    from trainer_client.types import Lease

__all__ = ["Progress"]

logger = logging.getLogger("trainer_client")


class Progress:
    """The bar of one loop; where `shown` is False it does nothing. ImportError where it is shown without tqdm.

    `shown_by`: the bars of one client, which tells each of them what was answered. The bar says how many groups were
    acked, and of the lease in hand its policy version, mean staleness and mean reward, how long the trainer waited for
    it, and which share of its time it has waited so far. There is no total before the service is exhausted.
    """

    def __init__(self, shown: bool, shown_by: list[Progress]) -> None:
        self._tqdm: Any = _tqdm() if shown else None
        self._shown_by = shown_by
        self._bar: Any = None
        self._acks = ""
        """The path of an ack of the lease in hand."""
        self._unacked: set[str] = set()
        """Its groups that were not acked yet."""
        self._started = self._waited_s = 0.0
        self._asked_at: float | None = None

    def __enter__(self) -> Self:
        if self._tqdm is not None:
            self._started = time.monotonic()
            # disable=None: where the output is no terminal
            self._bar = self._tqdm(desc="acked", unit=" groups", disable=None, dynamic_ncols=True)
            self._shown_by.append(self)
            logger.addFilter(self._make_room)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            logger.removeFilter(self._make_room)
            self._shown_by.remove(self)
            self._bar.close()
            self._bar = None

    def asked(self) -> None:
        """The trainer wants the next lease and waits from here on."""
        if self._bar is not None and self._asked_at is None:
            self._asked_at = time.monotonic()

    def handed(self, lease: Lease) -> None:
        """The trainer has this lease in hand and waits no more."""
        if self._bar is None:
            return
        now = time.monotonic()
        waited_s = now - (self._asked_at or now)
        self._asked_at = None
        self._waited_s += waited_s
        self._acks = f"/leases/{quote(lease.lease_id or '', safe='')}/ack"
        self._unacked = {group.group_id for group in lease.groups}
        share = self._waited_s / max(now - self._started, 1e-9)
        self._bar.set_postfix_str(f"{_about(lease)}, waited={waited_s:.2f}s ({share:.0%})")

    def answered(self, request: Request) -> None:
        """The service did what `request` asks for."""
        if self._bar is None or request.path != self._acks:
            return
        named = json.loads(request.body or b"{}").get("group_ids")
        acked = self._unacked if named is None else self._unacked.intersection(named)
        self._unacked = self._unacked - acked
        self._bar.update(len(acked))

    def exhausted(self) -> None:
        """No more groups will come: the total is known."""
        if self._bar is not None:
            self._bar.total = self._bar.n
            self._bar.refresh()

    def _make_room(self, record: logging.LogRecord) -> bool:
        """A filter that lets every record pass, for the moment before it is written."""
        if (bar := self._bar) is not None:
            bar.clear()
        return True


def _tqdm() -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # its types are a package of their own
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return tqdm


def _about(lease: Lease) -> str:
    groups, rewards = lease.groups, [sample.reward for sample in lease.samples if sample.reward is not None]
    staleness = sum(group.staleness for group in groups) / max(len(groups), 1)
    reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    return f"version={lease.policy_version}, staleness={staleness:.2f}, reward={reward}"
