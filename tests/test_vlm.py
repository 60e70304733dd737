"""The judge's client: verdicts, replies of every shape, what is sent, and what becomes of each kind of failure."""

from __future__ import annotations

import asyncio
import json
import socket
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from contrastors.images import BadImage
from contrastors.verdicts import CANNOT_ANSWER, CORRECT, UNKNOWN, WRONG, is_refusal, parse_verdict, strip_thinking
from contrastors.vlm import REFUSED, Judge, Judgement, JudgeStopped, RequestFailed, is_loopback, retry_delay
from contrastors.vlm_messages import (
    Prompts,
    encode_image,
    estimate_cost,
    estimate_image_tokens,
    fill_prompt,
    read_prompts,
    read_reply,
)
from tests.judge_server import JudgeServer, Played, Request, chat, error

HARMONY = "<|channel|>analysis<|message|>correct?<|end|><|start|>assistant<|channel|>final<|message|>WRONG"
FORMS = {
    CORRECT: [
        "CORRECT", "correct.", "Correct!", " \n CORRECT\n", "**CORRECT**", "`CORRECT`", "> CORRECT", "- CORRECT",
        "1. CORRECT", "(CORRECT)", '"CORRECT"', "ＣＯＲＲＥＣＴ", "\\boxed{CORRECT}", "<verdict>CORRECT</verdict>",
        "Correct answer", "right", "True", "Yes", "Yes.", "✅", "The answer is correct.", "The answer is accurate",
        "It's correct", "The answer was marked as correct", "This is not wrong.", "There is nothing wrong.",
        "Correct, the page shows it.", "CORRECT - the table lists 42.", "CORRECT: the page shows it",
        "Verdict: CORRECT", "**Verdict:** CORRECT", "Answer: CORRECT", "Option: CORRECT",
        "The page says 12, which seems off.\n\nFinal answer: CORRECT",
        '{"verdict": "CORRECT"}', '```json\n{"verdict": "CORRECT"}\n```', "{'verdict': 'CORRECT'}",
        'Here it is: {"verdict": "CORRECT"} as asked', '{"verdict": "CORRECT"', '{"is_correct": true}',
        "<thinking>wrong wrong</thinking>CORRECT", "richtig", "korrekt", "correcto", "corretto",
        "正确", "正しい", "правильно", "The answer given is correct.", "CORRECT. The page lists 42.",
        "Yes, the answer is correct, as the page lists 42.", "The page says 12.\nCORRECT", "Verdict:\nCORRECT",
        'The answer "1912" is correct.', "The answer 42 is correct.", "The given answer of 42 is correct.",
        "The answer (42) is correct", "Yes, the answer 1912 is correct because the table shows it.", '"CORRECT"',
    ],
    WRONG: [
        "INCORRECT", "incorrect.", "**Incorrect**", "ＩＮＣＯＲＲＥＣＴ", "WRONG", "wrong!", "[WRONG]", "- WRONG",
        "FALSE", "No.", "❌",
        "Wrong answer.", "Not correct", "not correct.", "Not CORRECT", "Not accurate", "far from correct",
        "The answer is not correct.", "The answer isn't correct.", "The answer isn’t correct", "That's wrong",
        "It is not entirely correct.", "The answer is incorrect.", "INCORRECT. The correct answer is Paris.",
        "The given answer is wrong because the page shows 1912.", "Verdict: INCORRECT", "Verdict: not correct",
        "The correct answer is Paris, so the answer is wrong.", "**Verdict:** WRONG", "My verdict is WRONG.",
        "The answer is wrong, and the year cannot be determined.", "A: INCORRECT", "<verdict>INCORRECT</verdict>",
        "\\boxed{\\text{INCORRECT}}", "Is the answer correct? No, it is incorrect.", '{"verdict":"INCORRECT"}',
        '{"verdict": "wrong", "reason": "the correct answer is 3"}', '{"verdict": "not correct"}',
        '{"result": {"verdict": "WRONG"}}', '{"correct": false}', "<think>correct? no</think>INCORRECT",
        "CORRECT it may be</think>\nWRONG", "◁think▷correct◁/think▷WRONG", "[THINK]correct[/THINK]WRONG", HARMONY,
        "falsch", "niet correct", "incorrecto", "不正确", "неправильно", "NOT\nCORRECT", "Verdict: NOT\nCORRECT",
        "1913 is correct. The answer is wrong.", "The page does not show 1912, so the answer is wrong.",
        "WRONG: the page shows 1912", "The stated year is wrong.", "Is it correct? Incorrect.",
    ],
    CANNOT_ANSWER: [
        "CANNOT_ANSWER", "cannot answer", "Can't answer.", "CANNOT-ANSWER", "unanswerable", "not answerable",
        "Verdict - CANNOT_ANSWER", '{"Verdict": "Cannot answer"}', "Unable to answer.",
        "The page cannot answer the query.",
        "There is not enough information.", "The page does not contain the information, so it cannot be answered.",
    ],
}  # fmt: skip
UNKNOWN_FORMS = {
    "empty": [
        "", "   \n", "<think>is it correct? CORRECT", "<think>correct</think>",
        "<|channel|>analysis<|message|>CORRECT",
    ],
    "refusal": [
        "I'm sorry, but I can't assist with that.", "I cannot view images.", "I'm sorry, I can't answer that.",
        "As an AI I do not judge.",
    ],
    "unparsable": [
        "CORRECT or INCORRECT?", "CORRECT, WRONG or CANNOT_ANSWER", "CORRECT\nINCORRECT", "partially correct",
        "mostly correct", "Partly correct, partly wrong", "The answer would be correct if the year matched.",
        "The answer is correct. No wait, it is incorrect.", "The answer is neither correct nor wrong",
        "not unanswerable",
        "The answer is correct; it cannot be wrong.", "I don't think the answer is correct.",
        "I doubt that it is correct",
        "I cannot say that this is correct", "It is false that the answer is correct", "Nobody would say it is correct",
        "The claim that the answer is correct is wrong", "Is the answer correct? Yes.", "Correct? No.", "Correct: no",
        "The correct year is 1912.", "incorrectly", "correctness", "in-correct", "IN CORRECT", "UNCORRECT", "maybe",
        "42", "correct=false", "Ce n'est guère correct.", "Ce n'est pas correct.", "nicht korrekt", "答案不正确",
        '{"verdict": null}', '{"verdict": "CORR', '{"verdict": "CORRECT"}{"verdict": "WRONG"}',
        '{"verdict": {"type": "string", "enum": ["CORRECT", "WRONG"]}}', "None of this is correct",
        "The answer fails to be correct", "It is correct that the page does not contain the answer.",
        "The answer is correct but it does not answer the query.", "CORRECT. It does not answer the query.",
        "Verdict: correct, but it does not answer the query", '{"verdict": "correct, but for another year"}',
        "The answer is correct for another year", "correct: 1913, given: 1912", "Correct = 1913", "Correct - 1913",
        "Correct: False", "The correct answer: True", "1913 is correct.", "Correct it to 1913.", "wrong: no",
        "To be correct, it had to be 1913", "Incorrectly marked... CORRECT", "Incorrectly marked. CORRECT",
        "Correct... not.", "No\nCORRECT", "None of this is wrong", "The year is not wrong", "I doubt it is wrong",
        'The page shows a box labelled "CORRECT".', 'The word "correct" appears on it.', "It says 'correct' in green.",
        "The answer that nobody gave is correct.", "The statement that the answer is wrong is correct.",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("verdict", "text"), [(verdict, text) for verdict, texts in FORMS.items() for text in texts])
def test_verdict_is_read_by_meaning(verdict: str, text: str):
    assert parse_verdict(text) == (verdict, "")


@pytest.mark.parametrize(
    ("reason", "text"), [(reason, text) for reason, texts in UNKNOWN_FORMS.items() for text in texts]
)
def test_anything_else_is_unknown_with_its_reason(reason: str, text: str):
    assert parse_verdict(text) == (UNKNOWN, reason)


REFUSALS = [
    "I cannot view images.", "I'm sorry, but I can't view the image you provided.", "I am not able to see the page.",
    "I'm unable to view or analyze images directly.", "I don't have access to the image.", "No image was provided.",
    "It seems no image was attached. Please send it.", "No image has been provided, so I cannot answer.",
    "As an AI language model, I cannot see pictures.", "I am an AI model and look at nothing.",
    "I can't assist with that.", "I cannot identify people in images.", "This violates our usage policies.",
]  # fmt: skip
ANSWERS = [
    "I cannot see any information about the price on this page.", "I cannot see the image of the author on this page.",
    "I cannot identify the author from this page.", "I am unable to identify the revenue in this image.",
    "I cannot provide an answer based on this page.", "The page describes Anthropic as an AI safety company.",
    "No image is provided for section 3, but the table gives 42.", "Guests do not have access to the pool.",
    "I do not see the page number.", "Returns are against our policy after 30 days.", "CANNOT_ANSWER", "42", "",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [(t, True) for t in REFUSALS] + [(t, False) for t in ANSWERS])
def test_a_refusal_cannot_look_at_pictures_while_a_page_may_lack_the_answer(text: str, expected: bool):
    assert is_refusal(text) is expected


@given(st.text(), st.text(), st.sampled_from(["INCORRECT", "incorrect", "Incorrect"]))
def test_incorrect_alone_never_counts_as_correct(before: str, after: str, word: str):
    assert parse_verdict(f"{before} {word} {after}")[0] != CORRECT


@given(st.text(), st.sampled_from(["CORRECT", "WRONG", "CANNOT_ANSWER", "The answer is correct."]))
def test_thinking_is_never_scanned_for_a_verdict(thought: str, verdict: str):
    assert parse_verdict(f"<think>{thought} {verdict}")[0] in (UNKNOWN,) or "</think" in thought.casefold()
    assert strip_thinking(f"<think>{verdict}</think>ok") == "ok"


PLAIN = st.text() | st.none() | st.booleans() | st.integers()
KEYS = st.sampled_from(["verdict", "correct", "result", "x"])


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
def test_parser_takes_any_json(value: Any):
    assert parse_verdict(json.dumps(value))[0] in (CORRECT, WRONG, CANNOT_ANSWER, UNKNOWN)


# Replies


@pytest.mark.parametrize(
    ("body", "text", "reason"),
    [
        (chat("yes").body, "yes", ""),
        (chat(None, "length", reasoning="correct, I think").body, "", "length"),
        (chat(None, "length", reasoning_content="correct").body, "", "length"),
        (chat("The answ", "length").body, "The answ", "length"),
        (chat(None).body, "", "empty"),
        (chat("").body, "", "empty"),
        (chat(None, "content_filter").body, "", "filter"),
        (chat(None, refusal="I will not").body, "", "refusal"),
        (chat("<think>hm").body, "", "empty"),
        (chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image"}]).body, "ab", ""),
        ({"choices": []}, "", "empty"),
        ({"choices": None}, "", "empty"),
        ({"choices": [{"message": None}]}, "", "empty"),
    ],
)
def test_reply_of_every_shape_has_its_text_or_its_reason(body: Any, text: str, reason: str):
    reply = read_reply(body)
    assert (reply.text, reply.reason) == (text, reason)


@pytest.mark.parametrize("body", [{}, [], None, "hello", {"error": {"message": "overloaded"}}])
def test_body_that_is_no_completion_is_an_error(body: Any):
    with pytest.raises(ValueError, match="no chat completion"):
        read_reply(body)


# Prompts


def test_control_markers_of_a_query_become_plain_text():
    text = fill_prompt(
        "Query: {query} / {answer}", query="what does <|image_pad|> mean, {answer}?", answer="an <image> slot"
    )
    assert text == "Query: what does < |image_pad| > mean, {answer}? / an < image > slot"


def test_prompt_file_replaces_the_templates_and_changes_the_hash(tmp_path: Path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"answer": "Read: {query}"}))
    prompts = read_prompts(str(file))
    assert prompts.answer == "Read: {query}" and prompts.judge == Prompts().judge and prompts.hash != Prompts().hash


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON object"),
        ('{"system": "x"}', "system"),
        ('{"answer": "x"}', "{query}"),
        ('{"judge": "{query}"}', "{answer}"),
    ],
)
def test_prompt_file_that_cannot_work_is_refused(tmp_path: Path, content: str, message: str):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match="--prompt-file") as caught:
        read_prompts(str(tmp_path / "p.json"))
    assert message in str(caught.value)


