"""The way of a tile to the device: tiles a second and core, bytes, padding; against the plain processor path.

Tiles are drawn pages of 875 x 1024 pixels, PNG and JPEG, or those of --tiles. Each way opens the file, resizes it and
makes patches, in one process: the plain one as fp32 with the doubled temporal axis, ours as uint8 for the device to
unpack. What the device unpacks must equal the plain patches bit by bit.

  python -m benchmarks.loader --number 24
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from benchmarks.common import alternate, describe_machine, make_parser, show
from contrastors.chunking import pack_by_tokens
from contrastors.demo import make_model
from contrastors.images import open_image
from contrastors.pixels import unpack_patches
from contrastors.processing import BiQwen3Processor

WIDTH, HEIGHT, TOKEN_SIDE, PROMPT = 875, 1024, 32, 22
LIMIT = 1024  # visual tokens: every tile keeps its size


def draw_pages(folder: Path, number: int) -> list[Path]:
    """Writes pages of lines that look like text, by turns PNG and JPEG."""
    source, paths = random.Random(0), []
    for page in range(number):
        image = Image.new("RGB", (WIDTH, HEIGHT), (250, 250, 248))
        draw = ImageDraw.Draw(image)
        for y in range(20, HEIGHT - 20, 14):
            words = " ".join("".join(source.choices("etaoinshrdlu", k=source.randint(2, 9))) for _ in range(18))
            draw.text((24, y), words[: source.randint(40, 130)], fill=(30, 30, 30))
        paths.append(folder / f"{page}.{'jpg' if page % 2 else 'png'}")
        image.save(paths[-1], quality=90)
    return paths


def make_plain(processor: BiQwen3Processor, path: Path) -> torch.Tensor:
    """The processor's own fp32 patches, (P, 3 T p p)."""
    size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    return processor.image_processor(images=[open_image(str(path))], size=size, return_tensors="pt")["pixel_values"]


def measure_tiles(processor: BiQwen3Processor, paths: list[Path], rounds: int) -> list[dict]:
    """Returns a row a way; the last column is the largest difference of any pixel from the plain way."""
    pixels = processor.image_processor
    statistics = [torch.tensor(values) * (1.0 / (1 / 255)) for values in (pixels.image_mean, pixels.image_std)]

    def each(work):
        return lambda: [work(path) for path in paths]

    ways = {
        "decode alone": lambda path: open_image(str(path)),
        "plain processor": lambda path: make_plain(processor, path),
        "ours": lambda path: processor.encode_document(open_image(str(path))),
    }
    times = alternate({name: each(way) for name, way in ways.items()}, rounds)
    plain = [make_plain(processor, path) for path in paths]
    ours = [processor.encode_document(open_image(str(path))).patches for path in paths]
    unpacked = [unpack_patches(patches, *statistics, processor.temporal_patch_size) for patches in ours]
    difference = max(float((a - b).abs().max()) for a, b in zip(plain, unpacked, strict=True))
    sizes = {"plain processor": (plain, 0.0), "ours": (ours, difference)}
    rows = []
    for name in ways:
        tensors, off = sizes.get(name, ([], 0.0))
        rows.append({
            "way": name, "tiles/s of a core": len(paths) / times[name].cpu_seconds,
            "MB a tile": sum(t.numel() * t.element_size() for t in tensors) / len(paths) / 1e6,
            "largest difference": off,
        })  # fmt: skip
    return rows


def measure_padding(number: int, chunk: int, seed: int = 0) -> list[dict]:
    """Padded over real tokens of half full tiles, half of 10 to 90 % height: documents as they come, and by tokens."""
    source = random.Random(seed)
    heights = [HEIGHT if n % 2 else round(source.uniform(0.1, 0.9) * HEIGHT) for n in range(number)]
    source.shuffle(heights)
    visual = [max(1, round(height / TOKEN_SIDE)) * round(WIDTH / TOKEN_SIDE) for height in heights]
    lengths = [tokens + PROMPT for tokens in visual]
    as_they_come = [list(range(n, min(n + chunk, number))) for n in range(0, number, chunk)]
    budget = chunk * max(visual)
    ways = {
        "as they come": as_they_come,
        f"--chunk-tokens {budget}": pack_by_tokens(lengths, visual, chunk, budget),
        f"--chunk-tokens {budget}, up to {4 * chunk} documents": pack_by_tokens(lengths, visual, 4 * chunk, budget),
    }
    rows = []
    for name, plan in ways.items():
        padded = sum(len(places) * max(lengths[p] for p in places) for places in plan)
        row = {"documents": number, "way": name, "chunks": len(plan), "padded / real": padded / sum(lengths)}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "loader")
    parser.add_argument("--number", type=int, default=24, help="tiles")
    parser.add_argument("--tiles", type=Path, help="folder of tiles to take in place of drawn ones")
    parser.add_argument("--documents", type=int, default=192, help="documents of a step whose padding is counted")
    parser.add_argument("--chunk", type=int, default=8, help="documents of a chunk there")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each; the fastest counts")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", hidden=64, layers=1, vision_hidden=32, vision_layers=3)
        processor = BiQwen3Processor.from_pretrained(str(model), LIMIT)
        if args.tiles:
            paths = sorted(p for p in args.tiles.iterdir() if p.suffix in (".png", ".jpg", ".webp"))[: args.number]
        else:
            paths = draw_pages(Path(folder), args.number)
        rows = measure_tiles(processor, paths, args.rounds)
    if not args.json:
        print(f"{describe_machine()}\n")
    padding = measure_padding(args.documents, args.chunk)
    show("loader: tiles", rows, args.json)
    show("loader: padding", padding, args.json)
    return 0 if rows[-1]["largest difference"] == 0 and padding[1]["padded / real"] <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
