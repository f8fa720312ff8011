//! Plans already made, so that a repeated call does not plan again.

use std::cell::RefCell;

use evosdpa::{Attention, Options, Problem};

use crate::Error;

/// Plans kept per thread. A model repeats few problems; what falls out is planned again.
const KEPT: usize = 16;

thread_local! {
    /// Most recently used first, with the number of threads each was planned for.
    static PLANS: RefCell<Vec<(usize, Attention)>> = const { RefCell::new(Vec::new()) };
}

/// The plan for a problem on this many threads; 0 for as many as the machine has.
pub(crate) fn cpu_plan(problem: Problem, threads: usize) -> Result<Attention, Error> {
    PLANS.with_borrow_mut(|plans| {
        let known = plans.iter().position(|(count, plan)| *count == threads && *plan.problem() == problem);
        if let Some(index) = known {
            plans[..=index].rotate_right(1);
            return Ok(plans[0].1);
        }
        let options = Options { threads: (threads > 0).then_some(threads), ..Options::default() };
        let plan = Attention::plan_with(problem, options)?;
        plans.truncate(KEPT - 1);
        plans.insert(0, (threads, plan));
        Ok(plan)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use evosdpa::DType;

    #[test]
    fn plans_are_told_apart_by_problem_and_threads() {
        for round in 0..3 {
            for seq in 1..=20 {
                let problem = Problem::new(format!("b1h2s{seq}d8").parse().unwrap(), DType::F32).unwrap();
                let plan = cpu_plan(problem, seq % 3).unwrap();
                assert_eq!(*plan.problem(), problem, "round {round}");
            }
        }
        PLANS.with_borrow(|plans| assert_eq!(plans.len(), KEPT));
    }
}
