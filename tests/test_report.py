"""The page to look at hard negatives: what it holds, what it must not do, and how it works in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from PIL import Image

import filter_hard_negatives_vqa as filter_script
from contrastors import report
from contrastors.records import PathResolver
from contrastors.report import MAX_PICTURES_SIZE, Thumbnails, write_report
from tests.conftest import COLOURS, write_rows
from tests.judge_server import JudgeServer, Request

HOSTILE = '</script><script>document.title = "broken"</script><!-- " \' & <b>bold</b>\u2028{{style_hash}}\ud800'


def candidates(*paths: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "path": path, "score": round(1 - rank / 10, 3)} for rank, path in enumerate(paths, start=1)]


def review(position: int | None, verdict: str, answer: str = "", reason: str = "") -> dict[str, Any]:
    return {"position": position, "verdict": verdict, "answer": answer, "reason": reason}


def write_page(folder: Path, rows: list[dict], reviews: list | None = None, **options: Any) -> Path:
    page = folder / "page.html"
    write_report(page, rows, PathResolver(folder / "rows.jsonl"), reviews, **({"title": "rows.jsonl"} | options))
    return page


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of scripts and styles."""

    def __init__(self, page: Path):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1] in (("script", {}), ("style", {})):
            self.blocks.setdefault(self.found[-1][0], data)


# What it holds


