"""Turns benchmarks/results into the tables and plots of the documentation, and the table of the README.

    make bench-report                           # or: python benchmarks/report.py
    python benchmarks/report.py --check         # changes nothing; fails if a table is not what the results say

Takes some seconds and measures nothing. `benchmarks/FILE.py --save benchmarks/results/FILE.json` renews a result. The
pages of the documentation include the tables from docs/results. Every table ends with its device, versions and command.
"""

import argparse
import collections
import io
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "docs" / "results"
README = ROOT / "README.md"

Row = Mapping[str, Any]


# --- What all sections share ---------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table. The first `left` columns are aligned to the left, the others to the right."""
    marks = [":---" if column < left else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, marks, *rows])


def caption(results: Mapping[str, Any]) -> str:
    """Where the numbers of a table come from."""
    names = {"jax": "JAX", "torch": "PyTorch", "python": "Python"}
    versions = [
        f"{names.get(name, name)} {version}"
        for name, version in results["versions"].items()
        if name not in ("jaxlib", "anybatch")
    ]
    return f"*{results['device']}; {', '.join(versions)}. `{results['command']}`*"


def number(value: float | None, digits: int = 3) -> str:
    """A number in few digits; a dash for None."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.{digits}g}"


def unit(text: str) -> str:
    """A number and its unit, which stay on one line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def gibibytes(value: float | None) -> str:
    if value is None:
        return "–"
    return unit(f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.1f} MiB")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.2g}%"


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """The values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


# Colours that can be told apart in both themes and by colour-blind readers (Okabe and Ito), in a fixed order.
COLOURS = ["#0072b2", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#a0522d", "#9467bd"]
OURS, FULL = "#d55e00", "#7f7f7f"
INK = {"light": "#1f2328", "dark": "#dfe5ec"}


def plot(
    name: str,
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]],
    *,
    x: str,
    y: str,
    alt: str,
    log_y: bool = True,
) -> str:
    """Draws lines over a logarithmic axis, one panel for each title, and returns the Markdown that shows them.

    There is a picture for each theme, because a picture does not see the theme of its page.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    names = list(dict.fromkeys(label for _, lines in panels for label in lines))
    for theme, ink in INK.items():
        style = {
            "text.color": ink,
            "axes.labelcolor": ink,
            "xtick.color": ink,
            "ytick.color": ink,
            "axes.edgecolor": ink,
        }
        style |= {"svg.hashsalt": "anybatch", "font.size": 9, "svg.fonttype": "path"}
        with plt.rc_context(style):
            figure, axes = plt.subplots(1, len(panels), figsize=(3.75 * len(panels), 3.2), squeeze=False, sharey=False)
            for axis, (title, lines) in zip(axes[0], panels, strict=True):
                for label, points in lines.items():
                    index = names.index(label)
                    ours = label.startswith("anybatch")
                    dashed = ours and label != "anybatch"
                    axis.plot(
                        *zip(*points, strict=True),
                        color=OURS if ours else FULL if label == "full batch" else COLOURS[index % len(COLOURS)],
                        linestyle="--" if dashed else "-",
                        marker="os^Dv<>P"[index % 8],
                        markersize=4,
                        linewidth=2.2 if ours else 1.3,
                        zorder=3 if ours else 2,
                        label=label,
                    )
                axis.set_xscale("log", base=2)
                low, high = axis.get_xlim()
                if high < 4 * low:  # it has one or two powers of two: numbers between them, too
                    axis.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5)))
                axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.xaxis.set_minor_formatter(NullFormatter())
                if log_y:
                    axis.set_yscale("log")
                    low, high = axis.get_ylim()
                    if high < 1e5 and low > 1e-2:  # 20, 50, 100 and not powers of ten
                        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                        axis.yaxis.set_minor_formatter(NullFormatter())
                axis.set_title(title, fontsize=9)
                axis.set_xlabel(x)
                axis.spines[["top", "right"]].set_visible(False)
                axis.grid(alpha=0.25)
                axis.patch.set_alpha(0)
            axes[0][0].set_ylabel(y)
            handles, labels = [], []
            for axis in axes[0]:
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                    if label not in labels:
                        handles.append(handle)
                        labels.append(label)
            figure.legend(handles, labels, loc="upper center", ncols=min(4, len(labels)), frameon=False, fontsize=8)
            rows = -(-len(labels) // 4)
            figure.tight_layout(rect=(0, 0, 1, 1 - 0.065 * rows))
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
        (TABLES / f"{name}_{theme}.svg").write_text(re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE))
    return pictures(name, alt)


