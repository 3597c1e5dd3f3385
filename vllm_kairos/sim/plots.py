# SPDX-License-Identifier: Apache-2.0
"""Figures. Written with matplotlib's Agg backend: no display is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kairos.sim.output import writing

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def lines(
    path: str,
    panels: Sequence[tuple[str, Series, float | None]],
    x_label: str,
    dashed: Mapping[str, str] | None = None,
) -> None:
    """Line charts side by side.

    Args:
        path: PNG to write.
        panels: Title of the y axis, series by label, and a limit to mark.
        x_label: Of every panel.
        dashed: Labels of series from the paper, by the label they belong to;
            they share its colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 3.6), squeeze=False
    )
    for axis, (y_label, series, limit) in zip(axes[0], panels, strict=True):
        colours: dict[str, Any] = {}
        for label, (xs, ys) in series.items():
            like = (dashed or {}).get(label)
            (drawn,) = axis.plot(
                xs,
                ys,
                "--" if like else "-",
                marker="o",
                markersize=3,
                color=colours.get(like or ""),
                label=label,
            )
            colours[label] = drawn.get_color()
        if limit is not None:
            axis.axhline(limit, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    with writing(os.path.dirname(path)):
        figure.savefig(path, dpi=130)
    plt.close(figure)


def bars(
    path: str,
    panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]],
) -> None:
    """Grouped bar charts side by side.

    Args:
        path: PNG to write.
        panels: Title, groups along x, and values of each series by label.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.4 * len(panels), 3.6), squeeze=False
    )
    for axis, (title, groups, series) in zip(axes[0], panels, strict=True):
        width = 0.8 / max(len(series), 1)
        for place, (label, values) in enumerate(series.items()):
            at = [
                i + (place - (len(series) - 1) / 2) * width for i in range(len(groups))
            ]
            axis.bar(at, values, width, label=label)
        axis.set_xticks(range(len(groups)), groups, rotation=35, fontsize=7, ha="right")
        axis.set_title(title, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    if any(panels[0][2]):
        axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    with writing(os.path.dirname(path)):
        figure.savefig(path, dpi=130)
    plt.close(figure)


def sweep_figures(summary: Mapping[str, Any], directory: str) -> None:
    """The figures of a sweep, after the paper's Figures 4 to 6.

    One rate gives bars by policy, several give lines over the rate.
    """
    means = summary["mean"]
    labels = list(dict.fromkeys(m["policy"] for m in means))
    values: dict[str, dict[str, list[float]]] = {}
    quantities = (
        ("P95 TTFT (s)", lambda m: (m["ttft_ms"]["p95"] or 0) / 1e3),
        ("P95 TBT (ms)", lambda m: m["tbt_ms"]["p95"] or 0),
        ("output tokens/s", lambda m: m["output_tokens_per_s"]),
        ("SLO attainment (%)", lambda m: 100 * m["slo_attainment"]),
        ("deflections", lambda m: m["deflections"]),
    )
    for name, of in quantities:
        values[name] = {
            label: [of(m) for m in means if m["policy"] == label] for label in labels
        }
    rates = [m["rate"] for m in means if m["policy"] == labels[0]]
    limits = {
        "P95 TTFT (s)": summary["settings"]["ttft_slo_ms"] / 1e3,
        "P95 TBT (ms)": summary["settings"]["tau_ms"],
    }
    names = {
        "latency.png": ("P95 TTFT (s)", "P95 TBT (ms)"),
        "throughput.png": ("output tokens/s",),
        "attainment.png": ("SLO attainment (%)", "deflections"),
    }
    for file, shown in names.items():
        path = os.path.join(directory, file)
        if len(rates) > 1:
            lines(
                path,
                [
                    (n, {k: (rates, v) for k, v in values[n].items()}, limits.get(n))
                    for n in shown
                ],
                "requests/s",
            )
        else:
            bars(
                path,
                [(n, labels, {"": [values[n][k][0] for k in labels]}) for n in shown],
            )
