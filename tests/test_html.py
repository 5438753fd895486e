"""The page of a report: what is in it, and what a real browser makes of it."""

from __future__ import annotations

import base64
import html
import math
import re
import sys

import pytest

from laplace_ella.comparison.provenance import Provenance
from laplace_ella.comparison.report import Report, Result
from tests.browser import (
    address,
    background,
    console_errors,
    prefer,
    requests,
    scrolls_sideways,
    set_width,
)

HOSTILE = "<script>alert('x')</script> & $\\frac$"

METRICS = {"accuracy": 0.9, "nll": 0.3, "ece": 0.05, "auroc:far & near": 0.8}
COSTS = {"fit_s": 1.0, "tune_s": 0.1, "predict_s": 0.5, "floats": 12_700.0}


def result(method, link="", nll=0.3, seed=0, **changes):
    draws = [nll + 0.01 * math.sin(i) for i in range(20)]
    curve = {
        "confidence": [0.4, 0.7, 0.95],
        "accuracy": [0.5, 0.6, 0.97],
        "count": [30, 20, 50],
    }
    values = {
        "metrics": {**METRICS, "nll": nll},
        "costs": COSTS,
        "settings": {
            "tuning": "calibration",
            "chosen": ["prior_precision", "temperature"],
            "prior_precision": 100 * nll,
            "temperature": 0.5,
            "rank": 20,
        },
        "curves": {"reliability": curve},
        "replicates": {"nll": draws},
    }
    return Result(method, link, seed, **{**values, **changes})


def classification() -> Report:
    at_border = {**result("x").settings, "at_border": True}
    return Report(
        [
            result("map", nll=0.4, settings={}),
            result("ella", "mc", 0.25),
            result("ella", "probit", 0.31, settings=at_border, note="at the border"),
            result(HOSTILE, "mc", 1.2),
            Result("kron", status=f"failed: {HOSTILE}"),
        ],
        "classification",
        provenance=Provenance(
            "ResNet",
            269_722,
            (10,),
            {"training": 20_000, "test": 10_000},
            {"n_samples": 512, "links": ["mc", "probit"]},
            {"torch": "2.15.0"},
            "CPU",
            "2026-01-01 00:00 UTC",
        ),
    )


def regression() -> Report:
    levels = [i / 10 for i in range(1, 10)]

    def row(method, nll, seed):
        return result(
            method,
            nll=nll,
            seed=seed,
            metrics={"nll": nll, "rmse": 0.5, "coverage_90": 0.88, "calibration": 0.02},
            curves={"coverage": {"nominal": levels, "observed": levels}},
        )

    rows = [
        row(m, n + s / 10, s) for m, n in (("map", 0.9), ("exact", 0.7)) for s in (0, 1)
    ]
    return Report(rows, "regression")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("matplotlib")
    return classification().to_html(tmp_path_factory.mktemp("page") / "report.html")


# --- the file ------------------------------------------------------------------------


def test_everything_of_the_report_is_in_the_page(page):
    text = html.unescape(page.read_text("utf-8"))
    for expected in (
        "Lowest NLL: ella (mc), 0.2500.",
        "269,722",  # parameters
        "20,000",  # training examples
        "2.15.0",
        "mc, probit",
        "2026-01-01",
        "at a border",
        "ella (probit): at the border",
        f"failed: {HOSTILE}",
        "AUROC far & near",
        "Reliability diagram of ella (mc), ECE 0.050",
    ):
        assert expected in text
    assert text.count("<svg") == 4 + 4 + 1  # rows; costs of two links; distances


def test_texts_of_the_user_are_escaped_and_ids_differ(page):
    text = page.read_text("utf-8")
    assert "<script>alert" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', text)
    assert set(used) <= set(ids)


