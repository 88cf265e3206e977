"""How keys are made, kept and recognised."""

from __future__ import annotations

import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_service.errors import ConfigError
from rollout_service.key_files import add_to_file, make_keys, remove_from_file
from rollout_service.keys import HASH, KeyEntry, KeyRing, Keys, Role, hash_of, key_table, new_key, read_keys

KEY = "rsk_" + 43 * "a"


def entry(name: str = "a", role: Role = Role.READ, key: str = KEY) -> KeyEntry:
    return KeyEntry(name=name, role=role, hash=hash_of(key))


def test_keys_are_long_random_and_told_by_their_beginning():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("rsk_") and len(key) == 47 for key in keys)


def test_the_hash_is_sha256_of_the_whole_key():
    assert hash_of("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert HASH.fullmatch(hash_of(KEY))


def test_a_ring_finds_the_one_key_and_nothing_else():
    other = new_key()
    ring = KeyRing([entry(), entry("b", Role.ADMIN, other)])
    assert ring.find(KEY) == entry()
    found = ring.find(other)
    assert found is not None
    assert found.role is Role.ADMIN
    for wrong in ("", KEY[:-1], KEY + "a", hash_of(KEY), "\ud800", "ü" * 50):
        assert ring.find(wrong) is None
    assert not KeyRing([])
    assert KeyRing([]).find("") is None


def test_a_printed_table_is_read_back(tmp_path: Path):
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(key_table(each, "keys") for each in (entry(), entry("b", Role.ADMIN, new_key()))))
    assert [found.name for found in read_keys(file)] == ["a", "b"]
    assert read_keys(file)[0] == entry()
    assert tomllib.loads(key_table(entry()))["server"]["keys"][0]["role"] == "read"


GOOD = key_table(entry(), "keys")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not TOML"),
        ('key = "rsk_hunter2"', "expected [[keys]] tables"),
        ("keys = 3", "expected [[keys]] tables"),
        ("keys = [3]", "expected name, role and hash"),
        (GOOD.replace("name", "nom"), "expected name, role and hash"),
        (GOOD + "more = 1\n", "expected name, role and hash"),
        (GOOD.replace("read", "root"), "keys[0].role: expected one of admin, trainer, submit, read"),
        (GOOD.replace('"a"', '"a b"'), "keys[0].name"),
        (GOOD.replace("sha256:", "sha256:rsk_hunter2"), "keys[0].hash"),
        (GOOD + GOOD, "there is a key called 'a' already"),
        (GOOD + key_table(entry("b"), "keys"), "'a' and 'b' are the same key"),
        ("\xff", "not TOML"),
        ("#" + 2**20 * " ", "larger than"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_one_clear_line_without_what_stands_in_it(
    tmp_path: Path, text: str, message: str
):
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_said_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        Keys((), tmp_path / "keys.toml")


def test_a_name_may_not_stand_in_the_configuration_and_in_the_file(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match="called 'a' already"):
        Keys([entry()], tmp_path / "keys.toml")


def test_a_folder_gets_a_key_of_every_role_once(tmp_path: Path):
    folder = tmp_path / "keys"
    made, missing = make_keys(folder)
    assert missing == []
    assert {path.name for path in made} == {"admin.key", "trainer.key", "submit.key", "read.key", "keys.toml"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in made}
    assert modes == {
        "admin.key": 0o600,
        "trainer.key": 0o600,
        "submit.key": 0o600,
        "read.key": 0o644,
        "keys.toml": 0o644,
    }
    before = {path.name: path.read_text() for path in made}
    assert make_keys(folder) == ([], [])
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    ring = KeyRing(read_keys(folder / "keys.toml"))
    for role in Role:
        found = ring.find((folder / f"{role}.key").read_text().strip())
        assert found is not None
        assert found.role is role


def test_a_start_that_was_broken_off_is_made_whole_with_the_same_keys(tmp_path: Path):
    make_keys(tmp_path)
    keys = {role: (tmp_path / f"{role}.key").read_text() for role in Role}
    (tmp_path / "keys.toml").unlink()
    (tmp_path / "submit.key").unlink()
    make_keys(tmp_path)
    ring = KeyRing(read_keys(tmp_path / "keys.toml"))
    for role in (Role.ADMIN, Role.TRAINER, Role.READ):
        assert (tmp_path / f"{role}.key").read_text() == keys[role]
        assert ring.find(keys[role].strip()) is not None
    assert ring.find(keys[Role.SUBMIT].strip()) is None


def test_a_key_that_was_taken_away_is_not_made_again(tmp_path: Path):
    make_keys(tmp_path)
    (tmp_path / "admin.key").unlink()
    assert make_keys(tmp_path) == ([], [tmp_path / "admin.key"])
    assert not (tmp_path / "admin.key").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        make_keys(tmp_path / "file")


def test_revoking_a_key_takes_the_file_that_lies_beside_it_and_the_next_start_makes_another(tmp_path: Path):
    make_keys(tmp_path)
    old = (tmp_path / "trainer.key").read_text()
    remove_from_file(tmp_path / "keys.toml", "trainer")
    assert not (tmp_path / "trainer.key").exists()
    assert {entry.name for entry in read_keys(tmp_path / "keys.toml")} == {"admin", "submit", "read"}
    make_keys(tmp_path)
    assert (tmp_path / "trainer.key").read_text() != old
    add_to_file(tmp_path / "keys.toml", entry("second"))
    remove_from_file(tmp_path / "keys.toml", "second")
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("content", [b"", b"x", b"\xff\xfe", b"rsk_short", b"rsk_" + 44 * b"a"])
def test_what_is_no_key_is_never_taken_over_for_one(tmp_path: Path, content: bytes):
    (tmp_path / "admin.key").write_bytes(content)
    with pytest.raises(ConfigError, match=r"admin\.key: holds no key"):
        make_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["admin.key"]


def test_the_same_key_for_two_roles_is_refused_before_anything_is_written(tmp_path: Path):
    for role in ("admin", "read"):
        (tmp_path / f"{role}.key").write_text(KEY)
    with pytest.raises(ConfigError, match="'admin' and 'read' are the same key"):
        make_keys(tmp_path)
    assert not (tmp_path / "keys.toml").exists()


def test_a_file_beside_that_is_no_key_does_not_keep_one_from_being_revoked(tmp_path: Path):
    make_keys(tmp_path)
    (tmp_path / "submit.key").write_bytes(b"\xff\xfe")
    remove_from_file(tmp_path / "keys.toml", "submit")
    assert (tmp_path / "submit.key").exists()
    with pytest.raises(ConfigError, match="there are: admin, trainer, read"):
        remove_from_file(tmp_path / "keys.toml", "submit")


def test_of_many_who_add_a_key_at_once_none_loses_it(tmp_path: Path):
    file = tmp_path / "keys.toml"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_to_file(file, entry(f"k{n}", key=new_key())), range(32)))
    assert {found.name for found in read_keys(file)} == {f"k{n}" for n in range(32)}
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_a_pipe_a_folder_and_a_socket_in_the_files_place_are_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match=r"no regular file|Is a directory"):
            Keys((), path)


def test_a_key_is_revoked_in_the_file_behind_a_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "keys.toml", tmp_path / "keys.toml"
    add_to_file(real, entry())
    link.symlink_to(real)
    remove_from_file(link, "a")
    assert link.is_symlink()
    assert read_keys(real) == []
