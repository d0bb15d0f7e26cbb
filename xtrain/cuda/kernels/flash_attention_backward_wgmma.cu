// Gradients of causal attention with wgmma, bf16, for sm_90a; empty elsewhere. See the header.
//
// A block is one warpgroup with 64 rows (queries or keys) in shared memory; the tiles of 64 rows
// that it walks are copied by the tensor memory accelerator, which also zeroes what lies beyond a
// sequence, a stage or two ahead. Several blocks share an SM and hide each other's waits.
// Per 64 x 64 scores of an SM: 256 cycles of exponentials, at a head dim of 32 192 (`queries`) and
// 256 (`keys`) of products.

#include "flash_attention_backward.cuh"
#include "wgmma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 32
#endif
constexpr int D = HEAD_DIM, STEPS = D / 16, BLOCKS = D / 8;
constexpr int THREADS = 128, ROWS = 64, TILE = 64;
constexpr int COLUMNS = D < 64 ? D : 64, ROW_BYTES = 2 * COLUMNS;  // of a group of columns
constexpr int TILE_BYTES = TILE * D * 2;
// Blocks of an SM that registers must suffice for, and stages, as fastest on an H200.
constexpr int QUERY_BLOCKS = D <= 64 ? 4 : 3, KEY_BLOCKS = D <= 32 ? 4 : D <= 64 ? 3 : 2;
constexpr int QUERY_STAGES = D <= 32 ? 3 : 2, KEY_STAGES = D <= 64 ? 3 : 2;
static_assert(D == 32 || D == 64 || D == 128, "rows that the swizzles fit");

// 64 rows of a head; by one thread.
__device__ __forceinline__ void copy_rows(word to, const TensorMap& from, word barrier, int token,
                                          int head, int batch) {
#pragma unroll
    for (int part = 0; part < D / COLUMNS; part++)
        copy_box(to + part * (ROWS * ROW_BYTES), &from, barrier, part * COLUMNS, token, head,
                 batch);
}

// What a descriptor grows by to the operand's i-th 16 columns, or 16 rows.
__device__ __forceinline__ constexpr int across(int i) {
    return i / (COLUMNS / 16) * (ROWS * ROW_BYTES / 16) + i % (COLUMNS / 16) * 2;
}
__device__ __forceinline__ constexpr int down(int i) {
    return i * ROW_BYTES;
}
__device__ __forceinline__ word rows_at(word address) {
    return matrix(address, ROWS * ROW_BYTES);
}

// c = a b^T over all columns
__device__ __forceinline__ void product_of_rows(float (&c)[32], word a, word b) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        product<0, 0>(c, described<ROW_BYTES>(a + across(i)), described<ROW_BYTES>(b + across(i)),
                      i > 0);
    wgmma_commit();
}

// sums += a b; a in registers
__device__ __forceinline__ void add_product(float (&sums)[D / 2], const word (&a)[16], word b) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        product<1>(sums, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                   described<ROW_BYTES>(b + down(i)), true);
}

