// Products of at most 8 rows with a matrix, bf16: the main work of a decode step with few sequences. Their speed is the
// speed of reading the matrix.
//
// A block has 16 or 32 outputs. Its warps divide the inputs, 64 at a time, and the block combines their sums at the
// end. Outputs are the rows of the left operand of 16 x 8 x 16 products, rows of x the columns of the right one. Of 64
// inputs, lane t of a quad has 16 t .. 16 t + 15, on both sides. The order of inputs within a product does not matter
// if both sides agree, so every load is of 16 bytes. The first loads of the matrix do not wait for earlier kernels.

template <int WARPS, int TILES, int DEPTH, bool GATED>
struct FewRows {
    static constexpr int OUTPUTS = GATED ? 16 : 16 * TILES;
    float sums[TILES][4];

    // Sums of this warp's inputs. Tile i begins at output `first[i]` of the matrix.
    __device__ __forceinline__ void multiply(const T* x, const T* weights, const u32 (&first)[TILES], u32 rows, u32 inputs) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, at = lane % 4 * 16;
        const u32 chunks = inputs / 64;
        const T* from[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            from[i] = weights + static_cast<u64>(first[i] + row) * inputs + at;
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
        }
        // Per tile: two loads of row `row`, two of row + 8.
        u32 loaded[DEPTH][TILES][4][4];
        auto load = [&](u32 chunk, u32 (&to)[TILES][4][4]) {
            if (chunk >= chunks) return;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    load_once(to[i][j], from[i] + chunk * 64 + static_cast<u64>(j / 2 * 8) * inputs + j % 2 * 8);
                }
            }
        };
#pragma unroll
        for (int d = 0; d < DEPTH; d++) load(warp + d * WARPS, loaded[d]);
        // The next kernel must not begin before the end: its waiting blocks would take the places of blocks that read,
        // and steps would take longer.
        wait_for_earlier();
        struct alignas(16) Words {
            u32 at[4];
        };
        const Words* mine = reinterpret_cast<const Words*>(x + static_cast<u64>(row) * inputs + at);
        for (u32 begin = warp; begin < chunks; begin += WARPS * DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const u32 chunk = begin + d * WARPS;
                if (chunk >= chunks) continue;
                Words values[2] = {};
                if (row < rows) {
                    values[0] = mine[chunk * 8];
                    values[1] = mine[chunk * 8 + 1];
                }
#pragma unroll
                for (int i = 0; i < TILES; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const u32(&low)[4] = loaded[d][i][j / 2];
                        const u32(&high)[4] = loaded[d][i][2 + j / 2];
                        const int k = j % 2 * 2;
                        const u32 left[4] = {low[k], high[k], low[k + 1], high[k + 1]};
                        multiply_add(sums[i], left, values[j / 2].at[k], values[j / 2].at[k + 1]);
                    }
                }
                load(chunk + WARPS * DEPTH, loaded[d]);
            }
        }
    }

    // Calls `use(tile, row, output in the tile, sum, sum of the second tile)` with the sums over all warps.
    template <class Use>
    __device__ __forceinline__ void meet(u32 rows, Use use) {
        __shared__ float meeting[WARPS][TILES][128 + 4];
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                meeting[warp][i][(lane % 4 * 2 + j % 2) * 16 + lane / 4 + j / 2 * 8] = sums[i][j];
            }
        }
        __syncthreads();
        for (u32 e = threadIdx.x; e < OUTPUTS * 8; e += WARPS * 32) {
            const u32 tile = e / 128, row = e % 128 / 16;
            if (row >= rows) continue;
            float sum = 0.0f, second = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                sum += meeting[w][tile][e % 128];
                if (GATED) second += meeting[w][TILES - 1][e % 128];
            }
            use(tile, row, e % 16, sum, second);
        }
    }
};

template <int WARPS, int TILES, int DEPTH>
__device__ __forceinline__ void few_rows(const T* x, const T* weights, T* out, float* out_f32, u32 rows, u32 inputs,
                                         u32 outputs) {
    FewRows<WARPS, TILES, DEPTH, false> product;
    u32 first[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) first[i] = (blockIdx.x * TILES + i) * 16;
    product.multiply(x, weights, first, rows, inputs);
    product.meet(rows, [&](u32 tile, u32 row, u32 output, float sum, float) {
        const u64 at = static_cast<u64>(row) * outputs + (blockIdx.x * TILES + tile) * 16 + output;
        if (out_f32) {
            out_f32[at] = sum;
        } else {
            out[at] = narrow(sum);
        }
    });
}

// out[row][output] = sum of x[row][i] * weights[output][i]; one of the two outs is null. For many outputs: grid
// (outputs / 32).
extern "C" __global__ void __launch_bounds__(256)
few_rows_wide(const T* x, const T* weights, T* out, float* out_f32, u32 rows, u32 inputs, u32 outputs) {
    few_rows<8, 2, 2>(x, weights, out, out_f32, rows, inputs, outputs);
}

// The same for few outputs, with more warps per output: grid (outputs / 16).
extern "C" __global__ void __launch_bounds__(512)
few_rows_deep(const T* x, const T* weights, T* out, float* out_f32, u32 rows, u32 inputs, u32 outputs) {
    few_rows<16, 1, 2>(x, weights, out, out_f32, rows, inputs, outputs);
}

// out = activation(gate + bias) * (up + bias). The matrix is gate, then up, of `outputs` rows each; `bias` may be null.
// Grid (outputs / 16).
extern "C" __global__ void __launch_bounds__(256)
few_rows_gated(const T* x, const T* weights, const float* bias, T* out, u32 rows, u32 inputs, u32 outputs
               ACTIVATION_PARAMETER) {
    FewRows<8, 2, 2, true> product;
    const u32 first[2] = {blockIdx.x * 16, outputs + blockIdx.x * 16};
    product.multiply(x, weights, first, rows, inputs);
    product.meet(rows, [&](u32, u32 row, u32 output, float gate, float up) {
        const u32 at = blockIdx.x * 16 + output;
        if (bias) {
            gate += bias[at];
            up += bias[outputs + at];
        }
        out[static_cast<u64>(row) * outputs + at] = narrow(gated(gate, up ACTIVATION_ARGUMENT));
    });
}
