"""The one image opener of all scripts: what is embedded, judged and shown is the same upright RGB picture.

Orientation from EXIF is applied, an animation gives its first frame, transparency is laid on white, 16-bit samples are
scaled (not clipped) to 8 bits, every other mode is converted. Whatever cannot be decoded whole is a `BadImage`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_IMAGE_PIXELS = 178_956_970  # where Pillow itself refuses: twice its Image.MAX_IMAGE_PIXELS
MIN_VISUAL_TOKENS = 4  # of --max-num-visual-tokens: below, the smallest size of the image processor is over the limit
MAX_ASPECT_RATIO = 200  # Qwen-VL's own limit in smart_resize
# No EPS, PDF or other format that would start a program or run code on a file from a data set.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # tags of TIFF

# Between one and two times its limit Pillow warns and goes on; our own limit decides, so the warning says nothing new.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class BadImage(ValueError):
    """A file that is no usable image; the text is the reason, without the path."""


def content_hash(data: bytes) -> str:
    """Returns the identity of a document: 32 hex digits of the BLAKE2b hash of the bytes of its file."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_image_bytes(path: str | Path) -> bytes:
    """Returns the bytes of an image file.

    Raises:
        BadImage: The file is missing, empty, or cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise BadImage(getattr(error, "strerror", None) or str(error)) from error
    if not data:
        raise BadImage("the file is empty")
    return data


def open_image(source: str | Path | bytes, max_image_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Returns the upright, fully decoded RGB image of a file or of its bytes.

    Args:
        source: Path, or the bytes of the file.
        max_image_pixels: Larger pictures (width x height) are refused before they are decoded.

    Raises:
        BadImage: Unreadable, truncated, too large, or longer than 200 times its width.
    """
    data = source if isinstance(source, bytes) else read_image_bytes(source)
    Image.MAX_IMAGE_PIXELS = max_image_pixels  # Pillow refuses at twice this; the line below at exactly this
    try:
        with Image.open(BytesIO(data), formats=_known_formats()) as image:
            check_size(*image.size, max_image_pixels)
            image.load()
            picture = _to_rgb(_upright(image), getattr(image, "tag_v2", {}))
            picture.info.clear()  # a colour profile of CMYK or grey samples must not be saved with RGB ones
            return picture
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage(f"not a picture of a known format ({', '.join(_known_formats())})") from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"over twice the limit of {max_image_pixels} pixels (--max-image-pixels)") from error
    except Exception as error:  # the one place that isolates a file: decoders raise what they like (OSError, struct...)
        raise BadImage(" ".join(str(error).split()) or type(error).__name__) from error


def check_size(width: int, height: int, max_image_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Raises BadImage for a picture with too many pixels or an aspect ratio over 200."""
    if width * height > max_image_pixels:
        raise BadImage(f"{width}x{height} is over the limit of {max_image_pixels} pixels (--max-image-pixels)")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadImage(f"{width}x{height} has an aspect ratio over {MAX_ASPECT_RATIO}")


def _known_formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF says nothing of an orientation; the picture itself was decoded whole
        return image


def _to_rgb(image: Image.Image, tiff_tags: Mapping[int, Any]) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _scale_grey(image, tiff_tags).convert("RGB")
    if image.mode == "F":
        raise BadImage("floating-point samples have no agreed white; save it with 8 or 16 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _scale_grey(image: Image.Image, tiff_tags: Mapping[int, Any]) -> Image.Image:
    samples = np.asarray(image)
    if samples.min() < 0 or samples.max() > 65535:
        raise BadImage("32-bit samples have no agreed white; save it with 8 or 16 bits")
    # Pillow hands out 12-bit samples of a TIFF as they are, and 16-bit ones of which 0 is white too.
    white = 4095 if tiff_tags.get(_BITS_PER_SAMPLE) == (12,) else 65535
    scaled = ((samples.astype(np.int32) * 255 + white // 2) // white).astype(np.uint8)
    if tiff_tags.get(_PHOTOMETRIC) == 0:
        scaled = 255 - scaled
    grey = Image.fromarray(scaled)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # PNG names one grey value as transparent
        grey.paste(255, mask=Image.fromarray((samples == transparent).astype(np.uint8) * 255))
    return grey


def pad_small(image: Image.Image, min_side: int, max_ratio: float) -> Image.Image:
    """Returns the image, with white added at the right or bottom where a side is too short to become one token.

    Args:
        image: RGB image.
        min_side: Pixels of one merged patch; both sides reach it.
        max_ratio: Longest side over shortest, at most. With the visual-token limit T as ratio a strip keeps at least
            one token across and needs at most T along, so that resizing neither reaches zero nor leaves the limit.
    """
    width, height = image.size
    shortest = max(min_side, -(-max(width, height) // max(1, int(max_ratio))))
    if min(width, height) >= shortest:
        return image
    padded = Image.new("RGB", (max(width, shortest), max(height, shortest)), "white")
    padded.paste(image)
    return padded