def pictures(name: str, alt: str) -> str:
    """The Markdown that shows the picture of the theme."""
    shown = [f"```{{image}} /results/{name}_{theme}.svg\n:alt: {alt}\n:class: only-{theme}\n```" for theme in INK]
    return "\n\n".join(shown)


# --- The sections, one for each question ----------------------------------------------------------------------------

WAYS = {
    "plain scan": "scan by hand",
    "optax.microbatch": "optax microbatch",
    "optax.MultiSteps": "optax MultiSteps",
    "PyTorch loop": "PyTorch, HF style",
    "GradCache's method": "GradCache",
}
# The losses of the README's table.
HEADLINES = (
    "mean",
    "masked mean over tokens",
    "two terms, own denominators",
    "RMSE: root of a mean",
    "mixture of experts, balanced",
    "CLIP, in-batch negatives",
    "BatchNorm in training",
    "dropout, one key for the batch",
    "ragged: 29 examples by 4",
    "bfloat16, 1024 microbatches",
)


def outcome(row: Row | None, marked: bool) -> str:
    """A cell of the table of correctness; with classes for colours if it is `marked`.

    If the loss as it is has another outcome than the best that the documentation of a way leads to, it shows the former
    and a star.
    """
    if row is None:
        return ""

    def shown(kind: str, difference: float | None) -> str:
        if kind == "wrong":
            text = "not finite"
            if difference is not None and difference < float("inf"):
                text = f"{difference:.0f}×" if difference >= 2 else _percent(difference)
            return f"[{text}]{{.wrong}}" if marked else f"**{text}**"
        text = {"exact": "exact", "not expressible": "–", "not installed": ""}.get(kind, kind)
        return f"[{text}]{{.{'exact' if kind == 'exact' else 'other'}}}" if marked and text else text

    best = shown(row["outcome"], row["difference"])
    if row["unchanged"] in (None, row["outcome"]):
        return best
    return f"{shown(row['unchanged'], row['unchanged_difference'])}\\*" if row["outcome"] == "exact" else best


def correctness_rows(rows: Sequence[Row], losses: Iterable[str], marked: bool) -> str:
    ways = sorted(values(rows, "way"), key=lambda way: way != "anybatch")  # ours first: the others may be out of sight
    cells = []
    for loss in losses:
        found = {row["way"]: row for row in of(rows, loss=loss)}
        cells.append([loss, *(outcome(found.get(way), marked) for way in ways)])
    names = [WAYS.get(way, way) for way in ways]
    return table([" ", *(f"**{name}**" if name == "anybatch" else name for name in names)], cells)


