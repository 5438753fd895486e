"""Take the files outside docs/ that pages link to onto the site.

The changelog, the examples and the results stay where they are in the repository, and
pages link to them by relative paths, as a reader of the repository expects. For the
site, every file that is linked from a page, or from a page that came along this way,
takes the same path there, and the links are rewritten to it. A script becomes a page
that shows it.
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
#: where readers of the repository start; those of the site have a page of their own
START = ROOT / "README.md"

#: files that are on the site as they are; others become pages that show them
AS_THEY_ARE = {".md", ".png", ".svg"}

#: `](target#anchor)` of a link or image to a file of the repository
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
#: code, in which nothing is a link
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def target(page: Path, link: str) -> Path | None:
    """The file of the repository that a link of a page leads to, if there is one."""
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir():
        path /= "README.md"
    return path if path.is_relative_to(ROOT) and path.is_file() else None


def linked(page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to."""
    prose = CODE.sub("", page.read_text())
    found = (target(page, match[2]) for match in LINK.finditer(prose))
    return (path for path in found if path is not None)


def from_elsewhere() -> list[Path]:
    """Files outside docs/ that belong to the site, by following links."""
    seen = {START}
    waiting = {*DOCS.rglob("*.md"), ROOT / "CHANGELOG.md"}
    while waiting:
        seen |= waiting
        pages = (path for path in waiting if path.suffix == ".md")
        waiting = {path for page in pages for path in linked(page)} - seen
    return sorted(path for path in seen - {START} if not path.is_relative_to(DOCS))


def place(path: Path) -> str:
    """Where a file of the repository is among the sources of the site."""
    if path == START:
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix in AS_THEY_ARE else f"{name}.md"


def source(file: File) -> Path:
    """The file of the repository that a file of the site is made from."""
    inside = DOCS / file.src_uri
    return inside if inside.exists() else ROOT / file.src_uri


def as_page(script: Path) -> str:
    """A page that shows a script."""
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
    """Links of the repository become links of the site."""
    origin = source(page.file)
    if not origin.exists():  # a page that shows a script
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def to_site(match: re.Match[str]) -> str:
        path = target(origin, match[2])
        if path is None:
            return match[0]  # mkdocs says what is wrong with it
        return match[1] + posixpath.relpath(place(path), here) + (match[3] or "")

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(to_site, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(to_site, markdown[end:])])
