// Gradients of causal attention with mma.sync, bf16, for sm_80 and later. See the header.
//
// A block has WARPS warps of 16 ROW_TILES rows each (queries or keys), which stay in shared memory;
// the tiles that it walks arrive by cp.async, two in flight. A warp multiplies its rows with 16 of
// a tile's at a time: p and ds go from accumulators to operands inside registers.

#include "flash_attention_backward.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 32
#endif

constexpr int D = HEAD_DIM, STEPS = D / 16, BLOCKS = D / 8;
constexpr int WARPS = 4, THREADS = 32 * WARPS, ROW_TILES = D <= 32 ? 2 : 1;
constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS, TILE = D <= 64 ? 64 : 32;
constexpr int PITCH = D + 8;                // of a row, in elements: an odd number of 16-byte words
constexpr bool KEEP = D * ROW_TILES <= 64;  // the rows' fragments in registers

struct Shared {
    alignas(16) bf16_bits rows[2][ROWS * PITCH];        // q and dy, or k and v
    alignas(16) bf16_bits tiles[2][2][TILE * PITCH];    // k and v, or q and dy
    alignas(16) float offset[2][TILE], delta[2][TILE];  // of a tile of queries
};

template <int COUNT>
__device__ __forceinline__ void copy_rows(bf16_bits* to, const bf16_bits* from, int stride,
                                          int first, int T) {
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int at = threadIdx.x; at < COUNT * CHUNKS; at += THREADS) {
        const int row = at / CHUNKS, column = at % CHUNKS * 8;
        const bool valid = first + row < T;
        copy_async(shared_address(to + row * PITCH + column),
                   from + (valid ? (first + row) * stride + column : 0), valid);
    }
}

// Where a lane finds its row of the four matrices of a 16 x 16 block: `down` rows first, or across.
__device__ __forceinline__ int block_down() {
    const int lane = threadIdx.x % 32;
    return (lane / 8 % 2 * 8 + lane % 8) * PITCH + lane / 16 * 8;
}
__device__ __forceinline__ int block_across() {
    const int lane = threadIdx.x % 32;
    return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
}

struct Rows {
    word fragments[KEEP ? ROW_TILES : 1][KEEP ? STEPS : 1][4];
    word at;

    __device__ __forceinline__ void open(const bf16_bits* rows) {
        at = shared_address(rows + threadIdx.x / 32 * WARP_ROWS * PITCH + block_down());
        if constexpr (KEEP)
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
                for (int i = 0; i < STEPS; i++)
                    load_matrices(fragments[m][i], at + (m * 16 * PITCH + i * 16) * 2);
    }
    // c = these rows times the transpose of 16 of a tile's
    __device__ __forceinline__ void times(float (&c)[ROW_TILES][8], const bf16_bits* tile) const {
        const word there = shared_address(tile + block_across());
        word a[4], b[4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int i = 0; i < 8; i++) c[m][i] = 0;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            load_matrices(b, there + i * 32);
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                if constexpr (!KEEP)
                    load_matrices(a, at + (m * 16 * PITCH + i * 16) * 2);
                else
#pragma unroll
                    for (int j = 0; j < 4; j++) a[j] = fragments[m][i][j];
                mma(reinterpret_cast<float (&)[4]>(c[m][0]), a, b[0], b[1]);
                mma(reinterpret_cast<float (&)[4]>(c[m][4]), a, b[2], b[3]);
            }
        }
    }
};

// sums += a times 16 rows of a tile
__device__ __forceinline__ void add_product(float (&sums)[ROW_TILES][4 * BLOCKS],
                                            const word (&a)[ROW_TILES][4], const bf16_bits* tile) {
    const word there = shared_address(tile + block_down());
    word b[4];
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 2) {
        load_matrices_transposed(b, there + j * 16);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            mma(reinterpret_cast<float (&)[4]>(sums[m][4 * j]), a[m], b[0], b[1]);
            mma(reinterpret_cast<float (&)[4]>(sums[m][4 * j + 4]), a[m], b[2], b[3]);
        }
    }
}

