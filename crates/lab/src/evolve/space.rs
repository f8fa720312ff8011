//! The space of a kernel's tunables, which is never written out: it may have more points than there is time.

use std::collections::BTreeMap;

use evosdpa::choose;
use evosdpa_core::Problem;
use evosdpa_kernels::{Assignment, Kernel, ProblemFacts, Target, VariantId};
use serde::{Deserialize, Serialize};

use crate::Error;
use evosdpa_oracle::rng::Rng;

/// A value for every tunable.
pub type Point = BTreeMap<String, i64>;

/// The two layers of the traverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// Structure: tiles, warp specialisation, persistence.
    Macro,
    /// Detail: stages, producer warps, threads.
    Micro,
}

/// One tunable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dimension {
    /// Its name.
    pub name: String,
    /// Its layer.
    pub layer: Layer,
    /// Its values.
    pub values: Vec<i64>,
    /// Its value when nothing is tuned.
    pub default: i64,
    /// Why it is worth tuning.
    pub why: String,
}

/// All combinations of a kernel's tunables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// The kernel.
    pub kernel: String,
    /// Its tunables.
    pub dimensions: Vec<Dimension>,
}

/// Draws that may miss the constraints in a row before a space counts as empty.
const DRAWS_MAX: usize = 20_000;

impl Space {
    /// Of a CUDA kernel; defaults are those for the first problem.
    pub fn of_kernel(kernel: &Kernel, problem: &Problem, target: &Target) -> Result<Self, Error> {
        let facts = ProblemFacts::try_from(problem)?;
        let default = choose::variant(kernel, &facts, target, &Assignment::default())?.id.tunables;
        let layers =
            [(evosdpa_kernels::Layer::Macro, Layer::Macro), (evosdpa_kernels::Layer::Micro, Layer::Micro)];
        let dimensions = layers.into_iter().flat_map(|(of, layer)| {
            let default = &default;
            kernel.space().layer(of).map(move |tunable| Dimension {
                name: tunable.name.clone(),
                layer,
                values: tunable.values.clone(),
                default: default
                    .value(&tunable.name)
                    .unwrap_or_else(|| tunable.values.first().copied().unwrap_or(0)),
                why: tunable.why.clone().unwrap_or_default(),
            })
        });
        Self { kernel: kernel.name().to_owned(), dimensions: dimensions.collect() }.checked()
    }

    /// Of `cpu_flash`: its tiles, and how many threads share the work.
    pub fn of_cpu(problem: &Problem, threads: usize) -> Result<Self, Error> {
        let tiles = evosdpa_cpu::CpuOptions::default().tiles_for(problem).map_err(evosdpa::Error::from)?;
        let mut thread_counts: Vec<i64> =
            (0..).map(|power| 1_i64 << power).take_while(|count| *count < threads as i64).collect();
        thread_counts.push(threads as i64);
        let dimension = |name: &str, layer, values: &[i64], default: usize, why: &str| {
            let mut values = values.to_vec();
            if !values.contains(&(default as i64)) {
                values.push(default as i64);
            }
            values.sort_unstable();
            Dimension { name: name.to_owned(), layer, values, default: default as i64, why: why.to_owned() }
        };
        let dimensions = vec![
            dimension(
                "BLOCK_Q",
                Layer::Macro,
                &[16, 48, 96, 192, 384, 768],
                tiles.block_q,
                "query rows that share a packed block of keys: more rows pack less often, fewer keep more threads busy",
            ),
            dimension(
                "BLOCK_KV",
                Layer::Macro,
                &[16, 32, 48, 64, 96, 128, 192, 256, 512],
                tiles.block_kv,
                "keys per block: scores of a block must stay in the first-level cache",
            ),
            dimension(
                "THREADS",
                Layer::Micro,
                &thread_counts,
                threads,
                "small problems end before a second thread has woken up",
            ),
        ];
        Self { kernel: "cpu_flash".to_owned(), dimensions }.checked()
    }

    /// Refuses a space with nothing to choose.
    pub fn checked(self) -> Result<Self, Error> {
        if let Some(empty) = self.dimensions.iter().find(|dimension| dimension.values.is_empty()) {
            return Err(Error::Tune(format!(
                "{}: the tunable {} has no values to choose from",
                self.kernel, empty.name
            )));
        }
        if self.size() < 2 {
            return Err(Error::Tune(format!(
                "{} has nothing to tune: its manifest has no tunable with two values; add a [tunable.macro.NAME] or \
                 [tunable.micro.NAME] table",
                self.kernel
            )));
        }
        Ok(self)
    }

    /// How many points there are before constraints.
    pub fn size(&self) -> u128 {
        self.dimensions.iter().map(|dimension| dimension.values.len() as u128).fold(1, u128::saturating_mul)
    }

    /// The point that nothing was tuned at.
    pub fn default_point(&self) -> Point {
        self.dimensions.iter().map(|dimension| (dimension.name.clone(), dimension.default)).collect()
    }

    /// The name that devices know a point by: `cpu_flash[BLOCK_KV=64 BLOCK_Q=384]`.
    pub fn label(&self, point: &Point) -> String {
        label(&self.kernel, point)
    }

