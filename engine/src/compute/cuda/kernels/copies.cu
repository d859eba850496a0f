// Copies many pieces of device memory at once: the blocks of a handoff are scattered, and the call of a separate copy
// takes longer than its bytes.
//
// Pieces are multiples of 16 bytes, and both ends are aligned to 16 bytes. Grid (parts of COPY_PART bytes of the
// longest, pieces).

struct Pieces {
    u64 from[COPY_PIECES];
    u64 into[COPY_PIECES];
    u32 bytes[COPY_PIECES];
};

extern "C" __global__ void __launch_bounds__(512) copy_pieces(const __grid_constant__ Pieces pieces) {
    let_later_begin();
    wait_for_earlier();
    const u32 bytes = pieces.bytes[blockIdx.y], start = blockIdx.x * COPY_PART;
    if (start >= bytes) return;
    const Four* from = reinterpret_cast<const Four*>(pieces.from[blockIdx.y]);
    Four* into = reinterpret_cast<Four*>(pieces.into[blockIdx.y]);
    const u32 end = min(bytes, start + COPY_PART) / 16;
    for (u32 i = start / 16 + threadIdx.x; i < end; i += blockDim.x) into[i] = from[i];
}
