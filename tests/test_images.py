from __future__ import annotations

import struct
import zlib
from functools import cache
from io import BytesIO

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, features
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from contrastors.images import MAX_IMAGE_PIXELS, BadImage, check_size, content_hash, open_image, pad_small

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")

WHITE, RED, HALF_RED = (255, 255, 255), (255, 0, 0), (255, 127, 127)


def encode(image: Image.Image, file_format: str, **options) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def encode_png(width: int, height: int, depth: int, colour: int, rows: bytes, **chunks: bytes) -> bytes:
    """Returns a PNG made by hand: `rows` are the filtered scan lines, `chunks` (tRNS, iCCP...) stand before them."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def encode_tiff(width: int, height: int, bits: int, photometric: int, samples: bytes) -> bytes:
    """Returns a little-endian grey TIFF made by hand, uncompressed, in one strip."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height}
    tags[279] = len(samples)
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    folder = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 8 + len(samples)) + samples + folder


def pixel(image: Image.Image, place: tuple[int, int] = (0, 0)) -> tuple[int, int, int]:
    assert image.mode == "RGB"
    return image.getpixel(place)


def near(found: tuple[int, ...], wanted: tuple[int, ...], tolerance: int = 2) -> bool:
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= tolerance


# --- colour modes ---


@pytest.mark.parametrize(
    "mode, colour, file_format, wanted",
    [
        ("1", 255, "PNG", WHITE),
        ("1", 0, "TIFF", (0, 0, 0)),
        ("1", 255, "PPM", WHITE),
        ("L", 77, "PNG", (77, 77, 77)),
        ("L", 77, "JPEG", (77, 77, 77)),
        ("L", 77, "PPM", (77, 77, 77)),
        ("P", 9, "PNG", RED),
        ("P", 9, "GIF", RED),
        ("P", 9, "BMP", RED),
        ("P", 9, "TIFF", RED),
        ("LA", (77, 255), "PNG", (77, 77, 77)),
        ("RGB", RED, "PNG", RED),
        ("RGB", RED, "JPEG", RED),
        ("RGB", RED, "MPO", RED),
        ("RGB", RED, "BMP", RED),
        ("RGB", RED, "TIFF", RED),
        ("RGB", RED, "WEBP", RED),
        ("RGB", RED, "JPEG2000", RED),
        ("RGB", RED, "AVIF", RED),
        ("RGBA", (*RED, 255), "PNG", RED),
        ("RGBA", (*RED, 255), "TIFF", RED),
        ("CMYK", (0, 255, 255, 0), "JPEG", RED),
        ("CMYK", (0, 255, 255, 0), "TIFF", RED),
        ("CMYK", (0, 0, 0, 255), "JPEG", (0, 0, 0)),
        ("YCbCr", (76, 85, 255), "JPEG", RED),
        ("LAB", (136, 208, 195), "TIFF", RED),
        ("I;16", 65535, "PNG", WHITE),
        ("I;16", 77 * 257, "PNG", (77, 77, 77)),
        ("I;16", 77 * 257, "TIFF", (77, 77, 77)),
        ("I;16B", 77 * 257, "TIFF", (77, 77, 77)),
        ("I;16", 77 * 257, "JPEG2000", (77, 77, 77)),
        ("I", 77 * 257, "PPM", (77, 77, 77)),
    ],
)
def test_every_mode_becomes_rgb_of_the_same_colour(mode, colour, file_format, wanted):
    if file_format == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    image = Image.new(mode, (32, 32), colour)
    if mode == "P":
        image.putpalette(bytes(27) + bytes(RED))
    lossy = file_format in ("JPEG", "WEBP", "AVIF", "MPO")
    opened = open_image(encode(image, file_format, **({"quality": 95} if lossy else {})))
    assert near(pixel(opened), wanted, 12 if mode == "LAB" else 4 if lossy else 0)


RAMP = np.arange(0, 65536, 257, dtype=np.uint16)[None].repeat(4, axis=0)  # 4 x 256


