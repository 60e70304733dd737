"""Writes an adapter in a form that other tools load: merged weights, a sentence-transformers folder, or an adapter.

    python -m contrastors.export --adapter run/checkpoint-500 --output exported --format sentence-transformers

merged                 weights with the adapter in them, in the layout of the base checkpoint, with its processor
sentence-transformers  merged, and the module files that SentenceTransformer(OUTPUT) reads
adapter                with --for generation: the adapter for tools that wrap Qwen3VLForConditionalGeneration

The export is read back in a fresh process, and its embeddings are compared with those of base and adapter, before it
gets its name.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contrastors.cli import make_parser, positive_int, require_transformers, run_script
from contrastors.records import dump_json, settle_files, write_text
from contrastors.shards import folder_output

FORMATS = ("merged", "sentence-transformers", "adapter")
QUERIES_ONLY = "the adapter was trained against documents embedded by the base model, and theirs must stay the base's."
_LOAD = {
    "merged": """\
from transformers import AutoModel, AutoProcessor

model, processor = AutoModel.from_pretrained("THIS_FOLDER"), AutoProcessor.from_pretrained("THIS_FOLDER")""",
    "sentence-transformers": """\
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("THIS_FOLDER")
scores = model.similarity(model.encode_query(["a question"]), model.encode_document([Image.open("page.png")]))""",
    "adapter": """\
from peft import PeftModel
from transformers import Qwen3VLForConditionalGeneration