# Pictures


def picture(**save: Any) -> bytes:
    buffer = BytesIO()
    image = save.pop("image", None) or Image.new("RGB", (64, 64), (200, 0, 0))
    image.save(buffer, **({"format": "PNG"} | save))
    return buffer.getvalue()


async def ask(url: str, data: bytes, query: str = "what is it", **options: Any) -> Judgement:
    judge = Judge("m", "j", Prompts(), **({"base_url": url, "timeout_s": 10} | options))
    try:
        await judge.check()
        return await judge.judge(query, data)
    finally:
        await judge.close()


def judged(server: JudgeServer | str, data: bytes, **options: Any) -> Judgement:
    return asyncio.run(ask(server if isinstance(server, str) else server.url, data, **options))


def accepts_named_type(request: Request) -> Played | str:
    kind = {b"\x89PN": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF": "image/gif", b"RIF": "image/webp"}
    good = kind.get(request.image_bytes[:3]) == request.media_type
    return "WRONG" if good else error(400, f"the bytes are not {request.media_type}")


def test_media_type_is_that_of_the_bytes_whatever_the_file_was():
    large = picture(image=Image.new("RGB", (1100, 1100)))
    files = [*(picture(format=kind) for kind in ("WEBP", "PNG", "JPEG", "BMP", "GIF")), large]
    with JudgeServer(accepts_named_type) as server:
        assert {judged(server, data).verdict for data in files} == {WRONG}
        assert [request.media_type for request in server.requests[::2]] == ["image/png"] * 5 + ["image/jpeg"]


def sent_image(data: bytes) -> Image.Image:
    with JudgeServer(lambda request: "CANNOT_ANSWER") as server:
        judged(server, data)
        return server.requests[0].image


def test_small_pictures_travel_without_loss():
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 255, (128, 128, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(sent_image(picture(image=noise))), np.asarray(noise))


def test_sixteen_bit_ramp_is_still_a_ramp_for_the_judge():
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    sent = np.asarray(sent_image(picture(image=Image.fromarray(ramp))))[0, :, 0].astype(int)
    assert (np.diff(sent) >= 0).all() and sent[0] == 0 and sent[-1] == 255 and len(set(sent)) > 60


def test_cmyk_is_sent_in_its_colour():
    sent = sent_image(picture(image=Image.new("RGB", (64, 64), (255, 0, 0)).convert("CMYK"), format="JPEG"))
    red, green, blue = sent.convert("RGB").getpixel((30, 30))
    assert sent.mode == "RGB" and red > 240 and green < 20 and blue < 20


def test_photo_is_sent_upright():
    upright = Image.new("RGB", (20, 40), "white")
    upright.paste((0, 0, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = picture(image=upright.transpose(Image.Transpose.ROTATE_90), format="JPEG", quality=95, exif=exif)
    sent = sent_image(lying)
    assert sent.size == (20, 40) == sent_image(picture(image=upright)).size
    assert sent.getpixel((10, 4))[0] < 60 and sent.getpixel((10, 36))[0] > 200


def test_transparency_is_sent_on_white():
    assert sent_image(picture(image=Image.new("RGBA", (32, 32), (0, 0, 0, 0)))).getpixel((5, 5)) == (255, 255, 255)


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (3, 3), (31, 639), (10, 2000)])
def test_strips_and_dots_are_sent_with_white_around_them(size: tuple[int, int]):
    sent = sent_image(picture(image=Image.new("RGB", size, (0, 0, 0))))
    assert min(sent.size) >= 16 and sent.getpixel((0, 0)) == (0, 0, 0)


def zero_png(side: int) -> bytes:
    def block(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", rows) + block(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_and_damaged_pictures_never_reach_the_judge():
    profile = picture(icc_profile=bytes(2_000_000))
    bombs = [zero_png(15000), profile, picture()[:90], b"", picture(image=Image.new("RGB", (1, 201)))]
    with JudgeServer(lambda request: "WRONG") as server:
        for data in bombs:
            with pytest.raises(BadImage):
                judged(server, data)
        assert server.num_calls == 0


def test_max_image_side_shrinks_in_proportion():
    with JudgeServer(lambda request: "CANNOT_ANSWER") as server:
        judged(server, picture(image=Image.new("RGB", (400, 200))), max_image_side=100)
        assert server.requests[0].image.size == (100, 50)
    assert encode_image(picture(image=Image.new("RGB", (40, 20))), max_side=100).side == 40


# Requests


def test_two_models_answer_and_judge():
    with JudgeServer(lambda request: '{"verdict": "CORRECT"}' if request.is_verdict else "a red page") as server:
        found = judged(server, picture(), query="which colour")
    answer, verdict = server.requests
    assert found == Judgement("a red page", CORRECT, "", 200, 10)
    assert (answer.model, answer.query, answer.is_verdict) == ("m", "which colour", False)
    assert (verdict.model, verdict.query, verdict.answer) == ("j", "which colour", "a red page")
    assert "response_format" in verdict.body and "response_format" not in answer.body
    assert answer.image.getpixel((0, 0)) == verdict.image.getpixel((0, 0)) == (200, 0, 0)


def test_answer_that_says_cannot_answer_needs_no_judge():
    with JudgeServer(lambda request: "CANNOT_ANSWER.") as server:
        assert judged(server, picture()).verdict == CANNOT_ANSWER
        assert server.num_calls == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (chat(None, "length", reasoning="CORRECT"), "length"),
        (chat(""), "empty"),
        (chat("<think>CORRECT"), "empty"),
        (Played({"choices": []}), "empty"),
        (chat(None, "content_filter"), "filter"),
        (chat("I'm sorry, but I can't help with that."), "refusal"),
        (chat("partly correct"), "unparsable"),
    ],
)
def test_unknown_is_asked_again_twice_and_keeps_its_reason(reply: Played, reason: str):
    with JudgeServer(lambda request: reply if request.is_verdict else "red") as server:
        found = judged(server, picture())
        assert (found.verdict, found.reason, server.num_calls) == (UNKNOWN, reason, 1 + 3)


