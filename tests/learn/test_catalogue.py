"""Reading courses from disk, and the errors for invalid ones."""

import shutil

import pytest
from cases.learn_course import NAMES, write_course

from anybatch import InputError
from anybatch.learn import Check
from anybatch.learn.catalogue import BUILTIN, COURSES, FILES, Course, Question

EXERCISE = "01_mean_gradient"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_course(tmp_path_factory.mktemp("courses") / "course")


@pytest.fixture
def folder(tmp_path, original):
    return shutil.copytree(original.folder, tmp_path / "course")


def refused(folder):
    with pytest.raises(InputError) as caught:
        Course.read(folder)
    return caught.value


def test_a_course_is_read_as_it_was_written(original):
    assert original.name == "course" and [exercise.name for exercise in original.exercises] == list(NAMES)
    exercise = original.exercises[1]
    assert (exercise.number, exercise.file_name) == (2, "02_second.py")
    assert exercise.page.startswith("# Second\n") and "def second(w, x):" in exercise.starter
    assert len(exercise.hints) == 3 and "```python" in exercise.hints[2]
    assert exercise.why.startswith("The gradient of a mean is the mean of the gradients")
    assert exercise.one_line == "return ab.grad(loss, microbatch_size=2)(w, x)"
    assert isinstance(exercise.check, Check) and exercise.check.function == "second"
    wrong = {each.name: each for each in exercise.mistakes}
    assert (wrong["sum"].caught_by, wrong["sum"].says) == ("value", "this is the gradient of a sum")


def test_the_course_of_our_own_is_complete():
    course = Course.builtin()
    assert course.folder == BUILTIN and course.name == "gradients"
    assert [exercise.number for exercise in course.exercises] == list(range(1, 17))
    assert course.find("accumulate_in_a_scan").check.function == "microbatched_grads"


@pytest.mark.parametrize("wanted", ["2", "02", "second", "02_second", "anybatch-learn/02_second.py", " 2 "])
def test_an_exercise_is_found_by_number_or_name(original, wanted):
    assert original.find(wanted) is original.exercises[1]


def test_an_exercise_that_is_not_there_is_told_what_is_near(original):
    with pytest.raises(InputError, match=r"1 to 3.*got 'secnd'.\nDid you mean second\?"):
        original.find("secnd")
    with pytest.raises(InputError, match=r"got '4'.\nSee them all: anybatch learn list"):
        original.find("4")


def test_neighbours(original):
    first, second, third = original.exercises
    assert (original.after(first), original.after(third)) == (second, None)
    assert (original.before(second), original.before(first)) == (first, None)


