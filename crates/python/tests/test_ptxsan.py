"""CUDA kernels on NumPy arrays: what they compute, what they do wrong, and what is refused."""

import numpy
import pytest

from evosdpa import ptxsan

SOURCE = """
__constant__ float factor;
__device__ int seen[2];
template <typename T>
__global__ void scale(const T* x, T* y, int n, float add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * T(factor) + T(add);
    if (i == 0) { seen[0] = n; seen[1] += 1; }
}
__global__ void reverse(float* x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = tile[63 - threadIdx.x];
}
"""

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry put(.param .u64 out, .param .u64 wide, .param .f32 real, .param .u8 small)
{
    .reg .b32 %r<4>;
    .reg .b64 %d<3>;
    .reg .f32 %f<2>;
    ld.param.u64 %d1, [out];
    ld.param.u64 %d2, [wide];
    ld.param.f32 %f1, [real];
    ld.param.u8 %r1, [small];
    st.global.u64 [%d1], %d2;
    st.global.f32 [%d1+8], %f1;
    st.global.u32 [%d1+12], %r1;
    ret;
}
.visible .entry nothing() { ret; }
"""


def test_arrays_and_variables_hold_what_the_kernel_left():
    x = numpy.arange(100, dtype=numpy.float32)
    y = numpy.zeros((2, 50), numpy.float32)
    seen = numpy.array([0, 41], numpy.int32)
    result = ptxsan.run(
        SOURCE, 4, (32, 1), x, ptxsan.Out(y), 100, 0.5, entry="scale<float>", variables={"factor": numpy.float32(3), "seen": seen}
    )
    assert result.is_clean and result.findings == ()
    assert result.name == "void scale<float>(float const*, float*, int, float)"
    numpy.testing.assert_array_equal(y.ravel(), 3 * x + numpy.float32(0.5))
    assert seen.tolist() == [100, 42]
    # Half of the output: the rest was never written. The input cannot be written to.
    x.flags.writeable = False
    result = ptxsan.run(SOURCE, 4, 32, x, ptxsan.Out(y), 50, 0.5, entry="scale<float>", variables={"factor": numpy.float32(3)})
    assert [finding.kind for finding in result.findings] == ["unwritten_output"]
    assert result.findings[0].severity == "warning" and not result.is_clean
    result = ptxsan.run(SOURCE, 1, 32, y, x, 32, 0.5, entry="scale<float>", variables={"factor": numpy.float32(3)})
    assert [finding.kind for finding in result.findings] == ["read_only_write"]
    numpy.testing.assert_array_equal(x, numpy.arange(100))


def test_findings_are_objects():
    result = ptxsan.run(SOURCE, 1, 64, numpy.ones(64, numpy.float32), entry="reverse", schedule="all")
    [race] = [finding for finding in result.findings if finding.kind == "race"]
    assert (race.severity, race.site.line, race.other.line) == ("error", 12, 13)
    assert race.variable.name == "tile" and race.variable.space == "shared"
    assert len(race.schedules) == 6 and race.count > 6
    assert "__syncthreads()" in race.advice and "kernel.cu:12" in str(race)


def test_numbers_take_the_parameters_size():
    out = numpy.zeros(16, numpy.uint8)
    result = ptxsan.run(PTX, 1, 1, out, -2, 1.5, True, entry="put")
    assert result.is_clean
    assert out[:8].view(numpy.int64)[0] == -2 and out[8:12].view(numpy.float32)[0] == 1.5 and out[12] == 1
    ptxsan.run(PTX, 1, 1, out, numpy.uint64(2**64 - 1), numpy.float32(2), b"\x07", entry="put")
    assert out[:8].view(numpy.uint64)[0] == 2**64 - 1 and out[12] == 7


@pytest.mark.parametrize(
    "error,words,call",
    [
        (ptxsan.CompileError, "does not compile", lambda: ptxsan.run("__global__ void k() { x; }", 1, 1)),
        (ptxsan.CompileError, "line 1", lambda: ptxsan.run("nonsense", 1, 1, file_name="k.ptx")),
        (ptxsan.CompileError, "sm_1", lambda: ptxsan.run("__global__ void k() {}", 1, 1, arch="sm_1")),
        (ptxsan.Error, "no entry `none`; the module has: nothing, put", lambda: ptxsan.run(PTX, 1, 1, entry="none")),
        (ptxsan.Error, "none was named", lambda: ptxsan.run(PTX, 1, 1)),
        (ptxsan.Error, "no variable `v`", lambda: ptxsan.run(PTX, 1, 1, entry="nothing", variables={"v": b""})),
        (ptxsan.LaunchError, "takes 0 arguments, 1 were given", lambda: ptxsan.run(PTX, 1, 1, 5, entry="nothing")),
        (ptxsan.LaunchError, "argument 3 has 1 bytes: 256", lambda: ptxsan.run(PTX, 1, 1, 0, 0, 0.0, 256, entry="put")),
        (ptxsan.LaunchError, "argument 3 has 1 bytes", lambda: ptxsan.run(PTX, 1, 1, 0, 0, 0.0, 0.5, entry="put")),
        (ptxsan.LaunchError, "grid is 0", lambda: ptxsan.run(PTX, 0, 1, entry="nothing")),
        (ptxsan.LaunchError, r"grid is \(\)", lambda: ptxsan.run(PTX, (), 1, entry="nothing")),
        (ptxsan.LaunchError, "1 to 1024 threads", lambda: ptxsan.run(PTX, 1, 2000, entry="nothing")),
        (ptxsan.LaunchError, "shared memory", lambda: ptxsan.run(PTX, 1, 1, entry="nothing", shared=1 << 30)),
        (ptxsan.LaunchError, "not contiguous", lambda: ptxsan.run(PTX, 1, 1, numpy.zeros(8)[::2], entry="nothing")),
        (ptxsan.LaunchError, "byte order", lambda: ptxsan.run(PTX, 1, 1, numpy.zeros(8, ">f4"), entry="nothing")),
        (ptxsan.LaunchError, "objects", lambda: ptxsan.run(PTX, 1, 1, numpy.array([{}]), entry="nothing")),
        (TypeError, "grid is nan", lambda: ptxsan.run(PTX, float("nan"), 1, entry="nothing")),
        (TypeError, "argument 0 is a list", lambda: ptxsan.run(PTX, 1, 1, [1], entry="nothing")),
        (TypeError, "source is a bytes", lambda: ptxsan.run(PTX.encode(), 1, 1)),
        (ptxsan.LaunchError, "no schedule `late`; there are round-robin", lambda: ptxsan.run(PTX, 1, 1, entry="nothing", schedule="late")),
    ],
)
def test_errors_are_typed(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_files(tmp_path):
    path = tmp_path / "k.cu"
    (tmp_path / "size.cuh").write_text("#define SIZE 4\n")
    path.write_text('#include "size.cuh"\n__global__ void k(int* x) { x[SIZE * STEP] = 1; }')
    result = ptxsan.run(path, 1, 1, numpy.zeros(4, numpy.int32), defines={"STEP": 2})
    [finding] = result.findings
    assert finding.kind == "out_of_bounds" and finding.site.stack[-1] == ptxsan.Frame(str(path), 2)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ptxsan.CompileError, match="UTF-8"):
        ptxsan.run(path, 1, 1)
    with pytest.raises(FileNotFoundError):
        ptxsan.run(tmp_path / "none.cu", 1, 1)
