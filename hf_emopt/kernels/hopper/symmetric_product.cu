// D = alpha A B^T + beta C + diagonal I, symmetric, for sm_90a: lower triangle computed, upper triangle mirrored.
//
// A and B: (batch, m, k), C: (batch, m, m), 16 bits, read by the copy engine in boxes of 128 rows by 64 columns. D as C,
// written by the copy engine in squares of 64. Two multiprocessors form a cluster. Each computes a tile of 128 by 256, or a
// square of 128 on the diagonal. Where both need the same rows of B, each reads half of them and the copy engine writes them
// to both: a third less to read from L2 than two tiles of their own.
//
// One thread issues all reads (produce) and runs ahead over the ends of tiles. Two warpgroups multiply 64 rows each
// (consume), from a ring of STAGES blocks.
//
// Compiled by NVRTC without headers behind instructions.cuh, for each dtype, with SAME (B is A) and ADDED (there is a C) as
// constants; see compile.py.

// What a multiprocessor computes of an item of its cluster.
struct alignas(16) Work {
    int batch;
    int row;  // first row of the tile; of NOTHING, what the other multiprocessor's item is
    int col;  // first column
    int kind;
};

constexpr int NOTHING = 0;  // the other multiprocessor works alone
constexpr int TILE = 1;     // 128 x 256, on its own
constexpr int SQUARE = 2;   // 128 x 128 on the diagonal
constexpr int SHARED = 3;   // 128 x 256; the other one's has the same columns
constexpr int END = 4;

constexpr int BLOCK_K = 64;
constexpr int SQUARE_BLOCKS = 3;  // in one stage, for a square whose factors are the same rows
constexpr u32 BOX_BYTES = 128 * BLOCK_K * 2;
constexpr u32 STAGE_BYTES = 3 * BOX_BYTES;  // rows of A, then 256 rows of B
constexpr u32 PATCH_BYTES = 64 * 64 * 2;    // a square on its way to D
constexpr u32 PATCHES = STAGES * STAGE_BYTES;        // two for each warpgroup
constexpr u32 BARRIERS = PATCHES + 4 * PATCH_BYTES;  // full, then empty

template <bool WIDE>
__device__ __forceinline__ void multiply_block(float (&sums)[128], u32 a, u32 b, bool first) {
    const u64 rows = matrix_descriptor(a), cols = matrix_descriptor(b);
#pragma unroll
    for (int i = 0; i < BLOCK_K / 16; ++i) {
        const int keep = (i > 0 || !first) ? 1 : 0;
        if (WIDE) {
            wgmma_256(sums, rows + 2 * i, cols + 2 * i, keep);
        } else {
            wgmma_128(sums, rows + 2 * i, cols + 2 * i, keep);
        }
    }
}

