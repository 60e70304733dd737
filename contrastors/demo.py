"""The embedded default: a tiny Qwen3-VL checkpoint with random weights, and a rendered data set of page tiles.

    python -m contrastors.demo --output DIR [--seed S]

writes DIR/model (config, weights, tokenizer, processor; nothing is downloaded) and DIR/data (train.jsonl, eval.jsonl,
eval_hard.jsonl, corpus.jsonl, tiles/, and facts.jsonl: what each tile shows, for the demo judge).

A tile has a topic (header, footer and side bar colours: 168 "sites", easy to tell apart) and a detail (a dot of one of
5 colours in one of 4 places: 20 siblings a topic, hard to tell apart), with jitter and a page number as noise.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from contrastors.demo_judge import hash_pixels
from contrastors.records import atomic_output, dump_json, read_jsonl, write_jsonl, write_text

MARKER = "demo.json"  # a folder without it is not ours to replace
TILE = 128
HEADERS = ("red", "blue", "green", "orange", "purple", "brown", "black")
FOOTERS = ("red", "blue", "green", "orange", "purple", "brown")
BARS = ("grey", "yellow", "cyan", "magenta")
DOTS = ("pink", "navy", "lime", "maroon", "teal")
PLACES = ("top left", "top right", "bottom left", "bottom right")
RGB = {
    "red": (214, 40, 40), "blue": (38, 84, 200), "green": (34, 139, 54), "orange": (245, 140, 20),
    "purple": (128, 44, 160), "brown": (120, 72, 32), "black": (24, 24, 24), "grey": (150, 150, 150),
    "yellow": (240, 220, 50), "cyan": (60, 205, 215), "magenta": (220, 50, 190), "pink": (255, 130, 170),
    "navy": (12, 18, 96), "lime": (140, 235, 40), "maroon": (110, 10, 30), "teal": (0, 118, 118),
}  # fmt: skip
NUM_TRAIN_SIBLINGS, NUM_UNQUERIED_SIBLINGS = 2, 4
NUM_EVAL_TOPICS, NUM_HARD_SIBLINGS = 75, 4

# The special tokens of the Qwen family, in the order of the real vocabulary.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tile shows."""

    header: str
    footer: str
    bar: str
    dot: str
    place: str

    @property
    def query(self) -> str:
        """The query that this tile answers."""
        return f"{self.header} header, {self.footer} footer, {self.bar} bar: {self.dot} dot {self.place}"


def draw_tile(facts: Facts, noise: random.Random) -> Image.Image:
    """Returns a rendering of the facts, 128 x 128; `noise` moves edges, lines of text and the page number."""
    image = Image.new("RGB", (TILE, TILE), (250, 250, 248))
    draw = ImageDraw.Draw(image)
    header, footer, bar = noise.randint(18, 24), noise.randint(18, 24), noise.randint(14, 20)
    draw.rectangle((0, 0, TILE, header), fill=RGB[facts.header])
    draw.rectangle((0, TILE - footer, TILE, TILE), fill=RGB[facts.footer])
    draw.rectangle((0, header + 1, bar, TILE - footer - 1), fill=RGB[facts.bar])
    for y in range(header + 8, TILE - footer - 6, 9):
        draw.line((bar + 6, y, TILE - noise.randint(6, 50), y), fill=(222, 222, 222), width=2)
    x = (45 if "left" in facts.place else 97) + noise.randint(-4, 4)
    y = (45 if "top" in facts.place else 83) + noise.randint(-3, 3)
    radius = noise.randint(15, 18)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=RGB[facts.dot])
    draw.text((TILE - 26, TILE - 15), str(noise.randint(1, 999)), fill=(255, 255, 255), font=ImageFont.load_default(10))
    return image