def test_the_same_report_is_the_same_file_and_style_is_untouched(page, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    again = classification().to_html(tmp_path / "new" / "again.html")
    assert again.read_bytes() == page.read_bytes()
    assert list(again.parent.iterdir()) == [again]
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_page_says_how_to_get_figures(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = classification().to_html(tmp_path / "page.html").read_text("utf-8")
    assert "<svg" not in text
    assert "laplace-ella[plots]" in text
    assert "0.2500" in text


@pytest.mark.parametrize(
    "report",
    [Report([]), Report([Result("full", status="out of memory")], "", True)],
    ids=["empty", "failed"],
)
def test_reports_without_numbers_have_a_page(report, tmp_path):
    text = report.to_html(tmp_path / "page.html").read_text("utf-8")
    assert "No row has numbers" in text or "interrupted" in text
    assert text.count("out of memory") == 2 * len(report)  # its text, and sorted by it


# --- in a browser --------------------------------------------------------------------


def column(browser, table, index):
    return browser.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".map((row) => row.cells[arguments[1]].innerText)",
        table,
        index,
    )


def test_page_loads_nothing_and_reports_no_error(browser, page):
    requests(browser)
    browser.get(address(page))
    assert console_errors(browser) == []
    assert requests(browser) == [address(page)]
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('svg')].map((svg) => {"
        "const box = svg.getBoundingClientRect();"
        "return [box.width, box.height, svg.querySelectorAll('path').length]; })"
    )
    assert len(drawn) == 9
    assert all(w > 100 and h > 60 and n > 5 for w, h, n in drawn)


def test_tables_sort_by_mouse_and_keyboard(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get(address(page))
    headers = browser.find_elements(By.CSS_SELECTOR, "#results thead th")
    nll = next(h for h in headers if h.text == "NLL")
    index = headers.index(nll)
    assert column(browser, "results", index) == ["0.4000", "0.2500", "0.3100", "1.2000"]
    button = nll.find_element(By.TAG_NAME, "button")
    button.click()
    assert nll.get_attribute("aria-sort") == "ascending"
    assert column(browser, "results", index) == ["0.2500", "0.3100", "0.4000", "1.2000"]
    button.send_keys(Keys.ENTER)
    assert nll.get_attribute("aria-sort") == "descending"
    assert column(browser, "results", index)[0] == "1.2000"
    # Another column, by the space bar; large is good, so large comes first.
    accuracy = next(h for h in headers if h.text == "acc.")
    accuracy.find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert accuracy.get_attribute("aria-sort") == "descending"
    assert nll.get_attribute("aria-sort") == "none"
    # No link is last, whatever the direction.
    link = next(h for h in headers if h.text == "link")
    for _ in range(2):
        link.find_element(By.TAG_NAME, "button").click()
        assert column(browser, "results", headers.index(link))[-1] == "–"
    assert console_errors(browser) == []


def test_light_and_dark_by_system_and_by_button(browser, page):
    from selenium.webdriver.common.by import By

    prefer(browser, "light")
    browser.get(address(page))
    light, toggle = background(browser), browser.find_element(By.ID, "theme")
    assert toggle.text == "Dark"
    toggle.click()
    dark = background(browser)
    assert dark != light
    assert toggle.text == "Light"
    prefer(browser, "dark")
    browser.get(address(page))
    assert background(browser) == dark
    # Lines and letters of the figures change with the page.
    colour = "return getComputedStyle(document.querySelector('svg text')).fill"
    in_dark = browser.execute_script(colour)
    prefer(browser, "light")
    assert background(browser) == light
    assert browser.execute_script(colour) != in_dark


@pytest.mark.parametrize("make", [classification, regression])
def test_page_does_not_scroll_sideways_on_a_phone(browser, make, tmp_path):
    pytest.importorskip("matplotlib")
    path = make().to_html(tmp_path / "page.html", title="A" * 60)
    set_width(browser, 375)
    browser.get(address(path))
    assert not scrolls_sideways(browser)
    # What is too wide scrolls in a box that is not.
    assert browser.execute_script(
        "return [...document.querySelectorAll('.scroll, figure')]"
        ".every((box) => box.getBoundingClientRect().right <= innerWidth);"
    )
    set_width(browser, 1280)
    assert not scrolls_sideways(browser)
    assert console_errors(browser) == []


def test_page_prints_light_and_whole(browser, page):
    prefer(browser, "dark")
    browser.get(address(page))
    media = {"media": "print", "features": []}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert background(browser) == "rgb(255, 255, 255)"
        set_width(browser, 703)  # A4 between the margins
        cut = browser.execute_script(
            "return [...document.querySelectorAll('.scroll')]"
            ".filter((box) => box.scrollWidth > box.clientWidth + 1).length"
        )
        assert cut == 0
        printed = browser.execute_cdp_cmd("Page.printToPDF", {})
        assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    finally:
        set_width(browser, 1280)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        prefer(browser, "light")
