"""The playground: a loss, and what `anybatch.read`, `plan` and `verify` say about it, as pictures.

`page` builds it. The loss runs in another process (`analysis.py`); this module only draws plain data. The pictures are
SVG with the colours of the site. `Frames` are the pictures of a small batch that goes through its microbatches.
"""

import contextlib
import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from nicegui import background_tasks, events, ui

from anybatch.learn.web.analysis import CONTRACT, Analyst, Part
from anybatch.learn.web.playground_losses import LOSSES, named

ANALYST = Analyst()

# For each kind of line: the label at the line, and what it means.
WORDS = {
    "rows": ("per example", "computed from one example at a time; each microbatch computes its own rows"),
    "sum": ("sums", "adds the examples up; the microbatches' sums are added"),
    "once": ("once", "computed once, from the sums"),
    "couples": ("couples", "brings examples together; needs all of them at once"),
    "full": ("full batch", "runs on the full batch: after a line that couples, or to sort or select the data first"),
    "same": ("same", "does not depend on the examples; the same for each of them"),
}


async def close() -> None:
    """Ends the processes of the playground. To be called when the server ends."""
    await ANALYST.close()


def page(chosen: str = LOSSES[0].name) -> None:
    """Builds the page inside the current NiceGUI context. Its style is `CSS`, which must be on the page already.

    Args:
      chosen: the name of the loss to begin with.
    """
    _Page(chosen)


def _text(tag: str, text: str, classes: str = "") -> ui.html:
    """An element of HTML with a text."""
    return ui.html(html.escape(text), sanitize=False, tag=tag).classes(classes)


def _button(words: str, on_click: Callable[..., Any], *, icon: str | None = None, kind: str = "plain") -> ui.button:
    """A button in the site's style. Without a colour of Quasar's, which would win over it."""
    made = ui.button(words, icon=icon, on_click=on_click, color=None).props("no-caps")
    return made.props("unelevated" if kind == "primary" else "flat").classes(f"ab-button ab-{kind}")


class _Page:
    """The state of one browser tab, and its elements."""

    def __init__(self, chosen: str) -> None:
        loss = named(chosen)
        self._task: Any = None
        self._analysed = ""  # the text that is shown or analysed
        with ui.element("div").classes("ab-play"):
            _text("h1", "Playground")
            _text(
                "p",
                "Choose a loss or write one, and see what anybatch reads in it, plans and verifies.",
                "ab-play-lead",
            )
            with ui.element("div").classes("ab-play-columns"):
                with ui.element("div").classes("ab-play-left"):
                    self._editing(loss.name)
                with ui.element("div").classes("ab-play-right") as self._right:
                    self._reading = _Section("How it uses its examples")
                    self._plan = _Section("Memory and time against the microbatch size")
                    self._verification = _Section("Verification")
                    self._steps = _Section("A small batch, step by step")
        client = ui.context.client
        client.on_connect(self._connected)
        client.on_delete(self._cancel)

    def _editing(self, name: str) -> None:
        loss = named(name)
        options = {each.name: each.title for each in LOSSES}
        self._select = ui.select(options, value=name, label="Loss", on_change=self._choose).classes("ab-play-select")
        self._look_at = _text("p", loss.look_at, "ab-play-look")
        self._editor = (
            ui.codemirror(
                loss.source,
                language="Python",
                theme="githubLight",
                line_wrapping=True,
                on_change=self._edited,
                keymap={"Mod-Enter": self.run},
            )
            .classes("ab-play-editor")
            .props('aria-label="Source of the loss"')
        )
        with ui.element("div").classes("ab-play-actions"):
            _button("Run", self.run, icon="play_arrow", kind="primary")
            self._spinner = ui.spinner(size="1.25rem").props('aria-hidden="true"')
            self._spinner.visible = False
            self._status = _text("p", "", "ab-play-status").props('role="status"')
        self._problems = ui.element("div").classes("ab-play-messages").props('role="alert"')
        self._prints = ui.element("div").classes("ab-play-messages")
        ui.html(_CONTRACT, sanitize=False, tag="p").classes("ab-play-contract")

    async def _connected(self) -> None:
        ANALYST.warm_up()
        await self._adapt_editor()
        if not self._analysed:
            self.run()

    async def _adapt_editor(self) -> None:
        """Gives the editor the theme of the page, and the name that screen readers say. NiceGUI has no other way."""
        with contextlib.suppress(TimeoutError):
            is_dark = await ui.run_javascript(
                f"""
                const editor = getElement({self._editor.id})?.editor;
                editor?.contentDOM.setAttribute("aria-label", "Source of the loss");
                return document.body.classList.contains("body--dark");
                """,
                timeout=5.0,
            )
            self._editor.theme = "githubDark" if is_dark else "githubLight"

    # What the learner does.

    def _choose(self, event: events.ValueChangeEventArguments) -> None:
        loss = named(event.value)
        self._look_at.content = html.escape(loss.look_at)
        self._editor.value = loss.source
        self.run()

    def _edited(self) -> None:
        is_stale = self._editor.value != self._analysed and bool(self._analysed)
        for element in (self._right, self._editor):
            element.classes(
                toggle=None, add="ab-play-stale" if is_stale else "", remove="" if is_stale else "ab-play-stale"
            )
        if is_stale and not self._spinner.visible:
            self._say("Changed since it was run. Run it again to see what that changes.")

    def run(self) -> None:
        """Begins to analyse what is in the editor. An analysis that is still running is ended."""
        self._cancel()
        self._analysed = self._editor.value or ""
        self._edited()
        self._editor.decorations = []
        self._editor.line_tooltips = {}
        self._problems.clear()
        self._prints.clear()
        for section in self._sections.values():
            section.wait()
        self._spinner.visible = True
        self._say("Reading, compiling and comparing in a process of its own …")
        self._task = background_tasks.create(self._analyse(self._analysed), name="playground")

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @property
    def _sections(self) -> dict[str, "_Section"]:
        return {
            "reading": self._reading,
            "plan": self._plan,
            "verification": self._verification,
            "steps": self._steps,
        }

    def _say(self, text: str) -> None:
        self._status.content = html.escape(text)

    # What comes back.

    async def _analyse(self, source: str) -> None:
        parts = 0
        async with contextlib.aclosing(ANALYST.analyse(source)) as answers:
            async for part in answers:
                parts += part["part"] in self._sections
                self._show(part)
        for section in self._sections.values():
            section.give_up()
        self._spinner.visible = False
        self._say("Done." if parts == len(self._sections) else "Ended: see the message below.")
        self._edited()

    def _show(self, part: Part) -> None:
        name = part["part"]
        if name == "error":
            self._show_error(part)
        elif name == "prints":
            with self._prints:
                self._prints.clear()
                _text("h2", "Printed", "ab-play-small-heading")
                _text("pre", part["text"], "ab-play-prints").props('tabindex="0"')
        elif name == "reading":
            self._mark(part)
            with self._reading.filled():
                _show_reading(part, self._editor)
        elif name == "plan":
            with self._plan.filled():
                _PlanView(part)
        elif name == "verification":
            with self._verification.filled():
                ui.html(verification_table(part), sanitize=False)
        elif name == "steps":
            with self._steps.filled():
                _StepsView(part)

    def _mark(self, part: Part) -> None:
        """Draws the reading on the source."""
        self._editor.decorations = decorations(self._analysed, part["marks"])
        self._editor.line_tooltips = {mark["line"]: tooltip(mark) for mark in part["marks"]}

    def _show_error(self, part: Part) -> None:
        if part["of"] in self._sections and part["of"] != "reading":
            with self._sections[part["of"]].filled():
                ui.html(problem(part), sanitize=False)
            return
        with self._problems:
            ui.html(problem(part), sanitize=False)
        line = part["line"]
        if line and line <= len(self._analysed.splitlines()):
            self._editor.decorations = [
                {"kind": "line", "line": line, "class": "ab-play-line ab-play-error-line"},
                _label(self._analysed, line, "error", "ab-play-of-error"),
            ]
            self._editor.line_tooltips = {line: part["message"][:300]}
            self._editor.reveal_line(line)


