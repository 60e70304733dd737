"""What goes to the judge and what comes back: prompts, pictures as data URLs, replies of every shape."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from contrastors.images import MAX_ASPECT_RATIO, MAX_IMAGE_PIXELS, open_image, pad_small
from contrastors.verdicts import strip_thinking

LOSSLESS_PIXELS = 1 << 20  # up to here PNG keeps every pixel; above it JPEG keeps requests small
TEXT_TOKENS, REPLY_TOKENS = 130, 30  # of one request, about
MIN_SIDE = 16  # servers take a picture of a few pixels for colour channels
USD_PER_MILLION_TOKENS = {  # input, output: OpenAI's list prices of 2025
    "gpt-4.1": (2.0, 8.0), "gpt-4.1-mini": (0.4, 1.6), "gpt-4.1-nano": (0.1, 0.4),
    "gpt-4o": (2.5, 10.0), "gpt-4o-mini": (0.15, 0.6),
}  # fmt: skip

ANSWER_PROMPT = """\
The image is a page. Answer the query from what this page shows, and from nothing else, in one or two sentences.
If the page does not hold the answer, reply with exactly CANNOT_ANSWER.

Query: {query}"""

JUDGE_PROMPT = """\
The image is a page. Below are a query and an answer that was given from this page. Check the answer against the page.
CORRECT: the page shows that the answer is right, and it answers the query.
WRONG: the page contradicts the answer or does not show it, or it answers something else.
CANNOT_ANSWER: the page does not hold what the query asks for.
Reply with one of these three words.

Query: {query}
Answer: {answer}"""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Templates of the two requests, with `{query}` and, in `judge`, `{answer}`."""

    answer: str = ANSWER_PROMPT
    judge: str = JUDGE_PROMPT

    @property
    def hash(self) -> str:
        """12 hex digits that change with either template."""
        return hashlib.blake2b(json.dumps([self.answer, self.judge]).encode(), digest_size=6).hexdigest()


def read_prompts(path: str | None) -> Prompts:
    """Returns the prompts of `--prompt-file`, or the built-in ones.

    Args:
        path: JSON object with `answer`, `judge` or both; None = built-in.

    Raises:
        ValueError: Not such an object, or a template without its places.
    """
    if path is None:
        return Prompts()
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        prompts = Prompts(**given)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"--prompt-file {path}: a JSON object with 'answer' and/or 'judge' is needed ({error})"
        ) from error
    for name, places in (("answer", ("{query}",)), ("judge", ("{query}", "{answer}"))):
        template = getattr(prompts, name)
        missing = [place for place in places if not isinstance(template, str) or place not in template]
        if missing:
            raise ValueError(f"--prompt-file {path}: template '{name}' lacks {' and '.join(missing)}")
    return prompts


def fill_prompt(template: str, **values: str) -> str:
    """Returns the template with its places filled; control markers inside the values become plain text.

    A query that holds `<|image_pad|>` or `<image>` would otherwise open a second image slot on some servers.
    """
    plain = {name: re.sub(r"<(\S{1,60}?)>", r"< \1 >", value) for name, value in values.items()}
    return re.sub(r"\{(query|answer)\}", lambda match: plain.get(match[1], match[0]), template)


@dataclass(frozen=True, slots=True)
class SentImage:
    """A picture as it is sent: its data URL and the longer side in pixels."""

    url: str
    side: int


def encode_image(data: bytes, max_side: int = 0, max_image_pixels: int = MAX_IMAGE_PIXELS) -> SentImage:
    """Returns the upright RGB picture as a data URL: PNG up to a megapixel, JPEG above.

    Args:
        data: Bytes of the file.
        max_side: Longer side in pixels, at most; 0 = as it is.
        max_image_pixels: Larger pictures are refused.

    Raises:
        BadImage: The bytes are no usable image.
    """
    image = open_image(data, max_image_pixels)
    if max_side and max(image.size) > max_side:
        scale = max_side / max(image.size)
        image = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.LANCZOS)
    image = pad_small(image, MIN_SIDE, MAX_ASPECT_RATIO)
    lossless = image.width * image.height <= LOSSLESS_PIXELS
    buffer = BytesIO()
    image.save(buffer, **({"format": "PNG"} if lossless else {"format": "JPEG", "quality": 92}))
    kind = "png" if lossless else "jpeg"
    return SentImage(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", max(image.size))


def estimate_image_tokens(width: int, height: int, max_side: int = 0) -> int:
    """Returns about how many tokens a picture costs: 32x32 patches, at most 1536, times 1.62 (gpt-4.1-mini's rule)."""
    scale = min(1.0, max_side / max(width, height)) if max_side else 1.0
    patches = -(-int(width * scale) // 32) * -(-int(height * scale) // 32)
    return round(1.62 * min(1536, max(1, patches)))


def estimate_cost(num_calls: Mapping[str, int], image_tokens: int) -> dict[str, Any]:
    """Returns calls, tokens and US dollars of a run; null dollars where no price is known.

    Args:
        num_calls: By model.
        image_tokens: Of one picture.
    """
    total, prompt_tokens = sum(num_calls.values()), image_tokens + TEXT_TOKENS
    usd: float | None = 0.0
    for model, count in num_calls.items():
        price = USD_PER_MILLION_TOKENS.get(model)
        if price is None or usd is None:
            usd = None
        else:
            usd = round(usd + count * (prompt_tokens * price[0] + REPLY_TOKENS * price[1]) / 1e6, 2)
    return {
        "calls": total,
        "tokens": {"prompt": total * prompt_tokens, "completion": total * REPLY_TOKENS},
        "usd": usd,
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """What one response says; `reason` tells why there is nothing to use (empty, length, filter, refusal)."""

    text: str
    reason: str
    prompt_tokens: int
    completion_tokens: int


def read_reply(body: Any) -> Reply:
    """Returns the text of a chat completion without its reasoning, whatever shape the server gave it.

    Raises:
        ValueError: The body is no chat completion.
    """
    if not isinstance(body, dict) or "choices" not in body:
        raise ValueError(f"the reply is no chat completion: {json.dumps(body)[:200]}")
    choice = (body["choices"] or [{}])[0] or {}
    message = choice.get("message") or {}
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    text = strip_thinking(str(content))
    reasons = {"length": "length", "content_filter": "filter"}
    reason = reasons.get(choice.get("finish_reason"), "")
    if not reason and message.get("refusal"):
        reason = "refusal"
    usage = body.get("usage") or {}
    tokens = (int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    return Reply(text, reason or ("" if text else "empty"), *tokens)
