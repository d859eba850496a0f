// Copies of many pieces of device memory at once: blocks of a handoff lie here and there, and a copy of each by the driver
// costs more than its bytes.
//
// Pieces are of whole 16 bytes, both ends aligned to as many. Grid (parts of COPY_PART bytes of the longest, pieces).

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