def test_what_is_no_course(tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere").given
    error = refused(tmp_path)
    assert "catalogue.toml" in error.must and f"anybatch learn dev new {tmp_path}" in error.remedy


@pytest.mark.parametrize(
    "old, new, must, given, remedy",
    [
        ("name =", "name", "must be TOML", "catalogue.toml: ", "dev new"),
        ("title =", "titel =", "Every key", "'titel' in", "Did you mean title?"),
        ("description =", "descripton =", "Every key", "'descripton' in", "Did you mean description?"),
        ("description =", "x =", "Every key", "'x' in", "Leave it out"),
        ('"course"', '"my course"', "identifier", "'my course'", 'name = "my_course"'),
        ('"course"', "5", "name must be a string", "name = 5 in", "Write: name ="),
        ('title = "Second"', "", "title must be a string", "[[exercise]] 2: no title in", "Write: title ="),
        ('title = "Second"', 'title = " "', "title must be", "[[exercise]] 2: title = ' '", "Write: title ="),
        ('title = "Second"', 'title = ""\nlevel = 3', "Every key", "[[exercise]] 2: 'level' in", "Leave it out"),
        ('"02_second"', '"second"', "two digits", "[[exercise]] 2: folder = 'second'", 'folder = "02_second"'),
        ('"02_second"', '"../02_x"', "two digits", "[[exercise]] 2: folder = '../02_x'", 'folder = "02_'),
        ('"02_second"', '"02_nowhere"', "An exercise must have the files", "(no such folder)", "--exercise nowhere"),
        ('title = "Second"', 'title = "S"\ntopic = 5', "topic must be a string", "2: topic = 5 in", 'topic = "..."'),
        ('title = "Second"', 'title = "S"\ntopic = ""', "topic must be a string", "2: topic = '' in", 'topic = "..."'),
        ('title = "Second"', 'title = "S"\ntopics = "a"', "Every key", "2: 'topics' in", "Did you mean topic?"),
        (
            'title = "Second"',
            'title = "S"\ndifficulty = 4',
            "number from 1 to 3",
            "2: difficulty = 4",
            "difficulty = 2",
        ),
        (
            'title = "Second"',
            'title = "S"\ndifficulty = 0',
            "number from 1 to 3",
            "2: difficulty = 0",
            "difficulty = 2",
        ),
        ('title = "Second"', 'title = "S"\ndifficulty = true', "number from 1 to 3", "difficulty = True", "= 2"),
        (
            'title = "Second"',
            'title = "S"\nneeds = "third"',
            "a list of names",
            "2: needs = 'third'",
            'needs = ["name"]',
        ),
        ('title = "Second"', 'title = "S"\nneeds = [1]', "a list of names", "2: needs = [1]", 'needs = ["name"]'),
        (
            'title = "Second"',
            'title = "S"\nneeds = ["thrd"]',
            "without the number",
            "2: needs 'thrd'",
            "Did you mean third?",
        ),
        (
            'title = "Second"',
            'title = "S"\nneeds = ["x"]',
            "without the number",
            "needs 'x'",
            "example: 'mean_gradient'",
        ),
        (
            'title = "Second"',
            'title = "S"\nneeds = ["03_third"]',
            "without the number",
            "'03_third'",
            "Did you mean third?",
        ),
        ('title = "Second"', 'title = "S"\nneeds = ["third"]', "only earlier", "2: needs 'third', a later", "reorder"),
        (
            'title = "Second"',
            'title = "S"\nneeds = ["second"]',
            "only earlier",
            "needs 'second', itself, in",
            "Leave it out",
        ),
        ('"03_third"', '"02_second"', "needs a different name", "'second' twice", "Rename"),
        ('"02_second"', '"03_third"', "needs a different name", "'third' twice", "Rename"),
    ],
)
def test_every_defect_of_a_catalogue_is_named(folder, old, new, must, given, remedy):
    path = folder / "catalogue.toml"
    text = path.read_text()
    assert old in text  # the control: the catalogue had it
    path.write_text(text.replace(old, new, 1))
    error = refused(folder)
    assert must in error.must and given in error.given and remedy in error.remedy
    assert "catalogue.toml" in error.given or "02_nowhere" in error.given


PLACEMENT = """
placement_end = "third"

[[placement]]
text = "What is `1 + 1`?"
answers = ["`1`", "`2`", "`11`"]
right = 1
start = "mean_gradient"

[[placement]]
text = "And `2 + 2`?"
answers = ["`4`", "`22`"]
right = 0
start = "second"

"""


def placed(folder, placement):
    """Writes a placement above the exercises of a catalogue."""
    path = folder / "catalogue.toml"
    begin, table, end = path.read_text().partition("[[exercise]]")
    path.write_text(begin + placement + table + end)


def test_a_placement_is_read_as_it_was_written(folder, original):
    assert (original.placement, original.placement_end) == ((), "")  # the control: it is optional
    placed(folder, PLACEMENT)
    course = Course.read(folder)
    first, second = course.placement
    assert first == Question("What is `1 + 1`?", ("`1`", "`2`", "`11`"), 1, "mean_gradient")
    assert (second.right, second.start, course.placement_end) == (0, "second", "third")


@pytest.mark.parametrize(
    "old, new, must, given, remedy",
    [
        ('placement_end = "third"', "", "where to start if all are right", "no placement_end in", 'end = "third"'),
        (PLACEMENT[25:], "", "a [[placement]] for each question", "no placement in", 'start = "mean_gradient"'),
        (PLACEMENT[25:], "placement = []\n", "one [[placement]] or more", "placement = [] in", "Write: [[placement]]"),
        (PLACEMENT[25:], "placement = [1]\n", "must be a table", "[[placement]] 1: 1 in", "Write: [[placement]]"),
        ('end = "third"', 'end = "fourth"', "without the number", "placement_end 'fourth' in", "For example"),
        ('start = "second"', 'start = "secnd"', "without the number", "2: start 'secnd' in", "Did you mean second?"),
        ('start = "second"', "", "start must be a string", "[[placement]] 2: no start in", 'Write: start = "..."'),
        ("text =", "txt =", "Every key", "[[placement]] 1: 'txt' in", "Did you mean text?"),
        (
            "right = 0",
            "right = 2",
            "index of an answer, 0 to 1",
            "[[placement]] 2: right = 2",
            "right = 0, if it is '`4`'",
        ),
        ("right = 0", "right = -1", "index of an answer, 0 to 1", "[[placement]] 2: right = -1", "right = 0"),
        ("right = 0", "right = true", "right must be the index", "2: right = True", "right = 0"),
        ("right = 0", "", "right must be the index", "[[placement]] 2: no right in", "right = 0"),
        ('["`4`", "`22`"]', '["`4`"]', "two answers or more", "2: answers = ['`4`']", "I don't know"),
        ('["`4`", "`22`"]', '["`4`", " "]', "two answers or more", "2: answers = ['`4`', ' ']", "Write: answers"),
        ('["`4`", "`22`"]', '["`4`", 5]', "two answers or more", "2: answers = ['`4`', 5]", "Write: answers"),
        ('["`4`", "`22`"]', "[]", "answers must be a list", "2: answers = []", "Write: answers"),
        ('["`4`", "`22`"]', '"4"', "answers must be a list", "2: answers = '4'", "Write: answers"),
    ],
)
def test_every_defect_of_a_placement_is_named(folder, old, new, must, given, remedy):
    assert old in PLACEMENT  # the control: the placement had it
    placed(folder, PLACEMENT.replace(old, new, 1))
    error = refused(folder)
    assert must in error.must and given in error.given and remedy in error.remedy
    assert "catalogue.toml" in error.given


def test_topic_difficulty_and_needs(folder, original):
    assert [(each.topic, each.difficulty, each.needs) for each in original.exercises] == [("", 1, ())] * 3
    assert original.topics == (("", original.exercises),)
    path = folder / "catalogue.toml"
    text = path.read_text().replace('title = "Second"', 'title = "Second"\ntopic = "Sums"\ndifficulty = 3\nneeds = []')
    path.write_text(text + 'topic = "Sums"\nneeds = ["mean_gradient", "second"]\n')
    course = Course.read(folder)
    first, second, third = course.exercises
    assert (second.topic, second.difficulty, second.needs) == ("Sums", 3, ())
    assert third.needs == ("mean_gradient", "second")
    assert course.topics == (("", (first,)), ("Sums", (second, third)))


def test_the_topics_of_our_own_keep_the_order_of_the_numbers():
    course = Course.builtin()
    assert [exercise for _, exercises in course.topics for exercise in exercises] == list(course.exercises)
    assert all(topic for topic, _ in course.topics) and 3 <= len(course.topics) <= 8


OTHER_WAYS = """\
## With vmap

A text
of two lines.

```python
## a comment
def mean_gradient(w, x):
    return 1
```

## With a helper

```python
import math

def half(x):
    return x / 2

def mean_gradient(w, x):
    return half(2 * math.e)
```
"""


def test_other_ways_are_read_as_they_were_written(folder):
    assert Course.read(folder).exercises[0].other_ways == ()  # the control: they are optional
    (folder / EXERCISE / "other_ways.md").write_text(OTHER_WAYS)
    (vmap, code), (helper, longer) = Course.read(folder).exercises[0].other_ways
    assert (vmap, helper) == ("With vmap", "With a helper")
    assert code == "## a comment\ndef mean_gradient(w, x):\n    return 1\n"
    assert longer.startswith("import math\n") and longer.endswith("math.e)\n")


def test_a_way_replaces_the_function_of_the_starter(folder):
    (folder / EXERCISE / "other_ways.md").write_text(OTHER_WAYS)
    exercise = Course.read(folder).exercises[0]
    (_, _), (_, code) = exercise.other_ways
    file, space = exercise.file_with(code), {}
    assert "NotImplementedError" in exercise.starter and "NotImplementedError" not in file
    assert file.count("def mean_gradient") == 1 and "def loss" in file  # which the starter has
    exec(file, space)
    assert 2.7 < space["mean_gradient"](0, 0) < 2.8


@pytest.mark.parametrize(
    "text, given",
    [
        ("Just a text.", "other_ways.md: no heading"),
        ("## A\n\nNo code.\n", "other_ways.md: ## A"),
        ("## A\n\n## B\n\n```python\nx = 1\n```\n", "other_ways.md: ## A"),
        ("## A\n\n```python\nx = 1\n```\n\n```python\ny = 1\n```\n", "other_ways.md: ```python"),
        ("## A\n\n```\nx = 1\n```\n", "other_ways.md: ## A"),
        ("## A\n\n```python\nx = 1\n", "other_ways.md: ## A"),
    ],
)
def test_a_way_without_one_block_of_code_is_named(folder, text, given):
    (folder / EXERCISE / "other_ways.md").write_text(text)
    with pytest.raises(InputError) as caught:
        _ = Course.read(folder).exercises[0].other_ways
    assert "one block of code" in caught.value.must and given in caught.value.given


def test_a_way_that_is_not_python_is_named(folder):
    with pytest.raises(InputError, match=r"valid Python.*other_ways\.md, line 1: "):
        Course.read(folder).exercises[0].file_with("def (")


def test_exercises_stand_in_order(folder):
    text = (folder / "catalogue.toml").read_text()
    first, second = text.index("[[exercise]]"), text.rindex("[[exercise]]")
    (folder / "catalogue.toml").write_text(text[:first] + text[second:] + text[first:second])
    assert "order of their numbers" in refused(folder).must


def test_a_catalogue_without_exercises(folder):
    text = (folder / "catalogue.toml").read_text()
    (folder / "catalogue.toml").write_text(text[: text.index("[[exercise]]")])
    error = refused(folder)
    assert "exercise must be one [[exercise]] or more" in error.must and 'folder = "01_name"' in error.remedy


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / EXERCISE / name).unlink()
    assert f"{EXERCISE} without {name}" in refused(folder).given