class _Section:
    """A part of the page that is filled when its part of the analysis arrives."""

    def __init__(self, title: str) -> None:
        with ui.element("section").classes("ab-play-section") as self._section:
            _text("h2", title)
            self._body = ui.element("div").classes("ab-play-body").props('aria-live="polite"')
        self._is_waiting = False

    def wait(self) -> None:
        """Shows that it is on its way."""
        self._is_waiting = True
        self._section.props('aria-busy="true"')
        self._body.clear()
        with self._body:
            with ui.element("div").classes("ab-play-waiting"):
                ui.spinner(size="1.5rem").props('aria-hidden="true"')
                _text("span", "on its way …")

    def give_up(self) -> None:
        """Says that there is nothing to show, if nothing has come."""
        if self._is_waiting:
            with self.filled():
                _text("p", "Nothing to show: the file could not be analysed.", "ab-play-muted")

    def filled(self) -> ui.element:
        """The empty body, to be filled in a `with` block."""
        self._is_waiting = False
        self._section.props('aria-busy="false"')
        self._body.clear()
        return self._body


# The reading.


def decorations(source: str, marks: Sequence[Part]) -> list[dict[str, Any]]:
    """The decorations of the editor: a colour for each line, and a label at its end."""
    found = []
    for mark in marks:
        line, kind = mark["line"], mark["kind"]
        found.append({"kind": "line", "line": line, "class": f"ab-play-line ab-play-{kind}"})
        found.append(_label(source, line, WORDS[kind][0], f"ab-play-of-{kind}"))
    return found


def _label(source: str, line: int, text: str, classes: str) -> dict[str, Any]:
    """A label after the last character of a line."""
    position = sum(len(each) + 1 for each in source.split("\n")[:line]) - 1
    return {"kind": "widget", "position": position, "text": text, "class": f"ab-play-label {classes}", "side": 1}


def tooltip(mark: Part) -> str:
    """What the values of a line are.

    >>> tooltip({"kind": "sum", "values": [{"kind": "rows", "type": "f32[8]"}, {"kind": "sum", "type": "f32[]"}]})
    'per example: f32[8]; sums: f32[]'
    """
    return "; ".join(f"{WORDS[value['kind']][0]}: {value['type']}" for value in mark["values"])


def _show_reading(part: Part, editor: ui.codemirror) -> None:
    kind, how = part["kind"], part["how"]
    ui.html(
        f'<span class="ab-play-kind {"ab-play-is-coupled" if part["couples"] else ""}">{html.escape(kind)}</span> '
        f'<span class="ab-play-how">{html.escape(how)}</span>',
        sanitize=False,
        tag="p",
    ).classes("ab-play-verdict")
    ui.html(legend(part["marks"]), sanitize=False)
    for blame in part["blames"][:5]:
        with ui.element("div").classes("ab-play-blame"):
            line = blame["line"]
            show = _button(f"line {line}", lambda _, line=line: editor.reveal_line(line), kind="plain")
            show.props(f'dense aria-label="Show line {line} in the editor"')
            _text("span", f"couples ({blame['primitive']}): {blame['why']}")
    if part["advice"]:
        _text("p", part["advice"], "ab-play-advice")
    with ui.element("details").classes("ab-play-details"):
        _text("summary", "The reading as text, and line by line")
        _text("pre", "\n".join([part["title"], *part["notes"]])).props('tabindex="0"')
        ui.html(line_table(part["marks"]), sanitize=False)


def legend(marks: Sequence[Part]) -> str:
    """The kinds of lines that a reading has, each with its label, its meaning and its lines."""
    items = []
    for kind, (label, meaning) in WORDS.items():
        lines = [mark["line"] for mark in marks if mark["kind"] == kind]
        if lines:
            where = f"line{'s' if len(lines) > 1 else ''} {_ranges(lines)}"
            items.append(
                f'<li><span class="ab-play-label ab-play-of-{kind}">{label}</span> '
                f'<span><span class="ab-play-where">{where}</span> {meaning}</span></li>'
            )
    return f'<ul class="ab-play-legend">{"".join(items)}</ul>'