def test_page_asks_nothing_of_the_network_and_runs_no_other_script_than_its_own(colour_set: Path):
    rows = [{"query": "red", "chunk_path": "c00.png", "retrieve_top20": candidates("c01.png")}]
    elements = Elements(write_page(colour_set, rows))
    urls = [value for _, attrs in elements.found for name, value in attrs.items() if name in ("src", "href", "action")]
    assert urls == ["data:,"]
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    hashes = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for name, text in elements.blocks.items()
    }
    assert policy.split("; ") == [
        "default-src 'none'", "img-src data:", f"style-src 'sha256-{hashes['style']}'",
        f"script-src 'sha256-{hashes['script']}'", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    assert not any(name.startswith("on") or name == "style" for _, attrs in elements.found for name in attrs)


def test_no_text_of_a_row_leaves_the_block_it_stands_in(colour_set: Path):
    row = {"query": HOSTILE, "chunk_path": HOSTILE, "neg_chunk_paths": [HOSTILE], "retrieve_top20": candidates(HOSTILE)}
    page = write_page(colour_set, [row], [[review(0, "WRONG", HOSTILE)]], title=HOSTILE)
    assert [tag for tag, _ in Elements(page).found if tag == "script"] == ["script", "script"]
    assert "<b>" not in page.read_text(encoding="utf-8")
    data = data_of(page)
    shown = data["rows"][0]
    assert data["title"] == shown["query"] == shown["positive"]["path"] == shown["candidates"][0]["path"] == HOSTILE
    assert shown["candidates"][0]["remark"] == HOSTILE


def test_what_became_of_each_document_stands_on_its_card(colour_set: Path):
    shutil.copy(colour_set / "c00.png", colour_set / "copy.png")
    row = {
        "query": "red", "chunk_path": "c00.png", "positive_score": 0.95, "neg_chunk_paths": ["c02.png", "c09.png"],
        "retrieve_top20": candidates("copy.png", "c01.png", "c02.png", "c03.png", "c07.png", "c04.png"),
    }  # fmt: skip
    reviews = [
        review(None, "CORRECT", "red"), review(1, "CORRECT", "green"), review(2, "CANNOT_ANSWER", "CANNOT_ANSWER"),
        review(3, "UNKNOWN", "hm", "length"),
    ]  # fmt: skip
    page = write_page(colour_set, [row], [reviews], positives_of=lambda query: ["c00.png", "c07.png"])
    shown = data_of(page)["rows"][0]
    assert [
        (c["path"], c["position"], c["score"], c["use"], c["verdict"], c["is_false_negative"], c["remark"])
        for c in (shown["positive"], *shown["candidates"])
    ] == [
        ("c00.png", None, 0.95, "positive", "CORRECT", None, "red"),
        ("copy.png", 1, 0.9, "positive", "not judged", None, ""),
        ("c01.png", 2, 0.8, "dropped", "CORRECT", True, "green"),
        ("c02.png", 3, 0.7, "hard negative", "CANNOT_ANSWER", False, ""),
        ("c03.png", 4, 0.6, "not used", "UNKNOWN", None, "length"),
        ("c07.png", 5, 0.5, "positive", "not judged", None, ""),
        ("c04.png", 6, 0.4, "not used", "not judged", None, ""),
        ("c09.png", None, None, "hard negative", "not judged", None, ""),
    ]


def test_rows_without_candidates_negatives_scores_and_verdicts_are_shown(colour_set: Path):
    rows = [
        {"query": "red", "chunk_path": "c00.png", "neg_chunk_paths": None},
        {"query": "green", "chunk_path": "c01.png", "retrieve_top20": [{"path": "c02.png"}]},
    ]
    data = data_of(write_page(colour_set, rows))
    assert data["is_judged"] is False and data["rows"][0]["candidates"] == []
    card = data["rows"][1]["candidates"][0]
    assert (card["position"], card["score"], card["use"]) == (1, None, "not used")


def test_a_rank_that_is_a_text_is_passed_over(colour_set: Path):
    candidates = [{"rank": str(place), "path": f"c{place:02d}.png"} for place in (1, 2)]
    row = {"query": "q", "chunk_path": "c00.png", "retrieve_top20": candidates, "neg_chunk_paths": ["c02.png"]}
    cards = data_of(write_page(colour_set, [row]))["rows"][0]["candidates"]
    assert [(card["position"], card["use"]) for card in cards] == [(1, "not used"), (2, "hard negative")]


def test_only_the_first_rows_are_read_and_shown(colour_set: Path):
    def rows() -> Iterator[dict[str, Any]]:
        for number in range(5):
            assert number < 4, "reads on"
            yield {"query": f"q{number}", "chunk_path": "c00.png"}

    data = data_of(write_page(colour_set, rows(), max_rows=3, num_rows=5))
    assert [row["query"] for row in data["rows"]] == ["q0", "q1", "q2"] and data["num_rows"] == 5


# Pictures


def test_pictures_of_equal_content_are_embedded_once(colour_set: Path):
    shutil.copy(colour_set / "c01.png", colour_set / "copy.png")
    paths = ("c01.png", "copy.png", "./c01.png", str(colour_set / "c01.png"))
    rows = [{"query": f"q{n}", "chunk_path": "c00.png", "retrieve_top20": candidates(*paths)} for n in range(3)]
    page = write_page(colour_set, rows)
    assert len(data_of(page)["pictures"]) == 2 and page.read_text().count("data:image/webp") == 2
    assert {card["picture"] for row in data_of(page)["rows"] for card in row["candidates"]} == {1}


def test_thumbnails_are_the_upright_pictures_made_small(tmp_path: Path):
    image = Image.new("RGB", (640, 320), COLOURS["red"])
    image.paste(COLOURS["blue"], (0, 0, 320, 320))
    exif = Image.Exif()
    exif[274] = 6  # turn by 90 degrees clockwise: the left half becomes the upper one
    image.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    data = data_of(write_page(tmp_path, [{"query": "q", "chunk_path": "photo.jpg"}]))
    (tmp_path / "small.webp").write_bytes(base64.b64decode(data["pictures"][0].removeprefix("data:image/webp;base64,")))
    with Image.open(tmp_path / "small.webp") as small:
        assert small.size == (64, 128)
        assert small.getpixel((32, 20))[2] > 180 and small.getpixel((32, 108))[0] > 160


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_that_cannot_be_read_are_shown_as_such(colour_set: Path):
    (colour_set / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (70, 70)).save(colour_set / "large.png")
    paths = ("gone.png", "broken.png", "large.png", "c01.png")
    rows = [{"query": "red", "chunk_path": "gone.png", "retrieve_top20": candidates(*paths)}]
    shown = data_of(write_page(colour_set, rows, max_image_pixels=64 * 64))["rows"][0]
    # The missing file is the positive, so the candidate of that name is it.
    found = [(card["picture"], card["problem"], card["link"]) for card in shown["candidates"]]
    assert found[0] == (None, "No such file or directory", "") and found[3] == (0, "", "c01.png")
    assert found[1][0] is None and "not a picture of a known format" in found[1][1]
    assert found[2][0] is None and "70x70 is over the limit of 4096 pixels" in found[2][1]


def test_links_lead_from_the_page_to_the_files_whatever_their_names(tmp_path: Path):
    names = ['a:b "c"#%41?é.png', "javascript:alert(1)", "<b>.png"]
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    for number, name in enumerate(names):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(data / name, "PNG")
    rows = [{"query": "q", "chunk_path": name} for name in names]
    page = other / "page.html"
    write_report(page, rows, PathResolver(data / "rows.jsonl"), title="t")
    links = [row["positive"]["link"] for row in data_of(page)["rows"]]
    assert [(other / unquote(link)).resolve() for link in links] == [data / name for name in names]
    assert not any(set(link) & set(':"<>#?') for link in links)


def test_page_of_300_rows_with_20_candidates_stays_under_15_megabytes(tmp_path: Path):
    noise = random.Random(1)
    num_tiles = 150
    for number in range(num_tiles):
        Image.frombytes("RGB", (128, 128), noise.randbytes(128 * 128 * 3)).save(
            tmp_path / f"{number}.png", compress_level=0
        )
    rows = [
        {
            "query": f"a query of the usual length, number {n}", "chunk_path": f"{n}.png",
            "retrieve_top20": candidates(*(f"{(n * 7 + k) % num_tiles}.png" for k in range(1, 21))),
        }
        for n in range(300)
    ]  # fmt: skip
    page = write_page(tmp_path, rows)
    data = data_of(page)
    assert len(data["rows"]) == 300 and len(data["pictures"]) == num_tiles
    assert page.stat().st_size < 15_000_000
    texts = page.stat().st_size - sum(map(len, data["pictures"]))
    assert texts + MAX_PICTURES_SIZE < 15_000_000  # so however many pictures there are


def test_what_was_used_or_judged_keeps_its_picture_when_not_all_fit(colour_set: Path, monkeypatch: pytest.MonkeyPatch):
    row = {
        "query": "q", "chunk_path": "c00.png", "neg_chunk_paths": ["c04.png"],
        "retrieve_top20": candidates("c01.png", "c02.png", "c03.png", "c04.png"),
    }  # fmt: skip
    small = Thumbnails(128, 10**6)
    for number in (0, 3, 4):
        small.add(str(colour_set / f"c0{number}.png"))
    room = sum(map(len, small.urls))
    monkeypatch.setattr(report, "MAX_PICTURES_SIZE", room)
    shown = data_of(write_page(colour_set, [row], [[review(2, "WRONG")]]))["rows"][0]
    assert shown["positive"]["picture"] == 0
    missing = [card["path"] for card in shown["candidates"] if card["picture"] is None]
    assert missing == ["c01.png", "c02.png"]
    assert shown["candidates"][0]["problem"] == "left out to keep this page small" and shown["candidates"][0]["link"]


# --report of the filter


@pytest.fixture
def run_filter(colour_set: Path) -> Iterator[Callable[..., int]]:
    """Runs the filter over four rows; the judge finds that a page answers a query which names its colour."""
    rows = [
        {"query": "red pink", "chunk_path": "c00.png",
         "retrieve_top20": candidates("c00.png", "c09.png", "c03.png", "c04.png")},
        {"query": "blue", "chunk_path": "c02.png",
         "retrieve_top20": candidates("c01.png", "c02.png", "c06.png", "c05.png")},
        {"query": "blue", "chunk_path": "c06.png", "retrieve_top20": []},
        {"query": "green", "chunk_path": "c01.png", "retrieve_top20": candidates("c02.png")},
    ]  # fmt: skip
    write_rows(colour_set / "in.jsonl", rows)
    names = {rgb: name for name, rgb in COLOURS.items()}

    def reply(request: Request) -> str:
        if not request.is_verdict:
            return names[request.image.getpixel((1, 1))]
        return "CORRECT" if request.answer in request.query else "WRONG"

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with JudgeServer(reply) as server:

        def run(*words: str, output: str = "out.jsonl") -> int:
            files = ["--input", str(colour_set / "in.jsonl"), "--output", str(colour_set / output)]
            return filter_script.main([*files, "--base-url", server.url, *words])

        yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_filter_shows_written_and_skipped_rows_with_what_was_judged(run_filter, colour_set: Path):
    page = colour_set / "page.html"
    assert run_filter("--report", str(page)) == 0
    data = data_of(page)
    assert data["title"] == "Hard negatives of in.jsonl" and data["num_rows"] == 4 and data["is_judged"] is True
    assert [[(c["path"], c["use"], c["verdict"]) for c in row["candidates"]] for row in data["rows"]] == [
        [("c00.png", "positive", "not judged"), ("c09.png", "dropped", "CORRECT"),
         ("c03.png", "hard negative", "WRONG"), ("c04.png", "hard negative", "WRONG")],
        [("c01.png", "hard negative", "WRONG"), ("c02.png", "positive", "not judged"),
         ("c06.png", "positive", "not judged"), ("c05.png", "hard negative", "WRONG")],
        [],
        [("c02.png", "not used", "WRONG")],
    ]  # fmt: skip
    assert data["rows"][0]["candidates"][1]["remark"] == "pink"


def test_report_changes_no_other_output_and_depends_on_no_order_of_replies(run_filter, colour_set: Path):
    assert run_filter("--concurrency", "1", "--report", str(colour_set / "one.html"), output="one.jsonl") == 0
    assert run_filter("--concurrency", "8", "--report", str(colour_set / "many.html"), output="many.jsonl") == 0
    assert run_filter(output="none.jsonl") == 0
    assert (colour_set / "one.html").read_bytes() == (colour_set / "many.html").read_bytes()
    for end in (".jsonl", ".reviews.jsonl", ".summary.json"):
        assert len({(colour_set / f"{stem}{end}").read_bytes() for stem in ("one", "many", "none")}) == 1


def test_resume_makes_the_page_of_a_finished_run(run_filter, colour_set: Path):
    assert run_filter("--report", str(colour_set / "first.html")) == 0
    assert run_filter("--resume", "--report", str(colour_set / "later.html")) == 0
    assert (colour_set / "first.html").read_bytes() == (colour_set / "later.html").read_bytes()


def test_existing_page_is_refused_without_a_flag(run_filter, colour_set: Path, capsys: pytest.CaptureFixture):
    page = colour_set / "page.html"
    page.write_text("mine")
    assert run_filter("--report", str(page)) == 1
    assert f"{page} exists" in capsys.readouterr().err and page.read_text() == "mine"
    assert run_filter("--report", str(page), "--overwrite") == 0


def test_report_that_cannot_be_written_or_would_replace_another_file_is_refused(run_filter, colour_set: Path, capsys):
    for words in (["--report", str(colour_set / "out.jsonl")], ["--report", "x.html", "--dry-run"]):
        with pytest.raises(SystemExit) as caught:
            run_filter(*words)
        assert caught.value.code == 2 and "--report" in capsys.readouterr().err


# In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
CONTRAST = """
const luminance = (colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = (node) => {
  const colour = getComputedStyle(node).backgroundColor;
  return colour === "rgba(0, 0, 0, 0)" ? ground(node.parentElement) : colour;
};
return [...document.querySelectorAll("h1, h2, p, label, legend, th, td, button, .badge, .path, .problem, .remark")]
  .filter((node) => node.checkVisibility()).map((node) => {
    const [low, high] = [getComputedStyle(node).color, ground(node)].map(luminance).sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), node.outerHTML.slice(0, 80)];
  }).sort((a, b) => a[0] - b[0])[0];
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not CHROMIUM or not CHROMEDRIVER:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (extra test)")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1400,1000",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


class Browser:
    """A page as somebody sees it."""

    def __init__(self, driver: Any, page: Path):
        self.driver = driver
        driver.get_log("browser"), driver.get_log("performance")  # what earlier pages said
        driver.get(page.as_uri())

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of the elements that are displayed."""
        script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility())"
        return self.driver.execute_script(script + ".map((e) => e.textContent)", selector)

    def press(self, selector: str, *keys: str) -> None:
        self.find(selector).send_keys(*keys)

    @property
    def shown(self) -> list[int]:
        """Numbers of the line "Shown: ... candidates in ... rows"."""
        return [int(number) for number in re.findall(r"\d+", self.find("#shown").text)]

    @property
    def cards(self) -> int:
        """Documents that are displayed, positives of the rows not counted."""
        return len(self.texts("article figure")) - len(self.texts("article"))


