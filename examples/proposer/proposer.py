#!/usr/bin/env python3
"""A proposer for `evosdpa tune --proposer`: one line of JSON in, one line of JSON out.

It takes the best elite so far and moves one tunable to a value that was not tried there, starting with the tunables
that an insight names. unroll.py proposes new sources; docs/tuning.md has the whole exchange.

    evosdpa tune --device cpu --shapes tiny --evaluations 12 --out tunes/proposed \
        --proposer "python3 examples/proposer/proposer.py"
"""

import json
import sys


def propose(request):
    dimensions = {dimension["name"]: dimension for dimension in request["task"]["space"]["dimensions"]}
    best = request["elites"][0]
    tried = [evaluation["point"] for evaluation in request["history"]]
    named = [hint["name"] for insight in request["insights"] for hint in insight["tunables"]]
    for name in dict.fromkeys(named + list(dimensions)):
        for value in dimensions.get(name, {"values": []})["values"]:
            point = dict(best["point"], **{name: value})
            if point not in tried:
                why = f"number {best['number']} is the best so far; {name} was {best['point'][name]} there"
                return {"tunables": point, "rationale": why}
    return {"tunables": {}, "rationale": "nothing is left one step away from the best"}


for line in sys.stdin:
    print(json.dumps(propose(json.loads(line))), flush=True)
