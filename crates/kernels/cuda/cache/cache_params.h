// The parameters of cache_write. The Rust side mirrors them field by field (`evosdpa_kernels::cache::CacheParams`); both sides assert size
// and offsets.
#pragma once

struct CacheParams {
  // New keys and values, [sequences, heads, tokens, dim] or packed [1, heads, tokens, dim], and the caches they go to,
  // [blocks or pages, heads, room, dim]. Null where there are none.
  const void* k;
  const void* v;
  void* k_cache;
  void* v_cache;
  // Queries, and where they go when turned. Null where there are none.
  const void* q;
  void* q_out;
  // Cosines and sines, [positions, columns], of one type. Null: nothing is turned.
  const void* cos;
  const void* sin;

  // Strides in elements: block, head, token. The innermost dimension is contiguous.
  long long k_stride[3];
  long long v_stride[3];
  long long k_cache_stride[3];
  long long v_cache_stride[3];
  long long q_stride[3];
  long long q_out_stride[3];
  long long cos_stride;  // from position to position
  long long sin_stride;

  const int* lengths;          // tokens that each sequence holds
  const int* first;            // the position of each sequence's first new token; null: its length
  const int* cu_seqlens_new;   // where each sequence's packed new tokens begin, and the last ones end; null: each has a block
  const int* cu_seqlens_q;     // the same of packed queries
  const int* cache_batch_idx;  // each sequence's block of the cache, or row of the page table; null: that of its own number
  const int* page_table;       // null: each sequence has one contiguous block
  long long page_table_stride;
  int* filled;  // how many tokens each sequence holds afterwards; null: not wanted

  int batch;
  int heads_kv;
  int heads_q;
  int tokens_new;  // of each sequence, or packed in all
  int tokens_q;
  int dim_k;  // of keys and queries
  int dim_v;
  int blocks;        // of the cache, or pages
  int room;          // tokens of a block, or of a page
  int table_rows;    // rows of the page table
  int columns_used;  // entries of a row
  int positions;     // that there are angles for
  int columns;       // angles of a position: twice as many elements of a row are turned
  int angle_type;    // CACHE_ANGLE_*
  int interleaved;   // pairs are neighbours; otherwise `columns` apart
  int advance;       // each query is one position further than the one before it; otherwise all are at the first
};

#define CACHE_ANGLE_F32 0
#define CACHE_ANGLE_F16 1
#define CACHE_ANGLE_BF16 2

// NVRTC knows neither <stddef.h> nor __builtin_offsetof; its front end's own spelling does.
#ifdef __CUDACC_RTC__
#define CACHE_OFFSET_OF(field) __INTADDR__(&((CacheParams*)0)->field)
#else
#define CACHE_OFFSET_OF(field) __builtin_offsetof(CacheParams, field)
#endif
#define CACHE_OFFSET_IS(field, bytes) static_assert(CACHE_OFFSET_OF(field) == bytes, "CacheParams." #field " moved")
CACHE_OFFSET_IS(k, 0);
CACHE_OFFSET_IS(v, 8);
CACHE_OFFSET_IS(k_cache, 16);
CACHE_OFFSET_IS(v_cache, 24);
CACHE_OFFSET_IS(q, 32);
CACHE_OFFSET_IS(q_out, 40);
CACHE_OFFSET_IS(cos, 48);
CACHE_OFFSET_IS(sin, 56);
CACHE_OFFSET_IS(k_stride, 64);
CACHE_OFFSET_IS(v_stride, 88);
CACHE_OFFSET_IS(k_cache_stride, 112);
CACHE_OFFSET_IS(v_cache_stride, 136);
CACHE_OFFSET_IS(q_stride, 160);
CACHE_OFFSET_IS(q_out_stride, 184);
CACHE_OFFSET_IS(cos_stride, 208);
CACHE_OFFSET_IS(sin_stride, 216);
CACHE_OFFSET_IS(lengths, 224);
CACHE_OFFSET_IS(first, 232);
CACHE_OFFSET_IS(cu_seqlens_new, 240);
CACHE_OFFSET_IS(cu_seqlens_q, 248);
CACHE_OFFSET_IS(cache_batch_idx, 256);
CACHE_OFFSET_IS(page_table, 264);
CACHE_OFFSET_IS(page_table_stride, 272);
CACHE_OFFSET_IS(filled, 280);
CACHE_OFFSET_IS(batch, 288);
CACHE_OFFSET_IS(heads_kv, 292);
CACHE_OFFSET_IS(heads_q, 296);
CACHE_OFFSET_IS(tokens_new, 300);
CACHE_OFFSET_IS(tokens_q, 304);
CACHE_OFFSET_IS(dim_k, 308);
CACHE_OFFSET_IS(dim_v, 312);
CACHE_OFFSET_IS(blocks, 316);
CACHE_OFFSET_IS(room, 320);
CACHE_OFFSET_IS(table_rows, 324);
CACHE_OFFSET_IS(columns_used, 328);
CACHE_OFFSET_IS(positions, 332);
CACHE_OFFSET_IS(columns, 336);
CACHE_OFFSET_IS(angle_type, 340);
CACHE_OFFSET_IS(interleaved, 344);
CACHE_OFFSET_IS(advance, 348);
static_assert(sizeof(CacheParams) == 352, "CacheParams changed size: change the Rust mirror too");
#undef CACHE_OFFSET_IS
#undef CACHE_OFFSET_OF
