"""The pictures of these pages, from a run's folder: `make pictures RUN=…`; docs/report.md names the run.

memory.png is the run's own, in 64 colours; the page is photographed by Chromium, in light and in dark, where one is
installed. Both are small: they are in the repository.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).with_name("images")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = (1120, 1130)


def small(picture: Image.Image, path: Path) -> None:
    """Save in 64 colours, and say how large it is."""
    out = io.BytesIO()
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
    path.write_bytes(out.getvalue())
    print(f"{path}: {picture.width} x {picture.height}, {len(out.getvalue()) / 1e3:.0f} kB")


def photograph(browser: str, page: Path, dark: bool) -> Image.Image:
    """The top of a page as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.png"
        words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={path}"]
        words += ["--blink-settings=preferredColorScheme=0"] if dark else []
        subprocess.run([*words, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(path) as picture:
            return picture.copy()


def main(run: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    with Image.open(run / "memory.png") as picture:
        small(picture, IMAGES / "memory.png")
    browser = next((b for b in BROWSERS if shutil.which(b)), None)
    if browser is None:
        print("the page is not photographed: no Chromium here")
        return
    for dark in (False, True):
        name = "report-dark.png" if dark else "report.png"
        small(photograph(browser, run / "report.html", dark), IMAGES / name)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart"))
