//! What judging a problem costs, part by part: `cargo run --release -p evosdpa-oracle --example cost -- b1h8s8192d128 bf16`.

use std::time::Instant;

use evosdpa_core::Problem;
use evosdpa_oracle::{
    Case, Control, elements,
    inputs::{Family, Inputs},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let shape = args.next().unwrap_or_else(|| "b1h8s8192d128".to_owned());
    let dtype = args.next().unwrap_or_else(|| "bf16".to_owned());
    let problem = Problem::new(shape.parse()?, dtype.parse()?)?;
    let clock = |what: &str, since: Instant| println!("{what:<28}{:>10.2} s", since.elapsed().as_secs_f64());

    let start = Instant::now();
    drop(Inputs::timed(&problem, 1));
    clock("inputs", start);
    let start = Instant::now();
    let case = Case::in_bounded_time(problem, Family::Normal, 1, None);
    clock("case (inputs, answer, naive)", start);
    let reference = &case.truth.reference;
    let [_, heads, seq, dim] = problem.o_shape();
    let start = Instant::now();
    let right =
        elements::from_fn(problem.o_shape(), problem.output_dtype(), problem.layout(), |[b, h, s, d]| {
            reference.o[((b * heads + h) * seq + s) * dim + d]
        });
    clock("output of the answer", start);
    let start = Instant::now();
    let judgement = case.judge(&right.view(), None);
    clock("judging one output", start);
    println!("  {}", judgement.summary());
    for control in Control::of(&problem) {
        let start = Instant::now();
        drop(case.control_output(control));
        clock(&format!("control {control}"), start);
    }
    let start = Instant::now();
    assert!(case.broken_controls().is_empty());
    clock("all controls, judged", start);
    let start = Instant::now();
    drop(Case::adversarial(problem, 1));
    clock("an adversarial case", start);
    Ok(())
}
