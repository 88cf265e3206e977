"""Datasets: what can be read, in which order, and what is refused before the service starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.errors import ConfigError
from rollout_service.prompts import PromptFile, RowError
from rollout_service.prompts.order import epoch_order


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, to which paths are relative."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def opened(here: Path) -> Iterator[Any]:
    """Opens datasets and closes them at the end."""
    files: list[PromptFile] = []

    def opened(path: str, *, epochs: int = 1, shuffle_seed: int = -1, min_group_size: int = 2) -> PromptFile:
        file = PromptFile.open(
            path, epochs=epochs, shuffle_seed=shuffle_seed, default_num_generations=8, min_group_size=min_group_size
        )
        files.append(file)
        return file

    yield opened
    for file in files:
        file.close()


@pytest.fixture
def refusal(opened):
    """The line a dataset is refused with."""

    def refusal(path: str, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            opened(path, **options)
        assert str(caught.value).isprintable()
        return str(caught.value)

    return refusal


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "answer": number} for number in range(count)]


def answers(file: PromptFile, position: int, count: int) -> list[int]:
    return [prompt.columns["answer"] for prompt in file.read(position, count)]


def test_rows_are_read_in_file_order(here: Path, opened):
    jsonl(here / "train.jsonl", *numbered(5))
    file = opened("train.jsonl")
    assert (len(file), file.total) == (5, 5)
    assert answers(file, 0, 3) == [0, 1, 2]
    assert answers(file, 3, 9) == [3, 4]
    assert file.read(5, 1) == []


def test_a_row_without_an_id_is_named_by_file_and_row(here: Path, opened):
    jsonl(here / "train.v2.jsonl", {"prompt": "a"}, {"prompt": "b", "prompt_id": "mine"}, {"prompt": "c"})
    assert [prompt.prompt_id for prompt in opened("train.v2.jsonl").read(0, 3)] == ["train.v2-0", "mine", "train.v2-2"]


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_do_no_harm(here: Path, opened):
    (here / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 0}\r\n\r\n  \n{"prompt": "\xc3\xa9", "answer": 1}'
    )
    file = opened("a.jsonl")
    assert [prompt.text for prompt in file.read(0, 9)] == ["a", "é"]
    assert answers(file, 1, 1) == [1]


def test_defaults_of_groups_reach_the_rows(here: Path, opened):
    jsonl(here / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "num_generations": 3})
    assert [prompt.num_generations for prompt in opened("a.jsonl").read(0, 2)] == [8, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": 7}\n', "a.jsonl:3: prompt: expected text"),
        (b'{"prompt": "a"}\n{"prompt": "b"\n', "a.jsonl:2: not JSON: "),
        (b"[1]\n", "a.jsonl:1: expected an object, got a list"),
        (b'{"prompt": "a", "x": NaN}\n', "a.jsonl:1: x: nan is not a finite number"),
        (b'{"prompt": "a", "x": [1, -Infinity]}\n', "a.jsonl:1: x[1]: -inf is not a finite number"),
        (b'{"prompt": "a", "x": 1e999}\n', "a.jsonl:1: x: inf is not a finite number"),
        (b'{"prompt": "a", "x": "\\ud800"}\n', "a.jsonl:1: x: not valid Unicode (a lone surrogate)"),
        (b'{"prompt": "\xff"}\n', "a.jsonl:1: not UTF-8 (byte 12 of the line)"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}\n", "a.jsonl:1: not JSON: a number too long"),
        (b'{"prompt": "a", "x": ' + b"9" * 30 + b"}\n", "a.jsonl:1: x: an integer of more than 64 bits"),
        (b'{"prompt": "a", "x": ' + b"[" * 9000 + b"]" * 9000 + b"}\n", "a.jsonl:1: nested too deeply"),
        (b'{"prompt": "a", "prompts": 1}\n', "a.jsonl:1: prompts: the name of an argument of every reward"),
        (
            b'{"prompt": "a", "num_generations": 1}\n',
            "num_generations: 1 is below groups.min_group_size (2)",
        ),
        (b'{"prompt": "a", "sampling": {"n": 2}}\n', "a.jsonl:1: sampling.n: not taken"),
        (b'{"prompt": "a"} {"prompt": "b"}\n', "a.jsonl:1: not JSON: Extra data"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}\n', "found messages and prompt"),
    ],
)
def test_a_bad_row_is_refused_at_start_by_file_line_and_field(here: Path, refusal, text: bytes, expected: str):
    (here / "a.jsonl").write_bytes(text)
    assert expected in refusal("a.jsonl")


def test_two_rows_with_one_id_are_both_named(here: Path, refusal):
    rows = [{"prompt": str(number), "prompt_id": name} for number, name in enumerate("abcb")]
    (here / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert refusal("a.jsonl") == "a.jsonl:7: prompt_id: 'b' is already that of a.jsonl:3"


def test_an_id_that_is_another_rows_default_is_refused(here: Path, refusal):
    jsonl(here / "a.jsonl", {"prompt": "x", "prompt_id": "a-1"}, {"prompt": "y"})
    assert refusal("a.jsonl") == "a.jsonl:2: prompt_id: 'a-1' is already that of a.jsonl:1"


@pytest.mark.parametrize("text", [b"", b"\n \n"])
def test_a_file_without_rows_is_refused(here: Path, refusal, text: bytes):
    (here / "a.jsonl").write_bytes(text)
    assert refusal("a.jsonl") == "prompts.path: a.jsonl: has no rows"


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "no/such/folder.jsonl"])
def test_a_missing_file_is_named(refusal, name: str):
    assert refusal(name) == f"prompts.path: {name}: cannot be read: No such file or directory"


@pytest.mark.parametrize("name", ["data", "data.jsonl"])
def test_a_directory_is_refused(here: Path, refusal, name: str):
    (here / name).mkdir()
    assert refusal(name).startswith(f"prompts.path: {name}: a directory; expected .jsonl")


@pytest.mark.parametrize("name", ["train.json", "train.jsonl.gz", "/no/such/place", "../train", "a b", "a/b/c"])
def test_what_is_neither_a_known_file_nor_a_name_is_refused(refusal, name: str):
    assert refusal(name) == f"prompts.path: {name}: expected .jsonl, .parquet or a datasets name"


def test_a_file_of_an_unknown_kind_is_no_datasets_name(here: Path, refusal):
    (here / "train").write_text("{}")
    assert refusal("train") == "prompts.path: train: expected .jsonl, .parquet or a datasets name"


def test_epochs_follow_each_other_and_stand_in_the_prompts(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(3))
    file = opened("a.jsonl", epochs=2)
    assert file.total == 6
    read = [(prompt.prompt_id, prompt.epoch) for prompt in file.read(1, 9)]
    assert read == [("a-1", 0), ("a-2", 0), ("a-0", 1), ("a-1", 1), ("a-2", 1)]


def test_a_dataset_for_ever_has_no_end(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(3))
    file = opened("a.jsonl", epochs=0)
    assert file.total is None
    (prompt,) = file.read(3_000_001, 1)
    assert (prompt.prompt_id, prompt.epoch) == ("a-1", 1_000_000)


def test_a_shuffled_epoch_has_each_row_once_and_no_epoch_repeats_the_last(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(50))
    file = opened("a.jsonl", epochs=2, shuffle_seed=7)
    first, second = answers(file, 0, 50), answers(file, 50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(range(50))}) == 3


def test_a_restart_at_any_position_goes_on_with_the_same_rows(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(7))
    whole = opened("a.jsonl", epochs=3, shuffle_seed=1).read(0, 21)
    for position in (0, 3, 6, 7, 13, 14, 20):
        assert opened("a.jsonl", epochs=3, shuffle_seed=1).read(position, 21) == whole[position:]


def test_a_position_may_go_back(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(7))
    file = opened("a.jsonl", epochs=3, shuffle_seed=1)
    first = file.read(2, 3)
    file.read(15, 2)
    assert file.read(2, 3) == first


def test_the_order_is_the_same_under_every_python():
    # A stored cursor is a position in this order; other values here would make a restart skip and repeat rows.
    assert list(epoch_order(8, seed=0, epoch=0)) == [2, 1, 6, 5, 0, 3, 7, 4]
    assert list(epoch_order(8, seed=0, epoch=1)) == [5, 6, 0, 2, 3, 4, 7, 1]


def test_a_fingerprint_outlives_the_process_and_notices_a_change(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(3))
    before = opened("a.jsonl").fingerprint
    jsonl(here / "b.jsonl", *numbered(3))
    assert opened("b.jsonl", epochs=5).fingerprint == before
    assert opened("a.jsonl", shuffle_seed=1).fingerprint != before
    jsonl(here / "a.jsonl", *numbered(4))
    assert opened("a.jsonl").fingerprint != before


def test_a_file_replaced_while_it_is_open_is_read_on_as_it_was(here: Path, opened):
    jsonl(here / "a.jsonl", *numbered(3))
    file = opened("a.jsonl")
    jsonl(here / "new", {"prompt": "other", "answer": 9}).replace(here / "a.jsonl")
    assert answers(file, 0, 3) == [0, 1, 2]


def test_a_row_damaged_in_place_is_refused_when_it_is_read(here: Path, opened):
    path = jsonl(here / "a.jsonl", *numbered(3))
    file = opened("a.jsonl")
    with path.open("r+b") as damaged:
        damaged.write(b"#")
    with pytest.raises(RowError, match=r"a\.jsonl:1: not JSON"):
        file.read(0, 1)
    assert answers(file, 1, 1) == [1]


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


MIXED = [
    {"messages": [{"role": "user", "content": "a"}], "prompt_id": "x", "answer": 1},
    {"prompt": "b", "sampling": {"temperature": 0.5}, "answer": None},
    {
        "messages": [{"role": "assistant", "content": None, "name": "n"}],
        "sampling": {"top_p": 0.5},
        "num_generations": 4,
    },
    {"prompt_token_ids": [1, 2]},
]
"""Rows of which each lacks keys another has: a typed table fills them with nulls."""


def test_parquet_gives_the_same_prompts_as_jsonl(here: Path, opened):
    keys = ("prompt_id", "messages", "prompt", "prompt_token_ids", "num_generations", "sampling", "answer")
    parquet(here / "train.parquet", [{key: row.get(key) for key in keys} for row in MIXED])
    jsonl(here / "train.jsonl", *({"answer": None, **row} for row in MIXED))
    for options in ({}, {"epochs": 2, "shuffle_seed": 5}):
        assert opened("train.parquet", **options).read(0, 9) == opened("train.jsonl", **options).read(0, 9)


def test_a_bad_parquet_row_is_named(here: Path, refusal):
    parquet(here / "a.parquet", [{"prompt": "a", "score": 1.0}, {"prompt": "b", "score": float("nan")}])
    assert refusal("a.parquet") == "a.parquet: row 1: score: nan is not a finite number"


def test_a_value_of_parquet_that_json_has_not_is_refused_by_name(here: Path, refusal):
    from datetime import date

    parquet(here / "a.parquet", [{"prompt": "a", "day": date(2026, 1, 1)}])
    assert "a.parquet: row 0: day: a date has no JSON form; store it as text" in refusal("a.parquet")


def test_a_file_that_is_no_parquet_is_refused(here: Path, refusal):
    pytest.importorskip("pyarrow")
    (here / "a.parquet").write_bytes(b"PAR?")
    assert refusal("a.parquet").startswith("prompts.path: a.parquet: not parquet: ")


def test_an_empty_parquet_table_is_refused(here: Path, refusal):
    parquet(here / "a.parquet", [])
    assert refusal("a.parquet") == "prompts.path: a.parquet: has no rows"


def test_parquet_without_its_extra_says_what_to_install(here: Path, refusal, monkeypatch: pytest.MonkeyPatch):
    (here / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refusal("a.parquet").endswith("install rollout-service[parquet]")


def test_a_dataset_without_its_extra_says_what_to_install(refusal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = refusal("someone/some-data")
    assert "no such file, and a dataset by name needs the datasets library" in line
    assert line.endswith("install rollout-service[datasets]")


def library(monkeypatch: pytest.MonkeyPatch, loaded: Any) -> None:
    """A `datasets` library that has one dataset and no network."""

    def load_dataset(path: str) -> Any:
        if path != "someone/some-data":
            raise FileNotFoundError(f"Couldn't find {path!r}\nin any cache")
        return loaded

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_a_dataset_by_name_is_its_train_split(opened, monkeypatch: pytest.MonkeyPatch):
    library(monkeypatch, {"test": [], "train": numbered(3)})
    file = opened("someone/some-data", shuffle_seed=2, epochs=2)
    assert sorted(answers(file, 0, 3)) == [0, 1, 2]
    assert {prompt.prompt_id for prompt in file.read(0, 6)} == {"some-data-0", "some-data-1", "some-data-2"}


def test_a_dataset_with_one_split_is_that_split(opened, monkeypatch: pytest.MonkeyPatch):
    library(monkeypatch, {"test": numbered(2)})
    assert len(opened("someone/some-data")) == 2


def test_a_dataset_without_a_train_split_is_refused(refusal, monkeypatch: pytest.MonkeyPatch):
    library(monkeypatch, {"test": numbered(2), "dev": numbered(2)})
    assert refusal("someone/some-data") == "prompts.path: someone/some-data: no split named train, only dev, test"


def test_a_dataset_that_cannot_be_loaded_is_one_line(refusal, monkeypatch: pytest.MonkeyPatch):
    library(monkeypatch, {})
    line = refusal("someone/other")
    assert line.startswith("prompts.path: someone/other: no such file, and no dataset by that name: FileNotFoundError")
    assert line.endswith("Couldn't find 'someone/other'")


def test_a_saved_dataset_is_read_from_its_directory(here: Path, opened):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(numbered(4)).save_to_disk(str(here / "saved"))
    file = opened("saved", epochs=2)
    assert answers(file, 2, 4) == [2, 3, 0, 1]
    assert file.read(0, 1)[0].prompt_id == "saved-0"
    jsonl(here / "saved.jsonl", *numbered(4))
    assert opened("saved.jsonl", epochs=2).read(0, 8) == file.read(0, 8)
