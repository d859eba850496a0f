// Experts of each row: their choice, the order in which products take the pairs of a row and one of its experts, and
// the sum of their results. Nothing here depends on the number of rows of an expert, so a step can be recorded.

// Chooses the experts of each row: those with the largest probabilities, the first of equal ones, in the order of their
// numbers. A weight is a probability, or its share of the chosen ones. A row without a slot is padding and has no
// experts (-1). One warp per row: grid (rows / 4).
extern "C" __global__ void __launch_bounds__(128)
route(const float* logits, const int* slots, int* chosen, float* weights, u32 rows, u32 experts, u32 per_token,
      u32 normalized) {
    __shared__ float numerators[4][EXPERTS_MAX];
    __shared__ float shares[4][CHOSEN_MAX];
    __shared__ int picked[4][CHOSEN_MAX];
    let_later_begin();
    wait_for_earlier();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 4 + warp;
    if (row >= rows) return;
    const u64 first = static_cast<u64>(row) * per_token;
    if (slots[row] < 0) {
        for (u32 i = lane; i < per_token; i += 32) {
            chosen[first + i] = -1;
            weights[first + i] = 0.0f;
        }
        return;
    }
    const float* from = logits + static_cast<u64>(row) * experts;
    float highest = NEGATIVE_INFINITY;
    for (u32 e = lane; e < experts; e += 32) highest = fmaxf(highest, from[e]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, lanes));
    float sum = 0.0f;
    for (u32 e = lane; e < experts; e += 32) {
        const float numerator = expf(from[e] - highest);
        numerators[warp][e] = numerator;
        sum += numerator;
    }
    sum = warp_sum(sum);
    __syncwarp();
    float total = 0.0f;
    for (u32 slot = 0; slot < per_token; slot++) {
        float best = NEGATIVE_INFINITY;
        u32 at = EXPERTS_MAX;
        for (u32 e = lane; e < experts; e += 32) {
            if (numerators[warp][e] > best) {
                best = numerators[warp][e];
                at = e;
            }
        }
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            const float value = __shfl_xor_sync(ALL_LANES, best, lanes);
            const u32 other = __shfl_xor_sync(ALL_LANES, at, lanes);
            if (value > best || (value == best && other < at)) {
                best = value;
                at = other;
            }
        }
        // Without a number left it is the first one.
        if (at == EXPERTS_MAX) at = 0;
        const float probability = numerators[warp][at] / sum;
        total += probability;
        __syncwarp();
        if (lane == 0) {
            // Below every numerator.
            numerators[warp][at] = NEGATIVE_INFINITY;
            u32 place = slot;
            for (; place > 0 && picked[warp][place - 1] > static_cast<int>(at); place--) {
                picked[warp][place] = picked[warp][place - 1];
                shares[warp][place] = shares[warp][place - 1];
            }
            picked[warp][place] = static_cast<int>(at);
            shares[warp][place] = probability;
        }
        __syncwarp();
    }
    for (u32 i = lane; i < per_token; i += 32) {
        chosen[first + i] = picked[warp][i];
        weights[first + i] = normalized ? shares[warp][i] / total : shares[warp][i];
    }
}

// Orders the pairs by expert, and cuts those of each expert into tiles. order[place] = pair; tiles[i] = {expert, first
// place, pairs}; the tiles that are left have no pairs. One block.
extern "C" __global__ void __launch_bounds__(1024)
group_experts(const int* chosen, int* order, int* tiles, u32 pairs, u32 experts, u32 most_tiles) {
    // The pairs of each expert and, above them, its tiles; later the sums up to it.
    __shared__ u64 counts[EXPERTS_MAX];
    let_later_begin();
    wait_for_earlier();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (threadIdx.x >= experts) counts[threadIdx.x] = 0;
    for (u32 e = warp; e < experts; e += warps) {
        u32 count = 0;
        for (u32 p = lane; p < pairs; p += 32) count += chosen[p] == static_cast<int>(e);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes >>= 1) count += __shfl_xor_sync(ALL_LANES, count, lanes);
        if (lane == 0) counts[e] = static_cast<u64>((count + EXPERT_ROWS - 1) / EXPERT_ROWS) << 32 | count;
    }
    __syncthreads();
    const u64 mine = counts[threadIdx.x];
    for (u32 step = 1; step < EXPERTS_MAX; step <<= 1) {
        const u64 other = threadIdx.x >= step ? counts[threadIdx.x - step] : 0;
        __syncthreads();
        counts[threadIdx.x] += other;
        __syncthreads();
    }
    // The tiles of this thread's expert.
    const u64 before = counts[threadIdx.x] - mine;
    const u32 count = static_cast<u32>(mine), first_place = static_cast<u32>(before);
    for (u32 i = 0; i < static_cast<u32>(mine >> 32); i++) {
        int* tile = tiles + (static_cast<u32>(before >> 32) + i) * 3;
        tile[0] = static_cast<int>(threadIdx.x);
        tile[1] = static_cast<int>(first_place + i * EXPERT_ROWS);
        tile[2] = static_cast<int>(min(count - i * EXPERT_ROWS, static_cast<u32>(EXPERT_ROWS)));
    }
    const u32 used = static_cast<u32>(counts[EXPERTS_MAX - 1] >> 32);
    for (u32 i = used + threadIdx.x; i < most_tiles; i += blockDim.x) tiles[i * 3 + 2] = 0;
    // The pairs of each warp's experts, in their order.
    for (u32 e = warp; e < experts; e += warps) {
        u32 place = e > 0 ? static_cast<u32>(counts[e - 1]) : 0;
        for (u32 begin = 0; begin < pairs; begin += 32) {
            const u32 p = begin + lane;
            const bool is_mine = p < pairs && chosen[p] == static_cast<int>(e);
            const u32 all = __ballot_sync(ALL_LANES, is_mine);
            if (is_mine) order[place + __popc(all & ((1u << lane) - 1))] = static_cast<int>(p);
            place += __popc(all);
        }
    }
}

// projected[row] = the sum of the results of its experts, each times its weight, in the order of their numbers; grid
// (parts of a row, rows).
extern "C" __global__ void __launch_bounds__(256)
combine_experts(const float* results, const int* chosen, const float* weights, float* projected, u32 width,
                u32 per_token) {
    let_later_begin();
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const u64 first = static_cast<u64>(blockIdx.y) * per_token;
    float sum = 0.0f;
    for (u32 slot = 0; slot < per_token; slot++) {
        if (chosen[first + slot] >= 0) sum += results[(first + slot) * width + i] * weights[first + slot];
    }
    projected[static_cast<u64>(blockIdx.y) * width + i] = sum;
}
