"""c[M, N] = a[M, K] times b[N, K] transposed by the matrix unit: bfloat16 summed in float32, int8 in int32.

A workgroup has a tile of 128 x 128, each of its four wavefronts a quarter of it. While the matrix unit works on one K
tile in LDS, the next one is loaded, and goes into the other half of LDS.

python examples/jit/gemm.py            on an AMD GPU
python examples/jit/gemm.py emulate    anywhere
"""

import sys

import torch

import accelpatch

TILE = 128  # rows of a, and of b, that a workgroup multiplies
ROW = 64  # bytes of each row that are in LDS at a time
STRIDE = ROW + 16  # of rows in LDS, so that lanes that read one column find it in different banks
HALF = 2 * TILE * STRIDE  # bytes of LDS for the rows of a and b: one of two buffers
NOWHERE = 0x80000000  # an offset past every buffer: reads as zero
BYTES = {"bf16": 2, "i8": 1}
#: instruction that multiplies 32 x 32, and the words of each factor that a lane gives it
UNIT = {
    ("bf16", "gfx90a"): ("v_mfma_f32_32x32x8bf16_1k", 2), ("bf16", "gfx942"): ("v_mfma_f32_32x32x8_bf16", 2),
    ("bf16", "gfx950"): ("v_mfma_f32_32x32x16_bf16", 4), ("i8", "gfx90a"): ("v_mfma_i32_32x32x8i8", 1),
    ("i8", "gfx942"): ("v_mfma_i32_32x32x16_i8", 2), ("i8", "gfx950"): ("v_mfma_i32_32x32x32_i8", 4),
}  # fmt: skip


@accelpatch.jit(threads=256, waits="auto")
def gemm(J, kind, N, K, a: "void*", b: "void*", c: "void*", m: "int"):
    width = K * BYTES[kind]  # bytes of a row of a and b
    lds = J.alloc_lds(2 * HALF)
    # Each work item loads 16 bytes of two rows of a and of two of b.
    row, column = J.gpr(J.threadIdx.x >> 2), J.gpr((J.threadIdx.x & 3) * 16)
    memory = [J.buffer(a, m.to("u32") * width), J.buffer(b, N * width)]
    place = [J.gpr((tile * TILE + row) * width + column) for tile in (J.blockIdx.y, J.blockIdx.x)]
    loaded = J.gpr(2, 2, 4, "vu32")
    to = J.gpr("vu32", lds + row * STRIDE + column)

    def load(k):
        """Load the K tile from byte k of the rows on; what lies past them is zero."""
        for of in range(2):
            for half in range(2):
                at = place[of] + (k + half * 64 * width)
                where = J.gpr("vu32", J.select(column + k < width, at, NOWHERE))
                J.buffer_load_dwordx4(loaded[of, half], where, memory[of], 0, mod="offen")

    def store(into):
        for of in range(2):
            for half in range(2):
                J.ds_write_b128(to, loaded[of, half], mod=f"offset:{into * HALF + (of * TILE + half * 64) * STRIDE}")

    # Each lane reads a row of a and one of b in LDS; the two halves of a wavefront read other bytes of it.
    part = J.gpr((J.lane_id & 31) * STRIDE + (J.lane_id >> 5) * 16)
    read_from = [J.gpr("vu32", lds + of * TILE * STRIDE + part + quarter * (64 * STRIDE))
                 for of, quarter in enumerate((J.wave_id >> 1, J.wave_id & 1))]  # fmt: skip
    sums = J.gpr(2, 2, 16, "af32" if kind == "bf16" else "ai32", 0)
    k = J.gpr("su32", 0)
    load(k)
    store(0)
    J.s_barrier()
    with J.While(k < width):
        for now in range(2):  # of the two halves of LDS; a K tile too many is all zeros
            k[0] = k + ROW
            load(k)
            multiply(J, kind, sums, read_from, now * HALF)
            store(1 - now)
            J.s_barrier()
    write(J, N, sums, c, m)


def multiply(J, kind, sums, read_from, half):
    """Add the products of the K tile in a half of LDS to the sums of a wavefront, 2 x 2 blocks of 32 x 32."""
    name, words = UNIT[kind, J.arch]
    for k in range(0, ROW, 32):
        factors = J.gpr(2, 2, 4, "vu32")  # of a and b, of two blocks
        for of in range(2):
            for block in range(2):
                offset = half + block * 32 * STRIDE + k
                J.ds_read_b128(factors[of, block], read_from[of], mod=f"offset:{offset}")
        for word in range(0, 4, words):
            for i in range(2):
                for j in range(2):
                    one, other = factors[0, i, word : word + words], factors[1, j, word : word + words]
                    getattr(J, name)(sums[i, j], one, other, sums[i, j])


def write(J, N, sums, c, m):
    """Store the sums: of a block a lane has one column, and of each eight rows four that lie side by side."""
    lane, wave, memory = J.lane_id, J.wave_id, J.buffer(c, m.to("u32") * (N * 4))
    first = J.blockIdx.y * TILE + (wave >> 1) * 64
    row = J.gpr(first + (lane >> 5) * 4)
    column = J.gpr(J.blockIdx.x * TILE + (wave & 1) * 64 + (lane & 31))
    for j in range(2):
        with J.If(column + j * 32 < N):
            for i in range(2):
                for at in range(16):
                    below = i * 32 + at // 4 * 8 + at % 4
                    where = J.gpr("vu32", ((row + below) * N + column + j * 32) * 4)
                    J.buffer_store_dword(sums[i, j, at], where, memory, 0, mod="offen")


def multiply_matrices(a, b, device=None, arch=None):
    """a[M, K] times b[N, K] transposed: both bfloat16 to float32, or both int8 to int32, with rows of 16 bytes each."""
    (m, k), n = a.shape, b.shape[0]
    kind = {torch.bfloat16: "bf16", torch.int8: "i8"}[a.dtype]
    if k * BYTES[kind] % 16:
        raise ValueError(f"rows of {k} elements are no multiple of 16 bytes: pad K")
    c = torch.empty(m, n, dtype=torch.float32 if kind == "bf16" else torch.int32, device=a.device)
    grid = [-(-n // TILE), -(-m // TILE)]
    gemm(grid, [256], kind, n, k, a, b, c, m, device=device, arch=arch)
    return c


def main(device=None):
    torch.manual_seed(0)
    where = "cpu" if device else "cuda"
    a, b = torch.randn(130, 40, device=where).bfloat16(), torch.randn(70, 40, device=where).bfloat16()
    torch.testing.assert_close(multiply_matrices(a, b, device), (a.double() @ b.double().T).float())
    a, b = (torch.randint(-128, 128, (rows, 80), dtype=torch.int8, device=where) for rows in (130, 70))
    assert torch.equal(multiply_matrices(a, b, device), (a.double() @ b.double().T).int())


if __name__ == "__main__":
    main(*sys.argv[1:])
