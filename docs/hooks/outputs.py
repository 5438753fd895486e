"""Write what the code of a page prints into the page.

    python docs/hooks/outputs.py docs/*.md

A block of the language `output` holds what the Python block before it prints. The tests
compare the two; after an intended change this command writes them anew.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

BLOCK = re.compile(r"^```(python|output)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def with_outputs(text: str) -> str:
    """Return a page whose outputs are those of its code."""
    namespace: dict[str, object] = {"__name__": "page"}
    printed = io.StringIO()

    def replaced(match: re.Match[str]) -> str:
        nonlocal printed
        if match[1] == "output":
            return f"```output\n{printed.getvalue()}```"
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(match[2], namespace)
        return match[0]

    return BLOCK.sub(replaced, text)


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # pages may write files
        for page in pages:
            if "```output" in (text := page.read_text()):
                page.write_text(with_outputs(text))
        os.chdir("/")
