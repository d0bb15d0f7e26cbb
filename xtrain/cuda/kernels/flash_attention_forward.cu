// Causal attention forward in tiles, bf16 on the tensor cores: no T x S scores in memory.
//
//     y = softmax(scale q k^T + mask) v,   lse = ln(sum(exp(scale q k^T + mask)))
//
// q, y: heads x queries x HEAD_DIM.  k, v: heads / group x keys x HEAD_DIM; head h reads h / group.
// All four lie anywhere: rows are HEAD_DIM contiguous bf16 at multiples of 16 bytes, and batches,
// heads and tokens have strides, in elements. lse: (B, H, T) fp32, -infinity where a query sees no
// key; its y is 0. starts: (B, T) or null, offsets: (B,) or null, as in engine/ops/attention.py.
//
// A block holds QUERY_TILE queries of a head, each warp ROW_TILES x 16 of them, and takes their keys
// in tiles of KEY_TILE, which are copied while the tile before is worked on, PART keys at a time.
// Grid: (query tiles, the longest first; heads; batches). Scores, sums and y are fp32, products have bf16 operands, the
// probabilities too; the sum is of unrounded ones.
//
// Online softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691) with a lazy
// maximum: what a row's scores are taken relative to follows only when a score exceeds it by more
// than LAZY, in powers of 2; until then probabilities exceed 1, which costs no accuracy. So lanes
// need not agree on a maximum, nor y be rescaled, but now and then. Each row decides by itself: its
// bits depend on nothing but its own q and the keys that it sees.

#include "mma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 32
#endif
#ifndef ROW_TILES
#define ROW_TILES 2
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef PART
#define PART 64
#endif
#ifndef KEY_TILE
#define KEY_TILE PART
#endif
#ifndef QUERIES_IN_REGISTERS  // else their fragments are read again for every tile of keys
#define QUERIES_IN_REGISTERS (HEAD_DIM <= 64)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif

constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = ROW_TILES * 16;
constexpr int QUERY_TILE = WARPS * WARP_ROWS;
constexpr int PITCH = HEAD_DIM + 8;  // elements; an odd number of 16-byte words
constexpr int ROW_WORDS = HEAD_DIM / 8;
constexpr int DEPTH_STEPS = HEAD_DIM / 16;
constexpr int TILE_BYTES = KEY_TILE * PITCH * 2;
constexpr float LAZY = 8.0f;

typedef float Scores[ROW_TILES][PART / 8][4];

struct Strides {  // in elements
    long long batch;
    int head, token;
};

// A thread's place in a copy: it takes one 16-byte word of every ROWS_AT_ONCE-th row.
constexpr int ROWS_AT_ONCE = THREADS / ROW_WORDS;

// Rows [first, first + count) of a head into shared memory; zeros after `available`, the head's.
template <int count>
__device__ __forceinline__ void copy_rows(word to, const bf16_bits* from, int stride, int first,
                                          int available) {
    const int row = threadIdx.x / ROW_WORDS, column = threadIdx.x % ROW_WORDS * 8;
    const bf16_bits* source = from + static_cast<long long>(first + row) * stride + column;
    to += (row * PITCH + column) * 2;
#pragma unroll
    for (int done = 0; done < count; done += ROWS_AT_ONCE) {
        const bool inside = done + ROWS_AT_ONCE <= count || row + done < count;
        if (inside && (THREADS % ROW_WORDS == 0 || row < ROWS_AT_ONCE)) {
            const bool valid = first + row + done < available;
            copy_async(to + done * PITCH * 2, valid ? source + done * stride : from, valid);
        }
    }
}

// What a warp's queries see: keys [begin, end); all of them see [full_begin, full_end).
struct Sight {
    int begin, end, full_begin, full_end;
};

__device__ __forceinline__ Sight sight_of(int first, int rows, int queries, int keys, int offset,
                                          const int* starts) {
    int begin = 0, full_begin = 0;
    if (starts != nullptr) {
        begin = 0x7fffffff;
        for (int row = first + threadIdx.x % 32; row < min(first + rows, queries); row += 32) {
            begin = min(begin, starts[row]);
            full_begin = max(full_begin, starts[row]);
        }
        begin = max(__reduce_min_sync(0xffffffff, begin), 0);
        full_begin = __reduce_max_sync(0xffffffff, full_begin);
    }
    int last = min(first + rows, queries) - 1;
    return {begin, min(keys, offset + last + 1), full_begin, min(keys, offset + first + 1)};
}

// A warp's queries: fragments that stay in registers, or where to read them.
struct Queries {
    word address;
#if QUERIES_IN_REGISTERS
    word held[ROW_TILES][DEPTH_STEPS][4];
#endif

