"""The page in headless Chromium: the gateway is real, the server behind it answers as a test tells it, and what the
engine does is written by the test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from playwright.sync_api import Browser, Page, expect

from fakes.gateway_page import (
    PATIENCE_MS,
    PHONE,
    as_events,
    gateway_on_a_port,
    page_of,
    running_row,
    runs_over,
    snapshot,
    tree_node,
    waiting_row,
)
from fakes.inference_server import InferenceServer, aborts, pieces, then_waits
from load.browser import browser

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

HOSTILE = "<img src=x onerror=document.title='hit'><script>document.title='hit'</script>"
MARKDOWN = f"""# Title

Some **bold**, `code` and [a link](https://example.org/x). {HOSTILE} &lt;b&gt;

{HOSTILE}

[script](javascript:document.title='hit') ![image](https://example.org/x.png)

- one
- two

```python {HOSTILE}
print("{HOSTILE}")
```

| a | b |
|---|--:|
| {HOSTILE} | 2 |
"""


FOCUS = """() => {
    const at = document.activeElement;
    if (at === document.body) return ["", false];
    return [at.id || at.textContent, at.getClientRects().length > 0 && getComputedStyle(at).outlineStyle !== "none"];
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


@pytest.fixture
def url(server: InferenceServer) -> Iterator[str]:
    with gateway_on_a_port(server.url) as url:
        yield url


@pytest.fixture
def page(chromium: Browser, url: str) -> Iterator[Page]:
    """Opened, and without a fault at the end."""
    with page_of(chromium) as (page, faults):
        page.goto(url)
        yield page
        assert faults == []


def ask(page: Page, text: str) -> None:
    """With the keyboard alone; the answer is then on its way or there."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, answers: int = 1) -> None:
    expect(page.locator(".answer:not(.streams)")).to_have_count(answers)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def watch(page: Page, *snapshots: dict[str, Any]) -> None:
    """Shows the engine, which tells these one after another."""
    page.route(
        "**/engine/stream", lambda route: route.fulfill(content_type="text/event-stream", body=as_events(*snapshots))
    )
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("#engine-body")).to_be_visible()


def test_an_answer_is_markdown_and_its_html_stays_text(page: Page, server: InferenceServer) -> None:
    server.script = pieces(*(MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)), reason="stop")
    ask(page, HOSTILE)
    answered(page)
    answer = page.locator(".answer .markdown")
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("ul > li")).to_have_text(["one", "two"])
    expect(answer.locator("figure pre")).to_have_text(f'print("{HOSTILE}")')
    expect(answer.locator("td").first).to_have_text(HOSTILE)
    expect(answer.locator("p").nth(0)).to_have_text(f"Some bold, code and a link. {HOSTILE} <b>")
    expect(answer.locator("p").nth(1)).to_have_text(HOSTILE)
    expect(page.locator(".question")).to_have_text(HOSTILE)
    links = answer.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == [
        "https://example.org/x",
        "https://example.org/x.png",
    ]
    assert [link.get_attribute("rel") for link in links.all()] == ["noopener noreferrer nofollow"] * 2
    assert page.locator("#turns").locator("img, script, iframe, style").count() == 0
    assert page.title() == "minisgl"


def test_an_error_and_a_names_html_stay_text(chromium: Browser, server: InferenceServer) -> None:
    server.script = aborts(grpc.StatusCode.INVALID_ARGUMENT, f"messages: {HOSTILE}")
    with gateway_on_a_port(server.url, served_name=HOSTILE) as url, page_of(chromium) as (page, _):
        page.goto(url)
        expect(page.locator("#model")).to_have_text(HOSTILE)
        ask(page, "Hi")
        expect(page.get_by_role("alert").filter(has_text="messages:")).to_have_text(f"messages: {HOSTILE}")
        assert page.locator("img").count() == 0 and page.title() == "minisgl"


def test_an_answer_is_stopped_and_its_request_is_cancelled(page: Page, server: InferenceServer) -> None:
    server.script = then_waits("Par")
    ask(page, "Where?")
    expect(page.locator(".answer.streams .markdown")).to_have_text("Par")
    expect(page.locator("#turns")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    answered(page)
    assert server.cancelled.acquire(timeout=PATIENCE_MS / 1e3)
    expect(page.locator(".answer .facts")).to_contain_text("stopped")
    ask(page, "And?")
    expect(page.locator(".answer.streams .markdown")).to_have_text("Par")
    page.keyboard.press("Escape")
    answered(page, 2)
    assert server.cancelled.acquire(timeout=PATIENCE_MS / 1e3)


def test_a_chat_sends_what_was_said_and_only_the_fields_that_were_filled(page: Page, server: InferenceServer) -> None:
    server.script = pieces("Paris", reason="stop")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Stop strings").fill("a\n b")
    ask(page, "Where?")
    answered(page)
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "And?")
    answered(page, 2)
    assert caught.value.post_data_json == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "And?"},
        ],
        "temperature": 0.5,
        "stop": ["a", " b"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Reset").click()
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "Where?")
    answered(page)
    sent = caught.value.post_data_json
    assert sent and sent["messages"] == [{"role": "user", "content": "Where?"}] and len(sent) == 3


def test_a_refused_field_is_pointed_at(chromium: Browser, server: InferenceServer, url: str) -> None:
    server.script = aborts(grpc.StatusCode.INVALID_ARGUMENT, "top_p: must be a number in (0, 1], got 7")
    with page_of(chromium) as (page, _):
        page.goto(url)
        page.get_by_label("Top p").fill("7")
        page.get_by_role("button", name="Close").click()
        ask(page, "Hi")
        expect(page.get_by_label("Top p")).to_be_focused()
        expect(page.get_by_label("Top p")).to_have_attribute("aria-invalid", "true")
        expect(page.locator(".answer [role=alert]")).to_have_text("top_p: must be a number in (0, 1], got 7")


def test_an_answer_that_breaks_off_keeps_its_words_and_is_asked_again(page: Page, server: InferenceServer) -> None:
    server.script = aborts(grpc.StatusCode.UNAVAILABLE, "the engine stopped unexpectedly", "Par")
    ask(page, "Where?")
    expect(page.locator(".answer [role=alert]")).to_have_text("the engine stopped unexpectedly")
    expect(page.locator(".answer .markdown")).to_have_text("Par")
    server.script = pieces("Paris", reason="length")
    with page.expect_request("**/v1/chat/completions") as caught:
        page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".answer .markdown")).to_have_text("Paris")
    expect(page.locator(".answer .facts")).to_contain_text("cut at its length")
    assert caught.value.post_data_json["messages"] == [{"role": "user", "content": "Where?"}]


def test_a_code_is_copied(chromium: Browser, server: InferenceServer, url: str) -> None:
    server.script = pieces("```py\nprint(1)\n```", reason="stop")
    with page_of(chromium, permissions=["clipboard-read", "clipboard-write"]) as (page, faults):
        page.goto(url)
        ask(page, "Code!")
        answered(page)
        page.get_by_role("button", name="Copy the code (py)").click()
        expect(page.locator("figure button")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == "print(1)" and faults == []


def test_a_key_is_asked_for_when_the_server_needs_one_and_is_kept_in_the_tab_alone(
    chromium: Browser, server: InferenceServer
) -> None:
    server.script = pieces("Paris", reason="stop")
    with gateway_on_a_port(server.url, api_keys=("right-key",)) as url, page_of(chromium) as (page, _):
        page.goto(url)
        for key, problem in (("two words", "printable ASCII"), ("wrong-key", "does not know this key")):
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
            expect(page.locator("#key-problem")).to_contain_text(problem)
        page.get_by_label("Key", exact=True).fill("right-key")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("minisgl")
        expect(page.get_by_role("dialog")).to_be_hidden()
        ask(page, "Where?")
        answered(page)
        kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert "right-key" in kept[0] and "key" not in kept[1] and kept[2] == ""
        page.reload()
        expect(page.locator("#model")).to_have_text("minisgl")


def test_nothing_runs_over_the_edge_of_a_phone(chromium: Browser, server: InferenceServer, url: str) -> None:
    server.script = pieces(
        MARKDOWN + "\n" + "long" * 60 + "\n\n`" + "x" * 200 + "`\n\n| a |\n|---|\n| " + "y" * 90 + " |"
    )
    tree = [tree_node(1, None, 640, 2), *(tree_node(id, 1, 16 * id) for id in range(2, 60))]
    with page_of(chromium, viewport=PHONE, has_touch=True, is_mobile=True) as (page, faults):
        page.goto(url)
        expect(page.locator("#model")).not_to_be_empty()
        assert runs_over(page) == 0
        page.get_by_label("Message", exact=True).fill("word" * 80)
        page.get_by_role("button", name="Send").tap()
        answered(page)
        assert runs_over(page) == 0
        page.get_by_role("button", name="Sampling").tap()
        expect(page.get_by_label("Temperature")).to_be_in_viewport()
        assert runs_over(page) == 0
        page.get_by_role("button", name="Close").tap()
        rows = [running_row(str(10**6 + id), 4000) for id in range(5)]
        watch(page, snapshot(rows, [waiting_row("2000000")], tree, tokens_per_s=123456.7))
        assert runs_over(page) == 0 and faults == []


def test_the_keyboard_reaches_all_and_shows_where_it_is(page: Page, server: InferenceServer) -> None:
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    names = []
    for _ in range(32):  # round, from the message to itself
        page.keyboard.press("Tab")
        name, shows = page.evaluate(FOCUS)
        if name == "prompt":
            break
        assert shows or name == "", f"{name} does not show that it has the focus"
        names.append(name)
    first = names.index("skip")
    names = [*names[first:], "prompt", *names[:first]]
    order = ["skip", "to-chat", "to-engine", "theme", "prompt", "sampling-button", "new-chat", "send", "sampling-reset"]
    assert [name for name in names if name in order] == order


def test_the_theme_is_the_systems_until_one_is_chosen(chromium: Browser, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with page_of(chromium, color_scheme="dark") as (page, faults):
        page.goto(url)
        dark = page.evaluate(ground)
        button = page.locator("#theme")
        expect(button).to_have_attribute("aria-label", "Theme: as the system")
        button.click()
        expect(button).to_have_attribute("aria-label", "Theme: light")
        light = page.evaluate(ground)
        page.reload()
        assert page.evaluate(ground) == light != dark
        button.click()
        expect(button).to_have_attribute("aria-label", "Theme: dark")
        assert page.evaluate(ground) == dark
        page.emulate_media(color_scheme="light")
        assert page.evaluate(ground) == dark
        button.click()
        assert page.evaluate(ground) == light and faults == []


def test_the_engine_view_tells_what_the_engine_tells(page: Page) -> None:
    tree = [tree_node(1, None, 64, 2, HOSTILE), tree_node(2, 1, 32, 1), tree_node(3, 1, 16)]
    told = snapshot([running_row("7", 20)], [waiting_row("8")], tree, left_out={"running": 2, "waiting": 0, "tree": 4})
    watch(page, told)
    for title, value in {
        "Tokens a second": "12.3",
        "Running rows": "3",
        "Time to first token": "13 ms p50p90 40 ms · p99 –",
        "Cache hits": "75 % 30 of 40 tokens",
        "Retractions": "6 5 pages evicted",
    }.items():
        expect(page.locator(".tile").filter(has_text=title)).to_contain_text(value)
    expect(page.locator("#pages-legend li")).to_have_text(
        ["tree, in use 3", "tree, reusable 2", "of one request 1", "quarantine 0", "free 4"]
    )
    expect(page.locator("#running .row")).to_have_text("7decode4820 / 6441.0 s")
    expect(page.locator("#running .kind")).to_have_text("Running 3, 2 of them not shown")
    expect(page.locator("#waiting .row")).to_have_text("8waiting481.0 s")
    expect(page.locator("#tree-note")).to_have_text("7 nodes, 112 tokens, 1 shared; 4 not drawn")
    assert [block.get_attribute("class") for block in page.locator("#tree g").all()] == [
        "locked shared",
        "locked",
        "recent",
    ]
    page.get_by_text("As a table").click()
    expect(page.locator("#tree-nodes tr").nth(0)).to_contain_text(HOSTILE)
    expect(page.locator("#tree-nodes tr").nth(2)).to_contain_text("not shown")
    assert page.locator("#engine img").count() == 0 and page.title() == "Engine · minisgl"


def test_rows_move_and_blocks_grow_in_place(page: Page) -> None:
    watch(page, snapshot([running_row("7")], [waiting_row("8")], [tree_node(1, None, 32, 1)]))
    expect(page.locator("#waiting .row")).to_have_count(1)
    mark = "for (const node of document.querySelectorAll('.row, #tree g')) node.dataset.old = 'yes'"
    page.evaluate(mark)
    high = page.locator("#tree rect").first.bounding_box()
    more = [tree_node(1, None, 32, 2), tree_node(2, 1), tree_node(3, 1)]
    later = as_events(snapshot([running_row("8", 5), running_row("9")], tree=more))
    page.unroute("**/engine/stream")
    page.route("**/engine/stream", lambda route: route.fulfill(content_type="text/event-stream", body=later))
    expect(page.locator("#running .row")).to_have_count(2)
    expect(page.locator("#waiting .none")).to_be_visible()
    old = "[...document.querySelectorAll('.row')].map((row) => [row.dataset.id, row.dataset.old ?? 'no'])"
    assert page.evaluate(old) == [["8", "yes"], ["9", "no"]]
    expect(page.locator("#tree g")).to_have_count(3)
    expect(page.locator("#tree g").first).to_have_attribute("data-old", "yes")
    now = page.locator("#tree rect").first.bounding_box()
    assert high and now and now["height"] > high["height"] and now["width"] < high["width"]


def test_a_server_that_tells_nothing_is_no_blank_page(chromium: Browser, url: str) -> None:
    gone = {"state": "unreachable", "error": {"message": "the server can not be reached"}}
    with page_of(chromium) as (page, _):
        page.goto(url)
        watch(page, snapshot(), gone)
        expect(page.get_by_role("status").filter(has_text="No news")).to_contain_text("the server can not be reached")
        expect(page.locator("#engine-state")).to_have_text("unreachable")
        expect(page.locator("#running .none")).to_have_text("Nothing runs.")
    with page_of(chromium) as (page, _):
        body = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": "unknown_url"}})
        page.route("**/engine/stream", lambda route: route.fulfill(status=404, body=body))
        page.goto(f"{url}#engine")
        expect(page.locator("#engine-notice")).to_have_text("This server does not show its engine.")


def test_reasoning_is_apart_from_the_answer_and_is_not_sent_back(page: Page) -> None:
    thought = {"delta": {"reasoning_content": f"First {HOSTILE}"}, "finish_reason": None}
    word = {"delta": {"content": "Paris"}, "finish_reason": "stop"}
    body = as_events({"choices": [thought]}, {"choices": [word]}) + "data: [DONE]\n\n"
    answer = {"content_type": "text/event-stream", "body": body}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    ask(page, "Where?")
    answered(page)
    expect(page.locator(".answer .markdown")).to_have_text("Paris")
    expect(page.locator(".thought")).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(page.locator(".thought")).to_have_text(f"First {HOSTILE}")
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "And?")
    assert caught.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Paris"}
    answered(page, 2)


def test_a_text_that_markdown_can_not_take_is_shown_as_it_is(page: Page, server: InferenceServer) -> None:
    deep = ">" * 3000 + " deep"
    server.script = pieces("Well:\n\n", deep, reason="stop")
    ask(page, "Deep?")
    answered(page)
    expect(page.locator(".answer .markdown > p.raw")).to_contain_text(deep)