// Place in the ring of blocks, the same for all that use it.
struct Ring {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ u32 block(int i) const { return shared_memory() + stage * STAGE_BYTES + i * BOX_BYTES; }
    __device__ __forceinline__ u32 full() const { return shared_memory() + BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int of) const { return shared_memory() + BARRIERS + 8 * (STAGES + of); }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Blocks of k in one stage of the ring. Of a cluster both multiprocessors take as many stages for an item.
__device__ __forceinline__ int blocks_a_stage(int kind) {
    return kind == SQUARE && SAME ? SQUARE_BLOCKS : 1;
}

// Stages that hold C: two boxes each.
__device__ __forceinline__ int added_stages(int kind) {
    return !ADDED ? 0 : kind == SQUARE ? 1 : 2;
}

__device__ __forceinline__ void produce(const TensorMap* a_map, const TensorMap* b_map, const TensorMap* c_map, const Work* work,
                                        int item, int blocks, Ring ring) {
    for (;; item += 2) {
        const Work w = work[item];
        if (w.kind == END) {
            return;
        }
        const int kind = w.kind == NOTHING ? w.row : w.kind, each = blocks_a_stage(kind);
#pragma unroll 1
        for (int block = 0; block < blocks; block += each, ring.advance()) {
            barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
            const u32 full = ring.full();
            const int k = block * BLOCK_K;
            if (w.kind == SHARED) {
                barrier_expect(full, 3 * BOX_BYTES);
                read_box(ring.block(0), a_map, full, k, w.row, w.batch);
                const u32 rank = cluster_rank();
                read_box_for_both(ring.block(1 + rank), b_map, full, k, w.col + 128 * rank, w.batch);
            } else if (w.kind == TILE) {
                barrier_expect(full, 3 * BOX_BYTES);
                read_box(ring.block(0), a_map, full, k, w.row, w.batch);
                read_box(ring.block(1), b_map, full, k, w.col, w.batch);
                read_box(ring.block(2), b_map, full, k, w.col + 128, w.batch);
            } else if (w.kind == NOTHING) {
                barrier_expect(full, 0);
            } else if (SAME) {
                barrier_expect(full, SQUARE_BLOCKS * BOX_BYTES);
                for (int i = 0; i < SQUARE_BLOCKS; ++i) {  // zeros beyond k
                    read_box(ring.block(i), a_map, full, k + i * BLOCK_K, w.row, w.batch);
                }
            } else {
                barrier_expect(full, 2 * BOX_BYTES);
                read_box(ring.block(0), a_map, full, k, w.row, w.batch);
                read_box(ring.block(1), b_map, full, k, w.col, w.batch);
            }
        }
#pragma unroll 1
        for (int part = 0; part < added_stages(kind); ++part, ring.advance()) {
            barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
            const u32 full = ring.full();
            barrier_expect(full, w.kind == NOTHING ? 0 : 2 * BOX_BYTES);
            if (w.kind != NOTHING) {
                read_box(ring.block(0), c_map, full, w.col + 128 * part, w.row, w.batch);
                read_box(ring.block(1), c_map, full, w.col + 128 * part + 64, w.row, w.batch);
            }
        }
    }
}

// What a warpgroup has still to do of a tile.
struct Progress {
    int stages;
    int last;  // stage that is being multiplied, or -1 at the beginning
};

// `count` stages more. One is left in flight, so that what follows happens while it is multiplied.
template <bool WIDE>
__device__ __forceinline__ void sum_stages(float (&sums)[128], Ring& ring, Progress& progress, int count, int group, bool leads) {
    const u32 own = group * (BOX_BYTES / 2);
    progress.stages -= count;
#pragma unroll 1
    for (; count > 0; --count) {
        barrier_wait(ring.full(), ring.parity);
        // The fence in each branch: the assembler must see it before the products.
        if (WIDE || !SAME) {
            multiply_fence();
            multiply_block<WIDE>(sums, ring.block(0) + own, ring.block(1), progress.last < 0);
        } else {
            multiply_fence();
#pragma unroll
            for (int i = 0; i < SQUARE_BLOCKS; ++i) {
                multiply_block<false>(sums, ring.block(i) + own, ring.block(i), i == 0 && progress.last < 0);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        multiply_wait<1>();
        if (leads && progress.last >= 0) {
            barrier_arrive_both(ring.empty(progress.last));
        }
        progress.last = ring.stage;
        ring.advance();
    }
}

// A warpgroup's 64 rows of a tile that is summed and rounded but not stored. That happens during the sums of the next tile:
// all multiprocessors end a tile at about the same time, and would wait for memory together.
struct Pending {
    int batch;
    int row;
    int col;
    int squares;  // of 64, from the left, that are not above the diagonal
};

// What is above the diagonal of a square becomes the mirror of what is below, bit for bit.
__device__ __forceinline__ void mirror_within(u32 square, int thread) {
    const int i = thread / 2;
    for (int j = 32 * (thread % 2); j < 32 * (thread % 2) + 32; ++j) {
        if (j > i) {
            u16 value;
            asm volatile("ld.shared.u16 %0, [%1];"
                         : "=h"(value)
                         : "r"(square + 128 * j + 16 * ((i / 8) ^ (j & 7)) + 2 * (i % 8))
                         : "memory");
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(square + 128 * i + 16 * ((j / 8) ^ (i & 7)) + 2 * (j % 8)), "h"(value)
                         : "memory");
        }
    }
}

// Square S of a warpgroup's rows, and its mirror image, by way of two squares of shared memory.
template <int S, bool REUSED>
__device__ __forceinline__ void store_square(const u32 (&packed)[64], const TensorMap* d_map, const Pending& tile, u32 square,
                                             int group) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 mirror = square + PATCH_BYTES;
    // One stmatrix stores four matrices of 8 x 8; the lane says where a row of number lane / 8 of them goes.
    const int half = (lane >> 3) & 1, right = lane >> 4, line = lane & 7;
    const int row = tile.row, col = tile.col + 64 * S;
    if (REUSED) {
        if (thread == 0) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        group_sync(group);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int p = 16 * S + 4 * q, chunk = 2 * q + right;
        const u32 there = square + 128 * (16 * warp + 8 * half + line) + 16 * (chunk ^ line);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(packed[p]),
                     "r"(packed[p + 1]), "r"(packed[p + 2]), "r"(packed[p + 3])
                     : "memory");
        if (row != col) {
            const u32 turned = mirror + 128 * (8 * chunk + line) + 16 * ((2 * warp + half) ^ line);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(turned), "r"(packed[p]),
                         "r"(packed[p + 1]), "r"(packed[p + 2]), "r"(packed[p + 3])
                         : "memory");
        }
    }
    if (row == col) {
        group_sync(group);
        mirror_within(square, thread);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    group_sync(group);
    if (thread == 0) {
        write_box(d_map, square, col, row, tile.batch);
        if (row != col) {
            write_box(d_map, mirror, row, col, tile.batch);
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
}

struct Scale {
    float alpha;
    float beta;
    float diagonal;
};

// Square S of a warpgroup's sums, rounded. Registers as one stmatrix takes them: of 8 x 8 matrices, upper and lower, then
// those 8 columns further. `below`: rows from the diagonal to the tile's first element. `box`: of C.
template <int S, bool DIAGONAL>
__device__ __forceinline__ void round_square(const float (&sums)[128], u32 (&packed)[64], Scale scale, int below, u32 box) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, line = lane & 7;
    const int first = below + 16 * warp + lane / 4 - 2 * (lane % 4);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        u32 old[4];
        if (ADDED) {
            const int row = 16 * warp + (lane & 8) + line, chunk = 2 * q + (lane >> 4);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(old[0]), "=r"(old[1]), "=r"(old[2]), "=r"(old[3])
                         : "r"(box + 128 * row + 16 * (chunk ^ line))
                         : "memory");
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 8 * S + 2 * q + (i >> 1), base = 4 * column + 2 * (i & 1);
            float low = scale.alpha * sums[base], high = scale.alpha * sums[base + 1];
            if (ADDED) {
                float c_low, c_high;
                unpack(old[i], c_low, c_high);
                low += scale.beta * c_low;
                high += scale.beta * c_high;
            }
            if (DIAGONAL) {
                const int distance = first + 8 * (i & 1) - 8 * column;
                low += distance == 0 ? scale.diagonal : 0.0f;
                high += distance == 1 ? scale.diagonal : 0.0f;
            }
            packed[16 * S + 4 * q + i] = pack(low, high);
        }
    }
}