    /// Why something is not a point of this space.
    pub fn refuses(&self, point: &Point) -> Option<String> {
        for dimension in &self.dimensions {
            match point.get(&dimension.name) {
                None => return Some(format!("{} is missing", dimension.name)),
                Some(value) if !dimension.values.contains(value) => {
                    return Some(format!("{} is {value}, it can be {:?}", dimension.name, dimension.values));
                }
                Some(_) => {}
            }
        }
        let known = |name: &String| self.dimensions.iter().any(|dimension| dimension.name == *name);
        point.keys().find(|name| !known(name)).map(|name| format!("there is no tunable {name}"))
    }

    /// The `index`-th point, without making the others. Structure varies fastest and defaults come first, so the first
    /// points are all structures with default details: the seed grid.
    pub fn at(&self, mut index: u128) -> Point {
        let mut point = Point::new();
        let of = |layer| self.dimensions.iter().filter(move |dimension| dimension.layer == layer);
        for dimension in of(Layer::Macro).chain(of(Layer::Micro)) {
            let count = dimension.values.len() as u128;
            let place = (index % count) as usize;
            index /= count;
            let default_at =
                dimension.values.iter().position(|value| *value == dimension.default).unwrap_or(0);
            let value = match place {
                0 => default_at,
                place if place <= default_at => place - 1,
                place => place,
            };
            point.insert(dimension.name.clone(), dimension.values[value]);
        }
        point
    }

    /// A random point that `admissible` accepts; `None` when there seems to be none.
    pub fn draw(&self, rng: &mut Rng, admissible: &dyn Fn(&Point) -> bool) -> Option<Point> {
        (0..DRAWS_MAX).find_map(|_| {
            let point = self.drawn(rng);
            admissible(&point).then_some(point)
        })
    }

    fn drawn(&self, rng: &mut Rng) -> Point {
        let value =
            |dimension: &Dimension, rng: &mut Rng| dimension.values[rng.below(dimension.values.len())];
        self.dimensions.iter().map(|dimension| (dimension.name.clone(), value(dimension, rng))).collect()
    }

    /// The points one step away: each tunable moved to a neighbouring value.
    pub fn neighbours(&self, point: &Point) -> Vec<Point> {
        let mut all = Vec::new();
        for dimension in &self.dimensions {
            let Some(at) =
                point.get(&dimension.name).and_then(|value| dimension.values.iter().position(|v| v == value))
            else {
                continue;
            };
            for next in [at.checked_sub(1), Some(at + 1)]
                .into_iter()
                .flatten()
                .filter(|i| *i < dimension.values.len())
            {
                let mut moved = point.clone();
                moved.insert(dimension.name.clone(), dimension.values[next]);
                all.push(moved);
            }
        }
        all
    }

    /// A tunable by name.
    pub fn dimension(&self, name: &str) -> Option<&Dimension> {
        self.dimensions.iter().find(|dimension| dimension.name == name)
    }
}

/// A kernel with tunables as devices spell it.
pub fn label(kernel: &str, point: &Point) -> String {
    VariantId::new(kernel, point.iter().map(|(name, value)| (name.as_str(), *value))).to_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashSet;

    use super::*;

    pub(crate) fn space(sizes: &[(&str, Layer, usize)]) -> Space {
        let dimension = |(name, layer, count): &(&str, Layer, usize)| Dimension {
            name: (*name).to_owned(),
            layer: *layer,
            values: (0..*count as i64).collect(),
            default: 1,
            why: String::new(),
        };
        Space { kernel: "k".into(), dimensions: sizes.iter().map(dimension).collect() }
    }

    #[test]
    fn every_point_comes_once_and_structures_first() {
        let space = space(&[("A", Layer::Macro, 3), ("b", Layer::Micro, 4), ("C", Layer::Macro, 2)]);
        assert_eq!(space.size(), 24);
        let all: Vec<Point> = (0..24).map(|index| space.at(index)).collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), 24);
        assert_eq!(all[0], space.default_point());
        assert!(all[..6].iter().all(|point| point["b"] == 1), "{all:?}");
        assert_eq!(space.neighbours(&space.default_point()).len(), 2 + 2 + 1);
        assert_eq!(space.label(&all[0]), "k[A=1 C=1 b=1]");
    }

    #[test]
    fn a_space_of_a_billion_points_is_no_trouble_and_an_empty_one_is_refused() {
        let nine = ["A", "B", "C", "D", "E", "F", "G", "H", "I"].map(|name| (name, Layer::Macro, 10));
        let space_9 = space(&nine);
        assert_eq!(space_9.size(), 1_000_000_000);
        assert_eq!(space_9.at(987_654_321).len(), 9);
        let mut rng = Rng::new(1);
        assert!(space_9.draw(&mut rng, &|point| point["A"] == 3).is_some());
        assert!(space_9.draw(&mut rng, &|_| false).is_none());
        let message = space(&[("A", Layer::Macro, 1)]).checked().unwrap_err().to_string();
        assert!(message.contains("nothing to tune"), "{message}");
        assert!(
            space(&[("A", Layer::Macro, 0)]).checked().unwrap_err().to_string().contains("A has no values")
        );
    }
}