// A warp is done with a stage, which may be filled again when all are.
__device__ __forceinline__ void release(word empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

struct QueryShared {
    alignas(1024) bf16_bits q[ROWS * D];
    alignas(1024) bf16_bits dy[ROWS * D];
    alignas(1024) bf16_bits k[QUERY_STAGES][TILE * D];
    alignas(1024) bf16_bits v[QUERY_STAGES][TILE * D];
    alignas(16) word64 full[QUERY_STAGES + 1], empty[QUERY_STAGES];
};

// dq, and the terms of each row that `keys` needs. grid (blocks of ROWS queries, H, B)
extern "C" __global__ void __launch_bounds__(THREADS, QUERY_BLOCKS)
    queries(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
            const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dy_map,
            const bf16_bits* __restrict__ y, const bf16_bits* __restrict__ dy, Layout at_y,
            Layout at_dy, const float* __restrict__ lse, const int* __restrict__ starts,
            bf16_bits* __restrict__ dq, Layout at_dq, float* __restrict__ offsets,
            float* __restrict__ deltas, int H, int Hk, int T, int padded, float scale) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char raw[];
    QueryShared& s = *reinterpret_cast<QueryShared*>(raw);
    const int block = gridDim.x - 1 - blockIdx.x, h = blockIdx.y, b = blockIdx.z, kv = h / (H / Hk);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int q0 = block * ROWS, row = q0 + warp * 16 + g;  // and row + 8
    y += b * at_y.batch + h * at_y.head;
    dy += b * at_dy.batch + h * at_dy.head;
    const int64 head = (int64)b * H + h;
    int tile = 0, first[2];
    if (starts) {
        starts += (int64)b * T;
        tile = min(range_of_starts(starts, q0, min(T, q0 + ROWS)).x, q0) / TILE;
    }
    const int tiles = block + 1;  // of keys that the block's queries see
    const word k_at = shared_address(s.k), v_at = shared_address(s.v);
    const word full = shared_address(s.full), resident = full + 8 * QUERY_STAGES,
               empty = resident + 8;
    auto load = [&](int at, int stage) {
        barrier_expect(full + 8 * stage, 2 * TILE_BYTES);
        copy_rows(k_at + stage * TILE_BYTES, k_map, full + 8 * stage, at * TILE, kv, b);
        copy_rows(v_at + stage * TILE_BYTES, v_map, full + 8 * stage, at * TILE, kv, b);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i <= QUERY_STAGES; i++) barrier_init(full + 8 * i, 1);
        for (int i = 0; i < QUERY_STAGES; i++) barrier_init(empty + 8 * i, THREADS / 32);
        stores_visible_to_wgmma();
        barrier_expect(resident, 2 * ROWS * D * 2);
        copy_rows(shared_address(s.q), q_map, resident, q0, h, b);
        copy_rows(shared_address(s.dy), dy_map, resident, q0, h, b);
        for (int i = 0; i < QUERY_STAGES - 1; i++)
            if (tile + i < tiles) load(tile + i, i);
    }
    __syncthreads();
    float offset[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        float sum = 0;
        if (r < T)
#pragma unroll
            for (int c = t * 8; c < D; c += 32)
                sum += dot(*reinterpret_cast<const uint4*>(y + r * at_y.token + c),
                           *reinterpret_cast<const uint4*>(dy + r * at_dy.token + c));
        delta[half] = quad_sum(sum);
        offset[half] = exponent_offset(r < T ? lse[head * T + r] : -infinity());
        first[half] = starts && r < T ? starts[r] : 0;
        if (t == 0 && r < padded) {
            offsets[head * padded + accumulator_order(r)] = offset[half];
            deltas[head * padded + accumulator_order(r)] = delta[half];
        }
    }
    const word q_tile = rows_at(shared_address(s.q));
    const word dy_tile = rows_at(shared_address(s.dy));
    const float factor = scale * LOG2E;
    float sums[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; i++) sums[i] = 0;
    int stage = 0;
    word parity = 0;
    bool again = false;
    barrier_wait(resident, 0);
    for (; tile < tiles; tile++) {
        barrier_wait(full + 8 * stage, parity);
        const int k0 = tile * TILE;
        const word k_now = rows_at(k_at + stage * TILE_BYTES),
                   v_now = rows_at(v_at + stage * TILE_BYTES);
        float p[32], dp[32];
        wgmma_fence();
        product_of_rows(p, q_tile, k_now);
        product_of_rows(dp, dy_tile, v_now);
        if (threadIdx.x == 0 && tile + QUERY_STAGES - 1 < tiles) {
            const int before = stage == 0 ? QUERY_STAGES - 1 : stage - 1;
            if (again) barrier_wait(empty + 8 * before, stage == 0 ? parity ^ 1 : parity);
            load(tile + QUERY_STAGES - 1, before);
        }
        __syncwarp();
        again = true;
        wgmma_wait<1>();
        hold(p);
        if (k0 + TILE > q0 + 1 || (starts && __any_sync(~0u, max(first[0], first[1]) > k0))) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = k0 + 2 * t + i / 4 * 8 + i % 2, half = i / 2 % 2;
                if (key > row + 8 * half || key < first[half]) p[i] = -infinity();
            }
        }
