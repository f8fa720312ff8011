// The one parameter struct every kernel takes, by value, as its first argument.
// The Rust side mirrors it field by field (`evosdpa_kernels::params::SdpaParams`);
// both sides assert size and offsets, so a change on one side cannot go unnoticed.
#pragma once

// A band limit at or beyond these values means "no limit on that side". They are
// small enough that `row + limit` never overflows an int.
#define SDPA_BAND_UNBOUNDED_LO (-(1 << 30))
#define SDPA_BAND_UNBOUNDED_HI (1 << 30)

struct SdpaParams {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;  // natural log of the softmax denominator, fp32; null: not wanted

  // Scales of 8-bit inputs, one per (batch, head), contiguous; null for 16-bit inputs.
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;

  // Strides in elements: batch, head, sequence. The innermost dimension is contiguous.
  long long q_stride[3];
  long long k_stride[3];
  long long v_stride[3];
  long long o_stride[3];
  long long lse_stride[2];  // batch, head; the sequence is contiguous

  int batch;
  int heads_q;
  int heads_kv;
  int seq_q;
  int seq_kv;
  int dim_qk;
  int dim_v;

  // Key j is visible to query i  iff  i + band_lo <= j <= i + band_hi.
  int band_lo;
  int band_hi;

  float scale;       // softmax scale
  float scale_log2;  // scale * log2(e): exp(x * scale) == exp2(x * scale_log2)
  float softcap;     // a scaled score s becomes softcap * tanh(s / softcap)

  // Hands out work: 0 before the launch, left at 0 by the kernel; null: the kernel divides its work up beforehand.
  unsigned* counter;

  // Of each query head: ALiBi's slope, and the logit of its sink.
  const float* alibi_slopes;
  const float* sinks;

  // Added to the scores, and bytes of which 0 hides a key. Strides in elements: batch, head, query; 0 where shared. Keys are contiguous.
  const void* bias;
  const unsigned char* mask;
  long long bias_stride[3];
  long long mask_stride[3];
  int bias_type;  // SDPA_BIAS_*

  // Query i stands at position i + position among the keys: what ALiBi and chunks count from.
  int position;
  int chunk;  // keys of one attention chunk

  // Lengths that are data: where each sequence's packed tokens begin and the last ones end (batch + 1 values), how many of its keys are
  // filled (batch values). Null: as long as the problem says. Batch strides of packed tensors are 0.
  int bottom_right;  // the sequence's last query is aligned with its last key: band and position count from there
  const int* cu_seqlens_q;
  const int* cu_seqlens_kv;
  const int* seqused_kv;
  int tokens_q;  // packed tokens that there is room for
  int tokens_kv;

  // A cache in pages: entry i of a sequence's row is the page of its keys i * page_size and on. The page takes the place of the batch
  // in the strides of K and V.
  const int* page_table;
  long long page_table_stride;  // entries from row to row
  int page_size;
  int pages;  // of the cache

  // Of each sequence, null where there is none: how many of its queries there are, how many of its filled keys come before its first, and
  // which block of the cache, or row of the page table, is its own.
  const int* seqused_q;
  const int* leftpad_kv;
  const int* cache_batch_idx;
  long long cache_rows;  // blocks, or rows of the page table, that there are

  // Memory between a launch's CTAs, of the size that the manifest says. Its first words are 0 before the launch and left at 0 by the
  // kernel; null: the kernel does without.
  void* workspace;

  // A block mask: a byte for each block of block_q queries and of block_kv keys, 0 hides one from the other. Tables of
  // [ceil(seq_q / block_q)][ceil(seq_kv / block_kv)] bytes lie one behind the other; from one sequence to the next, and from one query head to
  // the next, there are so many of them, 0 where they are shared.
  const unsigned char* blocks;
  int block_q;
  int block_kv;
  int block_batch_tables;
  int block_head_tables;
};

#define SDPA_BIAS_F32 0
#define SDPA_BIAS_F16 1
#define SDPA_BIAS_BF16 2