def make_data(folder: Path, seed: int = 0) -> dict[str, int]:
    """Writes the tiles and the four JSONL files into `folder`; returns the number of rows of each.

    train 336 rows (2 siblings in each of 168 topics); corpus 1,344 tiles (those, 672 siblings that no query asks for,
    and 336 twins: a second rendering of a training row's facts, listed as nobody's positive); eval 75 rows, one unseen
    sibling in each of 75 topics; eval_hard 300 rows, 4 unseen siblings in each of the same topics.
    """
    noise = random.Random(seed)
    (folder / "tiles").mkdir(parents=True, exist_ok=True)

    known = []

    def render(name: str, facts: Facts) -> str:
        tile, path = draw_tile(facts, noise), f"tiles/{name}.png"
        tile.save(folder / path)
        known.append({"chunk_path": path, "query": facts.query, "pixels": hash_pixels(tile)})
        return path

    train, corpus, twins, rest = [], [], [], {}
    topics = list(itertools.product(HEADERS, FOOTERS, BARS))
    for number, topic in enumerate(topics):
        siblings = [Facts(*topic, dot, place) for dot in DOTS for place in PLACES]
        noise.shuffle(siblings)
        for place, facts in enumerate(siblings[:NUM_TRAIN_SIBLINGS]):
            path = render(f"train_{number:03d}_{place}", facts)
            train.append({"query": facts.query, "chunk_path": path, "article_id": number})
            corpus.append({"chunk_path": path, "article_id": number})
            twins.append({"chunk_path": render(f"twin_{number:03d}_{place}", facts), "article_id": number})
        last = NUM_TRAIN_SIBLINGS + NUM_UNQUERIED_SIBLINGS
        for place, facts in enumerate(siblings[NUM_TRAIN_SIBLINGS:last]):
            corpus.append({"chunk_path": render(f"other_{number:03d}_{place}", facts), "article_id": number})
        rest[number] = siblings[last:]
    evaluation, hard = [], []
    for number in sorted(noise.sample(range(len(topics)), NUM_EVAL_TOPICS)):
        for place, facts in enumerate(rest[number][: 1 + NUM_HARD_SIBLINGS]):
            name = f"eval_{number:03d}" if place == 0 else f"hard_{number:03d}_{place}"
            row = {"query": facts.query, "chunk_path": render(name, facts), "article_id": number}
            (evaluation if place == 0 else hard).append(row)
    noise.shuffle(train)
    write_jsonl(folder / "facts.jsonl", known)
    files = {"train": train, "eval": evaluation, "eval_hard": hard, "corpus": corpus + twins}
    return {name: write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in files.items()}