model = PeftModel.from_pretrained(Qwen3VLForConditionalGeneration.from_pretrained("{model}"), "THIS_FOLDER")""",
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the flags."""
    parser = make_parser(__doc__)
    parser.prog = "python -m contrastors.export"
    add = parser.add_argument_group("export").add_argument
    add("--adapter", required=True, metavar="DIR", help="checkpoint folder of train_contrastors.py, or a remapped one")
    add("--output", required=True, metavar="DIR", help="folder to make")
    add("--format", required=True, choices=FORMATS, help="what to write")
    add("--for", dest="target", choices=("generation",), help="with --format adapter: which model class it is for")
    add("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace an earlier export")
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="NAME", help="base model, hub name or folder (default: the one named by the adapter)")
    add(
        "--max-num-visual-tokens", type=positive_int, metavar="N",
        help="visual tokens of the largest image (default: what the adapter was trained with)",
    )  # fmt: skip
    add(
        "--max-query-tokens", type=positive_int, metavar="N",
        help="tokens of the longest query prompt (default: what the adapter was trained with)",
    )  # fmt: skip
    add("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="of merged weights; auto = the base model's")
    add = parser.add_argument_group("runtime").add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="where embeddings are compared, in fp32",
    )
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses combinations that would be ignored or fail later."""
    is_adapter = args.format == "adapter"
    refusals = (
        (
            is_adapter and not args.target,
            "--format adapter needs --for generation; for AutoModel, --adapter is one already",
        ),
        (args.target and not is_adapter, f"--for {args.target} belongs to --format adapter"),
        (is_adapter and args.dtype != "auto", "--dtype is for merged weights; an adapter keeps its own"),
    )
    for is_refused, reason in refusals:
        if is_refused:
            parser.error(reason)


def _check_sentence_transformers() -> None:
    if find_spec("sentence_transformers"):
        version = metadata.version("sentence-transformers")
        if int(version.split(".")[0]) >= 6:
            return
        raise ValueError(f"sentence-transformers {version} is too old, 6 is needed: pip install '.[bench]'")
    raise ValueError("--format sentence-transformers is compared with the library itself: pip install '.[bench]'")


def export(args: argparse.Namespace) -> int:
    """Writes, reads back, compares, renames; returns the exit code."""
    output = Path(args.output)
    if output.exists() and not args.overwrite:
        raise ValueError(f"{output} exists; use --overwrite or another --output")
    if args.format == "sentence-transformers":
        _check_sentence_transformers()
    require_transformers()
    from contrastors.distributed import pick_device
    from contrastors.export_check import check, compare, embed_reference, read_export
    from contrastors.export_files import EXPORT_FILE, check_space, find_base_folder, read_source
    from contrastors.loading import check_base_weights, silence_libraries
    from contrastors.train_flags import QUERY_SIDE

    silence_libraries()
    source = read_source(args.adapter, args.model, args.max_num_visual_tokens, args.max_query_tokens)
    with folder_output(output, args.overwrite, marker=EXPORT_FILE) as folder:
        device = pick_device(args.device)
        reference = embed_reference(source, device)
        check_base_weights(args.adapter, source.model)
        if args.format != "adapter":
            check_space(find_base_folder(source.model), output, args.dtype)
        is_folder = Path(source.model).is_dir()
        about = {
            "format": args.format,
            "base_model": Path(source.model).name if is_folder else source.model,  # nobody's path in a published file
            "adapter": source.adapter.absolute().name,
            "embeds": "queries" if source.record.get("args", {}).get("mode") == QUERY_SIDE else "queries and documents",
            **reference.limits,
        }
        precision = write_export(args, source, folder, reference)
        write_text(folder / EXPORT_FILE, dump_json(about, indent=1) + "\n")
        with tempfile.TemporaryDirectory() as exchange:
            exported = read_export(folder, args.format, reference.probes, Path(exchange), device)
        found = compare(reference, exported)
        check(found, precision)
        about["compared"] = {**asdict(found), "weights": precision}
        write_text(folder / EXPORT_FILE, dump_json(about, indent=1) + "\n")
        write_text(folder / "README.md", export_card(about, source.record))
        settle_files(folder)
    print(f"{output}: {args.format}; {_describe(about['compared'])}")
    if about["embeds"] == "queries":
        print(f"{output} is for queries alone: {QUERIES_ONLY}")
    return 0


def _describe(compared: dict[str, Any]) -> str:
    return (
        f"read back on {compared['num_queries']} queries and {compared['num_images']} images: smallest cosine to base "
        f"and adapter {compared['smallest_cosine']:.7f} (base alone: {compared['base_cosine']:.4f}), "
        f"{compared['lost']:.2%} of the adapter's effect lost"
    )


def write_export(args: argparse.Namespace, source: Any, folder: Path, reference: Any) -> str:
    """Writes the files of a format into a folder; returns the precision of the weights, fp32 or bf16.

    Args:
        args: Flags.
        source: The adapter and what is known of it.
        folder: Empty.
        reference: Limits, D and longest prompt.
    """
    from contrastors.export_files import (
        copy_files,
        find_base_folder,
        merge_adapter,
        write_generation_adapter,
        write_sentence_transformers,
        write_weights,
    )

    if args.format == "adapter":
        write_generation_adapter(source, folder)
        return "fp32"
    with tempfile.TemporaryDirectory() as between:
        write_generation_adapter(source, Path(between))
        merged = merge_adapter(source.model, Path(between))
    base = find_base_folder(source.model)
    precision = write_weights(base, merged, folder, args.dtype)
    copy_files(base, folder, reference.limits, args.dtype)
    if args.format == "sentence-transformers":
        write_sentence_transformers(folder, reference.limits, reference.base.shape[1], reference.longest_prompt)
    return precision


def export_card(about: dict[str, Any], record: dict[str, Any]) -> str:
    """Returns the README of an export: how to load it, what it expects, what was measured.

    Args:
        about: Content of contrastors.json.
        record: trainer_state.json of the adapter, empty where there is none.
    """
    from contrastors.metrics import HEADLINES, format_interval

    kind, base = about["format"], about["base_model"]
    library = {"merged": "transformers", "sentence-transformers": "sentence-transformers", "adapter": "peft"}[kind]
    load = _LOAD[kind].format(model=base)
    if about["embeds"] == "queries":
        load = load.replace('model.encode_document([Image.open("page.png")])', "vectors_of_the_index")
    lines = [
        "---",
        f"library_name: {library}",
        f"base_model: {base}",
        "pipeline_tag: visual-document-retrieval",
        "---",
        "",
        f"# {base.split('/')[-1]}, fine-tuned ({about['adapter']}, {kind})",
        "",
        "Queries and page screenshots become L2-normalised vectors of the last token; similarity is their dot product.",
        "",
        "```python",
        load,
        "```",
        "",
        f"- Query instruction (system message): {about['query_instruction']}",
        f"- Document instruction (system message): {about['document_instruction']}",
        "- Chat template with the generation prompt; the vector is the hidden state of the last token.",
        f"- Images: at most {about['max_num_visual_tokens']} visual tokens ({about['max_pixels']} pixels).",
        f"- Queries: at most {about['max_query_tokens']} tokens, prompt included.",
        "",
        f"Compared before release: {_describe(about['compared'])}.",
        "",
    ]
    if about["embeds"] == "queries":
        lines += [f"**For queries alone**: {QUERIES_ONLY}", ""]
    columns = {"base": record.get("base_metrics"), "this model": record.get("last_metrics")}
    columns = {title: found for title, found in columns.items() if found}
    if columns:
        names = [name for name in HEADLINES if all(name in found for found in columns.values())]
        lines += ["| metric [95 %] | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | " + " | ".join(format_interval(found, name) for found in columns.values()) + " |"
            for name in names
        ]
        lines += ["", f"Evaluation after step {record['evaluated_step']}, before the export.", ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Parses the flags and exports."""
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args)
    return run_script(lambda: export(args))


if __name__ == "__main__":
    sys.exit(main())