def _ranges(lines: Sequence[int]) -> str:
    """Sorted numbers as text: 3, 5 to 7."""
    groups: list[list[int]] = []
    for line in lines:
        if groups and line == groups[-1][-1] + 1:
            groups[-1].append(line)
        else:
            groups.append([line])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups)


def line_table(marks: Sequence[Part]) -> str:
    """The marks as a table."""
    rows = "".join(
        f"<tr><td>{mark['line']}</td><td>{WORDS[mark['kind']][0]}</td><td><code>{html.escape(tooltip(mark))}</code></td></tr>"
        for mark in marks
    )
    head = '<tr><th scope="col">line</th><th scope="col">is</th><th scope="col">its values</th></tr>'
    table = f'<table class="ab-play-table"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    return f'<div class="ab-play-scroll">{table}</div>'


def problem(part: Part) -> str:
    """An error as HTML, with its line."""
    where = f"Line {part['line']}: " if part["line"] else ""
    title = html.escape(f"{where}{part['title']}".rstrip(": ") or "This loss cannot be analysed")
    return (
        f'<div class="ab-play-problem"><p class="ab-play-problem-title">{title}</p>'
        f"<pre>{html.escape(part['message'])}</pre></div>"
    )


# The plan.

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def _unit(number: float) -> tuple[int, str]:
    return next((unit for unit in _UNITS if number >= unit[0]), _UNITS[-1])


def amount(number: float) -> str:
    """Bytes in words, with three digits.

    >>> amount(143 * 1024), amount(3.5 * 2**20)
    ('143 KiB', '3.5 MiB')
    """
    unit, name = _unit(number)
    return f"{number / unit:.3g} {name}" if number < 999.5 * unit else f"{number / unit:.0f} {name}"


def duration(seconds: float) -> str:
    """Seconds in words, with two digits.

    >>> duration(0.00012), duration(0.034)
    ('0.12 ms', '34 ms')
    """
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.0995 else f"{seconds:.2f} s"


def choice(candidates: Sequence[Part], budget: float) -> Part | None:
    """The largest microbatch that fits a budget, as `anybatch.plan` chooses without times; None if none fits."""
    return next((each for each in candidates if each["total"] <= budget), None)


def choice_in_words(candidates: Sequence[Part], budget: float) -> str:
    """What a budget means for the microbatches."""
    chosen, least = choice(candidates, budget), min(candidates, key=lambda each: each["total"])
    if chosen is None:
        fixed = amount(least["arguments"] + least["gradients"])
        return (
            f"With {amount(budget)}: nothing fits. Even microbatches of {least['size']} take {amount(least['total'])}; "
            f"{fixed} of that are parameters, batch and gradient, which microbatches do not shrink."
        )
    largest = candidates[0]
    if chosen is largest:
        words = f"With {amount(budget)}: all {chosen['size']} examples at once, which take {amount(chosen['total'])}."
        share = f"{least['total'] / largest['total']:.0%}"
        return f"{words} The leanest microbatches, of {least['size']}, take {share} of that."
    examples = "example" if chosen["size"] == 1 else "examples"
    words = f"With {amount(budget)}: microbatches of {chosen['size']} {examples}, the largest that fits"
    words += f" ({amount(chosen['total'])})."
    ratio = chosen["seconds"] / largest["seconds"]
    share = f"{chosen['total'] / largest['total']:.0%}"
    if not math.isfinite(ratio):
        return words
    return f"{words} That is {share} of the memory of the full batch, in {ratio:.1f} times its time."