def test_answer_that_never_comes_is_unknown_without_a_judge():
    with JudgeServer(lambda request: chat(None, "length")) as server:
        found = judged(server, picture())
        assert (found.verdict, found.reason, server.num_calls) == (UNKNOWN, "length", 3)


def test_what_the_page_lacks_reaches_the_judge():
    with JudgeServer(lambda r: "CANNOT_ANSWER" if r.is_verdict else "I cannot see any price on this page.") as server:
        assert judged(server, picture()).verdict == CANNOT_ANSWER
        assert server.num_calls == 2


def test_reask_that_helps_is_used():
    with JudgeServer(lambda request: ["red", "hm", '{"verdict": "WRONG"}'][request.number]) as server:
        assert judged(server, picture()).verdict == WRONG


def test_server_without_schema_is_asked_for_one_word():
    def reply(request: Request) -> Played | str:
        return error(400, "extra fields not permitted") if "response_format" in request.body else "WRONG"

    async def both() -> list[str]:
        judge = Judge("m", "j", Prompts(), base_url=server.url)
        found = [(await judge.judge("q", picture())).verdict for _ in range(2)]
        await judge.close()
        return found

    with JudgeServer(reply) as server:
        assert asyncio.run(both()) == [WRONG, WRONG]
        assert sum("response_format" in request.body for request in server.requests) == 1
        assert server.requests[2].image.size == (64, 64)


