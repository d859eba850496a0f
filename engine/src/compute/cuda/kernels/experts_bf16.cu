// Products of rows with the matrices of their experts, bf16. Few rows and many take the same path: a tile has up to 64
// pairs of one expert, and its products are computed in parts of 16 pairs, as many as it has.
//
// A block has one tile and 64 rows of the expert's matrix. Its four warps divide these. Rows of both sides come 64
// inputs at a time, and the next ones are loaded during the computation. The order of summation of a result depends on
// the number of inputs only.

#define EXPERT_STAGES 3
#define EXPERT_INPUTS 64
#define EXPERT_ROW_BYTES (EXPERT_INPUTS * 2 + 16)
#define EXPERT_SIDE_BYTES (64 * EXPERT_ROW_BYTES)
#define EXPERT_PARTS (EXPERT_ROWS / 16)

// sums[part][group] = products of 16 pairs of the tile with 8 outputs. A warp has two groups of outputs: those of the
// block's rows of the matrix from `low` and from `high` on. `x_of(i)` is the row of the tile's i-th pair and
// `matrix_of(i)` the block's i-th row of the matrix. It is null for a row that does not exist.
template <class RowOfX, class RowOfMatrix>
__device__ __forceinline__ void expert_product(float (&sums)[EXPERT_PARTS][2][4], u32 shared, const T* weights,
                                               u32 inputs, int count, u32 low, u32 high, RowOfX x_of,
                                               RowOfMatrix matrix_of) {
    const u32 lane = threadIdx.x % 32, column = threadIdx.x % 8;
    const int parts = (count + 15) / 16, steps = (inputs + EXPERT_INPUTS - 1) / EXPERT_INPUTS;
    // Of each side, a thread loads a sixteenth of a row of four rows.
    const T* from_x[4];
    const T* from_matrix[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row = i * 16 + threadIdx.x / 8;
        from_x[i] = static_cast<int>(row) < count ? x_of(row) : nullptr;
        from_matrix[i] = matrix_of(row);
    }
    auto request = [&](int step) {
        const u32 stage = shared + step % EXPERT_STAGES * 2 * EXPERT_SIDE_BYTES;
        const u32 at = stage + threadIdx.x / 8 * EXPERT_ROW_BYTES + column * 16;
        const u32 input = step * EXPERT_INPUTS + column * 8;
        if (step < steps) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 to = at + i * 16 * EXPERT_ROW_BYTES;
                const bool has_x = from_x[i] && input < inputs, has_matrix = from_matrix[i] && input < inputs;
                copy_16(to, has_matrix ? from_matrix[i] + input : weights, has_matrix ? 16 : 0);
                // Rows beyond the last part are not read.
                if (i < parts) copy_16(to + EXPERT_SIDE_BYTES, has_x ? from_x[i] + input : weights, has_x ? 16 : 0);
            }
        }
        copies_end_group();
    };
#pragma unroll
    for (int m = 0; m < EXPERT_PARTS; m++) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[m][j / 4][j % 4] = 0.0f;
    }
#pragma unroll
    for (int stage = 0; stage < EXPERT_STAGES - 1; stage++) request(stage);
    for (int step = 0; step < steps; step++) {
        request(step + EXPERT_STAGES - 1);
        copies_wait<EXPERT_STAGES - 1>();
        __syncthreads();
        const u32 at = shared + step % EXPERT_STAGES * 2 * EXPERT_SIDE_BYTES;
        const u32 outputs = at + (lane % 8 + (lane < 16 ? low : high)) * EXPERT_ROW_BYTES + lane / 8 % 2 * 16;
        const u32 pairs = at + EXPERT_SIDE_BYTES + lane % 16 * EXPERT_ROW_BYTES + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < EXPERT_INPUTS / 16; k++) {
            u32 right[4];
            load_4(right, outputs + k * 32);
#pragma unroll
            for (int m = 0; m < EXPERT_PARTS; m++) {
                if (m >= parts) continue;
                u32 left[4];
                load_4(left, pairs + m * 16 * EXPERT_ROW_BYTES + k * 32);
                multiply_add(sums[m][0], left, right[0], right[1]);
                multiply_add(sums[m][1], left, right[2], right[3]);
            }
        }
        // The next request overwrites a stage that every warp must have read.
        __syncthreads();
    }
}

