"""Command lines: the frozen flags of the training script, --help of every script, parsers of numbers, exit codes."""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrastors.cli import (
    Formatter,
    fraction,
    make_parser,
    natural_float,
    natural_int,
    positive_float,
    positive_int,
    run_script,
    typed_flags,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
EXAMPLES = settings(max_examples=200)
PASSES_FLAGS_ON = {"run_filter_hard_negatives_chunks"}  # what it does not know goes to the filter

# The frozen command line: flag -> default, in the order of --help. Whoever changes a flag changes this table with it.
TRAIN_FLAGS = {
    "data": {
        "--train-jsonl": "training/data/train.jsonl", "--eval-jsonl": "training/data/eval.jsonl",
        "--num-hard-negatives": 0, "--sample-negatives": False, "--missing-negatives": "mask", "--max-train-rows": 0,
        "--max-query-tokens": 512, "--num-workers": 4, "--max-image-pixels": 178_956_970, "--max-bad-fraction": 0.01,
    },
    "model": {
        "--model": "Qwen/Qwen3-VL-Embedding-2B", "--max-num-visual-tokens": 256, "--dtype": "auto",
        "--attn-implementation": "auto", "--gradient-checkpointing": False,
    },
    "adapter": {"--lora-r": 32, "--lora-alpha": 32, "--lora-dropout": 0.05, "--lora-vit": False},
    "loss": {
        "--temperature": 0.07, "--logit-scale-lr": 1e-3, "--mask-false-negatives": True, "--grad-reduction": "sum",
        "--loss-tile": 0,
    },
    "optimization": {
        "--batch-size": 4, "--grad-cache-chunk": 2, "--chunk-tokens": 0, "--query-chunk": 0, "--retain-graphs": None,
        "--memory-budget-gb": 0.0, "--reuse-vision-features": True, "--lr": 2e-5, "--weight-decay": 0.01,
        "--warmup-steps": 50, "--max-steps": 500, "--scheduler": "cosine", "--num-cycles": 2, "--max-grad-norm": 1.0,
    },
    "evaluation": {
        "--eval-steps": 100, "--eval-batch-size": 16, "--max-eval-rows": 0, "--best-metric": "recall@1",
        "--eval-only": False,
    },
    "output": {
        "--output-dir": "training/output_contrastors", "--save-steps": 100, "--save-total-limit": 5, "--resume": None,
        "--allow-changed-args": False, "--overwrite": False, "--report-to": "none", "--run-name": None,
    },
    "query side": {
        "--mode": "standard", "--query-side-backward": "direct", "--document-cache": None, "--search-api-url": None,
        "--search-api-batch-size": 32, "--test-jsonl": None,
    },
    "runtime": {"--device": "auto", "--seed": 0, "--plan": False},
}  # fmt: skip
TRAIN_CHOICES = {
    "--missing-negatives": ("mask", "drop-row"), "--dtype": ("auto", "bf16", "fp32"),
    "--attn-implementation": ("auto", "sdpa", "flash_attention_2", "eager"), "--grad-reduction": ("sum", "mean"),
    "--scheduler": ("cosine", "constant", "cosine-restarts"),
    "--best-metric": ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10", "margin", "loss"),
    "--mode": ("standard", "query-side-tune"), "--query-side-backward": ("direct", "gradcache"),
    "--report-to": ("none", "tensorboard", "wandb", "trackio"), "--device": ("auto", "cpu", "cuda", "mps"),
}  # fmt: skip


def parser_of(script: str) -> argparse.ArgumentParser:
    return importlib.import_module(script).build_parser()


def options(actions: list[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if not isinstance(action, argparse._HelpAction)]


# ------------------------------------------------------------------------------------------------- the frozen flags


def test_the_training_command_line_is_the_table():
    groups = {group.title: options(group._group_actions) for group in parser_of("train_contrastors")._action_groups}
    found = {title: {a.option_strings[0]: a.default for a in actions} for title, actions in groups.items() if actions}
    assert found == TRAIN_FLAGS
    assert [list(flags) for flags in found.values()] == [list(flags) for flags in TRAIN_FLAGS.values()]
    for title, flags in found.items():  # 0 == False and 1 == 1.0: the type counts too
        assert {k: type(v) for k, v in flags.items()} == {k: type(v) for k, v in TRAIN_FLAGS[title].items()}


def test_the_training_choices_are_the_table():
    actions = options(parser_of("train_contrastors")._actions)
    assert {a.option_strings[0]: tuple(a.choices) for a in actions if a.choices} == TRAIN_CHOICES


def test_every_flag_of_training_is_an_option_in_kebab_case_and_switches_have_an_off_form():
    for action in options(parser_of("train_contrastors")._actions):
        names = action.option_strings
        assert names and all(name.startswith("--") and name == name.lower() and "_" not in name for name in names)
        if isinstance(action.default, bool):
            assert names == [names[0], names[0].replace("--", "--no-", 1)]


# ------------------------------------------------------------------------------------------------- every script's help


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_without_importing_torch_and_begins_with_the_docstring(script):
    command = [sys.executable, "-X", "importtime", f"{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported  # the listing is there
    assert not imported & {"torch", "torchvision", "transformers", "peft", "accelerate", "openai", "datasets"}
    docstring = ast.get_docstring(ast.parse((ROOT / f"{script}.py").read_text(encoding="utf-8")))
    assert docstring and docstring.splitlines()[0] in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_has_a_help_text(script):
    silent = [a.option_strings or a.dest for a in options(parser_of(script)._actions) if not (a.help or "").strip()]
    assert not silent


@pytest.mark.parametrize("script", SCRIPTS)
def test_unknown_flags_and_abbreviations_are_usage_errors(script, capsys):
    parser = parser_of(script)
    required = [part for a in parser._actions if a.required for part in (a.option_strings[-1], "x")]
    longest = max((a.option_strings[0] for a in options(parser._actions)), key=len)
    for wrong in ("--no-such-flag", longest[:-1]):
        if script in PASSES_FLAGS_ON:
            assert parser.parse_known_args([*required, wrong])[1] == [wrong]
            continue
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*required, wrong])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and f"error: unrecognized arguments: {wrong}" in error
        assert error.count("\n") == 1 and "--help lists the flags" in error


def test_an_unknown_flag_ends_the_process_with_code_2():
    command = [sys.executable, "train_contrastors.py", "--batch", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "unrecognized arguments: --batch" in done.stderr and "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------------------- numbers

INTEGERS = {positive_int: 1, natural_int: 0}
# parser -> (lowest, highest, whether the lowest itself is refused)
NUMBERS = {positive_float: (0, math.inf, True), natural_float: (0, math.inf, False), fraction: (0, 1, False)}
EVERY_PARSER = [*INTEGERS, *NUMBERS]
NOT_NUMBERS = (
    "",
    " ",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "Infinity",
    "1e999",
    "-1",
    "-1e-9",
    "1,5",
    "0x10",
    "five",
    "1" * 9999,
)


@pytest.mark.parametrize("parse", EVERY_PARSER)
@pytest.mark.parametrize("text", NOT_NUMBERS, ids=[repr(text[:12]) for text in NOT_NUMBERS])
def test_what_is_no_number_in_range_is_refused(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
        parse(text)


@EXAMPLES
@given(st.integers())
def test_integers_are_taken_from_their_lowest_on(number):
    for parse, lowest in INTEGERS.items():
        if lowest <= number <= 2**63:
            assert parse(str(number)) == number and type(parse(str(number))) is int
        else:
            with pytest.raises(argparse.ArgumentTypeError):
                parse(str(number))


@EXAMPLES
@given(st.floats())
def test_floats_are_taken_within_their_range_alone(number):
    for parse, (lowest, highest, is_open) in NUMBERS.items():
        if math.isfinite(number) and lowest <= number <= highest and not (is_open and number == lowest):
            assert parse(repr(number)) == number
        else:
            with pytest.raises(argparse.ArgumentTypeError):
                parse(repr(number))


@EXAMPLES
@given(st.text())
def test_any_text_is_a_finite_number_in_range_or_refused(text):
    for parse in EVERY_PARSER:
        try:
            value = parse(text)
        except argparse.ArgumentTypeError:
            continue
        assert math.isfinite(value) and value >= 0 and (value > 0 or parse not in (positive_int, positive_float))


def test_integers_take_no_fractions():
    for parse in INTEGERS:
        with pytest.raises(argparse.ArgumentTypeError):
            parse("1.0")


# ----------------------------------------------------------------------------------------------- formatter, typed flags


def help_of(default: object, text: str = "words", **options: object) -> str:
    parser = make_parser("Does a thing.")
    parser.add_argument("--flag", default=default, help=text, **options)
    return " ".join(parser.format_help().split("--flag")[-1].split())


@pytest.mark.parametrize(
    ("default", "shown"),
    [(True, "on"), (False, "off"), (1, "1"), (0, "0"), (1.0, "1.0"), (0.07, "0.07"), ("", '""'), ("mask", "mask"),
     (["a", "b"], "['a', 'b']"), ([], "[]"), ((1, 2), "(1, 2)")],
)  # fmt: skip
def test_help_shows_every_default_as_it_is_typed(default, shown):
    assert help_of(default).endswith(f"words (default: {shown})")


def test_help_shows_no_default_that_is_not_there_or_already_told():
    assert help_of(None).endswith("words")
    assert help_of(5, "words (default: five)").endswith("words (default: five)")
    assert "(default" not in help_of(argparse.SUPPRESS)


def test_the_docstring_keeps_its_lines():
    text = "Does a thing.\n\n  python a.py --x 1\n  python a.py --y 2\n"
    assert text in make_parser(text).format_help()
    assert make_parser(text).formatter_class is Formatter


@pytest.mark.parametrize(
    ("argv", "typed"),
    [([], set()), (["--lr", "2e-5"], {"lr"}), (["--no-lora-vit"], {"lora_vit"}), (["--lora-vit", "--seed=0"],
     {"lora_vit", "seed"})],
)  # fmt: skip
def test_typed_flags_are_those_on_the_command_line_whatever_their_value(argv, typed):
    assert typed_flags(parser_of("train_contrastors"), argv) == typed


# ---------------------------------------------------------------------------------------------------------- exit codes

SCRIPT = """
import signal, sys
from contrastors.cli import run_script
def work():
    if sys.argv[1] == "wait":
        print("ready", flush=True)
        signal.pause()
    if sys.argv[1].isdecimal():
        return int(sys.argv[1])
    raise {"value": ValueError, "system": OSError, "bug": KeyError}[sys.argv[1]]("rows.jsonl, line 3: no")
sys.exit(run_script(work))
"""


def start(what: str, rank: int | None = 0) -> subprocess.Popen:
    command, pipe = [sys.executable, "-c", SCRIPT, what], subprocess.PIPE
    variables = os.environ | ({} if rank is None else {"RANK": str(rank)})
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("what", "code", "error"),
    [("0", 0, ""), ("1", 1, ""), ("value", 1, "error: rows.jsonl, line 3: no\n"),
     ("system", 1, "error: rows.jsonl, line 3: no\n")],
)  # fmt: skip
def test_exit_code_and_one_sentence(what, code, error):
    process = start(what)
    _, found = process.communicate(timeout=300)
    assert (process.returncode, found) == (code, error)


def test_a_rank_that_fails_alone_speaks_too():
    process = start("value", rank=1)
    _, found = process.communicate(timeout=300)
    assert (process.returncode, found) == (1, "error: rows.jsonl, line 3: no\n")


def test_a_bug_of_ours_shows_its_traceback():
    process = start("bug")
    _, found = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" in found and "KeyError" in found


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_script_with_its_code_and_without_a_traceback(number, code, rank):
    """Under torchrun without a word: it stops the ranks that are left, and the first failing one has spoken."""
    process = start("wait", rank)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, found = process.communicate(timeout=300)
    said = f"stopped by {signal.Signals(number).name}\n" if rank is None else ""
    assert (process.returncode, found) == (code, said)


def test_usage_errors_inside_the_work_keep_code_2(capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            run_script(lambda: make_parser("x").error("choose one"))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == 2 and "choose one" in capsys.readouterr().err