class _PlanView:
    """The plan as a picture, with a budget to drag."""

    def __init__(self, part: Part) -> None:
        self._candidates = part["candidates"]
        totals = [each["total"] for each in self._candidates]
        low, high = int(0.9 * min(totals)), int(1.08 * max(totals))
        middle = self._candidates[len(self._candidates) // 3]["total"]
        self._picture = ui.html(plan_picture(self._candidates, middle), sanitize=False).classes("ab-play-picture")
        with ui.element("div").classes("ab-play-budget"):
            label = ui.element("label").classes("ab-play-slider-name")
            # A slider of the browser's own: unlike Quasar's, what has the focus also has the role and the value.
            self._slider = (
                ui.element("input")
                .classes("ab-play-slider")
                .props(f'type="range" min="{low}" max="{high}" step="{max(1, (high - low) // 200)}"')
            )
            # The attribute, which is where it begins. As a property, Vue would set it again at every update.
            self._slider.props["^value"] = middle
            self._slider.on(
                "input", self._moved, js_handler="(event) => emit(event.target.valueAsNumber)", throttle=0.05
            )
            label.props(f'for="{self._slider.html_id}"')
            with label:
                ui.html("Memory budget", sanitize=False, tag="span")
        self._words = _text("p", "", "ab-play-words").props('aria-live="polite"')
        self._draw(middle)
        _text(
            "p",
            "Bytes as XLA counts them for each compiled program, with its arguments and results. Times are those of "
            "programs compiled in a hurry for this machine's CPU: compare them with each other only.",
            "ab-play-note",
        )

    def _moved(self, event: events.GenericEventArguments) -> None:
        if isinstance(event.args, int | float):
            self._draw(float(event.args))

    def _draw(self, budget: float) -> None:
        self._picture.content = plan_picture(self._candidates, budget)
        self._words.content = html.escape(choice_in_words(self._candidates, budget))
        self._slider.props["aria-valuetext"] = amount(budget)


def plan_picture(candidates: Sequence[Part], budget: float) -> str:
    """Memory and time against the microbatch size, with a budget. What fits is filled."""
    chosen = choice(candidates, budget)
    plot = _Plot(candidates)
    shapes = [plot.axes(), plot.budget(budget, chosen), plot.times(), plot.memory(budget, chosen)]
    words = choice_in_words(candidates, budget)
    return _svg(plot.width, plot.height, "".join(shapes), "Memory and time against the microbatch size", words, 560)


class _Plot:
    """The axes of the plot of a plan, and what is drawn in them."""

    width, height = 420, 250
    left, right, top, bottom = 44, 376, 26, 206  # the area inside the axes

    def __init__(self, candidates: Sequence[Part]) -> None:
        self._candidates = candidates
        self._timed = [each for each in candidates if math.isfinite(each["seconds"])]
        highest = max(each["total"] for each in candidates)
        self._unit, self._unit_name = _unit(highest)
        self._bytes = ticks(1.06 * highest / self._unit)
        self._milliseconds = ticks(1.06e3 * max((each["seconds"] for each in self._timed), default=0.001))
        self._powers = math.log2(candidates[0]["size"]) or 1.0

    def _x(self, size: int) -> float:
        return self.left + 14 + (self.right - self.left - 28) * math.log2(size) / self._powers

    def _y(self, share: float) -> float:
        return self.bottom - (self.bottom - self.top) * share

    def _y_of_bytes(self, number: float) -> float:
        return self._y(min(1.0, number / self._unit / self._bytes[-1]))

    def _y_of_seconds(self, number: float) -> float:
        return self._y(1e3 * number / self._milliseconds[-1])

    def axes(self) -> str:
        """The grid, the numbers and the names of the axes."""
        shapes = [
            f'<text x="4" y="12" fill="var(--ab-rows)">● memory, {self._unit_name}</text>',
            f'<text x="{self.width - 4}" y="12" text-anchor="end" fill="var(--ab-head)">■ time, ms</text>',
            f'<text x="{(self.left + self.right) / 2}" y="{self.height - 8}" text-anchor="middle">'
            "microbatch size</text>",
        ]
        for tick in self._bytes:
            y = self._y(tick / self._bytes[-1])
            shapes.append(
                f'<line x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--ab-border)"/>'
                f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
            )
        for tick in self._milliseconds:
            y = self._y(tick / self._milliseconds[-1])
            shapes.append(f'<text x="{self.right + 6}" y="{y + 4:.1f}">{tick:g}</text>')
        for each in self._candidates:
            x = self._x(each["size"])
            shapes.append(f'<text x="{x:.1f}" y="{self.bottom + 16}" text-anchor="middle">{each["size"]}</text>')
        return "".join(shapes)

    def budget(self, budget: float, chosen: Part | None) -> str:
        """The budget as a line, and a mark at the chosen size."""
        at = self._y_of_bytes(budget)
        # Above the line there is no room if the budget is the largest.
        text = at - 5 if at > self.top + 14 else at + 13
        shape = (
            f'<rect x="{self.left}" y="{at:.1f}" width="{self.right - self.left}" height="{self.bottom - at:.1f}" '
            'fill="var(--ab-good)" opacity="0.07"/>'
            f'<line x1="{self.left}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--ab-good)" '
            'stroke-width="1.5" stroke-dasharray="5 4"/>'
            f'<text x="{self.left + 6}" y="{text:.1f}" fill="var(--ab-good)">budget {amount(budget)}</text>'
        )
        if chosen is None:
            return shape
        return shape + (
            f'<rect x="{self._x(chosen["size"]) - 9:.1f}" y="{self.top}" width="18" height="{self.bottom - self.top}" '
            'rx="3" fill="var(--ab-accent)" opacity="0.16"/>'
        )

    def times(self) -> str:
        """The times, as squares on a line."""
        places = [(each, self._x(each["size"]), self._y_of_seconds(each["seconds"])) for each in self._timed]
        line = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in places)
        return f'<polyline points="{line}" fill="none" stroke="var(--ab-head)" stroke-width="1.5"/>' + "".join(
            f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="var(--ab-head)">'
            f"<title>microbatches of {each['size']}: {duration(each['seconds'])}</title></rect>"
            for each, x, y in places
        )

    def memory(self, budget: float, chosen: Part | None) -> str:
        """The bytes, as circles on a line: filled if they fit, and larger if they are chosen."""
        places = [(each, self._x(each["size"]), self._y_of_bytes(each["total"])) for each in self._candidates]
        line = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in places)
        shapes = [f'<polyline points="{line}" fill="none" stroke="var(--ab-rows)" stroke-width="2"/>']
        for each, x, y in places:
            fits = each["total"] <= budget
            shapes.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6.5 if each is chosen else 4.5}" stroke="var(--ab-rows)" '
                f'stroke-width="2" fill="var({"--ab-rows" if fits else "--ab-surface"})"><title>microbatches of '
                f"{each['size']}: {amount(each['total'])}, {'fits' if fits else 'does not fit'}</title></circle>"
            )
        return "".join(shapes)


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least the highest, for an axis.

    >>> ticks(143), ticks(0.9)
    ([0.0, 50.0, 100.0, 150.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(step for step in (1, 2, 2.5, 5, 10) if highest <= 4 * step * power) * power
    return [round(step * number, 12) for number in range(math.ceil(highest / step) + 1)]


def _svg(width: float, height: float, shapes: str, title: str, words: str, most: int) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" style="max-width: {most}px" role="img" class="ab-play-svg">'
        f"<title>{html.escape(title)}</title><desc>{html.escape(words)}</desc>{shapes}</svg>"
    )


# The verification.


def verification_table(part: Part) -> str:
    """The table of `anybatch.verify`, its notes and its diagnosis, as HTML."""
    all_of = (
        f"{part['examples']} examples"
        if part["examples"] == part["batch"]
        else (f"the first {part['examples']} of {part['batch']} examples")
    )
    intro = (
        f"The gradient of {all_of}, per microbatch, compared with <code>jax.value_and_grad</code> of all at once, in "
        f"{html.escape(part['dtype'])}. Differences are relative."
    )
    rows = "".join(_route_row(route, part["examples"]) for route in part["routes"])
    texts = [f"<p>{html.escape(note)}</p>" for note in part["notes"]]
    verdict = "All routes give the gradient of the full batch." if part["ok"] else part["diagnosis"]
    texts.append(f'<p class="ab-play-words">{html.escape(verdict)}</p>')
    naive = part["naive"]
    if naive is not None:
        texts.append(_naive(naive, part["examples"]))
    return f"<p>{intro}</p>{_table(rows)}{''.join(texts)}"


def _table(rows: str) -> str:
    names = ("microbatch size", "largest difference", "allowed", "result")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="ab-play-scroll" tabindex="0" role="region" aria-label="Table of routes">'
        f'<table class="ab-play-table"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _route_row(route: Part, examples: int) -> str:
    size = f"all {examples}" if route["size"] >= examples else str(route["size"])
    blocks = route["name"].partition(", ")[2]
    result = "✓ same" if route["same"] else "✗ different"
    kind = "ab-play-good" if route["same"] else "ab-play-bad"
    return (
        f"<tr><td>{html.escape(size + (f', {blocks}' if blocks else ''))}</td><td>{_small(route['difference'])}</td>"
        f'<td>{_small(route["allowed"])}</td><td class="{kind}">{result}</td></tr>'
    )


def _small(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"


def _naive(route: Part, examples: int) -> str:
    intro = "A loop that takes the mean of its microbatches' gradients, as for a plain mean over the examples:"
    diagnosis = html.escape(route["diagnosis"]).replace("\n", "<br>")
    return (
        f'<h3 class="ab-play-small-heading">And the usual loop?</h3><p>{intro}</p>{_table(_route_row(route, examples))}'
        f'<p class="ab-play-diagnosis">{diagnosis or "Here it happens to agree."}</p>'
    )


# A small batch, step by step.


@dataclasses.dataclass(frozen=True)
class Frame:
    """One picture of a small batch that goes through its microbatches.

    Args:
      words: what happens, in words.
      current: the first example of the microbatch at hand, and the first after it; None between microbatches.
      done: how many examples this pass is done with.
      gathered: how many examples the first of two passes is done with.
      stage: "first" or "second" pass, the "head" between them, or "after" the last one.
      bars: the entries of the gradient buffer.
    """

    words: str
    current: tuple[int, int] | None
    done: int
    gathered: int
    stage: str
    bars: tuple[float, ...]


def frames(part: Part, size: int) -> list[Frame]:
    """The pictures of a batch in microbatches of a size, in order.

    Args:
      part: the part "steps" of an analysis.
      size: one of its sizes.
    """
    examples, two = part["examples"], part["passes"] == 2
    found = part["sizes"][str(size)]
    empty = tuple(0.0 for _ in part["expected"])
    bounds = [(start, min(start + size, examples)) for start in range(0, examples, size)]
    number = len(bounds)
    made = [
        Frame(f"{examples} examples, in {number} microbatches. The gradient buffer is zero.", None, 0, 0, "", empty)
    ]
    if two:
        made += _first_pass(part, bounds, empty)
    stage = "second" if two else "only"
    gathered = examples if two else 0
    of_pass = "Second pass, microbatch" if two else "Microbatch"
    for index, bound in enumerate(bounds):
        words = (
            f"{of_pass} {index + 1} of {number}: the gradient of its {_count(bound[1] - bound[0])} is added. "
            f"Norm of the buffer: {found['norms'][index]:.4g}."
        )
        made.append(Frame(words, bound, bound[0], gathered, stage, tuple(found["partial"][index])))
    return made + _after(part, found, gathered)


def _count(number: int) -> str:
    return "1 example" if number == 1 else f"{number} examples"


def _first_pass(part: Part, bounds: Sequence[tuple[int, int]], empty: tuple[float, ...]) -> list[Frame]:
    made = []
    rows = [each for each in part["first_pass"] if each["how"] == "rows"]
    verb = "its rows are gathered" if rows else "its sums are added up"
    for index, bound in enumerate(bounds):
        words = f"First pass, microbatch {index + 1} of {len(bounds)}: {verb}. No gradient yet."
        made.append(Frame(words, bound, bound[0], bound[1], "first", empty))
    what = "the rows of all examples" if rows else "the sums"
    words = f"The head: the loss and its gradient with respect to {what}, computed once."
    made.append(Frame(words, None, part["examples"], part["examples"], "head", empty))
    return made


def _after(part: Part, found: Part, gathered: int) -> list[Frame]:
    """What follows the last microbatch: a factor, a term of the parameters, and the comparison."""
    made = []
    bars, examples = tuple(found["partial"][-1]), part["examples"]
    if part["factor"] is not None:
        bars = tuple(part["factor"] * bar for bar in bars)
        words = f"The factor that is known only now, {part['factor']:.4g}, multiplies the buffer once."
        made.append(Frame(words, None, examples, gathered, "after", bars))
    if part["direct"] is not None:
        bars = tuple(bar + term for bar, term in zip(bars, part["direct"], strict=True))
        words = "The gradient of the head with respect to the parameters themselves is added, once."
        made.append(Frame(words, None, examples, gathered, "after", bars))
    difference = found["difference"]
    same = "Equals" if difference < 1e-9 else "Compared with"
    words = f"{same} the full batch's gradient: relative difference {_small(difference)}, in float64."
    return [*made, Frame(words, None, examples, gathered, "end", bars)]


def steps_picture(part: Part, size: int, frame: Frame, before: Frame | None = None) -> str:
    """A frame as SVG: the examples, what was gathered for the head, and the gradient buffer."""
    two = part["passes"] == 2
    shapes = [_caption(12, f"the batch: {part['examples']} examples in microbatches of {size}")]
    shapes.append(_examples(part["examples"], size, frame))
    top = 64.0
    if two:
        shapes.append(_head(part, frame, top))
        top += 64
    shapes.append(_arrow(part, size, frame, top))
    shapes.append(_caption(top + 22, f"gradient buffer: {len(part['expected'])} of {part['entries']} entries"))
    shapes.append(_bars(part, size, frame, before, top + 30))
    return _svg(360, top + 156, "".join(shapes), "A small batch going through its microbatches", frame.words, 520)


def _caption(y: float, text: str, x: float = 10) -> str:
    return f'<text x="{x}" y="{y:.1f}">{html.escape(text)}</text>'


def _place(example: int, size: int, examples: int) -> float:
    """Where an example begins, from the left."""
    groups = -(-examples // size)
    side, apart = 19.0, 3.0
    more = min(12.0, (340 - examples * (side + apart)) / max(1, groups - 1)) if groups > 1 else 0.0
    return 10 + example * (side + apart) + (example // size) * more


def _examples(number: int, size: int, frame: Frame) -> str:
    shapes = []
    for example in range(number):
        is_current = frame.current is not None and frame.current[0] <= example < frame.current[1]
        is_done = example < frame.done or frame.stage in ("after", "end")
        style = "current" if is_current else "done" if is_done else "waiting"
        shapes.append(
            f'<rect class="ab-play-example ab-play-is-{style}" x="{_place(example, size, number):.1f}" y="20" '
            f'width="19" height="19" rx="3"><title>example {example + 1}: {style}</title></rect>'
        )
    return "".join(shapes)


def _head(part: Part, frame: Frame, top: float) -> str:
    """What the first pass has gathered, and the head."""
    rows = [each for each in part["first_pass"] if each["how"] == "rows"]
    active = "ab-play-is-active" if frame.stage == "head" else ""
    what = "rows of all examples" if rows else f"{len(part['first_pass'])} sums over the batch"
    share = frame.gathered / part["examples"]
    return (
        _caption(top + 8, f"for the head: {what}")
        + f'<rect x="10" y="{top + 20}" width="200" height="16" rx="3" fill="none" stroke="var(--ab-border)"/>'
        + f'<rect x="10" y="{top + 20}" width="{200 * share:.1f}" height="16" rx="3" fill="var(--ab-head)"/>'
        + f'<rect class="ab-play-head {active}" x="250" y="{top + 15}" width="100" height="27" rx="6"/>'
        + f'<text x="300" y="{top + 33}" text-anchor="middle" fill="var(--ab-text)">head, once</text>'
        + f'<path d="M 214 {top + 28} H 246" stroke="var(--ab-muted)" fill="none" marker-end="url(#ab-play-tip)"/>'
    )


def _arrow(part: Part, size: int, frame: Frame, top: float) -> str:
    """From the microbatch at hand to where its result goes."""
    tip = (
        '<defs><marker id="ab-play-tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M 0 0 L 8 4 L 0 8 z" fill="var(--ab-muted)"/></marker></defs>'
    )
    if frame.current is None:
        return tip
    first, last = frame.current
    number = part["examples"]
    x = (_place(first, size, number) + _place(last - 1, size, number) + 19) / 2
    # In the second of two passes, it goes behind what was gathered.
    parts = [(43.0, 58.0)] if frame.stage == "first" else [(43.0, top + 8)]
    if frame.stage == "second":
        parts = [(43.0, 58.0), (top - 14, top + 8)]
    return tip + "".join(
        f'<path class="ab-play-arrow" d="M {x:.1f} {start} V {end}" stroke="var(--ab-muted)" stroke-width="1.5" '
        'stroke-dasharray="4 3" fill="none" marker-end="url(#ab-play-tip)"/>'
        for start, end in parts
    )


def _bars(part: Part, size: int, frame: Frame, before: Frame | None, top: float) -> str:
    """The entries of the buffer as bars, and those of the full batch's gradient as outlines."""
    height = 110.0
    every = [bar for other in frames(part, size) for bar in other.bars]
    largest = max(map(abs, [*every, *part["expected"]])) or 1.0
    middle, scale = top + height / 2, (height / 2 - 4) / largest
    step = 340 / max(1, len(frame.bars))
    shapes = [
        f'<rect x="10" y="{top}" width="340" height="{height}" rx="6" fill="var(--ab-raised)" '
        'stroke="var(--ab-border)"/>'
    ]
    for index, (bar, wanted) in enumerate(zip(frame.bars, part["expected"], strict=True)):
        x = 10 + (index + 0.2) * step
        width = 0.6 * step
        old = before.bars[index] if before is not None else bar
        share = old / bar if bar else 1.0
        shapes.append(
            f'<rect class="ab-play-bar" style="--from: {share:.3f}; transform-origin: 0 {middle}px" x="{x:.1f}" '
            f'y="{middle - max(0.0, bar * scale):.1f}" width="{width:.1f}" height="{abs(bar) * scale:.1f}" '
            f'fill="var(--ab-sum)"><title>{html.escape(part["components"][index])}: {bar:.4g}, of {wanted:.4g}'
            "</title></rect>"
            f'<rect x="{x:.1f}" y="{middle - max(0.0, wanted * scale):.1f}" width="{width:.1f}" '
            f'height="{abs(wanted) * scale:.1f}" fill="none" stroke="var(--ab-muted)" stroke-dasharray="3 2"/>'
        )
    shapes.append(f'<line x1="10" x2="350" y1="{middle}" y2="{middle}" stroke="var(--ab-muted)"/>')
    return "".join(shapes)


class _StepsView:
    """The frames, with buttons to go through them."""

    def __init__(self, part: Part) -> None:
        self._part = part
        sizes = [int(size) for size in part["sizes"]]
        self._size = 3 if 3 in sizes else sizes[-1]
        self._frames, self._at = frames(part, self._size), 0
        with ui.element("div").classes("ab-play-controls"):
            options = {size: str(size) for size in sizes}
            ui.select(options, value=self._size, label="Microbatch size", on_change=self._resize).classes(
                "ab-play-size"
            )
            self._play = _button("Play", self._toggle, icon="play_arrow", kind="primary")
            _button("Step", self._step, icon="skip_next")
            _button("Start over", self._restart, icon="replay")
        self._picture = ui.html("", sanitize=False).classes("ab-play-picture")
        self._words = _text("p", "", "ab-play-words").props('aria-live="polite"')
        _text(
            "p",
            "Bars: the buffer at this step. Dashed outlines: the gradient of the full batch, computed at once.",
            "ab-play-note",
        )
        self._timer = ui.timer(1.0, self._tick, active=False, immediate=False)
        self._draw()

    def _draw(self) -> None:
        before = self._frames[self._at - 1] if self._at else None
        frame = self._frames[self._at]
        self._picture.content = steps_picture(self._part, self._size, frame, before)
        self._words.content = html.escape(f"{self._at} of {len(self._frames) - 1}. {frame.words}")

    def _go(self, at: int) -> None:
        self._at = at
        self._draw()

    def _tick(self) -> None:
        if self._at + 1 < len(self._frames):
            self._go(self._at + 1)
        if self._at + 1 == len(self._frames):
            self._pause()

    def _toggle(self) -> None:
        if self._timer.active:
            self._pause()
            return
        if self._at + 1 == len(self._frames):
            self._go(0)
        self._timer.active = True
        self._play.set_text("Pause")
        self._play.props("icon=pause")

    def _pause(self) -> None:
        self._timer.active = False
        self._play.set_text("Play")
        self._play.props("icon=play_arrow")

    def _step(self) -> None:
        self._pause()
        self._go((self._at + 1) % len(self._frames))

    def _restart(self) -> None:
        self._pause()
        self._go(0)

    def _resize(self, event: events.ValueChangeEventArguments) -> None:
        self._pause()
        self._size = event.value
        self._frames = frames(self._part, self._size)
        self._go(0)


_CONTRACT = html.escape(CONTRACT).replace("loss(params, batch)", "<code>loss(params, batch)</code>").replace(
    "example()", "<code>example()</code>"
).replace("(params, batch). Or", "<code>(params, batch)</code>. Or") + (
    " Ctrl+Enter runs it. Esc, then Tab, leaves the editor."
)

CSS = """
.ab-play { width: 100%; color: var(--ab-text); }
.ab-play h1 { font-size: 1.6rem; line-height: 1.25; font-weight: 650; margin: 0 0 0.25rem; letter-spacing: -0.01em; }
.ab-play h2 { font-size: 1.1rem; line-height: 1.3; font-weight: 650; margin: 0 0 0.6rem; letter-spacing: 0; }
.ab-play p { margin: 0 0 0.6rem; line-height: 1.5; overflow-wrap: anywhere; }
.ab-play pre { font-family: var(--ab-mono); font-size: 0.8rem; line-height: 1.5; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; }
.ab-play code { font-family: var(--ab-mono); font-size: 0.9em; }
.ab-play-lead, .ab-play-muted { color: var(--ab-muted); }
.ab-play-columns { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1.25rem; margin-top: 1rem; }
.ab-play-left, .ab-play-right { min-width: 0; display: flex; flex-direction: column; gap: 0.75rem; }
@media (min-width: 1024px) {
  .ab-play-columns { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 2rem; align-items: start; }
  .ab-play-left { position: sticky; top: 1rem; }
}
.ab-play-select { width: 100%; }
.ab-play p.ab-play-look { margin: 0; }
.ab-play-editor { width: 100%; height: auto; min-height: 12rem; border: 1px solid var(--ab-border); border-radius: 8px;
  overflow: hidden; background: var(--ab-surface); }
.ab-play-editor .cm-editor { background: var(--ab-surface); }
.ab-play-editor .cm-gutters { background: var(--ab-surface); color: var(--ab-muted);
  border-right: 1px solid var(--ab-border); }
.ab-play-editor .cm-scroller { font-family: var(--ab-mono); font-size: 0.82rem; line-height: 1.65; }
.ab-play-editor:focus-within { outline: 2px solid var(--ab-accent); outline-offset: 1px; }
.ab-play-editor .cm-activeLine { background: color-mix(in srgb, var(--ab-text) 4%, transparent); }
.ab-play-line { box-shadow: inset 4px 0 0 var(--ab-play-colour); }
.ab-play-editor .cm-line.ab-play-line { background: color-mix(in srgb, var(--ab-play-colour) 11%, transparent); }
.ab-play-rows, .ab-play-of-rows { --ab-play-colour: var(--ab-rows); }
.ab-play-sum, .ab-play-of-sum { --ab-play-colour: var(--ab-sum); }
.ab-play-once, .ab-play-of-once { --ab-play-colour: var(--ab-sum); }
.ab-play-couples, .ab-play-of-couples, .ab-play-full, .ab-play-of-full { --ab-play-colour: var(--ab-head); }
.ab-play-same, .ab-play-of-same { --ab-play-colour: var(--ab-same); }
.ab-play-error-line, .ab-play-of-error { --ab-play-colour: var(--ab-bad); }
.ab-play-label { display: inline-block; font-family: system-ui, sans-serif; font-size: 0.72rem; line-height: 1.35;
  font-weight: 600; padding: 0 0.45em; border-radius: 4px; border: 1px solid var(--ab-play-colour);
  color: var(--ab-text); white-space: nowrap;
  background: color-mix(in srgb, var(--ab-play-colour) 16%, var(--ab-surface)); }
.ab-play-editor .ab-play-label { margin-left: 1.2em; user-select: none; }
.ab-play-label.ab-play-of-once, .ab-play-label.ab-play-of-full { border-style: dashed; }
.ab-play-label.ab-play-of-couples, .ab-play-label.ab-play-of-error { background: var(--ab-play-colour);
  color: var(--ab-surface); }
.ab-play-actions { display: flex; align-items: center; gap: 0.75rem; min-height: 2.4rem; }
.ab-play p.ab-play-status { margin: 0; color: var(--ab-muted); font-size: 0.9rem; }
.ab-play p.ab-play-contract, .ab-play p.ab-play-note { color: var(--ab-muted); font-size: 0.85rem; margin: 0; }
.ab-play-section { background: var(--ab-surface); border: 1px solid var(--ab-border); border-radius: 10px;
  padding: 1rem 1.1rem; }
.ab-play-messages:empty { display: none; }
.ab-play-stale .ab-play-body { opacity: 0.5; }
.ab-play-editor.ab-play-stale .ab-play-label { opacity: 0.45; }
.ab-play-waiting { display: flex; align-items: center; gap: 0.6rem; color: var(--ab-muted); min-height: 2rem; }
.ab-play-kind { font-weight: 650; font-size: 1.05rem; }
.ab-play-kind::after { content: " —"; font-weight: 400; }
.ab-play-is-coupled { color: var(--ab-head); }
.ab-play-legend { list-style: none; padding: 0; margin: 0 0 0.75rem; display: grid; gap: 0.4rem; }
.ab-play-legend li { display: grid; grid-template-columns: 6.2rem minmax(0, 1fr); gap: 0.6rem; align-items: start;
  font-size: 0.92rem; line-height: 1.45; }
.ab-play-legend .ab-play-label { justify-self: start; margin-top: 0.15rem; }
.ab-play-where { font-weight: 600; }
.ab-play-where::after { content: ":"; }
.ab-play-blame { display: flex; gap: 0.5rem; align-items: baseline; margin-bottom: 0.4rem; line-height: 1.45; }
.ab-play .ab-play-blame .ab-button { flex: none; min-height: 0; padding: 0 0.5rem; font-size: 0.85rem; }
.ab-play-advice { border-left: 3px solid var(--ab-head); padding-left: 0.75rem; font-size: 0.92rem; }
.ab-play-details summary { display: list-item; cursor: pointer; color: var(--ab-muted); font-size: 0.9rem;
  padding: 0.2rem 0; }
.ab-play-details[open] summary { margin-bottom: 0.5rem; }
.ab-play-details pre { background: var(--ab-raised); border-radius: 6px; padding: 0.6rem 0.75rem;
  margin-bottom: 0.75rem; }
.ab-play-scroll { overflow-x: auto; margin-bottom: 0.75rem; }
.ab-play-table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
.ab-play-table th { text-align: left; font-weight: 600; color: var(--ab-muted); font-size: 0.82rem; }
.ab-play-table th, .ab-play-table td { padding: 0.35rem 0.8rem 0.35rem 0; border-bottom: 1px solid var(--ab-border);
  vertical-align: top; }
.ab-play-good { color: var(--ab-good); font-weight: 650; white-space: nowrap; }
.ab-play-bad { color: var(--ab-bad); font-weight: 650; white-space: nowrap; }
.ab-play .ab-play-small-heading { font-size: 0.95rem; font-weight: 650; line-height: 1.3; margin: 0.9rem 0 0.3rem; }
.ab-play-problem { border: 1px solid var(--ab-bad); border-left-width: 4px; border-radius: 6px; padding: 0.7rem 0.9rem;
  background: color-mix(in srgb, var(--ab-bad) 7%, var(--ab-surface)); }
.ab-play p.ab-play-problem-title { font-weight: 650; color: var(--ab-bad); margin: 0 0 0.3rem; }
.ab-play-prints { background: var(--ab-raised); border-radius: 6px; padding: 0.6rem 0.75rem; max-height: 12rem;
  overflow: auto; }
.ab-play-picture { width: 100%; }
.ab-play-svg { display: block; height: auto; margin: 0 auto; }
.ab-play-svg text { font-size: 11px; font-family: inherit; }
.ab-play-svg text:not([fill]) { fill: var(--ab-muted); }
.ab-play-budget { display: flex; align-items: center; gap: 1rem; padding: 0.4rem 0.6rem 0.2rem; }
.ab-play-slider { flex: 1; min-width: 0; height: 1.75rem; accent-color: var(--ab-accent); cursor: pointer; }
.ab-play-slider-name { flex: none; font-size: 0.9rem; font-weight: 600; }
.ab-play p.ab-play-words { font-weight: 550; margin: 0.4rem 0; }
.ab-play-controls { display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem; margin-bottom: 0.75rem; }
.ab-play-size { flex: 0 1 8.5rem; min-width: 7.5rem; }
.ab-play-example { stroke: var(--ab-rows); stroke-width: 1.5; fill: none; }
.ab-play-is-current { fill: var(--ab-rows); animation: ab-play-press 0.5s ease-out; }
.ab-play-is-done { fill: color-mix(in srgb, var(--ab-rows) 30%, transparent); stroke-opacity: 0.5; }
.ab-play-head { fill: var(--ab-raised); stroke: var(--ab-head); stroke-width: 1.5; }
.ab-play-head.ab-play-is-active { fill: color-mix(in srgb, var(--ab-head) 45%, var(--ab-raised)); }
.ab-play-bar { animation: ab-play-grow 0.6s ease-out; }
.ab-play-arrow { animation: ab-play-flow 0.7s linear; }
@keyframes ab-play-grow { from { transform: scaleY(var(--from)); } }
@keyframes ab-play-press { from { transform: translateY(-6px); } }
@keyframes ab-play-flow { from { stroke-dashoffset: 28; } to { stroke-dashoffset: 0; } }
.ab-play-table td { white-space: nowrap; }
.ab-play-details td:last-child { white-space: normal; }
@media (max-width: 600px) {
  .ab-play-section { padding: 0.9rem 0.8rem; }
  .ab-play-svg text { font-size: 14px; }
  .ab-play-table, .ab-play-table th { font-size: 0.78rem; }
  .ab-play-table th, .ab-play-table td { padding-right: 0.4rem; }
  .ab-play-legend li { grid-template-columns: minmax(0, 1fr); gap: 0.15rem; }
}
@media (prefers-reduced-motion: reduce) {
  .ab-play-bar, .ab-play-is-current, .ab-play-arrow { animation: none; }
}
"""
