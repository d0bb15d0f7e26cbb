// Words of 16 bytes as eight bf16 numbers, and sums over a warp in a fixed order.

#pragma once

constexpr unsigned kEveryLane = 0xffffffffu;

// Two numbers rounded to bf16 in one register, the first in the low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ uint4 pack8(const float* v) {
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

__device__ __forceinline__ void unpack8(uint4 word, float* v) {
    const unsigned pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(kEveryLane, x, distance);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(kEveryLane, x, distance));
    return x;
}
