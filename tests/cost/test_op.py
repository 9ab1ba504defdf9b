import statistics
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.op import OpKind, OpWork, op_s, rates_rise
from planner.errors import RequestError
from planner.hardware.profiles import PROFILES_FOLDER, list_devices, load_device

H100 = load_device("h100-sxm")
SIZES = st.integers(1, 20_000)
AMOUNTS = st.floats(0, 1e15)
KINDS = st.sampled_from(["matmul", "attention", "memory", "reduction", "embedding"])
DEVICES = st.sampled_from([load_device(name) for name in list_devices()])


def matmul(m: int, n: int, k: int, batch: int = 1) -> OpWork:
    return OpWork(
        kind="matmul",
        flop=2 * batch * m * n * k,
        read_bytes=2 * batch * (m * k + k * n),
        write_bytes=2 * batch * m * n,
        batch=batch,
        m=m,
        n=n,
        k=k,
    )


def attention(*, backward: bool = False, batch: int = 32, seq: int = 4096) -> OpWork:
    return OpWork(
        kind="attention",
        flop=4 * batch * seq * seq * 128 * (2.5 if backward else 1),
        read_bytes=3 * 2 * batch * seq * 128,
        write_bytes=2 * batch * seq * 128,
        batch=batch,
        m=seq,
        n=seq,
        k=128,
        backward=backward,
    )


@given(
    m=SIZES,
    n=SIZES,
    k=SIZES,
    batch=st.integers(1, 300),
    times=st.integers(1, 64),
    grows=st.sampled_from(["m", "n", "k", "batch"]),
    device=DEVICES,
)
def test_a_larger_product_takes_no_longer_for_each_row(
    m, n, k, batch, times, grows, device
) -> None:
    """Nor for each column, or term of its sums: what bounds small microbatches by large ones."""
    sizes = {"m": m, "n": n, "k": k, "batch": batch}
    dtype = next(iter(device.peak_flop_per_s))
    one_s = op_s(matmul(**sizes), device, dtype)
    many_s = op_s(matmul(**sizes | {grows: times * sizes[grows]}), device, dtype)
    assert many_s <= times * one_s * (1 + 1e-9)


@given(
    kind=st.sampled_from(["memory", "reduction", "embedding"]),
    amount=AMOUNTS,
    times=st.integers(1, 64),
    device=DEVICES,
)
def test_more_bytes_take_no_longer_each(kind, amount, times, device) -> None:
    def moved(num_bytes: float) -> OpWork:
        return OpWork(kind=kind, flop=0, read_bytes=num_bytes, write_bytes=0)

    dtype = next(iter(device.peak_flop_per_s))
    many_s = op_s(moved(times * amount), device, dtype)
    assert many_s <= times * op_s(moved(amount), device, dtype) * (1 + 1e-9)


@given(batch=st.integers(1, 300), times=st.integers(1, 64), backward=st.booleans(), device=DEVICES)
def test_more_heads_take_no_longer_each(batch, times, backward, device) -> None:
    dtype = next(iter(device.peak_flop_per_s))
    one_s = op_s(attention(batch=batch, backward=backward), device, dtype)
    many_s = op_s(attention(batch=times * batch, backward=backward), device, dtype)
    assert many_s <= times * one_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("curve", "rises"),
    [
        (((1e3, 1e-3), (1e6, 5e-1)), True),
        (((1e3, 1e-3), (1e6, 1.0)), True),
        (((1e3, 1e-3), (1e6, 2.0)), False),  # small tensors lie in a cache
    ],
)
def test_a_measured_device_tells_whether_its_rates_rise(curve, rises) -> None:
    device = replace(H100, op_curves={"gelu": curve})
    assert rates_rise(device) == rises
    slow = any(
        op_s(gelu(times * size), device, "bfloat16")
        > times * op_s(gelu(size), device, "bfloat16") * (1 + 1e-9)
        for size in (500, 2e3, 1e5, 3e6)
        for times in range(2, 20)
    )
    assert slow != rises


