// What Hopper adds (sm_90a): products of a warpgroup, 4 warps, and copies of boxes by hardware.
//
// wgmma multiplies 64 x 16 by 16 x N, bf16 operands, fp32 accumulators: a warp holds 16 rows of c,
// as n / 8 of mma's 16 x 8 accumulators side by side. It runs while the warps go on: registers that
// it reads or writes may not be touched between its issue and a wait, hence `hold`, which keeps the
// compiler from moving uses across the wait.
//
// An operand in shared memory lies in rows of ROW_BYTES (32, 64 or 128), whose 16-byte words are
// swizzled as the tensor memory accelerator writes them: over as many bytes, in groups of 8 rows.

#pragma once

#include "mma.cuh"

typedef unsigned long long word64;

__device__ __forceinline__ void stores_visible_to_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int N>
__device__ __forceinline__ void hold(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(word (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}

// The low word of a matrix's descriptor; its address counts 16 bytes, so k-steps are added to it.
// leading: bytes between groups of columns, where there are several.
__device__ __forceinline__ word matrix(word address, word leading) {
    return address / 16 | leading / 16 << 16;
}
template <int ROW_BYTES>
__device__ __forceinline__ word64 described(word low) {
    constexpr word high = (8 * ROW_BYTES / 16) | (ROW_BYTES == 128  ? 1u
                                                  : ROW_BYTES == 64 ? 2u
                                                                    : 3u)
                                                     << 30;
    return (word64)high << 32 | low;
}

#define L0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define L2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define L3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define L4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define L5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define L6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define L7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define F8(c, i)                                                                                \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
// c (64 x N) = a b, or += if `add`; a and b in shared memory. Transposed: stored in rows along k.
#define DEFINE_SS(N, LIST, A, B, S, TA, TB, ...)                                               \
    template <int TRANSPOSE_A, int TRANSPOSE_B>                                                \
    __device__ __forceinline__ void product(float (&c)[N / 2], word64 a, word64 b, bool add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S                                     \
                     ", 0;\n"                                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, " A \
                     ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"                                  \
                     : __VA_ARGS__                                                             \
                     : "l"(a), "l"(b), "r"((int)add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));     \
    }
DEFINE_SS(16, L0, "%8", "%9", "%10", "%11", "%12", F8(c, 0))
DEFINE_SS(32, L0 "," L1, "%16", "%17", "%18", "%19", "%20", F8(c, 0), F8(c, 8))
DEFINE_SS(64, L0 "," L1 "," L2 "," L3, "%32", "%33", "%34", "%35", "%36", F8(c, 0), F8(c, 8),
          F8(c, 16), F8(c, 24))
DEFINE_SS(128, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7, "%64", "%65", "%66", "%67",
          "%68", F8(c, 0), F8(c, 8), F8(c, 16), F8(c, 24), F8(c, 32), F8(c, 40), F8(c, 48),
          F8(c, 56))

// The same, with a (64 x 16) in registers, in mma's A layout: each warp has 16 of its rows.
#define DEFINE_RS(N, LIST, AS, B, S, TB, ...)                                                      \
    template <int TRANSPOSE_B>                                                                     \
    __device__ __forceinline__ void product(float (&c)[N / 2], word a0, word a1, word a2, word a3, \
                                            word64 b, bool add) {                                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S                                         \
                     ", 0;\n"                                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, {" AS   \
                     "}, " B ", p, 1, 1, " TB ";\n}\n"                                             \
                     : __VA_ARGS__                                                                 \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add),                  \
                       "n"(TRANSPOSE_B));                                                          \
    }
DEFINE_RS(32, L0 "," L1, "%16,%17,%18,%19", "%20", "%21", "%22", F8(c, 0), F8(c, 8))
DEFINE_RS(64, L0 "," L1 "," L2 "," L3, "%32,%33,%34,%35", "%36", "%37", "%38", F8(c, 0), F8(c, 8),
          F8(c, 16), F8(c, 24))
DEFINE_RS(128, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7, "%64,%65,%66,%67", "%68", "%69",
          "%70", F8(c, 0), F8(c, 8), F8(c, 16), F8(c, 24), F8(c, 32), F8(c, 40), F8(c, 48),
          F8(c, 56))

// Copies by the tensor memory accelerator, told of by a barrier in shared memory.
struct alignas(64) TensorMap {
    word64 words[16];
};

__device__ __forceinline__ void barrier_init(word barrier, word count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(word barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(word barrier, word bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(word barrier, word parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
        "%1;\n@done bra PASSED%=;\nbra AGAIN%=;\nPASSED%=:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// A box of columns x rows of a (batch, head, token, column) tensor; zeros beyond its tokens.
__device__ __forceinline__ void copy_box(word to, const TensorMap* from, word barrier, int column,
                                         int token, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(from), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(batch)
        : "memory");
}
__device__ __forceinline__ void copy_bytes(word to, const void* from, word bytes, word barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