def test_parameter_that_the_model_refuses_by_name_is_left_out():
    def reply(request: Request) -> Played | str:
        for name, named in (("temperature", "temperature"), ("max_tokens", "max_completion_tokens")):
            if name in request.body:
                return error(400, f"Unsupported value: '{named}'")
        return "WRONG"

    with JudgeServer(reply) as server:
        assert judged(server, picture()).verdict == WRONG
        assert server.num_calls == 2 + 1 + 1


def test_retry_after_is_honoured():
    def reply(request: Request) -> Played | str:
        return error(429, "slow down", retry_after="1") if request.number < 2 else "CANNOT_ANSWER"

    with JudgeServer(reply) as server:
        assert judged(server, picture()).verdict == CANNOT_ANSWER
        first, second, third = server.times
    assert second - first >= 1 and third - second >= 1


def test_waiting_doubles_with_jitter_and_follows_the_server():
    for attempt in range(8):
        waits = {retry_delay(attempt, {}) for _ in range(20)}
        assert (
            all(0.25 * 2**attempt <= wait <= min(30, 0.5 * 2**attempt) for wait in waits if wait < 15)
            and len(waits) > 1
        )
    assert 7 <= retry_delay(0, {"retry-after": "7"}) <= 7.5
    assert retry_delay(0, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) <= 0.5
    assert retry_delay(0, {"retry-after": "99999"}) <= 301
    assert retry_delay(0, {"retry-after": "soon"}) <= 0.5


