"""Convert formulas to MathML when the site is built; browsers need no script for it.

The font of an installed package is copied to the site, so that formulas look the same
on machines without a mathematical font.
"""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

FONT = "STIXTwoMath-Regular.ttf"

#: what pymdownx.arithmatex makes of $...$ and $$...$$
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_files(files: Files, config) -> Files:
    package = Path(importlib.util.find_spec("ziamath").origin).parent
    font = package / "fonts" / FONT
    files.append(File.generated(config, f"assets/{FONT}", abs_src_path=str(font)))
    return files


def mathml(latex: str, display: str) -> str:
    return convert(html.unescape(latex).strip(), display=display)


def on_page_content(content: str, page, config, files: Files) -> str:
    content = INLINE.sub(lambda match: mathml(match[1], "inline"), content)
    return BLOCK.sub(
        lambda match: f'<div class="formula">{mathml(match[1], "block")}</div>', content
    )