VERDICTS = ("CORRECT", "WRONG", "CANNOT_ANSWER", "UNKNOWN")


@pytest.fixture
def judged(chromium: Any, colour_set: Path) -> tuple[Browser, list[dict], list[list[dict]]]:
    """Twelve rows with five candidates, the first three judged; the third of every row is missing."""
    rows, reviews = [], []
    for number, name in enumerate(COLOURS):
        others = [f"c{(number + k) % 12:02d}.png" for k in range(1, 5)]
        entries = candidates(*others[:2], "gone.png", *others[2:])
        for entry in entries:
            entry["score"] = round(entry["score"] - number / 100, 3)
        verdicts = [VERDICTS[number % 4], VERDICTS[number % 3], "MISSING"]
        rows.append({"query": f"page in {name}", "chunk_path": f"c{number:02d}.png", "retrieve_top20": entries})
        reviews.append([review(place, verdict, f"says {verdict}") for place, verdict in enumerate(verdicts)])
    rows[0]["query"] = HOSTILE[:-1]
    return Browser(chromium, write_page(colour_set, rows, reviews, num_rows=500)), rows, reviews


def counts_at(threshold: float, rows: list[dict], reviews: list[list[dict]]) -> tuple[int, int, int]:
    """Returns candidates, judged ones and false negatives at or above a threshold."""
    verdicts = [
        {found["position"]: found["verdict"] for found in row_reviews}.get(place)
        for row, row_reviews in zip(rows, reviews, strict=True)
        for place, entry in enumerate(row["retrieve_top20"])
        if entry["score"] >= threshold
    ]
    judged = [verdict for verdict in verdicts if verdict in VERDICTS[:3]]
    return len(verdicts), len(judged), judged.count("CORRECT")