// NVRTC knows neither <stddef.h> nor __builtin_offsetof; its front end's own spelling does.
#ifdef __CUDACC_RTC__
#define SDPA_OFFSET_OF(field) __INTADDR__(&((SdpaParams*)0)->field)
#else
#define SDPA_OFFSET_OF(field) __builtin_offsetof(SdpaParams, field)
#endif
#define SDPA_OFFSET_IS(field, bytes) \
  static_assert(SDPA_OFFSET_OF(field) == bytes, "SdpaParams." #field " moved")
SDPA_OFFSET_IS(q, 0);
SDPA_OFFSET_IS(k, 8);
SDPA_OFFSET_IS(v, 16);
SDPA_OFFSET_IS(o, 24);
SDPA_OFFSET_IS(lse, 32);
SDPA_OFFSET_IS(q_scale, 40);
SDPA_OFFSET_IS(k_scale, 48);
SDPA_OFFSET_IS(v_scale, 56);
SDPA_OFFSET_IS(q_stride, 64);
SDPA_OFFSET_IS(k_stride, 88);
SDPA_OFFSET_IS(v_stride, 112);
SDPA_OFFSET_IS(o_stride, 136);
SDPA_OFFSET_IS(lse_stride, 160);
SDPA_OFFSET_IS(batch, 176);
SDPA_OFFSET_IS(heads_q, 180);
SDPA_OFFSET_IS(heads_kv, 184);
SDPA_OFFSET_IS(seq_q, 188);
SDPA_OFFSET_IS(seq_kv, 192);
SDPA_OFFSET_IS(dim_qk, 196);
SDPA_OFFSET_IS(dim_v, 200);
SDPA_OFFSET_IS(band_lo, 204);
SDPA_OFFSET_IS(band_hi, 208);
SDPA_OFFSET_IS(scale, 212);
SDPA_OFFSET_IS(scale_log2, 216);
SDPA_OFFSET_IS(softcap, 220);
SDPA_OFFSET_IS(counter, 224);
SDPA_OFFSET_IS(alibi_slopes, 232);
SDPA_OFFSET_IS(sinks, 240);
SDPA_OFFSET_IS(bias, 248);
SDPA_OFFSET_IS(mask, 256);
SDPA_OFFSET_IS(bias_stride, 264);
SDPA_OFFSET_IS(mask_stride, 288);
SDPA_OFFSET_IS(bias_type, 312);
SDPA_OFFSET_IS(position, 316);
SDPA_OFFSET_IS(chunk, 320);
SDPA_OFFSET_IS(bottom_right, 324);
SDPA_OFFSET_IS(cu_seqlens_q, 328);
SDPA_OFFSET_IS(cu_seqlens_kv, 336);
SDPA_OFFSET_IS(seqused_kv, 344);
SDPA_OFFSET_IS(tokens_q, 352);
SDPA_OFFSET_IS(tokens_kv, 356);
SDPA_OFFSET_IS(page_table, 360);
SDPA_OFFSET_IS(page_table_stride, 368);
SDPA_OFFSET_IS(page_size, 376);
SDPA_OFFSET_IS(pages, 380);
SDPA_OFFSET_IS(seqused_q, 384);
SDPA_OFFSET_IS(leftpad_kv, 392);
SDPA_OFFSET_IS(cache_batch_idx, 400);
SDPA_OFFSET_IS(cache_rows, 408);
SDPA_OFFSET_IS(workspace, 416);
SDPA_OFFSET_IS(blocks, 424);
SDPA_OFFSET_IS(block_q, 432);
SDPA_OFFSET_IS(block_kv, 436);
SDPA_OFFSET_IS(block_batch_tables, 440);
SDPA_OFFSET_IS(block_head_tables, 444);
static_assert(sizeof(SdpaParams) == 448, "SdpaParams changed size: change the Rust mirror too");
#undef SDPA_OFFSET_IS
#undef SDPA_OFFSET_OF
