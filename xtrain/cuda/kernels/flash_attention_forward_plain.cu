// Causal attention forward in tiles, in fp32 arithmetic, for fp32 and for odd head dimensions.
//
// The same function, layouts and arguments as flash_attention_forward.cu, without tensor cores:
// STORAGE is float or bf16_bits, HEAD_DIM any number. A warp takes ROWS queries of a head; a lane is
// a key of the tile while scores are made, and dimensions of the head while they are summed up.

#include "mma.cuh"

#ifndef STORAGE
#define STORAGE float
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef ROWS  // queries of a warp
#define ROWS 4
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 32
#endif

constexpr int KEY_TILE = 32;
constexpr int QUERY_TILE = WARPS * ROWS, THREADS = WARPS * 32;
constexpr int LANE_DIMS = (HEAD_DIM + 31) / 32;
constexpr int PITCH = HEAD_DIM + 1 - HEAD_DIM % 2;  // odd: 32 keys meet no bank twice

struct Strides {  // in elements
    long long batch;
    int head, token;
};

__device__ __forceinline__ float read(float x) { return x; }
__device__ __forceinline__ float read(bf16_bits x) { return from_bf16(x); }
__device__ __forceinline__ void write(float* to, float x) { *to = x; }
__device__ __forceinline__ void write(bf16_bits* to, float x) {
    *to = static_cast<bf16_bits>(pack_bf16(x, 0.0f));
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
flash_attention_forward_plain(const STORAGE* q, const STORAGE* k, const STORAGE* v, STORAGE* y,
                              float* lse, const int* starts, const int* offsets, Strides q_strides,
                              Strides k_strides, Strides v_strides, Strides y_strides, int queries,
                              int keys, int group, float scale) {
    __shared__ float k_tile[KEY_TILE][PITCH], v_tile[KEY_TILE][HEAD_DIM];
    __shared__ float q_tile[QUERY_TILE][HEAD_DIM], shares[WARPS][KEY_TILE][ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERY_TILE;
    const int offset = offsets == nullptr ? 0 : offsets[batch];
    q += batch * q_strides.batch + head * q_strides.head;
    k += batch * k_strides.batch + static_cast<long long>(head / group) * k_strides.head;
    v += batch * v_strides.batch + static_cast<long long>(head / group) * v_strides.head;
    y += batch * y_strides.batch + head * y_strides.head;
    lse += (static_cast<long long>(batch) * gridDim.y + head) * queries;

    for (int i = threadIdx.x; i < QUERY_TILE * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, d = i % HEAD_DIM;
        const bool valid = first + row < queries;
        q_tile[row][d] = valid ? read(q[(first + row) * (long long)q_strides.token + d]) : 0.0f;
    }
    float out[ROWS][LANE_DIMS] = {}, top[ROWS], sum[ROWS] = {};
    int begin[ROWS], end[ROWS], block_begin = 0x7fffffff;
    for (int r = 0; r < ROWS; ++r) {
        const int row = first + warp * ROWS + r;
        top[r] = -infinity();
        begin[r] = starts == nullptr || row >= queries
                       ? 0
                       : starts[static_cast<long long>(batch) * queries + row];
        end[r] = min(keys, offset + row + 1);
    }
    for (int row = first; row < min(first + QUERY_TILE, queries); ++row)
        block_begin = min(block_begin, starts == nullptr
                                           ? 0
                                           : starts[static_cast<long long>(batch) * queries + row]);
    const int block_end = min(keys, offset + min(first + QUERY_TILE, queries));

    for (int at = max(block_begin, 0) / KEY_TILE * KEY_TILE; at < block_end; at += KEY_TILE) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEY_TILE * HEAD_DIM; i += THREADS) {
            const int row = i / HEAD_DIM, d = i % HEAD_DIM;
            const bool valid = at + row < keys;
            k_tile[row][d] = valid ? read(k[(at + row) * (long long)k_strides.token + d]) : 0.0f;
            v_tile[row][d] = valid ? read(v[(at + row) * (long long)v_strides.token + d]) : 0.0f;
        }
        __syncthreads();
        float score[ROWS] = {};
        for (int d = 0; d < HEAD_DIM; ++d)
            for (int r = 0; r < ROWS; ++r)
                score[r] = fmaf(q_tile[warp * ROWS + r][d], k_tile[lane][d], score[r]);
        for (int r = 0; r < ROWS; ++r) {
            const bool seen = at + lane >= begin[r] && at + lane < end[r];
            score[r] = seen ? score[r] * scale : -infinity();
            const float most = fmaxf(top[r], warp_max(score[r]));
            const float base = most == -infinity() ? 0.0f : most;
            const float factor = expf(top[r] - base);
            const float share = expf(score[r] - base);
            sum[r] = fmaf(sum[r], factor, warp_sum(share));
            for (int i = 0; i < LANE_DIMS; ++i) out[r][i] *= factor;
            shares[warp][lane][r] = share;
            top[r] = most;
        }
        __syncwarp();
        for (int key = 0; key < KEY_TILE; ++key)
            for (int i = 0; i < LANE_DIMS; ++i) {
                const int d = lane + 32 * i;
                const float value = d < HEAD_DIM ? v_tile[key][d] : 0.0f;
                for (int r = 0; r < ROWS; ++r)
                    out[r][i] = fmaf(shares[warp][key][r], value, out[r][i]);
            }
    }
    for (int r = 0; r < ROWS; ++r) {
        const int row = first + warp * ROWS + r;
        if (row >= queries) continue;
        for (int i = 0; i < LANE_DIMS; ++i)
            if (lane + 32 * i < HEAD_DIM)
                write(y + row * (long long)y_strides.token + lane + 32 * i,
                      sum[r] == 0.0f ? 0.0f : out[r][i] / sum[r]);
        if (lane == 0) lse[row] = sum[r] == 0.0f ? -infinity() : top[r] + logf(sum[r]);
    }
}