#pragma unroll
        for (int i = 0; i < 32; i++)
            p[i] = exp2_approximate(fmaf(p[i], factor, -offset[i / 2 % 2]));
        wgmma_wait<0>();
        hold(dp);
        word ds[16];
#pragma unroll
        for (int i = 0; i < 32; i += 2)
            ds[i / 2] = pack_bf16(p[i] * (dp[i] - delta[i / 2 % 2]),
                                  p[i + 1] * (dp[i + 1] - delta[i / 2 % 2]));
        hold(ds);
        wgmma_fence();
        add_product(sums, ds, k_now);
        wgmma_commit();
        wgmma_wait<0>();
        hold(sums);
        release(empty + 8 * stage);
        if (++stage == QUERY_STAGES) stage = 0, parity ^= 1;
    }
    store_rows<BLOCKS>(dq + b * at_dq.batch + h * at_dq.head, at_dq.token, row, T, sums, scale);
#endif
}

struct KeyShared {
    alignas(1024) bf16_bits k[ROWS * D];
    alignas(1024) bf16_bits v[ROWS * D];
    alignas(1024) bf16_bits q[KEY_STAGES][TILE * D];
    alignas(1024) bf16_bits dy[KEY_STAGES][TILE * D];
    alignas(16) float offset[KEY_STAGES][TILE];
    alignas(16) float delta[KEY_STAGES][TILE];
    alignas(16) word64 full[KEY_STAGES + 1], empty[KEY_STAGES];
};

