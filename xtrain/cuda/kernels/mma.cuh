// Tensor-core pieces that the attention kernels share, as inline PTX for sm_80 and later.
//
// Fragments of mma.m16n8k16, bf16 operands, fp32 accumulators; lane = threadIdx.x % 32,
// g = lane / 4, t = lane % 4. Each register of A and B holds two neighbours, the lower index low:
//   A (16 x 16, row major)  a0: A[g][2t..]  a1: A[g+8][2t..]  a2: A[g][2t+8..]  a3: A[g+8][2t+8..]
//   B (16 x 8, [k][n])      b0: B[2t..][g]  b1: B[2t+8..][g]
//   C (16 x 8)              c0 c1: C[g][2t..]  c2 c3: C[g+8][2t..]
// So two accumulators side by side, packed, are one A operand: an attention tile's probabilities
// never leave the registers. The four lanes of one g, a quad, hold a row of C.
//
// ldmatrix: lanes 8i .. 8i+7 give the addresses of the eight 16-byte rows of the i-th 8 x 8 matrix,
// and register i receives it; plain for A and for B stored as [n][k], transposed for B stored as
// [k][n]. Rows whose pitch is an odd number of 16-byte words meet no bank twice.

#pragma once

typedef unsigned int word;
typedef unsigned short bf16_bits;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() {
    return __int_as_float(0x7f800000);
}

__device__ __forceinline__ word shared_address(const void* pointer) {
    return static_cast<word>(__cvta_generic_to_shared(pointer));
}

// d += a b
__device__ __forceinline__ void mma(float (&d)[4], const word (&a)[4], word b0, word b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(word (&r)[4], word address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(word (&r)[4], word address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// 16 bytes from global to shared memory; zeros when not valid, and then nothing is read.
__device__ __forceinline__ void copy_async(word to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :
                 : "r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Wait until at most `pending` of this thread's groups are still on their way.
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// 2^x, relative error about 2^-22; 0 at -infinity.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// Two fp32 as bf16, rounded to nearest even.
__device__ __forceinline__ word pack_bf16(float low, float high) {
    word packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float from_bf16(bf16_bits bits) {
    return __uint_as_float(static_cast<word>(bits) << 16);
}

// Over the four lanes that hold a row of an accumulator; all of them receive the result.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
