"""The HTML page: complete, self-contained, escaped, small, and the same for the same plan."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest
import report_fixtures as fixtures

from trimtab.report.html import html_report

VOID = {"meta", "br", "wbr", "link", "img", "hr", "input"}
SECTIONS = [
    *("Before and after", "Pipeline timeline", "Memory of each pipeline rank", "Stages"),
    *("Packing", "Plan file", "Assumptions"),
]


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.headings: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(params=fixtures.MAKERS, scope="module")
def html(request: pytest.FixtureRequest) -> str:
    return html_report(fixtures.MAKERS[request.param]())


def test_the_page_has_every_section_in_order(html):
    left_out = {"Pipeline timeline"} if "1 × A100-80GB" in html else set()  # nothing to see on one device
    assert Page(html).headings == [heading for heading in SECTIONS if heading not in left_out]


def test_nothing_is_loaded_from_anywhere(html):
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "a"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "xlink:href", "srcset", "action"} & set(attrs)]
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_the_only_script_is_ours_and_the_policy_names_it(html):
    assert len(Page(html).named("script")) == 1
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html


def test_hostile_names_are_text_and_cannot_steer_a_reader():
    html = html_report(fixtures.hostile_details())
    html.encode("utf-8")  # lone surrogates would raise
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&quot;&amp;" in html
    assert not {"\x1b", "\u202e"} & set(html)
    assert max(map(len, re.findall("y+", html))) < 2100  # long names are cut


def test_every_drawing_announces_itself_or_is_hidden(html):
    for drawn in re.findall(r"<svg[^>]*>(?:<title>[^<]+</title><desc>[^<]+</desc>)?", html):
        inner = 'role="img"' not in drawn and ("aria-hidden" in drawn or "y=" in drawn or "viewBox" in drawn)
        assert inner or "<title>" in drawn


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_told_from_its_ground(scheme):
    """WCAG AA, 4.5 to 1, of text on cards and page; tests/integration/test_report_page.py asks Chromium of all text."""
    css = files("trimtab.report").joinpath("report.css").read_text(encoding="utf-8")
    palettes = [
        dict(re.findall(r"--([a-z0-9]+): #([0-9a-f]{3,6});", x)) for x in re.findall(r":root \{.*?\}", css, re.S)
    ]
    colours = palettes[0] | (palettes[1] if scheme == "dark" else {})
    pairs = [
        (colours[text], colours[ground]) for text in ("ink", "soft", "bad", "accent") for ground in ("card", "page")
    ]
    assert {pair: ratio for pair in pairs if (ratio := _contrast(*pair)) < 4.5} == {}


def _contrast(one: str, other: str) -> float:
    lights = []
    for colour in (one, other):
        digits = "".join(c * 2 for c in colour) if len(colour) == 3 else colour
        shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
        lights.append(0.2126 * r + 0.7152 * g + 0.0722 * b)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_cells_carry_their_columns_names_for_narrow_screens(html):
    cells = Page(html).named("td")
    assert cells
    assert all(cell.get("data-h") for cell in cells)


def test_every_table_has_scoped_headers(html):
    page = Page(html)
    assert len(page.named("table")) >= 3
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.named("th"))


def test_no_shape_is_placed_outside_its_drawing(html):
    for attrs in Page(html).named("rect"):
        x, width = (float((attrs[k] or "").rstrip("%")) for k in ("x", "width"))
        assert x >= 0
        assert width >= 0
        assert x + width <= 100.03


def test_the_headline_figures_are_on_the_page():
    text = " ".join(Page(html_report(fixtures.internvl_details())).text)
    rows = fixtures.internvl_details().plan.estimates.variants
    assert [row.fits for row in rows] == [False, False, True, True], "and what does not fit is no measure"
    assert f"{rows[2].epoch_s / rows[-1].epoch_s:.2f}x" in text
    assert f"± {100 * fixtures.internvl_details().plan.estimates.time_error:.0f} %" in text
    assert "does not fit" in text
    assert "Nothing here was measured" in text


def test_a_plan_without_gain_is_not_dressed_up():
    page = Page(html_report(fixtures.tiny_details()))
    assert "slowest stage" not in " ".join(page.text)  # of one
    assert "1.00x" in page.text
    assert not [a for a in page.named("div") if a.get("class") == "tile main"]
    assert [a for a in Page(html_report(fixtures.internvl_details())).named("div") if a.get("class") == "tile main"]


def test_many_files_stages_and_assumptions_are_counted_not_listed():
    details = fixtures.internvl_details()
    given = details.plan.inputs
    many = replace(given, data=replace(given.data, files=given.data.files * 5000))
    plan = replace(details.plan, inputs=many, assumptions=("It holds." * 100,) * 3000)
    html = html_report(replace(details, plan=plan))
    assert len(html.encode()) < 500_000
    assert re.search(r"… 4,\d+ lines more in the plan file …", html)
    assert "… and 2952 more in the plan file" in html


def test_the_largest_plan_stays_under_500_kb():
    details = fixtures.crowded_details()
    assert details.variants[0].timeline.num_devices == 64
    assert len(details.variants[0].timeline.stage) == 64 * 256 * 2
    assert len(details.variants[0].pack_tokens) == 300_000
    html = html_report(details)
    Page(html)
    assert len(html.encode()) < 500_000


def test_every_shape_has_a_rule_of_the_style_sheet(html):
    rules = set(re.findall(r"\.([a-z][\w-]*)", files("trimtab.report").joinpath("report.css").read_text()))
    shapes = [attrs.get("class") or "" for tag in ("rect", "path", "line", "circle") for attrs in Page(html).named(tag)]
    assert {name for look in shapes for name in look.split()} <= rules