    __device__ __forceinline__ void hold() {
#if QUERIES_IN_REGISTERS
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int step = 0; step < DEPTH_STEPS; ++step)
                load_matrices(held[m][step], address + (m * 16 * PITCH + step * 16) * 2);
#endif
    }
};

// Scores of 16 keys, the piece-th of a part, whose ldmatrix address is `keys`.
__device__ __forceinline__ void make_scores(Scores& score, const Queries& queries, word keys,
                                            int piece) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[m][2 * piece][e] = score[m][2 * piece + 1][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; ++step) {
        word b[4];
        load_matrices(b, keys + (piece * 16 * PITCH + step * 16) * 2);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
#if QUERIES_IN_REGISTERS
            const word(&a)[4] = queries.held[m][step];
#else
            word a[4];
            load_matrices(a, queries.address + (m * 16 * PITCH + step * 16) * 2);
#endif
            mma(score[m][2 * piece], a, b[0], b[1]);
            mma(score[m][2 * piece + 1], a, b[2], b[3]);
        }
    }
}

// The running result of a warp's rows, thread by thread; [m][half] is row m * 16 + half * 8 + g.
struct Rows {
    float out[ROW_TILES][HEAD_DIM / 8][4];
    float base[ROW_TILES][2];   // the exponent that is taken off, in powers of 2
    float limit[ROW_TILES][2];  // the score at which the base has to follow
    float sum[ROW_TILES][2];    // of this thread's columns

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                base[m][half] = sum[m][half] = 0.0f;
                limit[m][half] = -infinity();
            }
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][n][e] = 0.0f;
        }
    }

    // Raise the base of each row that has a score above its limit.
    __device__ __forceinline__ void follow(const Scores& score, float slope) {
        float most[ROW_TILES][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                most[m][half] = fmaxf(score[m][0][2 * half], score[m][0][2 * half + 1]);
#pragma unroll
                for (int n = 1; n < PART / 8; ++n) {
                    most[m][half] = fmaxf(most[m][half], score[m][n][2 * half]);
                    most[m][half] = fmaxf(most[m][half], score[m][n][2 * half + 1]);
                }
                grown |= most[m][half] > limit[m][half];
            }
        if (!__any_sync(0xffffffff, grown)) return;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float top = quad_max(most[m][half]);
                const bool grows = top > limit[m][half];  // the same in all four lanes
                const bool first = limit[m][half] == -infinity();
                const float raised = grows ? top * slope : base[m][half];
                const float factor =
                    first ? 0.0f : exp2_approximate(base[m][half] - raised);
                base[m][half] = raised;
                limit[m][half] = grows ? top + LAZY / slope : limit[m][half];
                sum[m][half] *= factor;
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n) {
                    out[m][n][2 * half] *= factor;
                    out[m][n][2 * half + 1] *= factor;
                }
            }
    }

    // Take in 16 keys, the piece-th of a part, whose values have the ldmatrix address `values`.
    __device__ __forceinline__ void add(const Scores& score, float slope, word values, int piece) {
        word p[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // as the fragment of A wants them
                const int half = i % 2;
                const float* two = &score[m][2 * piece + i / 2][2 * half];
                const float low = exp2_approximate(fmaf(two[0], slope, -base[m][half]));
                const float high = exp2_approximate(fmaf(two[1], slope, -base[m][half]));
                sum[m][half] += low + high;
                p[m][i] = pack_bf16(low, high);
            }
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
            word b[4];
            load_matrices_transposed(b, values + (piece * 16 * PITCH + n * 16) * 2);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                mma(out[m][2 * n], p[m], b[0], b[1]);
                mma(out[m][2 * n + 1], p[m], b[2], b[3]);
            }
        }
    }
};

// Hide keys outside [begin, end) of each row. first_key: of the part.
__device__ __forceinline__ void mask(Scores& score, int first_key, int first_row, int queries,
                                     int keys, int offset, const int* starts) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + m * 16 + half * 8 + lane / 4;
            const int here = first_key + lane % 4 * 2;
            const int end = min(keys, offset + row + 1) - here;
            const int begin = (starts == nullptr || row >= queries ? 0 : starts[row]) - here;
