//! How new candidates are made from old ones.

use super::space::{Layer, Point, Space};
use evosdpa_oracle::rng::Rng;

/// One or two tunables set to other values; details rather than structure, three times in four.
pub fn mutated(space: &Space, point: &Point, rng: &mut Rng) -> Point {
    let mut moved = point.clone();
    let wanted = if rng.below(4) == 0 { Layer::Macro } else { Layer::Micro };
    let of_layer: Vec<_> = space
        .dimensions
        .iter()
        .filter(|dimension| dimension.layer == wanted && dimension.values.len() > 1)
        .collect();
    let all: Vec<_> = space.dimensions.iter().filter(|dimension| dimension.values.len() > 1).collect();
    let from = if of_layer.is_empty() { &all } else { &of_layer };
    for _ in 0..=rng.below(2) {
        let Some(dimension) = rng.pick(from) else { break };
        let now = moved.get(&dimension.name).copied();
        let others: Vec<i64> = dimension.values.iter().copied().filter(|value| Some(*value) != now).collect();
        if let Some(value) = rng.pick(&others) {
            moved.insert(dimension.name.clone(), *value);
        }
    }
    moved
}

/// Each tunable from one of two parents.
pub fn crossed(a: &Point, b: &Point, rng: &mut Rng) -> Point {
    a.iter()
        .map(|(name, value)| {
            let other = b.get(name).unwrap_or(value);
            (name.clone(), if rng.coin() { *value } else { *other })
        })
        .collect()
}

/// Another structure with the details of a point.
pub fn restructured(space: &Space, point: &Point, rng: &mut Rng) -> Point {
    let mut moved = point.clone();
    for dimension in space.dimensions.iter().filter(|dimension| dimension.layer == Layer::Macro) {
        moved.insert(dimension.name.clone(), dimension.values[rng.below(dimension.values.len())]);
    }
    moved
}

/// The structure of a point with other details.
pub fn redetailed(space: &Space, point: &Point, rng: &mut Rng) -> Point {
    let mut moved = point.clone();
    for dimension in space.dimensions.iter().filter(|dimension| dimension.layer == Layer::Micro) {
        moved.insert(dimension.name.clone(), dimension.values[rng.below(dimension.values.len())]);
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evolve::space::tests::space;

    #[test]
    fn operators_stay_in_the_space_and_do_what_they_say() {
        let space = space(&[("A", Layer::Macro, 3), ("B", Layer::Macro, 4), ("c", Layer::Micro, 5)]);
        let mut rng = Rng::new(9);
        let (a, b) = (space.at(3), space.at(50));
        for _ in 0..200 {
            let mutant = mutated(&space, &a, &mut rng);
            let changed = a.iter().filter(|(name, value)| mutant[*name] != **value).count();
            assert!(changed <= 2 && space.refuses(&mutant).is_none());
            let child = crossed(&a, &b, &mut rng);
            assert!(child.iter().all(|(name, value)| [a[name], b[name]].contains(value)));
            assert_eq!(restructured(&space, &a, &mut rng)["c"], a["c"]);
            let detailed = redetailed(&space, &a, &mut rng);
            assert_eq!((detailed["A"], detailed["B"]), (a["A"], a["B"]));
        }
        assert!((0..50).any(|_| mutated(&space, &a, &mut rng) != a));
    }
}
