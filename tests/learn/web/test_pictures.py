"""The pictures of a check: what they mark, and that their words say what the numbers are."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from anybatch.learn.check import CollectivesShown, MemoryShown, ShownArray
from anybatch.learn.web import pictures

SVG = "{http://www.w3.org/2000/svg}"


def parsed(made):
    """The element that a picture is. Raises ParseError if it is not valid XML."""
    return ElementTree.fromstring(made)


def texts(element):
    return " ".join(" ".join(element.itertext()).split())


def cells(made, side):
    """The numbers of one side of each array, as [text, is marked]. Indices are not numbers."""
    (found,) = (each for each in parsed(made).iter("div") if each.get("aria-label", "").split(" ")[0] == side)
    numbers = [each for each in found.iter("td") if texts(each)]
    return [(texts(each).removeprefix("≠").strip(), "ab-pic-off" in each.get("class", "")) for each in numbers]


def images(made):
    """The images that are for everyone: those of a legend are hidden from screen readers."""
    return [each for each in parsed(made).iter() if each.tag in ("svg", f"{SVG}svg") and not each.get("aria-hidden")]


def words(image):
    """The title and the description of an image, which a screen reader reads."""
    return image.find(f"{SVG}title").text, image.find(f"{SVG}desc").text


def array(shape, off=(), path="", tolerance=1e-6, left_out=0, by=0.5):
    """An array of 0.25, 1.25, ... in which some places are off."""
    expected = tuple(place + 0.25 for place in range(math.prod(shape) - left_out))
    yours = tuple(each + by if place in off else each for place, each in enumerate(expected))
    return ShownArray(path, shape, yours, expected, tolerance, left_out)


ARRAYS = {
    "number": array((), [0]),
    "right number": array(()),
    "vector": array((5,), [1, 3]),
    "long vector": array((100,), [99]),
    "matrix": array((4, 6), [0, 23]),
    "three axes": array((2, 3, 4), [13]),
    "four axes": array((2, 1, 1, 4), [5]),
    "one row": array((1, 70), [69]),
    "right": array((3, 3)),
    "all wrong": array((3, 3), range(9)),
}


@pytest.mark.parametrize("shown", ARRAYS.values(), ids=ARRAYS)
def test_exactly_the_wrong_numbers_are_marked(shown):
    made = pictures.arrays((shown,))
    yours, expected = cells(made, "yours"), cells(made, "expected")
    assert [float(text) for text, _ in yours] == list(shown.yours)
    assert [float(text) for text, _ in expected] == list(shown.expected)
    assert tuple(is_marked for _, is_marked in yours) == shown.is_off
    assert not any(is_marked for _, is_marked in expected)
    assert made.count("≠</span>") == sum(shown.is_off)  # a sign, not only a colour


def test_what_is_within_the_tolerance_is_not_marked():
    """The same numbers with another tolerance: the control."""
    close = array((5,), [1, 3], by=1e-3)
    assert not any(is_marked for _, is_marked in cells(pictures.arrays((array((5,), [1], tolerance=0.6),)), "yours"))
    assert [is_marked for _, is_marked in cells(pictures.arrays((close,)), "yours")] == [
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "shown, says",
    [
        (array((5,), [1, 3]), "≠ 2 of 5 numbers are off (allowed: 1e-06)"),
        (array((5,), [1]), "≠ 1 of 5 numbers is off"),
        (array((5,)), "✓ all 5 numbers are right (allowed: 1e-06)"),
        (array((), [0]), "≠ off"),
        (array(()), "✓ right"),
        (array((64, 1024), [3], left_out=64512), "Shown: the first 1,024 of 65,536 numbers."),
        (array((64, 1024), left_out=64512), "✓ none of the first 1,024 numbers is off"),
        (ShownArray("", (0, 3), (), (), 0.0), "shape (0, 3) No numbers."),
    ],
)
def test_the_words_say_how_many_numbers_are_off(shown, says):
    assert says in texts(parsed(pictures.arrays((shown,))))


def test_every_array_of_a_tree_has_its_path():
    made = pictures.arrays((array((2,), path="['v']"), array((2, 2), path="['w'][0]")))
    assert [each.text for each in parsed(made).iter("span") if each.get("class") == "ab-pic-path"] == [
        "['v']",
        "['w'][0]",
    ]
    assert texts(parsed(pictures.arrays(()))) == "The answer has no arrays."


@pytest.mark.parametrize(
    "yours, expected, written",
    [
        ((1.0, 12.0, -3.0), (1.0, 12.0, -4.0), ["1", "12", "-3"]),
        ((0.5, 0.25), (0.5, 0.75), ["0.50", "0.25"]),
        ((1 / 3, 200 / 3), (1 / 3, 200 / 3), ["0.3333", "66.6667"]),
        ((1.23456789e-8, -2e-8), (1.23456789e-8, 2e-8), ["1.23457e-08", "-2.00000e-08"]),
        ((1e30, 1.5), (0.25, 1.5), ["1.00000e+30", "1.50"]),
        ((4294967295.0, 7.0), (4294967294.0, 7.0), ["4294967295", "7"]),
        ((-1e-12, 0.5), (0.0, 0.5), ["0.0", "0.5"]),
        ((0.0, 0.0), (0.0, 0.0), ["0", "0"]),
        ((math.nan, 0.5, math.inf, -math.inf), (0.25, 0.5, 1.0, 1.0), ["NaN", "0.50", "inf", "-inf"]),
        ((math.nan,), (math.nan,), ["NaN"]),
    ],
)
def test_numbers_have_six_digits_at_most_and_the_same_decimals(yours, expected, written):
    shown = ShownArray("", (len(yours),), yours, expected, 1e-9)
    assert [text for text, _ in cells(pictures.arrays((shown,)), "yours")] == written


def test_the_map_says_where_the_largest_differences_are():
    (image,) = images(pictures.arrays((array((4, 6), [1, 8, 23], by=-0.5),)))
    title, description = words(image)
    assert image.get("role") == "img" and title == "Yours minus expected, number by number"
    assert (
        description
        == "3 of 24 numbers are off. The largest differences: -0.5 at [0, 1], -0.5 at [1, 2], -0.5 at [3, 5]."
    )


@pytest.mark.parametrize("by, color, other", [(-0.5, "--ab-yours", "--ab-bad"), (0.5, "--ab-bad", "--ab-yours")])
def test_the_map_has_a_colour_for_each_sign_and_grey_for_what_is_right(by, color, other):
    (image,) = images(pictures.arrays((array((4, 6), [1, 8, 23], by=by),)))
    fills = [each.get("fill") for each in image.iter(f"{SVG}rect")]
    assert fills.count(f"var({color})") == 3 and fills.count(f"var({other})") == 0
    assert fills.count("var(--ab-muted)") == 21 and len(fills) == 24


@pytest.mark.parametrize("shown, has_map", [(array((6,), [0]), False), (array((7,), [0]), True), (array((7,)), False)])
def test_a_map_is_drawn_for_many_numbers_of_which_some_are_wrong(shown, has_map):
    assert bool(images(pictures.arrays((shown,)))) == has_map


def test_nan_is_marked_hatched_and_named():
    shown = array((2, 4), [1])
    shown = ShownArray("", (2, 4), (math.nan, *shown.yours[1:7], math.inf), shown.expected, 1e-6)
    made = pictures.arrays((shown,))
    assert [is_marked for _, is_marked in cells(made, "yours")] == [True, True, False, False, False, False, False, True]
    (image,) = images(made)
    assert words(image)[1].endswith("at [0, 1]. 2 are NaN or infinite.")
    assert sum(each.get("fill") == "none" for each in image.iter(f"{SVG}rect")) == 2
    assert "NaN or infinite" in texts(parsed(made)) and "nan" not in made.replace("tabular-nums", "")


def test_a_hostile_path_stays_text():
    path = """['<script>alert("1")</script>&']"""
    made = pictures.arrays((array((9,), [2], path=path),))
    assert "<script" not in made and path in texts(parsed(made))
    assert any(each.get("aria-label") == f"yours {path}" for each in parsed(made).iter("div"))
    kind = 'all-<b onload="x">'
    made = pictures.collectives(CollectivesShown(8, ((kind, 1, 4),), ((kind, 2),)))
    assert "<b onload" not in made and f"wanted: 2 {kind}s" in texts(parsed(made))


GROWS = MemoryShown((1, 4), (133120, 524288), (133120, 133120), (2**20, 2**22))


@pytest.mark.parametrize(
    "shown, says",
    [
        (
            GROWS,
            "Yours grows from 130.0 KiB to 512.0 KiB; the solution stays at 130.0 KiB; the full batch at once grows "
            "from 1.0 MiB to 4.0 MiB, for a batch 4 times as large.",
        ),
        (
            MemoryShown((1, 4), (2048, 1024), (0, 0)),
            "Yours falls from 2.0 KiB to 1.0 KiB; the solution stays at 0 B, for a batch 4 times as large.",
        ),
        (MemoryShown((1, 8), (), (0, 0)), "The solution stays at 0 B, for a batch 8 times as large."),
    ],
)
def test_memory_is_told_in_words(shown, says):
    made = pictures.memory(shown)
    (image,) = images(made)
    assert words(image) == ("Memory against batch size", says)
    assert parsed(made).find("p").text == says


def test_memory_has_a_line_for_what_is_known_each_with_its_own_dashes():
    def lines(shown):
        (image,) = images(pictures.memory(shown))
        found = [each for each in image.iter(f"{SVG}path") if each.get("stroke-dasharray")]
        return {each.get("stroke"): each.get("stroke-dasharray") for each in found}

    assert list(lines(GROWS)) == ["var(--ab-yours)", "var(--ab-reference)", "var(--ab-full)"]
    assert len(set(lines(GROWS).values())) == 3
    assert list(lines(MemoryShown((1, 4), (5, 6)))) == ["var(--ab-yours)"]
    assert texts(parsed(pictures.memory(MemoryShown((1, 4))))) == "No memory was measured."


def test_memory_is_drawn_to_scale_from_zero():
    (image,) = images(pictures.memory(MemoryShown((1, 4), (1024, 4096), (2048, 2048))))
    ticks = {each.text: float(each.get("y")) - 4 for each in image.iter(f"{SVG}text")}
    zero, one = ticks["0"], ticks["1"]
    circles = [float(each.get("cy")) for each in image.iter(f"{SVG}circle")]
    assert [round((zero - place) / (zero - one), 1) for place in circles] == [1.0, 4.0]


def test_names_at_the_ends_of_lines_do_not_overlap():
    (image,) = images(pictures.memory(MemoryShown((1, 4), (1024, 1024), (1024, 1024), (1024, 1030))))
    names = [each for each in image.iter(f"{SVG}text") if re.search("yours|solution|full batch", each.text)]
    downs = sorted(float(each.get("y")) for each in names)
    assert len(names) == 3 and min(b - a for a, b in itertools.pairwise(downs)) >= 14


@pytest.mark.parametrize(
    "yours, executed, wanted, mark, often",
    [
        ([("all-reduce", 1, 448)], "1 all-reduce", "1 all-reduce", "✓ the same", "* 1, 448 B."),
        (
            [("all-reduce", 4, 2048)],
            "4 all-reduces",
            "1 all-reduce",
            "≠ different",
            "* 4, inside a loop, 2.0 KiB each.",
        ),
        ([("all-reduce", 1, 4)] * 3, "3 all-reduces", "1 all-reduce", "≠ different", "* 3, 4 B each."),
        ([("all-reduce", 2, 4)] * 2, "4 all-reduces", "none", "≠ different", "* 4, inside a loop, 4 B each."),
        (
            [("all-gather", -1, 4), ("all-gather", 1, 8)],
            "? all-gathers",
            "2 all-gathers",
            "≠ different",
            "* ?, inside a loop of unknown length, 4 B each; * 1, 8 B.",
        ),
    ],
)
def test_collectives_are_counted_beside_those_that_are_wanted(yours, executed, wanted, mark, often):
    number, _, kind = wanted.partition(" ")
    made = pictures.collectives(CollectivesShown(8, tuple(yours), ((kind.rstrip("s"), int(number)),) if kind else ()))
    (image,) = images(made)
    assert texts(parsed(made)).startswith(f"executed on 8 devices: {executed} wanted: {wanted} {mark}")
    often = often.replace("*", pictures.TIMES)
    assert often in texts(parsed(made).find(".//p"))
    assert words(image)[1].endswith(f" Executed {often} Wanted: {wanted}.")


def test_without_collectives_nothing_is_sent():
    made = pictures.collectives(CollectivesShown(8, (), (("all-reduce", 1),)))
    (image,) = images(made)
    assert "nothing is sent" in texts(image) and "executed on 8 devices: none" in texts(parsed(made))
    assert len(list(image.iter(f"{SVG}rect"))) == 8 and not list(image.iter(f"{SVG}path"))
    assert "✓ the same" in texts(parsed(pictures.collectives(CollectivesShown(8))))


@pytest.mark.parametrize(
    "kind, arrows",
    [
        ("all-reduce", 16),
        ("all-gather", 16),
        ("reduce-scatter", 16),
        ("all-to-all", 64),
        ("collective-permute", 8),
        ("collective-broadcast", 7),
        ("a kind of next year", 64),
    ],
)
def test_every_kind_has_the_arrows_of_what_it_sends(kind, arrows):
    (image,) = images(pictures.collectives(CollectivesShown(8, ((kind, 1, 4),))))
    assert len(list(image.iter(f"{SVG}g"))) == arrows
    assert kind in words(image)[0]


@pytest.mark.parametrize("devices, boxes", [(1, 2), (2, 4), (8, 16), (64, 14)])
def test_more_than_eight_devices_are_abbreviated(devices, boxes):
    (image,) = images(pictures.collectives(CollectivesShown(devices, (("all-reduce", 1, 4),))))
    assert sum(each.get("rx") == "3" for each in image.iter(f"{SVG}rect")) == boxes
    assert str(devices - 1) in texts(image) and ("…" in texts(image)) == (devices > 8)
    width = float(image.get("viewBox").split()[2])
    assert all(float(each.get("x")) + float(each.get("width")) <= width for each in image.iter(f"{SVG}rect"))


def test_two_kinds_have_two_pictures():
    shown = CollectivesShown(
        8, (("all-gather", 1, 8), ("all-reduce", 1, 4), ("all-gather", 1, 8)), (("all-reduce", 1),)
    )
    titles = [words(image)[0] for image in images(pictures.collectives(shown))]
    assert titles == ["all-gather between 8 devices", "all-reduce between 8 devices"]


def test_classes_have_one_prefix_and_colours_are_those_of_the_page():
    made = pictures.arrays((array((4, 6), [3]),)) + pictures.memory(GROWS)
    made += pictures.collectives(CollectivesShown(8, (("all-reduce", 1, 4),)))
    classes = {name for found in re.findall(r'class="([^"]*)"', made) for name in found.split()}
    assert classes and all(re.fullmatch("ab-pic(-.*)?", name) for name in classes)
    assert {name for name in re.findall(r"\.(ab-[\w-]+)", pictures.CSS)} >= classes - {"ab-pic-flow", "ab-pic-leaf"}
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b|rgb|\bid=|<style|<script|background", made)