@pytest.mark.parametrize(
    "failure",
    [error(503), error(500), error(429), error(408), Played("{}", cut=True), Played(chat("WRONG").body, cut=True),
     Played({"error": "x"}), Played(chat("WRONG").body, delay_s=60)],
)  # fmt: skip
def test_failure_that_passes_is_asked_again(failure: Played):
    with JudgeServer(lambda request: failure if request.number == 0 else "CANNOT_ANSWER") as server:
        found = judged(server, picture(), timeout_s=2)
        assert (found.verdict, server.num_calls) == (CANNOT_ANSWER, 2)


def test_retries_end():
    with JudgeServer(lambda request: error(503, "busy")) as server:
        with pytest.raises(RequestFailed, match="3 tries failed, the last: 503 busy"):
            judged(server, picture(), max_retries=2)
        assert server.num_calls == 3


def test_refused_picture_is_shrunk_once_and_recorded():
    with JudgeServer(lambda request: error(400, "image too long")) as server:
        found = judged(server, picture())
        assert (found.verdict, found.reason) == (REFUSED, "400 image too long")
        assert [request.image.size for request in server.requests] == [(64, 64), (32, 32)]


def test_shrinking_that_helps_is_used():
    with JudgeServer(lambda r: "CANNOT_ANSWER" if r.image.width <= 32 else error(413, "too large")) as server:
        assert judged(server, picture()).verdict == CANNOT_ANSWER


