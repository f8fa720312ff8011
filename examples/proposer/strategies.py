#!/usr/bin/env python3
"""A proposer that goes three ways in turn, so that one log compares them: EvoEngineer's Free, Insight and Full without a model.

What each way knows is what a language model would be shown (docs/llm.md): Free the best alone, Insight the best and the
advice on it, Full two elites as well. What it makes of that is chance.

    evosdpa tune --device cpu --shapes b1h1s384d64 --evaluations 46 --out tunes/strategies \
        --proposer "python3 examples/proposer/strategies.py"
    evosdpa report tunes/strategies --format strategies --out -
"""

import json
import random
import sys

WAYS = ("scripted-free", "scripted-insight", "scripted-full")


def changed(point, dimensions, chance):
    """One tunable set to another of its values."""
    dimension = chance.choice([dimension for dimension in dimensions if len(dimension["values"]) > 1])
    others = [value for value in dimension["values"] if value != point[dimension["name"]]]
    return dict(point, **{dimension["name"]: chance.choice(others)})


def advised(point, dimensions, insights, chance):
    """One step the way an insight points."""
    moves = []
    for insight in insights:
        for hint in insight["tunables"]:
            values = next((sorted(d["values"]) for d in dimensions if d["name"] == hint["name"]), [])
            there = [v for v in values if (v > point[hint["name"]] if hint["direction"] == "up" else v < point[hint["name"]])]
            if there:
                nearest = there[0] if hint["direction"] == "up" else there[-1]
                moves.append(dict(point, **{hint["name"]: nearest}))
    return chance.choice(moves) if moves else changed(point, dimensions, chance)


def crossed(a, b, chance):
    return {name: chance.choice((a[name], b[name])) for name in a}


def propose(request):
    number, elites = request["number"], request["elites"]
    dimensions = request["task"]["space"]["dimensions"]
    chance = random.Random(number)
    way = WAYS[number % len(WAYS)]
    best, tried = elites[0], [evaluation["point"] for evaluation in request["history"]]
    parents = [best["number"]]
    for _ in range(50):
        if way == "scripted-free":
            point = changed(best["point"], dimensions, chance)
        elif way == "scripted-insight" or len(elites) < 2 or chance.random() < 0.5:
            point = advised(best["point"], dimensions, request["insights"], chance)
        else:
            other = chance.choice(elites[1:])
            parents, point = [best["number"], other["number"]], crossed(best["point"], other["point"], chance)
            point = changed(point, dimensions, chance) if point in tried else point
        if point not in tried:
            break
    else:
        return {"none": "everything near the best was tried", "operator": way, "parents": parents}
    return {"tunables": point, "operator": way, "parents": parents, "rationale": f"{way}, from {parents}"}


for line in sys.stdin:
    print(json.dumps(propose(json.loads(line))), flush=True)
