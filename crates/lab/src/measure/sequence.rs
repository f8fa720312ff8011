//! The sequential test of duels: valid at every block, however often it is looked at.
//!
//! The data are log-ratios `x` of paired blocks whose order was drawn by a coin (see [`super::duel`]). If the candidate's
//! true effect is a factor `e^θ`, then `x − θ` is as likely to be positive as negative *given its size and everything that
//! came before*: swapping the two labels of a block would have changed its sign and nothing else. That holds for any noise,
//! however autocorrelated, heavy-tailed or drifting, because the coin is ours.
//!
//! For such a sequence and any fixed `λ` and stake `c` up to one, the product of `1 + c·tanh(λ(x − θ))` is a non-negative
//! martingale that starts at one: `tanh` is odd, so the expectation of each factor is one (with a stake of one, the symmetric
//! case of de la Peña's inequality, 1999). By Ville's inequality it ever exceeds `1/a` with probability at most `a`. So does
//! the mean of several such products, which spares choosing one: small effects need a large `λ`, and a smaller stake survives
//! blocks that something else disturbed. Both directions are watched, each with `a = α/2`.
//!
//! The values `θ` that have not been excluded form a **confidence sequence**: with probability `1 − α` it holds the true
//! effect at *every* moment at once, so stopping when the answer is clear costs nothing.

/// How large an effect, in log-ratio, each product is most sensitive to: from half a per mille to a factor of 1.6.
const SCALES: [f64; 8] = [0.0005, 0.0015, 0.004, 0.01, 0.03, 0.08, 0.2, 0.5];

/// What each product stakes on a block. Staking everything is quickest on a quiet machine; with less, a block that went the
/// wrong way costs no more than it should.
const STAKES: [f64; 2] = [0.6, 1.0];
const PRODUCTS: usize = SCALES.len() * STAKES.len();

/// Evidence that the effect is beyond a value, on one side of it.
#[derive(Clone, Debug)]
pub struct Evidence {
    beyond: f64,
    /// 1 for "above", −1 for "below".
    side: f64,
    logs: [f64; PRODUCTS],
}

impl Evidence {
    /// That the effect is above this value.
    pub fn above(value: f64) -> Self {
        Self { beyond: value, side: 1.0, logs: [0.0; PRODUCTS] }
    }

    /// That the effect is below this value.
    pub fn below(value: f64) -> Self {
        Self { beyond: value, side: -1.0, logs: [0.0; PRODUCTS] }
    }

    /// Takes in one block's log-ratio.
    pub fn add(&mut self, x: f64) {
        for (i, log) in self.logs.iter_mut().enumerate() {
            let (scale, stake) = (SCALES[i / STAKES.len()], STAKES[i % STAKES.len()]);
            let z = self.side * (x - self.beyond) / scale;
            *log += if stake < 1.0 { (stake * z.tanh()).ln_1p() } else { log_one_plus_tanh(z) };
        }
    }

    /// Natural logarithm of the evidence: of the mean over the products.
    pub fn log(&self) -> f64 {
        let most = self.logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = self.logs.iter().map(|log| (log - most).exp()).sum();
        most + (sum / PRODUCTS as f64).ln()
    }

    /// Whether it suffices at a two-sided level `alpha`.
    pub fn suffices(&self, alpha: f64) -> bool {
        self.log() >= (2.0 / alpha).ln()
    }
}

/// `ln(1 + tanh z) = ln 2 − ln(1 + e^(−2z))`, without overflow at either end.
fn log_one_plus_tanh(z: f64) -> f64 {
    let t = -2.0 * z;
    let softplus = if t > 0.0 { t + (-t).exp().ln_1p() } else { t.exp().ln_1p() };
    std::f64::consts::LN_2 - softplus
}

/// The effects not excluded by these log-ratios: the confidence sequence at this moment.
pub fn interval(logs: &[f64], alpha: f64) -> [f64; 2] {
    let bound = |side: f64| {
        let excluded = |value: f64| {
            let mut evidence = Evidence { beyond: value, side, logs: [0.0; PRODUCTS] };
            logs.iter().for_each(|x| evidence.add(*x));
            evidence.suffices(alpha)
        };
        // Evidence falls as the value moves towards `side`, so the border is found by halving. `far` is excluded if
        // anything is, `near` is not.
        let reach = logs.iter().fold(0.0, |most: f64, x| most.max(x.abs())) + 10.0;
        let (mut far, mut near) = (-side * reach, side * reach);
        if !excluded(far) {
            return -side * f64::INFINITY;
        }
        for _ in 0..60 {
            let middle = 0.5 * (far + near);
            if excluded(middle) { far = middle } else { near = middle }
        }
        far
    };
    [bound(1.0), bound(-1.0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa_oracle::rng::Rng;

    #[test]
    fn the_evidence_of_a_fair_coin_is_worth_nothing_on_average() {
        // Exactly: the mean of the evidence over all 2^10 sign patterns of fixed sizes is one.
        let sizes: Vec<f64> = (1..=10).map(|i| 0.003 * i as f64).collect();
        let mean: f64 = (0..1 << 10)
            .map(|signs: u32| {
                let mut evidence = Evidence::above(0.0);
                for (i, size) in sizes.iter().enumerate() {
                    evidence.add(if signs >> i & 1 == 1 { *size } else { -size });
                }
                evidence.log().exp() / 1024.0
            })
            .sum();
        assert!((mean - 1.0).abs() < 1e-9, "{mean}");
    }

    #[test]
    fn intervals_hold_the_effect_at_every_moment() {
        let alpha = 0.1;
        let missed = (0..300)
            .filter(|&run| {
                let mut rng = Rng::of_series(11, run);
                let logs: Vec<f64> = (0..60).map(|_| 0.02 + 0.01 * rng.normal()).collect();
                (5..=60).step_by(5).any(|n| {
                    let [low, high] = interval(&logs[..n], alpha);
                    !(low..=high).contains(&0.02)
                })
            })
            .count();
        assert!(missed <= 30, "{missed} of 300 at 10 %");
    }

    /// One block in six goes far the wrong way: the others still decide.
    #[test]
    fn a_few_disturbed_blocks_do_not_hide_an_effect() {
        let logs: Vec<f64> = (0..48).map(|n| if n % 6 == 5 { -1.5 } else { 0.1 }).collect();
        let mut evidence = Evidence::above(0.0);
        logs.iter().for_each(|x| evidence.add(*x));
        assert!(evidence.suffices(0.01), "{}", evidence.log());
    }

    #[test]
    fn a_clear_effect_is_found_and_bounded() {
        let mut rng = Rng::new(3);
        let logs: Vec<f64> = (0..40).map(|_| 0.1 + 0.01 * rng.normal()).collect();
        let [low, high] = interval(&logs, 0.01);
        assert!(low > 0.07 && high < 0.13 && low < 0.1 && high > 0.1, "{low} {high}");
        assert_eq!(interval(&logs[..3], 0.01), [f64::NEG_INFINITY, f64::INFINITY]);
    }
}
