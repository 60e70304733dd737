from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import processors
from torch import nn
from transformers import AutoProcessor, Qwen2VLImageProcessor, Qwen3VLProcessor

from contrastors.biqwen3 import BiQwen3
from contrastors.demo import (
    CHAT_TEMPLATE,
    DOTS,
    HEADERS,
    PLACES,
    SPECIAL_TOKENS,
    Facts,
    make_model,
    make_tokenizer,
)
from contrastors.images import MIN_VISUAL_TOKENS
from contrastors.pixels import pack_patches, unpack_patches
from contrastors.processing import (
    DOCUMENT_INSTRUCTION,
    QUERY_INSTRUCTION,
    BiQwen3Processor,
    Inputs,
    Item,
)
from contrastors.records import dump_json

EXAMPLES = settings(max_examples=60)
# A text made to merge over every border of a prompt: newlines, blanks, composed and decomposed letters, wide ones.
MERGING = "user\n\nred header\n\n blue \n  footer\u2028 caf\u00e9 \U0001f600\U0001f600 assistant\n\n system \t"
PLAIN_TEXTS = [
    "red header, blue footer",
    "\nleading newline",
    "\n\n",
    "trailing space ",
    " \t both sides \n",
    "\U0001f600 smile \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "line\u2028separator\u0085and\u2029more\r\n",
    "e\u0301 decomposed, \u0301starts with an accent",
    "a",
    "\u8868\u683c 表 \u0627\u0644",
    "half a mark <|im_ and |> and <image> and <|unknown|>",
]
MARKERS = ["<|image_pad|>", "<|im_end|>", "<|vision_start|>", "<|im_start|>", "<|endoftext|>", "<|video_pad|>"]


def messages(instruction: str, content: dict) -> list[dict]:
    system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
    return [system, {"role": "user", "content": [content]}]


def render(raw: Qwen3VLProcessor, instruction: str, content: dict) -> str:
    return raw.apply_chat_template(messages(instruction, content), tokenize=False, add_generation_prompt=True)


def encode_whole(raw: Qwen3VLProcessor, text: str) -> list[int]:
    """Token ids of a query prompt, from the checkpoint's own processor in one call."""
    return raw(text=[render(raw, QUERY_INSTRUCTION, {"type": "text", "text": text})])["input_ids"][0]


def with_parts(raw: Qwen3VLProcessor, **parts) -> Qwen3VLProcessor:
    """A processor with another tokenizer, image processor or template."""
    own = {name: getattr(raw, name) for name in ("image_processor", "tokenizer", "video_processor", "chat_template")}
    return Qwen3VLProcessor(**own | parts)


@pytest.fixture(scope="module")
def raw(tiny_model: Path) -> Qwen3VLProcessor:
    """The processor of a checkpoint whose tokenizer merges newlines and blanks, as those of real ones do."""
    raw = AutoProcessor.from_pretrained(tiny_model)
    turns = ["system\n", "user\n", "assistant\n", QUERY_INSTRUCTION, DOCUMENT_INSTRUCTION]
    return with_parts(raw, tokenizer=make_tokenizer([MERGING, *turns] * 30, vocab_size=900))


@pytest.fixture(scope="module")
def processor(raw: Qwen3VLProcessor) -> BiQwen3Processor:
    return BiQwen3Processor(raw, max_num_visual_tokens=16, max_query_tokens=400)


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


# --- query prompts ---


def test_the_tokenizer_of_these_tests_merges_over_the_start_of_the_text(raw):
    joined = raw.tokenizer("user\n\n", add_special_tokens=False)["input_ids"]
    parts = [raw.tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("user\n", "\n")]
    assert joined != parts[0] + parts[1], "else no test below would see a prompt that is encoded in the wrong parts"


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_a_query_prompt_equals_the_checkpoints_processor_run_whole(raw, processor, text):
    item = processor.encode_query(text)
    assert item.token_ids == encode_whole(raw, text)
    assert (item.truncated, item.patches, item.grid) == (False, None, None)


@EXAMPLES
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\r\t\u2028'<|>é")), max_size=40))
def test_any_text_without_control_tokens_equals_whole_string_tokenisation(raw, processor, text):
    assert processor.encode_query(text).token_ids == encode_whole(raw, text)