@pytest.mark.parametrize(
    "text, given",
    [
        ("## 1\na\n## 2\nb\n", "with ## 1, ## 2"),
        ("## 1\na\n## 3\nb\n## 2\nc\n", "with ## 1, ## 3, ## 2"),
        ("## 1\na\n## 2\n\n## 3\nc\n", "nothing under ## 2"),
        ("a hint", "with no heading"),
    ],
)
def test_three_hints(folder, text, given):
    (folder / EXERCISE / "hints.md").write_text(text)
    with pytest.raises(InputError) as caught:
        _ = Course.read(folder).exercises[0].hints
    assert "three hints" in caught.value.must and given in caught.value.given


def test_a_comment_in_the_code_of_a_hint_is_no_heading(folder):
    (folder / EXERCISE / "hints.md").write_text("## 1\na\n## 2\nb\n## 3\n```python\n## a comment\nx = 1\n```\n")
    assert "## a comment" in Course.read(folder).exercises[0].hints[2]


@pytest.mark.parametrize(
    "text, must, given",
    [
        ("x = 1\ny = x / 0\n", "must run", "ZeroDivisionError: division by zero"),
        ("x = (\n", "must run", "line 1"),
        ("check = 5\n", "a Check", "check = 5"),
        ("", "a Check", "check = None"),
    ],
)
def test_a_check_that_is_none(folder, text, must, given):
    path = folder / EXERCISE / "check.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        _ = Course.read(folder).exercises[0].check
    assert must in caught.value.must and given in caught.value.given and str(path) in caught.value.given
    assert "line 2" in caught.value.given or "ZeroDivision" not in text + caught.value.given