def test_slider_moves_the_shown_candidates_and_the_estimate(judged):
    browser, rows, reviews = judged
    assert browser.shown == [60, 60, 12, 12] and browser.cards == 60
    seen = []
    for keys in ([], ["\ue014"] * 40, ["\ue00e"] * 2, ["\ue010"]):  # right, page up, end
        browser.press("#threshold", *keys)
        threshold = float(browser.find("#threshold-value").text)
        num_candidates, num_judged, num_false = counts_at(threshold, rows, reviews)
        cells = browser.texts("#above td")
        assert cells[:4] == [
            str(num_candidates),
            str(num_judged),
            str(num_false),
            f"{100 * num_false / num_judged:.1f} %",
        ]
        below = [int(text) for text in browser.texts("#below td")[:3]]
        assert below == [
            a - b for a, b in zip(counts_at(-1, rows, reviews), (num_candidates, num_judged, num_false), strict=True)
        ]
        assert browser.shown[0] == browser.cards == num_candidates
        seen.append((threshold, num_candidates))
    assert len(set(seen)) == 4 and seen[0][1] == 60 and seen[-1] == (0.9, 1) and browser.shown[2] == 1


def test_verdict_filter_hides_the_right_cards(judged):
    browser, _, reviews = judged
    for verdict in ("CORRECT", "MISSING"):
        browser.press(f"#verdicts input[value='{verdict}']", " ")
    number = sum(found["verdict"] in ("CORRECT", "MISSING") for row in reviews for found in row)
    assert browser.shown[0] == browser.cards == number
    badges = set(browser.texts("article .badge")) - {"positive", "dropped"}
    assert badges == {"CORRECT", "MISSING"}
    browser.press("#verdicts input[value='MISSING']", " ")
    rows_left = sum(any(found["verdict"] == "CORRECT" for found in row) for row in reviews)
    assert browser.shown[2] == len(browser.texts("article")) == rows_left < 12
    browser.press("#uses input[value='dropped']", " ")
    assert browser.shown[0] == browser.cards == number - 12
    browser.find("#reset").click()
    assert browser.shown == [60, 60, 12, 12] and browser.cards == 60


