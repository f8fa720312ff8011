// The two threads of hopper_fwd that only feed others: the scheduler thread, which publishes the next Q tile, and the producer, which
// streams Q, K and V tiles into shared memory by TMA.
//
// Waiting on an empty barrier with the opposite parity succeeds at once in the first round.
//
// TMA knows neither pages nor where a sequence ends among others. So where a cache has pages, or sequences lengths of their own, the
// producer is a whole warp, or two, which copy or complete such tiles themselves (gather.cuh).
#pragma once
#include "gather.cuh"
#include "launch.cuh"

namespace {

// Consumers give a slot back when they have stored the Q tile it published. The counter is asked for the next one as late as the
// producer can bear: who takes a long one early is the last to finish.
template <typename Scheduler>
__device__ __forceinline__ void run_scheduler(const SdpaParams& p, const Layout& layout) {
  Scheduler scheduler;
  RingPosition<WORK_SLOTS> work_at;
  for (bool more = true; more; work_at.advance()) {
    if ((OWN_LENGTHS || BLOCK_MASK) && work_at.uses == 0) grid_wait();  // lengths and block tables may be another kernel's outputs
    const Work work = scheduler.work(p);
    more = work.head >= 0;
    mbarrier_wait(layout.work_empty(work_at.slot()), work_at.parity() ^ 1);
    if (!PACKED_QUERIES || threadIdx.x % 32 == 0) {
      publish_work(layout.work_slot(work_at.slot()), p, work);
      mbarrier_arrive(layout.work_full(work_at.slot()));
    }
    if (PERSISTENT == 2 && work_at.uses == 0) grid_wait();  // the launch before may use the same counter
    if (PERSISTENT == 2 && more) mbarrier_wait(layout.work_wanted, work_at.uses & 1);
    if (more) scheduler.advance(p);
  }
}

struct Producer {
  const SdpaParams& p;
  const TensorMap& q_map;
  const TensorMap& k_map;
  const TensorMap& v_map;
  const Layout& layout;
  RingPosition<WORK_SLOTS> work_at;
  RingPosition<Q_STAGES> q_at;
  RingPosition<STAGES> k_at, v_at;
  const int feeder;  // which one this warp is
  Gathered gathered;
  Tail tail;
  int latest, before;  // of the last two K tiles, of which V is at most one behind: this lane's page, or under a block mask the tile

  __device__ __forceinline__ Producer(const SdpaParams& params, const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                      const Layout& where, int number)
      : p(params), q_map(q), k_map(k), v_map(v), layout(where), feeder(FEEDERS > 1 ? number : 0) {}

  // Waits for a slot, or for work. Whoever will empty it may be waiting for what this warp has copied so far.
  __device__ __forceinline__ void await_empty(u32 barrier, u32 parity) {
    if (PRODUCER_IS_WARP && (gathered.pending || tail.pending) && !mbarrier_test(barrier, parity)) publish_all();
    mbarrier_wait(barrier, parity);
  }
  __device__ __forceinline__ void publish_all() {
    if (PAGED_CACHE) gathered.publish();
    tail.publish(layout.tail_there);
  }

  // The KV tile of number n, which are asked for from the last on. A block mask leaves some out.
  __device__ __forceinline__ int take_tile(const QTile& t, int n) {
    const unsigned char* const row = block_row(p, t.batch, t.head, t.m0);
    int tile = n == t.last() ? t.rightmost : latest - 1;
    while (tile > 0 && !row[tile * BLOCK_N / p.block_kv]) --tile;
    before = latest;
    return latest = tile;
  }

  // The page table answers while the slot is awaited.
  __device__ __forceinline__ void load_k(const QTile& t, int n) {
    const bool gather = PAGED_CACHE && needs_gather(t);
    int entry = 0;
    if (BLOCK_MASK) n = take_tile(t, n);
    if (BOXED) before = latest;
    if (Gathered::IN_BLOCKS)
      entry = Gathered::first_entry(p, t, n, feeder);
    else if (BOXED && !gather)
      latest = entry_of_box(p, t, n);
    await_empty(layout.k_empty(k_at.slot()), k_at.parity() ^ 1);
    if (gather)
      gathered.copy<QK_PANELS>(p, p.k, p.k_stride, p.dim_qk, t, n, feeder, entry, layout.k(k_at.slot()), layout.k_full(k_at.slot()));
    else if (BOXED)
      tma_boxes<QK_PANELS>(k_map, t, n, latest, layout.k(k_at.slot()), layout.k_full(k_at.slot()));
    else if (is_leader())
      tma_k(t, n);
    k_at.advance();
  }

  __device__ __forceinline__ void tma_k(const QTile& t, int n) {
    if (BLOCK_MASK) asm volatile("st.shared.s32 [%0], %1;" ::"r"(layout.tile_number(k_at.slot())), "r"(n) : "memory");
    mbarrier_expect_bytes(layout.k_full(k_at.slot()), K_BYTES);
    const TileAt at = place_of_tile(p, t, n);
#pragma unroll
    for (int panel = 0; panel < QK_PANELS; ++panel)
      tma_load(layout.k(k_at.slot()) + panel * KV_PANEL_BYTES, &k_map, layout.k_full(k_at.slot()), panel * PANEL, at.row,
               t.head_kv, at.batch, L2_EVICT_LAST);
  }

