"""benchmarks/check_fp8.py against stand-ins for the library: right ones pass, wrong ones do not."""

import sys
from pathlib import Path

import pytest
import torch
from support import fp8_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import check_fp8  # noqa: E402
from ctypes_fp8 import PreparedFp8, PreparedQuantize  # noqa: E402


class Quantize(PreparedQuantize):
    """flash_attn3_quantize on the CPU, sequence by sequence."""

    def __call__(self):
        x, cu, _ = self._keep
        p, got = self.params, self.result
        ragged = cu is not None
        for index in range(p.batch):
            begin = int(cu[index]) if ragged else 0
            one = x[begin:int(cu[index + 1])] if ragged else x[index]
            if one.shape[0] == 0:
                continue
            if p.rotate:
                mean = one.double().mean(0) if self._mean is not None else 0
                if self._mean is not None:
                    got.mean[index] = mean
                one = check_fp8.hadamard(one.double() - mean).float()
            values, scale = check_fp8.reference_quantize(one, p.block_rows)
            blocks = scale.shape[1]
            first = begin // p.block_rows + index if ragged else 0
            (got.scale if ragged else got.scale[index])[:, first:first + blocks] = scale
            data = got.data.view(torch.uint8)
            if p.transposed:
                tile = first if ragged else index * blocks
                padded = check_fp8.block_rows_of(values.view(torch.uint8), 128)
                keys = check_fp8.slot_keys("cpu")
                data[tile:tile + blocks] = padded.permute(0, 2, 3, 1)[..., keys]
            elif ragged:
                data[begin:begin + one.shape[0]] = values.view(torch.uint8)
            else:
                data[index] = values.view(torch.uint8)
        return got


class Forward(PreparedFp8):
    """The model of the kernel's numerics where it can serve (no mask, scales a head); else the
    formula that the tolerance is measured in."""

    def __call__(self):
        case, made, factors, inputs = self.about
        begins = [0, 0]
        for index, (sq, sk) in enumerate(case.lengths):
            q, k, v = (check_fp8.real_values(case, made, factors, inputs, which, index,
                                             begins[which > 0], sk if which else sq)
                       for which in range(3))
            rows = slice(begins[0], begins[0] + sq)
            out, lse = ((self.out[rows], self.lse[:, rows]) if case.ragged
                        else (self.out[index], self.lse[index]))
            begins = [begins[0] + sq, begins[1] + sk]
            out.copy_(check_fp8.rounded_attention(case, q, k, v))
            lse.copy_(check_fp8.plain_attention(case, q, k, v, torch.float64)[1])
        self.fault(self.out, self.lse)
        return self.out


class Library:
    def __init__(self, fault=lambda out, lse: None):
        self.fault = fault

    def _workspace_bytes(self, params):
        return 0

    def _fp8_room_bytes(self, params):
        return 0

    def prepare_quantize(self, x, **options):
        return Quantize(self, x, **options)

    def prepare_fp8(self, *made, **options):
        call = Forward(self, *made, **options)
        call.fault, call.about = self.fault, self.about(made)
        return call


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(check_fp8, "DEVICE", "cpu")


def run(case, fault=lambda out, lse: None, monkeypatch=None):
    library = Library(fault)
    inputs, factors = {}, [None] * 3
    make = check_fp8.make_inputs

    def remember(case):
        inputs["all"] = make(case)
        return inputs["all"]

    monkeypatch.setattr(check_fp8, "make_inputs", remember)
    original = library.prepare_fp8

    def prepare(*made, **options):
        given = [options.get(f"{x}_descale") for x in "qkv"]
        factors[:] = given
        library.about = lambda made: (case, made, factors, inputs["all"])
        return original(*made, **options)

    library.prepare_fp8 = prepare
    result = check_fp8.run_case(library, case)
    monkeypatch.undo()
    return result


SMALL = [case for case in check_fp8.cases((64,), quick=False) if max(case.lengths)[1] <= 1000]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_right_results_pass(case, monkeypatch):
    monkeypatch.setattr(check_fp8, "DEVICE", "cpu")
    passed, detail = run(case, monkeypatch=monkeypatch)
    assert passed, detail


def test_wrong_results_do_not_pass(monkeypatch):
    case = check_fp8.Fp8Case(64, ((200, 333),) * 2, dtype="e4m3")

    def nan(out, lse):
        out[0, 0, 0, 0] = float("nan")

    def swapped_keys(out, lse):
        out[..., [0, 1]] = out[..., [1, 0]]

    def lse_off(out, lse):
        lse += 0.1

    for fault in (nan, swapped_keys, lse_off):
        monkeypatch.setattr(check_fp8, "DEVICE", "cpu")
        assert run(case, fault, monkeypatch)[0] is False


def test_the_models_error_is_that_of_the_formula():
    """The tolerance of 1.1 leaves room for the kernel's numerics."""
    torch.manual_seed(5)
    case = check_fp8.Fp8Case(64, ((256, 2000),), heads=1, heads_kv=1, dtype="e4m3")
    q, k, v = (fp8_model.to_e4m3(torch.randn(s, 1, 64).double()) for s in (256, 2000, 2000))
    reference = check_fp8.plain_attention(case, q, k, v, torch.float64)[0]
    formula = check_fp8.rounded_attention(case, q, k, v)
    out, _ = fp8_model.attention_model(q[:, 0], k[:, 0], v[:, 0])
    ours = check_fp8.errors(out[:, None].bfloat16(), reference)[1]
    assert ours <= 1.05 * check_fp8.errors(formula, reference)[1]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 64, 64, 69, 402)])
def test_quantize_check(transposed, cu, monkeypatch):
    monkeypatch.setattr(check_fp8, "DEVICE", "cpu")
    arguments = (48, torch.bfloat16, 128, transposed, cu)
    assert check_fp8.check_quantize(Library(), *arguments)[0]
    right = Quantize.__call__

    def wrong(self):
        got = right(self)
        got.data.view(torch.uint8)[0, 0, 0] ^= 1
        return got

    monkeypatch.setattr(Quantize, "__call__", wrong)
    assert not check_fp8.check_quantize(Library(), *arguments)[0]


def test_rotation_check():
    assert check_fp8.check_rotation(Library(), 80)[0]
