"""Reads a judge's reply: which of the three verdicts it means, or why it is none.

The parser would rather say UNKNOWN than guess: a wrong CORRECT throws a good hard negative away, a wrong WRONG trains
the model against an answer. A verdict word counts where it is said of the answer ("the answer is correct", "verdict:
WRONG", a line of its own), with its negation, and not where it describes something else ("the correct year is 1912").
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

CORRECT, WRONG, CANNOT_ANSWER, UNKNOWN = "CORRECT", "WRONG", "CANNOT_ANSWER", "UNKNOWN"
VERDICTS = (CORRECT, WRONG, CANNOT_ANSWER)

_FLAGS = re.IGNORECASE | re.DOTALL
_THINK = r"(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning|reflection|analysis|scratchpad)"

_MEANINGS = {
    **dict.fromkeys(("correct", "right", "accurate", "true"), CORRECT),
    **dict.fromkeys(("incorrect", "wrong", "inaccurate", "false"), WRONG),
}
# Whole replies only: inside a sentence of another language nobody here knows what negates them.
_WHOLE_REPLIES = {
    **dict.fromkeys(
        "yes y ✅ ✔ ✓ richtig korrekt correcto correcta correto corretto juste oui sí si ja правильно верно да 正确"
        " 正解 正しい 对 是 맞음 정답 correct_answer".split(), CORRECT,
    ),
    **dict.fromkeys(
        "no n ❌ ✗ ✘ falsch inkorrekt incorrecto incorrecta incorreto errado errato scorretto incorrecte faux nein"
        " non неправильно неверно нет 错误 不正确 错 否 不正解 間違い 오답 틀림"
        " wrong_answer incorrect_answer".split(), WRONG,
    ),
}  # fmt: skip

_CAN_NOT_ANSWER = re.compile(
    r"\b(?:can|could) not (?:be )?(?:answer(?:ed)?|determined?|verif(?:y|ied)|judged?)\b"
    r"|\bunable to (?:answer|determine|verify|judge)\b|\bnot (?:answerable|possible to (?:answer|determine|tell))\b"
    r"|\b(?:insufficient|not enough) (?:information|evidence|context)\b"
)
_REFUSAL = re.compile(
    r"\bas an ai\b|\b(?:against|violates?) (?:my|our|the) \w*\s?(?:polic|guideline)|\bi must decline\b"
    r"|\bi (?:can not|could not|will not|am (?:unable|not able) to) (?:\w+ )?"
    r"(?:assist|help|comply|provide|fulfil|process|view|see|analy|identify|access|open)"
    r"|\bno image (?:was|is|has been) (?:provided|attached)|\bdo not have access\b"
)
_SORRY = re.compile(r"\b(?:sorry|apologi[sz]e)\b")

_NEGATION = r"(?:not|never|hardly|nothing|far from|no|non|nicht|pas|niet|nie|ikke|inte|não|nao)"
_ADVERB = (
    r"(?:absolutely|completely|entirely|fully|factually|definitely|clearly|indeed|totally|perfectly|wholly|strictly|quite"
    r"|very|simply|therefore|thus|actually|really|at all|all)"
)
_SPOKEN_OF = r"\b(?:is|was|are|were|be|as|seems|appears|judged|considered|marked|deemed|rated|verdict|judge?ment)\s+"
_MENTION = re.compile(
    rf"(?P<frame>^\W*|[:=>({{\[\"'“”«,–—]\s*|(?<!\w)-\s*|{_SPOKEN_OF})(?P<qualifier>(?:(?:{_NEGATION}|{_ADVERB})\s+)*)"
    r"(?P<word>correct|right|accurate|true|incorrect|wrong|inaccurate|false)\b(?P<after>\W*\w*)"
)
_NEGATED = re.compile(rf"\b{_NEGATION}\b")
# After a verdict word that opens a line these go on with the verdict; any other word makes it an adjective.
_GO_ON = re.compile(
    r"^(?:\s*$|\s*[^\w\s].*|\s+(?:because|since|as|and|but|given|per|based|according|in|for|the|it|this)$)"
)
_HEDGE = re.compile(
    r"\b(?:partial(?:ly)?|partly|mostly|somewhat|almost|nearly|half|largely|generally|may|might|could|would|should|possibly"
    r"|probably|perhaps|maybe|likely|if|unless|only|or|either|whether|except|until)\b|\?"
)
_DOUBT = re.compile(
    r"\b(?:not|never|nobody|hardly) (?:\w+ )?(?:think|believe|say|claim|agree|call|sure|certain)\b"
    r"|\b(?:doubt|deny|denies)\b"
)
_OPPOSED = re.compile(
    r"\b(?:incorrect|wrong|inaccurate|false|unanswerable)\b|\bnot (?:\w+ )?(?:correct|right|accurate|true)\b"
    r"|\b(?:correct|right|accurate|true)\W*[:=]\W*(?:no|n|0)\b"
)
_LABEL = re.compile(
    r"\b(?:verdict|final answer|judge?ment|conclusion|assessment|classification|decision|label|grade)"
    r"(?: is\b|\W)*?[:=>\-–\s]\W*([^\n]*)"
)
_KEYS = (
    "verdict",
    "judgment",
    "judgement",
    "label",
    "decision",
    "classification",
    "evaluation",
    "conclusion",
    "result",
)
_TRUTH_KEYS = ("correct", "is_correct", "iscorrect")


def strip_thinking(text: str) -> str:
    """Returns a reply without its reasoning, whether closed, left open, or opened by the chat template."""
    text = re.sub(r"◁(/?think)▷|\[(/?think)\]", lambda m: f"<{m[1] or m[2]}>", text, flags=re.IGNORECASE)
    if "<|channel|>" in text:  # gpt-oss: only its final channel is meant for the reader
        text = text.rpartition("<|channel|>final<|message|>")[2] if "<|channel|>final<|message|>" in text else ""
    text = re.sub(rf"<({_THINK})\b[^>]*>.*?</\1\s*>", "", text, flags=_FLAGS)
    text = re.split(rf"</{_THINK}\s*>", text, flags=_FLAGS)[-1]
    return re.split(rf"<{_THINK}\b[^>]*>", text, flags=_FLAGS)[0].strip()


def is_refusal(text: str) -> bool:
    """Tells whether an answer declines the task, in contrast to saying that the page holds no answer."""
    return bool(_REFUSAL.search(_normalise(text)))


def says_cannot_answer(text: str) -> bool:
    """Tells whether an answer is the agreed word for "the page does not hold it", and nothing else."""
    return re.sub(r"\W", "", text.replace("_", "")).casefold() == "cannotanswer"


def parse_verdict(text: str) -> tuple[str, str]:
    """Returns the verdict of a judge's reply and, for UNKNOWN, the reason.

    Args:
        text: Content of the reply: a JSON object, one word, or a sentence.

    Returns:
        CORRECT, WRONG or CANNOT_ANSWER with "", or UNKNOWN with `empty`, `refusal` or `unparsable`.
    """
    text = strip_thinking(text)
    if not text:
        return UNKNOWN, "empty"
    from_json = set(_json_verdicts(text))
    found = from_json or _text_verdicts(text)
    if len(found) == 1 and None not in found:
        verdict = found.pop()
        if from_json or verdict != CANNOT_ANSWER or not _SORRY.search(_normalise(text)):
            return verdict, ""
    refused = not from_json and (is_refusal(text) or _SORRY.search(_normalise(text)))
    return UNKNOWN, "refusal" if refused else "unparsable"


def _normalise(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold().replace("’", "'").replace("‘", "'").replace("_", " ")
    text = re.sub(r"```[a-z]*|\\(?:boxed|text\w*|mathrm)\b|[\u200b-\u200f\ufeff]", " ", text)
    text = (
        re.sub(r"[*~#`\\]", "", text)
        .replace("can't", "can not")
        .replace("won't", "will not")
        .replace("cannot", "can not")
    )
    text = (
        text.replace("n't", " not").replace("i'm ", "i am ").replace("'s ", " is ").replace("not-answer", "not answer")
    )
    return _CAN_NOT_ANSWER.sub("unanswerable", text).strip()


def _json_verdicts(text: str) -> Iterator[str | None]:
    """Yields what every JSON object in the text says; None = a verdict field that means nothing known."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            yield from _object_verdicts(value)
        start = text.find("{", end)