def correctness(results: Mapping[str, Any]) -> str:
    rows = results["rows"]
    text = []
    for group in values(rows, "group"):
        losses = values(of(rows, group=group), "loss")
        text += [f"**{group[0].upper()}{group[1:]}**", correctness_rows(rows, losses, marked=True)]
    notes = collections.defaultdict(list)
    for row in rows:
        if row["note"]:
            notes[WAYS.get(row["way"], row["way"]), row["outcome"], row["note"]].append(row["loss"])
    kinds = {"exact": "exact, rewritten", "refused": "refused", "not expressible": "–", "wrong": "wrong"}
    lines = [
        [way, kinds[kind], "; ".join(losses), _escaped(note)]
        for (way, kind, note), losses in notes.items()
        if kind in kinds
    ]
    explained = table(["way", "outcome", "losses", "why, or what it needs"], lines, left=4)
    text += [":::{dropdown} What each star and dash stands for", explained, ":::"]
    return "\n\n".join([*text, caption(results)])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def precision(results: Mapping[str, Any]) -> str:
    rows = of(results["rows"], data="different")
    panels = []
    for dtype in ("float32", "bfloat16"):
        lines = {}
        for way in values(of(rows, param_dtype=dtype), "way"):
            if way == "anybatch, accumulator_dtype=None":
                continue
            points = [(row["microbatches"], row["error"]) for row in of(rows, param_dtype=dtype, way=way)]
            lines[way] = points
        panels.append((f"{dtype} parameters", lines))
    alt = "The error for 8 to 4,096 microbatches: with bfloat16 sums it grows, with float32 sums it stays small."
    picture = plot("precision", panels, x="microbatches", y="relative error", alt=alt)
    sizes = values(rows, "microbatches")
    cells = []
    for dtype in ("float32", "bfloat16"):
        for way in values(of(rows, param_dtype=dtype), "way"):
            errors = {row["microbatches"]: row["error"] for row in of(rows, param_dtype=dtype, way=way)}
            cells.append([dtype, way, *(number(errors.get(size), 2) for size in sizes)])
    return "\n\n".join([picture, table(["parameters", "way", *map(str, sizes)], cells, left=2), caption(results)])


def mesh_ways(results: Mapping[str, Any]) -> str:
    rows = of(results["rows"], microbatches=8)
    text = []
    for params in ("replicated", "sharded"):
        cells = []
        inside = of(rows, params=params)
        for way in values(inside, "way"):
            mean, masked = (next(iter(of(inside, way=way, loss=loss)), None) for loss in ("mean", "masked mean"))
            row = mean or masked
            assert row is not None
            kinds = ["all_reduces", "all_gathers", "reduce_scatters", "other"]
            cells.append(
                [
                    f"`{way}`" if "=" in way else way,
                    *(str(row[kind]) for kind in kinds),
                    f"{row['bytes_per_device'] / row['params_bytes']:.3g}",
                    f"{row['temporaries_bytes'] / row['params_bytes']:.3g}",
                    f"{row['work']:.3g}",
                    *(_right(each) for each in (mean, masked)),
                ]
            )
        header = [f"{params} parameters", "all-reduce", "all-gather", "reduce-scatter", "other"]
        header += ["sent", "memory", "work", "mean", "masked mean"]
        text.append(table(header, cells))
    return "\n\n".join([*text, caption(results)])


def _right(row: Row | None) -> str:
    if row is None:
        return "–"
    difference = row["difference"]
    if difference < 1e-5:
        return "[exact]{.exact}"
    return f"[{difference:.1f}×]{{.wrong}}" if difference >= 1 else f"[{_percent(difference)}]{{.wrong}}"


MODELS = {
    "gpt2": "GPT-2, 124 million parameters, 64 examples",
    "gpt-1.3b": "GPT, 1.3 billion parameters, 16 examples",
}
NAMES = {
    "torch": "PyTorch",
    "torch.compile": "PyTorch, compiled",
    "by hand": "scan by hand",
    "optax": "optax microbatch",
}
NAMES |= {"MultiSteps": "optax MultiSteps"}
ORDER = ["full batch", "by hand", "optax", "MultiSteps", "torch", "torch.compile", "anybatch", "anybatch, planned"]