#pragma unroll
            for (int n = 0; n < PART / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (n * 8 + e >= end || n * 8 + e < begin)
                        score[m][n][2 * half + e] = -infinity();
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_attention_forward(const bf16_bits* q, const bf16_bits* k, const bf16_bits* v, bf16_bits* y,
                        float* lse, const int* starts, const int* offsets, Strides q_strides,
                        Strides k_strides, Strides v_strides, Strides y_strides, int queries,
                        int keys, int group, float scale) {
    extern __shared__ __align__(16) bf16_bits tiles[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERY_TILE;
    const int warp_first = first + warp * WARP_ROWS;
    const int offset = offsets == nullptr ? 0 : offsets[batch];
    if (starts != nullptr) starts += static_cast<long long>(batch) * queries;
    q += batch * q_strides.batch + head * q_strides.head;
    k += batch * k_strides.batch + head / group * k_strides.head;
    v += batch * v_strides.batch + head / group * v_strides.head;
    y += batch * y_strides.batch + head * y_strides.head;
    lse += (static_cast<long long>(batch) * gridDim.y + head) * queries;

    const word q_tile = shared_address(tiles);
    const word k_tiles = q_tile + QUERY_TILE * PITCH * 2;
    const word v_tiles = k_tiles + 2 * TILE_BYTES;
    // ldmatrix addresses within a 16 x 16 piece: of A and of B stored as [k][n], and of B as [n][k].
    const word by_row = ((lane % 16) * PITCH + lane / 16 * 8) * 2;
    const word by_pair = ((lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8) * 2;

    const Sight block = sight_of(first, QUERY_TILE, queries, keys, offset, starts);
    const Sight mine = sight_of(warp_first, WARP_ROWS, queries, keys, offset, starts);
    const int first_tile = block.begin / KEY_TILE;
    const int end_tile = (block.end + KEY_TILE - 1) / KEY_TILE;

    auto copy_tile = [&](int tile, word stage) {
        if (tile < end_tile) {
            copy_rows<KEY_TILE>(k_tiles + stage, k, k_strides.token, tile * KEY_TILE, keys);
            copy_rows<KEY_TILE>(v_tiles + stage, v, v_strides.token, tile * KEY_TILE, keys);
        }
        commit_copies();
    };
    copy_rows<QUERY_TILE>(q_tile, q, q_strides.token, first, queries);
    copy_tile(first_tile, 0);

    const float slope = scale * LOG2E;  // from a score to the exponent of 2
    Queries own;
    own.address = q_tile + warp * WARP_ROWS * PITCH * 2 + by_row;
    Rows rows;
    rows.clear();
    word stage = 0;
    for (int tile = first_tile; tile < end_tile; ++tile, stage ^= TILE_BYTES) {
        wait_for_copies<0>();
        __syncthreads();  // the tile is there, and nobody reads the one that is overwritten next
        copy_tile(tile + 1, stage ^ TILE_BYTES);
        if (tile == first_tile) own.hold();
#pragma unroll
        for (int part = 0; part < KEY_TILE / PART; ++part) {
            const int first_key = tile * KEY_TILE + part * PART;
            if (first_key >= mine.end || first_key + PART <= mine.begin) continue;
            const word here = stage + part * PART * PITCH * 2;
            Scores score;
#pragma unroll
            for (int piece = 0; piece < PART / 16; ++piece)
                make_scores(score, own, k_tiles + here + by_pair, piece);
            if (first_key < mine.full_begin || first_key + PART > mine.full_end)
                mask(score, first_key, warp_first, queries, keys, offset, starts);
            rows.follow(score, slope);
#pragma unroll
            for (int piece = 0; piece < PART / 16; ++piece)
                rows.add(score, slope, v_tiles + here + by_row, piece);
        }
    }

    // Through the warp's own rows of the query tile, so that rows leave in words of 16 bytes.
    wait_for_copies<0>();
    __syncthreads();  // also where no key was seen, and the queries have only just arrived
    bf16_bits* staged = tiles + warp * WARP_ROWS * PITCH;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = quad_sum(rows.sum[m][half]);
            const bool blind = rows.limit[m][half] == -infinity();  // sees no key
            const float share = blind ? 0.0f : 1.0f / total;
            const int place = m * 16 + half * 8 + lane / 4, row = warp_first + place;
            if (lane % 4 == 0 && row < queries)
                lse[row] = blind ? -infinity() : rows.base[m][half] * LN2 + logf(total);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                *reinterpret_cast<word*>(staged + place * PITCH + n * 8 + lane % 4 * 2) =
                    pack_bf16(rows.out[m][n][2 * half] * share,
                              rows.out[m][n][2 * half + 1] * share);
        }
    __syncwarp();
#pragma unroll
    for (int piece = lane; piece < WARP_ROWS * ROW_WORDS; piece += 32) {
        const int place = piece / ROW_WORDS, column = piece % ROW_WORDS * 8;
        if (warp_first + place < queries)
            *reinterpret_cast<uint4*>(y + static_cast<long long>(warp_first + place) * y_strides.token +
                                      column) =
                *reinterpret_cast<const uint4*>(staged + place * PITCH + column);
    }
}
