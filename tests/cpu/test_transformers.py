"""The transformers integration on tiny random models, against transformers' own attention."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flash_attn3.integrations import transformers as integration  # noqa: E402

NAME = integration.register()
VOCABULARY = 50


def tiny(kind: str):
    common = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    causal = dict(common, num_key_value_heads=2, pad_token_id=0)
    config = {
        "bert": lambda: transformers.BertConfig(**common),
        "llama": lambda: transformers.LlamaConfig(**causal),
        "qwen2": lambda: transformers.Qwen2Config(**causal),
        "mistral": lambda: transformers.MistralConfig(**causal, sliding_window=4),
        "gemma2": lambda: transformers.Gemma2Config(
            **causal, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0,
            query_pre_attn_scalar=5,
        ),
    }[kind]()  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        # The usual initialisation is so small that a wrong mask would hardly show.
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(params=["bert", "llama", "qwen2", "mistral", "gemma2"])
def model(request):
    return tiny(request.param)


LENGTHS = (7, 3, 11, 1)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (1, n), generator=generator) for n in LENGTHS]


@torch.no_grad()
def one_by_one(model) -> torch.Tensor:
    """(total, hidden) by transformers' eager attention, each sequence alone."""
    model.set_attn_implementation("eager")
    return torch.cat([model(input_ids=s).last_hidden_state[0] for s in sequences()])


def packed():
    ids = torch.cat(sequences(), 1)
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, position_ids


def padded(side: str):
    width = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for row, sequence in enumerate(sequences()):
        n = sequence.shape[1]
        where = slice(0, n) if side == "right" else slice(width - n, width)
        ids[row, where], mask[row, where] = sequence[0], 1
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    return ids, mask, position_ids


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_dense(model):
    expected = one_by_one(model)
    model.set_attn_implementation(NAME)
    found = torch.cat([model(input_ids=s).last_hidden_state[0] for s in sequences()])
    close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("with_longest", [True, False])
def test_packed_by_cu_seq_lens(model, with_longest):
    expected = one_by_one(model)
    model.set_attn_implementation(NAME)
    ids, position_ids = packed()
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)} if with_longest else {}
    found = model(
        input_ids=ids, position_ids=position_ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **longest
    ).last_hidden_state[0]
    close(found, expected)


@torch.no_grad()
def test_packed_by_position_ids_alone(model):
    expected = one_by_one(model)
    integration.use(model)
    ids, position_ids = packed()
    close(model(input_ids=ids, position_ids=position_ids).last_hidden_state[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_by_position_ids_without_use(kind):
    """Models that show position_ids to their attention need no hook."""
    model = tiny(kind)
    expected = one_by_one(model)
    model.set_attn_implementation(NAME)
    ids, position_ids = packed()
    found = model(input_ids=ids, position_ids=position_ids, use_cache=False)
    close(found.last_hidden_state[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(model, side):
    expected = one_by_one(model)
    model.set_attn_implementation(NAME)
    ids, mask, position_ids = padded(side)
    found = model(input_ids=ids, attention_mask=mask, position_ids=position_ids)
    close(found.last_hidden_state[mask.bool()], expected)


def test_gradients_of_a_padded_batch():
    model = tiny("llama")
    ids, mask, position_ids = padded("left")

    def gradient(name: str) -> torch.Tensor:
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, position_ids=position_ids)
        out.last_hidden_state[mask.bool()].square().sum().backward()
        return model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient("eager")
    torch.testing.assert_close(gradient(NAME), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", None])
def test_generate_with_a_cache(side):
    torch.manual_seed(0)
    base = tiny("llama")
    model = transformers.LlamaForCausalLM(base.config).eval()
    model.model.load_state_dict(base.state_dict())
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    ids, mask, _ = padded("left")
    if side is None:
        ids, mask = ids[2:3], mask[2:3]
    tokens = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5,
                             do_sample=False)  # fmt: skip
        tokens.append(out)
    assert torch.equal(*tokens)


@torch.no_grad()
def test_from_pretrained_and_set_attn_implementation(tmp_path):
    model = tiny("bert")
    expected = one_by_one(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation=NAME).eval()
    assert loaded.config._attn_implementation == NAME
    found = torch.cat([loaded(input_ids=s).last_hidden_state[0] for s in sequences()])
    close(found, expected)
    loaded.set_attn_implementation("sdpa")
    loaded.set_attn_implementation(NAME)
    ids, mask, _ = padded("right")
    found = loaded(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    close(found, expected)


def call(**kwargs):
    module = torch.nn.Module()
    q = torch.randn(1, 2, 4, 8)
    options = {"attention_mask": None, **kwargs}
    return integration.attention_forward(module, q, q, q, **options)


def test_refusals_say_what_to_do():
    with pytest.raises(ValueError, match="dropout is 0.1"):
        call(dropout=0.1)
    with pytest.raises(ValueError, match="head_mask"):
        call(head_mask=torch.ones(2))
    with pytest.raises(ValueError, match="position_bias"):
        call(position_bias=torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="output_attentions"):
        call(output_attentions=True)
    with pytest.raises(ValueError, match="2-D padding mask"):
        call(attention_mask=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="together"):
        call(cu_seq_lens_q=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="without it"):
        integration.register("my_flash")


def test_dropout_in_training_is_refused():
    model = tiny("bert").train()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="model.eval"):
        model(input_ids=sequences()[0])


def test_masks_that_cannot_be_expressed_are_refused():
    from transformers import masking_utils

    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="chunked attention"):
        integration.padding_mask(1, 8, 8, mask_function=chunked)
    with pytest.raises(ValueError, match="a mask function of its own"):
        integration.padding_mask(1, 8, 8, use_vmap=True)


def test_sink_enters_the_denominator_only():
    torch.manual_seed(0)
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    sink = torch.randn(3, dtype=torch.float64)
    out, _ = integration.attention_forward(
        module, q, k, v, None, scaling=0.5, is_causal=False, s_aux=sink
    )
    scores = torch.cat([q @ k.transpose(2, 3) * 0.5, sink.view(1, 3, 1, 1).expand(2, 3, 5, 1)], -1)
    expected = torch.softmax(scores, -1)[..., :-1] @ v
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_packed_lengths():
    cu, longest = integration.packed_lengths(torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert cu.tolist() == [0, 3, 5, 6] and cu.dtype == torch.int32 and longest == 3
    cu, longest = integration.packed_lengths(torch.tensor([[0, 1, 2], [0, 0, 1]]))
    assert cu.tolist() == [0, 3, 4, 6]
    assert integration.packed_lengths(torch.tensor([[5, 6, 7]])) is None


def test_static_cache_slots_behind_the_last_token_are_cut():
    mask = integration.padding_mask(2, 1, 16, q_offset=4, device="cpu")
    assert mask.shape == (2, 5) and bool(mask.all())
    assert integration.padding_mask(2, 1, 5, q_offset=4, device="cpu") is None