template <int ACROSS, bool DIAGONAL>
__device__ __forceinline__ void round_tile(const float (&sums)[128], u32 (&packed)[64], Scale scale, int below, Ring& ring,
                                           int group, bool leads) {
    const u32 own = group * (BOX_BYTES / 2);
#pragma unroll
    for (int part = 0; part < ACROSS / 2; ++part) {
        if (ADDED) {
            barrier_wait(ring.full(), ring.parity);
        }
        if (part == 0) {
            round_square<0, DIAGONAL>(sums, packed, scale, below, ring.block(0) + own);
            round_square<1, DIAGONAL>(sums, packed, scale, below, ring.block(1) + own);
        } else {
            round_square<2, DIAGONAL>(sums, packed, scale, below, ring.block(0) + own);
            round_square<3, DIAGONAL>(sums, packed, scale, below, ring.block(1) + own);
        }
        if (ADDED) {
            group_sync(group);  // all have read
            if (leads) {
                barrier_arrive_both(ring.empty(ring.stage));
            }
            ring.advance();
        }
    }
}

// The next part of the sums, and then a square of the tile before.
template <bool WIDE, int S>
__device__ __forceinline__ void sum_and_store(float (&sums)[128], const u32 (&packed)[64], const Pending& tile,
                                              const TensorMap* d_map, Ring& ring, Progress& progress, int step, int group,
                                              bool leads) {
    if (tile.squares > S) {
        const int count = progress.stages < step ? progress.stages : step;
        sum_stages<WIDE>(sums, ring, progress, count, group, leads);
        store_square<S, true>(packed, d_map, tile, shared_memory() + PATCHES + group * 2 * PATCH_BYTES, group);
    }
}