def make_tokenizer(texts: list[str], vocab_size: int = 600) -> Any:
    """Returns a byte-level BPE tokenizer with Qwen's pre-tokenizer and special tokens, trained on the texts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )


def make_model(folder: Path, seed: int = 0, texts: list[str] | None = None, **sizes: int) -> Path:
    """Writes a Qwen3-VL checkpoint with random weights, tokenizer and processor into `folder` and returns it.

    Args:
        folder: Created where it is missing.
        seed: Of the weights.
        texts: Training texts of the tokenizer; None = the demo's query grammar.
        sizes: Overrides of `hidden`, `layers`, `vision_hidden`, `vision_layers`.
    """
    import torch
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    from contrastors.processing import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION

    if texts is None:
        values = (HEADERS, FOOTERS, BARS, DOTS, PLACES)
        texts = [Facts(*(random.Random(i * 5 + n).choice(v) for n, v in enumerate(values))).query for i in range(500)]
    turns = ["system\n", "user\n", "assistant\n"]
    tokenizer = make_tokenizer([*texts, *[QUERY_INSTRUCTION, DOCUMENT_INSTRUCTION, *turns] * 20])
    size = {"hidden": 128, "layers": 4, "vision_hidden": 64, "vision_layers": 4} | sizes
    ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)), strict=True))
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": size["hidden"],
            "intermediate_size": size["hidden"] * 3,
            "num_hidden_layers": size["layers"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": size["hidden"] // 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": _mrope_section(size["hidden"] // 4),
            },
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": size["vision_layers"],
            "hidden_size": size["vision_hidden"],
            "intermediate_size": size["vision_hidden"] * 3,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": size["hidden"],
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    torch.set_rng_state(state)
    limits = {"size": {"shortest_edge": 4 * 1024, "longest_edge": 4096 * 1024}}
    pixels = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**limits, **pixels, **statistics),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**pixels, **statistics),
        chat_template=CHAT_TEMPLATE,
    )
    with atomic_output(folder) as temporary:
        temporary.mkdir()
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
    return folder


def _mrope_section(head_dim: int) -> list[int]:
    """Shares half the head's dimensions among time, rows and columns."""
    side = head_dim // 2 * 3 // 10
    return [head_dim // 2 - 2 * side, side, side]


def filter_quality(folder: Path) -> dict[str, int]:
    """Returns counts of what mining put among the negatives and what the filter made of it, after `make demo`.

    A false negative is a tile that shows what the query asks for: in this data a twin of the positive.

    Args:
        folder: Folder of the demo, with mined.jsonl and filtered.reviews.jsonl.
    """
    shown = {Path(row["chunk_path"]).name: row["query"] for row in _rows(folder / "data" / "facts.jsonl")}
    counts = dict.fromkeys(
        ("rows", "rows_with_false_negative", "false_negatives_judged", "false_negatives_removed",
         "true_negatives_judged", "true_negatives_lost"), 0
    )  # fmt: skip
    for row in _rows(folder / "mined.jsonl"):
        counts["rows"] += 1
        answers = [shown[Path(path).name] == row["query"] for path in row["neg_chunk_paths"]]
        counts["rows_with_false_negative"] += any(answers)
    for review in _rows(folder / "filtered.reviews.jsonl"):
        answers, dropped = shown[Path(review["path"]).name] == review["query"], review["verdict"] == "CORRECT"
        counts["false_negatives_judged" if answers else "true_negatives_judged"] += 1
        counts["false_negatives_removed" if answers else "true_negatives_lost"] += dropped
    return counts


def _rows(file: Path) -> list[dict[str, Any]]:
    return [record.data for record in read_jsonl(file)]


def print_filter_quality(folder: Path, out: Any = sys.stdout) -> None:
    """Prints what `filter_quality` counts."""
    found = filter_quality(folder)
    out.write(
        f"mined: {found['rows_with_false_negative']} of {found['rows']} rows have a false negative among their first "
        f"two\nfilter: removed {found['false_negatives_removed']} of {found['false_negatives_judged']} false negatives "
        f"that it looked at, and lost {found['true_negatives_lost']} of {found['true_negatives_judged']} true ones\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Makes the parts of the demo, or counts what its filter did."""
    parser = argparse.ArgumentParser(
        prog="python -m contrastors.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the demo")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tiles and of the random weights")
    parser.add_argument("--filter-quality", action="store_true", help="count what a finished `make demo` filtered")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing demo")
    args = parser.parse_args(argv)
    if args.filter_quality:
        print_filter_quality(args.output)
        return 0
    taken = [path for path in (args.output / "model", args.output / "data") if path.exists()]
    is_demo = (args.output / MARKER).is_file()
    if taken and not (args.overwrite and is_demo):
        way_out = "use --overwrite or another --output" if is_demo else "and is no demo's; use another --output"
        print(f"error: {taken[0]} exists, {way_out}", file=sys.stderr)
        return 1
    write_text(args.output / MARKER, dump_json({"seed": args.seed}) + "\n")
    counts = make_data(args.output / "data", args.seed)
    if (args.output / "model").exists():
        import shutil

        shutil.rmtree(args.output / "model")
    make_model(args.output / "model", args.seed)
    print(f"{args.output}: model/ and data/ with {', '.join(f'{n} {k}' for k, n in counts.items())} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