def test_search_finds_queries_answers_and_paths(judged):
    browser, _, _ = judged
    for text, queries in (
        ("IN MAGENTA", ["page in magenta"]),
        ("c07.png", None),
        ("says unknown", None),
        ("nowhere", []),
    ):
        browser.find("#search").clear()
        browser.press("#search", text)
        found = browser.texts("article h2")
        assert len(found) == browser.shown[2]
        assert found == queries if queries is not None else 0 < len(found) < 12


def test_page_shows_texts_as_texts_and_what_has_no_picture(judged):
    browser, _, _ = judged
    assert browser.driver.title == browser.find("h1").text == "rows.jsonl"
    assert '</script><script>document.title = "broken"</script>' in browser.texts("article h2")[0]
    assert "The first 12 of 500 rows" in browser.find("#subtitle").text
    assert set(browser.texts(".problem")) == {"No picture: No such file or directory"}
    widths = browser.driver.execute_script("return [...document.images].map((image) => image.naturalWidth)")
    assert len(widths) == 12 * 5 and set(widths) == {64}


def test_every_control_is_reached_by_the_keyboard(judged):
    browser, _, _ = judged
    reached = []
    for _ in range(20):
        browser.driver.switch_to.active_element.send_keys("\ue004")  # tab
        focused = browser.driver.switch_to.active_element
        reached.append(focused.get_attribute("id") or focused.get_attribute("value") or focused.tag_name)
    verdicts = ["CANNOT_ANSWER", "CORRECT", "MISSING", "UNKNOWN", "WRONG", "not judged"]
    assert reached[:11] == ["threshold", "search", *verdicts, "dropped", "not used", "reset"]
    assert reached[11] == "a"  # the picture of the first positive


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_ground_in_light_and_dark(judged, scheme):
    browser, _, _ = judged
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    ratio, where = browser.driver.execute_script(CONTRAST)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert ratio >= 4.5, where