// grid (blocks of queries, H, B)
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    queries(const bf16_bits* __restrict__ q, const bf16_bits* __restrict__ k,
            const bf16_bits* __restrict__ v, const bf16_bits* __restrict__ y,
            const bf16_bits* __restrict__ dy, Layout at_q, Layout at_k, Layout at_v, Layout at_y,
            Layout at_dy, const float* __restrict__ lse, const int* __restrict__ starts,
            bf16_bits* __restrict__ dq, Layout at_dq, float* __restrict__ offsets,
            float* __restrict__ deltas, int H, int Hk, int T, int padded, float scale) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    const int block = gridDim.x - 1 - blockIdx.x;  // those that see most go first
    const int h = blockIdx.y, b = blockIdx.z, kv = h / (H / Hk);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int q0 = block * ROWS, qw = q0 + warp * WARP_ROWS, row = qw + lane / 4;
    q += b * at_q.batch + h * at_q.head;
    k += b * at_k.batch + kv * at_k.head;
    v += b * at_v.batch + kv * at_v.head;
    y += b * at_y.batch + h * at_y.head;
    dy += b * at_dy.batch + h * at_dy.head;
    const int64 head = (int64)b * H + h;
    int tile = 0;
    if (starts) {
        starts += (int64)b * T;
        tile = min(range_of_starts(starts, q0, min(T, q0 + ROWS)).x, q0) / TILE;
    }
    const int tiles = (min(T, q0 + ROWS) + TILE - 1) / TILE;
    auto load = [&](int at, int stage) {
        copy_rows<TILE>(s.tiles[stage][0], k, at_k.token, at * TILE, T);
        copy_rows<TILE>(s.tiles[stage][1], v, at_v.token, at * TILE, T);
    };
    copy_rows<ROWS>(s.rows[0], q, at_q.token, q0, T);
    copy_rows<ROWS>(s.rows[1], dy, at_dy.token, q0, T);
    load(tile, 0);
    commit_copies();
    float offset[ROW_TILES][2], delta[ROW_TILES][2];
    int first[ROW_TILES][2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + m * 16 + half * 8;
            float sum = 0;
            if (r < T)
                for (int c = t * 8; c < D; c += 32)
                    sum += dot(*reinterpret_cast<const uint4*>(y + r * at_y.token + c),
                               *reinterpret_cast<const uint4*>(dy + r * at_dy.token + c));
            delta[m][half] = quad_sum(sum);
            offset[m][half] = exponent_offset(r < T ? lse[head * T + r] : -infinity());
            first[m][half] = starts && r < T ? starts[r] : 0;
            if (t == 0 && r < padded) {
                offsets[head * padded + accumulator_order(r)] = offset[m][half];
                deltas[head * padded + accumulator_order(r)] = delta[m][half];
            }
        }
    const float factor = scale * LOG2E;
    float sums[ROW_TILES][4 * BLOCKS] = {};
    Rows of_q, of_dy;
    for (int stage = 0, opened = 0; tile < tiles; tile++, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // this tile is there, and the other stage is free
        if (tile + 1 < tiles) load(tile + 1, stage ^ 1);
        commit_copies();
        if (!opened) {
            of_q.open(s.rows[0]);
            of_dy.open(s.rows[1]);
            opened = 1;
        }
#pragma unroll 1
        for (int c = 0; c < TILE; c += 16) {
            const int key = tile * TILE + c;
            if (key >= qw + WARP_ROWS) break;
            float p[ROW_TILES][8], dp[ROW_TILES][8];
            word ds[ROW_TILES][4];
            of_q.times(p, s.tiles[stage][0] + c * PITCH);
            of_dy.times(dp, s.tiles[stage][1] + c * PITCH);
            const bool masked = key + 15 > qw || starts;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int half = i / 2 % 2, column = key + i / 4 * 8 + 2 * t + i % 2;
                    float x = p[m][i];
                    if (masked && (column > row + m * 16 + half * 8 || column < first[m][half]))
                        x = -infinity();
                    x = exp2_approximate(fmaf(x, factor, -offset[m][half]));
                    dp[m][i] = x * (dp[m][i] - delta[m][half]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) ds[m][i] = pack_bf16(dp[m][2 * i], dp[m][2 * i + 1]);
            }
            add_product(sums, ds, s.tiles[stage][0] + c * PITCH);
        }
    }
    dq += b * at_dq.batch + h * at_dq.head;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
        store_rows<BLOCKS>(dq, at_dq.token, row + m * 16, T, sums[m], scale);
}

