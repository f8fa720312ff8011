//! A set of times and what is said of it. Outliers are counted, never dropped.

use serde::Serialize;

use super::Resampler;

/// How many times a set is resampled for its interval.
pub(crate) const RESAMPLES: usize = 1000;

/// What a set of samples looks like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of samples.
    pub count: usize,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 95 % bootstrap interval of the median.
    pub p50_interval_us: [f64; 2],
    /// Samples beyond Tukey's fences (1.5 interquartile ranges outside the quartiles). They are part of all numbers.
    pub outliers: usize,
}

impl Summary {
    /// Describes samples; `None` when there are none.
    pub fn of(samples_us: &[f64]) -> Option<Self> {
        if samples_us.is_empty() {
            return None;
        }
        let sorted = sorted(samples_us);
        let (q1, q3) = (quantile(&sorted, 0.25), quantile(&sorted, 0.75));
        let fence = 1.5 * (q3 - q1);
        let inside = q1 - fence..=q3 + fence;
        Some(Self {
            count: sorted.len(),
            p50_us: quantile(&sorted, 0.5),
            p90_us: quantile(&sorted, 0.9),
            p99_us: quantile(&sorted, 0.99),
            p50_interval_us: interval(&resampled(&mut Resampler::new(), samples_us)),
            outliers: sorted.iter().filter(|x| !inside.contains(*x)).count(),
        })
    }
}

/// The median of a set that is not empty.
pub fn median(samples: &[f64]) -> f64 {
    quantile(&sorted(samples), 0.5)
}

/// A quantile of a set that is not empty.
pub(crate) fn quantile_of(samples: &[f64], p: f64) -> f64 {
    quantile(&sorted(samples), p)
}

/// Medians of `RESAMPLES` sets drawn with replacement (Efron's bootstrap).
pub(crate) fn resampled(resampler: &mut Resampler, samples: &[f64]) -> Vec<f64> {
    let mut drawn = vec![0.0; samples.len()];
    let mut draw = || {
        drawn.iter_mut().for_each(|x| *x = samples[resampler.below(samples.len())]);
        median(&drawn)
    };
    (0..RESAMPLES).map(|_| draw()).collect()
}

/// The middle 95 % of a set of estimates.
pub(crate) fn interval(estimates: &[f64]) -> [f64; 2] {
    let sorted = sorted(estimates);
    [quantile(&sorted, 0.025), quantile(&sorted, 0.975)]
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Linear interpolation between order statistics, as NumPy's default and Hyndman and Fan's type 7.
fn quantile(sorted: &[f64], p: f64) -> f64 {
    let position = p * (sorted.len() - 1) as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (position - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_like_numpy() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((summary.p50_us, summary.p90_us), (2.5, 3.7));
        assert_eq!(Summary::of(&[7.0]).unwrap().p99_us, 7.0);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn outliers_are_counted_and_kept() {
        let mut samples = vec![10.0; 50];
        samples.iter_mut().enumerate().for_each(|(i, x)| *x += i as f64 * 0.01);
        samples.push(1000.0);
        let summary = Summary::of(&samples).unwrap();
        assert_eq!((summary.outliers, summary.count), (1, 51));
        assert!(summary.p99_us > 400.0);
    }

    /// The interval must hold the true median about 95 % of the time.
    #[test]
    fn intervals_cover_the_median() {
        let mut draw = Resampler::new();
        let mut covered = 0;
        for _ in 0..400 {
            // Exponential times, true median ln 2.
            let samples: Vec<f64> =
                (0..60).map(|_| -((draw.below(1 << 20) + 1) as f64 / (1 << 20) as f64).ln()).collect();
            let [low, high] = Summary::of(&samples).unwrap().p50_interval_us;
            covered += usize::from((low..=high).contains(&std::f64::consts::LN_2));
        }
        assert!((365..=395).contains(&covered), "{covered} of 400");
    }
}