@pytest.mark.parametrize(
    "data",
    [
        encode(Image.fromarray(RAMP), "PNG"),
        encode(Image.fromarray(RAMP), "TIFF"),
        encode(Image.fromarray(RAMP), "TIFF", compression="tiff_lzw"),
        encode(Image.fromarray(RAMP.astype(np.int32)), "PPM"),
        encode_tiff(256, 4, 16, 1, RAMP.tobytes()),
        encode_tiff(256, 4, 16, 0, (65535 - RAMP).tobytes()),
    ],
    ids=["png", "tiff", "tiff-lzw", "pgm", "tiff-by-hand", "tiff-white-is-zero"],
)
def test_a_16_bit_ramp_stays_a_ramp(data):
    opened = np.asarray(open_image(data))
    assert (opened == np.arange(256, dtype=np.uint8)[None, :, None]).all()


def test_a_16_bit_ramp_from_top_to_bottom_differs_from_one_from_left_to_right():
    across, down = (np.asarray(open_image(encode(Image.fromarray(r), "PNG"))) for r in (RAMP, RAMP.T.copy()))
    assert (across.transpose(1, 0, 2) == down).all() and across.std() > 70


def test_16_bit_samples_are_rounded_not_cut():
    samples = np.array([[0, 128, 129, 65406, 65407, 65535]], dtype=np.uint16)
    opened = np.asarray(open_image(encode(Image.fromarray(samples), "PNG")))[0, :, 0]
    assert opened.tolist() == [0, 0, 1, 254, 255, 255]


def test_a_12_bit_ramp_fills_the_whole_range():
    packed = b"".join(struct.pack(">I", a << 12 | b)[1:] for a, b in zip((0, 1365), (2730, 4095), strict=True))
    opened = np.asarray(open_image(encode_tiff(4, 1, 12, 1, packed)))[0, :, 0]
    assert opened.tolist() == [0, 170, 85, 255]


@pytest.mark.parametrize("samples", [np.float32([[0, 1.0]]), np.int32([[0, 65536]]), np.int32([[-1, 5]])])
def test_samples_without_an_agreed_white_are_refused(samples):
    with pytest.raises(BadImage, match="no agreed white; save it with 8 or 16 bits"):
        open_image(encode(Image.fromarray(samples), "TIFF"))


def test_a_colour_profile_does_not_outlive_the_conversion():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for mode in ("CMYK", "RGB", "L"):
        opened = open_image(encode(Image.new(mode, (32, 32)), "JPEG", icc_profile=profile, comment="c"))
        assert b"iCCP" not in encode(opened, "PNG") and not opened.info


# --- orientation ---

UPRIGHT = np.zeros((16, 48, 3), dtype=np.uint8)
UPRIGHT[:8, :24], UPRIGHT[:8, 24:], UPRIGHT[8:, :24] = RED, (0, 255, 0), (0, 0, 255)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "JPEG"])
def test_damaged_exif_costs_no_picture_that_decodes(file_format):
    image = Image.new("RGB", (40, 24), (200, 10, 10))
    data = encode(image, file_format, exif=b"Exif\0\0no TIFF header at all")
    assert open_image(data).size == (40, 24)


