"""FLOP and memory of a training step, by formula, from a model's config and the setting of a run.

FLOP are those of the matrix products, as torch's counter counts them. Memory is what autograd saves, tensor by tensor,
for tiles of the largest size and one token of padding in a chunk: attention with a mask keeps repeated keys and values.
What an allocator wastes is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from contrastors.chunking import ChunkCost
from contrastors.loss import TILE_LOGITS, WHOLE_LOGITS

# The prompts around an image and around a short query, in tokens of the Qwen vocabulary: no tokenizer is loaded.
DOCUMENT_PROMPT, QUERY_TOKENS = 22, 40
LOGITS_COPIES = 5  # fp32 matrices alive at once in the loss: scaled, masked, their softmax, and its gradients


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides the costs of a run beside the model.

    Attributes:
        queries: N of this rank.
        group: Documents of a query, 1 + K.
        visual: Visual tokens of a document.
        query_tokens: Of a query, prompt included.
        world_size: W.
        documents_chunk: Documents of a chunk.
        queries_chunk: Queries of a chunk; 0 = as many as have no more tokens than one document chunk.
        lora_r: Rank of the LoRA matrices.
        dropout: Whether the adapter drops out.
        lora_vit: Whether the vision blocks are adapted.
        checkpointing: Whether layers are recomputed in the backward.
        reuse_features: Whether a frozen vision part runs once.
        half: bf16 weights and autocast; otherwise fp32.
        on_cuda: Whether dropout remembers one byte an element; elsewhere it is a float.
        loss_tile: Queries of a tile of logits; 0 = automatic.
    """

    queries: int
    group: int
    visual: int
    query_tokens: int = QUERY_TOKENS
    world_size: int = 1
    documents_chunk: int = 2
    queries_chunk: int = 0
    lora_r: int = 32
    dropout: bool = True
    lora_vit: bool = False
    checkpointing: bool = False
    reuse_features: bool = True
    half: bool = True
    on_cuda: bool = True
    loss_tile: int = 0

    @property
    def documents(self) -> int:
        """M of this rank."""
        return self.queries * self.group

    @property
    def document_tokens(self) -> int:
        """Tokens of a document, prompt included."""
        return self.visual + DOCUMENT_PROMPT

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return 2 if self.half else 4

    @property
    def layer_norm_width(self) -> int:
        """Bytes of what a LayerNorm saves: autocast runs it in fp32 on cuda alone."""
        return 4 if self.on_cuda else self.width

    @property
    def num_chunks(self) -> tuple[int, int]:
        """Query chunks and document chunks of a step."""
        room = self.documents_chunk * self.document_tokens
        size = self.queries_chunk or max(1, room // self.query_tokens)
        return -(-self.queries // size), -(-self.documents // self.documents_chunk)


class Flop(NamedTuple):
    """FLOP of one item's forward, and of its backward."""

    forward: int
    backward: int

    def __add__(self, other: Flop) -> Flop:  # type: ignore[override]
        return Flop(self.forward + other.forward, self.backward + other.backward)

    def times(self, number: int) -> Flop:
        """Returns those of many."""
        return Flop(self.forward * number, self.backward * number)


# ---------------------------------------------------------------------------------------------------------------- FLOP


def linear_flop(rows: int, inputs: int, outputs: int, lora_r: int = 0, reaches_input: bool = True) -> Flop:
    """Returns FLOP of a frozen linear layer with, where `lora_r` is not 0, an adapter on it.

    The frozen weight gets no gradient; A and B get theirs.

    Args:
        rows: Tokens or patches.
        inputs: Width of the input.
        outputs: Width of the output.
        lora_r: Rank; 0 = no adapter.
        reaches_input: Whether the backward goes on below this layer.
    """
    base, low = 2 * rows * inputs * outputs, 2 * rows * lora_r
    backward = low * (inputs + outputs) + low * outputs  # weights of A and B, input of B
    return Flop(base + low * (inputs + outputs), backward + (base + low * inputs) * reaches_input)


def attention_flop(length: int, width: int) -> Flop:
    """Returns FLOP of attention itself: two products forward; the scores again and four gradients backward."""
    return Flop(4 * length**2 * width, 10 * length**2 * width)


def language_flop(text: Any, length: int, setting: Setting) -> Flop:
    """Returns FLOP of the language part on one item of `length` tokens."""
    hidden, inner = text.hidden_size, text.intermediate_size
    heads, pairs = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    total, down = Flop(0, 0), linear_flop(length, inner, hidden)
    for layer in range(text.num_hidden_layers):
        reaches = bool(layer) or setting.lora_vit
        for outputs in (heads, pairs, pairs):
            total += linear_flop(length, hidden, outputs, setting.lora_r, reaches)
        total += attention_flop(length, heads) + linear_flop(length, heads, hidden, setting.lora_r)
        total += linear_flop(length, hidden, inner).times(2) + down
    # Recomputing a layer stops once everything that its backward needs is there: before the last product.
    again = total.forward - text.num_hidden_layers * down.forward
    return Flop(total.forward, total.backward + again * setting.checkpointing)


def vision_flop(vision: Any, patches: int, setting: Setting) -> Flop:
    """Returns FLOP of the vision part on one image; without an adapter on it, it has no backward."""
    hidden, inner, lora_r = vision.hidden_size, vision.intermediate_size, setting.lora_r * setting.lora_vit
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    blocks = Flop(0, 0)
    for block in range(vision.depth):
        blocks += linear_flop(patches, hidden, 3 * hidden, lora_r, reaches_input=block > 0)
        blocks += attention_flop(patches, hidden) + linear_flop(patches, hidden, hidden, lora_r)
        blocks += linear_flop(patches, hidden, inner, lora_r) + linear_flop(patches, inner, hidden, lora_r)
    merge = vision.spatial_merge_size**2
    merger = linear_flop(patches // merge, merge * hidden, merge * hidden)
    merger += linear_flop(patches // merge, merge * hidden, vision.out_hidden_size)
    total = blocks + merger.times(1 + len(vision.deepstack_visual_indexes))
    again = blocks.forward - vision.depth * 2 * patches * lora_r * hidden  # without the last B of each block
    backward = total.backward + again * setting.checkpointing if setting.lora_vit else 0
    return Flop(total.forward + linear_flop(patches, pixels, hidden).forward, backward)


def step_flop(config: Any, setting: Setting, num_retained: int) -> dict[str, int]:
    """Returns FLOP of a step of this rank: `forward`, `backward`, `replay`."""
    patches = setting.visual * config.vision_config.spatial_merge_size**2
    query = language_flop(config.text_config, setting.query_tokens, setting)
    language = language_flop(config.text_config, setting.document_tokens, setting)
    vision = vision_flop(config.vision_config, patches, setting)
    step = query.times(setting.queries) + (language + vision).times(setting.documents)
    query_chunks, document_chunks = setting.num_chunks
    document_share = 1 - min(1, num_retained / document_chunks)
    query_share = 1 - min(1, max(0, num_retained - document_chunks) / query_chunks)
    seen_twice = language.forward + vision.forward * (not setting.reuse_features)
    replay = query_share * setting.queries * query.forward + document_share * setting.documents * seen_twice
    return {"forward": step.forward, "backward": step.backward, "replay": round(replay)}


# -------------------------------------------------------------------------------------------------------------- memory


def lora_bytes(inputs: int, setting: Setting, reaches_input: bool = True, shares_input: bool = False) -> int:
    """Returns bytes a row that an adapter saves for its backward.

    Args:
        inputs: Width of its input.
        setting: Of the run.
        reaches_input: Whether the backward goes on below: dropout then remembers what it dropped.
        shares_input: In fp32 without dropout: whether something else saves the same input.
    """
    own = setting.dropout or setting.half or not shares_input
    dropped = inputs * (1 if setting.on_cuda else 4) * (setting.dropout and reaches_input)
    return setting.width * (inputs * own + setting.lora_r) + dropped


def layer_bytes(text: Any, setting: Setting, reaches_input: bool = True) -> int:
    """Returns bytes a token that one layer of the language part saves; norms save their input in fp32."""
    hidden, inner, width = text.hidden_size, text.intermediate_size, setting.width
    num_heads, num_pairs = text.num_attention_heads, text.num_key_value_heads
    heads, pairs = num_heads * text.head_dim, num_pairs * text.head_dim
    norms = 4 * (hidden * (1 + reaches_input) + heads + pairs + num_heads + num_pairs + 2)
    attention = width * 4 * heads + 4 * num_heads  # queries, repeated keys and values, output; log of the sums
    adapters = sum(lora_bytes(hidden, setting, reaches_input, shares_input=module > 0) for module in range(3))
    adapters += lora_bytes(heads, setting, shares_input=True)
    return norms + attention + adapters + width * 3 * inner


def language_bytes(text: Any, items: int, length: int, setting: Setting) -> int:
    """Returns bytes that the graph of the language part holds for a chunk of `items` x `length` padded tokens."""
    layers, tokens = text.num_hidden_layers, items * length
    mask = items * length**2 * setting.width  # as floats, anew in each layer
    last_norm = 4 * tokens * text.hidden_size
    if setting.checkpointing:
        return last_norm + tokens * layers * text.hidden_size * setting.width
    rotations = 2 * tokens * text.head_dim * setting.width
    inside = tokens * ((layers - 1) * layer_bytes(text, setting) + layer_bytes(text, setting, setting.lora_vit))
    return last_norm + rotations + inside + layers * mask


def block_bytes(vision: Any, setting: Setting, reaches_input: bool = True) -> int:
    """Returns bytes a patch that one block of an adapted vision part saves."""
    hidden, inner, width = vision.hidden_size, vision.intermediate_size, setting.width
    norms = setting.layer_norm_width * hidden * (1 + reaches_input)
    attention = width * 6 * hidden + 4 * vision.num_heads  # queries and keys rotated, all three before, output
    adapters = lora_bytes(hidden, setting, reaches_input) + lora_bytes(hidden, setting) * 2
    return norms + attention + adapters + width * inner + lora_bytes(inner, setting)


def vision_bytes(vision: Any, patches: int, setting: Setting) -> int:
    """Returns bytes that the graph of the vision part holds for `patches` patches; none where it is frozen."""
    if not setting.lora_vit:
        return 0
    num_mergers = 1 + len(vision.deepstack_visual_indexes)
    # A merger saves what enters its norm (where that needs no cast, the blocks around save the same) and its GELU.
    casts = setting.layer_norm_width > setting.width
    mergers = vision.hidden_size * (num_mergers * (setting.width + 4 * casts) + setting.width * (not casts))
    if setting.checkpointing:
        return patches * (mergers + vision.depth * vision.hidden_size * setting.width)
    blocks = (vision.depth - 1) * block_bytes(vision, setting) + block_bytes(vision, setting, reaches_input=False)
    return patches * (mergers + blocks)


def estimate_chunk(config: Any, setting: Setting, adapter_size: int) -> ChunkCost:
    """Returns what a full chunk of documents costs, the largest of a step.

    Args:
        config: Of the model.
        setting: Of the run.
        adapter_size: Parameters of the adapter, of which autocast keeps copies in bf16.
    """
    text, vision, items = config.text_config, config.vision_config, setting.documents_chunk
    tokens, patches = items * setting.document_tokens, items * setting.visual * vision.spatial_merge_size**2
    graph = language_bytes(text, items, setting.document_tokens, setting) + vision_bytes(vision, patches, setting)
    graph += 2 * adapter_size * (setting.half and not setting.checkpointing)
    working = tokens * layer_bytes(text, setting)  # gradients of one layer's tensors, or the layer recomputed
    features = setting.width * vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes))
    reuses = setting.reuse_features and not setting.lora_vit
    return ChunkCost(graph, working, features * reuses, tokens)


def loss_bytes(setting: Setting) -> int:
    """Returns bytes of logits that are alive at once in the loss of this rank."""
    columns = setting.documents * setting.world_size
    rows = setting.loss_tile or (
        setting.queries if setting.queries * columns <= WHOLE_LOGITS else max(1, TILE_LOGITS // columns)
    )
    return 4 * LOGITS_COPIES * min(rows, setting.queries) * columns
