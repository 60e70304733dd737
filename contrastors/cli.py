"""What every script's command line shares: common flags, exit codes, one sentence for an error.

Exit codes: 0 done, 1 failed, 2 usage, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NoReturn

from contrastors.images import MAX_IMAGE_PIXELS

# Position ids of images and the features that a forward takes came with 5.19; pyproject.toml asks for the same.
TRANSFORMERS = "5.19 or newer, below 6"


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring as it is and shows every default."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is not None and default is not argparse.SUPPRESS and "default" not in text:
            if isinstance(default, bool):
                shown = "on" if default else "off"
            else:
                shown = '""' if default == "" else "%(default)s"
            text += f" (default: {shown})"
        return text


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one sentence, not with a list of all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help lists the flags)\n")


def make_parser(description: str) -> Parser:
    """Returns the parser of a script; `description` is its docstring."""
    return Parser(description=description, formatter_class=Formatter, allow_abbrev=False)


def typed_flags(parser: argparse.ArgumentParser, argv: list[str] | None) -> set[str]:
    """Returns the names of the flags that were typed; the parser loses its defaults."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))


BAD_FRACTION_HELP = "stop before any work when more than this share of rows cannot be used; 1 = use whatever is left"


def add_image_flags(group: Any, bad_fraction_help: str = BAD_FRACTION_HELP) -> None:
    """Adds `--max-image-pixels` and `--max-bad-fraction`."""
    group.add_argument(
        "--max-image-pixels", type=positive_int, default=MAX_IMAGE_PIXELS,
        help="refuse pictures with more pixels (guards against decompression bombs)",
    )  # fmt: skip
    group.add_argument(
        "--max-bad-fraction", type=fraction, default=0.01, help=bad_fraction_help,
    )  # fmt: skip


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the groups `model` and `adapter` of training: what the doctor examines must be what training makes."""
    add = parser.add_argument_group("model").add_argument
    add("--model", default="Qwen/Qwen3-VL-Embedding-2B", help="base model: hub name or folder")
    add("--max-num-visual-tokens", type=positive_int, default=256, help="of the largest image; 1024 pixels each")
    add("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="auto = bf16 on cuda, fp32 elsewhere")
    attention = ("auto", "sdpa", "flash_attention_2", "eager")
    add("--attn-implementation", choices=attention, default="auto", help="auto = sdpa")
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="recompute layers in the backward: less memory",
    )

    add = parser.add_argument_group("adapter").add_argument
    add("--lora-r", type=positive_int, default=32, help="rank of the LoRA matrices")
    add("--lora-alpha", type=positive_int, default=32, help="LoRA scale, alpha / r")
    add("--lora-dropout", type=fraction, default=0.05, help="dropout in front of the LoRA; 0 = off")
    add(
        "--lora-vit",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="adapt the vision blocks too, not only the language model",
    )


def _number(kind: type, low: float, high: float, text: str, what: str, open_low: bool = False) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not (low < value if open_low else low <= value) or not value <= high or value == float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def positive_int(text: str) -> int:
    """Parses an integer of at least 1."""
    return _number(int, 1, 2**63, text, "a whole number of at least 1")


def natural_int(text: str) -> int:
    """Parses an integer of at least 0."""
    return _number(int, 0, 2**63, text, "a whole number of at least 0")


def positive_float(text: str) -> float:
    """Parses a number above 0."""
    return _number(float, 0, float("inf"), text, "a number above 0", open_low=True)


def natural_float(text: str) -> float:
    """Parses a number of at least 0."""
    return _number(float, 0, float("inf"), text, "a number of at least 0")


def fraction(text: str) -> float:
    """Parses a number from 0 to 1."""
    return _number(float, 0, 1, text, "a number from 0 to 1")


def require_transformers() -> None:
    """Raises ValueError where transformers is missing or behaves otherwise by its version; call before importing it."""
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ValueError(f"transformers is not installed; needed is {TRANSFORMERS}: pip install -e .") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not (5, 19) <= numbers < (6,):
        raise ValueError(f"transformers {found} is installed, needed is {TRANSFORMERS}: pip install -e .")


def require_model_folder(model: str) -> None:
    """Raises ValueError where `--model` is a path and no folder is there: the hub's own message is a riddle."""
    if model.startswith((".", "/", "~")) and not os.path.isdir(model):
        raise ValueError(f"--model {model}: no such folder")


class Stopped(SystemExit):
    """Ends the script with 128 + the signal's number."""

    def __init__(self, signal_number: int):
        super().__init__(128 + signal_number)


class StopSignals:
    """Notes SIGINT and SIGTERM, so that the step in flight ends and is saved; a later second one ends at once.

    Attributes:
        received: Signal that reached this rank, 0 = none. Never act on it alone: other ranks may not know.
        agreed: Signal that every rank has heard of in the same collective.
    """

    def __init__(self) -> None:
        self.received = 0
        self.received_at = 0.0
        self.agreed = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if not self.received:
            self.received, self.received_at = number, time.monotonic()
        elif time.monotonic() - self.received_at > 5:  # sooner it is the same stop: launcher and scheduler both send it
            raise Stopped(number)


def _stop(signal_number: int, frame: Any) -> None:
    # torchrun stops the ranks that are left where one has failed: its sentence is the one to read.
    if "RANK" not in os.environ:  # straight to the file: the script may be in the middle of a print
        os.write(2, f"stopped by {signal.Signals(signal_number).name}\n".encode())
    raise Stopped(signal_number)


def run_script(work: Callable[[], int]) -> int:
    """Returns the exit code of `work`; errors that a user can mend become one sentence on stderr and exit code 1.

    SIGINT and SIGTERM end the script at once, unless `work` installs handlers that let it finish something first.
    """
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return work()
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") != "0":
            # Ranks often fail together, or one after another: torchrun ends this one within these seconds, so that the
            # first rank's sentence is the only one. Where this rank alone failed, it speaks.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