template <bool WIDE>
__device__ __forceinline__ void compute_tile(float (&sums)[128], u32 (&packed)[64], Pending& tile, const TensorMap* d_map,
                                             Ring& ring, int blocks, const Work& w, Scale scale, int group, bool leads) {
    const int each = blocks_a_stage(w.kind), stages = (blocks + each - 1) / each;
    const int step = stages >= PARTS ? stages / PARTS : 1;
    Progress progress = {stages, -1};
    sum_and_store<WIDE, 0>(sums, packed, tile, d_map, ring, progress, step, group, leads);
    sum_and_store<WIDE, 1>(sums, packed, tile, d_map, ring, progress, step, group, leads);
    sum_and_store<WIDE, 2>(sums, packed, tile, d_map, ring, progress, step, group, leads);
    sum_and_store<WIDE, 3>(sums, packed, tile, d_map, ring, progress, step, group, leads);
    sum_stages<WIDE>(sums, ring, progress, progress.stages, group, leads);
    multiply_wait<0>();
    // The compiler must not read the sums before they are there.
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        asm volatile("" : "+f"(sums[i])::"memory");
    }
    if (leads) {
        barrier_arrive_both(ring.empty(progress.last));
    }
    constexpr int ACROSS = WIDE ? 4 : 2;
    const int below = w.row + 64 * group - w.col;
    const bool touches = below < 64 * ACROSS;
    tile = {w.batch, w.row + 64 * group, w.col, touches ? below / 64 + 1 : ACROSS};
    if (touches && scale.diagonal != 0.0f) {
        round_tile<ACROSS, true>(sums, packed, scale, below, ring, group, leads);
    } else {
        round_tile<ACROSS, false>(sums, packed, scale, below, ring, group, leads);
    }
}

// The ring moves on with the other multiprocessor.
__device__ __forceinline__ void skip_tile(Ring& ring, int stages, bool leads) {
#pragma unroll 1
    for (; stages > 0; --stages, ring.advance()) {
        barrier_wait(ring.full(), ring.parity);
        if (leads) {
            barrier_arrive_both(ring.empty(ring.stage));
        }
    }
}

template <int S>
__device__ __forceinline__ void store_last(const u32 (&packed)[64], const TensorMap* d_map, const Pending& tile, u32 memory,
                                           int group) {
    if (tile.squares > S) {
        store_square<S, false>(packed, d_map, tile, memory + (4 * group + S) * 2 * PATCH_BYTES, group);
    }
}

__device__ __forceinline__ void consume(const TensorMap* d_map, const Work* work, int item, int blocks, Scale given,
                                        const float* correction, int power, Ring ring) {
    const int group = threadIdx.x / 128 - 1;
    const bool leads = threadIdx.x % 128 == 0;
    float sums[128];
    u32 packed[64];
    Pending tile = {0, 0, 0, 0};
    for (Work w = work[item]; w.kind != END;) {
        item += 2;
        const Work next = work[item];  // is there when this item is done
        Scale scale = given;
        if (power > 0) {
            const float t = correction[w.batch];
            scale.alpha *= power == 2 ? t * t : t;
            scale.beta *= power == 2 ? 1.0f : t;
            scale.diagonal *= power == 2 ? 1.0f : t;
        }
        if (w.kind == NOTHING) {
            const int each = blocks_a_stage(w.row);
            skip_tile(ring, (blocks + each - 1) / each + added_stages(w.row), leads);
        } else if (w.kind == SQUARE) {
            compute_tile<false>(sums, packed, tile, d_map, ring, blocks, w, scale, group, leads);
        } else {
            compute_tile<true>(sums, packed, tile, d_map, ring, blocks, w, scale, group, leads);
        }
        w = next;
    }
    // Once both warpgroups have summed, the ring is free: the squares of the last tile need not wait for each other.
    both_groups_sync();
    store_last<0>(packed, d_map, tile, shared_memory(), group);
    store_last<1>(packed, d_map, tile, shared_memory(), group);
    store_last<2>(packed, d_map, tile, shared_memory(), group);
    store_last<3>(packed, d_map, tile, shared_memory(), group);
    if (leads) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// `work`: of every cluster `items` pairs, one for each multiprocessor, the last of them END. `power`: 0, or what of alpha
// and the diagonal the numbers in `correction`, one a matrix, multiply, as in symmetric_kernels.py.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    symmetric_product(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                      const __grid_constant__ TensorMap c_map, const __grid_constant__ TensorMap d_map, const Work* work,
                      int items, int k, float alpha, float beta, float diagonal, const float* correction, int power) {
    const Ring ring;
    const int blocks = (k + BLOCK_K - 1) / BLOCK_K;
    const int first = 2 * items * (blockIdx.x / 2) + cluster_rank();
    if (threadIdx.x == 0) {
        prefetch_map(&a_map);
        prefetch_map(&b_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_memory() + BARRIERS + 8 * stage, 1);
            barrier_init(ring.empty(stage), 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            produce(&a_map, &b_map, &c_map, work, first, blocks, ring);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(&d_map, work, first, blocks, Scale{alpha, beta, diagonal}, correction, power, ring);
    }
    __syncwarp();
    cluster_sync();  // neither may be gone while the other arrives at its barriers
}
