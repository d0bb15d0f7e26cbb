// CUDA C++ on a CPU: the threads of a block are threads of the host, blocks run one after the other.
// Enough for kernels with barriers, warp shuffles and static shared memory; slow, for tiny sizes.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static
using std::min;

struct Index { int x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }

inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
inline float exchanged[32][32];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane] = value;
    warp_barriers[warp]->arrive_and_wait();
    const float received = exchanged[warp][lane ^ distance];
    warp_barriers[warp]->arrive_and_wait();
    return received;
}

inline unsigned bf16_bits(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class Kernel>
void launch(int grid, int block, Kernel kernel) {
    blockDim = {block, 1, 1}, gridDim = {grid, 1, 1};
    for (int b = 0; b < grid; ++b) {
        block_barrier = std::make_unique<std::barrier<>>(block);
        warp_barriers.clear();
        for (int warp = 0; warp < block / 32; ++warp)
            warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
        std::vector<std::thread> threads;
        for (int t = 0; t < block; ++t)
            threads.emplace_back([=] { threadIdx = {t, 0, 0}, blockIdx = {b, 0, 0}; kernel(); });
        for (auto& thread : threads) thread.join();
    }
}
