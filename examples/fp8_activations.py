"""What FP8 attention does to the real Q, K and V of a sentence model, layer by layer.

    python examples/fp8_activations.py [--sentences N] [--tokens N]

The model and the sentences are those of encode_sentences.py. Sentences are joined to texts of
`--tokens` tokens; Q, K, V of every layer are caught behind their projections. Each layer's
attention in float64 is then compared with FP8 attention as it is usually done (one scale a tensor)
and with this package's (scales a block, rotated, and with K centred too): cosine of the outputs,
and RMS error relative to the outputs' RMS. Without the Hopper kernels their arithmetic is emulated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model lies on disk; nothing is fetched

import torch  # noqa: E402
from encode_sentences import model_folder, sentences  # noqa: E402

from flash_attn3 import accuracy  # noqa: E402

NAMES = ("one scale", accuracy.ROTATED, "rotated, K centred")


def token_batches(tokenizer, texts: list[str], length: int) -> list[torch.Tensor]:
    """(1, length) ids each: sentences behind one another, cut into texts of equal length."""
    ids = sum(tokenizer(texts)["input_ids"], [])
    length = min(length, len(ids))
    return [torch.tensor([ids[i:i + length]]) for i in range(0, len(ids) - length + 1, length)]


def projections(model) -> dict[str, torch.nn.Module]:
    """Modules named ...query, ...key and ...value, as in BERT and its kin, in the order of layers.
    """
    return {name: module for name, module in model.named_modules()
            if name.rsplit(".", 1)[-1] in ("query", "key", "value")}


def caught(model, ids: torch.Tensor, heads: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """q, k, v (1, S, H, D) in bfloat16 of each layer."""
    found: list[torch.Tensor] = []

    def keep(module, inputs, output):
        found.append(output.unflatten(-1, (heads, -1)).bfloat16())

    handles = [module.register_forward_hook(keep) for module in projections(model).values()]
    try:
        with torch.inference_mode():
            model(input_ids=ids)
    finally:
        for handle in handles:
            handle.remove()
    yield from zip(found[0::3], found[1::3], found[2::3])


def compare(q, k, v, by_kernel: bool, sums: dict[str, torch.Tensor]) -> None:
    """Adds (out . ref, ||out||^2, ||ref||^2, ||out - ref||^2) of each scheme to its sums."""
    every = slice(0, q.shape[1])
    truth = torch.stack([accuracy.exact(q, k, v, head, every) for head in range(q.shape[2])], 1)
    found = accuracy.outputs(q, k, v, by_kernel)
    for name in NAMES + (("fa3",) if "fa3" in found else ()):
        out = found[name][0].double()
        new = torch.stack([(out * truth).sum(), out.square().sum(), truth.square().sum(),
                           (out - truth).square().sum()]).cpu()
        sums[name] = sums.get(name, 0) + new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=256,
                        help="of a text (default: %(default)s, at most what the model takes)")
    args = parser.parse_args()
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    heads = model.config.num_attention_heads
    head_dim = model.config.hidden_size // heads
    setting = accuracy.default_setting(dim=head_dim)
    model.to(setting.device)
    limit = min(args.tokens, model.config.max_position_embeddings)
    batches = token_batches(tokenizer, sentences(args.sentences), limit)
    layers: list[dict[str, torch.Tensor]] = []
    for ids in batches:
        for number, qkv in enumerate(caught(model, ids.to(setting.device), heads)):
            if number == len(layers):
                layers.append({})
            compare(*qkv, setting.by_kernel, layers[number])
    if not layers:
        raise SystemExit(f"{folder} has no layers with query, key and value projections")
    print(f"{len(batches)} texts of {batches[0].shape[1]} tokens, {heads} heads of D {head_dim}; "
          + ("kernels" if setting.by_kernel else "kernels emulated"))
    names = list(layers[0])
    print("layer  " + "  ".join(f"{name:>22}" for name in names) + "   (cosine, relative RMS)")
    for number, sums in enumerate(layers):
        cells = []
        for name in names:
            dot, out2, truth2, error2 = sums[name].tolist()
            cells.append(f"{dot / (out2 * truth2) ** 0.5:12.6f} {(error2 / truth2) ** 0.5:9.2e}")
        print(f"{number:5}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
