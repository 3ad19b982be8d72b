"""flash_attn3 as an attention implementation of Hugging Face transformers.

    from flash_attn3.integrations.transformers import register
    NAME = register()
    model = AutoModel.from_pretrained(path, attn_implementation=NAME)

Packed inputs: pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k to the model, or
position_ids that restart at each sequence. Models that keep position_ids to their embeddings
(BERT) show the attention no restarts: call `use(model)`, which derives the lengths before the
model runs. Padded inputs: pass the usual 2-D attention_mask.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional

import torch
from torch import Tensor

from .. import interface

# No "flash" in it: transformers takes such names for its own or for a kernel on its hub.
NAME = "fa3_hopper"

# Masks that transformers hands over as functions and that no call of this package can express.
_REFUSED_MASKS = {
    "chunked_overlay": "chunked attention",
    "blockwise_overlay": "blocks with two-sided attention",
}


def register(name: str = NAME) -> str:
    """Make the implementation known to transformers; returns its name. Repeating it is harmless."""
    if "flash" in name:
        raise ValueError(
            f"name is {name!r}; transformers takes names that hold 'flash' for its own, "
            "choose one without it"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    # Without a mask function of this name, transformers passes no mask and padding is attended to.
    AttentionMaskInterface.register(name, padding_mask)
    return name


def use(model, name: str = NAME):
    """Switch a loaded model to this implementation and derive packed lengths from position_ids.

    Returns the model. The lengths are derived before the model runs, so that it works for models
    whose attention never sees position_ids too.
    """
    model.set_attn_implementation(register(name))
    if not getattr(model, "_fa3_packs_by_position_ids", False):
        model.register_forward_pre_hook(_add_packed_lengths, with_kwargs=True)
        model._fa3_packs_by_position_ids = True
    return model


def _add_packed_lengths(model, args: tuple, kwargs: dict[str, Any]):
    position_ids = kwargs.get("position_ids")
    given = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("attention_mask") is not None
    if position_ids is None or given:
        return None
    packed = packed_lengths(position_ids)
    if packed is None:
        return None
    cu_seqlens, longest = packed
    lengths = {
        "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip
    return args, {**kwargs, **lengths}


def _closure_names(function, depth: int = 0) -> set[str]:
    """Names of the functions that a mask function is composed of."""
    names = {part for part in getattr(function, "__qualname__", "").split(".")}
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for inner in content if isinstance(content, (tuple, list)) else (content,):
            if callable(inner) and depth < 8:
                names |= _closure_names(inner, depth + 1)
    return names


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: Optional[Tensor] = None,
    use_vmap: bool = False,
    device: Any = None,
    **kwargs,
) -> Optional[Tensor]:
    """The mask that transformers hands to attention_forward: None, or (B, keys) with True = real.

    Causal and window bounds are not in it: attention_forward gets them as arguments.
    """
    names = _closure_names(mask_function)
    refused = [text for name, text in _REFUSED_MASKS.items() if name in names]
    if use_vmap or refused:
        what = refused[0] if refused else "a mask function of its own"
        raise ValueError(
            f"this model asks for {what}, which {NAME} can't express; "
            "load it with attn_implementation='sdpa'"
        )
    if attention_mask is None:
        used = int(q_offset) + q_length - int(kv_offset)
        if int(q_offset) > 0 or kv_length > q_length:
            if 0 < used < kv_length:
                # A static cache: the slots behind the last token hold nothing yet.
                return torch.ones(batch_size, used, dtype=torch.bool, device=device)
        return None
    attention_mask = attention_mask.to(torch.bool)[:, -kv_length:]
    if attention_mask.shape[1] == kv_length and bool(attention_mask.all()):
        return None
    return attention_mask


def packed_lengths(position_ids: Tensor) -> Optional[tuple[Tensor, int]]:
    """(cu_seqlens, longest) over all rows of position_ids (B, S), or None if no row restarts."""
    if position_ids.ndim != 2 or position_ids.shape[1] < 2:
        return None
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(restarts.any()):
        return None
    # Every row begins a sequence, whatever its first position is.
    starts = torch.nn.functional.pad(restarts, (1, 0), value=True).flatten()
    bounds = starts.nonzero().flatten().to(torch.int32)
    cu_seqlens = torch.nn.functional.pad(bounds, (0, 1), value=starts.numel())
    return cu_seqlens, int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


_last_position_ids: tuple[Any, int, Any] = (lambda: None, -1, None)


def _packed_lengths_once(position_ids: Tensor):
    """packed_lengths, kept for the layers behind the first: it waits for the device."""
    global _last_position_ids
    known, version, packed = _last_position_ids
    if known() is position_ids and version == _version(position_ids):
        return packed
    packed = packed_lengths(position_ids)
    _last_position_ids = (weakref.ref(position_ids), _version(position_ids), packed)
    return packed


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0.0:
        raise ValueError(
            f"dropout is {dropout}; {NAME} has no attention dropout: set the config's attention "
            "dropout to 0, or call model.eval()"
        )
    for argument, what in (
        ("head_mask", "a head mask"),
        ("position_bias", "a position bias"),
    ):
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{argument} is given; {NAME} doesn't take {what}: "
                "use attn_implementation='eager'"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"output_attentions=True; {NAME} never forms the attention weights: "
            "use attn_implementation='eager'"
        )


def _common_dtype(module, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Under autocast, float32 queries (from norms and rotary embeddings) go to its dtype."""
    kind = tensors[0].device.type
    if tensors[0].dtype == torch.float32 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return tuple(t.to(dtype) for t in tensors)
    return tuple(t.to(tensors[2].dtype) for t in tensors)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,  # (B, H, Sq, D)
    key: Tensor,  # (B, Hk, Sk, D)
    value: Tensor,  # (B, Hk, Sk, Dv)
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The function that transformers calls in place of its own attention; out is (B, Sq, H, Dv)."""
    _refuse(dropout, kwargs)
    q, k, v = (t.transpose(1, 2) for t in _common_dtype(module, (query, key, value)))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal)
    window = (-1, -1)
    if sliding_window is not None:
        # A model's window counts the token itself; ours is a distance.
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    options = dict(
        softmax_scale=scaling, causal=causal, window_size=window, softcap=softcap or 0.0
    )

    packed = _packed_arguments(q, k, attention_mask, kwargs)
    if packed is not None:
        batch, seqlen = q.shape[:2]
        out = _varlen(*(t.flatten(0, 1) for t in (q, k, v)), *packed, s_aux, options)
        out = out.unflatten(0, (batch, seqlen))
    elif attention_mask is not None:
        out = _padded(q, k, v, attention_mask, s_aux, options)
    else:
        out = interface.flash_attn_func(q, k, v, return_attn_probs=s_aux is not None, **options)
        if s_aux is not None:
            out = _apply_sink(out[0], out[1].transpose(1, 2), s_aux)
    return out, None


def _packed_arguments(q: Tensor, k: Tensor, attention_mask, kwargs):
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) of a packed call, else None."""
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if (cu_q is None) != (cu_k is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together")
    if cu_q is not None:
        if attention_mask is not None:
            raise ValueError("cu_seq_lens_q and attention_mask exclude each other")
        longest = [kwargs.get("max_length_q"), kwargs.get("max_length_k")]
        for index, cu in enumerate((cu_q, cu_k)):
            if longest[index] is None:
                longest[index] = (cu[1:] - cu[:-1]).max()
        return cu_q.to(torch.int32), cu_k.to(torch.int32), int(longest[0]), int(longest[1])
    position_ids = kwargs.get("position_ids")
    derivable = (
        attention_mask is None
        and position_ids is not None
        and position_ids.ndim == 2
        and position_ids.shape[1] == q.shape[1] == k.shape[1]
        and not torch.compiler.is_compiling()  # depends on values: give cu_seq_lens there
    )
    if not derivable:
        return None
    if position_ids.shape[0] == 1 != q.shape[0]:
        position_ids = position_ids.expand(q.shape[0], -1)
    found = _packed_lengths_once(position_ids)
    if found is None:
        return None
    cu_seqlens, longest = found
    return cu_seqlens, cu_seqlens, longest, longest


def _varlen(q, k, v, cu_q, cu_k, max_q, max_k, s_aux, options) -> Tensor:
    out = interface.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, return_attn_probs=s_aux is not None, **options
    )
    return out if s_aux is None else _apply_sink(out[0], out[1].transpose(0, 1), s_aux)


