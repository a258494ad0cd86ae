"""The text that the GPT learns: its vocabulary, its parts and its windows."""

import json
import re

import numpy as np
import pytest

import anybatch as ab
from anybatch.demo.text import Corpus, Vocabulary, Windows, read_text
from anybatch.training.sources import open_source


@pytest.mark.parametrize("level", ["characters", "bytes"])
def test_a_text_comes_back_as_it_was(level):
    text = "Grüße, \N{SNOWMAN} and \N{GRINNING FACE}.\n"
    vocabulary = Vocabulary.of(text, level)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.size == (256 if level == "bytes" else len(set(text)))


def test_windows_are_those_of_the_text():
    ids = np.arange(50) ** 2
    for row in Windows(ids, context=4, batch_size=32, seed=0).batch(0)["tokens"]:
        start = int(row[0] ** 0.5)
        assert row.tolist() == ids[start : start + 5].tolist()


def test_windows_begin_everywhere():
    starts = Windows(np.arange(10), context=4, batch_size=200, seed=0).batch(0)["tokens"][:, 0]
    assert set(starts.tolist()) == set(range(6))


def test_windows_continue_where_they_stopped():
    windows = Windows(np.arange(500), context=4, batch_size=8, seed=3)
    opened = open_source(windows)
    drawn = [next(opened) for _ in range(6)]
    position = json.loads(json.dumps(drawn[2][1]))
    resumed = open_source(windows, position=position)
    for batch, _ in drawn[3:]:
        np.testing.assert_array_equal(next(resumed)[0]["tokens"], batch["tokens"])
    # The control: other batches, and other seeds, are different.
    other = Windows(np.arange(500), context=4, batch_size=8, seed=4).batch(0)["tokens"]
    assert (drawn[0][0]["tokens"] != drawn[1][0]["tokens"]).any() and (other != drawn[0][0]["tokens"]).any()


def test_the_validation_text_is_not_in_the_training_text():
    text = "".join(map(chr, range(1000, 1200)))
    corpus = Corpus.of(text, level="characters", context=5, validation=0.25)
    assert corpus.vocabulary.decode(corpus.training) == text[:150]
    windows = corpus.validation_windows(5, most=4)
    assert windows.shape == (4, 6) and windows.min() == 150 and windows.max() >= 190
    assert Corpus.of(text, level="characters", context=5, validation=0.0).validation.size == 0


def test_unusable_texts_are_refused(tmp_path):
    with pytest.raises(ab.InputError, match=r"must be a file that can be read, got text = .*No such file"):
        read_text(str(tmp_path / "missing.txt"))
    with pytest.raises(ab.InputError, match="must be a file that can be read"):
        read_text(str(tmp_path))
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ab.InputError, match="0 bytes"):
        read_text(str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin1"))
    with pytest.raises(ab.InputError, match=r'byte 2 is 0xfc.\nConvert it: iconv .* level = "bytes"'):
        read_text(str(tmp_path / "latin.txt"))
    text = read_text(str(tmp_path / "latin.txt"), "bytes")
    assert Vocabulary.of(text, "bytes").encode(text).tobytes() == "Grüße".encode("latin1")
    with pytest.raises(ab.InputError, match=r"with 20 characters .2 of them for validation., and context = 8"):
        Corpus.of("x" * 20, level="characters", context=8, validation=0.1)
    (tmp_path / "wide.txt").write_text("Grüße", "utf-16")
    with pytest.raises(ab.InputError, match="iconv -f utf-16 -t utf-8"):
        read_text(str(tmp_path / "wide.txt"))
    with pytest.raises(ab.InputError, match="got 'q'"):
        Vocabulary.of("banana", "characters").encode("qab")


@pytest.mark.parametrize(
    "length, context, validation", [(20, 8, 0.1), (20, 12, 0.9), (20, 30, 0.1), (2, 1, 0.5), (2, 9, 0.0), (1, 1, 0.1)]
)
def test_the_advice_for_a_short_text_works(length, context, validation):
    given = {"context": context, "validation": validation}
    with pytest.raises(ab.InputError, match="Use a longer text") as error:
        Corpus.of("x" * length, level="characters", **given)
    ways = dict(re.findall(r"(context|validation) = ([\d.]+\d|\d)", error.value.remedy))
    for name, value in ways.items():
        Corpus.of("x" * length, level="characters", **given | {name: float(value) if "." in value else int(value)})
    assert bool(ways) == (length > 1)


def test_the_fables_are_there():
    text = read_text("")
    assert 18_000 < len(text) < 25_000 and text.isascii()
    assert text.count("So says the owl in the old oak tree:") == text.count("\n\nThe ") + 1
