// Per-head norm, rotation and head layout for bf16 heads and fp32 gains, as `qk_norm_rope.py` says.
//
// A thread keeps one token and one word (16 bytes) of each half of a head, with the cosines and sines
// of its eight channel pairs in registers, and goes over the heads of the token: queries, keys,
// values, IN_TURN of them under way at once. Neighbouring threads hold the words of a half, then
// ABREAST heads, then TILE tokens. Numbers of words fit 31 bits.
//
// HEADS, KV_HEADS, HALF: of the model; HALF is a multiple of 8.  NORMS: whether q and k are normalized.

#include "words.cuh"

#ifndef HEADS
#define HEADS 40
#define KV_HEADS 10
#define HALF 16
#define ABREAST 4
#define TILE 32
#define NORMS 1
#endif

namespace {

constexpr int kLanes = HALF / 8;    // threads of a head
constexpr int kWords = 2 * kLanes;  // of a head
constexpr int kNormed = HEADS + KV_HEADS, kEvery = HEADS + 2 * KV_HEADS;
constexpr int kThreads = kLanes * ABREAST * TILE;
constexpr int kInTurn = 2;
constexpr int kQueries = 0, kKeys = 1, kValues = 2;

__device__ __forceinline__ void load8(const float* from, float* v) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 four = reinterpret_cast<const float4*>(from)[i];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
}

// The sum over the threads of a head, which are neighbours.
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(kEveryLane, x, distance);
    return x;
}

struct Place {  // of a thread
    int lane, beside, mine;  // word of a half, head among those abreast, token of the tile
};

__device__ __forceinline__ Place place() {
    const int slot = threadIdx.x / kLanes;
    return {static_cast<int>(threadIdx.x % kLanes), slot % ABREAST, slot / ABREAST};
}

// Cosines and sines of a tile's tokens, then this thread's own in registers; all threads take part.
__device__ __forceinline__ void angles(const float* frequency, const int* positions, int start,
                                       int tokens, const Place& at, float* table, float* cosines,
                                       float* sines) {
    for (int i = threadIdx.x; i < TILE * HALF; i += kThreads) {
        const float position = static_cast<float>(positions[min(start + i / HALF, tokens - 1)]);
        sincosf(position * frequency[i % HALF], &table[TILE * HALF + i], &table[i]);
    }
    __syncthreads();
    load8(table + at.mine * HALF + at.lane * 8, cosines);
    load8(table + (TILE + at.mine) * HALF + at.lane * 8, sines);
}

__device__ __forceinline__ void copy_gains(const float* q_gain, const float* k_gain, float* gains) {
    if (NORMS)
        for (int i = threadIdx.x; i < 4 * HALF; i += kThreads)
            gains[i] = i < 2 * HALF ? q_gain[i] : k_gain[i - 2 * HALF];
}

