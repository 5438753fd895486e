"""A real browser for the tests of pages: Chromium without a window.

`conftest.py` has the fixture, one for all tests. Debian's packages are chromium and
chromium-driver; where there are none, the tests skip.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium with an empty profile, which records console and network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no browser: chromium and chromedriver are needed on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("chromium")
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    session = webdriver.Chrome(options, webdriver.ChromeService(driver))
    session.get("about:blank")  # leave the start page, and what it loads, behind
    for log in ("browser", "performance"):
        session.get_log(log)
    yield session
    session.quit()


def console_errors(browser) -> list[str]:
    """Errors and warnings on the console since the last call."""
    serious = ("SEVERE", "WARNING")
    entries = browser.get_log("browser")
    return [entry["message"] for entry in entries if entry["level"] in serious]


def requests(browser) -> list[str]:
    """Addresses that were asked for since the last call, `data:` left out."""
    messages = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and not message["params"]["request"]["url"].startswith("data:")
    ]


def set_width(browser, width: int, height: int = 900) -> None:
    """The width of the page in CSS pixels; windows may not be as narrow as a phone."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )


def prefer(browser, scheme: str) -> None:
    """Let the system ask for 'light' or 'dark' colours."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def scrolls_sideways(browser) -> bool:
    """Whether the page is wider than the window."""
    return browser.execute_script(
        "const page = document.scrollingElement;"
        "return page.scrollWidth > page.clientWidth;"
    )


def background(browser) -> str:
    """Colour behind the page."""
    return browser.execute_script(
        "return getComputedStyle(document.body).backgroundColor"
    )


def address(path: Path) -> str:
    return Path(path).resolve().as_uri()