# How the upright picture must be stored so that the orientation tag of EXIF turns it upright again.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT),
    7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "PNG16"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_comes_out_upright(file_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored, wanted = STORED[orientation], UPRIGHT
    if file_format == "PNG16":
        stored, wanted = stored[..., 0].astype(np.uint16) * 257, UPRIGHT[..., :1].repeat(3, axis=2)
    options = {"quality": 100, "subsampling": 0} if file_format == "JPEG" else {"lossless": True}
    data = encode(Image.fromarray(np.ascontiguousarray(stored)), file_format[:4].strip("1"), exif=exif, **options)
    opened = np.asarray(open_image(data)).astype(int)
    assert opened.shape == wanted.shape and abs(opened - wanted).max() <= 3
    assert not open_image(data).getexif().get(0x0112)


# --- transparency ---


def with_palette(image: Image.Image) -> Image.Image:
    image.putpalette([*RED, 0, 0, 0])
    return image


GREY16 = b"\0" + struct.pack(">HH", 1000, 0)
TRANSPARENT = {
    "rgba": (encode(Image.new("RGBA", (2, 2), (*RED, 0)), "PNG"), WHITE),
    "rgba-half": (encode(Image.new("RGBA", (2, 2), (*RED, 128)), "PNG"), HALF_RED),
    "la": (encode(Image.new("LA", (2, 2), (0, 0)), "PNG"), WHITE),
    "la-half": (encode(Image.new("LA", (2, 2), (0, 128)), "PNG"), (127, 127, 127)),
    "palette-index": (encode(with_palette(Image.new("P", (2, 2), 0)), "PNG", transparency=0), WHITE),
    "palette-other": (encode(with_palette(Image.new("P", (2, 2), 0)), "PNG", transparency=1), RED),
    "palette-alpha": (encode(with_palette(Image.new("P", (2, 2), 0)), "PNG", transparency=b"\x80\xff"), HALF_RED),
    "grey-value": (encode(Image.new("L", (2, 2), 5), "PNG", transparency=5), WHITE),
    "rgb-value": (encode(Image.new("RGB", (2, 2), RED), "PNG", transparency=RED), WHITE),
    "bilevel-value": (encode_png(8, 1, 1, 0, b"\0\0", tRNS=b"\0\0"), WHITE),
    "grey16-value": (encode_png(2, 1, 16, 0, GREY16, tRNS=struct.pack(">H", 1000)), WHITE),
    "grey16-other": (encode_png(2, 1, 16, 0, GREY16, tRNS=struct.pack(">H", 1001)), (4, 4, 4)),
    "gif": (encode(with_palette(Image.new("P", (2, 2), 0)), "GIF", transparency=0), WHITE),
    "webp": (encode(Image.new("RGBA", (2, 2), (*RED, 0)), "WEBP", lossless=True), WHITE),
    "tiff": (encode(Image.new("RGBA", (2, 2), (*RED, 128)), "TIFF"), HALF_RED),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparency_is_laid_on_white(name):
    data, wanted = TRANSPARENT[name]
    assert near(pixel(open_image(data)), wanted, 1)


# --- animations, file types ---


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_an_animation_gives_its_first_frame(file_format):
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
    with Image.open(BytesIO(data)) as image:
        assert image.n_frames == 3
    assert near(pixel(open_image(data)), RED, 4)


def test_content_counts_and_not_the_name_of_the_file(tmp_path):
    for name, file_format in (("p.jpg", "WEBP"), ("q.JPG", "PNG"), ("no ending", "BMP"), ("é #1 50%.png", "JPEG")):
        (tmp_path / name).write_bytes(encode(Image.new("RGB", (8, 8), RED), file_format, quality=95))
        assert near(pixel(open_image(tmp_path / name)), RED, 4)


@pytest.mark.parametrize(
    "data", [encode(Image.new("RGB", (8, 8)), "EPS"), b"%PDF-1.7\n", b"<svg/>", b"hello", b"\0" * 4096]
)
def test_what_is_no_picture_is_refused_with_the_same_words_every_time(data):
    reasons = set()
    for _ in range(3):
        with pytest.raises(BadImage) as caught:
            open_image(data)
        reasons.add(str(caught.value))
    assert len(reasons) == 1 and "not a picture of a known format (" in reasons.pop()


def test_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    cases = {"empty.png": "is empty", "gone.png": "No such file", ".": "Is a directory", "nul\0.png": "null byte"}
    for name, reason in cases.items():
        with pytest.raises(BadImage, match=reason):
            open_image(tmp_path / name)


# --- damage ---


@cache
def sample(file_format: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (24, 31, 3), dtype=np.uint8)
    frames = [Image.fromarray(noise), Image.fromarray(255 - noise)]
    if file_format == "GIF":
        frames = [frame.quantize(32) for frame in frames]
    animated = {"save_all": True, "append_images": frames[1:]} if file_format != "JPEG" else {}
    compressed = {"compression": "tiff_lzw"} if file_format == "TIFF" else {}
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(frames[0], file_format, exif=exif, **animated, **compressed)


FUZZED = ["PNG", "JPEG", "GIF", "WEBP", "TIFF"]


@settings(max_examples=600)
@given(
    file_format=st.sampled_from(FUZZED),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
    keep=st.one_of(st.just(1.0), st.floats(0, 1)),
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_give_a_picture_or_a_bad_image_and_nothing_else(file_format, changes, keep):
    data = bytearray(sample(file_format))
    for place, value in changes:
        head = len(data) if value % 2 else 200  # headers hold the interesting bytes
        data[int(place * min(head, len(data)))] = value
    try:
        opened = open_image(bytes(data[: int(keep * len(data))] or b"\0"), max_image_pixels=100_000)
    except BadImage as error:
        assert str(error) and "\n" not in str(error) and " at 0x" not in str(error)
    else:
        assert opened.mode == "RGB" and 0 < opened.width * opened.height <= 100_000
        assert len(opened.tobytes()) == opened.width * opened.height * 3


@pytest.mark.parametrize("file_format", FUZZED)
def test_half_a_file_is_a_bad_image_and_not_a_grey_picture(file_format):
    data = encode(Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)), file_format)
    open_image(data)
    with pytest.raises(BadImage):
        open_image(data[: len(data) // 2])


@pytest.mark.parametrize("side", [15_000, 14_000, 60_000])
def test_a_bomb_is_refused_before_its_pixels_are_decoded(side):
    assert side * side > MAX_IMAGE_PIXELS
    with pytest.raises(BadImage, match="limit of 178956970 pixels .--max-image-pixels"):
        open_image(encode_png(side, side, 1, 0, b""))  # no pixels at all: decoding would say so


@pytest.mark.parametrize("size, allowed", [((50, 20), True), ((50, 21), False), ((100, 100), False)])
def test_the_pixel_limit_is_exact(size, allowed):
    data = encode(Image.new("1", size), "PNG")
    if allowed:
        assert open_image(data, max_image_pixels=1000).size == size
    else:
        with pytest.raises(BadImage, match="limit of 1000 pixels .--max-image-pixels"):
            open_image(data, max_image_pixels=1000)


@pytest.mark.parametrize(
    "chunks",
    [
        {"iCCP": b"icc\0\0" + zlib.compress(bytes(2_000_000))},
        {"zTXt": b"text\0\0" + zlib.compress(b"a" * 2_000_000)},
        {"iTXt": b"text\0\1\0\0\0" + zlib.compress(b"a" * 2_000_000)},
    ],
    ids=["icc", "ztxt", "itxt"],
)
def test_a_bomb_of_side_data_is_a_bad_image(chunks):
    with pytest.raises(BadImage, match="too large|Decompressed"):
        open_image(encode_png(1, 1, 8, 0, b"\0\0", **chunks))


# --- sizes ---


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (3, 3), (31, 639), (10, 2000)])
def test_small_pictures_and_strips_up_to_200_open(size):
    assert open_image(encode(Image.new("RGB", size), "PNG")).size == size


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2500)])
def test_longer_strips_are_refused_with_their_size(size):
    with pytest.raises(BadImage, match=f"{size[0]}x{size[1]} has an aspect ratio over 200"):
        open_image(encode(Image.new("RGB", size), "PNG"))