template <int kKind>
__device__ __forceinline__ void forward_part(const uint4* qkv, uint4* out, float* rstd, int token,
                                             int tokens, int T, float eps, const Place& at,
                                             const float* gains, const float* cosines,
                                             const float* sines) {
    constexpr int kCount = kKind == kQueries ? HEADS : KV_HEADS;
    constexpr int kBefore = kKind == kQueries ? 0 : kKind == kKeys ? HEADS : kNormed;
    const uint4* from = qkv + (token * kEvery + kBefore) * kWords + at.lane;
    uint4* to = out + (token / T * kCount * T + token % T) * kWords + at.lane;
    for (int base = at.beside; base - at.beside < kCount; base += kInTurn * ABREAST) {
        uint4 word[kInTurn][2];
#pragma unroll
        for (int u = 0; u < kInTurn; ++u) {
            const int head = base + u * ABREAST;
            if (head < kCount && token < tokens) {
                word[u][0] = from[head * kWords];
                word[u][1] = from[head * kWords + kLanes];
            }
        }
#pragma unroll
        for (int u = 0; u < kInTurn; ++u) {
            const int head = base + u * ABREAST;
            const bool exists = head < kCount && token < tokens;
            if (kKind != kValues) {
                float x[16];
                unpack8(word[u][0], x);
                unpack8(word[u][1], x + 8);
                if (NORMS) {
                    float square = 0, gain[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) square += x[i] * x[i];
                    const float scale = 1.0f / sqrtf(head_sum(square) / (2 * HALF) + eps);
                    if (exists && at.lane == 0) rstd[token * kNormed + kBefore + head] = scale;
                    load8(gains + kKind * 2 * HALF + at.lane * 8, gain);
                    load8(gains + kKind * 2 * HALF + HALF + at.lane * 8, gain + 8);
#pragma unroll
                    for (int i = 0; i < 16; ++i) x[i] *= scale * gain[i];
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float left = x[i], right = x[8 + i];
                    x[i] = left * cosines[i] - right * sines[i];
                    x[8 + i] = right * cosines[i] + left * sines[i];
                }
                word[u][0] = pack8(x);
                word[u][1] = pack8(x + 8);
            }
            if (exists) {
                to[head * T * kWords] = word[u][0];
                to[head * T * kWords + kLanes] = word[u][1];
            }
        }
    }
}

template <int kKind>
__device__ __forceinline__ void backward_part(const uint4* qkv, const uint4* given, uint4* dqkv,
                                              const float* rstd, int token, int tokens, int T,
                                              const Place& at, const float* gains,
                                              const float* cosines, const float* sines,
                                              float* dgain) {
    constexpr int kCount = kKind == kQueries ? HEADS : KV_HEADS;
    constexpr int kBefore = kKind == kQueries ? 0 : kKind == kKeys ? HEADS : kNormed;
    constexpr bool kReads = NORMS && kKind != kValues;
    const int row = (token * kEvery + kBefore) * kWords + at.lane;
    const uint4* from = given + (token / T * kCount * T + token % T) * kWords + at.lane;
    for (int base = at.beside; base - at.beside < kCount; base += kInTurn * ABREAST) {
        uint4 dword[kInTurn][2], xword[kInTurn][2];
        float scale[kInTurn];
#pragma unroll
        for (int u = 0; u < kInTurn; ++u) {
            const int head = base + u * ABREAST;
            dword[u][0] = dword[u][1] = xword[u][0] = xword[u][1] = make_uint4(0, 0, 0, 0);
            scale[u] = 0;
            if (head < kCount && token < tokens) {
                dword[u][0] = from[head * T * kWords];
                dword[u][1] = from[head * T * kWords + kLanes];
                if (kReads) {
                    xword[u][0] = qkv[row + head * kWords];
                    xword[u][1] = qkv[row + head * kWords + kLanes];
                    scale[u] = rstd[token * kNormed + kBefore + head];
                }
            }
        }
#pragma unroll
        for (int u = 0; u < kInTurn; ++u) {
            const int head = base + u * ABREAST;
            if (kKind != kValues) {
                float dy[16];
                unpack8(dword[u][0], dy);
                unpack8(dword[u][1], dy + 8);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float left = dy[i], right = dy[8 + i];
                    dy[i] = left * cosines[i] + right * sines[i];
                    dy[8 + i] = right * cosines[i] - left * sines[i];
                }
                if (NORMS) {
                    float x[16], gain[16], dot = 0;
                    unpack8(xword[u][0], x);
                    unpack8(xword[u][1], x + 8);
                    load8(gains + kKind * 2 * HALF + at.lane * 8, gain);
                    load8(gains + kKind * 2 * HALF + HALF + at.lane * 8, gain + 8);
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        x[i] *= scale[u];
                        dgain[i] += dy[i] * x[i];
                        dy[i] *= gain[i];
                        dot += dy[i] * x[i];
                    }
                    const float mean = head_sum(dot) / (2 * HALF);
#pragma unroll
                    for (int i = 0; i < 16; ++i) dy[i] = scale[u] * (dy[i] - x[i] * mean);
                }
                dword[u][0] = pack8(dy);
                dword[u][1] = pack8(dy + 8);
            }
            if (head < kCount && token < tokens) {
                dqkv[row + head * kWords] = dword[u][0];
                dqkv[row + head * kWords + kLanes] = dword[u][1];
            }
        }
    }
}