// Calls `use(i, output in a group, sum of the first group, sum of the second)` for every pair of the tile.
template <class Use>
__device__ __forceinline__ void each_sum(const float (&sums)[EXPERT_PARTS][2][4], int count, Use use) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < EXPERT_PARTS; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = m * 16 + lane / 4 + j / 2 * 8;
            if (i < count) use(i, static_cast<u32>(lane % 4 * 2 + j % 2), sums[m][0][j], sums[m][1][j]);
        }
    }
}

// out[place] = activation(gate) * up of the pair at this place. The matrices of an expert are gate, then up, of
// `outputs` rows each. Grid (outputs / 32, tiles).
extern "C" __global__ void __launch_bounds__(128)
expert_gate_up(const T* x, const T* weights, const int* order, const int* tiles, T* out, u32 inputs, u32 outputs,
               u32 per_token ACTIVATION_PARAMETER) {
    extern __shared__ __align__(16) unsigned char shared[];
    let_later_begin();
    wait_for_earlier();
    const int* tile = tiles + blockIdx.y * 3;
    const int first = tile[1], count = tile[2];
    if (count == 0) return;
    const T* matrix = weights + static_cast<u64>(tile[0]) * 2 * outputs * inputs;
    const u32 warp = threadIdx.x / 32, first_output = blockIdx.x * 32;
    float sums[EXPERT_PARTS][2][4];
    expert_product(
        sums, shared_address(shared), weights, inputs, count, warp * 8, 32 + warp * 8,
        [&](u32 i) { return x + static_cast<u64>(static_cast<u32>(order[first + i]) / per_token) * inputs; },
        [&](u32 i) -> const T* {
            const u32 output = first_output + i % 32;
            return output < outputs ? matrix + (static_cast<u64>(i / 32) * outputs + output) * inputs : nullptr;
        });
    each_sum(sums, count, [&](int i, u32 in_group, float gate, float up) {
        const u32 output = first_output + warp * 8 + in_group;
        if (output >= outputs) return;
        out[static_cast<u64>(first + i) * outputs + output] = narrow(gated(gate, up ACTIVATION_ARGUMENT));
    });
}

// out[pair] = x[place of the pair] * matrix of its expert; grid (outputs / 64, tiles).
extern "C" __global__ void __launch_bounds__(128)
expert_down(const T* x, const T* weights, const int* order, const int* tiles, float* out, u32 inputs, u32 outputs) {
    extern __shared__ __align__(16) unsigned char shared[];
    let_later_begin();
    wait_for_earlier();
    const int* tile = tiles + blockIdx.y * 3;
    const int first = tile[1], count = tile[2];
    if (count == 0) return;
    const T* matrix = weights + static_cast<u64>(tile[0]) * outputs * inputs;
    const u32 warp = threadIdx.x / 32, first_output = blockIdx.x * 64;
    float sums[EXPERT_PARTS][2][4];
    expert_product(
        sums, shared_address(shared), weights, inputs, count, warp * 16, warp * 16 + 8,
        [&](u32 i) { return x + static_cast<u64>(first + i) * inputs; },
        [&](u32 i) -> const T* {
            const u32 output = first_output + i;
            return output < outputs ? matrix + static_cast<u64>(output) * inputs : nullptr;
        });
    each_sum(sums, count, [&](int i, u32 in_group, float low, float high) {
        float* to = out + static_cast<u64>(static_cast<u32>(order[first + i])) * outputs;
        const u32 output = first_output + warp * 16 + in_group;
        if (output < outputs) to[output] = low;
        if (output + 8 < outputs) to[output + 8] = high;
    });
}