@settings(max_examples=300)
@given(
    longest=st.one_of(st.integers(1, 300), st.integers(1, 4000)),
    shortest=st.one_of(st.just(1), st.integers(1, 4000)),
    upright=st.booleans(),
    limit=st.one_of(st.integers(4, 12), st.integers(4, 2000)),
    token_side=st.sampled_from([28, 32]),
    smallest=st.sampled_from([3136, 4096, 65536]),
)
def test_a_padded_picture_keeps_within_the_visual_token_limit(longest, shortest, upright, limit, token_side, smallest):
    shortest = max(shortest, -(-longest // 200))
    assume(shortest <= longest)
    width, height = (shortest, longest) if upright else (longest, shortest)
    check_size(width, height)
    padded = pad_small(Image.new("RGB", (width, height), RED), token_side, limit)
    assert padded.width >= width and padded.height >= height
    max_pixels = limit * token_side**2
    rows, columns = smart_resize(padded.height, padded.width, token_side, min(smallest, max_pixels // 4), max_pixels)
    assert min(rows, columns) >= token_side and rows * columns <= max_pixels


def test_padding_is_white_and_leaves_the_picture_where_it_was():
    for size, padded_size in (((1, 1), (32, 32)), ((3, 100), (32, 100)), ((10, 2000), (200, 2000))):
        padded = pad_small(Image.new("RGB", size, RED), 32, 10)
        pixels = np.asarray(padded)
        assert padded.size == padded_size
        assert (pixels[: size[1], : size[0]] == RED).all()
        assert (pixels[size[1] :] == 255).all() and (pixels[:, size[0] :] == 255).all()


def test_a_picture_that_is_large_enough_is_not_padded():
    image = Image.new("RGB", (32, 64))
    assert pad_small(image, 32, 256) is image


# --- identity ---


def test_the_content_hash_is_that_of_the_bytes():
    assert content_hash(b"tile") == content_hash(bytes([*b"tile"])) != content_hash(b"tile ")
    assert content_hash(b"") == "cae66941d9efbd404e4d88758ea67670" and len(content_hash(b"x")) == 32
