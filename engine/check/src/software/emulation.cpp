// The kernels on a CPU: every thread of a block is a fiber. Fibers switch only where the kernel synchronizes. For
// checks of the kernels' own code without a GPU; slow and single-threaded.
//
// CUDA's model and the PTX of ptx.cu are emulated by their definitions: the elements of each lane in an ldmatrix and an
// mma, shuffles, and barriers. Asynchronous copies land only when they are waited for. Not emulated are caches, timing,
// and races between threads (fibers switch only where threads wait).
//
// The kernels follow below this file. The exported functions are made from EMULATE at the very end.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __restrict__
#define __grid_constant__

struct Index {
    u32 x, y, z;
};

struct Copy {
    unsigned char* to;
    unsigned char bytes[16];
};

// The values that a warp exchanges: values of each lane, twice, so that a lane may be one exchange ahead.
struct Warp {
    u32 arrived, generation;
    u32 values[2][32][8];
};

struct Thread {
    // The start of the fiber, and later its last waiting point: jumps need no system call.
    ucontext_t context;
    jmp_buf waits;
    Index index;
    bool begun, done;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

static const size_t STACK_BYTES = 256 << 10;
static jmp_buf scheduler;
static ucontext_t unused;
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static std::vector<unsigned char> stacks;
static std::vector<unsigned char> block_memory;
static Thread* current;
static u32 block_arrived, block_generation, alive;
static Index block_index, grid_size, block_size;
static const std::function<void()>* body;

#define threadIdx (current->index)
#define blockIdx block_index
#define blockDim block_size
#define gridDim grid_size
#define shared_memory (block_memory.data())

static void yield() {
    if (_setjmp(current->waits) == 0) _longjmp(scheduler, 1);
}

// Lets a thread run until it waits or ends.
static void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(scheduler) != 0) return;
    if (thread.begun) _longjmp(thread.waits, 1);
    thread.begun = true;
    setcontext(&thread.context);
}

static void fail(const char* what) {
    fprintf(stderr, "emulation: %s\n", what);
    abort();
}

static void __syncthreads() {
    const u32 generation = block_generation;
    if (++block_arrived == alive) {
        block_arrived = 0;
        block_generation++;
    }
    while (block_generation == generation) yield();
}

// Waits until every lane has written its values. Returns the values of all lanes.
static u32 (*exchange(const u32* mine, int count))[8] {
    const u32 lane = threadIdx.x % 32;
    Warp& warp = warps[threadIdx.x / 32];
    const u32 generation = warp.generation;
    memcpy(warp.values[generation % 2][lane], mine, count * 4);
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.generation++;
    }
    while (warp.generation == generation) yield();
    return warp.values[generation % 2];
}

static void __syncwarp() {
    const u32 nothing = 0;
    exchange(&nothing, 1);
}

template <class V>
static V __shfl_sync(u32, V value, int from) {
    u32 mine[2] = {0, 0};
    memcpy(mine, &value, sizeof(V));
    u32(*all)[8] = exchange(mine, 2);
    memcpy(&value, all[from & 31], sizeof(V));
    return value;
}
template <class V>
static V __shfl_xor_sync(u32 mask, V value, int lanes) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes);
}

