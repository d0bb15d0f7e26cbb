// Cross-entropy of rows of bf16 logits in one read and one write: a block holds a row in its shared
// memory, as `cross_entropy.py` says. Each 16-byte word of a row belongs to one thread for good, so
// a word can be asked for again, for the block's next row, as soon as its gradient is computed: rows
// stream in while others are worked on and written. Two blocks fit a multiprocessor at 50304 words.
//
// WORDS: 16-byte words of a row.  VOCAB: columns that are words of the vocabulary; the rest is padding.
// THREADS: of a block, a multiple of 32.  Architectures: sm_80 and later.

#include "words.cuh"

#ifndef WORDS
#define WORDS 6288
#endif
#ifndef VOCAB
#define VOCAB 50257
#endif
#ifndef THREADS
#define THREADS 512
#endif

namespace {

constexpr int kPieces = (WORDS + THREADS - 1) / THREADS;  // words of a row that a thread owns
constexpr int kGroup = 2;                                 // words that arrive and are summed at once
constexpr int kGroups = (kPieces + kGroup - 1) / kGroup;
constexpr int kWarps = THREADS / 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1.0e38f;  // below every logit; its product with kLog2E is finite

// Whether a word of this piece exists, and whether one may hold padding: constants but for the last.
__device__ __forceinline__ bool exists(int piece, int at) {
    return (piece + 1) * THREADS <= WORDS || at < WORDS;
}

__device__ __forceinline__ bool may_be_padded(int piece) { return (piece + 1) * THREADS * 8 > VOCAB; }

__device__ __forceinline__ void replace_padding(int at, float* v, float by) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (at * 8 + i >= VOCAB) v[i] = by;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void copy_async(uint4* shared, const uint4* global) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `left` groups of copies are under way; a constant once the loop is unrolled.
__device__ __forceinline__ void wait_until(int left) {
    switch (left) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
    }
}

__device__ __forceinline__ float element(const uint4* words, int at) {
    return __uint_as_float(unsigned(reinterpret_cast<const unsigned short*>(words)[at]) << 16);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    cross_entropy(const uint4* z, const int* targets, const float* coefficient, float* logp,
                  uint4* dz, int rows, int pitch) {
    extern __shared__ uint4 held[];
    __shared__ float peaks[2][kWarps], weights[2][kWarps], picked[2];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int target = blockIdx.x < rows ? targets[blockIdx.x] : -1;
    if (target >= 0) {
        const uint4* from = z + static_cast<long long>(blockIdx.x) * WORDS;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const int at = piece * THREADS + thread;
            if (exists(piece, at)) copy_async(&held[at], from + at);
            if (piece % kGroup == kGroup - 1 || piece == kPieces - 1) commit();
        }
    }
    int side = 0;  // of the exchange, used in turn: a slow warp may still read the last row's
    for (int row = blockIdx.x; row < rows; row += gridDim.x, side ^= 1) {
        const int next = row + gridDim.x;
        const int next_target = next < rows ? targets[next] : -1;
        const long long base = static_cast<long long>(row) * WORDS;
        const uint4* from = z + static_cast<long long>(next) * WORDS;
        const bool owns_target = target >= 0 && target / 8 % THREADS == thread;
        float peak = kLowest, weight = 0;
        if (target >= 0) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                wait_until(kGroups - 1 - group);
                float v[kGroup * 8];
                float higher = peak;
#pragma unroll
                for (int k = 0; k < kGroup; ++k) {
                    const int piece = group * kGroup + k;
                    const int at = piece * THREADS + thread;
                    if (piece < kPieces && exists(piece, at)) {
                        unpack8(held[at], v + k * 8);
                        if (may_be_padded(piece)) replace_padding(at, v + k * 8, kLowest);
                    } else {
#pragma unroll
                        for (int i = 0; i < 8; ++i) v[k * 8 + i] = kLowest;
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) higher = fmaxf(higher, v[k * 8 + i]);
                }
                const float shift = higher * kLog2E;
                weight *= exp2_fast(peak * kLog2E - shift);
                peak = higher;
#pragma unroll
                for (int i = 0; i < kGroup * 8; ++i)
                    weight += exp2_fast(fmaf(v[i], kLog2E, -shift));
            }
            if (owns_target) picked[side] = element(held, target);
        }
        if (peak == kLowest) weight = 0;  // a thread without a word; its sum means nothing
        const float top = warp_max(peak);
        weight = warp_sum(weight * exp2_fast((peak - top) * kLog2E));
        if (lane == 0) peaks[side][warp] = top, weights[side][warp] = weight;
        __syncthreads();
        peak = lane < kWarps ? peaks[side][lane] : kLowest;
        weight = lane < kWarps ? weights[side][lane] : 0.0f;
        const float highest = warp_max(peak) * kLog2E;
        weight = warp_sum(weight * exp2_fast(peak * kLog2E - highest));
        const bool counts = target >= 0;
        const float factor = counts ? coefficient[row * pitch] : 0.0f;
        const float scale = counts ? factor / weight : 0.0f;
        if (thread == 0)
            logp[row] = counts ? (picked[side] * kLog2E - highest - log2f(weight)) * kLn2 : 0.0f;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const int at = piece * THREADS + thread;
            if (exists(piece, at)) {
                uint4 word = make_uint4(0, 0, 0, 0);
                if (counts) {
                    float v[8];
                    unpack8(held[at], v);
#pragma unroll
                    for (int i = 0; i < 8; ++i) v[i] = exp2_fast(fmaf(v[i], kLog2E, -highest)) * scale;
                    if (may_be_padded(piece)) replace_padding(at, v, 0.0f);
                    word = pack8(v);
                }
                if (next_target >= 0) copy_async(&held[at], from + at);
                dz[base + at] = word;
            }
            if (piece % kGroup == kGroup - 1 || piece == kPieces - 1) commit();
        }
        if (owns_target) {  // over what it wrote itself
            const float p = exp2_fast(fmaf(picked[side], kLog2E, -highest)) * scale;
            reinterpret_cast<unsigned short*>(dz + base)[target] =
                static_cast<unsigned short>(pack(p - factor, 0.0f));
        }
        target = next_target;
    }
}