def test_the_prompt_is_the_instruction_as_system_message_with_generation_prompt(raw, processor):
    assert raw.tokenizer.decode(processor.encode_query("red dot").token_ids) == (
        "<|im_start|>system\nRetrieve images or text relevant to the user's query.<|im_end|>\n"
        "<|im_start|>user\nred dot<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("marker", [*MARKERS, "<image>"])
@pytest.mark.parametrize("pattern", ["what does {} mean?", "{}", "{}{}", "\n{} ", "<|im_{}"])
def test_a_control_marker_in_a_query_stays_text(raw, processor, marker, pattern):
    text = pattern.replace("{}", marker)
    found, plain = (processor.encode_query(t).token_ids for t in (text, "plain"))
    special = set(raw.tokenizer.all_special_ids)
    assert [i for i in found if i in special] == [i for i in plain if i in special]
    assert f"user\n{text}<|im_end|>\n<|im_start|>assistant\n" in raw.tokenizer.decode(found)


def test_a_marker_in_one_query_leaves_the_next_prompt_as_it_was(raw, processor):
    before = processor.encode_query("plain").token_ids
    processor.encode_query("<|image_pad|>")
    assert processor.encode_query("plain").token_ids == before == encode_whole(raw, "plain")


# --- truncation ---


@pytest.mark.parametrize("num_words", [1, 7, 40])
def test_a_truncated_query_equals_the_text_cut_by_hand(raw, num_words):
    kept = " ".join(["header"] * num_words)
    limit = len(encode_whole(raw, kept))
    processor = BiQwen3Processor(raw, max_query_tokens=limit)
    whole, longer = processor.encode_query(kept), processor.encode_query(kept + " header" * 500)
    assert longer.token_ids == whole.token_ids == encode_whole(raw, kept) and len(longer.token_ids) == limit
    assert (whole.truncated, longer.truncated) == (False, True)


@EXAMPLES
@given(text=st.text(max_size=60), limit=st.integers(80, 130))
def test_a_query_never_exceeds_the_limit_and_keeps_both_ends_of_the_prompt(raw, text, limit):
    item = BiQwen3Processor(raw, max_query_tokens=limit).encode_query(text)
    long = BiQwen3Processor(raw, max_query_tokens=10_000).encode_query(text)
    assert len(item.token_ids) == min(limit, len(long.token_ids))
    assert item.truncated == (len(long.token_ids) > limit)
    tail = raw.tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert item.token_ids[-len(tail) :] == tail
    assert item.token_ids[: -len(tail)] == long.token_ids[: limit - len(tail)][: len(long.token_ids) - len(tail)]


def test_the_smallest_query_limit_is_named_when_it_is_not_met(raw):
    empty = len(encode_whole(raw, ""))
    with pytest.raises(ValueError) as caught:
        BiQwen3Processor(raw, max_query_tokens=empty)
    assert str(caught.value) == (
        f"--max-query-tokens {empty}: the prompt around a query takes {empty} tokens, "
        f"so at least {empty + 1} are needed"
    )
    assert BiQwen3Processor(raw, max_query_tokens=empty + 1).encode_query("red dot").truncated


# --- what the tokenizer's post-processor adds ---


@pytest.fixture(scope="module")
def dressing_raw(raw: Qwen3VLProcessor) -> Qwen3VLProcessor:
    """A processor whose tokenizer puts a token before and one after every text, as embedding checkpoints do."""
    tokenizer = make_tokenizer([MERGING, QUERY_INSTRUCTION, DOCUMENT_INSTRUCTION] * 30)
    first, last = tokenizer.convert_tokens_to_ids(["<|box_start|>", "<|endoftext|>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|box_start|> $A <|endoftext|>", special_tokens=[("<|box_start|>", first), ("<|endoftext|>", last)]
    )
    return with_parts(raw, tokenizer=tokenizer)


def test_an_appended_token_stays_at_the_end_of_queries_also_of_truncated_ones(dressing_raw):
    end, start = dressing_raw.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|box_start|>"])
    wide = BiQwen3Processor(dressing_raw)
    whole = encode_whole(dressing_raw, "red header")
    assert wide.encode_query("red header").token_ids == whole and (whole[0], whole[-1]) == (start, end)
    cut = BiQwen3Processor(dressing_raw, max_query_tokens=len(whole)).encode_query("red header" + " header" * 99)
    assert cut.truncated and cut.token_ids == whole


def test_an_appended_token_stays_at_the_end_of_documents(dressing_raw):
    image = noise_image(64, 64)
    found = BiQwen3Processor(dressing_raw).encode_document(image)
    text = render(dressing_raw, DOCUMENT_INSTRUCTION, {"type": "image"})
    size = {"shortest_edge": 4096, "longest_edge": 256 * 1024}
    whole = dressing_raw(text=[text], images=[image], size=size, return_tensors="pt")["input_ids"][0].tolist()
    assert whole[-1] == dressing_raw.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert found.token_ids[-1] == whole[-1] and found.token_ids[0] == whole[0]


# --- document prompts and pixels ---


@pytest.mark.parametrize("size", [(64, 64), (128, 96), (100, 37), (300, 200), (130, 500), (1000, 700)])
@pytest.mark.parametrize("limit", [4, 16, 256])
def test_a_document_equals_the_checkpoints_processor_run_whole(raw, size, limit):
    processor = BiQwen3Processor(raw, max_num_visual_tokens=limit)
    image = noise_image(*size)
    found = processor.encode_document(image)
    sizes = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    text = render(raw, DOCUMENT_INSTRUCTION, {"type": "image"})
    wanted = raw(text=[text], images=[image], size=sizes, return_tensors="pt")
    assert found.token_ids == wanted["input_ids"][0].tolist()
    assert list(found.grid) == wanted["image_grid_thw"][0].tolist()
    encoder = BiQwen3(nn.Identity(), raw.image_processor.image_mean, raw.image_processor.image_std)
    assert torch.equal(unpack_patches(found.patches, encoder.pixel_mean, encoder.pixel_std, 2), wanted["pixel_values"])


def test_the_document_prompt_reads_as_specified(raw, processor):
    item = processor.encode_document(noise_image(64, 64))
    assert raw.tokenizer.decode(item.token_ids).replace("<|image_pad|>" * 4, "*") == (
        "<|im_start|>system\nRepresent the user's input.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>*<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )


STATISTICS = [([0.5] * 3, [0.5] * 3), ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])]


@pytest.mark.parametrize("mean, std", STATISTICS)
@pytest.mark.parametrize("patch, frames", [(16, 2), (14, 2), (16, 3)])
def test_packed_pixels_unpack_bit_equal_to_the_image_processor(mean, std, patch, frames):
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": frames}
    pixels = Qwen2VLImageProcessor(**sizes, image_mean=mean, image_std=std)
    image = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(48).reshape(48, 256)[:, :, None].repeat(3, axis=2))
    limits = {"size": {"shortest_edge": 1024, "longest_edge": 10**6}, "return_tensors": "pt"}
    wanted = pixels(images=[image], **limits)["pixel_values"]
    raw = pixels(images=[image], do_rescale=False, do_normalize=False, **limits)["pixel_values"]
    packed = pack_patches(raw, frames)
    encoder = BiQwen3(nn.Identity(), mean, std)
    assert len(wanted.unique()) > 200
    assert torch.equal(unpack_patches(packed, encoder.pixel_mean, encoder.pixel_std, frames), wanted)


