// What is asked of one sequence where that is not the same for all of them: its own lengths, and the band in terms of them.
//
// Lengths are read on the device: no host knows them. Whatever they hold, nothing outside the tensors is read or written: they are
// cut off at what the problem allows.
#pragma once
#include "mask.cuh"

// Named as the fields of SdpaParams that they stand for.
struct Sequence {
  int seq_q, seq_kv;
  int band_lo, band_hi;
  int position;         // of its first query among its keys
  int chunk;            // keys of an attention chunk
  int q_first;   // where its queries begin among the packed ones
  int kv_first;  // where its keys begin: among the packed ones, in its block, in its pages
  int block;     // its block of the cache, or row of the page table
};

__device__ __forceinline__ const Sequence& edges_of(const Sequence& s) { return s; }

// A sequence's place among packed tokens.
struct Tokens {
  int first, count;
};
__device__ __forceinline__ Tokens packed_tokens(const int* cumulative, int sequence, int total, int longest) {
  const int first = min(max(cumulative[sequence], 0), total);
  return {first, min(max(cumulative[sequence + 1] - first, 0), min(total - first, longest))};
}

__device__ __forceinline__ Tokens tokens_q(const SdpaParams& p, int sequence) {
  Tokens room = p.cu_seqlens_q ? packed_tokens(p.cu_seqlens_q, sequence, p.tokens_q, p.seq_q) : Tokens{0, p.seq_q};
  if (p.seqused_q) room.count = min(max(p.seqused_q[sequence], 0), room.count);
  return room;
}

__device__ __forceinline__ Tokens tokens_kv(const SdpaParams& p, int sequence) {
  Tokens room = p.cu_seqlens_kv ? packed_tokens(p.cu_seqlens_kv, sequence, p.tokens_kv, p.seq_kv) : Tokens{0, p.seq_kv};
  if (p.seqused_kv) room.count = min(max(p.seqused_kv[sequence], 0), room.count);
  if (p.leftpad_kv) {
    const int padding = min(max(p.leftpad_kv[sequence], 0), room.count);
    room.first += padding;
    room.count -= padding;
  }
  return room;
}

__device__ __forceinline__ int cache_block(const SdpaParams& p, int sequence) {
  if (!p.cache_batch_idx) return sequence;
  return int(min((long long)max(p.cache_batch_idx[sequence], 0), p.cache_rows - 1));
}

// OWN_LENGTHS: lengths are data. Otherwise they are the problem's, and only chunks set a sequence apart.
template <bool OWN_LENGTHS>
__device__ __forceinline__ Sequence sequence_of(const SdpaParams& p, int sequence) {
  if (!OWN_LENGTHS) return {p.seq_q, p.seq_kv, p.band_lo, p.band_hi, p.position, p.chunk, 0, 0, sequence};
  const Tokens q = tokens_q(p, sequence), kv = tokens_kv(p, sequence);
  const int diagonal = p.bottom_right ? kv.count - q.count : 0;
  const int lo = p.band_lo > SDPA_BAND_UNBOUNDED_LO ? p.band_lo + diagonal : p.band_lo;
  const int hi = p.band_hi < SDPA_BAND_UNBOUNDED_HI ? p.band_hi + diagonal : p.band_hi;
  return {q.count, kv.count, lo, hi, p.position + diagonal, p.chunk, q.first, kv.first, cache_block(p, sequence)};
}

// Where a sequence's tokens begin.
__device__ __forceinline__ int first_query(const SdpaParams&) { return 0; }
__device__ __forceinline__ int first_query(const Sequence& s) { return s.q_first; }
__device__ __forceinline__ int first_key(const SdpaParams&) { return 0; }
__device__ __forceinline__ int first_key(const Sequence& s) { return s.kv_first; }

// The first key of the chunk that a query's position lies in.
__device__ __forceinline__ int chunk_first(const Sequence& s, int row) {
  const int position = row + s.position;
  const int whole = position / s.chunk * s.chunk;
  return whole > position ? whole - s.chunk : whole;
}

__device__ __forceinline__ int band_first(const Sequence& s, int row) {
  return CHUNKED ? max(row + s.band_lo, chunk_first(s, row)) : row + s.band_lo;
}
__device__ __forceinline__ int band_last(const Sequence& s, int row) {
  return CHUNKED ? min(row + s.band_hi, chunk_first(s, row) + s.chunk - 1) : row + s.band_hi;
}
__device__ __forceinline__ bool has_left_edge(const Sequence& s) { return CHUNKED || s.band_lo > SDPA_BAND_UNBOUNDED_LO; }

// Where a chunk begins among the rows, one of them may see few keys.
__device__ __forceinline__ bool any_row_sees_fewer(const Sequence& s, int first_row, int last_row, int keys) {
  return min(visible_key_count(s, first_row), visible_key_count(s, last_row)) < keys ||
         CHUNKED && chunk_first(s, first_row) != chunk_first(s, last_row);
}
