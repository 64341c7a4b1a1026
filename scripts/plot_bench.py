#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots Google Benchmark results: one line a family, time (or another figure) against size.

Reads what --benchmark_out writes. A family is a benchmark's name without its size, the argument
called "bytes", or the one that --argument names ("threads"). Medians are plotted where there are
repetitions, single runs otherwise; skipped cases are listed and left out. The exit code is 3, and
there is no plot, when no case matches.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from statistics import median

# What Google Benchmark appends to a name: how it was measured.
MEASURED = re.compile(r"/(manual_time|real_time|iterations:\d+)\b")
FEW = 6  # families whose legend leaves their lines visible
TO_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def read(paths, argument):
    """Returns {family: {argument: [run, ...]}}, the skipped cases and the machine's description."""
    sized = re.compile(rf"^(?P<family>.*)/{argument}:(?P<at>\d+)(?P<rest>.*)$")
    runs, skipped, machine = defaultdict(lambda: defaultdict(list)), {}, ""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if not text:  # what Google Benchmark writes when its filter matches nothing
            continue
        results = json.loads(text)
        context = results.get("context", {})
        machine = machine or ", ".join(context[key] for key in ("device", "driver") if key in context)
        for run in results["benchmarks"]:
            name = run.get("run_name", run["name"])
            matched = sized.match(name)
            if run.get("run_type") == "aggregate":
                continue
            if run.get("error_occurred") or run.get("skipped"):
                skipped[name] = run.get("error_message") or run.get("skip_message", "")
            elif matched:
                family = MEASURED.sub("", matched["family"] + matched["rest"])
                runs[family][int(matched["at"])].append(run)
    return runs, skipped, machine


def figure_of(run, metric):
    value = run[metric]
    return value * TO_SECONDS[run["time_unit"]] if metric.endswith("_time") else value


def lines(runs, metric):
    """Yields (family, sizes, values, lows, highs) in order of name."""
    for family in sorted(runs):
        points = []
        for size, same in sorted(runs[family].items()):
            values = [figure_of(run, metric) for run in same if metric in run]
            if values:
                points.append((size, median(values), min(values), max(values)))
        if points:
            yield (family, *zip(*points))


def size_name(size, _=None):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} TiB"


def si(value, unit):
    if value <= 0:
        return "0"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u")):
        if value >= scale * 0.9999:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}"


def unit_of(metric):
    if metric.endswith("_time"):
        return "s"
    return "B/s" if metric == "bytes_per_second" else ""


def draw(options, runs, machine):
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_bench: matplotlib is missing; install python3-matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    sizes = set()
    # More families than colours are told apart by their lines.
    axes.set_prop_cycle(plt.cycler(linestyle=["-", "--", ":"]) * plt.rcParams["axes.prop_cycle"])
    for family, at, values, lows, highs in lines(runs, options.metric):
        color = axes.plot(at, values, marker="o", markersize=4, label=family)[0].get_color()
        axes.fill_between(at, lows, highs, color=color, alpha=0.15, linewidth=0)
        sizes.update(at)
    if not sizes:
        print(f"plot_bench: no case matches and has '{options.metric}'", file=sys.stderr)
        sys.exit(3)
    if min(sizes) > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    if options.argument == "bytes":
        axes.xaxis.set_major_formatter(FuncFormatter(size_name))
        axes.tick_params(axis="x", rotation=30)
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
    if not options.linear:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    unit = unit_of(options.metric)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, unit)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("time" if unit == "s" else options.metric)
    axes.set_xlabel("size" if options.argument == "bytes" else options.argument)
    axes.grid(True, alpha=0.3)
    axes.set_title("\n".join(text for text in (options.title, machine) if text), fontsize=10)
    if len(axes.lines) <= FEW:
        axes.legend(fontsize=8)
    else:
        figure.legend(fontsize=8, loc="outside right upper")
    for path in options.output:
        figure.savefig(path, dpi=150)
        print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON files to read (.json), then plots to write (.png, .svg, .pdf)")
    parser.add_argument("-f", "--filter", default="", help="only families that match this regular expression")
    parser.add_argument("-m", "--metric", default="real_time", help="real_time, bytes_per_second, or a counter's name")
    parser.add_argument("-a", "--argument", default="bytes", help="what the x axis is; default: bytes")
    parser.add_argument("-t", "--title", default="", help="first line of the title; the second is the machine")
    parser.add_argument("--linear", action="store_true", help="linear instead of logarithmic values")
    options = parser.parse_args()
    results = [path for path in options.files if path.endswith(".json")]
    options.output = [path for path in options.files if not path.endswith(".json")]
    if not results or not options.output:
        parser.error("name at least one .json to read and one plot to write")

    runs, skipped, machine = read(results, options.argument)
    wanted = re.compile(options.filter)
    skipped = {name: reason for name, reason in skipped.items() if wanted.search(name)}
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if not runs:
        print("plot_bench: nothing to plot, no case was run", file=sys.stderr)
        sys.exit(3)
    draw(options, {family: at for family, at in runs.items() if wanted.search(family)}, machine)


if __name__ == "__main__":
    main()
