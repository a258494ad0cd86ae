"""The options of a run, and the file they are read from."""

import dataclasses
import os
import tomllib

import pytest

import anybatch as ab
from anybatch.demo.config import RunConfig, example_config
from anybatch.demo.text import read_text


def test_the_example_has_the_defaults(tmp_path):
    (tmp_path / "run.toml").write_text(example_config())
    assert RunConfig.read(tmp_path / "run.toml") == RunConfig()
    assert set(tomllib.loads(example_config())) == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "steps = 5\nlearning_rat = 1\n",
            r"'learning_rat' in .*run.toml, line 2.\nDid you mean learning_rate\? The options are",
        ),
        ("[model]\nlayers = 2", "'model' in .*, line 1.\nThe options are: text"),
        (
            "steps = 1.5",
            r"steps must be a whole number of at least 1 and at most 1,000,000,000, got steps = 1.5 in .*line 1.\n"
            "For example: steps",
        ),
        ("steps = true", "got steps = true"),
        ("\ndropout = 1.0", "dropout must be a number of at least 0 and below 1, got dropout = 1.0 in .*, line 2"),
        ("steps = 1000000001", "steps must be .*, got steps = 1000000001"),
        ("batch = 10000000000", "batch must be a whole number of at least 1 and at most 10,000,000, got"),
        ("weight_decay = inf", "weight_decay must be a number of at least 0, got weight_decay = inf"),
        ("temperature = nan", "got temperature = nan"),
        ("learning_rate = inf", "got learning_rate = inf"),
        (f"learning_rate = 1{'0' * 400}", "learning_rate must be a number above 0"),
        (f"steps = 1{'0' * 5000}", "must be TOML"),
        ('out = " "', 'out must be a string in quotes, and not empty, got out = " "'),
        ("clip = inf", "clip must be a number above 0, got clip = inf"),
        ('dtype = "float64"', 'dtype must be one of "float32", "bfloat16", got dtype = "float64"'),
        ("text = 3", "text must be a string in quotes, got text = 3"),
        ("verify = 1", "verify must be true or false, got verify = 1"),
        ("width = 100\nheads = 8", "width must be a multiple of twice the heads, got .*\nFor example: width = 96"),
        ('memory = "much"', "memory must be a number of bytes"),
        ("steps 5", "must be TOML.*line 1"),
        ("steps = 5\0", "must be TOML.*line 1"),
        ("steps = " + "[" * 5000, "must be TOML"),
        (
            'text = "a\\u0000b"',
            r'text must be the name of a file or a folder, .*, got text = "a\\u0000b" in',
        ),
        (
            'out = "a\\u0000b"',
            r'out must be the name of a file or a folder, .*, got out = "a\\u0000b" in',
        ),
        ('report = "a\\u0000b"', "report must be the name of a file or a folder, "),
    ],
)
def test_options_that_are_not_allowed(tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ab.InputError, match=f"(?s){said}"):
        RunConfig.read(tmp_path / "run.toml")


def test_a_missing_file_of_options():
    with pytest.raises(ab.InputError, match=r"Create one: anybatch train --example > missing.toml"):
        RunConfig.read("missing.toml")


def special(kind, path):
    """Creates something at a path that cannot be read as a file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**33)
    elif kind == "closed":
        path.write_text("steps = 1")
        path.chmod(0)
    return path


SPECIAL = {
    "folder": "a folder",
    "pipe": "a device, pipe or socket, not a regular file",
    "device": "a device, pipe or socket, not a regular file",
    "huge": "8,589,934,592 bytes, more than the limit of",
    "closed": "Permission denied",
    "missing": "No such file or directory",
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_pipes_devices_and_folders_are_refused_at_once(tmp_path, kind):
    """Reading a pipe would block, and reading a device might never end."""
    path = special(kind, tmp_path / "it")
    if kind == "closed" and os.access(path, os.R_OK):
        pytest.skip("the superuser may read everything")
    with pytest.raises(ab.InputError, match="(?s)The options must be in a file that can be read.*" + SPECIAL[kind]):
        RunConfig.read(path)
    with pytest.raises(ab.InputError, match="(?s)The text must be a file that can be read.*" + SPECIAL[kind]):
        read_text(str(path))


def test_impossible_file_names_are_refused(tmp_path):
    with pytest.raises(ab.InputError, match=r"got 'a\\x00b' \(no file can have such a name\)"):
        RunConfig.read("a\0b")
    with pytest.raises(ab.InputError, match=r"text = 'a\\x00b' \(no file can have such a name\)"):
        read_text("a\0b")
    with pytest.raises(ab.InputError, match="File name too long"):
        RunConfig.read("a" * 5000)
    with pytest.raises(ab.InputError, match="No such file"):
        read_text("~nobody-of-that-name/text.txt")
    (tmp_path / "latin.toml").write_bytes('prompt = "\xe4"'.encode("latin-1"))
    with pytest.raises(ab.InputError, match="not UTF-8"):
        RunConfig.read(tmp_path / "latin.toml")