@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        (error(401, "Incorrect API key provided: sk-secret-123"), ["401", "$OPENAI_API_KEY", "/v1/chat/completions"]),
        (error(403, "no"), ["403", "$OPENAI_API_KEY"]),
        (error(404, "the model does not exist"), ["404", "'m'", "/v1"]),
        (error(400, "Invalid model name passed in model=m"), ["Invalid model", "--model"]),
        (error(429, "no money", code="insufficient_quota"), ["no money", "--resume"]),
        (Played("<html>hello</html>"), ["--base-url", "/v1"]),
    ],
)
def test_error_that_no_retry_cures_stops_at_once_and_names_the_way_out(reply: Played, parts: list[str]):
    with JudgeServer(lambda request: reply) as server:
        with pytest.raises(JudgeStopped) as caught:
            judged(server, picture(), api_key="sk-secret-123")
        assert server.num_calls <= 3
    assert all(part in str(caught.value) for part in [*parts, server.url]) and "secret" not in str(caught.value)


def test_list_of_models_is_asked_first():
    with JudgeServer(lambda request: "WRONG", models=["m", "other"]) as server:
        with pytest.raises(JudgeStopped, match="no model 'j' .*--judge-model.*it serves m, other"):
            judged(server, picture())
        assert server.num_calls == 0
    with JudgeServer(lambda request: "WRONG", models=["org/m", "j:latest"]) as server:
        assert judged(server, picture()).verdict == WRONG


