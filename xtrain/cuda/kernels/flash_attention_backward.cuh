// What the kernels of attention's gradients share, whatever they multiply with.
//
//   p = exp(scale q k^T - lse),  dp = dy v^T,  delta = rowsum(dy y),  ds = p (dp - delta)
//   dq = scale ds k,  dv = p^T dy,  dk = scale ds^T q
//
// Two kernels, so that every sum has one owner and one order, whatever the GPU: `queries` walks the
// keys that a block of queries sees and writes dq, and each row's lse and delta as `keys` wants
// them; `keys` walks the queries, of every head of its group in turn, that see a block of keys and
// writes dk and dv. p and dp are computed twice. On an H200 (2026-12-01) that is still faster than
// one kernel that keeps dq's fp32 sums in global memory, by 1.3x at a head dim of 64: those sums
// kept L2 70 % busy.

#pragma once

#include "mma.cuh"

typedef long long int64;

// Strides in elements.
struct Layout {
    int64 batch;
    int head, token;
};

// Rows of 16 are stored so that a thread's columns of an accumulator, 2t, 2t + 1, 2t + 8, 2t + 9,
// lie side by side.
__device__ __forceinline__ int accumulator_order(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}

// The exponent's offset; infinite, which makes every p zero, for a row that sees nothing.
__device__ __forceinline__ float exponent_offset(float lse) {
    return lse == -infinity() ? infinity() : lse * LOG2E;
}

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
    const word as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(__uint_as_float(as[i] << 16), __uint_as_float(bs[i] << 16), sum);
        sum = fmaf(__uint_as_float(as[i] & 0xffff0000u), __uint_as_float(bs[i] & 0xffff0000u), sum);
    }
    return sum;
}

// Least and greatest first visible key of rows `from` to `to` - 1, by the lanes of a warp.
__device__ __forceinline__ int2 range_of_starts(const int* starts, int from, int to) {
    int least = 0x7fffffff, most = 0;
    for (int i = from + threadIdx.x % 32; i < to; i += 32) {
        least = min(least, starts[i]);
        most = max(most, starts[i]);
    }
    return make_int2(__reduce_min_sync(0xffffffff, least), __reduce_max_sync(0xffffffff, most));
}

// The tiles of queries that a block of keys must walk: those of one head, then the next head's.
struct Walk {
    const int2* ranges;             // of the tiles' starts, or null
    int first, tiles, heads, past;  // first tile, end, heads, first key after the block
    int head, tile;

    __device__ __forceinline__ void settle() {
        while (head < heads) {
            while (tile < tiles && ranges && ranges[tile].x >= past) tile++;
            if (tile < tiles) return;
            head++;
            tile = first;
        }
    }
    __device__ __forceinline__ void advance() {
        tile++;
        settle();
    }
    __device__ __forceinline__ bool done() const {
        return head == heads;
    }
};

// A thread's two rows of a (16 x 8 n) block of sums, as bf16.
template <int BLOCKS>
__device__ __forceinline__ void store_rows(bf16_bits* out, int stride, int row, int T,
                                           const float* sums, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (row + 8 * half < T) {
            bf16_bits* to = out + (row + 8 * half) * stride + threadIdx.x % 4 * 2;
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                const float* pair = sums + j * 4 + half * 2;
                *reinterpret_cast<word*>(to + j * 8) = pack_bf16(pair[0] * scale, pair[1] * scale);
            }
        }
}