def _object_verdicts(value: dict[str, Any]) -> Iterator[str | None]:
    fields = {str(key).casefold().strip(): entry for key, entry in value.items()}
    key = next((key for key in (*_KEYS, *_TRUTH_KEYS) if key in fields), None)
    entry = fields.get(key)
    if isinstance(entry, dict):
        yield from list(_object_verdicts(entry)) or [None]
    elif isinstance(entry, str):
        found = _text_verdicts(entry)
        yield found.pop() if len(found) == 1 else None
    elif isinstance(entry, bool) and key in _TRUTH_KEYS:
        yield CORRECT if entry else WRONG
    elif key is not None:
        yield None


def _text_verdicts(text: str) -> set[str | None]:
    """Returns every verdict that a text gives the answer; None stands for one that is hedged or contradicted."""
    whole = re.sub(r"^[\s\"'“”`*.!。！_]+|[\s\"'“”`*.!。！_]+$", "", unicodedata.normalize("NFKC", text)).casefold()
    if re.sub(r"\s+", "_", whole) in _WHOLE_REPLIES:
        return {_WHOLE_REPLIES[re.sub(r"\s+", "_", whole)]}
    plain = _normalise(text)
    labelled = set().union(*(_mentions(segment) for segment in _LABEL.findall(plain)))
    found = labelled or _mentions(plain)
    if found == {WRONG, CANNOT_ANSWER}:  # "wrong, the page does not say": no answer either way
        return {WRONG}
    if found == {CORRECT} and not labelled and _contradicted(plain):
        return {None}
    return found


def _contradicted(plain: str) -> bool:
    """Tells whether a text that calls the answer correct also holds a word to the contrary, wherever it stands."""
    words = re.sub(rf"\b{_NEGATION} (?:{_ADVERB} )?(?:is )?(?:incorrect|wrong|inaccurate|false)\b", "", plain)
    return bool(_OPPOSED.search(words))


def _mentions(plain: str) -> set[str | None]:
    found: set[str | None] = set()
    for sentence in re.split(r"\n|(?<=[.!?;])\s+", plain):
        for match in _MENTION.finditer(sentence):
            if not re.match(_SPOKEN_OF, match["frame"]) and not _GO_ON.match(match["after"]):
                continue
            meaning = _MEANINGS[match["word"]]
            if _NEGATED.search(match["qualifier"]):
                meaning = WRONG if meaning == CORRECT else CORRECT
            before = sentence[: match.start("qualifier")]
            doubtful = _HEDGE.search(sentence) or _DOUBT.search(before)
            found.add(None if doubtful or meaning == CORRECT and _NEGATED.search(before) else meaning)
        if re.search(r"(?<!not )\bunanswerable\b", sentence):
            found.add(None if _HEDGE.search(sentence) else CANNOT_ANSWER)
    return found