def test_full_route_as_base_url_is_explained():
    with JudgeServer(lambda request: "WRONG") as server:
        with pytest.raises(JudgeStopped, match="without the route"):
            judged(server, picture(), base_url=server.url + "/chat/completions")


def test_server_that_is_away_stops_the_run():
    with JudgeServer(lambda request: "WRONG") as server:
        url = server.url
    with pytest.raises(JudgeStopped, match="no answer from http://127.0.0.1.*start the server or mend --base-url"):
        judged(server, picture(), base_url=url)


def test_an_address_that_swallows_packets_stops_the_run():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        with socket.create_connection(listener.getsockname()):  # the queue is full: later ones get no answer at all
            url = "http://127.0.0.1:{1}/v1".format(*listener.getsockname())
            with pytest.raises(JudgeStopped, match="no answer from http://127.0.0.1.*mend --base-url"):
                judged(url, picture(), timeout_s=0.3, max_retries=1)


def test_a_server_too_busy_to_list_its_models_is_tried_by_the_first_request():
    with JudgeServer(lambda request: "CANNOT_ANSWER", models=["m", "j"], listing_delay_s=60) as server:
        assert judged(server, picture(), timeout_s=2).verdict == CANNOT_ANSWER
        assert server.num_listings == 1


async def ask_several(server: JudgeServer, num_pictures: int) -> int:
    """Returns how many pictures failed; three failures in a row stop everything."""
    judge = Judge("m", "m", Prompts(), base_url=server.url, max_retries=0, max_failures_in_a_row=3)
    num_failed = 0
    try:
        for _ in range(num_pictures):
            try:
                await judge.judge("q", picture())
            except RequestFailed:
                num_failed += 1
    finally:
        await judge.close()
    return num_failed


def test_many_failures_in_a_row_stop_the_run():
    with JudgeServer(lambda request: error(500)) as server:
        with pytest.raises(JudgeStopped, match="3 requests in a row failed"):
            asyncio.run(ask_several(server, 5))
        assert server.num_calls == 3


def test_failures_with_successes_between_them_stop_nothing():
    with JudgeServer(lambda request: error(500) if request.number % 3 else "CANNOT_ANSWER") as server:
        assert asyncio.run(ask_several(server, 9)) == 6


def test_key_goes_to_the_server_and_a_local_server_needs_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with JudgeServer(lambda request: "CANNOT_ANSWER") as server:
        judged(server, picture(), api_key="sk-1")
        judged(server, picture())
        assert server.requests[0].headers["authorization"] == "Bearer sk-1"


def test_dead_proxy_does_not_stand_before_a_local_server(monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with JudgeServer(lambda request: "CANNOT_ANSWER") as server:
        assert judged(server, picture(), max_retries=0).verdict == CANNOT_ANSWER
    assert is_loopback("http://[::1]:8000/v1") and is_loopback("http://localhost/v1")
    assert not is_loopback("https://api.openai.com/v1")


def test_requests_per_minute_spaces_the_requests():
    with JudgeServer(lambda request: "WRONG") as server:
        judged(server, picture(), requests_per_minute=200)
        first, second = server.times
    assert second - first >= 0.25


def test_estimate_of_cost_follows_size_and_price():
    assert estimate_image_tokens(1024, 1024) == 1659 and estimate_image_tokens(9000, 9000) == round(1.62 * 1536)
    assert estimate_image_tokens(1024, 1024, max_side=512) == 415
    assert estimate_cost({"gpt-4.1-mini": 1000}, 870)["usd"] == pytest.approx(0.4 + 0.05, abs=0.01)
    assert estimate_cost({"my-model": 10}, 870) == {
        "calls": 10,
        "tokens": {"prompt": 10000, "completion": 300},
        "usd": None,
    }