template <class To, class From>
static To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
static float __uint_as_float(u32 bits) { return bits_of<float>(bits); }
static float __int_as_float(int bits) { return bits_of<float>(bits); }
static u32 __float_as_uint(float value) { return bits_of<u32>(value); }
static u64 __umul64hi(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }
static u64 atomicAdd(u64* at, u64 more) {
    const u64 before = *at;
    *at += more;
    return before;
}
template <class V>
static V min(V a, V b) {
    return b < a ? b : a;
}
static int max(int a, int b) { return b < a ? a : b; }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static u32 __ballot_sync(u32, bool mine) {
    const u32 bit = mine ? 1 : 0;
    u32(*all)[8] = exchange(&bit, 1);
    u32 bits = 0;
    for (u32 lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
    return bits;
}

// The functions of ptx.cu.

// Kernels run one after the other here.
static void let_later_begin() {}
static void wait_for_earlier() {}
static void load_once(u32 (&r)[4], const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("a load of 16 bytes from an address that is not aligned");
    memcpy(r, from, 16);
}

static u16 narrow_1(float x) {
    const u32 bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static u32 narrow_2(float low, float high) { return static_cast<u32>(narrow_1(high)) << 16 | narrow_1(low); }
static float power_of_2(float x) { return exp2f(x); }

static u32 shared_address(const void* p) {
    return static_cast<u32>(static_cast<const unsigned char*>(p) - shared_memory);
}
static unsigned char* shared_at(u32 address, u32 bytes) {
    if (address % 16 != 0) fail("an address in shared memory is not a multiple of 16");
    if (address + bytes > block_memory.size()) fail("an address beyond shared memory");
    return shared_memory + address;
}
static void copy_16(u32 to, const void* from, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0 && bytes > 0) fail("a copy from an address that is not aligned");
    Copy copy = {shared_at(to, 16), {}};
    memcpy(copy.bytes, from, bytes);
    current->open.push_back(copy);
}
static void copies_end_group() {
    current->groups.push_back(current->open);
    current->open.clear();
}
template <int LEFT>
static void copies_wait() {
    while (current->groups.size() > LEFT) {
        for (const Copy& copy : current->groups.front()) memcpy(copy.to, copy.bytes, 16);
        current->groups.erase(current->groups.begin());
    }
}

// Four matrices of 8 rows of 16 bytes; lane 8m + r has the address of row r of matrix m. Lane l gets the elements 2(l
// mod 4) and the next of row l / 4, or, transposed, of that column.
static void load_matrices(u32 (&r)[4], u32 from, bool transposed) {
    u32(*addresses)[8] = exchange(&from, 1);
    const u32 lane = threadIdx.x % 32;
    for (u32 m = 0; m < 4; m++) {
        u16 element[2];
        for (u32 i = 0; i < 2; i++) {
            const u32 row = transposed ? lane % 4 * 2 + i : lane / 4;
            const u32 column = transposed ? lane / 4 : lane % 4 * 2 + i;
            memcpy(&element[i], shared_at(addresses[m * 8 + row][0], 16) + column * 2, 2);
        }
        r[m] = static_cast<u32>(element[1]) << 16 | element[0];
    }
    // No lane may write data that another lane has yet to read.
    __syncwarp();
}
static void load_4(u32 (&r)[4], u32 from) { load_matrices(r, from, false); }
static void load_4_transposed(u32 (&r)[4], u32 from) { load_matrices(r, from, true); }

static float half_of(u32 both, u32 high) { return __uint_as_float(high ? both & 0xffff0000u : both << 16); }

// mma.m16n8k16 with g = lane / 4 and t = lane % 4. A lane has of A the rows g (a0, a2) and g + 8 (a1, a3), columns 2t
// and the next (a0, a1) and 2t + 8 and the next (a2, a3). Of B it has the column g, rows 2t and the next (b0), 2t + 8
// and the next (b1). Of C it has the rows g (c0, c1) and g + 8 (c2, c3), columns 2t and the next.
static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    u32(*all)[8] = exchange(mine, 6);
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (u32 i = 0; i < 4; i++) {
        const u32 row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = c[i];
        for (u32 k = 0; k < 16; k++) {
            const u32 of_a = row % 8 * 4 + k % 8 / 2, of_b = column * 4 + k % 8 / 2;
            const float left = half_of(all[of_a][row / 8 + k / 8 * 2], k % 2);
            const float right = half_of(all[of_b][4 + k / 8], k % 2);
            sum += left * right;
        }
        c[i] = sum;
    }
}

static void enter() {
    (*body)();
    current->done = true;
    alive--;
    // The remaining threads complete a barrier.
    if (alive > 0 && block_arrived == alive) {
        block_arrived = 0;
        block_generation++;
    }
    if (!current->open.empty() || !current->groups.empty()) {
        for (const auto& group : current->groups)
            if (!group.empty()) fail("a thread ends with copies on their way");
    }
    _longjmp(scheduler, 1);
}

static void run_block(u32 count, u32 bytes) {
    threads.clear();
    threads.resize(count);
    warps.assign((count + 31) / 32, Warp{});
    stacks.resize(count * STACK_BYTES);
    // Not zeros, so that reads of unwritten memory are visible.
    block_memory.assign(bytes, 0xff);
    block_arrived = block_generation = 0;
    alive = count;
    for (u32 i = 0; i < count; i++) {
        Thread& thread = threads[i];
        thread.index = {i, 0, 0};
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks.data() + i * STACK_BYTES;
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = &unused;
        makecontext(&thread.context, enter, 0);
    }
    u32 rounds = 0;
    while (alive > 0) {
        const u32 before = block_generation;
        u64 progress = alive;
        for (const Warp& warp : warps) progress += warp.generation;
        for (Thread& thread : threads) {
            if (!thread.done) resume(thread);
        }
        u64 after = alive;
        for (const Warp& warp : warps) after += warp.generation;
        rounds = after == progress && before == block_generation ? rounds + 1 : 0;
        if (rounds > 4) fail("threads wait for each other for ever");
    }
}

static void run_grid(const u32* grid, u32 count, u32 bytes, const std::function<void()>& kernel) {
    body = &kernel;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {count, 1, 1};
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                run_block(count, bytes);
            }
}

// Calls a kernel with the parameters of a launch: pointers to their values.
template <class... Parameters, size_t... I>
static void call(void (*kernel)(Parameters...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<Parameters*>(values[I])...);
}
template <class... Parameters>
static std::function<void()> bind(void (*kernel)(Parameters...), void** values) {
    return [=] { call(kernel, values, std::index_sequence_for<Parameters...>{}); };
}

// Runs the kernel of this name; returns 0 if there is one. The lines of EMULATE, one per kernel, stand between these
// two.
#define EMULATE_BEGIN \
    extern "C" int baton_emulate(const char* name, const u32* grid, u32 threads, u32 bytes, void** values) {
#define EMULATE(kernel)                                           \
    if (strcmp(name, #kernel) == 0) {                             \
        run_grid(grid, threads, bytes, bind(kernel, values));     \
        return 0;                                                 \
    }
#define EMULATE_END \
    return 1;       \
    }
