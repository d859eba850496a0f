// Chooses the next token of each row of logits on the device.
//
// Weights are exp((logit - best) / temperature). Sums of weights are whole numbers of 2^-40 and therefore do not depend
// on their order: a seed draws the same token with any order of the threads.

#define CHOOSE_THREADS 512
#define ONE 1099511627776.0  // 2^40

// The best of each part of each row, the lowest index among equals, -1 if no logit is a number. Grid (parts, rows).
extern "C" __global__ void __launch_bounds__(256)
best_of_parts(const float* logits, float* values, int* indices, u32 vocab, u32 parts) {
    let_later_begin();
    wait_for_earlier();
    __shared__ float warp_values[8];
    __shared__ int warp_indices[8];
    const u32 per_part = (vocab + parts - 1) / parts, start = blockIdx.x * per_part;
    const u32 end = min(vocab, start + per_part);
    const float* row = logits + static_cast<u64>(blockIdx.y) * vocab;
    float best = NEGATIVE_INFINITY;
    int index = -1;
    for (u32 i = start + threadIdx.x; i < end; i += blockDim.x) {
        if (row[i] > best) {
            best = row[i];
            index = i;
        }
    }
    auto keep_better = [&](float value, int at) {
        if (at >= 0 && (index < 0 || value > best || (value == best && at < index))) {
            best = value;
            index = at;
        }
    };
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
        const float value = __shfl_xor_sync(ALL_LANES, best, lanes);
        const int at = __shfl_xor_sync(ALL_LANES, index, lanes);
        keep_better(value, at);
    }
    if (threadIdx.x % 32 == 0) {
        warp_values[threadIdx.x / 32] = best;
        warp_indices[threadIdx.x / 32] = index;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < blockDim.x / 32; w++) keep_better(warp_values[w], warp_indices[w]);
        values[blockIdx.y * parts + blockIdx.x] = best;
        indices[blockIdx.y * parts + blockIdx.x] = index;
    }
}

struct Kept {
    u32 above;      // kept: every weight with larger bits,
    u32 ties;       // and this number of the weights with equal bits, the first ones
};

// Bits of a token's weight; 0 for a token that can never be drawn.
__device__ __forceinline__ u32 weight_bits(float logit, float best, float inverse_temperature) {
    const float weight = expf((logit - best) * inverse_temperature);
    return weight > 0.0f ? __float_as_uint(weight) : 0;  // NaN is not above 0
}
__device__ __forceinline__ u64 mass_of(u32 bits) {
    return static_cast<u64>(static_cast<double>(__uint_as_float(bits)) * ONE);
}

// Finds a weight, digit by digit from the top: the running sum of `measure` from the largest weight down reaches
// `wanted` there (at least 1, at most the sum of all). Only weights that `within` accepts count.
template <class Measure, class Within>
__device__ __forceinline__ Kept reach(const float* row, u32 vocab, float best, float inverse_temperature, u64 wanted,
                                      u64* bins, Measure measure, Within within) {
    __shared__ u32 digit;
    __shared__ u64 left;
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += CHOOSE_THREADS) bins[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < vocab; i += CHOOSE_THREADS) {
            const u32 bits = weight_bits(row[i], best, inverse_temperature);
            const bool here = shift == 24 || bits >> (shift + 8) == prefix >> (shift + 8);
            if (bits > 0 && here && within(bits)) atomicAdd(&bins[bits >> shift & 255], measure(bits));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 rest = wanted;
            u32 at = 255;
            while (at > 0 && bins[at] < rest) rest -= bins[at--];
            digit = at;
            left = rest;
        }
        __syncthreads();
        prefix |= digit << shift;
        wanted = left;
        __syncthreads();
    }
    const u64 each = measure(prefix);
    return Kept{prefix, each == 0 ? ~0u : static_cast<u32>((wanted + each - 1) / each)};
}

// The sum over the threads of the block before this one, and the sum over all.
__device__ __forceinline__ u64 sum_before(u64 mine, u64* scratch, u64& all) {
    __syncthreads();
    scratch[threadIdx.x] = mine;
    __syncthreads();
    for (int step = 1; step < CHOOSE_THREADS; step <<= 1) {
        const u64 other = threadIdx.x >= step ? scratch[threadIdx.x - step] : 0;
        __syncthreads();
        scratch[threadIdx.x] += other;
        __syncthreads();
    }
    all = scratch[CHOOSE_THREADS - 1];
    return scratch[threadIdx.x] - mine;
}

