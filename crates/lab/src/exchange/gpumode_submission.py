#!POPCORN leaderboard @LEADERBOARD@

import evosdpa
from task import input_t, output_t

IS_CAUSAL = @IS_CAUSAL@


def custom_kernel(data: input_t) -> output_t:
    q, k, v = data
    return evosdpa.sdpa(q, k, v, is_causal=IS_CAUSAL, enable_gqa=q.shape[1] != k.shape[1])