def accumulation(results: Mapping[str, Any]) -> str:
    text = []
    for model, title in MODELS.items():
        rows = of(results["rows"], model=model)
        ways = [way for way in ORDER if of(rows, way=way)]
        panels = []
        for unit, column, scale in (("milliseconds", "milliseconds", 1), ("GiB", "temporaries_bytes", 2**30)):
            lines = {}
            for way in ways:
                points = [(row["microbatch_size"], row[column] / scale) for row in of(rows, way=way) if row[column]]
                lines[NAMES.get(way, way)] = sorted(points)
            panels.append((f"{'time' if scale == 1 else 'memory'} of a gradient, {unit}", lines))
        alt = f"{title}: time falls and memory grows with the microbatch size; anybatch follows the scan by hand."
        text.append(f"**{title}**")
        text.append(plot(f"accumulation_{model.replace('.', '_')}", panels, x="microbatch size", y="", alt=alt))
        listed = sorted((way for way in ways if way not in ORDER[:1] + ORDER[-1:]), key=lambda way: way != "anybatch")
        cells = []
        for size in sorted({row["microbatch_size"] for row in rows if row["way"] in listed}, reverse=True):
            found = {row["way"]: row for row in of(rows, microbatch_size=size)}
            cells.append([str(size), *(_time_and_memory(found.get(way)) for way in listed)])
        text.append(table(["microbatch", *(NAMES.get(way, way) for way in listed)], cells))
        full, planned = (of(rows, way=way)[0] for way in (ORDER[0], ORDER[-1]))
        memory = re.search(r"memory='(.+?)'", planned["note"])
        text.append(
            f"The full batch by `jax.value_and_grad`: {_time_and_memory(full).replace('<br>', ', ')}. Planned with "
            f'`memory="{memory[1]}"`: microbatches of {planned["microbatch_size"]}, '
            f"{_time_and_memory(planned).replace('<br>', ', ')}."
        )
        ratios = [row for row in of(rows, way="anybatch") if row["time_ratio"]]
        times, memories = ([row[name] for row in ratios] for name in ("time_ratio", "memory_ratio"))
        text.append(
            f"Against the scan by hand, run in turns: {min(times):.3f} to {max(times):.3f} of its time and "
            f"{min(memories):.3f} to {max(memories):.3f} of its memory."
        )
    return "\n\n".join([*text, caption(results)])


def _time_and_memory(row: Row | None) -> str:
    if row is None or row["milliseconds"] is None:
        return ""
    memory = row["temporaries_bytes"] / 2**30
    return unit(f"{row['milliseconds']:.0f} ms") + "<br>" + unit(f"{memory:.{1 if memory >= 9.95 else 2}f} GiB")


PLANNED = {
    "lstm": "LSTM, 512 examples",
    "vit": "ViT in NNX, 256 examples",
    "unet": "U-Net",
    "moe": "mixture of experts, 64 examples",
    "gpt2": "GPT-2, 64 examples",
    "gpt-1.3b-scanned": "GPT 1.3B in a scan, 16 examples",
    "lstm-tiny": "LSTM",
    "vit-tiny": "ViT in NNX",
    "unet-tiny": "U-Net",
    "moe-tiny": "mixture of experts",
    "gpt-tiny": "GPT",
    "mlp": "MLP",
}


def planning(results: Mapping[str, Any]) -> str:
    cells = []
    for row in results["rows"]:
        cells.append(
            [
                PLANNED[row["model"]],
                gibibytes(row["budget_bytes"]),
                _strategy(row["chosen_microbatch_size"], row["chosen_remat"]),
                unit(f"{row['chosen_ms']:.1f} ms"),
                f"{_strategy(row['best_size'], row.get('best_remat'))}: " + unit(f"{row['best_ms']:.1f} ms"),
                f"{row['ratio']:.3f}",
                gibibytes(row["peak_bytes"]),
                gibibytes(row["peak_while_planning_bytes"]),
                f"{row['planning_seconds']:.0f} s, {row['compilations']}",
            ]
        )
    header = ["model", "budget", "chosen", "its time", "best of the grid", "ratio", "peak", "peak while planning"]
    return "\n\n".join([table([*header, "planning, compilations"], cells), caption(results)])


def _strategy(size: int, remat: float | str | None) -> str:
    return str(size) if remat is None else f"{size}, remat {remat}"


def planning_cpu(results: Mapping[str, Any]) -> str:
    cells = [
        [
            f"{PLANNED[row['model']]}, {row['examples']} examples",
            gibibytes(row["budget_bytes"]),
            str(row["chosen_microbatch_size"]),
            gibibytes(row["xla_bytes"]),
            f"{row['xla_bytes'] / row['budget_bytes']:.2f}",
            str(row["compilations"]),
        ]
        for row in results["rows"]
    ]
    header = ["model", "budget", "chosen", "XLA's figure", "of the budget", "compilations"]
    return "\n\n".join([table(header, cells), caption(results)])


