"""The plot of a plan."""

from typing import Any

from anybatch.errors import InputError


def draw(plan: Any) -> Any:
    """A figure of matplotlib: memory and time of the candidates of a `Plan`, against the microbatch size.

    Raises:
      InputError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "A plot needs matplotlib",
            given="a Python without it",
            remedy='pip install "anybatch[cli]"; print(plan) needs nothing.',
        ) from None
    # A figure by itself, without pyplot: nothing is shown or kept unless the caller does it.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    blue, orange, gray = "#1f5fa8", "#d9731a", "#8a8a8a"
    for remat in dict.fromkeys(candidate.remat for candidate in plan.candidates):
        mine = [each for each in plan.candidates if each.remat == remat and each.total is not None]
        sizes, totals = [each.microbatch_size for each in mine], [(each.total or 0) / 2**30 for each in mine]
        label = "memory" if remat is None else f"memory, {remat}"
        axes.plot(sizes, totals, "-" if remat is None else "--", color=blue, linewidth=1.5, label=label, zorder=2)
        for each, total in zip(mine, totals, strict=True):
            face = "white" if each.bytes is None else blue  # predicted ones are hollow
            axes.plot(each.microbatch_size, total, "o", color=blue, markerfacecolor=face, markersize=5, zorder=3)
    if plan.budget is not None:
        highest = max((each.total or 0) for each in plan.candidates)
        if plan.budget <= 4 * highest:  # else everything would be pressed to the floor
            axes.axhline(plan.budget / 2**30, color=gray, linestyle=":", label="budget", zorder=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({each.microbatch_size for each in plan.candidates})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.set_xlabel("microbatch size")
    axes.set_ylabel("memory, GiB", color=blue)
    axes.set_ylim(bottom=0)
    timed = [each for each in plan.candidates if each.seconds is not None]
    if timed:
        right = axes.twinx()
        for remat in dict.fromkeys(each.remat for each in timed):
            mine = [each for each in timed if each.remat == remat]
            style = "-" if remat is None else "--"
            milliseconds = [1e3 * (each.seconds or 0) for each in mine]
            sizes = [each.microbatch_size for each in mine]
            right.plot(sizes, milliseconds, style, marker="s", markersize=5, color=orange, label="time")
        right.set_ylabel("time, ms", color=orange)
        right.set_ylim(bottom=0)
    if plan.chosen is not None:
        axes.axvline(plan.chosen.microbatch_size, color=gray, linewidth=6, alpha=0.25, label="chosen", zorder=0)
    axes.legend(loc="best", frameon=False, fontsize=8)
    axes.set_title(f"The gradient of {plan.num_examples} examples on {plan.device}", fontsize=10, loc="left")
    return figure
