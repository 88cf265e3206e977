"""Where the prefix of a request is cached: the engine that got the first request of its group, and the last of its
rollout.

What always holds: at most `MOST` of each are known, those asked for longest ago are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

from rollout_service.engines.health import Member

MOST = 16_384
"""Far more than are in flight at once; an engine has evicted such an old prefix long ago."""


class Homes:
    """Group → engine, rollout → engine. Only hints: an engine may have gone meanwhile."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, Member] = OrderedDict()
        self._sessions: OrderedDict[str, Member] = OrderedDict()

    def of_group(self, key: str) -> Member | None:
        return _found(self._groups, key)

    def of_session(self, key: str) -> Member | None:
        return _found(self._sessions, key)

    def settle(self, group: str, session: str, member: Member) -> None:
        """A request of both goes to `member`. A group's home stays where it is while that engine does."""
        if group and ((home := self._groups.get(group)) is None or not home.usable):
            _keep(self._groups, group, member)
        if session:
            _keep(self._sessions, session, member)


def _found(homes: OrderedDict[str, Member], key: str) -> Member | None:
    member = homes.get(key) if key else None
    if member is not None:
        homes.move_to_end(key)
    return member


def _keep(homes: OrderedDict[str, Member], key: str, member: Member) -> None:
    homes[key] = member
    homes.move_to_end(key)
    if len(homes) > MOST:
        homes.popitem(last=False)
