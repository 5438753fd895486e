"""The documentation as its readers have it: built, served, opened in a browser."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from filelock import FileLock

from tests.browser import console_errors, requests, scrolls_sideways, set_width

pytest.importorskip("mkdocs")
pytest.importorskip("material")

ROOT = Path(__file__).parents[1]
DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site; of several test processes the first makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            build(folder)
    return folder


def build(folder: Path) -> None:
    """As `make docs` does; strict makes an error of every warning."""
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert not made.stdout + made.stderr


@pytest.fixture(scope="session")
def address(site):
    """Where the site is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# --- without a browser ---------------------------------------------------------------


@dataclass
class Page(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        self.links += [values[key] for key in ("href", "src") if values.get(key)]

    def handle_data(self, data):
        self.text.append(data)


def pages_of(site: Path) -> dict[str, Page]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            page = found[path.relative_to(site).as_posix()] = Page()
            page.feed(path.read_text())
    return found


def test_links_lead_somewhere(site):
    """To a file of the site and an anchor in it, or to another site by https."""
    pages = pages_of(site)
    assert len(pages) > 40
    broken = []
    for name, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if urlsplit(target).scheme:
                if urlsplit(target).scheme != "https":
                    broken.append((name, link))
                continue
            path = (site / name).parent / unquote(target) if target else site / name
            if path.is_dir():
                path /= "index.html"
            there = os.path.relpath(path, site)
            known = pages[there].anchors if there in pages else set()
            if not path.is_file() or (anchor and unquote(anchor) not in known):
                broken.append((name, link))
    assert not broken


def test_every_source_is_a_page(site):
    """All of docs/, and what it links to: results, examples, the changelog."""
    names = set(pages_of(site))
    for source in (ROOT / "docs").rglob("*.md"):
        assert (
            source.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in names
        )
    assert {
        "CHANGELOG.html",
        "examples/gap.py.html",
        "examples/index.html",
        "examples/paper/RESULTS.html",
        "examples/paper/results/uci/index.html",
    } <= names


# --- in a browser --------------------------------------------------------------------

#: Pictures that did not load, formulas without extent and formulas left as text.
PROBLEMS = r"""
const pictures = [...document.images].filter(
  image => !(image.complete && image.naturalWidth)).map(image => image.src);
const formulas = [...document.querySelectorAll("math")].filter(formula => {
  const box = formula.getBoundingClientRect();
  return !(box.width > 2 && box.height > 2) && formula.checkVisibility();
}).map(formula => formula.textContent);
const article = document.querySelector("article").cloneNode(true);
article.querySelectorAll("code, annotation").forEach(element => element.remove());
const raw = article.textContent.match(/\$\$|\\(frac|sum|hat|tilde)\b/g) || [];
return [...pictures, ...formulas, ...raw];
"""


def test_every_page_loads(browser, site, address):
    """On a desktop and on a phone, with nothing from elsewhere, nothing too wide, no
    error, and all pictures and formulas."""
    problems = {}
    console_errors(browser), requests(browser)
    for name in pages_of(site):
        found = []
        set_width(browser, DESKTOP)
        browser.get(f"{address}/{name}")
        if "laplace-ella" not in browser.title:
            found.append(f"title {browser.title!r}")
        found += browser.execute_script(PROBLEMS)
        found += ["too wide for a desktop"] * scrolls_sideways(browser)
        set_width(browser, PHONE)
        found += ["too wide for a phone"] * scrolls_sideways(browser)
        found += console_errors(browser)
        found += [url for url in requests(browser) if not url.startswith(address)]
        if found:
            problems[name] = found
    assert not problems


def test_formulas_have_their_font(browser, address):
    set_width(browser, DESKTOP)
    browser.get(f"{address}/method.html")
    loaded = browser.execute_async_script(
        "const done = arguments[0]; document.fonts.ready.then(() => done("
        "[...document.fonts].filter(f => f.status === 'loaded').map(f => f.family)))"
    )
    assert any("STIX Two Math" in family for family in loaded)
    assert len(browser.find_elements("css selector", ".formula math")) >= 6


def wait_for(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(condition)


def test_navigation(browser, address):
    """From the start by tab and list to a page, and back by the logo."""
    set_width(browser, DESKTOP)
    browser.get(f"{address}/index.html")
    browser.find_element("css selector", ".md-tabs__link[href*='guide']").click()
    wait_for(browser, lambda b: b.current_url.endswith("/guide/index.html"))
    browser.find_element(
        "css selector", ".md-sidebar--primary a[href$='calibration.html']"
    ).click()
    wait_for(browser, lambda b: b.current_url.endswith("/guide/calibration.html"))
    assert browser.find_element("css selector", "h1").text.startswith("Calibration")
    browser.find_element("css selector", ".md-header__button.md-logo").click()
    wait_for(browser, lambda b: b.current_url.endswith("/index.html"))
    assert not console_errors(browser)


def test_search(browser, address):
    """A word of the reference is found, and its result leads to it."""
    set_width(browser, DESKTOP)
    browser.get(f"{address}/index.html")
    browser.find_element("css selector", ".md-search__input").send_keys(
        "optimize_calibration"
    )
    results = wait_for(
        browser, lambda b: b.find_elements("css selector", "a.md-search-result__link")
    )
    addresses = [result.get_attribute("href") for result in results]
    assert any("calibration.html" in found for found in addresses)
    browser.get(next(a for a in addresses if "calibration.html" in a))
    assert (
        "optimize_calibration" in browser.find_element("css selector", "article").text
    )
    assert not console_errors(browser)
