// cache_write: new keys and values go behind those that a cache holds, keys and queries turned by rotary embedding on the way.
//
// One CTA moves one token: first all new ones, then all queries. Nothing is shared between CTAs, so their order does not matter; two
// tokens at one place, which EVOSDPA_CHECK finds, leave one of them there.
#include "place.cuh"
#include "rotary.cuh"

namespace {

template <typename T>
__device__ __forceinline__ Heads<T> heads_of(T* tensor, const long long (&stride)[3], int block, int row) {
  return {tensor + block * stride[0] + row * stride[2], stride[1]};
}

__device__ __forceinline__ Heads<const element> heads_of(const void* tensor, const long long (&stride)[3], const Token& token) {
  return heads_of(static_cast<const element*>(tensor), stride, token.block, token.row);
}

// The position that a sequence counts from.
__device__ __forceinline__ long long first_position(const CacheParams& p, int sequence) {
  return p.first ? p.first[sequence] : p.lengths[sequence];
}

__device__ __forceinline__ void write_token(const CacheParams& p, int index) {
  Token token;
  Place place;
  if (!find_token(p.cu_seqlens_new, p.batch, p.tokens_new, index, token)) return;
  if (!find_place(p, token.sequence, token.number, place)) return;
#if ELEMENT < 3
  if (p.cos) {
    const long long position = first_position(p, token.sequence) + token.number;
    // Neither half of a token is written without the other.
    if (position < 0 || position >= p.positions) return;
    turn_heads(p, heads_of(p.k, p.k_stride, token), heads_of(static_cast<element*>(p.k_cache), p.k_cache_stride, place.block, place.row),
               p.heads_kv, p.dim_k, int(position));
  } else
#endif
  {
    copy_heads(heads_of(p.k, p.k_stride, token), heads_of(static_cast<element*>(p.k_cache), p.k_cache_stride, place.block, place.row),
               p.heads_kv, p.dim_k);
  }
  copy_heads(heads_of(p.v, p.v_stride, token), heads_of(static_cast<element*>(p.v_cache), p.v_cache_stride, place.block, place.row),
             p.heads_kv, p.dim_v);
}

#if ELEMENT < 3
// A query of no sequence is copied as it is. One at a position without angles becomes NaN: no plausible number stands where there is no
// right one.
__device__ __forceinline__ void turn_query(const CacheParams& p, int index) {
  Token token;
  const bool known = find_token(p.cu_seqlens_q, p.batch, p.tokens_q, index, token);
  if (!known) token = {0, 0, 0, index};
  const Heads<const element> from = heads_of(p.q, p.q_stride, token);
  const Heads<element> to = heads_of(static_cast<element*>(p.q_out), p.q_out_stride, token.block, token.row);
  if (!known) return copy_heads(from, to, p.heads_q, p.dim_k);
  const long long position = first_position(p, token.sequence) + (p.advance ? token.number : 0);
  if (position >= 0 && position < p.positions) return turn_heads(p, from, to, p.heads_q, p.dim_k, int(position));
  for (int i = threadIdx.x; i < p.heads_q * p.dim_k; i += blockDim.x)
    to.first[i / p.dim_k * to.stride + i % p.dim_k] = narrowed(__int_as_float(0x7fffffff));
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(128) cache_write(const __grid_constant__ CacheParams p) {
  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (p.filled && thread < p.batch) p.filled[thread] = filled_length(p, int(thread));
  const int tokens = !p.k ? 0 : p.cu_seqlens_new ? p.tokens_new : p.batch * p.tokens_new;
  if (int(blockIdx.x) < tokens) return write_token(p, blockIdx.x);
#if ELEMENT < 3
  const int queries = !p.q ? 0 : p.cu_seqlens_q ? p.tokens_q : p.batch * p.tokens_q;
  const int index = int(blockIdx.x) - tokens;
  if (index < queries) turn_query(p, index);
#endif
}
