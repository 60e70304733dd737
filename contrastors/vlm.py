"""The judge: a vision-language model behind an OpenAI-compatible server that says whether a page answers a query.

Two requests a picture: answer the query from the page, then judge that answer on the same page. Everything a server can
do wrong falls in one of three classes: it passes (asked again, later and later), it concerns this picture
(`ImageRefused`), or nothing that follows can work either (`JudgeStopped`).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from contrastors.images import MAX_IMAGE_PIXELS
from contrastors.verdicts import CANNOT_ANSWER, UNKNOWN, VERDICTS, is_refusal, parse_verdict, says_cannot_answer
from contrastors.vlm_messages import Prompts, Reply, encode_image, fill_prompt, read_reply

DEFAULT_BASE_URL = "https://api.openai.com/v1"
REFUSED = "REFUSED"  # the server would not take the picture: nobody has judged it
MAX_REASKS = 2
MAX_TOKENS = 2048  # of a reply; room for a short reasoning, a stop for one that never ends
MAX_WAIT_S = 300.0
CONNECT_S, LIST_S = 5.0, 10.0  # at most, for a connection and for the list of models

_VERDICT_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"verdict": {"type": "string", "enum": list(VERDICTS)}},
            "required": ["verdict"],
            "additionalProperties": False,
        },
    },
}
# How servers word that they lack an optional parameter.
_PARAMETER_WORDS = {
    "temperature": r"temperature",
    "max_tokens": r"max_tokens|max_completion_tokens",
    "response_format": r"response_format|json_schema|guided|grammar|structured",
}
_UNKNOWN_MODEL = re.compile(
    r"model\b.{0,80}(?:not found|not exist|unknown|not available)|(?:unknown|invalid|no such) model", re.IGNORECASE
)


class JudgeStopped(ValueError):
    """No later request can work either: wrong key, address or model, or a server that stopped answering."""


class RequestFailed(Exception):
    """All retries of one request failed; the row can be tried again later.

    Attributes:
        path: The picture, for whoever catches it.
    """

    path = ""


class ImageRefused(Exception):
    """The server will not take this picture or prompt, however often it is sent."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the judge found for one picture.

    Attributes:
        answer: The answer given from the picture; "" where none came.
        verdict: CORRECT, WRONG, CANNOT_ANSWER, UNKNOWN or REFUSED.
        reason: Why, for the last two.
        prompt_tokens: Of all requests for this picture.
        completion_tokens: The same.
    """

    answer: str
    verdict: str
    reason: str
    prompt_tokens: int
    completion_tokens: int


def retry_delay(attempt: int, headers: Mapping[str, str]) -> float:
    """Returns the seconds to wait before the next try: Retry-After where given, else doubling, always with jitter.

    Args:
        attempt: Tries that failed before this one, from 0.
        headers: Of the response; empty where none came.
    """
    wait_s = _retry_after(headers.get("retry-after", ""))
    if wait_s is not None:
        return min(wait_s, MAX_WAIT_S) + random.uniform(0, 0.5)
    return min(0.5 * 2**attempt, 30.0) * random.uniform(0.5, 1.0)


def _retry_after(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def is_loopback(url: str) -> bool:
    """Tells whether a URL points to this machine, where no proxy has business."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")