def gelu(num_bytes: float) -> OpWork:
    return OpWork(name="gelu", kind="memory", flop=0, read_bytes=num_bytes, write_bytes=0)


def test_a_large_matmul_runs_at_the_measured_rate_and_not_at_the_datasheets() -> None:
    work = matmul(8192, 8192, 8192)
    rate = work.flop / op_s(work, H100, "bfloat16")
    assert 650e12 < rate < 790e12


def test_a_small_matmul_is_less_efficient() -> None:
    small, large = matmul(512, 512, 512), matmul(8192, 8192, 8192)
    rates = [work.flop / op_s(work, H100, "bfloat16") for work in (small, large)]
    assert rates[0] < rates[1] / 3


def test_a_thin_matmul_streams_its_weights() -> None:
    work = matmul(16, 8192, 8192)
    streamed_s = work.read_bytes / H100.memory_bandwidth_bytes_per_s
    assert streamed_s < op_s(work, H100, "bfloat16") < 2 * streamed_s


def test_one_tile_more_than_a_wave_takes_a_second_wave() -> None:
    tile = 256
    one_wave = matmul(12 * tile, 11 * 128, 4096)
    two_waves = matmul(12 * tile + 1, 11 * 128, 4096)
    assert op_s(two_waves, H100, "bfloat16") > op_s(one_wave, H100, "bfloat16") * 1.05


def test_float32_is_slower_than_bfloat16() -> None:
    work = matmul(4096, 4096, 4096)
    assert op_s(work, H100, "float32") > 5 * op_s(work, H100, "bfloat16")


def test_a_dtype_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match="no bfloat16 matmul") as caught:
        op_s(matmul(64, 64, 64), load_device("v100-32gb-sxm"), "bfloat16")
    assert "float16" in caught.value.hint


def test_masked_attention_is_spared_and_backward_takes_longer() -> None:
    full = op_s(attention(), H100, "bfloat16") - H100.kernel_launch_s
    causal = replace(attention(), masked_flop=attention().flop / 2)
    half = op_s(causal, H100, "bfloat16") - H100.kernel_launch_s
    backward = op_s(attention(backward=True), H100, "bfloat16")
    assert full / 2 < half < full / 1.8
    assert backward > 2.5 * full


