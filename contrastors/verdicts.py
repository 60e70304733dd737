"""Reads a judge's reply: which of the three verdicts it means, or why it is none.

The parser would rather say UNKNOWN than guess: a wrong CORRECT throws a good hard negative away, a wrong WRONG trains
the model against an answer. A verdict word counts where it is said of the answer ("the answer is correct", "verdict:
WRONG", a line of its own), with its negation, and not where it describes something else ("the correct year is 1912").
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_right
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
# The model's inability to look at pictures at all, or its policy; what a page lacks is an answer, and judged as one.
_PICTURES = r"(?:(?:an?|any|the|this|your|attached|provided) )*(?:images?|pictures?|photos?|pages?|screenshots?)\b"
_NOT_OF_THE_PAGE = (
    r"(?=\s*(?:$|[^\w\s]|(?:or|and|so|directly|attached|provided|right now|at the moment|(?:that )?you)\b"
    r"|in (?:your|this|our) (?:message|request|conversation|chat)\b))"
)
_AI = r"an? (?:ai|(?:large )?language|text-based)(?: language| text)?(?: model| assistant)"
_CAN_NOT = (
    r"\bi (?:can not|could not|will not|am (?:unable|not able) to|do not(?: have the ability to)?) (?:\w+ (?:or )?)?"
)
_REFUSAL = re.compile(
    rf"\bi am (?:\w+ )?{_AI}\b|\bas {_AI}?,? i\b|\bi must decline\b"
    r"|\b(?:against|violates?) my \w*\s?(?:polic|guideline)|\bviolates? (?:our|the) (?:usage|content|safety) polic"
    rf"|{_CAN_NOT}(?:assist|help|comply|fulfil|provide (?:that|assistance)|process (?:this|that|your) request"
    r"|identify (?:real |specific )?(?:people|individuals|persons))"
    rf"|{_CAN_NOT}(?:view|see|analy[sz]e|access|open|process|interpret|have access to) {_PICTURES}{_NOT_OF_THE_PAGE}"
    r"|(?:^|[.!:]\s+)(?:i am sorry,? (?:but )?|it (?:seems|appears|looks like) (?:that )?)?(?:there (?:is|was) )?"
    r"no (?:image|picture|page)(?: (?:was|is|has been))? (?:provided|attached)(?=\s*(?:$|[.!;]|,? (?:so|please|i)\b))"
)
_SORRY = re.compile(r"\b(?:sorry|apologi[sz]e)\b")

_NOT = r"(?:not|never|hardly|nothing|far from|non|nicht|pas|niet|nie|ikke|inte|não|nao)"
_ADVERB = (
    r"(?:absolutely|completely|entirely|fully|factually|definitely|clearly|indeed|totally|perfectly|wholly|strictly|quite"
    r"|very|simply|therefore|thus|actually|really|at all|all)"
)
_MENTION = re.compile(
    rf"\b(?P<qualifier>(?:(?:{_NOT}|{_ADVERB})\s+)*)"
    r"(?P<word>correct|right|accurate|true|incorrect|wrong|inaccurate|false)\b"
)
_IS = r"\b(?:is|was|are|were|be|as|seems|appears|judged|considered|marked|deemed|rated)"
_OF_THE_ANSWER = re.compile(
    r"(?:yes )?(?:(?:the|that|this|given|provided|my) )*"
    rf"(?:(?:answer|response|reply|statement|verdict)(?: \S+){{0,6}}?|it|this|that|there)(?: {_IS})+"
)
_CLAUSE = re.compile(r"[,;:=>–—]|(?<!\w)-|\b(?:so|because|since|and|therefore|thus|hence|but|however|although)\b")
# After a verdict word these go on with it; any other word makes it an adjective ("correct year", "correct that").
_GO_ON = re.compile(r"\s*(?:$|[^\w\s])|\s+(?:because|since|as|and|but|given|per|based|according)\b")
# "Correct: 1913" names what would be correct; "CORRECT: the page shows it" gives the ground.
_VALUE = re.compile(r"\W*[:=–—-]\s*(?!(?:\w+ ){1,3}(?:shows?|states?|says?|lists?|gives?|confirms?|supports?)\b)\w")
_HEDGE = re.compile(
    r"\b(?:partial(?:ly)?|partly|mostly|somewhat|almost|nearly|half|largely|generally|may|might|could|would|should|possibly"
    r"|probably|perhaps|maybe|likely|if|unless|only|or|either|whether|except|until)\b|\?"
)
_DENIAL = re.compile(
    rf"\b(?:{_NOT}|no|none|nobody|nor|neither|without|(?:un|in)\w*able|(?:fail|lack|miss|doubt|den[yi]|contradict)\w*)\b"
)
_CONTRAST = re.compile(r"\b(?:but|however|although|though|yet|nevertheless|still|instead|despite|while)\b")
_VERDICT_WORD = re.compile(r"\b(?:in|un)?(?:correct|accurate|right|true|wrong|false)")
_NOT_WRONG = re.compile(rf"\b{_NOT} (?:{_ADVERB} )?(?:incorrect|wrong|inaccurate|false)\b")
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
    # Quotes say nothing: the answer "1912" is correct, a button with "correct" on it is no verdict.
    text = re.sub(r"[\"“”«»(){}\[\]]|(?<!\w)'|'(?!\w)", " ", text)
    return re.sub(r"[^\S\n]+", " ", _CAN_NOT_ANSWER.sub("unanswerable", text)).strip()


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
    labelled = set().union(*(_verdicts_said(segment) for segment in _LABEL.findall(plain)))
    found = labelled or _verdicts_said(plain)
    # "wrong, the page does not say": no answer either way
    return {WRONG} if found == {WRONG, CANNOT_ANSWER} else found


def _verdicts_said(plain: str) -> set[str | None]:
    plain = re.sub(rf"\b({_NOT}|{_ADVERB})\s+", r"\1 ", plain)  # a line may end in one
    sentences = re.split(r"\n|(?<=[.!?;])(?<!\.\.)\s+", plain)
    mentions = [meaning for sentence in sentences for meaning in _mentions(sentence)]
    if set(mentions) != {CORRECT}:
        return set(mentions)
    # A text that calls the answer correct and denies, restricts or corrects anything is not clear enough.
    others = _NOT_WRONG.sub("", plain)
    is_clear = len(mentions) == len(_VERDICT_WORD.findall(plain)) and not (
        _DENIAL.search(others) or _CONTRAST.search(others) or _HEDGE.search(others)
    )
    return {CORRECT if is_clear else None}


def _mentions(sentence: str) -> Iterator[str | None]:
    """Yields what each verdict word of a sentence says of the answer; None = it is hedged."""
    is_hedged, breaks = bool(_HEDGE.search(sentence)), [0, *(match.end() for match in _CLAUSE.finditer(sentence))]
    for match in _MENTION.finditer(sentence):
        before, meaning = sentence[: match.start()], _MEANINGS[match["word"]]
        if _VERDICT_WORD.search(before) and before.rstrip().endswith((":", "=")):
            continue  # "correct: false" tells what would be correct
        if re.search(rf"\b{_NOT}\b", match["qualifier"]):
            meaning = WRONG if meaning == CORRECT else CORRECT
        clause = re.sub(r"^\W+|\W+$", "", before[breaks[bisect_right(breaks, match.start()) - 1] :])
        if _is_said_of_the_answer(meaning, clause, sentence[match.end() :]):
            yield None if is_hedged else meaning
    for match in re.finditer(r"\bunanswerable\b", sentence):
        clause = sentence[breaks[bisect_right(breaks, match.start()) - 1] : match.start()]
        if not _DENIAL.search(clause):
            yield None if is_hedged else CANNOT_ANSWER


def _is_said_of_the_answer(meaning: str, clause: str, after: str) -> bool:
    """Tells whether a verdict word is a verdict, by its clause up to it and by what comes after it."""
    goes_on = bool(_GO_ON.match(after))
    if meaning == CORRECT:
        return goes_on and not _VALUE.match(after) and (not clause or bool(_OF_THE_ANSWER.fullmatch(clause)))
    if not clause:
        return goes_on and not re.match(r"\W*[:=]\W*(?:no|n|none|false|0)\W*$", after)
    is_predicate = re.search(rf"{_IS}$", clause) and not re.match(r"\s+(?:that|to)\b", after)
    return bool(is_predicate) and not (_DENIAL.search(clause) or _VERDICT_WORD.search(clause))