// grid (blocks of keys, Hk, B)
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    keys(const bf16_bits* __restrict__ q, const bf16_bits* __restrict__ k,
         const bf16_bits* __restrict__ v, const bf16_bits* __restrict__ dy, Layout at_q,
         Layout at_k, Layout at_v, Layout at_dy, const float* __restrict__ offsets,
         const float* __restrict__ deltas, const int* __restrict__ starts,
         bf16_bits* __restrict__ dk, bf16_bits* __restrict__ dv, Layout at_dk, Layout at_dv, int H,
         int Hk, int T, int padded, float scale) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    int2* ranges = reinterpret_cast<int2*>(raw + sizeof(Shared));
    const int kv = blockIdx.y, b = blockIdx.z, group = H / Hk;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int k0 = blockIdx.x * ROWS, kw = k0 + warp * WARP_ROWS, row = kw + lane / 4;
    q += b * at_q.batch + kv * group * at_q.head;
    k += b * at_k.batch + kv * at_k.head;
    v += b * at_v.batch + kv * at_v.head;
    dy += b * at_dy.batch + kv * group * at_dy.head;
    offsets += ((int64)b * H + kv * group) * padded;
    deltas += ((int64)b * H + kv * group) * padded;
    const int tiles = (T + TILE - 1) / TILE;
    if (starts) {
        starts += (int64)b * T;
        for (int tile = k0 / TILE + warp; tile < tiles; tile += WARPS) {
            const int2 range = range_of_starts(starts, tile * TILE, min(T, (tile + 1) * TILE));
            if (lane == 0) ranges[tile] = range;
        }
        __syncthreads();
    }
    auto load = [&](const Walk& at, int stage) {
        const int q0 = at.tile * TILE;
        copy_rows<TILE>(s.tiles[stage][0], q + at.head * at_q.head, at_q.token, q0, T);
        copy_rows<TILE>(s.tiles[stage][1], dy + at.head * at_dy.head, at_dy.token, q0, T);
        if (threadIdx.x < TILE / 2) {
            const int i = threadIdx.x % (TILE / 4) * 4, from = at.head * padded + q0 + i;
            const bool second = threadIdx.x >= TILE / 4;
            copy_async(shared_address((second ? s.delta[stage] : s.offset[stage]) + i),
                       (second ? deltas : offsets) + from, true);
        }
    };
    Walk now = {starts ? ranges : nullptr, k0 / TILE, tiles, group, k0 + ROWS, 0, k0 / TILE};
    now.settle();
    copy_rows<ROWS>(s.rows[0], k, at_k.token, k0, T);
    copy_rows<ROWS>(s.rows[1], v, at_v.token, k0, T);
    if (!now.done()) load(now, 0);
    commit_copies();
    const float factor = scale * LOG2E;
    float dk_sums[ROW_TILES][4 * BLOCKS] = {}, dv_sums[ROW_TILES][4 * BLOCKS] = {};
    Rows of_k, of_v;
    for (int stage = 0, opened = 0; !now.done(); stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // this tile is there, and the other stage is free
        const int q0 = now.tile * TILE;
        now.advance();
        if (!now.done()) load(now, stage ^ 1);
        commit_copies();
        if (!opened) {
            of_k.open(s.rows[0]);
            of_v.open(s.rows[1]);
            opened = 1;
        }
#pragma unroll 1
        for (int c = 0; c < TILE; c += 16) {
            if (q0 + c + 15 < kw) continue;
            const bf16_bits *of_q = s.tiles[stage][0] + c * PITCH, *of_dy = of_q + TILE * PITCH;
            float p[ROW_TILES][8], dp[ROW_TILES][8];
            word ps[ROW_TILES][4], ds[ROW_TILES][4];
            of_k.times(p, of_q);
            of_v.times(dp, of_dy);
            const float4 o = *reinterpret_cast<const float4*>(s.offset[stage] + c + 4 * t);
            const float4 d = *reinterpret_cast<const float4*>(s.delta[stage] + c + 4 * t);
            const float offset[4] = {o.x, o.y, o.z, o.w}, delta[4] = {d.x, d.y, d.z, d.w};
            int first[4] = {};
            if (starts)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    first[i] = starts[min(T - 1, q0 + c + i / 2 * 8 + 2 * t + i % 2)];
            const bool masked = q0 + c < kw + WARP_ROWS - 1 || starts;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int key = row + m * 16 + i / 2 % 2 * 8, of = i / 4 * 2 + i % 2;
                    const int query = q0 + c + i / 4 * 8 + 2 * t + i % 2;
                    float x = p[m][i];
                    if (masked && (key > query || key < first[of])) x = -infinity();
                    p[m][i] = exp2_approximate(fmaf(x, factor, -offset[of]));
                    dp[m][i] = p[m][i] * (dp[m][i] - delta[of]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    ps[m][i] = pack_bf16(p[m][2 * i], p[m][2 * i + 1]);
                    ds[m][i] = pack_bf16(dp[m][2 * i], dp[m][2 * i + 1]);
                }
            }
            add_product(dv_sums, ps, of_dy);
            add_product(dk_sums, ds, of_q);
        }
    }
    dk += b * at_dk.batch + kv * at_dk.head;
    dv += b * at_dv.batch + kv * at_dv.head;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        store_rows<BLOCKS>(dk, at_dk.token, row + m * 16, T, dk_sums[m], scale);
        store_rows<BLOCKS>(dv, at_dv.token, row + m * 16, T, dv_sums[m], 1.0f);
    }
}