// out[channel] = the block's sum, in a fixed order: heads and tokens of a warp, then the warps.
__device__ __forceinline__ void leave(float* dgain, const Place& at, float* exchange, float* out) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 16; ++i)
#pragma unroll
        for (int distance = 16; distance >= kLanes; distance /= 2)
            dgain[i] += __shfl_xor_sync(kEveryLane, dgain[i], distance);
    if (threadIdx.x % 32 < kLanes) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            exchange[warp * 2 * HALF + i / 8 * HALF + at.lane * 8 + i % 8] = dgain[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * HALF; i += kThreads) {
        float total = exchange[i];
        for (int other = 1; other < kThreads / 32; ++other) total += exchange[other * 2 * HALF + i];
        out[i] = total;
    }
    __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    qk_norm_rope_forward(const uint4* qkv, const float* q_gain, const float* k_gain,
                         const float* frequency, const int* positions, uint4* q, uint4* k, uint4* v,
                         float* rstd, int tokens, int T, float eps) {
    __shared__ __align__(16) float table[2 * TILE * HALF];
    __shared__ __align__(16) float gains[4 * HALF];
    const Place at = place();
    float cosines[8], sines[8];
    const int start = blockIdx.x * TILE, token = start + at.mine;
    copy_gains(q_gain, k_gain, gains);
    angles(frequency, positions, start, tokens, at, table, cosines, sines);
    forward_part<kQueries>(qkv, q, rstd, token, tokens, T, eps, at, gains, cosines, sines);
    forward_part<kKeys>(qkv, k, rstd, token, tokens, T, eps, at, gains, cosines, sines);
    forward_part<kValues>(qkv, v, rstd, token, tokens, T, eps, at, gains, cosines, sines);
}

extern "C" __global__ void __launch_bounds__(kThreads, 512 / kThreads)
    qk_norm_rope_backward(const uint4* qkv, const float* q_gain, const float* k_gain,
                          const float* frequency, const int* positions, const float* rstd,
                          const uint4* dq, const uint4* dk, const uint4* dv, uint4* dqkv,
                          float* partial, int tokens, int T) {
    __shared__ __align__(16) float table[2 * TILE * HALF];
    __shared__ __align__(16) float gains[4 * HALF];
    __shared__ float exchange[kThreads / 32 * 2 * HALF];
    const Place at = place();
    float cosines[8], sines[8], dgain[16];
    copy_gains(q_gain, k_gain, gains);
#pragma unroll
    for (int kind = kQueries; kind <= kKeys; ++kind) {
#pragma unroll
        for (int i = 0; i < 16; ++i) dgain[i] = 0;
        for (int start = blockIdx.x * TILE; start < tokens; start += gridDim.x * TILE) {
            const int token = start + at.mine;
            angles(frequency, positions, start, tokens, at, table, cosines, sines);
            if (kind == kQueries)
                backward_part<kQueries>(qkv, dq, dqkv, rstd, token, tokens, T, at, gains, cosines,
                                        sines, dgain);
            else
                backward_part<kKeys>(qkv, dk, dqkv, rstd, token, tokens, T, at, gains, cosines,
                                     sines, dgain);
            __syncthreads();  // the next tile's angles take these ones' place
        }
        if (NORMS) leave(dgain, at, exchange, partial + (blockIdx.x * 2 + kind) * 2 * HALF);
    }
    for (int start = blockIdx.x * TILE; start < tokens; start += gridDim.x * TILE)
        backward_part<kValues>(qkv, dv, dqkv, rstd, start + at.mine, tokens, T, at, gains, cosines,
                               sines, dgain);
}