// dk and dv: sums over the heads of the group. grid (blocks of ROWS keys, Hk, B)
extern "C" __global__ void __launch_bounds__(THREADS, KEY_BLOCKS)
    keys(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
         const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dy_map,
         const float* __restrict__ offsets, const float* __restrict__ deltas,
         const int* __restrict__ starts, bf16_bits* __restrict__ dk, bf16_bits* __restrict__ dv,
         Layout at_dk, Layout at_dv, int H, int Hk, int T, int padded, float scale) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char raw[];
    KeyShared& s = *reinterpret_cast<KeyShared*>(raw);
    int2* ranges = reinterpret_cast<int2*>(raw + sizeof(KeyShared));
    const int kv = blockIdx.y, b = blockIdx.z, group = H / Hk;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int k0 = blockIdx.x * ROWS, row = k0 + warp * 16 + g;
    offsets += ((int64)b * H + kv * group) * padded;
    deltas += ((int64)b * H + kv * group) * padded;
    const int tiles = (T + TILE - 1) / TILE;
    if (starts) {
        starts += (int64)b * T;
        for (int tile = k0 / TILE + warp; tile < tiles; tile += THREADS / 32) {
            const int2 range = range_of_starts(starts, tile * TILE, min(T, (tile + 1) * TILE));
            if (lane == 0) ranges[tile] = range;
        }
        __syncthreads();
    }
    const word q_at = shared_address(s.q), dy_at = shared_address(s.dy);
    const word full = shared_address(s.full), resident = full + 8 * KEY_STAGES,
               empty = resident + 8;
    auto load = [&](const Walk& at, int stage) {
        const int q0 = at.tile * TILE, h = kv * group + at.head;
        const word barrier = full + 8 * stage;
        barrier_expect(barrier, 2 * TILE_BYTES + 8 * TILE);
        copy_rows(q_at + stage * TILE_BYTES, q_map, barrier, q0, h, b);
        copy_rows(dy_at + stage * TILE_BYTES, dy_map, barrier, q0, h, b);
        copy_bytes(shared_address(s.offset) + stage * TILE * 4, offsets + at.head * padded + q0,
                   TILE * 4, barrier);
        copy_bytes(shared_address(s.delta) + stage * TILE * 4, deltas + at.head * padded + q0,
                   TILE * 4, barrier);
    };
    Walk now = {starts ? ranges : nullptr, k0 / TILE, tiles, group, k0 + ROWS, 0, k0 / TILE};
    now.settle();
    Walk ahead = now;
    if (threadIdx.x == 0) {
        for (int i = 0; i <= KEY_STAGES; i++) barrier_init(full + 8 * i, 1);
        for (int i = 0; i < KEY_STAGES; i++) barrier_init(empty + 8 * i, THREADS / 32);
        stores_visible_to_wgmma();
        barrier_expect(resident, 2 * ROWS * D * 2);
        copy_rows(shared_address(s.k), k_map, resident, k0, kv, b);
        copy_rows(shared_address(s.v), v_map, resident, k0, kv, b);
        for (int i = 0; i < KEY_STAGES - 1; i++)
            if (!ahead.done()) {
                load(ahead, i);
                ahead.advance();
            }
    }
    __syncthreads();
    const word k_tile = rows_at(shared_address(s.k));
    const word v_tile = rows_at(shared_address(s.v));
    const float factor = scale * LOG2E;
    float dk_sums[D / 2], dv_sums[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk_sums[i] = dv_sums[i] = 0;
    int stage = 0;
    word parity = 0;
    bool again = false;
    barrier_wait(resident, 0);
    while (!now.done()) {
        barrier_wait(full + 8 * stage, parity);
        const int q0 = now.tile * TILE;
        const word q_now = rows_at(q_at + stage * TILE_BYTES),
                   dy_now = rows_at(dy_at + stage * TILE_BYTES);
        float p[32], dp[32];
        wgmma_fence();
        product_of_rows(p, k_tile, q_now);
        product_of_rows(dp, v_tile, dy_now);
        if (threadIdx.x == 0 && !ahead.done()) {
            const int before = stage == 0 ? KEY_STAGES - 1 : stage - 1;
            if (again) barrier_wait(empty + 8 * before, stage == 0 ? parity ^ 1 : parity);
            load(ahead, before);
            ahead.advance();
        }
        __syncwarp();
        again = true;
        wgmma_wait<1>();
        hold(p);
        const bool by_start = starts && ranges[now.tile].y > k0;
        if (q0 < k0 + TILE - 1 || by_start) {
#pragma unroll
            for (int c = 0; c < 8; c++) {
                int2 from = make_int2(0, 0);
                if (by_start) {
                    const int query = q0 + c * 8 + 2 * t;
                    from = make_int2(starts[min(query, T - 1)], starts[min(query + 1, T - 1)]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = row + i / 2 * 8, query = q0 + c * 8 + 2 * t + i % 2;
                    if (key > query || key < (i % 2 ? from.y : from.x)) p[c * 4 + i] = -infinity();
                }
            }
        }
        word ps[16], ds[16];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float4 l = *reinterpret_cast<const float4*>(s.offset[stage] + c * 16 + t * 4);
            const float ls[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int i = 0; i < 8; i++)
                p[c * 8 + i] = exp2_approximate(fmaf(p[c * 8 + i], factor, -ls[i / 4 * 2 + i % 2]));
        }
        wgmma_wait<0>();
        hold(dp);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float4 e = *reinterpret_cast<const float4*>(s.delta[stage] + c * 16 + t * 4);
            const float es[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
            for (int i = 0; i < 8; i++)
                dp[c * 8 + i] = p[c * 8 + i] * (dp[c * 8 + i] - es[i / 4 * 2 + i % 2]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ds[c * 4 + i] = pack_bf16(dp[c * 8 + i * 2], dp[c * 8 + i * 2 + 1]);
                ps[c * 4 + i] = pack_bf16(p[c * 8 + i * 2], p[c * 8 + i * 2 + 1]);
            }
        }
        hold(ps);
        hold(ds);
        wgmma_fence();
        add_product(dv_sums, ps, dy_now);
        add_product(dk_sums, ds, q_now);
        wgmma_commit();
        wgmma_wait<0>();
        hold(dk_sums);
        hold(dv_sums);
        release(empty + 8 * stage);
        now.advance();
        if (++stage == KEY_STAGES) stage = 0, parity ^= 1;
    }
    store_rows<BLOCKS>(dk + b * at_dk.batch + kv * at_dk.head, at_dk.token, row, T, dk_sums, scale);
    store_rows<BLOCKS>(dv + b * at_dv.batch + kv * at_dv.head, at_dv.token, row, T, dv_sums, 1.0f);
#endif
}
