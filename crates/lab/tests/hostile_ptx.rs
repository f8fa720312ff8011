//! The PTX of real kernels, cut up and put together wrongly: refused, or run to its end; never a panic, never for ever.
//!
//! `cargo xtask fuzz` does more of the same for longer.

use std::{
    panic,
    time::{Duration, Instant},
};

use evosdpa_core::{DType, Problem};
use evosdpa_cuda::Builder;
use evosdpa_kernels::{Arch, ProblemFacts, Registry, Target, Variant};
use evosdpa_oracle::rng::Rng;
use ptxsan::{Arg, Device, Launch, Module, Schedule};

/// Changed modules of each kernel.
const CHANGES: u64 = 120;
/// Warp instructions each may execute.
const BUDGET: u64 = 3_000;

fn variant(kernel: &str, dtype: DType) -> Variant {
    let problem = Problem::new("tiny:causal".parse().unwrap(), dtype).unwrap().with_lse(true);
    let facts = ProblemFacts::try_from(&problem).unwrap();
    let registry = Registry::embedded().unwrap();
    registry.kernel(kernel).unwrap().variant(&facts, &Target::nominal(Arch::Sm89), []).unwrap()
}

/// One to four changes: lines dropped, doubled, swapped or mixed; words taken from elsewhere; numbers made absurd.
fn changed(lines: &[&str], random: &mut Rng) -> String {
    const NUMBERS: [&str; 8] =
        ["0", "-1", "33", "4294967295", "18446744073709551615", "0f7F800000", "999999999", "7"];
    let mut text: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
    // The instructions are what is interesting, and they are not at the start.
    let body = text.len() / 8;
    for _ in 0..=random.below(4) {
        let (a, b) = (body + random.below(text.len() - body), body + random.below(text.len() - body));
        match random.below(7) {
            0 => drop(text.remove(a)),
            1 => text.swap(a, b),
            2 => text[a] = text[b].clone(),
            3 => {
                let cut = random.below(text[a].len() + 1);
                if text[a].is_char_boundary(cut) {
                    text[a].truncate(cut);
                }
            }
            4 => {
                let digits: Vec<usize> =
                    text[a].char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(i, _)| i).collect();
                if !digits.is_empty() {
                    let at = digits[random.below(digits.len())];
                    text[a].replace_range(at..=at, NUMBERS[random.below(NUMBERS.len())]);
                }
            }
            5 => {
                let words: Vec<&str> = text[b].split_whitespace().collect();
                if let Some(word) = words.get(random.below(words.len())) {
                    let (first, rest) = text[a].split_once(char::is_whitespace).unwrap_or((&text[a], ""));
                    text[a] = if random.below(2) == 0 {
                        format!("{word} {rest}")
                    } else {
                        format!("{first} {word}")
                    };
                }
            }
            _ => text[a] = text[a].replace(".shared", ".global").replace("%rd", "%r").replace(".u32", ".f64"),
        }
    }
    text.join("\n")
}

/// Whether the text was a module; if so it is launched.
fn survives(text: &str, like: &Variant, schedule: Schedule) -> bool {
    let Ok(module) = Module::parse(text) else { return false };
    let entries: Vec<String> = module.entries().map(str::to_owned).collect();
    for entry in entries {
        let mut device = Device::new();
        let id = device.load(&module).unwrap();
        let buffer = device.upload("buffer", &[0x3c; 8192]).unwrap();
        let sizes = module.parameters(&entry).unwrap();
        // Every field of the structure is an address, and every size too.
        let bytes = |n: usize| buffer.address().to_le_bytes().into_iter().cycle().take(n).collect();
        let args = sizes.into_iter().map(|n| Arg::Bytes(bytes(n))).collect();
        let mut launch =
            Launch::new(&entry, [2, 1, 1], like.launch.block, like.launch.dynamic_smem_bytes, args)
                .with_schedule(schedule, 1);
        launch.options.instruction_budget = BUDGET;
        // A launch that makes no sense is refused, which is as good.
        if let Ok(outcome) = device.launch(id, &launch) {
            assert!(outcome.warp_instructions <= 2 * BUDGET, "{} instructions", outcome.warp_instructions);
        }
    }
    true
}

#[test]
fn spoiled_kernels_do_no_harm() {
    let builder = Builder::new().unwrap();
    let (mut read, mut tried) = (0, 0);
    let mut slowest = Duration::ZERO;
    for (kernel, dtype) in
        [("sdpa_v2c", DType::F16), ("sdpa_fp8_stage_c", DType::E4M3), ("ampere_fwd", DType::BF16)]
    {
        let variant = variant(kernel, dtype);
        let artifact = builder.ptx(&variant).unwrap();
        let lines: Vec<&str> = artifact.ptx().lines().collect();
        assert!(survives(artifact.ptx(), &variant, Schedule::RoundRobin), "{kernel} itself");
        for seed in 0..CHANGES {
            let mut random = Rng::of_series(17, seed);
            let text = changed(&lines, &mut random);
            let schedule = Schedule::ALL[seed as usize % Schedule::ALL.len()];
            let start = Instant::now();
            let survived = panic::catch_unwind(|| survives(&text, &variant, schedule));
            read += usize::from(survived.unwrap_or_else(|_| panic!("{kernel}, change {seed}: a panic")));
            tried += 1;
            slowest = slowest.max(start.elapsed());
        }
    }
    // If nearly everything were refused, nothing would have been run.
    assert!(read * 4 > tried, "only {read} of {tried} were read");
    // Each alone: all of them together take as long as other work on the machine lets them.
    assert!(slowest < Duration::from_secs(60), "something took too long: {slowest:?}");
}
