// Instructions of sm_90a that CUDA C++ has no words for, each in a function of its own. Put before symmetric_product.cu.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    char bytes[128];
};

//GENERATED

extern __shared__ __align__(1024) char dynamic[];  // swizzled blocks begin at multiples of 1024

__device__ __forceinline__ u32 shared_memory() {
    return static_cast<u32>(__cvta_generic_to_shared(dynamic));
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

__device__ __forceinline__ void both_groups_sync() {
    asm volatile("bar.sync 3, 256;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier of that address in both multiprocessors. Not with .release.cluster, which waits for all of the
// thread's memory accesses anywhere (twice the time of the whole kernel): what was read, wgmma read, and is waited for.
__device__ __forceinline__ void barrier_arrive_both(u32 barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, 0;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "mapa.shared::cluster.u32 there, %0, 1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void read_box(u32 to, const TensorMap* map, u32 barrier, int k, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(batch)
        : "memory");
}

// To that address in both multiprocessors, and counted by the barrier of each.
__device__ __forceinline__ void read_box_for_both(u32 to, const TensorMap* map, u32 barrier, int k, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(batch), "h"(static_cast<u16>(3))
        : "memory");
}

__device__ __forceinline__ void write_box(const TensorMap* map, u32 from, int col, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
                 "r"(col), "r"(row), "r"(batch)
                 : "memory");
}

// Of rows of 128 bytes, swizzled, as wgmma reads them.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (static_cast<u64>(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ void multiply_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