  __device__ __forceinline__ void load_v(const QTile& t, int n) {
    if (BLOCK_MASK) n = k_at.uses == v_at.uses + 1 ? latest : before;
    const bool gather = PAGED_CACHE && needs_gather(t);
    int entry = 0;
    if (Gathered::IN_BLOCKS) entry = Gathered::first_entry(p, t, n, feeder);
    await_empty(layout.v_empty(v_at.slot()), v_at.parity() ^ 1);
    if (gather) {
      gathered.copy<V_PANELS>(p, p.v, p.v_stride, p.dim_v, t, n, feeder, entry, layout.v(v_at.slot()), layout.v_full(v_at.slot()));
    } else if (PRODUCER_IS_WARP && (n + 1) * BLOCK_N > keys_of(p, t)) {
      tail.publish(layout.tail_there);
      fetch_v(t, n, layout.tail_there);
      tail.begin(keys_of(p, t) - n * BLOCK_N, layout.v(v_at.slot()), layout.v_full(v_at.slot()));
    } else {
      fetch_v(t, n, layout.v_full(v_at.slot()));
    }
    v_at.advance();
  }

  __device__ __forceinline__ void fetch_v(const QTile& t, int n, u32 barrier) {
    if (BOXED)
      tma_boxes<V_PANELS>(v_map, t, n, k_at.uses == v_at.uses + 1 ? latest : before, layout.v(v_at.slot()), barrier);
    else if (is_leader())
      tma_v(t, n, barrier);
  }

  // Tile n from its pages. Shuffles come first, so that one lane issues all boxes in one go, or two at a time where registers are short.
  template <int PANELS>
  __device__ __forceinline__ void tma_boxes(const TensorMap& map, const QTile& t, int n, int entry, u32 tile, u32 barrier) const {
    constexpr int TURN = MODIFIED && BOXES % 2 == 0 ? 2 : BOXES;
    const int own = page_inside(p, entry);
    const int first = PAGE_BOXES > 1 ? first_box(t, n) : 0;
    if (is_leader()) mbarrier_expect_bytes(barrier, PANELS * KV_PANEL_BYTES);
#pragma unroll 1
    for (int at = 0; at < BOXES; at += TURN) {
      int page[TURN];
#pragma unroll
      for (int box = 0; box < TURN; ++box) page[box] = __shfl_sync(~0u, own, at + box);
      if (!is_leader()) continue;
#pragma unroll
      for (int box = 0; box < TURN; ++box)
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
          tma_load(tile + panel * KV_PANEL_BYTES + (at + box) * BOX_ROWS * 128, &map, barrier, panel * PANEL,
                   (first + at + box) % PAGE_BOXES * BOX_ROWS, t.head_kv, page[box], L2_EVICT_LAST);
    }
  }

  __device__ __forceinline__ void tma_v(const QTile& t, int n, u32 barrier) {
    mbarrier_expect_bytes(barrier, V_BYTES);
    const TileAt at = place_of_tile(p, t, n);
#pragma unroll
    for (int panel = 0; panel < V_PANELS; ++panel)
      tma_load(layout.v(v_at.slot()) + panel * KV_PANEL_BYTES, &v_map, barrier, panel * PANEL, at.row, t.head_kv, at.batch, L2_EVICT_LAST);
  }

  // Rows behind a sequence's last query are another's, and nobody looks at what becomes of them.
  __device__ __forceinline__ void load_q(const QTile& t) {
    await_empty(layout.q_empty(q_at.slot()), q_at.parity() ^ 1);
    if (feeder == 0 && is_leader()) {
      mbarrier_expect_bytes(layout.q_full(q_at.slot()), Q_BYTES);
#pragma unroll
      for (int panel = 0; panel < QK_PANELS; ++panel)
        tma_load(layout.q(q_at.slot()) + panel * Q_PANEL_BYTES, &q_map, layout.q_full(q_at.slot()), panel * PANEL,
                 first_query(t) + t.m0, t.head, PACKED_QUERIES ? 0 : t.batch, L2_EVICT_FIRST);
    }
    q_at.advance();
  }

  // False: there is no more.
  __device__ __forceinline__ bool next_tile(QTile& t) {
    await_empty(layout.work_full(work_at.slot()), work_at.parity());
    QTile next;
    const bool more = read_work(layout.work_slot(work_at.slot()), p, next);
    if (PRODUCER_IS_WARP) __syncwarp();  // all lanes have read it
    if (is_leader()) mbarrier_arrive(layout.work_empty(work_at.slot()));
    work_at.advance();
    if (more) t = next;
    return more;
  }

  __device__ __forceinline__ void want_more() const {
    if (PERSISTENT == 2 && feeder == 0 && is_leader()) mbarrier_arrive(layout.work_wanted);
  }

  // Everything in the order in which it is consumed: the next Q tile's first keys come before this one's last values. Its queries
  // too, unless they have to wait until this tile's have been used. Of packed sequences, the next one may be long in coming, and the values
  // of a Q tile that sees a single KV tile do not wait for it.
  __device__ __forceinline__ void run() {
    grid_wait();  // the inputs may be another kernel's outputs
    QTile t;
    bool more = next_tile(t);
    if (more) {
      load_q(t);
      if (t.count > 0) load_k(t, t.last());
    }
    while (more) {
      if (t.count < 2) want_more();
      for (int n = t.last(); n > t.first; --n) {
        if (n == min(t.last(), t.first + 2)) want_more();
        load_k(t, n - 1);
        load_v(t, n);
      }
      const bool alone = PACKED_QUERIES && t.count == 1;
      if (alone) load_v(t, t.first);
      QTile next = t;
      more = next_tile(next);
      if (more && Q_STAGES > 1) load_q(next);
      if (more && next.count > 0) load_k(next, next.last());
      if (t.count > 0 && !alone) load_v(t, t.first);
      if (more && Q_STAGES == 1) load_q(next);
      t = next;
    }
    if (PRODUCER_IS_WARP) publish_all();
  }
};

}  // namespace