CLIPPING = {
    "plain": "JAX, plain gradient",
    "factored": "anybatch, factored",
    "vmap": "anybatch, vmap",
    "jax_privacy": "jax_privacy",
    "torch_plain": "PyTorch, plain gradient",
    "opacus": "Opacus",
    "opacus_ghost": "Opacus, ghost clipping",
}


def clipping(results: Mapping[str, Any]) -> str:
    text = []
    for case in values(results["rows"], "case"):
        examples, tokens = case.split("x")
        found = {row["way"]: row for row in of(results["rows"], case=case)}
        cells = []
        for way, name in CLIPPING.items():
            row = found.get(way)
            if row is None:
                continue
            compiled = row["compile_seconds"]
            cells.append(
                [
                    name,
                    str(row["microbatch_size"]),
                    unit(f"{row['milliseconds']:.1f} ms"),
                    f"{row['time_ratio']:.2f}",
                    gibibytes(row["temporaries_bytes"]),
                    f"{compiled:.0f} s" if compiled else "–",
                    "–" if "plain" in way else number(row["difference"], 2),
                ]
            )
        text.append(f"**{examples} examples of {tokens} tokens**")
        header = [" ", "microbatch", "time", "time / plain", "memory", "compiling", "difference"]
        text.append(table(header, cells))
    return "\n\n".join([*text, caption(results)])


HEADS = {
    "logits": "**Cross entropy of 32,768 tokens over 128,256 words**",
    "gradcache": "**CLIP with 65,536 pairs: two towers of 4 layers, 256 pairs at a time**",
}


def blocks(results: Mapping[str, Any]) -> str:
    text = []
    for question, title in HEADS.items():
        cells = []
        for row in of(results["rows"], question=question):
            cells.append(
                [
                    row["way"],
                    "–" if row["block_size"] is None else str(row["block_size"]),
                    gibibytes(row["temporaries_bytes"]),
                    f"{row['memory_ratio']:.3f}",
                    unit(f"{row['milliseconds']:.0f} ms"),
                    f"{row['time_ratio']:.3f}",
                ]
            )
        text += [title, table([" ", "block", "memory", "memory / first", "time", "time / first"], cells)]
    return "\n\n".join([*text, caption(results)])


def reading_cost(results: Mapping[str, Any]) -> str:
    cells = []
    for row in results["rows"]:
        trace, gradient = row["trace_seconds"], row["trace_gradient_seconds"]
        cells.append(
            [
                f"{row['layers']}, {row['layers_in']}",
                f"{row['equations']:,}",
                f"{row['read_seconds'] / trace:.1f}",
                f"{row['read_seconds'] / gradient:.2f}",
                f"{row['plan_seconds'] / row['hand_compile_seconds']:.2f}",
                f"{row['anybatch_lower_seconds'] / row['hand_lower_seconds']:.1f}",
                f"{row['anybatch_compile_seconds'] / row['hand_compile_seconds']:.2f}",
            ]
        )
    header = ["layers", "equations", "reading / tracing the loss", "reading / tracing its gradient"]
    header += ["planning / compiling", "lowering / by hand", "compiling / by hand"]
    return "\n\n".join([table(header, cells), caption(results)])


def evaluation(results: Mapping[str, Any]) -> str:
    cells = [
        [
            f"{'evaluation' if row['task'] == 'evaluation' else 'Gauss-Newton product'}, {row['examples']} examples",
            row["way"],
            str(row["microbatch_size"]),
            unit(f"{row['milliseconds']:.1f} ms"),
            f"{row['time_ratio']:.3f}",
            gibibytes(row["temporaries_bytes"]),
            f"{row['memory_ratio']:.3f}",
        ]
        for row in results["rows"]
    ]
    header = ["GPT-2", "way", "microbatch", "time", "time / by hand", "memory", "memory / by hand"]
    return "\n\n".join([table(header, cells, left=2), caption(results)])


# What `host_batch.py` measures, in the words of its table.
STREAMED = {"transfer": "plain copies alone", "compute": "compute alone", "streamed": "anybatch, from an iterator"}