// draws[row] = {kind (0 nothing, 1 the best, 2 draw), 1/temperature, top_k (0 off), top_p, min_p, fraction low, high}
// as bits; chosen[row] = the token, or -1 if no logit is a number. One block per row.
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS)
choose(const float* logits, const float* values, const int* indices, const int* draws, int* chosen, u32 vocab, u32 parts) {
    let_later_begin();
    wait_for_earlier();
    __shared__ u64 bins[256];
    __shared__ u64 scratch[CHOOSE_THREADS];
    const int* draw = draws + blockIdx.x * 7;
    if (draw[0] == 0) return;
    const float* row = logits + static_cast<u64>(blockIdx.x) * vocab;
    float best = NEGATIVE_INFINITY;
    int index = -1;
    for (u32 part = 0; part < parts; part++) {
        const float value = values[blockIdx.x * parts + part];
        const int at = indices[blockIdx.x * parts + part];
        if (at >= 0 && (index < 0 || value > best)) {
            best = value;
            index = at;
        }
    }
    // With infinity there is no distribution to draw from.
    if (draw[0] == 1 || index < 0 || best == -NEGATIVE_INFINITY) {
        if (threadIdx.x == 0) chosen[blockIdx.x] = index;
        return;
    }
    const float inverse_temperature = __int_as_float(draw[1]), top_p = __int_as_float(draw[3]);
    const float min_p = __int_as_float(draw[4]);
    const u64 fraction = static_cast<u64>(static_cast<u32>(draw[6])) << 32 | static_cast<u32>(draw[5]);
    const u32 top_k = draw[2];
    auto one = [](u32) -> u64 { return 1; };
    auto all_of_them = [](u32) { return true; };

    // Min-p, then top-k with all of its ties, then top-p: the order of the host's sampler and of vLLM.
    Kept kept{0, ~0u};
    if (min_p > 0.0f) kept = Kept{__float_as_uint(min_p) - 1, 0};
    if (top_k > 0 && top_k < vocab) {
        const Kept best_k = reach(row, vocab, best, inverse_temperature, top_k, bins, one, all_of_them);
        if (best_k.above > kept.above) kept = Kept{best_k.above, ~0u};
    }
    if (top_p < 1.0f) {
        // The mass of the candidates. Up to here either all ties are candidates or none.
        const u32 floor = kept.ties == 0 ? kept.above + 1 : kept.above;
        u64 mine = 0, total;
        for (u32 i = threadIdx.x; i < vocab; i += CHOOSE_THREADS) {
            const u32 bits = weight_bits(row[i], best, inverse_temperature);
            if (bits >= floor) mine += mass_of(bits);
        }
        sum_before(mine, scratch, total);
        u64 wanted = static_cast<u64>(static_cast<double>(total) * top_p);
        wanted = wanted > 0 ? wanted : 1;
        const Kept nucleus = reach(row, vocab, best, inverse_temperature, wanted, bins, mass_of,
                                   [floor](u32 bits) { return bits >= floor; });
        if (nucleus.above > kept.above) {
            kept = nucleus;
        } else {
            kept.ties = min(kept.ties, nucleus.ties);
        }
    }

    // In the order of the vocabulary, one run per thread: first the ties that are candidates, then the token of the
    // draw.
    const u32 run = (vocab + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
    const u32 start = min(vocab, threadIdx.x * run), end = min(vocab, start + run);
    u64 ties = 0, all_ties;
    for (u32 i = start; i < end; i++) {
        ties += kept.above > 0 && weight_bits(row[i], best, inverse_temperature) == kept.above;
    }
    const u64 ties_before = sum_before(ties, scratch, all_ties);
    auto mass_at = [&](u32 i, u64& tie) -> u64 {
        const u32 bits = weight_bits(row[i], best, inverse_temperature);
        const bool is_tie = kept.above > 0 && bits == kept.above;
        const bool in = bits > kept.above || (is_tie && tie < kept.ties);
        tie += is_tie;
        return in ? mass_of(bits) : 0;
    };
    u64 tie = ties_before, mine = 0, total;
    for (u32 i = start; i < end; i++) mine += mass_at(i, tie);
    u64 before = sum_before(mine, scratch, total);
    // Below the total, because the fraction is below 1. The best token alone has a mass of 2^40.
    const u64 target = __umul64hi(fraction, total);
    if (before <= target && target < before + mine) {
        tie = ties_before;
        for (u32 i = start; i < end; i++) {
            before += mass_at(i, tie);
            if (before > target) {
                chosen[blockIdx.x] = i;
                break;
            }
        }
    }
}