def test_long_sequences_reach_the_rate_that_short_ones_miss() -> None:
    """TFLOP/s of a Triton kernel on H100 over 16k tokens in all, pytorch/benchmark #2391."""
    published = {512: 328.882, 1024: 389.723, 2048: 433.721, 4096: 458.359, 16384: 476.753}
    seconds = {
        seq: op_s(attention(batch=16 * 16384 // seq, seq=seq), H100, "bfloat16")
        - H100.kernel_launch_s
        for seq in published
    }
    for seq, rate in published.items():
        relative = seconds[16384] / seconds[seq] * seq / 16384
        assert relative == pytest.approx(rate / published[16384], rel=0.02), seq


def test_attention_over_few_heads_leaves_the_device_idle() -> None:
    one = op_s(attention(batch=1, seq=1024), H100, "bfloat16")
    eight = op_s(attention(batch=8, seq=1024), H100, "bfloat16")
    assert one == pytest.approx(eight)


def test_an_empty_op_costs_a_launch() -> None:
    work = OpWork(kind="memory", flop=0, read_bytes=0, write_bytes=0)
    assert op_s(work, H100, "bfloat16") == H100.kernel_launch_s


def test_a_matmul_of_unknown_shape_is_priced_by_its_flops() -> None:
    work = OpWork(kind="matmul", flop=1e12, read_bytes=0, write_bytes=0)
    assert 1e12 / 989e12 < op_s(work, H100, "bfloat16") < 2e12 / 989e12


@given(
    kind=KINDS, flop=AMOUNTS, more_flop=AMOUNTS, num_bytes=AMOUNTS, more_bytes=AMOUNTS,
    device=DEVICES,
)  # fmt: skip
def test_more_work_is_never_faster(
    kind: OpKind, flop: float, more_flop: float, num_bytes: float, more_bytes: float, device
) -> None:
    dtype = next(iter(device.peak_flop_per_s))
    work = OpWork(kind=kind, flop=flop, read_bytes=num_bytes, write_bytes=0)
    base = op_s(work, device, dtype)
    assert base >= 0
    slack = 1 - 1e-12
    assert op_s(replace(work, flop=flop + more_flop), device, dtype) >= base * slack
    assert op_s(replace(work, read_bytes=num_bytes + more_bytes), device, dtype) >= base * slack


@given(m=SIZES, n=SIZES, k=SIZES, more=st.integers(0, 5000), device=DEVICES)
def test_a_larger_matmul_is_never_faster(m: int, n: int, k: int, more: int, device) -> None:
    dtype = next(iter(device.peak_flop_per_s))
    base = op_s(matmul(m, n, k), device, dtype) * (1 - 1e-9)
    assert op_s(matmul(m + more, n, k), device, dtype) >= base
    assert op_s(matmul(m, n + more, k), device, dtype) >= base
    assert op_s(matmul(m, n, k + more), device, dtype) >= base


@given(m=SIZES, n=SIZES, k=SIZES, kind=KINDS, factor=st.floats(1, 10), device=DEVICES)
def test_a_faster_device_is_never_slower(
    m: int, n: int, k: int, kind: OpKind, factor: float, device
) -> None:
    dtype = next(iter(device.peak_flop_per_s))
    work = replace(matmul(m, n, k), kind=kind)
    base = op_s(work, device, dtype) * (1 + 1e-12)
    peaks = {name: peak * factor for name, peak in device.peak_flop_per_s.items()}
    assert op_s(work, replace(device, peak_flop_per_s=peaks), dtype) <= base
    bandwidth = device.memory_bandwidth_bytes_per_s * factor
    assert op_s(work, replace(device, memory_bandwidth_bytes_per_s=bandwidth), dtype) <= base


def test_elements_that_are_found_or_cast_one_by_one_take_their_time() -> None:
    device = load_device("h200-sxm")
    rates = {
        "strided": device.efficiency.strided_elements_per_s,
        "cast": device.efficiency.cast_elements_per_s,
    }
    small = OpWork(kind="memory", flop=0, read_bytes=1e9, write_bytes=1e9)
    even_s = op_s(small, device, "bfloat16") - device.kernel_launch_s
    for operands, rate in rates.items():
        assert rate is not None
        work = replace(small, elements=1e9, operands=operands)
        found_s = op_s(work, device, "bfloat16") - device.kernel_launch_s
        assert found_s == pytest.approx((even_s**4 + (1e9 / rate) ** 4) ** (1 / 4))
        unknown = replace(
            device,
            efficiency=replace(
                device.efficiency, strided_elements_per_s=None, cast_elements_per_s=None
            ),
        )
        assert op_s(work, unknown, "bfloat16") == op_s(small, device, "bfloat16")


def test_kernels_take_what_they_were_measured_to_take() -> None:
    """By the device's rates of them all: the largest of each within a tenth, the others near it."""
    device = load_device("h200-sxm")
    table = pd.read_csv(PROFILES_FOLDER / "measured" / "h200-sxm" / "pointwise.csv")
    errors = {}
    for row in table.itertuples():
        work = OpWork(
            kind="memory", flop=0, read_bytes=row.moved_bytes, write_bytes=0,
            elements=row.elements, operands=row.operands,
        )  # fmt: skip
        errors[row.kernel, row.elements] = op_s(work, device, "bfloat16") / row.seconds - 1
    for operands in ("strided", "cast"):
        kernels = table[table.operands == operands]
        large = kernels[kernels.elements >= 2**25]
        off = [errors[row.kernel, row.elements] for row in large.itertuples()]
        assert abs(statistics.median(off)) < 0.1
        # By their bytes alone they take less than half of it.
        bare = large.moved_bytes / device.pointwise_bytes_per_s / large.seconds
        assert bare.median() < 0.65
