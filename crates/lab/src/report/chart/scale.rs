//! Axis scales: from values to coordinates.

/// An axis: a range of numbers laid over a range of places.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Scale {
    /// From zero (or below, if a number is) to a little past the largest.
    pub(crate) fn linear(values: impl Iterator<Item = f64>, [from, to]: [f64; 2]) -> Self {
        let (low, high) = extent(values).unwrap_or((0.0, 1.0));
        let high = if high > low.min(0.0) { high * 1.05 } else { low + 1.0 };
        Self { low: low.min(0.0), high, from, to, logarithmic: false }
    }

    /// Between two numbers and a little more.
    pub(crate) fn between(low: f64, high: f64, [from, to]: [f64; 2]) -> Self {
        let room = ((high - low) * 0.08).max(1e-9 + high.abs() * 0.01);
        Self { low: low - room, high: high + room, from, to, logarithmic: false }
    }

    /// Logarithmic, with a little room on both sides. Numbers that are not above zero have no place on it.
    pub(crate) fn log(values: impl Iterator<Item = f64>, [from, to]: [f64; 2]) -> Self {
        let (low, high) = extent(values.filter(|x| *x > 0.0)).unwrap_or((1.0, 10.0));
        Self { low: low / 1.25, high: high * 1.25, from, to, logarithmic: true }
    }

    /// The place of a number; what lies outside is put on the edge.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value.max(self.low).ln() - self.low.ln()) / (self.high.ln() - self.low.ln())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Round numbers to put on the axis, about `about` of them.
    pub(crate) fn ticks(&self, about: usize) -> Vec<f64> {
        if self.logarithmic { self.log_ticks(about) } else { self.linear_ticks(about) }
    }

    fn linear_ticks(&self, about: usize) -> Vec<f64> {
        let rough = (self.high - self.low) / about.max(1) as f64;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * magnitude).find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..first + 4 * about as i64 + 4)
            .map(|i| i as f64 * step)
            .take_while(|x| *x <= self.high)
            .collect()
    }

    fn log_ticks(&self, about: usize) -> Vec<f64> {
        let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let with = |steps: &'static [f64]| -> Vec<f64> {
            let all = decades.clone().flat_map(|d| steps.iter().map(move |step| step * 10f64.powi(d)));
            all.filter(|x| (self.low..=self.high).contains(x)).collect()
        };
        for steps in [&[1.0][..], &[1.0, 3.0], &[1.0, 2.0, 5.0], &[1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0]] {
            let ticks = with(steps);
            if ticks.len() >= about.min(4) {
                return thinned(ticks, about);
            }
        }
        with(&[0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0])
    }
}

/// Every n-th, so that they do not run into each other.
fn thinned(ticks: Vec<f64>, about: usize) -> Vec<f64> {
    let step = ticks.len().div_ceil(2 * about.max(1)).max(1);
    ticks.into_iter().step_by(step).collect()
}

fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|x| x.is_finite()).fold(None, |extent, x| {
        let (low, high) = extent.unwrap_or((x, x));
        Some((low.min(x), high.max(x)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_keep_order_and_stay_inside() {
        for scale in [
            Scale::linear([3.0, 80.0].into_iter(), [100.0, 500.0]),
            Scale::log([3.0, 80.0].into_iter(), [100.0, 500.0]),
        ] {
            assert!(scale.place(3.0) < scale.place(4.0) && scale.place(79.0) < scale.place(80.0));
            for value in [-1.0, 0.0, 3.0, 1e9] {
                assert!((100.0..=500.0).contains(&scale.place(value)), "{scale:?} {value}");
            }
            let ticks = scale.ticks(5);
            assert!((3..=11).contains(&ticks.len()), "{ticks:?}");
            assert!(ticks.windows(2).all(|pair| pair[0] < pair[1]), "{ticks:?}");
        }
    }

    #[test]
    fn nothing_and_one_number_still_have_an_axis() {
        for values in [&[][..], &[5.0], &[0.0], &[f64::NAN]] {
            for scale in [
                Scale::linear(values.iter().copied(), [0.0, 10.0]),
                Scale::log(values.iter().copied(), [0.0, 10.0]),
            ] {
                assert!(scale.place(1.0).is_finite() && !scale.ticks(4).is_empty(), "{scale:?}");
            }
        }
    }
}