def _apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """One more logit per head, in the denominator only: out * e^lse / (e^lse + e^sink)."""
    share = torch.sigmoid(lse - sink.to(lse.dtype))  # (..., H)
    return out * share.unsqueeze(-1).to(out.dtype)


def _gather(t: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """(rows where mask is True, their indices, cu_seqlens, longest) of t (B, S, ...)."""
    lengths = mask.sum(1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = mask.flatten().nonzero().flatten()
    return t.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max())


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, s_aux, options) -> Tensor:
    """Padded batch: padding rows are taken out, and come back as zeros."""
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask has {mask.ndim} dimensions; {NAME} takes a 2-D padding mask, and "
            "masks of a caller's own need attn_implementation='sdpa'"
        )
    mask = mask.to(torch.bool)
    keys = mask.shape[1]  # shorter than a static cache, whose other slots hold nothing
    batch, seqlen_q = q.shape[:2]
    k_rows, indices, cu_k, max_k = _gather(k[:, :keys], mask)
    v_rows = v[:, :keys].flatten(0, 1)[indices]
    positional = options["causal"] or options["window_size"] != (-1, -1)
    if positional:
        # Queries are the last positions of the keys; both lose the same padding, so that the
        # bottom-right alignment of what is left is that of the padded call.
        q_rows, indices_q, cu_q, max_q = _gather(q, mask[:, -seqlen_q:])
    else:
        # Without positions every query stays: in cross attention the mask is the keys' alone.
        q_rows, indices_q, max_q = q.flatten(0, 1), None, seqlen_q
        cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    out = _varlen(q_rows, k_rows, v_rows, cu_q, cu_k, max_q, max_k, s_aux, options)
    if indices_q is not None:
        shape = (batch * seqlen_q, *out.shape[1:])
        out = out.new_zeros(shape).index_copy(0, indices_q, out)
    return out.unflatten(0, (batch, seqlen_q))
