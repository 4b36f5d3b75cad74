"""Draws the figures of the documentation again from the files in `benchmarks/results/`.

    python -m benchmarks.figures [NAME …]

`FIGURES` says which figure is drawn from which result. `docs/images/dashboard.png` is a picture of the page and
`docs/images/quickstart.png` is drawn by `pods figure` from the two runs of `pods quickstart`: neither is drawn here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import arms_figure, evidence_page, gsm8k, overlap_figure, scale_figure, scaling
from benchmarks._result_file import records

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks") / "results"
IMAGES = Path("docs") / "images"


def _scaling(result: Mapping[str, Any], path: Path) -> None:
    paced = result["engine"].startswith("paced")
    title = scaling.TITLE if paced else f"One run while its pools change ({result['engine']})"
    scaling.draw(records(result["steps"]), path, title)


def _gsm8k(result: Mapping[str, Any], path: Path) -> None:
    gsm8k.draw(result["runs"], path)


FIGURES: dict[Path, tuple[Path, Callable[[Mapping[str, Any], Path], None]]] = {
    IMAGES / "arms.png": (RESULTS / "arms_cpu.json", arms_figure.draw),
    IMAGES / "overlap.png": (RESULTS / "overlap.json", overlap_figure.draw),
    IMAGES / "scale.png": (RESULTS / "scale.json", scale_figure.draw),
    IMAGES / "scaling.png": (RESULTS / "scaling.json", _scaling),
    IMAGES / "scaling_h200.png": (RESULTS / "scaling_h200.json", _scaling),
    IMAGES / "scaling_4xh200.png": (RESULTS / "scaling_4xh200.json", _scaling),
    RESULTS / "gsm8k_0.5b_h200.png": (RESULTS / "gsm8k_0.5b_h200.json", _gsm8k),
    RESULTS / "gsm8k_0.5b_h200_shared.png": (RESULTS / "gsm8k_0.5b_h200_shared.json", _gsm8k),
    **{
        evidence_page.figure_of(name): (RESULTS / "evidence_cpu.json", partial(evidence_page.draw, name=name))
        for name in evidence_page.drawn_parts()
    },
}


def draw(figure: Path, folder: Path = ROOT) -> Path:
    """Draw one of `FIGURES` below `folder`; its path."""
    result, way = FIGURES[figure]
    path = folder / figure
    path.parent.mkdir(parents=True, exist_ok=True)
    way(json.loads((ROOT / result).read_text(encoding="utf-8")), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="figures, as arms or gsm8k_0.5b_h200; left out: all")
    names = parser.parse_args().names
    known = {figure.stem: figure for figure in FIGURES}
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"{', '.join(unknown)}: no such figure; there are {', '.join(known)}")
    for name in names or known:
        print(draw(known[name]).relative_to(ROOT))


if __name__ == "__main__":
    main()
