"""Add files outside docs/ to the site if a page links to them.

The changelog, the examples and the results stay in their folders, and pages link to
them by relative paths, as readers of the repository expect. Every file that a page
links to, directly or through other added pages, is added to the site under the same
path, and the links are rewritten. A script becomes a page that shows it.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: the start page of the repository, in place of which the site has index.md
START = ROOT / "README.md"

#: suffixes of files that are copied; other files become pages that show them
AS_THEY_ARE = {".md", ".png", ".svg"}

#: `](target#anchor)` of a link or image to a file of the repository
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
#: code, which is not searched for links
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def target(page: Path, link: str) -> Path | None:
    """Return the file of the repository that a link of a page leads to, if any."""
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir():
        path /= "README.md"
    return path if path.is_relative_to(ROOT) and path.is_file() else None


def linked(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    prose = CODE.sub("", page.read_text())
    found = (target(page, match[2]) for match in LINK.finditer(prose))
    return (path for path in found if path is not None)


def from_elsewhere() -> list[Path]:
    """Return the files outside docs/ that are reachable by links."""
    seen = {START}
    waiting = {*DOCS.rglob("*.md"), ROOT / "CHANGELOG.md"}
    while waiting:
        seen |= waiting
        pages = (path for path in waiting if path.suffix == ".md")
        waiting = {path for page in pages for path in linked(page)} - seen
    return sorted(path for path in seen - {START} if not path.is_relative_to(DOCS))


def place(path: Path) -> str:
    """Return the path of a file of the repository among the sources of the site."""
    if path == START:
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix in AS_THEY_ARE else f"{name}.md"


def source(file: File) -> Path:
    """Return the file of the repository from which a file of the site is made."""
    inside = DOCS / file.src_uri
    return inside if inside.exists() else ROOT / file.src_uri


def as_page(script: Path) -> str:
    """Return the text of a page that shows a script."""
    name = script.relative_to(ROOT).as_posix()
    language = {".py": "python", ".json": "json"}.get(script.suffix, "text")
    return (
        f"---\nsearch:\n  exclude: true\n---\n\n# {script.name}\n\n"
        f'```{language} title="{name}"\n{script.read_text().rstrip()}\n```\n'
    )


def on_files(files: Files, config) -> Files:
    for path in from_elsewhere():
        if path.suffix in AS_THEY_ARE:
            file = File.generated(config, place(path), abs_src_path=str(path))
        else:
            file = File.generated(config, place(path), content=as_page(path))
        files.append(file)
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Rewrite links of the repository to links of the site."""
    origin = source(page.file)
    if not origin.exists():  # a page that shows a script
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def to_site(match: re.Match[str]) -> str:
        path = target(origin, match[2])
        if path is None:
            return match[0]  # mkdocs reports it
        return match[1] + posixpath.relpath(place(path), here) + (match[3] or "")

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(to_site, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(to_site, markdown[end:])])
