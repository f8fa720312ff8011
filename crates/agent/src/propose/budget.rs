//! Tokens and money.

use std::str::FromStr;

use anyhow::{Context, ensure};

use crate::llm::Turn;

/// Prices of a million tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price {
    input: f64,
    output: f64,
}

impl FromStr for Price {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let price = |part: &str| part.trim().parse::<f64>().ok().filter(|p| p.is_finite() && *p >= 0.0);
        let both = text.split_once('/').and_then(|(input, output)| price(input).zip(price(output)));
        let (input, output) = both
            .ok_or("two prices of a million tokens are needed, of questions and of answers, such as 3/15")?;
        Ok(Self { input, output })
    }
}

/// What was spent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    pub(crate) input_tokens: u64,
    pub(crate) output_tokens: u64,
}

/// What may be spent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    tokens: Option<u64>,
    cost: Option<f64>,
    price: Option<Price>,
}

/// An answer that cannot be this long is not asked for.
const ANSWER_TOKENS_MIN: u64 = 256;

impl Budget {
    pub(crate) fn new(tokens: Option<u64>, cost: Option<f64>, price: Option<Price>) -> anyhow::Result<Self> {
        if let Some(cost) = cost {
            ensure!(cost.is_finite() && cost > 0.0, "--llm-cost: {cost} is no amount of money");
            price.context("--llm-cost needs --llm-price: what a million tokens cost")?;
        }
        Ok(Self { tokens, cost, price })
    }

    /// What so many tokens cost.
    pub(crate) fn cost(&self, input_tokens: u64, output_tokens: u64) -> Option<f64> {
        let price = self.price?;
        Some((input_tokens as f64 * price.input + output_tokens as f64 * price.output) / 1e6)
    }

    /// How long the next answer may be, at most `wanted` tokens; an error says what is spent.
    pub(crate) fn allows(&self, spent: Spent, question: u64, wanted: u64) -> Result<u64, String> {
        let Spent { input_tokens, output_tokens } = spent;
        let mut allowed = wanted;
        if let Some(budget) = self.tokens {
            let used = input_tokens + output_tokens;
            allowed = allowed.min(budget.saturating_sub(used + question));
            if allowed < ANSWER_TOKENS_MIN.min(wanted) {
                return Err(format!(
                    "the budget of {budget} tokens is spent: {used} are used, and the next question is some {question}"
                ));
            }
        }
        if let (Some(budget), Some(price)) = (self.cost, self.price) {
            let used = self.cost(input_tokens, output_tokens).unwrap_or(0.0);
            let left = budget - used - question as f64 * price.input / 1e6;
            let affordable = if price.output > 0.0 { left.max(0.0) * 1e6 / price.output } else { f64::MAX };
            allowed = allowed.min(affordable as u64);
            if left < 0.0 || allowed < ANSWER_TOKENS_MIN.min(wanted) {
                return Err(format!("the budget of {budget} is spent: {used:.4} are used"));
            }
        }
        Ok(allowed)
    }
}

/// Tokens of a text where the service did not count them: one for three bytes, which is more than code usually has.
pub(crate) fn tokens_of(text: &str) -> u64 {
    (text.len() as u64).div_ceil(3)
}

/// Tokens of a question.
pub(crate) fn estimate(turns: &[Turn]) -> u64 {
    turns.iter().map(|turn| tokens_of(&turn.text) + 8).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_shorten_the_last_answers_and_then_end() {
        let spent = Spent { input_tokens: 1000, output_tokens: 1000 };
        let tokens = Budget::new(Some(4000), None, None).unwrap();
        assert_eq!(tokens.allows(spent, 500, 8000), Ok(1500));
        assert_eq!(tokens.allows(spent, 500, 100), Ok(100));
        assert!(
            tokens.allows(spent, 1900, 8000).unwrap_err().contains("budget of 4000 tokens is spent: 2000")
        );
        // 3 and 15 for a million: 0.018 are used, and of 0.05 another 0.03 buy 1000 questions and 1900 answers.
        let money = Budget::new(None, Some(0.05), Some("3/15".parse().unwrap())).unwrap();
        assert_eq!(money.cost(1000, 1000), Some(0.018));
        assert_eq!(money.allows(spent, 1000, 8000), Ok(1933));
        assert!(money.allows(spent, 10_000, 8000).is_err());
        let free = Budget::new(None, Some(1.0), Some("0/0".parse().unwrap())).unwrap();
        assert_eq!(free.allows(spent, 10_000, 8000), Ok(8000));
        assert_eq!(Budget::new(None, None, None).unwrap().allows(spent, 1 << 40, 8000), Ok(8000));
        for bad in ["3", "3/x", "-1/2", "nan/1", ""] {
            assert!(bad.parse::<Price>().is_err(), "{bad}");
        }
    }
}