@pytest.mark.parametrize("docstring", ["says: x", "caught by: value", "caught by: never\nsays: x"])
def test_a_mistake_says_how_it_is_caught(folder, docstring):
    (folder / EXERCISE / "mistakes" / "sum.py").write_text(f'"""A sum.\n\n{docstring}\n"""\n')
    with pytest.raises(InputError, match=r"caught by: <stage>.*sum\.py.*\nThe stages are: file, signature"):
        _ = Course.read(folder).exercises[0].mistakes


@pytest.mark.parametrize(
    "body, expected",
    [
        ("    y = 1\n    return ab.grad(f)(\n        w,\n    )\n", "return ab.grad(f)(\n    w,\n)"),
        ("    if w:\n        w = ab.one()\n    return ab.two(w)\n", "w = ab.one()\nreturn ab.two(w)"),
        ("    return step(w)\n\n\nstep = ab.train_step(f)\n", "step = ab.train_step(f)"),
        ("    return 1\n", ""),
    ],
)
def test_the_lines_of_the_library_are_found(folder, body, expected):
    path = folder / EXERCISE / "with_anybatch.py"
    path.write_text(f"import anybatch as ab\n\n\ndef mean_gradient(w, x):\n{body}")
    assert Course.read(folder).exercises[0].one_line == expected


def test_what_is_not_text_is_named(folder):
    (folder / EXERCISE / "page.md").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"UTF-8.*page\.md \(not UTF-8\)"):
        _ = Course.read(folder).exercises[0].page


def test_the_template_is_a_course():
    assert Course.read(COURSES / "template").name == "mine"
