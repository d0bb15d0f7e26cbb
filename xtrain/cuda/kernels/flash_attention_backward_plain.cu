// Gradients of causal attention in fp32 without tensor cores: exact rather than fast. See the
// header.
//
// A block of 256 threads has 32 rows (queries or keys) and walks tiles of 32. Of the 32 x 32 scores
// a thread has one row's every eighth, and of the sums one row's every eighth column.

#include "flash_attention_backward.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 32
#endif

constexpr int D = HEAD_DIM, THREADS = 256, ROWS = 32, TILE = 32, PITCH = D + 1;

struct Shared {
    float rows[2][ROWS * PITCH];   // q and dy, or k and v
    float tiles[2][TILE * PITCH];  // k and v, or q and dy
    float p[ROWS * (TILE + 1)], ds[ROWS * (TILE + 1)];
};

__device__ __forceinline__ void copy_rows(float* to, const float* from, int stride, int first,
                                          int T) {
    for (int at = threadIdx.x; at < TILE * D; at += THREADS) {
        const int row = at / D, column = at % D;
        to[row * PITCH + column] = first + row < T ? from[(first + row) * stride + column] : 0.0f;
    }
}

__device__ __forceinline__ float product(const float* a, const float* b) {
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < D; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

// Over the eight threads of a row.
__device__ __forceinline__ float row_sum(float x) {
    for (int i = 4; i; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

// grid (blocks of queries, H, B)
extern "C" __global__ void __launch_bounds__(THREADS)
    queries(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
            const float* __restrict__ y, const float* __restrict__ dy, Layout at_q, Layout at_k,
            Layout at_v, Layout at_y, Layout at_dy, const float* __restrict__ lse,
            const int* __restrict__ starts, float* __restrict__ dq, Layout at_dq,
            float* __restrict__ offsets, float* __restrict__ deltas, int H, int Hk, int T,
            int padded, float scale) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    const int block = gridDim.x - 1 - blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int kv = h / (H / Hk), in = threadIdx.x / 8, lane = threadIdx.x % 8;
    const int row = block * ROWS + in;
    const int64 head = (int64)b * H + h;
    q += b * at_q.batch + h * at_q.head;
    k += b * at_k.batch + kv * at_k.head;
    v += b * at_v.batch + kv * at_v.head;
    y += b * at_y.batch + h * at_y.head;
    dy += b * at_dy.batch + h * at_dy.head;
    copy_rows(s.rows[0], q, at_q.token, block * ROWS, T);
    copy_rows(s.rows[1], dy, at_dy.token, block * ROWS, T);
    __syncthreads();
    float delta = 0, offset = infinity();
    int first = 0;
    if (row < T) {
        for (int c = lane; c < D; c += 8)
            delta = fmaf(y[row * at_y.token + c], s.rows[1][in * PITCH + c], delta);
        const float found = lse[head * T + row];
        if (found != -infinity()) offset = found;
        if (starts) first = starts[(int64)b * T + row];
    }
    delta = row_sum(delta);
    if (lane == 0 && row < padded) {
        offsets[head * padded + row] = offset;
        deltas[head * padded + row] = delta;
    }
    float sums[D / 8] = {};
    for (int k0 = 0; k0 <= block * ROWS; k0 += TILE) {
        __syncthreads();
        copy_rows(s.tiles[0], k, at_k.token, k0, T);
        copy_rows(s.tiles[1], v, at_v.token, k0, T);
        __syncthreads();
        for (int i = lane; i < TILE; i += 8) {
            const float score = product(s.rows[0] + in * PITCH, s.tiles[0] + i * PITCH) * scale;
            const bool seen = k0 + i <= row && k0 + i >= first;
            const float p = seen ? expf(score - offset) : 0.0f;
            const float dp = product(s.rows[1] + in * PITCH, s.tiles[1] + i * PITCH);
            s.ds[in * (TILE + 1) + i] = p * (dp - delta);
        }
        __syncwarp();
        for (int i = 0; i < TILE; i++) {
            const float ds = s.ds[in * (TILE + 1) + i];
#pragma unroll
            for (int j = 0; j < D / 8; j++)
                sums[j] = fmaf(ds, s.tiles[0][i * PITCH + lane + 8 * j], sums[j]);
        }
    }
    if (row < T)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            dq[b * at_dq.batch + h * at_dq.head + row * at_dq.token + lane + 8 * j] =
                sums[j] * scale;
}

// grid (blocks of keys, Hk, B)
extern "C" __global__ void __launch_bounds__(THREADS)
    keys(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
         const float* __restrict__ dy, Layout at_q, Layout at_k, Layout at_v, Layout at_dy,
         const float* __restrict__ offsets, const float* __restrict__ deltas,
         const int* __restrict__ starts, float* __restrict__ dk, float* __restrict__ dv,
         Layout at_dk, Layout at_dv, int H, int Hk, int T, int padded, float scale) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    const int kv = blockIdx.y, b = blockIdx.z, k0 = blockIdx.x * ROWS;
    const int in = threadIdx.x / 8, lane = threadIdx.x % 8, row = k0 + in;
    copy_rows(s.rows[0], k + b * at_k.batch + kv * at_k.head, at_k.token, k0, T);
    copy_rows(s.rows[1], v + b * at_v.batch + kv * at_v.head, at_v.token, k0, T);
    float dk_sums[D / 8] = {}, dv_sums[D / 8] = {};
    for (int h = kv * (H / Hk); h < (kv + 1) * (H / Hk); h++)
        for (int q0 = k0; q0 < T; q0 += TILE) {
            const int64 terms = ((int64)b * H + h) * padded + q0;
            __syncthreads();
            copy_rows(s.tiles[0], q + b * at_q.batch + h * at_q.head, at_q.token, q0, T);
            copy_rows(s.tiles[1], dy + b * at_dy.batch + h * at_dy.head, at_dy.token, q0, T);
            __syncthreads();
            for (int i = lane; i < TILE; i += 8) {
                const float score = product(s.rows[0] + in * PITCH, s.tiles[0] + i * PITCH) * scale;
                const int query = q0 + i;
                const bool seen =
                    query < T && row <= query && (!starts || row >= starts[(int64)b * T + query]);
                const float p = seen ? expf(score - offsets[terms + i]) : 0.0f;
                const float dp = product(s.rows[1] + in * PITCH, s.tiles[1] + i * PITCH);
                s.p[in * (TILE + 1) + i] = p;
                s.ds[in * (TILE + 1) + i] = p * (dp - deltas[terms + i]);
            }
            __syncwarp();
            for (int i = 0; i < TILE; i++) {
                const float p = s.p[in * (TILE + 1) + i], ds = s.ds[in * (TILE + 1) + i];
#pragma unroll
                for (int j = 0; j < D / 8; j++) {
                    dv_sums[j] = fmaf(p, s.tiles[1][i * PITCH + lane + 8 * j], dv_sums[j]);
                    dk_sums[j] = fmaf(ds, s.tiles[0][i * PITCH + lane + 8 * j], dk_sums[j]);
                }
            }
        }
    if (row < T)
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            const int column = lane + 8 * j;
            dk[b * at_dk.batch + kv * at_dk.head + row * at_dk.token + column] = dk_sums[j] * scale;
            dv[b * at_dv.batch + kv * at_dv.head + row * at_dv.token + column] = dv_sums[j];
        }
}
