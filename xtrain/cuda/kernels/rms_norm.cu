// Backward of RMSNorm, alone or with the residual's gradient added, for bf16 rows and fp32 gains, as
// `rms_norm.py` says. A thread keeps one word (16 bytes) of the row: its eight gains and their
// gradients stay in registers while its block goes down the rows, ROWS of them between barriers. The
// next rows' words are asked for before the barrier of these.
//
// WORDS: of a row.  RESIDUAL: whether ds is added.  RESIDENT: blocks that a multiprocessor holds.

#include "words.cuh"

#ifndef WORDS
#define WORDS 224
#define RESIDUAL 1
#define RESIDENT 2
#endif

namespace {

constexpr int kThreads = (WORDS + 31) / 32 * 32;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 2;

struct Rows {  // this thread's words of kRows rows, zero where there is none
    uint4 x[kRows], dy[kRows], ds[kRows];
    float rstd[kRows];
};

__device__ __forceinline__ void fetch(const uint4* x, const uint4* dy, const uint4* ds,
                                      const float* rstd, long long first, int rows, Rows& held) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        held.x[r] = held.dy[r] = held.ds[r] = make_uint4(0, 0, 0, 0);
        held.rstd[r] = 0;
        if (first + r < rows && threadIdx.x < WORDS) {
            const long long at = (first + r) * WORDS + threadIdx.x;
            held.x[r] = x[at];
            held.dy[r] = dy[at];
            if (RESIDUAL) held.ds[r] = ds[at];
            held.rstd[r] = rstd[first + r];
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    rms_norm_backward(const uint4* x, const float* gains, const float* rstd, const uint4* dy,
                      const uint4* ds, uint4* dx, float* partial, int rows) {
    __shared__ float parts[2][kRows][kWarps];
    const int thread = threadIdx.x, warp = thread / 32;
    float gain[8], dgain[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        gain[i] = thread < WORDS ? gains[thread * 8 + i] : 0.0f;
        dgain[i] = 0;
    }
    const long long stride = static_cast<long long>(gridDim.x) * kRows;
    Rows held;
    fetch(x, dy, ds, rstd, static_cast<long long>(blockIdx.x) * kRows, rows, held);
    int side = 0;  // of the exchange, used in turn: a slow warp may still read the last rows'
    for (long long first = blockIdx.x * kRows; first < rows; first += stride, side ^= 1) {
        float dot[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float value[8], gradient[8];
            unpack8(held.x[r], value);
            unpack8(held.dy[r], gradient);
            dot[r] = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float product = gradient[i] * (value[i] * held.rstd[r]);
                dgain[i] += product;
                dot[r] += product * gain[i];
            }
            dot[r] = warp_sum(dot[r]);
            if (thread % 32 == 0) parts[side][r][warp] = dot[r];
        }
        Rows next;
        fetch(x, dy, ds, rstd, first + stride, rows, next);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float total = parts[side][r][0];
#pragma unroll
            for (int other = 1; other < kWarps; ++other) total += parts[side][r][other];
            const float scale = held.rstd[r], mean = scale * total / (WORDS * 8);
            float value[8], gradient[8], residual[8];
            unpack8(held.x[r], value);
            unpack8(held.dy[r], gradient);
            unpack8(held.ds[r], residual);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                gradient[i] = scale * (gradient[i] * gain[i] - value[i] * mean);
                if (RESIDUAL) gradient[i] += residual[i];
            }
            if (first + r < rows && thread < WORDS)
                dx[(first + r) * WORDS + thread] = pack8(gradient);
        }
        held = next;
    }
    if (thread < WORDS) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            partial[(static_cast<long long>(blockIdx.x) * WORDS + thread) * 8 + i] = dgain[i];
    }
}
