"""Draws the pictures that show an idea, and no measurements.

python docs/pictures.py        # writes docs/images/*_light.svg and *_dark.svg

`routes` is that of the landing page and the README: one batch, three strategies, one gradient. `kept` is that of the
page about planning: which activations are kept, computed again, or moved to the host.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parent / "images"
PALETTES = {
    "light": {"text": "#1f2328", "soft": "#59636e", "line": "#c4ccd4", "panel": "#f6f8fa", "data": "#2f6fb3"},
    "dark": {"text": "#e6edf3", "soft": "#9aa6b2", "line": "#3d4651", "panel": "#1b2129", "data": "#6cb0f0"},
}
ACCENT = {"light": "#c05f12", "dark": "#f0a35c"}
ROWS = 8  # examples in the picture
TOPS = (56, 164, 272)  # of the three lanes
HEIGHT = 88  # of a lane


class Picture:
    """An SVG that is drawn shape by shape."""

    def __init__(self, theme: str) -> None:
        self.colours, self.accent, self.shapes = PALETTES[theme], ACCENT[theme], []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1, round: int = 2
    ) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}" fill="{fill}"'
            f' fill-opacity="{opacity:g}"/>'
        )

    def text(
        self, x: float, y: float, words: str, size: int = 14, colour: str = "text", weight: int = 400, anchor="start"
    ):
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
            f' fill="{self.colours[colour]}">{words}</text>'
        )

    def arrow(self, path: str) -> None:
        line = self.colours["soft"]
        self.shapes.append(f'<path d="{path}" fill="none" stroke="{line}" stroke-width="1.6" marker-end="url(#head)"/>')

    def rows(self, x: float, y: float, count: int, width: float = 54, height: float = 7, gap: float = 3) -> None:
        """Examples as bars, one above the other."""
        for row in range(count):
            self.box(x, y + row * (height + gap), width, height, self.colours["data"], 0.9)

    def outline(self, x: float, y: float, width: float, height: float) -> None:
        """An empty box with a dashed border."""
        self.shapes.append(
            f'<rect x="{x + 0.6:g}" y="{y + 0.6:g}" width="{width - 1.2:g}" height="{height - 1.2:g}" rx="2"'
            f' fill="none" stroke="{self.colours["soft"]}" stroke-width="1.2" stroke-dasharray="3 2.5"/>'
        )

    def svg(self, title: str, view: str) -> str:
        soft = self.colours["soft"]
        head = f'<path d="M0,0 L7,3.5 L0,7 z" fill="{soft}"/>'
        marker = f'<marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">{head}</marker>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img" font-family="system-ui,'
            f' Segoe UI, Roboto, Helvetica, Arial, sans-serif"><title>{title}</title>'
            f"<defs>{marker}</defs>{''.join(self.shapes)}</svg>\n"
        )


def draw_routes(theme: str) -> str:
    picture = Picture(theme)
    colours = picture.colours
    # The batch, on the left.
    picture.text(75, 120, "one batch", 17, weight=600, anchor="middle")
    picture.rows(40, 170, ROWS, width=70)
    picture.text(75, 280, "any number of examples", 12, "soft", anchor="middle")
    for top in TOPS:
        middle = top + HEIGHT / 2
        picture.arrow(f"M122,208 C160,208 165,{middle:g} 203,{middle:g}")
        picture.box(208, top, 520, HEIGHT, colours["panel"], round=8)
        picture.arrow(f"M732,{middle:g} C770,{middle:g} 772,208 808,208")
    picture.text(640, 40, "memory", 12, "soft", anchor="middle")

    def lane(top: float, title: str, words: str, memory: float, note: str) -> None:
        picture.text(226, top + 38, title, 16, weight=600)
        picture.text(226, top + 60, words, 12.5, "soft")
        picture.box(580, top + HEIGHT / 2 - 8, 120, 16, colours["line"], 0.55, round=3)
        picture.box(580, top + HEIGHT / 2 - 8, 120 * memory, 16, picture.accent, 1, round=3)
        picture.text(640, top + HEIGHT / 2 + 26, note, 11, "soft", anchor="middle")

    lane(TOPS[0], "full batch", "one program", 1.0, "all activations")
    picture.rows(470, TOPS[0] + 5, ROWS, width=70)
    lane(TOPS[1], "microbatches", "one after another", 0.25, "one microbatch")
    for step in range(4):
        picture.rows(440 + step * 34, TOPS[1] + 35, 2, width=26)
    for step in range(3):
        picture.arrow(f"M{453 + step * 34},{TOPS[1] + 62} q17,14 33,1")
    lane(TOPS[2], "on many devices", "one reduction at the end", 0.25, "one microbatch each")
    for device in range(2):
        x = 446 + device * 64
        picture.box(x - 6, TOPS[2] + 16, 52, 56, colours["line"], 0.55, round=5)
        for step in range(2):
            picture.rows(x + step * 23, TOPS[2] + 35, 2, width=17)
    # The gradient, on the right.
    picture.text(862, 120, "one gradient", 17, weight=600, anchor="middle")
    picture.shapes.append(
        f'<circle cx="862" cy="208" r="44" fill="{picture.accent}" fill-opacity="0.14" stroke="{picture.accent}"'
        ' stroke-width="2"/>'
    )
    picture.text(862, 220, "∇", 34, weight=600, anchor="middle")
    picture.text(862, 280, "the same each time", 12, "soft", anchor="middle")
    return picture.svg("One batch, three strategies, one gradient", "0 22 960 354")


# What a layer reads and computes: its input, wide products, scores of attention, and functions of single elements.
VALUES = ("input", "products", "scores", "elements")
KEPT, AGAIN, MOVED = "kept on the device", "computed again", "kept on the host"
WAYS = {
    "remat=None": (KEPT, KEPT, KEPT, KEPT),
    "remat=0.5": (KEPT, KEPT, AGAIN, AGAIN),
    "remat=1.0": (KEPT, AGAIN, AGAIN, AGAIN),
    'remat="offload"': (MOVED, AGAIN, AGAIN, AGAIN),
}
LAYERS = 3
CELL, LINE = 48, 34  # the width and the height of a value, with the gaps


def draw_kept(theme: str) -> str:
    picture = Picture(theme)

    def cell(x: float, y: float, fate: str, width: float = CELL - 5) -> None:
        if fate == AGAIN:
            picture.outline(x, y, width, LINE - 8)
        else:
            picture.box(x, y, width, LINE - 8, picture.accent if fate == MOVED else picture.colours["data"], 0.9)

    for layer in range(LAYERS):
        picture.text(66, 117 + layer * LINE, f"layer {layer + 1}", 12.5, "soft", anchor="end")
    for panel, (name, fates) in enumerate(WAYS.items()):
        left = 84 + panel * 222
        picture.text(left + 2 * CELL, 52, name, 15, weight=600, anchor="middle")
        picture.box(left - 8, 66, 4 * CELL + 11, LAYERS * LINE + 38, picture.colours["panel"], round=8)
        for column, (value, fate) in enumerate(zip(VALUES, fates, strict=True)):
            x = left + column * CELL
            picture.text(x + (CELL - 5) / 2, 86, value, 10, "soft", anchor="middle")
            for layer in range(LAYERS):
                cell(x, 99 + layer * LINE, fate)
    for index, fate in enumerate((KEPT, AGAIN, MOVED)):
        x = 230 + index * 190
        cell(x, 224, fate, width=30)
        picture.text(x + 40, 242, fate, 13)
    return picture.svg("Which activations are kept, computed again, or moved to the host", "0 26 960 236")


DRAWN = {"routes": draw_routes, "kept": draw_kept}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for theme in PALETTES:
        for name, draw in DRAWN.items():
            (FOLDER / f"{name}_{theme}.svg").write_text(draw(theme))


if __name__ == "__main__":
    main()