def test_packed_pixels_have_an_eighth_of_the_bytes(raw, processor):
    image = noise_image(128, 96)
    packed = processor.encode_document(image).patches
    whole = raw.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    assert packed.dtype == torch.uint8 and len(packed) == len(whole)
    assert packed.nbytes * 8 == whole.nbytes


def test_packed_and_float_pixels_give_the_same_vector(tiny_model):
    processor = BiQwen3Processor.from_pretrained(str(tiny_model))
    pixels = processor.image_processor
    model = BiQwen3.from_pretrained(str(tiny_model), pixels.image_mean, pixels.image_std).eval()
    image = noise_image(128, 96)
    (chunk,) = Inputs.from_items([processor.encode_document(image)], processor.pad_id).chunks(1)
    size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    floats = pixels(images=[image], size=size, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        assert torch.equal(model(**chunk), model(**chunk | {"pixel_values": floats}))


# --- the limit of visual tokens ---


@st.composite
def sizes(draw):
    """Sides of an image that the opener lets through: up to 200 times as long as wide, not too many pixels."""
    short = draw(st.one_of(st.integers(1, 40), st.integers(1, 400)))
    long = draw(st.integers(short, min(200 * short, max(short, 250_000 // short), 6000)))
    return draw(st.sampled_from([(short, long), (long, short)]))


@settings(max_examples=150)
@given(size=sizes(), limit=st.one_of(st.integers(4, 40), st.integers(4, 4096)))
@example(size=(31, 639), limit=4)
@example(size=(1, 1), limit=4)
@example(size=(1, 200), limit=4)
@example(size=(200, 1), limit=4096)
@example(size=(3, 3), limit=5)
@example(size=(10, 2000), limit=4)
@example(size=(2000, 10), limit=199)
@example(size=(65, 13000), limit=256)
@example(size=(1024, 1024), limit=1023)
def test_visual_tokens_are_never_zero_and_never_over_the_limit(raw, size, limit):
    processor = BiQwen3Processor(raw, max_num_visual_tokens=limit)
    item = processor.encode_document(Image.new("RGB", size, "red"))
    num_slots = item.token_ids.count(processor.image_token_id)
    frames, rows, columns = item.grid
    assert frames == 1 and rows % 2 == columns % 2 == 0 and len(item.patches) == rows * columns
    assert 1 <= num_slots <= limit and num_slots == rows * columns // 4


def test_a_small_checkpoint_minimum_is_kept_and_a_large_one_gives_way_to_the_limit(raw):
    assert BiQwen3Processor(raw, max_num_visual_tokens=256).min_pixels == 4 * 1024
    assert BiQwen3Processor(raw, max_num_visual_tokens=8).min_pixels == 2 * 1024


def test_too_small_a_visual_limit_is_refused(raw):
    with pytest.raises(ValueError, match="^--max-num-visual-tokens 3: at least 4 are needed$"):
        BiQwen3Processor(raw, max_num_visual_tokens=MIN_VISUAL_TOKENS - 1)


def test_pixels_of_a_token_are_read_from_the_checkpoint(raw, processor):
    assert processor.pixels_per_token == 1024
    pixels = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size={"shortest_edge": 784, "longest_edge": 10**6})
    other = BiQwen3Processor(with_parts(raw, image_processor=pixels), max_num_visual_tokens=6)
    assert other.pixels_per_token == 784 and other.max_pixels == 6 * 784
    assert 1 <= other.encode_document(noise_image(700, 500)).token_ids.count(other.image_token_id) <= 6


def test_what_a_checkpoint_records_is_what_acts(processor):
    found = processor.describe()
    assert dump_json(found)
    assert found["max_num_visual_tokens"] == 16 and found["max_query_tokens"] == 400
    assert (found["max_pixels"], found["min_pixels"]) == (processor.max_pixels, processor.min_pixels) == (16384, 4096)
    assert found["image_backend"] == "torchvision"
    assert (found["query_instruction"], found["document_instruction"]) == (
        "Retrieve images or text relevant to the user's query.",
        "Represent the user's input.",
    )


# --- checkpoints that do not fit ---


@pytest.mark.parametrize(
    "template, reason",
    [
        (CHAT_TEMPLATE.replace("{{- part.text }}", "{{- part.text + part.text }}"), "user's text exactly once"),
        (CHAT_TEMPLATE.replace("{{- part.text }}", "{{- part.text | lower }}"), "user's text exactly once"),
        (CHAT_TEMPLATE.replace("<|im_end|>", " end"), "no control tokens around"),
        (CHAT_TEMPLATE.replace("<|im_", "<im_"), "no control tokens around"),
        (CHAT_TEMPLATE.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"), "other than one slot"),
        (CHAT_TEMPLATE.replace("<|image_pad|>", ""), "other than one slot"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_sentence(raw, template, reason):
    with pytest.raises(ValueError, match=reason):
        BiQwen3Processor(with_parts(raw, chat_template=template))


def test_the_image_processor_must_be_the_torchvision_one(raw):
    class Other:
        patch_size = 16

    other = with_parts(raw)
    other.image_processor = Other()
    with pytest.raises(ValueError, match="must be the torchvision one: pip install torchvision"):
        BiQwen3Processor(other)


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(raw):
    tokenizer = make_tokenizer([QUERY_INSTRUCTION])
    tokenizer.pad_token = None
    assert BiQwen3Processor(with_parts(raw, tokenizer=tokenizer)).pad_id == tokenizer.eos_token_id


def test_a_folder_without_processor_is_one_sentence(tmp_path, raw):
    for folder in (tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match=f"^--model {folder}: no processor can be loaded") as caught:
            BiQwen3Processor.from_pretrained(str(folder))
        assert "\n" not in str(caught.value)
    raw.tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="^--model .*text: "):
        BiQwen3Processor.from_pretrained(str(tmp_path / "text"))


# --- chunks ---


def flat_items(lengths: list[int], grids: list[tuple[int, int, int]] | None) -> list[Item]:
    """Items whose numbers all differ, so that a row that went astray is seen."""
    source = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    items = []
    for place, length in enumerate(lengths):
        ids = [1000 * (place + 1) + i for i in range(length)]
        if grids is None:
            items.append(Item(ids))
        else:
            count = grids[place][0] * grids[place][1] * grids[place][2]
            items.append(Item(ids, source.roll(place)[:count, None].repeat(1, 3), grids[place]))
    return items


GRID = st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6))


@EXAMPLES
@given(
    rows=st.lists(st.tuples(st.integers(1, 12), GRID), min_size=1, max_size=9),
    size=st.integers(1, 12),
    images=st.booleans(),
)
def test_chunks_split_and_pad_rightly_and_pixels_go_with_their_rows(rows, size, images):
    items = flat_items([length for length, _ in rows], [grid for _, grid in rows] if images else None)
    inputs = Inputs.from_items(items, pad_id=7)
    chunks = inputs.chunks(size)
    assert len(inputs) == len(items) and len(chunks) == -(-len(items) // size)
    for number, chunk in enumerate(chunks):
        part = items[number * size : (number + 1) * size]
        longest = max(len(item.token_ids) for item in part)
        padded = [item.token_ids + [7] * (longest - len(item.token_ids)) for item in part]
        assert chunk["input_ids"].tolist() == padded and chunk["input_ids"].dtype == torch.int64
        assert chunk["attention_mask"].tolist() == [
            [int(place < len(item.token_ids)) for place in range(longest)] for item in part
        ]
        if images:
            assert torch.equal(chunk["pixel_values"], torch.cat([item.patches for item in part]))
            assert chunk["image_grid_thw"].tolist() == [list(item.grid) for item in part]
        else:
            assert set(chunk) == {"input_ids", "attention_mask"}


def test_inputs_move_whole(processor):
    inputs = Inputs.from_items([processor.encode_document(noise_image(64, 64))] * 2, processor.pad_id)
    moved = inputs.to(torch.device("meta"))
    assert {t.device.type for t in (moved.token_ids, moved.patches, moved.grids)} == {"meta"}
    assert (moved.lengths, moved.pad_id) == (inputs.lengths, inputs.pad_id)
    assert Inputs.from_items([processor.encode_query("a")], 0).to(torch.device("cpu")).patches is None


# --- the demo's tokenizer ---


@EXAMPLES
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
@example(text="\u2028 \U0001f600 <|im_end|>")
def test_the_demo_tokenizer_can_spell_any_text(demo_tokenizer, text):
    text = demo_tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    ids = demo_tokenizer(text, split_special_tokens=True)["input_ids"]
    assert demo_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert not set(ids) & set(demo_tokenizer.all_special_ids)


@pytest.fixture(scope="module")
def demo_tokenizer(tiny_model: Path):
    return AutoProcessor.from_pretrained(tiny_model).tokenizer


def test_each_special_token_is_one_id_of_its_own(demo_tokenizer):
    found = [demo_tokenizer(token)["input_ids"] for token in SPECIAL_TOKENS]
    assert all(len(ids) == 1 for ids in found) and len({ids[0] for ids in found}) == len(SPECIAL_TOKENS)
    assert set(demo_tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)
    assert (demo_tokenizer.eos_token, demo_tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_query_of_the_demo_takes_about_forty_tokens(tiny_model):
    processor = BiQwen3Processor.from_pretrained(str(tiny_model))
    queries = [Facts(h, "blue", "grey", d, p).query for h in HEADERS for d in DOTS for p in PLACES]
    lengths = [len(processor.encode_query(query).token_ids) for query in queries]
    assert 25 <= min(lengths) and max(lengths) <= 50


def test_the_demo_checkpoint_is_a_pure_function_of_its_seed(tmp_path):
    state = torch.get_rng_state()
    small = {"hidden": 32, "layers": 1, "vision_hidden": 32, "vision_layers": 3}
    folders = [make_model(tmp_path / name, seed=seed, **small) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    assert torch.equal(torch.get_rng_state(), state), "making a checkpoint must not move the caller's random numbers"
    files = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    assert [name for name in files[0] if files[0][name] != files[2][name]] == ["model.safetensors"]
