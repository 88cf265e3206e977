"""The dataset as one long row of prompts over all epochs; a position in it is the dataset cursor.

Once open, a file is known to be good: each row was checked and no two share a prompt id. The prompt at a position is a
function of the file, `shuffle_seed` and the defaults alone, so a restart that goes on at a position goes on with the
same prompts; `fingerprint` tells whether the file is still the one the position was counted in.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256
from itertools import pairwise
from typing import Any, Unpack

from rollout_service.core.model import Prompt
from rollout_service.errors import ConfigError
from rollout_service.prompts.order import epoch_order
from rollout_service.prompts.rows import RowError, RowRules, parse_row
from rollout_service.prompts.sources import Source, open_source


class PromptFile:
    """An open dataset. Its methods read the disk: call them off the event loop, one at a time."""

    def __init__(self, source: Source, *, path: str, epochs: int, shuffle_seed: int, **rules: Unpack[RowRules]) -> None:
        self.path = path
        self._source = source
        self._epochs = epochs
        self._seed = shuffle_seed
        self._rules = rules
        self._order: tuple[int, Sequence[int]] | None = None

    @classmethod
    def open(cls, path: str, *, epochs: int, shuffle_seed: int, **rules: Unpack[RowRules]) -> PromptFile:
        """Opens `prompts.path` and checks every row of it.

        `epochs` 0 is for ever, `shuffle_seed` -1 is file order. Raises ConfigError with one line that names the file,
        the line and the field. Takes about 20 microseconds a row.
        """
        source = open_source(path)
        prompts = cls(source, path=path, epochs=epochs, shuffle_seed=shuffle_seed, **rules)
        try:
            if not len(source):
                raise ConfigError(f"prompts.path: {path}: has no rows")
            prompts._check_rows()
        except RowError as error:
            source.close()
            raise ConfigError(str(error)) from None
        except ConfigError:
            source.close()
            raise
        return prompts

    def __len__(self) -> int:
        """Rows of the file: one epoch."""
        return len(self._source)

    @property
    def total(self) -> int | None:
        """Rows over all epochs; None: no end."""
        return len(self) * self._epochs if self._epochs else None

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints: every position means the same row. 64 hexadecimal digits."""
        return sha256(f"{self._source.digest}:{self._seed}".encode()).hexdigest()

    def read(self, position: int, count: int) -> list[Prompt]:
        """The prompts at `position`, `position + 1`, … , at most `count`; fewer only at the end of the last epoch.

        Raises RowError where the file was changed in place since it was opened and a row is no prompt any more.
        """
        end = position + count
        if self.total is not None:
            end = min(end, self.total)
        return [self._prompt_at(place) for place in range(position, end)]

    def close(self) -> None:
        """Closes the file; nothing can be read afterwards."""
        self._source.close()

    def _prompt_at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self), seed=self._seed, epoch=epoch)
        row = self._order[1][place]
        return self._parse(self._source.read(row), row, epoch)

    def _parse(self, row: Mapping[str, Any], number: int, epoch: int) -> Prompt:
        return parse_row(
            row,
            where=self._source.where(number),
            default_prompt_id=f"{self._source.stem}-{number}",
            epoch=epoch,
            **self._rules,
        )

    def _check_rows(self) -> None:
        # 8 bytes a row and not the ids themselves: a million rows may have ids of 512 characters. Equal hashes are
        # only a suspicion; the rows decide.
        hashes = array("Q")
        for number, row in enumerate(self._source.scan()):
            prompt_id = self._parse(row, number, 0).prompt_id
            hashes.append(int.from_bytes(blake2b(prompt_id.encode(), digest_size=8).digest(), "little"))
        suspects = {earlier for earlier, later in pairwise(sorted(hashes)) if earlier == later}
        if not suspects:
            return
        seen: dict[str, int] = {}
        for number in (number for number, value in enumerate(hashes) if value in suspects):
            prompt_id = self._parse(self._source.read(number), number, 0).prompt_id
            if prompt_id in seen:
                first = self._source.where(seen[prompt_id])
                raise ConfigError(f"{self._source.where(number)}: prompt_id: {prompt_id!r} is already that of {first}")
            seen[prompt_id] = number