class Judge:
    """Asks the two models; one instance serves all rows of a run. Call `check` first, `close` last.

    Attributes:
        requests: `calls` (every request sent), `retries` (after a failure that passes), `reasks` (after an UNKNOWN).
    """

    def __init__(
        self,
        model: str,
        judge_model: str,
        prompts: Prompts,
        *,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str = "",
        api_key_env: str = "OPENAI_API_KEY",
        max_retries: int = 5,
        timeout_s: float = 180.0,
        requests_per_minute: int = 0,
        max_image_side: int = 0,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        max_failures_in_a_row: int = 20,
    ):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

        self.connect_s = min(CONNECT_S, timeout_s)
        timeout = Timeout(timeout_s, connect=self.connect_s)
        self.client = AsyncOpenAI(
            base_url=base_url,
            api_key=api_key or "none",  # the client insists on one; a local server ignores it
            max_retries=0,
            timeout=timeout,
            http_client=DefaultAsyncHttpxClient(trust_env=not is_loopback(base_url), timeout=timeout),
        )
        self.model, self.judge_model, self.prompts = model, judge_model, prompts
        self.base_url, self.api_key, self.api_key_env = base_url.rstrip("/"), api_key, api_key_env
        self.max_retries, self.timeout_s = max_retries, timeout_s
        self.seconds_per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self.max_image_side, self.max_image_pixels = max_image_side, max_image_pixels
        self.max_failures_in_a_row = max_failures_in_a_row
        self.requests: Counter[str] = Counter(calls=0, retries=0, reasks=0)
        self._unsupported: set[str] = set()
        self._accepted: set[str] = set()
        self._has_answered = False
        self._failures_in_a_row = 0
        self._next_request_s = 0.0

    async def check(self) -> None:
        """Asks for the list of models; a server without one is tried by the first real request.

        Raises:
            JudgeStopped: Nobody answers there, the key is refused, or a model is not in the list.
        """
        import openai

        failure = None
        # The client's limit is for the connection alone: one that cannot be made must not look like a slow list.
        connecting, seconds = openai.Timeout(None, connect=self.connect_s), min(LIST_S, self.timeout_s)
        for attempt in range(min(self.max_retries, 2) + 1):
            if attempt:
                await asyncio.sleep(retry_delay(attempt, {}))
            try:
                async with asyncio.timeout(self.connect_s + seconds):
                    listed = json.loads((await self.client.models.with_raw_response.list(timeout=connecting)).content)
            except openai.APIStatusError as error:
                if error.status_code == 401:
                    raise self._stop(error, "/models") from error
                if error.status_code not in (429, 502, 503, 504):
                    return
                failure = None
            except openai.APIConnectionError as error:
                failure = error
            except (ValueError, TimeoutError):  # a web page, or too busy to list: the first request decides
                return
            else:
                return self._check_models(listed)
        if failure is not None:
            raise JudgeStopped(
                f"no answer from {self._shown(self.base_url)} ({self._describe(failure)}); "
                "start the server or mend --base-url"
            )

    def _check_models(self, listed: Any) -> None:
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = [str(entry["id"]) for entry in entries or () if isinstance(entry, dict) and "id" in entry]
        for flag, model in (("--model", self.model), ("--judge-model", self.judge_model)):
            if names and not any(n == model or n.endswith(f"/{model}") or n.startswith(f"{model}:") for n in names):
                known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
                raise JudgeStopped(f"{self._shown(self.base_url)} has no model '{model}' ({flag}); it serves {known}")

    async def judge(self, query: str, data: bytes) -> Judgement:
        """Returns what the models say of one picture; a refused picture is sent once more at half its size.

        Args:
            query: Text of the query.
            data: Bytes of the image file.

        Raises:
            BadImage: The bytes are no usable image.
            RequestFailed: A request failed for good.
            JudgeStopped: No request can work.
        """
        image = await asyncio.to_thread(encode_image, data, self.max_image_side, self.max_image_pixels)
        try:
            return await self._judge(query, image.url)
        except ImageRefused:
            image = await asyncio.to_thread(encode_image, data, max(1, image.side // 2), self.max_image_pixels)
        try:
            return await self._judge(query, image.url)
        except ImageRefused as error:
            self._count_failure(str(error))
            return Judgement("", REFUSED, str(error), 0, 0)

    async def _judge(self, query: str, url: str) -> Judgement:
        tokens: Counter[str] = Counter()

        def read_answer(text: str) -> tuple[str, str]:
            return text, "refusal" if is_refusal(text) else ""

        text = fill_prompt(self.prompts.answer, query=query)
        answer, reason = await self._ask(self.model, text, url, read_answer, tokens)
        if reason:
            verdict = UNKNOWN
        elif says_cannot_answer(answer):
            verdict = CANNOT_ANSWER
        else:
            text = fill_prompt(self.prompts.judge, query=query, answer=answer)
            verdict, reason = await self._ask(self.judge_model, text, url, parse_verdict, tokens, as_json=True)
        return Judgement(answer, verdict, reason, tokens["prompt"], tokens["completion"])

    async def _ask(
        self,
        model: str,
        text: str,
        url: str,
        read: Callable[[str], tuple[str, str]],
        tokens: Counter[str],
        as_json: bool = False,
    ) -> tuple[str, str]:
        """Returns what `read` makes of the reply, and the reason where even the last of three replies says nothing."""
        for attempt in range(MAX_REASKS + 1):
            self.requests["reasks"] += attempt > 0
            reply = await self._request(model, text, url, as_json)
            tokens.update(prompt=reply.prompt_tokens, completion=reply.completion_tokens)
            value, reason = (reply.text if not as_json else UNKNOWN, reply.reason) if reply.reason else read(reply.text)
            if not reason:
                break
        return value, reason

    async def _request(self, model: str, text: str, url: str, as_json: bool) -> Reply:
        import openai

        optional = {"temperature": 0, "max_tokens": MAX_TOKENS} | (
            {"response_format": _VERDICT_FORMAT} if as_json else {}
        )
        attempt, left_out = 0, set()
        while True:
            sent = {name: value for name, value in optional.items() if name not in self._unsupported | left_out}
            headers: Mapping[str, str] = {}
            try:
                reply = await self._send(model, text, url, sent)
            except openai.APIStatusError as error:
                refused = self._refused_parameters(error, sent)
                if refused:
                    left_out |= refused
                    continue
                self._raise_if_final(error)
                failure, headers = error, error.response.headers
            except (openai.APIConnectionError, TimeoutError) as error:
                failure = error
            except ValueError as error:  # cut short once in a while; never anything else means a wrong address
                if attempt == min(2, self.max_retries) and not self._has_answered:
                    where, what = self._shown(self.base_url), self._describe(error)
                    raise JudgeStopped(f"{where}: {what}; --base-url usually ends in /v1") from error
                failure = error
            else:
                self._unsupported |= left_out
                self._accepted |= set(sent)
                self._has_answered, self._failures_in_a_row = True, 0
                return reply
            if attempt == self.max_retries:
                self._count_failure(self._describe(failure))
                raise RequestFailed(f"{attempt + 1} tries failed, the last: {self._describe(failure)}")
            await asyncio.sleep(retry_delay(attempt, headers))
            attempt += 1
            self.requests["retries"] += 1

    async def _send(self, model: str, text: str, url: str, optional: dict[str, Any]) -> Reply:
        now_s = time.monotonic()
        start_s = max(now_s, self._next_request_s)
        self._next_request_s = start_s + self.seconds_per_request
        await asyncio.sleep(start_s - now_s)
        self.requests["calls"] += 1
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        async with asyncio.timeout(
            self.timeout_s
        ):  # of the whole reply: the client's own limit starts anew with each byte
            response = await self.client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": content}], **optional
            )
        return read_reply(json.loads(response.content))

    def _refused_parameters(self, error: Any, sent: dict[str, Any]) -> set[str]:
        """Returns the optional parameters to leave out: those the message names, or a schema not yet known to work."""
        if error.status_code not in (400, 422, 501):
            return set()
        named = {name for name in sent if re.search(_PARAMETER_WORDS[name], str(error), re.IGNORECASE)}
        return named or {"response_format"} & set(sent) - self._accepted

    def _raise_if_final(self, error: Any) -> None:
        status, code = error.status_code, str(error.code)
        is_unknown_model = status in (400, 422) and not self._has_answered and _UNKNOWN_MODEL.search(str(error))
        if (
            status in (401, 402, 404, 405)
            or (status == 403 and not self._has_answered)
            or code in ("insufficient_quota", "model_not_found", "invalid_api_key")
            or is_unknown_model
        ):
            raise self._stop(error, "/chat/completions") from error
        if status not in (408, 409, 425, 429) and status < 500:
            raise ImageRefused(self._describe(error)) from error

    def _stop(self, error: Any, route: str) -> JudgeStopped:
        status = error.status_code
        if status in (401, 403):
            way_out = f"set the right key in ${self.api_key_env}" + ("" if self.api_key else ", none is set")
        elif status == 404 and self.base_url.endswith("/completions"):
            way_out = "give --base-url without the route, it ends in /v1"
        elif status in (404, 405):
            way_out = (
                f"--base-url usually ends in /v1; are '{self.model}' and '{self.judge_model}' models of this server?"
            )
        elif status in (402, 429):
            way_out = "the account has no credit left; rows done are kept, go on later with --resume"
        else:
            way_out = "mend --model or --judge-model"
        return JudgeStopped(f"{self._shown(self.base_url)}{route} answered {self._describe(error)}; {way_out}")

    def _count_failure(self, text: str) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self.max_failures_in_a_row:
            raise JudgeStopped(
                f"{self._failures_in_a_row} requests in a row failed for good at {self._shown(self.base_url)}, "
                f"the last: {text}; rows done are kept, go on with --resume"
            )

    def _describe(self, error: BaseException) -> str:
        """Returns one line about an error, with the key blotted out."""
        status = getattr(error, "status_code", None)
        if status is not None:
            body = error.body if isinstance(error.body, dict) else {}
            text = f"{status} {body.get('message') or error.message}"
        elif isinstance(error, TimeoutError):
            text = f"no reply within {self.timeout_s:g} s (--timeout)"
        else:
            text = " ".join(filter(None, (str(error), str(error.__cause__ or "")))) or type(error).__name__
        return self._shown(" ".join(text.split())[:300])

    def _shown(self, text: str) -> str:
        text = re.sub(r"://[^/@\s]*@", "://", text)
        return text.replace(self.api_key, "***") if self.api_key else text

    async def close(self) -> None:
        """Closes the connections."""
        await self.client.close()
