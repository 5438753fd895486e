"""Formulas become MathML when the site is built; browsers draw it without a script.

The font is that of an installed package and copied into the site, so that formulas
look the same where the reader's machine has none for mathematics.
"""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

FONT = "STIXTwoMath-Regular.ttf"

#: what pymdownx.arithmatex leaves of $...$ and $$...$$
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