def test_page_without_verdicts_says_that_nothing_can_be_estimated(chromium: Any, colour_set: Path):
    rows = [{"query": "red", "chunk_path": "c00.png", "neg_chunk_paths": ["c02.png"],
             "retrieve_top20": candidates("c01.png", "c02.png", "c03.png")}]  # fmt: skip
    browser = Browser(chromium, write_page(colour_set, rows))
    assert "no false-negative rate can be estimated" in browser.find("#subtitle").text
    assert browser.texts("thead th") == ["Score", "Candidates"] and not browser.find("#verdicts").is_displayed()
    browser.press("#threshold", "\ue010")
    assert browser.texts("#above td") == ["1"] and browser.shown == [1, 3, 1, 1]
    browser.press("#uses input[value='hard negative']", " ")
    assert browser.shown == [0, 3, 0, 1]


def test_rows_without_any_score_have_no_threshold(chromium: Any, colour_set: Path):
    rows = [
        {"query": "red", "chunk_path": "c00.png", "retrieve_top20": [{"path": "c01.png"}]},
        {"query": "blue", "chunk_path": "c02.png"},
    ]
    browser = Browser(chromium, write_page(colour_set, rows))
    assert not browser.find("#threshold").is_enabled() and not browser.find("table").is_displayed()
    assert browser.shown == [1, 1, 2, 2] and len(browser.texts("article")) == 2


def test_page_makes_no_request_and_no_complaint(judged):
    browser, _, _ = judged
    browser.press("#threshold", *["\ue014"] * 5)
    browser.press("#search", "page")
    assert browser.driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    # The browser's own start page, chrome://..., may still be loading when the log begins.
    urls = {params["request"]["url"] for params in sent if not params["documentURL"].startswith("chrome:")}
    assert {url.partition(":")[0] for url in urls} == {"file", "data"}
    assert [url for url in urls if url.startswith("file:")] == [browser.driver.current_url]