def host_batch(results: Mapping[str, Any]) -> str:
    cells = [
        [
            "four convolutions" if row["model"] == "conv" else "ViT of 12 layers",
            STREAMED[row["what"]],
            unit(f"{row['gib']:.0f} GiB"),
            unit(f"{row['seconds']:.1f} s"),
            unit(f"{row['gib_per_second']:.2f} GiB/s"),
            gibibytes(row["peak_bytes"]),
        ]
        for row in results["rows"]
        if row["what"] in STREAMED
    ]
    header = ["model", "what", "images", "time", "rate", "peak memory"]
    return "\n\n".join([table(header, cells, left=2), caption(results)])


FRONT_MODELS = {"gpt2": "GPT-2, 16 examples at a time", "gpt-1.3b-scanned": "1.3B in a scan, 4 at a time"}


def front(results: Mapping[str, Any]) -> str:
    """Memory against time for what is computed again, as a table and a plot."""
    rows = results["rows"]
    panels, cells = [], []
    for model in values(rows, "model"):
        lines: dict[str, list[tuple[float, float]]] = {"anybatch, shares": [], "policies of JAX": [], "offload": []}
        alike: dict[tuple[str, str], list[str]] = {}  # the names of those with about the same figures
        for row in of(rows, model=model):
            share, kind = row["remat"], "anybatch, shares"
            if isinstance(share, str):
                kind = share if share == "offload" else "policies of JAX"
            point = row["temporaries_bytes"] / 2**30, 1e3 * row["predicted_seconds"]
            lines[kind].append(point)
            name = f"{share:g}" if isinstance(share, float) else "None" if share is None else f'"{share}"'
            alike.setdefault((unit(f"{point[0]:.1f} GiB"), unit(f"{point[1]:.0f} ms")), []).append(f"`{name}`")
        named = [", ".join(names) for names in alike.values()]
        firsts = [FRONT_MODELS[model], *[""] * len(alike)]  # the model is named in its first row
        cells += [[first, name, *figures] for first, name, figures in zip(firsts, named, alike, strict=False)]
        panels.append((FRONT_MODELS[model], {label: sorted(points) for label, points in lines.items() if points}))
    picture = plot(
        "front",
        panels,
        x="temporaries, GiB",
        y="predicted time, ms",
        alt="Memory against predicted time. The more is computed again, the less memory and the more time.",
        log_y=False,
    )
    header = ["model", "`remat=`", "temporaries", "predicted time"]
    return "\n\n".join([picture, table(header, cells, left=2), caption(results)])


SECTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "correctness": correctness,
    "accumulation": accumulation,
    "precision": precision,
    "mesh_ways": mesh_ways,
    "planning": planning,
    "planning_cpu": planning_cpu,
    "clipping": clipping,
    "blocks": blocks,
    "reading_cost_cpu": reading_cost,
    "reading_cost": reading_cost,
    "evaluation": evaluation,
    "host_batch": host_batch,
    "front": front,
}


def readme_table(results: Mapping[str, Any]) -> str:
    """The losses of `HEADLINES`, for the README, where there are no classes."""
    return correctness_rows(results["rows"], HEADLINES, marked=False)


# --- Writing ---------------------------------------------------------------------------------------------------------


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def made() -> dict[pathlib.Path, str]:
    """The text of every file that is made from the results."""
    files = {}
    for name, section in SECTIONS.items():
        if (RESULTS / f"{name}.json").exists():
            files[TABLES / f"{name}.md"] = section(load(name)) + "\n"
    start, end = "<!-- correctness: written by `make bench-report` -->", "<!-- end of correctness -->"
    before, rest = README.read_text().split(start)
    _, after = rest.split(end)
    files[README] = f"{before}{start}\n\n{readme_table(load('correctness'))}\n\n{end}{after}"
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would change")
    check = parser.parse_args().check
    TABLES.mkdir(exist_ok=True)
    stale = []
    for path, text in made().items():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"Not what benchmarks/results say: {', '.join(stale)}. Run `make bench-report`.", file=sys.stderr)
        return 1
    print(f"Changed: {', '.join(stale) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
