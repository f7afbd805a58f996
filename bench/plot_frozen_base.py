#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Draw allocated memory over one step: `python bench/plot_frozen_base.py TIMELINE.json docs/frozen-base-memory.png`.

The input is what `bench/frozen_base.py --timeline` wrote. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLOURS = {"stock": "#666666", "store": "#d9822b", "store + per-layer free": "#1f77b4"}


def main(source: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = json.loads(source.read_text())
    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=130)
    for name, points in curves.items():
        length = points[-1][0]
        share = [100 * t / length for t, _ in points]
        level = [gib for _, gib in points]
        label = f"{name}: {level[0]:.2f} GiB at rest, {max(level):.2f} at the peak"
        axes.plot(share, level, label=label, color=COLOURS.get(name), linewidth=1.4)
    axes.set_xlabel("share of the step, forward then backward (%)")
    axes.set_ylabel("allocated (GiB)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", fontsize=8)
    axes.set_title("One step without recompute, 2.6 B Qwen3-MoE, 4096 tokens, LoRA on a frozen base", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
